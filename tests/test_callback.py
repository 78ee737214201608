"""Callbacks: which hooks are called and in what order, what is refused before a run, and callbacks by name."""

import importlib
import inspect
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import sanctuary_trainer.callback
from sanctuary_trainer.callback import (
    DEFAULT_CALLBACKS,
    HOOKS,
    Callback,
    Callbacks,
    get_callback,
    refuse_unknown_hooks,
    register_callback,
    with_defaults,
)
from sanctuary_trainer.errors import CallbackError
from tests.small_tasks import Line, Numbers, floats, loader, quiet_trainer

ROOT = Path(__file__).resolve().parent.parent
RUN: Any = types.SimpleNamespace()

# From Lightning 2.5, pytorch_lightning/callbacks/callback.py and core/hooks.py.
LIGHTNING = """setup teardown on_fit_start on_fit_end on_sanity_check_start on_sanity_check_end on_train_batch_start
on_train_batch_end on_train_epoch_start on_train_epoch_end on_validation_epoch_start on_validation_epoch_end
on_test_epoch_start on_test_epoch_end on_predict_epoch_start on_predict_epoch_end on_validation_batch_start
on_validation_batch_end on_test_batch_start on_test_batch_end on_predict_batch_start on_predict_batch_end
on_train_start on_train_end on_validation_start on_validation_end on_test_start on_test_end on_predict_start
on_predict_end on_exception on_save_checkpoint on_load_checkpoint on_before_backward on_after_backward
on_before_optimizer_step on_before_zero_grad on_before_batch_transfer on_after_batch_transfer
on_validation_model_eval on_validation_model_train"""


@pytest.fixture(autouse=True)
def _registry_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanctuary_trainer.callback, "_registered", {})


def recorder(name: str, hook: str, calls: list[str], **attributes: Any) -> Any:
    """A callback that overrides `hook` and notes its calls; with `raises=error` it raises then."""
    error = attributes.pop("raises", None)

    def method(self: Any, *arguments: Any) -> None:
        calls.append(name)
        if error is not None:
            raise error

    return type(name, (Callback,), {hook: method, **attributes})()


def test_importing_the_callbacks_costs_neither_torch_nor_tqdm() -> None:
    code = (
        "import sys, sanctuary_trainer.callback, sanctuary_trainer.callbacks\n"
        "print([name for name in ('torch', 'tqdm', 'accelerate', 'numpy') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_hook_tells_its_moment_and_is_drawn_at_the_modules_head() -> None:
    for hook in HOOKS:
        assert inspect.getdoc(getattr(Callback, hook)), hook
        assert hook in (sanctuary_trainer.callback.__doc__ or ""), hook


def test_every_hook_of_callback_is_an_attribute_of_callbacks() -> None:
    callbacks = Callbacks(None)
    annotated = [name for name in Callbacks.__annotations__ if not name.startswith("_")]
    assert annotated == list(HOOKS)
    for hook in HOOKS:
        arguments = list(inspect.signature(getattr(Callback, hook)).parameters)[1:]
        getattr(callbacks, hook)(*arguments)  # nobody overrides it: nothing happens
        assert not callbacks.has(hook)


def test_the_task_comes_first_and_the_callbacks_in_their_order() -> None:
    calls: list[str] = []

    class Task:
        def on_train_step_end(self, run: Any) -> None:
            calls.append("task")

    callbacks = Callbacks(Task(), [recorder(name, "on_train_step_end", calls) for name in ("B", "A", "C")])
    callbacks.on_train_step_end(RUN)
    assert calls == ["task", "B", "A", "C"]
    assert [type(callback).__name__ for callback in callbacks] == ["B", "A", "C"]


def test_a_hook_gets_what_the_loop_gives() -> None:
    got = []

    class Keeps(Callback):
        def on_evaluation_batch_end(self, run: Any, stage: str, batch: Any, outputs: Any, sample_indices: Any) -> None:
            got.append((run, stage, batch, outputs, sample_indices))

    Callbacks(None, [Keeps()]).on_evaluation_batch_end(RUN, "val", "batch", "outputs", [3, 1])
    assert got == [(RUN, "val", "batch", "outputs", [3, 1])]


def test_only_overridden_hooks_are_called() -> None:
    calls: list[str] = []
    callbacks = Callbacks(object(), [recorder("A", "on_log", calls), recorder("B", "on_fit_end", calls)])
    assert [hook for hook in HOOKS if callbacks.has(hook)] == ["on_log", "on_fit_end"]
    # One overrides it: the loop calls the method itself, with nothing between.
    assert callbacks.on_log.__self__ is next(iter(callbacks))  # type: ignore[attr-defined]
    assert not inspect.ismethod(callbacks.on_train_step_end)


def test_an_inherited_hook_is_called() -> None:
    calls: list[str] = []

    class Base(Callback):
        def on_fit_start(self, run: Any) -> None:
            calls.append(type(self).__name__)

    class Derived(Base):
        pass

    Callbacks(None, [Derived()]).on_fit_start(RUN)
    assert calls == ["Derived"]


def test_a_tasks_setup_takes_the_verb_and_is_no_hook_while_its_teardown_is() -> None:
    calls: list[str] = []

    class Task:
        def setup(self, stage: str) -> None:
            calls.append("setup")

        def teardown(self, run: Any) -> None:
            calls.append("teardown")

    callbacks = Callbacks(Task(), [recorder("A", "setup", calls)])
    callbacks.setup(RUN)
    callbacks.teardown(RUN)
    assert calls == ["A", "teardown"]


# ---- refused before a run


@pytest.mark.parametrize(
    ("misspelt", "instead"),
    [
        ("on_train_start", "Use on_fit_start(self, run)."),
        ("on_train_end", "Use on_fit_end(self, run)."),
        ("on_validation_epoch_end", "Use on_evaluation_end(self, run, stage, metrics)."),
        ("on_save_checkpoint", "Use state_dict(self)."),
        ("on_before_zero_grad", "Use on_train_step_end(self, run)."),
        ("on_step_end", "Use on_train_step_end(self, run)."),
        ("on_trian_epoch_end", "Use on_train_epoch_end(self, run)."),
        ("on_fit_strat", "Use on_fit_start(self, run)."),
        ("on_savepoint", "Use on_save_point(self, run)."),
        ("on_xyzzy", "The hooks are setup, on_fit_start, "),
    ],
)
def test_a_hook_that_does_not_exist_cannot_be_written(misspelt: str, instead: str) -> None:
    with pytest.raises(CallbackError) as caught:
        type("Mine", (Callback,), {misspelt: lambda self, run: None})
    assert f"Mine.{misspelt} is not a hook and would never be called." in str(caught.value)
    assert instead in str(caught.value)


@pytest.mark.parametrize("hook", LIGHTNING.split())
def test_each_of_lightnings_hooks_exists_or_names_the_one_to_use(hook: str) -> None:
    if hook in HOOKS:
        return
    with pytest.raises(CallbackError, match=r"Use (\w+)\(self") as caught:
        type("Mine", (Callback,), {hook: lambda self: None})
    assert str(caught.value).split("Use ")[1].split("(")[0] in (*HOOKS, "state_dict", "load_state_dict")


def test_a_misspelt_hook_in_a_mixin_is_found_too() -> None:
    class Mixin:
        def on_train_epoch_finished(self, run: Any) -> None: ...

    with pytest.raises(CallbackError, match=r"Mixin\.on_train_epoch_finished .* on_train_epoch_end"):
        type("Mine", (Mixin, Callback), {})


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_misspelt_hook_is_found_in_any_kind_of_method(kind: Callable[..., Any]) -> None:
    with pytest.raises(CallbackError, match="on_evaluation_end"):
        type("Mine", (Callback,), {"on_validation_end": kind(lambda *arguments: None)})


def test_a_setting_may_begin_with_on() -> None:
    class Mine(Callback):
        on_cpu = True
        on_names: ClassVar[list[str]] = []

    assert list(Callbacks(None, [Mine()]))


def test_a_task_may_define_what_it_is_allowed_besides() -> None:
    task = type("Task", (), {"on_after_batch_to_device": lambda self, batch, stage: batch})
    refuse_unknown_hooks(task, also=("on_after_batch_to_device",))
    with pytest.raises(CallbackError):
        refuse_unknown_hooks(task)
    lightning = type("Task", (), {"on_after_batch_transfer": lambda self, batch, dataloader_idx: batch})
    with pytest.raises(CallbackError, match=r"Use on_after_batch_to_device\."):
        refuse_unknown_hooks(lightning, also=("on_after_batch_to_device",))
    saving = type("Task", (), {"on_save_checkpoint": lambda self, checkpoint: None})
    with pytest.raises(CallbackError, match="buffer"):
        refuse_unknown_hooks(saving, also=("on_after_batch_to_device",))


@pytest.mark.parametrize(
    "method",
    [
        lambda self, run: None,
        lambda self, run, values: None,
        lambda self, run, values, step, more: None,
        lambda self, run, *, values, step: None,
    ],
)
def test_a_hook_that_cannot_take_its_arguments_is_refused_before_the_run(method: Any) -> None:
    mine = type("Mine", (Callback,), {"on_log": method})()
    with pytest.raises(CallbackError, match=r"the hook is on_log\(self, run, values, step\)"):
        Callbacks(None, [mine])


@pytest.mark.parametrize(
    "method",
    [
        lambda self, *arguments: None,
        lambda self, run, step, values: None,
        lambda self, run, values, step, more=1: None,
        lambda self, run, *rest, **settings: None,
    ],
)
def test_a_hook_may_name_its_arguments_as_it_likes(method: Any) -> None:
    mine = type("Mine", (Callback,), {"on_log": method})()
    Callbacks(None, [mine]).on_log(RUN, {}, 1)


def test_a_tasks_hook_with_lightnings_signature_is_refused() -> None:
    class Task:
        def on_fit_start(self) -> None: ...

    with pytest.raises(CallbackError, match=r"Task\.on_fit_start takes \(\).*on_fit_start\(self, run\)"):
        Callbacks(Task())


def test_two_callbacks_whose_states_could_not_be_told_apart_are_refused() -> None:
    class Saver(Callback):
        identifying = ("monitor",)

        def __init__(self, monitor: str) -> None:
            self.monitor = monitor

    different = Callbacks(None, [Saver("val/loss"), Saver("val/accuracy")])
    keys = [callback.state_key for callback in different]
    assert keys[0].endswith("Saver(monitor='val/loss')") and keys[1].endswith("Saver(monitor='val/accuracy')")
    with pytest.raises(CallbackError, match=r"Two callbacks are .*Saver\(monitor='val/loss'\)"):
        Callbacks(None, [Saver("val/loss"), Saver("val/loss")])


def test_a_state_key_does_not_depend_on_order() -> None:
    first, second = recorder("A", "on_log", []), recorder("B", "on_log", [])
    keys = {one.state_key for one in Callbacks(None, [first, second])}
    assert keys == {one.state_key for one in Callbacks(None, [second, first])}


# ---- exceptions


def test_a_hook_that_raises_stops_the_ones_after_it() -> None:
    calls: list[str] = []
    first = recorder("A", "on_train_step_end", calls, raises=ValueError("from A"))
    with pytest.raises(ValueError, match="from A"):
        Callbacks(None, [first, recorder("B", "on_train_step_end", calls)]).on_train_step_end(RUN)
    assert calls == ["A"]


@pytest.mark.parametrize("hook", ["on_exception", "on_fit_end", "teardown"])
def test_hooks_that_clean_up_run_in_every_callback_even_if_one_raises(hook: str) -> None:
    calls: list[str] = []
    callbacks = Callbacks(
        None,
        [
            recorder("A", hook, calls),
            recorder("B", hook, calls, raises=ValueError("from B")),
            recorder("C", hook, calls),
            recorder("D", hook, calls, raises=KeyError("from D")),
            recorder("E", hook, calls),
        ],
    )
    arguments = [RUN, RuntimeError("why")] if hook == "on_exception" else [RUN]
    with pytest.raises(KeyError, match="from D") as caught:
        getattr(callbacks, hook)(*arguments)
    assert calls == ["A", "B", "C", "D", "E"]
    assert isinstance(caught.value.__context__, ValueError)  # none is lost


# ---- by name


def test_the_defaults_are_known_by_name() -> None:
    assert [type(get_callback(name)).__name__ for name in DEFAULT_CALLBACKS] == [
        "ProgressBar",
        "Summary",
        "Checkpoint",
    ]


def test_a_registered_class_is_made_anew_for_each_use() -> None:
    @register_callback("mine")
    class Mine(Callback):
        pass

    assert isinstance(get_callback("mine"), Mine)
    assert get_callback("mine") is not get_callback("mine")
    assert [type(callback) for callback in Callbacks(None, ["mine"])] == [Mine]


def test_an_instance_is_taken_as_it_is() -> None:
    mine = recorder("A", "on_log", [])
    assert get_callback(mine) is mine


def test_a_name_that_is_taken_is_refused_but_the_same_class_may_be_defined_again() -> None:
    def define() -> type[Callback]:
        class Mine(Callback):
            pass

        return register_callback("mine")(Mine)

    define()
    second = define()  # a notebook cell that is run again
    assert type(get_callback("mine")) is second
    other = type("Other", (Callback,), {})
    for name in ("mine", "progress_bar"):
        with pytest.raises(CallbackError, match=f"'{name}' belongs to"):
            register_callback(name)(other)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("progres_bar", "Did you mean 'progress_bar'?"),
        ("zz", "The names are checkpoint, classification_dashboard, early_stopping, ema, gradient_checkpointing, "),
        (Callback, "give an instance, Callback()"),
        (3, "subclass Callback"),
        (None, "subclass Callback"),
    ],
)
def test_what_is_no_callback_is_refused(given: Any, told: str) -> None:
    with pytest.raises(CallbackError) as caught:
        get_callback(given)
    assert told in str(caught.value)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of somebody else with two entry points, one of them broken."""
    (tmp_path / "theirs.py").write_text(
        "from sanctuary_trainer import Callback\nclass Theirs(Callback): ...\nnothing = 3\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[sanctuary_trainer.callbacks]\ntheirs = theirs:Theirs\nbroken = theirs:nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("theirs", None)


@pytest.mark.usefixtures("installed")
def test_a_callback_of_an_installed_package_is_found_by_its_entry_point() -> None:
    assert type(get_callback("theirs")).__name__ == "Theirs"
    with pytest.raises(CallbackError, match="leads to 3"):
        get_callback("broken")
    with pytest.raises(CallbackError, match="Did you mean 'theirs'"):
        get_callback("their")


def test_a_default_gives_way_to_one_of_its_kind() -> None:
    progress_bar = type(get_callback("progress_bar"))
    mine, other = type("MyBar", (progress_bar,), {})(), recorder("A", "on_log", [])
    assert names(with_defaults([other, mine])) == ["Summary", "Checkpoint", "A", "MyBar"]
    assert names(with_defaults([])) == ["ProgressBar", "Summary", "Checkpoint"]
    assert with_defaults(["summary"])[0].state_key == "ProgressBar()"


def test_a_checkpoint_that_watches_a_metric_stands_beside_the_default_one() -> None:
    checkpoint: Any = type(get_callback("checkpoint"))
    assert names(with_defaults([checkpoint(monitor="val/loss", mode="min")])).count("Checkpoint") == 2
    assert names(with_defaults([checkpoint(every_n_steps=5)])).count("Checkpoint") == 1


def names(callbacks: list[Callback]) -> list[str]:
    return [type(callback).__name__ for callback in callbacks]


# ---- the folder of the built-in callbacks


def test_the_callbacks_folder_is_imported_under_one_name_only() -> None:
    done = subprocess.run([sys.executable, "-c", "import callbacks"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ImportError: Import sanctuary_trainer.callbacks instead of callbacks" in done.stderr


def test_the_built_in_callbacks_are_exactly_what_is_there() -> None:
    package = importlib.import_module("sanctuary_trainer.callbacks")
    assert sorted(package.__all__) == package.__all__ == dir(package)
    for name in package.__all__:
        assert issubclass(getattr(package, name), Callback)
    with pytest.raises(AttributeError, match="ProgresBar"):
        package.ProgresBar  # noqa: B018


@pytest.mark.parametrize("hook", ["on_fit_end", "teardown"])
def test_what_is_gathered_when_the_ranks_meet_no_more_is_refused(hook: str) -> None:
    late = type("Late", (Callback,), {hook: lambda self, run: run.gather(1, print)})
    with pytest.raises(CallbackError, match="in on_fit_end or teardown: ask at"):
        quiet_trainer(max_epochs=1, callbacks=[late()]).fit(Line(), loader(Numbers(floats([1.0, 2.0]))))
