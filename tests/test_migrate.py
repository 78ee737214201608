"""The pairs in examples/migrate: the switched script ends where the script before it does, and so many lines change."""

import difflib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sanctuary_trainer import Run, Trainer, VisionTask, foreign
from sanctuary_trainer.state import RunState
from tests.conftest import ROOT
from tests.small_tasks import Line, floats, loader, quiet_trainer

FOLDER = ROOT / "examples" / "migrate"
PAIRS = {  # name of the pair: the package that its script before needs, the page that shows it
    "loop": ("torch", "from-a-loop"),
    "accelerate": ("accelerate", "from-a-loop"),
    "lightning": ("lightning", "from-lightning"),
    "transformers": ("transformers", "from-transformers"),
    "pytorch_accelerated": ("pytorch_accelerated", "from-pytorch-accelerated"),
}
FROZEN = ("lightning", "pytorch_accelerated")  # the others need nothing that is not installed with this package

Ended = tuple[dict[str, torch.Tensor], dict[str, float], torch.Tensor]


@pytest.fixture(autouse=True)
def _as_scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(FOLDER)
    yield
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def run(script: str) -> Ended:
    """Final weights, metrics and predictions of a script."""
    ended: Ended = importlib.import_module(script).main()
    return ended


def bare(weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors alone: a task may call its model otherwise than the script before it did."""
    return [weights[name] for name in weights]


@pytest.mark.parametrize("name", PAIRS)
def test_the_switched_script_ends_at_the_same_weights_to_the_last_bit(name: str) -> None:
    pytest.importorskip(PAIRS[name][0], reason=f"the script before the switch needs {PAIRS[name][0]}")
    before, after = run(f"{name}_before"), run(f"{name}_after")
    pairs = list(zip(bare(before[0]), bare(after[0]), strict=True))
    assert [torch.equal(one, other) for one, other in pairs] == [True] * len(pairs)
    assert before[1] == pytest.approx({key: after[1][key] for key in before[1]}, abs=1e-6)
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("name", FROZEN)
def test_the_switched_script_ends_at_what_is_written_down_of_the_one_before(name: str) -> None:
    references = importlib.import_module("references")
    known: dict[str, Any] = json.loads((FOLDER / "references.json").read_text())[name]
    weights, metrics, _ = run(f"{name}_after")
    found = references.numbers_of(weights, {key: metrics[key] for key in known["metrics"]})
    # Written with other kernels, float32 training ends nearby: a few images of 300 may be classed otherwise.
    same = references.here().items() <= known.items()
    assert found["norm"] == pytest.approx(known["norm"], rel=1e-6 if same else 0.02)
    assert found["metrics"] == pytest.approx(known["metrics"], abs=1e-6 if same else 0.05)
    if same:
        assert found["weights"] == pytest.approx(known["weights"], abs=1e-6)


def lines_of(path: Path) -> list[str]:
    """The script's lines without the text at its head and without blank ones."""
    return [line for line in path.read_text().split('"""\n', 1)[1].splitlines() if line.strip()]


def count_changes(before: list[str], after: list[str]) -> tuple[int, int]:
    """How many lines of `before` go away, and how many of `after` are written: those that difflib does not match."""
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = [block for block in blocks if block[0] != "equal"]
    return sum(b - a for _, a, b, _, _ in changed), sum(b - a for *_, a, b in changed)


def test_lines_are_counted_on_both_sides() -> None:
    assert count_changes(["a", "b", "c"], ["a", "B", "B2", "c", "d"]) == (1, 3)


@pytest.mark.parametrize("name", PAIRS)
def test_the_page_states_how_many_lines_change(name: str) -> None:
    before, after = (lines_of(FOLDER / f"{name}_{when}.py") for when in ("before", "after"))
    removed, written = count_changes(before, after)
    page = (ROOT / "docs" / "migrate" / f"{PAIRS[name][1]}.md").read_text()
    said = f"of {len(before)} lines {removed} go and {written} are written, {written / len(before):.0%}"
    assert said in re.sub(r"\s+", " ", page), said


def test_the_page_states_how_many_lines_change_in_a_lightning_module() -> None:
    before, after = (module_in(lines_of(FOLDER / f"lightning_{when}.py")) for when in ("before", "after"))
    removed, written = count_changes(before, after)
    page = (ROOT / "docs" / "migrate" / "from-lightning.md").read_text()
    said = f"of {len(before)} lines {removed} go and {written} are written, {written / len(before):.0%}"
    assert said in re.sub(r"\s+", " ", page), said


def module_in(lines: list[str]) -> list[str]:
    [first] = [number for number, line in enumerate(lines) if line.startswith("class DigitsModule")]
    return lines[first : lines.index("def main():")]


class Linear(VisionTask):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log_dict({"seen": 1.0}, sync_dist=True)
        return self.layer(batch).mean()

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return batch


def call(name: str, **arguments: Any) -> object:
    trainer = Trainer(max_epochs=1, log_with=None, default_callbacks=False)
    if name == "Trainer":
        return Trainer(max_epochs=1, **arguments)
    if name == "log":
        return Linear().log("loss", 1.0, **arguments)
    return getattr(trainer, name)(Linear(), **arguments)


@pytest.mark.parametrize(
    ("name", "argument", "said"),
    [
        ("Trainer", {"precision": "bf16-mixed"}, "precision='bf16-mixed'; that is mixed_precision=\"bf16\" here."),
        ("Trainer", {"precision": "64-true"}, 'mixed_precision is "no", "bf16" or "fp16" here'),
        ("Trainer", {"devices": 2}, "torchrun --nproc-per-node N"),
        ("Trainer", {"strategy": "ddp"}, "left out here: several ranks are DDP"),
        ("Trainer", {"accumulate_grad_batches": 4}, "gradient_accumulation_steps=4 here"),
        ("Trainer", {"max_epoch": 3}, "max_epoch=3; did you mean max_epochs?"),
        ("fit", {"datamodule": object}, "that is data= here"),
        ("validate", {"ckpt_path": "best"}, "what fit returned stands for its best"),
        ("test", {"dataloaders": []}, "the second argument here"),
        ("predict", {"zzz": 1}, "it has task, loader, data, checkpoint, return_predictions, output_dir."),
        ("log", {"sync_dist": True}, "values are always over all ranks"),
        ("fit", {"train": [torch.ones(2, 1)]}, "log has no argument sync_dist=True"),  # by log_dict in the step
    ],
)
def test_an_argument_of_another_trainer_is_refused_with_what_stands_here_for_it(
    name: str, argument: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        call(name, **argument)


@pytest.mark.parametrize("hook", ["training_step", "validation_step", "configure_optimizers", "on_train_epoch_end"])
def test_an_attribute_of_lightnings_modules_is_told_with_what_stands_here(hook: str) -> None:
    """In every method of a task; an attribute that is missing anywhere else is Python's business."""

    def asks(task: Any, *arguments: Any) -> Any:
        return task.trainer.current_epoch

    def asks_a_layer(task: Any, *arguments: Any) -> Any:
        return torch.nn.Identity().trainer

    with pytest.raises(AttributeError) as raised:
        fit(type("Asks", (Line,), {hook: asks})())
    assert raised.value.__notes__ == ["trainer of a Lightning module is self.run here."]
    with pytest.raises(AttributeError) as raised:
        fit(type("AsksALayer", (Line,), {hook: asks_a_layer})())
    assert not hasattr(raised.value, "__notes__")


def fit(task: VisionTask) -> None:
    numbers = loader(floats([1, 2]), 1)
    quiet_trainer(max_epochs=1).fit(task, numbers, numbers)


def test_what_a_task_has_instead_is_there() -> None:
    for text in foreign._OF_A_TASK.values():
        for name in re.findall(r"self\.([\w.]+)", text):
            owner, *path = name.split(".")
            if owner != "run":
                assert hasattr(VisionTask, owner)
            elif path and path[0] != "state":
                assert hasattr(Run, path[0])
            elif path:
                assert path[1] in RunState.__dataclass_fields__


def test_what_is_told_to_use_instead_is_there() -> None:
    """Every `name=` that the table speaks of is an argument of the Trainer, of its verbs or of `log`."""
    functions = (Trainer, Trainer.fit, Trainer.validate, VisionTask.log)
    taken = {name for function in functions for name in inspect.signature(function).parameters} - {"unknown"}
    told = {name for text in foreign._INSTEAD.values() for name in re.findall(r"\b(?<!\.)(\w+)=", text)}
    assert told <= taken
    assert foreign._INSTEAD.keys() & set(inspect.signature(Trainer).parameters) == set()
