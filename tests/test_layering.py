"""The rules of the house that can be read from its source: which room may import which, and who may do what."""

import ast
import configparser
import graphlib
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

import sanctuary_trainer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "sanctuary_trainer"

# From top to bottom, with the number of lines that each module is meant to have. Imports point only up.
ROOMS = {
    "errors": 80,
    "signals": 60,
    "settings": 200,
    "foreign": 80,
    "image_files": 80,
    "batch": 150,
    "out_of_memory": 120,
    "state": 60,
    "clock": 120,
    "advice": 60,
    "diagnosis": 275,
    "balance": 75,
    "history": 95,
    "callback": 300,
    "devices": 300,
    "asked": 60,
    "plain": 60,
    "metrics": 200,
    "metric_states": 160,
    "series": 120,
    "pending": 100,
    "records": 250,
    "owners": 80,
    "seeding": 150,
    "rewind": 150,
    "reading": 450,
    "balanced": 110,
    "iterated": 100,
    "streams": 300,
    "data": 350,
    "checkpointing": 240,
    "checkpoint_folder": 160,
    "weights": 120,
    "finding": 160,
    "task": 250,
    "plan": 150,
    "configured": 150,
    "watched": 60,
    "scheduler_state": 120,
    "optimizer_state": 190,
    "optimizer_memory": 130,
    "optimization": 160,
    "hparams": 60,
    "board_layout": 90,
    "event_file": 110,
    "image_grid": 60,
    "tracking": 170,
    "draws": 100,
    "dispatch": 150,
    "arrivals": 60,
    "executor": 160,
    "replay": 150,
    "pieces": 130,
    "learned": 120,
    "recovery": 340,
    "feed": 120,
    "telling": 120,
    "run": 200,
    "saving": 185,
    "resuming": 180,
    "loops": 150,
    "building": 250,
    "trainer": 300,
    "__init__": 80,
    "callbacks": 200,
    "tasks": 150,
    "cli": 120,
    "__main__": 20,
}
# A module may be half as long again as it is meant to be; more needs a reason here.
LONGER: dict[str, tuple[int, str]] = {
    "loops.predict": (240, "also the predictions on disk: written batch by batch, read as a lazy sequence"),
    "batch": (395, "five readings of one kind of tree, each rule for lists and tuples with its reason"),
    "records": (400, "every rule of logging, each with its error"),
    "executor": (350, "also tells waits apart, follows thawed layers, reads a window late, and rehearses DDP's layout"),
    "run": (510, "the documented face of a run: more docstring than code"),
    "trainer": (460, "its five signatures are written out, and refuse the names of other trainers"),
    "task": (410, "what a user overrides, documented method by method, and a task's weights on disk"),
}

ACCELERATE_IN = {"devices", "data", "tracking"}
# Where an exception of any kind may end, and who is told of it.
CATCH_ALL_IN = {
    "asked": "the other ranks, when they agree on what hooks asked for",
    "cli.main": "the person at the terminal",
    "data": "the ranks that wait for their share from rank 0",
    "devices": "the ranks that wait for the first one of their machine",
    "loops.boundaries": "the other ranks, before a checkpoint is written",
    "loops.evaluate": "the other ranks, when they agree on the round",
}
NO_HOOKS = {"saves_at", "state_dict", "load_state_dict"}  # methods of a callback that answer, and have no moment
FORBIDDEN_NAMES = {"utils", "util", "helpers", "misc", "common", "manager", "handler", "connector"}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name without the package's, parsed; `callbacks` from where it lies."""
    paths = {path: path.relative_to(ROOT / PACKAGE) for path in (ROOT / PACKAGE).rglob("*.py")}
    paths |= {path: path.relative_to(ROOT) for path in (ROOT / "callbacks").rglob("*.py")}
    found = {}
    for path, relative in paths.items():
        parts = [*relative.parts[:-1], relative.stem]
        if len(parts) > 1 and parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = ast.parse(path.read_text(), str(path))
    return dict(sorted(found.items()))


def source(name: str) -> Path:
    path = ROOT.joinpath(*([] if name.startswith("callbacks") else [PACKAGE]), *name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def room(name: str) -> str:
    return name.split(".")[0]


def is_type_checking(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walk_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            for other in child.orelse:
                yield from walk_runtime(other)
        else:
            yield from walk_runtime(child)


def imported(name: str) -> set[str]:
    """What a module imports at run time, in functions too: `a.b` for `import a.b` and for `from a import b`."""
    found = set()
    for node in walk_runtime(modules()[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            here = [PACKAGE, *name.removesuffix("__init__").split(".")][: -node.level or None] if node.level else []
            found |= {".".join([*here, *filter(None, [node.module]), alias.name]) for alias in node.names}
    return found


def imports_of_ours(name: str) -> set[str]:
    """The modules of the package that a module imports at run time."""
    found = set()
    for full in imported(name):
        if full.split(".")[0] != PACKAGE:
            continue
        target = full.removeprefix(PACKAGE).removeprefix(".")
        while target and target not in modules():
            target = target.rpartition(".")[0]
        found.add(target or "__init__")
    return found - {name}


def test_every_room_of_the_house_is_there_and_no_other() -> None:
    found = {room(name) for name in modules()}
    assert found - ROOMS.keys() == set(), "give a new module its place in ROOMS"
    assert ROOMS.keys() - found == set(), "missing"


def test_imports_point_only_up() -> None:
    order = list(ROOMS)
    down = [
        f"{name} imports {target}"
        for name in modules()
        for target in imports_of_ours(name)
        if order.index(room(target)) > order.index(room(name))
    ]
    assert down == []


def test_there_is_no_cycle() -> None:
    # A package's __init__ names its own modules; what they import of each other is what may not turn in a circle.
    graph = {name: imports_of_ours(name) for name in modules()}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_the_command_line_is_imported_by_nobody() -> None:
    importers = {name for name in modules() for target in imports_of_ours(name) if room(target) == "cli"}
    assert {room(name) for name in importers} <= {"cli", "__main__"}


def test_accelerate_is_imported_in_three_rooms() -> None:
    assert {name for name in modules() if any(full.split(".")[0] == "accelerate" for full in imported(name))} <= (
        ACCELERATE_IN
    )


def test_callbacks_use_public_names_alone() -> None:
    wrong = []
    for name, tree in modules().items():
        if room(name) != "callbacks":
            continue
        public = {f"{PACKAGE}.{exported}" for exported in [*sanctuary_trainer.__all__, "__version__"]}
        for full in imported(name):
            if full.split(".")[0] == PACKAGE and full not in public and not full.startswith(f"{PACKAGE}.callbacks."):
                wrong.append(f"{name} imports {full}")
        wrong += [f"{name}, line {line}: {text}" for line, text in private_attributes(tree)]
    assert wrong == []


def private_attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Uses of `_name` on anything but the object itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls"):
                yield node.lineno, f"{owner}.{node.attr}"


def test_public_names_are_exactly_what_is_there() -> None:
    tree = modules()["__init__"]
    seen_by_type_checkers = {
        alias.name
        for block in tree.body
        if is_type_checking(block)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = sanctuary_trainer.__all__
    assert names == sorted(set(names))
    assert seen_by_type_checkers == set(names)
    assert sanctuary_trainer._ROOM_OF.keys() == set(names)
    assert set(dir(sanctuary_trainer)) == {*names, "__version__"}
    for name in names:
        assert getattr(getattr(sanctuary_trainer, name), "__name__", name) == name  # a constant has none
    with pytest.raises(AttributeError, match="no attribute 'Trainner'"):
        sanctuary_trainer.Trainner  # noqa: B018


def test_subpackages_in_setup_cfg_are_the_folders() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    # The link is part of the claim: tools that read the checkout find the callbacks through it.
    folders = [PACKAGE, *(f"{PACKAGE}.{path.parent.name}" for path in (ROOT / PACKAGE).glob("*/__init__.py"))]
    assert sorted(listed) == sorted(folders)
    link = ROOT / PACKAGE / "callbacks"
    assert link.is_symlink() and link.readlink() == Path("../callbacks")


def test_modules_keep_their_size() -> None:
    too_long = {}
    for name in modules():
        length = len(source(name).read_text().splitlines())
        allowed, _reason = LONGER.get(name, (ROOMS[room(name)] * 1.5, ""))
        if length > allowed:
            too_long[name] = f"{length} lines, {allowed:g} allowed"
    assert too_long == {}
    assert LONGER.keys() <= modules().keys()


def test_the_fit_loop_fits_two_screens() -> None:
    assert len(source("loops.fit").read_text().splitlines()) < 150


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert {name for name in modules() if name.split(".")[-1].strip("_") in FORBIDDEN_NAMES} == set()


def test_the_core_prints_nothing() -> None:
    printing = {
        name
        for name, tree in modules().items()
        if room(name) not in ("cli", "__main__", "callbacks")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
    }
    assert printing == set()


def test_the_training_loop_does_not_wait_for_the_device() -> None:
    waits = {"item", "tolist", "cpu", "numpy", "synchronize"}
    waiting = [
        f"{name}, line {node.lineno}: {ast.unparse(node)}"
        for name in ("loops.fit",)
        for node in ast.walk(modules()[name])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in waits
    ]
    assert waiting == []


def test_exceptions_of_any_kind_end_only_where_somebody_is_told() -> None:
    catching = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and not raises_again(node)
        if node.type is None or {"Exception", "BaseException"} & set(re.findall(r"\w+", ast.unparse(node.type)))
    }
    assert catching <= CATCH_ALL_IN.keys()


def raises_again(node: ast.ExceptHandler) -> bool:
    last = node.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def hooks_defined() -> set[str]:
    callback = importlib.import_module("sanctuary_trainer.callback")
    methods = {
        name
        for name, value in vars(callback.Callback).items()
        if callable(value) and not name.startswith("_") and name not in NO_HOOKS
    }
    assert methods == set(callback.HOOKS)
    return methods


def test_hooks_are_those_that_the_loops_call() -> None:
    called = {
        node.func.attr
        for name, tree in modules().items()
        if room(name) in ("executor", "run", "loops", "trainer")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if ast.unparse(node.func.value).split(".")[-1] in ("callbacks", "hooks")
    }
    assert called - {"has", *NO_HOOKS} == hooks_defined()


def test_hooks_are_those_in_the_docs() -> None:
    """The section of docs/architecture.md that says "Hooks" has a table: one hook a row, its name first."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = re.search(r"^#+ Hooks.*?(?=^#+ |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert section is not None
    rows = dict(re.findall(r"^\| *`(\w+)\((.*?)\)`", section[0], flags=re.MULTILINE))
    assert sorted(rows) == sorted(hooks_defined())
    for name, parameters in rows.items():
        signature = inspect.signature(getattr(sanctuary_trainer.Callback, name))
        assert parameters.split(", ") == list(signature.parameters)[1:]


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_what_stands_beside_the_package_imports_what_is_there(folder: str) -> None:
    """Nothing runs the benchmarks in the tests."""
    missing = []
    for path in sorted((ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                module = importlib.import_module(node.module or "")
                missing += [f"{path.name}: {alias.name}" for alias in node.names if not hasattr(module, alias.name)]
    assert missing == []
