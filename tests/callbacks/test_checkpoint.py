"""Which checkpoints a run leaves: when they are due, which of them are kept, what they are called, what goes wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from sanctuary_trainer import Callback, CallbackError, CheckpointError, Run, RunFolderError, SettingsError
from sanctuary_trainer.callbacks import EMA, Checkpoint, EarlyStopping
from sanctuary_trainer.callbacks.keeping import Entry, Kept
from sanctuary_trainer.checkpoint_folder import check_whole, read_manifest
from sanctuary_trainer.checkpointing import read_state, read_tensors
from tests.small_tasks import Line, Net, classes, floats, loader, quiet_trainer, weights
from tests.test_checkpointing import hidden, refuse_links, small_disk, visible

NAN, INF = math.nan, math.inf


class Scripted(Line):
    """Logs the value of each epoch as "val/acc"; None logs nothing. Every step takes 1 from w."""

    def __init__(self, values: Iterable[float | None] = ()) -> None:
        super().__init__(learning_rate=1.0)
        self.values = list(values)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        value = self.values[self.run.state.epoch] if self.values else float(self.run.state.global_step)
        if value is not None:
            self.log("acc", value)
        self.log("other", 1.0)


def fit(
    task: Any, *callbacks: Callback, batches: int = 2, val: bool = True, resume: Any = None, **settings: Any
) -> Any:
    """Fits on `batches` batches of one sample each epoch, as many epochs as the task has values."""
    values = getattr(task, "values", None)
    settings = {"callbacks": callbacks, "max_epochs": len(values) if values else 3, "run_name": "run", **settings}
    validation = loader(floats([1]), 1) if val else None
    return quiet_trainer(**settings).fit(task, loader(floats([1] * batches), 1), validation, resume=resume)


def scores(values: Iterable[float | None], *callbacks: Callback, **settings: Any) -> Any:
    """Fits on one batch an epoch, so that epoch n ends at step n."""
    return fit(Scripted(values), *callbacks, batches=1, **settings)


def best(**settings: Any) -> Checkpoint:
    return Checkpoint(**{"monitor": "val/acc", "mode": "min", **settings})


def left(folder: str | Path = "runs/run/checkpoints") -> list[Any]:
    """The steps of the checkpoints there, all of them whole, and the names of what is none."""
    found: list[Any] = []
    for name in visible(Path(folder)):
        path = Path(folder) / name
        if path.is_symlink():
            continue
        check_whole(path)
        found.append(read_manifest(path)["global_step"])
    assert hidden(Path(folder)) == []
    return sorted(found)


def w_of(path: Path) -> float:
    return float(read_tensors(path / "model.safetensors")[0]["w"])


@contextmanager
def told() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught if "Changed since" not in str(each.message)]


# What lies in the folder


def test_a_checkpoint_holds_what_a_run_needs_to_go_on() -> None:
    result = fit(Scripted(), Checkpoint())
    assert result.best_checkpoint == Path("runs/run/checkpoints/step_00000006")
    check_whole(result.best_checkpoint)
    assert visible(result.best_checkpoint) == [
        "manifest.json",
        "model.safetensors",
        "rank_00000.safetensors",
        "state.json",
    ]
    manifest = read_manifest(result.best_checkpoint)
    assert manifest["kind"] == "full" and manifest["run"] == json.loads(Path("runs/run/run.json").read_bytes())["id"]
    assert [manifest[name] for name in ("global_step", "epoch", "batch", "attempt")] == [6, 3, 0, 0]
    state = read_state(result.best_checkpoint)
    assert state["task"] == "Scripted" and state["progress"]["global_step"] == 6
    assert w_of(result.best_checkpoint) == -6.0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads((result.best_checkpoint / "state.json").read_bytes(), parse_constant=refuse)


# Which are kept


def test_the_latest_is_kept_of_each_epoch_and_of_the_end() -> None:
    seen: list[list[Any]] = []

    class Looks(Callback):
        def on_train_epoch_start(self, run: Run) -> None:
            seen.append(left())

    checkpoint = Checkpoint()
    result = fit(Scripted(), checkpoint, Looks(), batches=4, max_epochs=3, max_steps=10)
    assert seen == [[], [4], [8]]
    assert left() == [10], "the end of the run, in the middle of an epoch"
    assert [entry.step for entry in checkpoint.kept] == [10]
    assert result.best_checkpoint is not None and w_of(result.best_checkpoint) == -10


@pytest.mark.parametrize(("k", "kept"), [(1, [5]), (2, [4, 5]), (3, [3, 4, 5]), (-1, [1, 2, 3, 4, 5]), (0, [])])
def test_so_many_of_the_latest_are_kept(k: int, kept: list[int]) -> None:
    result = scores([0] * 5, Checkpoint(save_top_k=k))
    assert left() == kept
    assert (result.best_checkpoint is None) == (k == 0)


@pytest.mark.parametrize(
    ("values", "mode", "k", "kept", "first"),
    [
        ([1, 3, 2], "min", 1, [1, 3], 1),  # the best and the run's end
        ([1, 3, 2], "max", 1, [2, 3], 2),
        ([3, 2, 1], "min", 1, [3], 3),
        ([1, 2, 3, 4, 5], "max", 2, [4, 5], 5),
        ([5, 4, 3, 2, 1], "max", 2, [1, 2, 5], 1),
        ([2, 3, 1, 5, 4], "min", 3, [1, 2, 3, 5], 3),
        ([2, 3, 1], "min", -1, [1, 2, 3], 3),
        ([2, 2, 2], "min", 1, [1, 3], 1),  # an equal one is no better
        ([2, 2, 2], "max", 2, [1, 2, 3], 1),
        ([2, 3, 1], "min", 0, [], None),
    ],
)
def test_so_many_of_the_best_are_kept_and_the_end(
    values: list[float], mode: str, k: int, kept: list[int], first: int | None
) -> None:
    checkpoint = best(mode=mode, save_top_k=k)
    result = scores(values, checkpoint)
    assert left() == kept
    assert sorted({entry.step for entry in checkpoint.kept}) == kept
    if first is None:
        assert result.best_checkpoint is None
    else:
        assert result.best_checkpoint == Path(f"runs/run/checkpoints/step_{first:08d}")
        assert w_of(result.best_checkpoint) == -first


@pytest.mark.parametrize(("k", "kept"), [(1, [1, 4]), (0, [4]), (-1, [1, 2, 3, 4])])
def test_the_newest_is_kept_beside_the_best_if_asked(k: int, kept: list[int]) -> None:
    during: list[list[int]] = []

    class Looks(Callback):
        def on_train_epoch_start(self, run: Run) -> None:
            during.append(left())

    scores([1, 3, 2, 4], best(save_top_k=k, save_last=True), Looks())
    assert left() == kept
    assert during[2] == ([2] if k == 0 else [1, 2])
    assert os.readlink("runs/run/checkpoints/last") == "step_00000004"


def test_a_new_one_is_complete_before_an_old_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[list[str]] = []
    remove = Run.remove_checkpoint

    def watched(run: Run, folder: Path) -> None:
        before.append(visible(folder.parent))
        check_whole(folder.parent / before[-1][-1])
        remove(run, folder)

    monkeypatch.setattr(Run, "remove_checkpoint", watched)
    scores([3, 2, 1], best())
    assert before == [["step_00000001", "step_00000002"], ["step_00000002", "step_00000003"]]


def test_values_that_are_not_finite_are_never_kept_as_best() -> None:
    with told() as texts:
        checkpoint = best(save_top_k=2)
        scores([NAN, 0.5, 0.4, NAN, 0.3], checkpoint)
    assert left() == [3, 5]
    assert [entry.value for entry in checkpoint.kept] == [0.3, 0.4]
    assert [text.split(":")[0] for text in texts] == ["val/acc is nan at step 1", "val/acc is nan at step 4"]
    with told() as texts:
        checkpoint = best(mode="max", save_top_k=1)
        scores([INF, 1, -INF], checkpoint, run_name="other")
    assert [(entry.step, entry.value) for entry in checkpoint.kept] == [(2, 1.0), (3, None)] and len(texts) == 2


def test_where_all_values_are_nan_the_end_is_saved_and_is_nobodys_best() -> None:
    with told() as texts:
        result = scores([NAN, NAN], best())
    assert left() == [2] and len(texts) == 2
    assert result.best_checkpoint == Path("runs/run/checkpoints/step_00000002")


def test_weights_that_are_not_finite_are_not_written() -> None:
    class Breaks(Line):
        def on_train_step_end(self, run: Any) -> None:
            if run.state.global_step >= 2:
                with torch.no_grad():
                    self.w.fill_(NAN)

    with told() as texts:
        result = fit(Breaks(), Checkpoint(), batches=1)
    assert left() == [1] and w_of(result.best_checkpoint) == -1
    assert [text.split(";")[0] for text in texts] == [f"The weights are not finite at step {n}" for n in (2, 3)]


def test_buffers_may_hold_infinity() -> None:
    task = Line()
    task.register_buffer("mask", torch.tensor([-INF, NAN, 0.0]))
    with told() as texts:
        fit(task, Checkpoint())
    assert left() == [6] and texts == []


def test_a_direction_must_be_given_with_a_monitor() -> None:
    with pytest.raises(SettingsError, match='mode="min" or "max" says which values are better'):
        Checkpoint(monitor="val/acc")
    with pytest.raises(SettingsError, match="got monitor=None and mode='max'"):
        Checkpoint(mode="max")
    with pytest.raises(SettingsError, match="mode='auto'"):
        Checkpoint(monitor="val/acc", mode="auto")


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_top_k": -2},
        {"save_top_k": 1.0},
        {"save_top_k": True},
        {"every_n_steps": 0},
        {"every_n_epochs": -1},
        {"every_n_steps": 2.5},
        {"every": 0},
        {"every": timedelta(0)},
        {"every": "00:10"},
        {"every": NAN},
        {"name": "{step:q}"},
        {"name": "{step"},
        {"name": "{val/acc:08d}"},
    ],
)
def test_wrong_settings_are_told_before_the_run(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(SettingsError, match=name):
        Checkpoint(**wrong)


# Names


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("val/acc={val/acc:.2f}", "val_acc=0.25"),
        ("{val/acc:.3f}", "0.250"),
        ("../../up-{step}", "up-3"),
        ("..", "checkpoint"),
        ("/etc/{epoch}", "etc_3"),
        ("a b  c", "a_b_c"),
        ("a=b,c+d.e", "a=b,c+d.e"),
        (".hidden", "hidden"),
        ("{missing:.3f}-{step:03d}", "none-003"),
        ("größe {step!r}", "größe_3"),
        ("", "checkpoint"),
        ("{{step}}", "step"),
        ("x" * 300, "x" * 200),
        ("ü" * 150, "ü" * 100),
    ],
)
def test_a_name_is_one_folder_directly_in_the_folder(template: str, expected: str) -> None:
    result = scores([0.75, 0.5, 0.25], best(name=template))
    assert visible(Path("runs/run/checkpoints")) == [expected]
    assert result.best_checkpoint == Path("runs/run/checkpoints") / expected
    assert left() == [3] and visible(Path("runs")) == ["run"]


@pytest.mark.parametrize(
    ("values", "settings", "kept", "first"),
    [
        ([3, 2, 1], {}, {"best": 3}, "best"),  # each takes the place of the one before
        ([1, 3, 2], {}, {"best": 1, "best-2": 3}, "best"),  # the end leaves the best alone
        ([2, 3, 1], {}, {"best": 3}, "best"),
        ([1, 3, 2, 4], {"save_last": True}, {"best": 1, "best-2": 4}, "best"),
        ([2, 3, 1, 4], {"save_last": True}, {"best": 3, "best-2": 4}, "best"),
        ([3, 2, 1], {"save_top_k": 2}, {"best": 3, "best-2": 2}, "best"),
        ([1, 2, 3], {"save_top_k": 2}, {"best": 1, "best-2": 2, "best-3": 3}, "best"),
        ([1, 2, 3], {"save_top_k": -1}, {"best": 1, "best-2": 2, "best-3": 3}, "best"),
    ],
)
def test_a_name_that_is_used_again_takes_no_place_that_is_kept(
    values: list[float], settings: dict[str, Any], kept: dict[str, int], first: str
) -> None:
    checkpoint = best(name="best", **settings)
    scores(values, checkpoint)
    found = {
        path.name: read_manifest(path)["global_step"]
        for path in Path("runs/run/checkpoints").iterdir()
        if not path.is_symlink()
    }
    assert sorted(found.values()) == sorted(kept.values())
    assert sorted(entry.step for entry in checkpoint.kept) == sorted(kept.values())
    assert all(found[entry.path.name] == entry.step for entry in checkpoint.kept)
    assert checkpoint.best is not None
    assert found[checkpoint.best.name] == values.index(min(values)) + 1


def test_one_name_for_the_latest_is_one_folder_written_again_and_again() -> None:
    result = scores([0] * 4, Checkpoint(name="last"))
    assert visible(Path("runs/run/checkpoints")) == ["last"] and left() == [4]
    assert scores([0] * 6, Checkpoint(name="last"), resume="auto").global_step == 6
    assert result.best_checkpoint == Path("runs/run/checkpoints/last") and left() == [6]


def test_a_checkpoint_called_last_and_a_link_of_that_name() -> None:
    scores([0] * 3, Checkpoint(name="last", save_last=True))
    assert visible(Path("runs/run/checkpoints")) == ["last"] and left() == [3]
    with told() as texts:
        scores([1, 2, 3], Checkpoint(name="last"), best(save_last=True), run_name="two")
    assert left("runs/two/checkpoints") == [1, 3, 3]
    assert len(texts) == 3 and all("a checkpoint has this name" in text for text in texts)


# Several side by side


def test_several_in_one_folder_write_once_and_remove_nothing_that_another_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sanctuary_trainer.saving as saving

    written: list[str] = []
    write = saving.write_checkpoint

    def counted(folder: Path, *arguments: Any) -> None:
        written.append(folder.name)
        write(folder, *arguments)

    monkeypatch.setattr(saving, "write_checkpoint", counted)
    low, high, latest = best(), best(mode="max"), Checkpoint(save_top_k=2)
    scores([5, 1, 9, 4, 5, 6], low, high, latest)
    assert written == [f"step_{n:08d}" for n in range(1, 7)]
    assert left() == [2, 3, 5, 6]
    assert [[entry.step for entry in each.kept] for each in (low, high, latest)] == [[2], [3], [6, 5]]


def test_one_name_in_one_folder_is_shared_by_those_that_save_together() -> None:
    low, high = best(name="best"), best(mode="max", name="best")
    scores([5, 1, 9, 4], low, high)
    steps = {path.name: read_manifest(path)["global_step"] for path in Path("runs/run/checkpoints").iterdir()}
    for each, ours in ((low, [2, 4]), (high, [3, 4])):
        assert [entry.step for entry in each.kept] == ours
        assert all(steps[entry.path.name] == entry.step for entry in each.kept)
    assert sorted(steps.values()) == [2, 3, 4]


def test_two_that_could_not_be_told_apart_are_refused() -> None:
    with pytest.raises(CallbackError, match="Two callbacks are Checkpoint"):
        quiet_trainer(callbacks=[Checkpoint(), Checkpoint(save_top_k=2)])
    with pytest.raises(CallbackError, match="Two callbacks are Checkpoint"):
        quiet_trainer(callbacks=[Checkpoint(every_n_steps=5), Checkpoint(every_n_epochs=5)])
    quiet_trainer(callbacks=[Checkpoint(every_n_steps=5), Checkpoint(every_n_epochs=5, name="epoch_{epoch}")])


def test_bare_weights_beside_whole_ones_are_whole_where_they_fall_together() -> None:
    scores([3, 2, 1], Checkpoint(), best(weights_only=True, save_top_k=-1))
    kinds = [read_manifest(path)["kind"] for path in sorted(Path("runs/run/checkpoints").iterdir())]
    assert kinds == ["full", "full", "full"]
    scores([3, 2, 1], Checkpoint(), best(weights_only=True, save_top_k=-1, folder="bare"), run_name="two")
    assert left("runs/two/checkpoints") == [3] and left("runs/two/bare") == [1, 2, 3]
    assert {read_manifest(path)["kind"] for path in Path("runs/two/bare").iterdir()} == {"weights"}


@pytest.mark.parametrize(
    ("callbacks", "steps"),
    [
        (list, [[5]]),  # the default alone
        (lambda: [best(folder="a")], [[5], [1]]),
        (lambda: [Checkpoint(folder="a")], [None, [5]]),  # instead of the default
        (lambda: [Checkpoint(folder="a", every_n_epochs=2)], [None, [5]]),
        (lambda: [best(folder="a"), best(folder="b", mode="max")], [[5], [1], [5]]),
        (lambda: [best(folder="a", weights_only=True)], [[5], [1]]),
        (lambda: ["checkpoint"], [[5]]),
    ],
)
def test_the_default_saves_the_latest_beside_what_watches_something(
    callbacks: Callable[[], list[Any]], steps: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = scores([1, 2, 3, 4, 5], callbacks=callbacks(), default_callbacks=True)
    folders = [folder for folder in ("checkpoints", "a", "b") if Path("runs/run", folder).exists()]
    assert [left(Path("runs/run", folder)) for folder in folders] == [each for each in steps if each is not None]
    assert result.best_checkpoint is not None
    watched = isinstance(callbacks()[0], Checkpoint) and callbacks()[0].monitor if callbacks() else None
    assert result.best_checkpoint.name == ("step_00000001" if watched else "step_00000005")


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        (lambda: [best(folder="a"), Checkpoint(folder="b")], {"a": [4], "b": [5]}),
        (lambda: [best(folder="a"), best(folder="b", mode="max")], {"a": [4, 5], "b": [4, 5]}),
        (lambda: [best(folder="a"), Checkpoint(folder="b", save_top_k=0)], {"a": [4, 5], "b": []}),
        (lambda: [best(folder="a"), Checkpoint(folder="b", save_top_k=0, save_last=True)], {"a": [4], "b": [5]}),
        (lambda: [best(folder="a"), Checkpoint(folder="b", weights_only=True)], {"a": [4, 5], "b": [4]}),
        (lambda: [Checkpoint(folder="a", weights_only=True)], {"a": [5]}),
        (lambda: [best(folder="a", weights_only=True)], {"a": [4, 5]}),
    ],
)
def test_the_end_in_the_middle_of_an_epoch_is_saved_by_somebody(
    callbacks: Callable[[], list[Checkpoint]], expected: dict[str, list[int]]
) -> None:
    fit(Scripted([1, 2]), *callbacks(), batches=4, max_steps=5)
    assert {folder: left(Path("runs/run", folder)) for folder in expected} == expected


# When


class Saved(Callback):
    """Keeps which checkpoints there ever were."""

    identifying = ("folder",)

    def __init__(self, folder: str = "checkpoints") -> None:
        self.folder, self.steps = folder, set[int]()

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        assert run.run_dir is not None
        self.steps |= set(left(run.run_dir / self.folder))

    def on_fit_end(self, run: Run) -> None:
        assert run.run_dir is not None
        self.steps |= set(left(run.run_dir / self.folder))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"every_n_steps": 4}, {4, 8, 12, 15}),
        ({"every_n_steps": 5}, {5, 10, 15}),
        ({"every_n_epochs": 2}, {10, 15}),
        ({"every_n_epochs": 1}, {5, 10, 15}),
        ({"every_n_steps": 4, "every_n_epochs": 1}, {4, 5, 8, 10, 12, 15}),
        ({"every": 1e9}, {15}),
        ({"every_n_epochs": 3, "every": timedelta(days=9)}, {15}),
        ({}, {5, 10, 15}),
        ({"monitor": "val/acc", "mode": "max", "save_last": True}, {5, 10, 15}),
        ({"monitor": "val/acc", "mode": "max", "every_n_epochs": 2}, {10, 15}),
        ({"monitor": "val/acc", "mode": "max", "every_n_steps": 7}, {15}),  # no step with a fresh value is one of 7
        ({"monitor": "train/loss", "mode": "max"}, {5, 15}),
    ],
)
def test_one_is_saved_when_it_is_due(settings: dict[str, Any], steps: set[int]) -> None:
    saved = Saved()
    fit(Scripted(), Checkpoint(**settings), saved, batches=5)
    assert saved.steps == steps


def test_each_value_of_validation_inside_an_epoch_counts_once() -> None:
    saved = Saved()
    fit(Scripted(), best(mode="max", save_last=True), saved, batches=5, val_check_interval=2, max_epochs=2)
    assert saved.steps == {2, 4, 6, 8, 10}
    saved = Saved()
    fit(
        Scripted(),
        best(mode="max", every_n_steps=4, save_top_k=-1),
        saved,
        batches=5,
        val_check_interval=2,
        max_epochs=2,
        run_name="two",
    )
    assert saved.steps == {4, 8, 10}


class Clock:
    """Stands for time.monotonic in the callback; every step takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        import time

        monkeypatch.setattr("sanctuary_trainer.callbacks.checkpoint.time", self)
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return self.now


class Ticks(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_step_end(self, run: Run) -> None:
        self.clock.now += 1


def test_one_is_due_every_so_many_seconds_each_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, often, rarely = Clock(monkeypatch), Saved("often"), Saved("rarely")
    fit(
        Scripted(),
        Ticks(clock),
        Checkpoint(folder="often", every=3),
        Checkpoint(folder="rarely", every=timedelta(seconds=8)),
        often,
        rarely,
        batches=20,
        max_epochs=1,
        max_steps=19,
    )
    assert often.steps == {4, 8, 12, 16, 19}  # asked for at 3, told with the window to 4; then 3 seconds from there
    assert rarely.steps == {8, 16, 19}  # here the other one has brought all to a save point just in time


def test_somebody_elses_wish_for_a_save_point_is_not_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asks(Callback):
        points = 0

        def on_train_step_end(self, run: Run) -> None:
            run.save_soon()

        def on_save_point(self, run: Run) -> None:
            self.points += run.save_asked

    asks, saved = Asks(), Saved()
    fit(Scripted(), asks, Checkpoint(every=1e9), saved, batches=6, max_epochs=1)
    assert asks.points >= 4 and saved.steps == {6}


def test_the_time_counts_from_the_last_try(monkeypatch: pytest.MonkeyPatch) -> None:
    import sanctuary_trainer.saving as saving

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    clock = Clock(monkeypatch)
    with told() as texts, monkeypatch.context() as patch:
        patch.setattr(saving, "write_checkpoint", full)
        with pytest.raises(CheckpointError):
            fit(Scripted(), Ticks(clock), Checkpoint(every=4), batches=20, max_epochs=1)
    assert len(texts) == 4 - 1, "one try in 5 steps, not one in each; the last is the error"


def test_nothing_is_saved_before_anything_was_trained() -> None:
    class Stops(Callback):
        def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
            import signal

            if stage == "sanity":
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(Scripted(), Checkpoint(), Stops(), num_sanity_val_steps=1)
    assert visible(Path("runs/run/checkpoints")) == []


def test_the_end_is_saved_too_when_it_comes_in_a_window_that_is_left_out() -> None:
    class Leaves(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                self.run.stop("enough")
                return None
            return super().training_step(batch, batch_idx)

    result = fit(Leaves(), Checkpoint(), batches=6)
    assert result.stop_reason == "enough" and left() == [3]
    assert read_manifest(result.best_checkpoint)["batch"] == 4


# What is watched


def test_a_monitor_that_nothing_logs_is_told_with_the_nearest() -> None:
    text = r"'val/accc', which nothing has logged; there are .*val/acc.*\. Did you mean 'val/acc'"
    with told() as texts, pytest.raises(SettingsError, match=text):
        fit(Scripted(), best(monitor="val/accc"), num_sanity_val_steps=1)
    assert len(texts) == 1 and "sanity validation did not log. Did you mean 'val/acc'?" in texts[0]
    with pytest.raises(SettingsError, match="'train/los', which nothing has logged"):
        fit(Scripted(), best(monitor="train/los"), run_name="two")
    assert left("runs/two/checkpoints") == [2], "what was trained is not lost"
    with pytest.raises(SettingsError, match="'val/acc', and this fit has nothing to validate with"):
        fit(Scripted(), best(), val=False, run_name="three")


def test_a_monitor_that_comes_late_is_waited_for() -> None:
    fit(Scripted(), best(mode="max"), check_val_every_n_epoch=2)
    assert left() == [4, 6]
    fit(Scripted(), best(mode="max", monitor="train/loss"), run_name="two", val_check_interval=1)
    assert left("runs/two/checkpoints") == [2, 6]


def test_averaged_weights_are_watched_by_the_name_of_their_values() -> None:
    task = Net()
    callbacks = [EMA(), best(monitor="val/loss_ema"), best(monitor="val/loss_emo", folder="b")]
    data = loader(classes(8), 4)
    with told() as texts, pytest.raises(SettingsError, match="Did you mean 'val/loss_ema'"):
        quiet_trainer(max_epochs=1, callbacks=callbacks, num_sanity_val_steps=1, run_name="run").fit(task, data, data)
    assert len(texts) == 1 and "loss_emo" in texts[0] and "Did you mean 'val/loss_ema'" in texts[0]


# Goes on


def test_what_is_kept_survives_a_resume_in_any_order_and_the_best_stays_untouched() -> None:
    """Two Checkpoints and two that stop early: each gets its own state back."""

    def callbacks() -> list[Any]:
        return [
            best(save_top_k=1, name="best"),
            best(mode="max", save_top_k=2, folder="high"),
            EarlyStopping("val/acc", "min", patience=3),
            EarlyStopping("val/other", "min", patience=9),
            Checkpoint(),
        ]

    values = [0.9, 1.0, 1.0, 1.0, 0.1]
    scores(values[:3], *callbacks(), max_epochs=3)
    stamp = Path("runs/run/checkpoints/best/manifest.json").stat().st_mtime_ns
    shutil.copytree("runs", "kept")
    for order in (1, -1):
        ours = callbacks()[::order]
        with told() as texts:
            result = fit(Scripted(values), *ours, batches=1, max_epochs=5, resume="auto")
        assert texts == []
        assert result.global_step == 4 and result.stop_reason.startswith("EarlyStopping"), "the third bad one"
        assert result.best_checkpoint in (Path("runs/run/checkpoints/best"), Path("runs/run/high/step_00000002"))
        assert Path("runs/run/checkpoints/best/manifest.json").stat().st_mtime_ns == stamp
        assert w_of(Path("runs/run/checkpoints/best")) == -1.0
        assert left() == [1, 4] and left("runs/run/high") == [2, 3]
        shutil.rmtree("runs")
        shutil.copytree("kept", "runs")
    with told() as texts:  # one taken out, one new
        fit(Scripted(values), *callbacks()[1:], best(folder="new"), batches=1, max_epochs=4, resume="auto")
    assert len(texts) == 2
    assert "has a state of Checkpoint(monitor='val/acc', mode='min', folder=" in texts[1] and "takes it" in texts[1]
    assert "folder=PosixPath('new')" in texts[0] and "starts fresh" in texts[0]
    assert left("runs/run/high") == [2, 3] and left("runs/run/new") == [4]


@pytest.mark.parametrize(
    "settings",
    [
        {"save_top_k": 1},
        {"save_top_k": 2, "save_last": True},
        {"save_top_k": 2, "name": "best"},
        {"save_top_k": 0, "save_last": True, "mode": "max"},
        {"save_top_k": 3, "mode": "max", "every_n_epochs": 2},
    ],
)
def test_what_is_left_at_the_end_is_the_same_wherever_a_run_was_cut(settings: dict[str, Any]) -> None:
    values = [4.0, 2.0, 5.0, NAN, 1.0, 3.0]
    found = []
    with told():
        for cut in range(1, 7):
            callbacks = best(**settings), Checkpoint(folder="latest", save_top_k=2)
            for epochs in sorted({cut, 6}):
                scores(values, *callbacks, max_epochs=epochs, run_name=str(cut), resume="auto")
            assert left(f"runs/{cut}/checkpoints") == sorted(entry.step for entry in callbacks[0].kept)
            found.append(([entry[1:] for entry in callbacks[0].kept], left(f"runs/{cut}/latest")))
    assert all(each == found[-1] for each in found)


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 5).map(float)), max_size=12),
    st.integers(-1, 4),
    st.sampled_from(["min", "max"]),
    st.booleans(),
)
def test_the_best_are_those_that_sorting_all_values_finds(
    values: list[float | None], most: int, mode: str, newest_too: bool
) -> None:
    kept, seen = Kept(most, mode, newest_too), []
    for step, value in enumerate(values):
        new = Entry(Path(str(step)), step, value)
        if value is not None and not kept.enters(value, step):
            continue
        if value is not None:
            seen.append(new)
        kept = kept.after(new)
        assert new in kept.entries, "what was written is kept"
        assert Kept(most, mode, newest_too).loaded(kept.state_dict()) == kept
        assert kept.newest == (new if newest_too or value is None else None)
    everything = [(value, step) for step, value in enumerate(values) if value is not None]
    everything.sort(key=lambda each: (each[0] if mode == "min" else -each[0], each[1]))
    expected = everything if most < 0 else everything[:most]
    assert [(entry.value, entry.step) for entry in kept.ranked] == expected


def test_fewer_may_be_kept_after_a_resume() -> None:
    scores([3, 1, 2], best(save_top_k=3))
    assert left() == [1, 2, 3]
    scores([3, 1, 2, 1.5, 9], best(save_top_k=1), resume="auto")
    assert left() == [2, 5], "the best, and the end"
    scores([3, 1, 2, 1.5, 9, 4], best(save_top_k=2), resume="auto")
    assert left() == [2, 6]


def test_the_end_of_an_attempt_goes_when_a_newer_one_is_written() -> None:
    scores([2, 3], best())
    assert left() == [1, 2], "the best, and the end"
    scores([2, 3, 4, 1], best(), resume="auto")
    assert left() == [4]
    scores([2, 3, 4, 1, 5], best(), resume="auto")
    assert left() == [4, 5]


def test_what_an_abandoned_attempt_removed_is_not_counted_as_kept() -> None:
    def callbacks() -> list[Any]:
        return [best(folder="best"), Checkpoint(save_top_k=-1)]

    scores([3, 2, 1], *callbacks())
    assert left("runs/run/best") == [3]
    ours = callbacks()
    result = scores([3, 2, 4], *ours, resume=Path("runs/run/checkpoints/step_00000002"))
    # At step 2 the best was step 2's, which is gone; the one of step 3, of another branch, is replaced.
    assert [entry.step for entry in ours[0].kept] == [3] and left("runs/run/best") == [3]
    assert result.best_checkpoint == Path("runs/run/best/step_00000003") and w_of(result.best_checkpoint) == -3
    values = [read_state(path)["metrics"]["val/acc"] for path in Path("runs/run/best").iterdir()]
    assert values == [4]


def test_a_run_with_another_name_leaves_the_first_ones_checkpoints_alone() -> None:
    shared = Path.cwd() / "shared"
    for settings in ({"folder": shared}, {}):
        scores([2, 3], best(save_top_k=2, **settings), run_name="one")
        folder = settings.get("folder", Path("runs/one/checkpoints"))
        ours = best(save_top_k=2, **settings)
        result = scores([2, 3, 4, 5], ours, resume=folder / "step_00000002", run_name="two")
        assert read_manifest(folder / "step_00000001")["run"] == read_manifest(folder / "step_00000002")["run"]
        assert [entry.step for entry in ours.kept] == [3, 4] and result.best_checkpoint.name == "step_00000003"
        shutil.rmtree("runs")


def test_what_a_killed_process_had_yet_to_remove_is_removed() -> None:
    """It was killed when the new one was complete and the old one not yet gone."""
    scores([3, 2], best(), best(folder="other", mode="max"))
    shutil.copytree("runs", "kept")
    scores([3, 2, 1], best(), best(folder="other", mode="max"), resume="auto")
    shutil.copytree("kept/run/checkpoints/step_00000002", "runs/run/checkpoints/step_00000002")
    shutil.rmtree("runs/run/other")
    shutil.copytree("kept/run/other", "runs/run/other")  # its new one was to be written next
    assert left() == [2, 3] and left("runs/run/other") == [1, 2]
    low, high = best(), best(folder="other", mode="max")
    scores([3, 2, 1, 4], low, high, resume="auto")
    assert left() == [3, 4] == sorted(entry.step for entry in low.kept)
    assert left("runs/run/other") == [4] == [entry.step for entry in high.kept]


def test_a_second_fit_of_the_same_callbacks_starts_with_nothing() -> None:
    checkpoint = best()
    trainer = quiet_trainer(max_epochs=2, callbacks=[checkpoint])
    data = loader(floats([1]), 1)
    for number in (1, 2):
        trainer.fit(Scripted(), data, data)
        assert [entry.step for entry in checkpoint.kept] == [1, 2]
        assert visible(Path("runs")) == [f"scripted-{n}" for n in range(1, number + 1)]
    trainer.validate(Scripted(), data)
    assert checkpoint.best == Path("checkpoints/step_00000001"), "it can be asked for afterwards"


# A folder that several runs share


def test_runs_that_share_a_folder_touch_only_their_own() -> None:
    shared = Path.cwd() / "shared"

    def callback() -> Checkpoint:
        return best(folder=shared, name="best", save_last=True)

    (shared / "notes").mkdir(parents=True)
    (shared / "notes" / "model.safetensors").touch()
    results = [scores([3, 1, 2], callback(), run_name=name) for name in ("one", "two")]
    assert visible(shared) == ["best", "best-2", "best-3", "best-4", "last", "last-2", "notes"]
    owners = {name: read_manifest(shared / name).get("run") for name in visible(shared)}
    ids = [json.loads(Path("runs", name, "run.json").read_bytes())["id"] for name in ("one", "two")]
    for result, run_id in zip(results, ids, strict=True):
        assert owners[result.best_checkpoint.name] == run_id and w_of(result.best_checkpoint) == -2
    assert [read_manifest(shared / name)["run"] for name in ("last", "last-2")] == ids
    assert [read_manifest(shared / name)["global_step"] for name in ("last", "last-2")] == [3, 3]

    before = {path: path.stat().st_mtime_ns for path in shared.rglob("*") if ids[0] in _owner(path, shared)}
    for more in (4, 5):
        ours = callback()
        result = scores([3, 1, 2, 0, 5][:more], ours, run_name="two", resume="last")
        assert all(read_manifest(shared / entry.path)["run"] == ids[1] for entry in ours.kept)
        assert all(read_manifest(shared / entry.path)["global_step"] == entry.step for entry in ours.kept)
    assert [entry.step for entry in ours.kept] == [4, 5] and w_of(result.best_checkpoint) == -4
    assert {path: path.stat().st_mtime_ns for path in before} == before
    mine = [name for name in visible(shared) if _owner(shared / name, shared) == ids[1]]
    assert len(mine) == 3, "the best, the newest, and the link"


def _owner(path: Path, shared: Path) -> str:
    return str(read_manifest(shared / path.relative_to(shared).parts[0]).get("run", ""))


def test_unfinished_folders_are_tidied_by_the_run_they_belong_to_alone() -> None:
    shared = Path.cwd() / "shared"
    scores([1, 2], Checkpoint(folder=shared), run_name="one")
    run_id = json.loads(Path("runs/one/run.json").read_bytes())["id"]
    ours, theirs = shared / f".step_00000009.{run_id}.partial", shared / ".step_00000009.ba9876543210.partial"
    for path in (ours, theirs, Path("runs/one/.run.json.17.partial")):
        path.mkdir() if path.parent == shared else path.touch()
    scores([1, 2], Checkpoint(folder=shared), run_name="two")
    assert ours.exists() and theirs.exists()
    scores([1, 2, 3], Checkpoint(folder=shared), run_name="one", resume="auto")
    assert hidden(shared) == [theirs.name] and hidden(Path("runs/one")) == []


# The link


@pytest.mark.parametrize("links", [True, False])
def test_last_is_the_newest(links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        refuse_links(monkeypatch)
    scores([1, 3, 2], best(save_last=True))
    last = Path("runs/run/checkpoints/last")
    check_whole(last)
    assert last.is_symlink() == links and w_of(last) == -3
    result = scores([1, 3, 2, 4], best(save_last=True), resume=last)
    assert result.global_step == 4 and w_of(last) == -4
    assert visible(last.parent) == ["last", "step_00000001", "step_00000004"] and hidden(last.parent) == []
    assert scores([1, 3, 2, 4, 5], best(save_last=True), resume="auto").global_step == 5
    assert visible(last.parent) == ["last", "step_00000001", "step_00000005"]


def test_a_link_that_cannot_be_made_is_told_and_the_checkpoint_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import sanctuary_trainer.saving as saving

    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "write_link", refuse)
    with told() as texts:
        result = scores([1, 2], Checkpoint(save_last=True))
    assert left() == [2] and w_of(result.best_checkpoint) == -2
    assert len(texts) == 2 and all("The link runs/run/checkpoints/last to " in text for text in texts)


# Errors in the run


class Raises(Callback):
    def __init__(self, hook: str, step: int, error: BaseException) -> None:
        self.hook, self.step, self.error = hook, step, error

    def _at(self, hook: str, run: Run) -> None:
        if hook == self.hook and run.state.global_step == self.step:
            raise self.error

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        self._at("batch", run)

    def on_before_optimizer_step(self, run: Run) -> None:
        self._at("step", run)

    def on_train_step_end(self, run: Run) -> None:
        self._at("step end", run)

    def on_evaluation_batch_end(self, run: Run, stage: str, batch: Any, outputs: Any, sample_indices: Any) -> None:
        self._at("validation", run)

    def on_save_point(self, run: Run) -> None:
        self._at("save point", run)


def plain_fit(*callbacks: Callback, resume: Any = None, **settings: Any) -> Any:
    task = Net(seed=3)
    defaults: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 2, "seed": 5, "run_name": "run"}
    data = loader(classes(20), 4, shuffle=True)
    trainer = quiet_trainer(callbacks=callbacks, **{**defaults, **settings})
    return task, trainer.fit(task, data, loader(classes(6, seed=2), 3), resume=resume)


@pytest.mark.parametrize(
    ("hook", "saved"),
    [("batch", []), ("step", []), ("step end", []), ("validation", [4]), ("save point", [4])],
)
def test_an_error_at_an_exact_boundary_leaves_a_checkpoint_there(hook: str, saved: list[int]) -> None:
    straight, _ = plain_fit(run_name="straight")
    with pytest.raises(ZeroDivisionError):
        plain_fit(Checkpoint(), Raises(hook, 4, ZeroDivisionError()))
    assert left() == saved
    if saved:
        task, result = plain_fit(Checkpoint(), resume="auto")
        assert result.global_step == 10 and torch.equal(weights(task), weights(straight))


@pytest.mark.parametrize(
    ("settings", "error", "saved"),
    [
        ({"on_exception": False}, ZeroDivisionError(), []),
        ({}, KeyboardInterrupt(), []),
        ({}, SystemExit(), [4]),
        ({"save_top_k": 0}, ZeroDivisionError(), []),
        ({"save_top_k": 0, "save_last": True}, ZeroDivisionError(), [4]),
        ({"every_n_steps": 2}, ZeroDivisionError(), [4]),
    ],
)
def test_what_is_saved_on_an_error_can_be_chosen(
    settings: dict[str, Any], error: BaseException, saved: list[int]
) -> None:
    with pytest.raises(type(error)):
        plain_fit(Checkpoint(**settings), Raises("save point", 4, error))
    assert left() == saved


def test_where_several_could_save_on_an_error_one_that_may_does() -> None:
    with pytest.raises(ZeroDivisionError):
        plain_fit(
            Checkpoint(on_exception=False),
            best(monitor="val/loss", folder="best"),
            Raises("save point", 5, ZeroDivisionError()),
        )
    assert left("runs/run/best")[-1] == 5


# What cannot be written


class Fails(Callback):
    """Lets the disk fail from one step on, and heals it at another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int, until: int = 99) -> None:
        self.patch, self.first, self.until = monkeypatch, first, until

    def on_train_step_end(self, run: Run) -> None:
        import sanctuary_trainer.checkpoint_folder as checkpoint_folder

        def fsync(path: Path) -> None:
            raise OSError(errno.EIO, "Input/output error")

        if run.state.global_step == self.first:
            self.patch.setattr(checkpoint_folder, "to_disk", fsync)
        if run.state.global_step == self.until:
            self.patch.undo()


def test_a_write_that_fails_is_one_warning_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with told() as texts:
        result = scores([5, 4, 3, 2], best(), Fails(monkeypatch, 2, until=4))
    assert left() == [4] and w_of(result.best_checkpoint) == -4
    assert len(texts) == 2
    for number, text in enumerate(texts, start=2):
        assert text == (
            f"The checkpoint runs/run/checkpoints/step_{number:08d} could not be written: [Errno 5] Input/output error."
            " The checkpoints before stay."
        )


def test_a_last_write_that_fails_is_an_error_and_leaves_the_former_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"The run's last checkpoint could not be written.*Input/output error"):
        scores([0] * 3, Checkpoint(), Fails(monkeypatch, 3))
    monkeypatch.undo()
    assert left() == [2]
    assert scores([0] * 3, Checkpoint(), resume="last").global_step == 3


def test_a_name_that_is_used_again_keeps_its_former_content_when_a_write_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with told(), pytest.raises(CheckpointError):
        scores([0] * 3, Checkpoint(name="only", save_last=True), Fails(monkeypatch, 2))
    monkeypatch.undo()
    assert visible(Path("runs/run/checkpoints")) == ["last", "only"] and left() == [1]
    assert w_of(Path("runs/run/checkpoints/last")) == -1


@pytest.mark.parametrize("whole_run", [True, False])
def test_a_disk_that_is_full(whole_run: bool) -> None:
    class Heavy(Scripted):
        def __init__(self) -> None:
            super().__init__([5, 4, 3])
            self.register_buffer("load", torch.zeros(50_000, dtype=torch.float64))

    with small_disk(Path.cwd() / "disk", "700k") as disk:
        where = {"project_dir": disk} if whole_run else {}
        checkpoint = Checkpoint() if whole_run else Checkpoint(folder=disk / "run" / "checkpoints")
        with told() as texts, pytest.raises(CheckpointError, match=r"last checkpoint .* (?i:no space left)"):
            fit(Heavy(), checkpoint, batches=1, **where)
        assert len(texts) == 1 and "no space left" in texts[0].lower()
        assert left(disk / "run" / "checkpoints") == [1]


def test_a_folder_that_cannot_be_written_to_is_told_before_the_run() -> None:
    Path("file").touch()
    for folder in (Path("file").absolute(), Path("file").absolute() / "inside", "/proc/nothing"):
        task = Scripted()
        with pytest.raises(RunFolderError, match="for checkpoints cannot be"):
            fit(task, Checkpoint(folder=folder), run_name=None)
        assert task.steps == []


def test_a_folder_that_becomes_read_only_is_told_and_the_former_checkpoint_stays() -> None:
    import subprocess

    with small_disk(Path.cwd() / "disk", "2m") as disk:

        class Locks(Callback):
            def on_train_step_end(self, run: Run) -> None:
                if run.state.global_step == 2:
                    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)

        with told() as texts, pytest.raises(CheckpointError, match=r"last checkpoint .*Read-only file system"):
            scores([0] * 3, Checkpoint(folder=disk / "c"), Locks())
        assert len(texts) == 1 and left(disk / "c") == [1]
        with pytest.raises(RunFolderError, match="for checkpoints cannot be written to"):
            scores([0] * 3, Checkpoint(folder=disk / "c"), resume="auto")


def test_one_that_cannot_be_removed_is_told_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def refusing(source: Any, target: Any) -> None:
        if str(target).endswith(".removed"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refusing)
    with told() as texts:
        scores([0] * 3, Checkpoint())
    assert left() == [1, 2, 3]
    assert len(texts) == 2 and all("could not be removed: [Errno 1]" in text for text in texts)


def test_an_error_that_is_not_the_disks_ends_the_run_with_its_own_text() -> None:
    class Odd(nn.Module):
        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir()
            raise KeyError("config")

    task = Scripted()
    task.odd = Odd()
    with pytest.raises(KeyError, match="config"):
        fit(task, Checkpoint())
    assert left() == []
    task = Scripted()
    task.odd = Odd()
    fit(task, Checkpoint(save_pretrained=False), run_name="two")


def test_a_callback_of_a_user_asks_for_checkpoints_of_its_own() -> None:
    class Mine(Callback):
        seen: list[Any] = []

        def on_save_point(self, run: Run) -> None:
            if run.state.global_step == 3:
                run.save_checkpoint("mine/three", weights_only=True, done=lambda path, failure: self.seen.append(path))

    mine = Mine()
    fit(Scripted(), mine, Checkpoint())
    assert mine.seen == [Path("runs/run/mine/three")] and left("runs/run/mine") == [3] and left() == [6]


# After the fit


def test_test_validate_and_predict_take_the_weights_of_a_checkpoint() -> None:
    class Shows(Scripted):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            super().validation_step(batch, batch_idx)
            self.log("w", self.w)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch * self.w

    task, data = Shows([3, 1, 2]), loader(floats([1]), 1)
    result = fit(task, best(), Checkpoint(folder="last"), batches=1)
    assert task.w.item() == -3
    trainer = quiet_trainer(num_sanity_val_steps=0)
    path = result.best_checkpoint
    assert path is not None
    for source in (result, path, str(path), path / "model.safetensors", Path("runs/run/last/step_00000003")):
        expected = -3 if "last" in str(source) and source is not result else -2
        for verb, name in ((trainer.test, "test/w"), (trainer.validate, "val/w")):
            other = Shows([0.0])
            assert verb(other, data, checkpoint=source)[name] == expected
            assert other.w.item() == expected
        assert trainer.predict(Shows(), data, checkpoint=source) == [expected]
    with pytest.raises(CheckpointError, match=r"nothing/model.*cannot be read|nothing cannot be read"):
        trainer.test(Shows(), data, checkpoint=Path("nothing"))
    with pytest.raises(CheckpointError, match="a path, or what fit returned, was expected"):
        trainer.test(Shows(), data, checkpoint=3)
    os.truncate(path / "model.safetensors", 9)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        trainer.test(Shows(), data, checkpoint=result)
    none = fit(Shows(), run_name="two")
    with pytest.raises(CheckpointError, match="The fit wrote no checkpoint"):
        trainer.test(Shows(), data, checkpoint=none)
    with pytest.raises(CheckpointError, match="share no key with Net"):
        trainer.test(Net(), loader(classes(4)), checkpoint=Path("runs/run/last/step_00000003"))


class Counts(Callback):
    def __init__(self) -> None:
        self.hooks: list[str] = []

    def setup(self, run: Run) -> None:
        self.hooks.append(f"setup {run.verb}")

    def on_fit_start(self, run: Run) -> None:
        self.hooks.append("fit start")

    def on_train_epoch_start(self, run: Run) -> None:
        self.hooks.append(f"epoch {run.state.epoch}")

    def on_fit_end(self, run: Run) -> None:
        self.hooks.append("fit end")

    def teardown(self, run: Run) -> None:
        self.hooks.append(f"teardown {run.verb}")


def several_verbs() -> Any:
    """validate, fit for 2 epochs, predict, fit for 2 more; then another Trainer. What each left in its checkpoint."""
    task, counts = Net(seed=4), Counts()
    data = loader(classes(16), 4)
    trainer = quiet_trainer(max_epochs=2, callbacks=[Checkpoint(), counts], seed=1)
    trainer.validate(task, data)
    results = [trainer.fit(task, data, data)]
    trainer.predict(task, data)
    results.append(trainer.fit(task, data, data))
    results.append(quiet_trainer(max_epochs=1, callbacks=[Checkpoint()], seed=1).fit(task, data, data))
    found = []
    for result in results:
        assert result.best_checkpoint is not None
        state = read_state(result.best_checkpoint)
        keys = sorted(read_tensors(result.best_checkpoint / "model.safetensors")[0])
        optimizers = [len(each["groups"]) for each in state["optimizer"]["optimizers"]]
        found.append((str(result.run_dir), state["progress"], keys, optimizers, result.global_step))
    return found, counts.hooks, weights(task)


def check_several_verbs(found: list[Any], hooks: list[str], steps: int) -> None:
    keys = ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]
    for number, (run_dir, progress, stored, optimizers, made) in enumerate(found):
        epochs = [2, 2, 1][number]  # limits count from the start of each run
        assert run_dir == f"runs/net-{number + 1}"
        assert (progress["epoch"], progress["batch"], progress["global_step"]) == (epochs, 0, epochs * steps)
        assert made == epochs * steps and stored == keys and optimizers == [1]
    a_fit = ["setup fit", "fit start", "epoch 0", "epoch 1", "fit end", "teardown fit"]
    around = ["setup validate", "teardown validate"], ["setup predict", "teardown predict"]
    assert hooks == [*around[0], *a_fit, *around[1], *a_fit]


def test_several_verbs_on_one_trainer_leave_one_of_everything() -> None:
    found, hooks, _ = several_verbs()
    check_several_verbs(found, hooks, steps=4)
