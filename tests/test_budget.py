"""What a step may cost, as numbers that do not depend on the machine: Python calls into our files, and frames."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sanctuary_trainer
from sanctuary_trainer import Callback, Run, Trainer, VisionTask

from .small_tasks import quiet_trainer

SOURCE = Path(sanctuary_trainer.__file__).resolve().parent
FOLDERS = (SOURCE, SOURCE.parent / "callbacks")
TESTS = Path(__file__).resolve().parent

# Between two points of the curves: the first step of an epoch and those that log do more, rarely.
FIRST, LAST = 10, 40


def is_ours(code: CodeType) -> bool:
    """Whether code lies in the package; `callbacks` is reached through a link."""
    path = Path(code.co_filename).resolve()
    return any(path.is_relative_to(folder) for folder in FOLDERS)


class TinyTask(VisionTask):
    """A network of 64-64-10 that tells when a step begins."""

    def __init__(self, begins: Callable[[int], None]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.begins = begins

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.begins(batch_idx)
        features, labels = batch
        return nn.functional.cross_entropy(self.net(features), labels)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def train(trainer: Trainer, begins: Callable[[int], None]) -> None:
    """One epoch of 45 batches of 32."""
    samples = TensorDataset(torch.randn(45 * 32, 64), torch.randint(0, 10, (45 * 32,)))
    trainer.fit(TinyTask(begins), DataLoader(samples, batch_size=32, shuffle=True))


def calls_per_step(trainer: Trainer) -> tuple[float, str]:
    """Python calls into our files per step, generators that go on included, and which they are."""
    calls: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    def begins(batch_idx: int) -> None:
        if batch_idx == FIRST:
            sys.setprofile(count)
        elif batch_idx == LAST:
            sys.setprofile(None)

    try:
        train(trainer, begins)
    finally:
        sys.setprofile(None)
    steps = LAST - FIRST
    ours = {code.co_qualname: number / steps for code, number in calls.items() if is_ours(code)}
    return sum(ours.values()), ", ".join(f"{name} {number:g}" for name, number in sorted(ours.items()))


def test_a_step_makes_at_most_60_python_calls_into_our_files() -> None:
    number, which = calls_per_step(quiet_trainer(max_epochs=1))
    assert 0 < number <= 60, f"{number:g} calls per step: {which}"


def test_the_default_callbacks_and_tensorboard_add_at_most_5_python_calls_to_a_step(run_folder: Path) -> None:
    bare, _ = calls_per_step(quiet_trainer(max_epochs=1))
    number, which = calls_per_step(Trainer(max_epochs=1, cpu=True, project_dir=run_folder))
    assert number <= bare + 5, f"{number:g} calls per step, {bare:g} without: {which}"


def frames_to_the_step(callbacks: tuple[Callback, ...] = ()) -> tuple[list[CodeType], list[CodeType]]:
    """The code of the frames from Trainer.fit, included, to training_step, excluded: ours, and the tests'."""
    ours: list[CodeType] = []
    theirs: list[CodeType] = []

    def begins(batch_idx: int) -> None:
        if ours:
            return
        step: FrameType | None = sys._getframe(1)
        frame = None if step is None else step.f_back
        while frame is not None and frame.f_code is not train.__code__:
            if is_ours(frame.f_code):
                ours.append(frame.f_code)
            elif Path(frame.f_code.co_filename).resolve().is_relative_to(TESTS):
                theirs.append(frame.f_code)
            frame = frame.f_back

    train(quiet_trainer(max_epochs=1, callbacks=callbacks), begins)
    return ours, theirs


def test_at_most_6_frames_of_4_files_stand_between_fit_and_the_users_step() -> None:
    frames, _ = frames_to_the_step()
    assert frames[-1] is Trainer.fit.__code__
    names = [f"{Path(code.co_filename).name}:{code.co_qualname}" for code in frames]
    assert len(frames) <= 6, names
    assert len({code.co_filename for code in frames}) <= 4, names


class Wrapping(Callback):
    """Wraps the executor, as a callback that retries does."""

    def on_fit_start(self, run: Run) -> None:
        inner = run.execute

        def execute(*arguments: Any, **settings: Any) -> Any:
            return inner(*arguments, **settings)

        run.execute = execute


def test_a_callback_that_wraps_the_executor_adds_one_frame() -> None:
    without, _ = frames_to_the_step()
    frames, wrapping = frames_to_the_step((Wrapping(),))
    assert frames == without
    assert [code.co_name for code in wrapping] == ["execute"]
