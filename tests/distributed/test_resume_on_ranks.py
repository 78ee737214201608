"""Runs on several ranks that are cut off, or get a signal on one rank, and go on: also on another number of ranks."""

from __future__ import annotations

import os
import signal
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from sanctuary_trainer import Callback, Run
from sanctuary_trainer.callbacks import Checkpoint
from tests.distributed.workers import Ranks
from tests.small_tasks import Line, Net, Numbers, classes, floats, loader, quiet_trainer, weights
from tests.test_resume import Cut, CutAt, curves, fit_everything
from tests.test_signals import Adam


def cut_and_go_on(folder: str, cuts: list[tuple[Any, ...]], settings: dict[str, Any]) -> Any:
    """Straight, then cut off at each of these moments and continued; whether both came out alike."""
    straight, _ = fit_everything(Path(folder), run_name="straight", **settings)
    given = []
    for cut in [*cuts, None]:
        callbacks = () if cut is None else (CutAt(*cut),)
        task, _ = fit_everything(Path(folder), *callbacks, run_name="cut", resume="auto", **settings)
        given.append(task.given)
    same = curves(Path(folder) / "straight") == curves(Path(folder) / "cut")
    return torch.equal(weights(straight), weights(task)), same, straight.given, given


CUTS = [("on_train_batch_end", 1), ("on_train_batch_start", 2), ("on_evaluation_batch_end", 2), ("on_save_point", 4)]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_go_on_as_if_they_had_not_been_cut_off(two_ranks: Ranks, run_folder: Path, workers: int) -> None:
    for equal, same, straight, given in two_ranks(
        cut_and_go_on, str(run_folder), CUTS, {"workers": workers, "num_sanity_val_steps": 0}, timeout=100
    ):
        assert equal and same
        last = {(epoch, batch): indices for attempt in given for epoch, batch, indices in attempt}
        assert last == {(epoch, batch): indices for epoch, batch, indices in straight}


def cut(folder: str, step: int, **settings: Any) -> Any:
    return fit_everything(Path(folder), CutAt("on_train_batch_start", step), **settings)[0].given


def go_on(folder: str, **settings: Any) -> Any:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        task, result = fit_everything(Path(folder), resume="auto", **settings)
    assert result is not None
    draws = torch.rand(2).tolist()
    return task.given, result.global_step, [str(each.message) for each in told], weights(task), draws


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_another_number_of_ranks_deals_the_rest_of_the_epoch(
    run_folder: Path, before: int, after: int, one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks
) -> None:
    ranks = {1: one_rank, 2: two_ranks, 3: three_ranks}
    used = [index for given in ranks[before](cut, str(run_folder), 1) for _, _, indices in given for index in indices]
    results = ranks[after](go_on, str(run_folder))
    rest = [index for given, *_ in results for epoch, _, indices in given if epoch == 0 for index in indices]
    assert len(used) == 8 * before
    assert sorted(used + rest) == list(range(22))
    later = [index for given, *_ in results for epoch, _, indices in given if epoch == 1 for index in indices]
    assert sorted(later) == list(range(22))
    assert f"ranks {before} -> {after}" in results[0][2][0]
    assert all(torch.equal(each[3], results[0][3]) for each in results)
    assert len({tuple(each[4]) for each in results}) == after  # no two ranks draw alike


def test_ranks_that_change_give_the_same_every_time(run_folder: Path, one_rank: Ranks, two_ranks: Ranks) -> None:
    import shutil

    one_rank(cut, str(run_folder), 1)
    shutil.copytree(run_folder, run_folder.with_name("copy"))
    first, second = (two_ranks(go_on, str(folder)) for folder in (run_folder, run_folder.with_name("copy")))
    assert torch.equal(first[0][3], second[0][3])
    assert [each[4] for each in first] == [each[4] for each in second]


class Uneven(IterableDataset[Any]):
    """3 batches of one sample on rank 0, 5 on rank 1."""

    def __iter__(self) -> Any:
        rank = int(os.environ["RANK"])
        return iter(floats(range(10 * rank, 10 * rank + (3, 5)[rank])))


def uneven(folder: str, step: int | None, name: str) -> Any:
    task = Line(0.01)
    trainer = quiet_trainer(
        max_epochs=2,
        shard_data=False,
        project_dir=folder,
        run_name=name,
        callbacks=[Checkpoint(every_n_steps=1), *([] if step is None else [CutAt("on_train_batch_start", step)])],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(task, DataLoader(Uneven(), 1), loader(floats(range(3))), resume="auto")
        except Exception as error:
            return type(error).__name__
    return task.batches, task.w.item(), trainer.validate(task, loader(floats(range(3))))


def test_streams_of_unequal_length_are_saved_and_go_on(two_ranks: Ranks, run_folder: Path) -> None:
    """Iterable data sets, case 98, with validation and a checkpoint; then cut off and continued."""
    straight = two_ranks(uneven, str(run_folder), None, "a")
    two_ranks(uneven, str(run_folder), 2, "b")
    two_ranks(uneven, str(run_folder), 4, "b")
    last = two_ranks(uneven, str(run_folder), None, "b")
    assert [each[1:] for each in last] == [each[1:] for each in straight]
    assert [len(each[0]) for each in straight] == [6, 10]


class SignalOn(Callback):
    """Sends a signal to one rank, before a step's update or in a validation."""

    def __init__(self, rank: int, in_validation: bool) -> None:
        self.rank, self.in_validation, self.sent = rank, in_validation, False

    def _send(self, run: Run) -> None:
        if run.rank == self.rank and run.state.global_step >= 2 and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    def on_before_optimizer_step(self, run: Run) -> None:
        if not self.in_validation:
            self._send(run)

    def on_evaluation_batch_end(self, run: Run, stage: str, batch: Any, outputs: Any, sample_indices: Any) -> None:
        if self.in_validation:
            self._send(run)


def signalled(folder: str, rank: int | None, in_validation: bool, resume: str | None = None) -> Any:
    task = Adam()
    sender = [] if rank is None else [SignalOn(rank, in_validation)]
    trainer = quiet_trainer(
        max_epochs=2, seed=0, project_dir=folder, run_name="run", callbacks=[Checkpoint(), *sender], timeout=30
    )
    try:
        trainer.fit(task, loader(classes(20), 2, shuffle=True), loader(classes(40), 2), resume=resume)
        status: Any = None
    except SystemExit as left:
        status = left.code
    return status, task.ends, task.validated, weights(task)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("in_validation", [False, True])
def test_a_signal_to_one_rank_ends_all_at_the_same_step(
    two_ranks: Ranks, run_folder: Path, rank: int, in_validation: bool
) -> None:
    """Signals, case 112."""
    ended = two_ranks(signalled, str(run_folder / "a"), rank, in_validation)
    assert [each[0] for each in ended] == [143, 143]
    assert all(each[1] == ["on_fit_end SIGTERM", "teardown"] for each in ended)
    [saved] = (run_folder / "a" / "run" / "checkpoints").iterdir()
    assert saved.name == ("step_00000005" if in_validation else "step_00000004")
    if in_validation:
        assert all(each[2] <= 2 for each in ended)
    second = two_ranks(signalled, str(run_folder / "a"), None, in_validation, "auto")
    straight = two_ranks(signalled, str(run_folder / "b"), None, in_validation)
    assert all(torch.equal(one[3], other[3]) for one, other in zip(second, straight, strict=True))


class FailsOn(Callback):
    """Raises on one rank at a save point or while a state is taken."""

    def __init__(self, rank: int, where: str) -> None:
        self.rank, self.where = rank, where

    def setup(self, run: Run) -> None:
        self.run = run

    def on_save_point(self, run: Run) -> None:
        if self.where == "on_save_point" and run.rank == self.rank and run.state.global_step == 2:
            raise ValueError("something broke")

    def state_dict(self) -> dict[str, Any]:
        if self.where == "state_dict" and self.run.rank == self.rank and self.run.state.global_step == 2:
            raise ValueError("something broke")
        return {}


def failing(folder: str, rank: int, where: str, every: int | None) -> Any:
    trainer = quiet_trainer(
        max_epochs=2,
        project_dir=folder,
        run_name="run",
        callbacks=[FailsOn(rank, where), Checkpoint(every_n_steps=every)],
        timeout=30,
    )
    begun = time.monotonic()
    try:
        trainer.fit(Adam(), loader(classes(20), 2))
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return None


@pytest.mark.parametrize("every", [1, None])
@pytest.mark.parametrize(("rank", "where"), [(0, "on_save_point"), (1, "on_save_point"), (0, "state_dict")])
def test_an_error_where_a_checkpoint_is_due_reaches_all_ranks(
    two_ranks: Ranks, run_folder: Path, rank: int, where: str, every: int | None
) -> None:
    """Logging and metrics, case 88: in the write of a checkpoint, and in a hook beside it."""
    if where == "state_dict" and every is None:
        pytest.skip("nothing is written at that step")
    for told, seconds in two_ranks(failing, str(run_folder), rank, where, every):
        assert "something broke" in told
        assert seconds < 25


def fails_beside_saves(
    folder: str, rank: int, hook: str, late: bool, every: int | None, soon: bool | str, asked: int = 0
) -> Any:
    from sanctuary_trainer.devices import Devices

    class Asking(Callback):
        def on_train_step_end(self, run: Run) -> None:
            if soon and run.is_main and (soon != "once" or run.state.global_step == asked):
                run.save_soon()

    former = Devices.__init__

    def reading_late(self: Devices, *arguments: Any, **settings: Any) -> None:
        former(self, *arguments, **settings)
        self.reads_late = late

    Devices.__init__ = reading_late  # type: ignore[method-assign]
    trainer = quiet_trainer(
        max_epochs=2,
        project_dir=folder,
        run_name="run",
        callbacks=[Asking(), FailsIn(rank, hook), SavesWhenAsked(), Checkpoint(every_n_steps=every)],
        timeout=20,
        log_every_n_steps=1000,
    )
    begun = time.monotonic()
    try:
        trainer.fit(Adam(), loader(classes(40), 2))
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return None


class SavesWhenAsked(Callback):
    def on_save_point(self, run: Run) -> None:
        if run.save_asked:
            run.save_checkpoint("asked")

    def saves_at(self, step: int) -> bool:
        return False


class FailsIn(Callback):
    """Raises on one rank in one hook of the fourth step."""

    def __init__(self, rank: int, hook: str) -> None:
        self.rank, self.hook = rank, hook

    def _at(self, hook: str, run: Run) -> None:
        if hook == self.hook and run.rank == self.rank and run.state.global_step == 3 + (hook == "on_train_step_end"):
            raise ValueError("something broke")

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        self._at("on_train_batch_start", run)

    def on_train_batch_end(self, run: Run, batch: Any, batch_idx: int, loss: Any) -> None:
        self._at("on_train_batch_end", run)

    def on_before_optimizer_step(self, run: Run) -> None:
        self._at("on_before_optimizer_step", run)

    def on_train_step_end(self, run: Run) -> None:
        self._at("on_train_step_end", run)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("every", "soon"), [(1, False), (2, False), (None, True)])
@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step", "on_train_step_end"]
)
def test_an_error_in_a_step_that_is_saved_reaches_all_ranks(
    two_ranks: Ranks, run_folder: Path, late: bool, every: int | None, soon: bool, hook: str
) -> None:
    rank = 1 if late else 0
    for told, seconds in two_ranks(fails_beside_saves, str(run_folder), rank, hook, late, every, soon):
        assert "something broke" in told
        assert seconds < 15


def ready_batches(folder: str, step: int | None, kind: str) -> Any:
    """12 batches of unknown size, or of a batch sampler's making."""
    task = Line(0.01)
    values = [torch.tensor([float(i)], dtype=torch.float64) for i in range(12)]
    if kind == "ready":
        data: Any = DataLoader(Numbers(values), batch_size=None)
    elif kind == "list":
        data = values
    else:
        data = DataLoader(Numbers([value[0] for value in values]), batch_sampler=[[i] for i in range(12)])
    trainer = quiet_trainer(
        max_epochs=2,
        project_dir=folder,
        run_name="r",
        callbacks=[Checkpoint(every_n_steps=1), *([] if step is None else [CutAt("on_train_batch_start", step)])],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(Cut):
            trainer.fit(task, data, resume="auto")
    return task.batches


NAMES = {1: "one", 2: "two", 3: "three"}


@pytest.mark.parametrize("kind", ["ready", "list", "sampler"])
@pytest.mark.parametrize(("before", "after", "step"), [(1, 2, 3), (2, 1, 3), (2, 3, 2)])
def test_batches_that_are_not_formed_here_are_dealt_anew(
    run_folder: Path,
    kind: str,
    before: int,
    after: int,
    step: int,
    one_rank: Ranks,
    two_ranks: Ranks,
    three_ranks: Ranks,
) -> None:
    ranks = {1: one_rank, 2: two_ranks, 3: three_ranks}
    used = [batch[0] for given in ranks[before](ready_batches, str(run_folder), step, kind) for batch in given]
    results = ranks[after](ready_batches, str(run_folder), None, kind)
    given = sorted([*used, *(batch[0] for each in results for batch in each)])
    assert given == sorted([*range(12), *range(12)])


class Deep(Net):
    """Layers whose order in the task is not that of their use; float32, so that the order of sums shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.last = torch.nn.Linear(300, 3)
        self.net = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Tanh()) for _ in range(4))
        )
        self.first = torch.nn.Linear(5, 300)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        return torch.nn.functional.cross_entropy(self.last(self.net(self.first(features.float()))), labels)


def deep(folder: str, step: int | None, name: str) -> Any:
    task = Deep()
    trainer = quiet_trainer(
        max_epochs=2,
        seed=0,
        project_dir=folder,
        run_name=name,
        callbacks=[Checkpoint(every_n_steps=1), *([] if step is None else [CutAt("on_train_batch_start", step)])],
    )
    with suppress(Cut):
        trainer.fit(task, loader(classes(60), 4, shuffle=True), resume="auto")
    return weights(task)


def test_three_ranks_go_on_bit_for_bit_in_float32(three_ranks: Ranks, run_folder: Path) -> None:
    """DDP lays out its buckets anew after a first step, and from 3 ranks on the order of a sum decides its rounding."""
    straight = three_ranks(deep, str(run_folder), None, "a")
    three_ranks(deep, str(run_folder), 3, "b")
    three_ranks(deep, str(run_folder), 4, "b")
    second = three_ranks(deep, str(run_folder), None, "b")
    assert all(torch.equal(one, other) for one, other in zip(straight, second, strict=True))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("asked", [1, 2, 3])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_train_step_end"])
def test_an_error_near_a_wish_to_save_reaches_all_ranks(
    two_ranks: Ranks, run_folder: Path, late: bool, asked: int, hook: str
) -> None:
    for told, seconds in two_ranks(fails_beside_saves, str(run_folder), 1, hook, late, None, "once", asked):
        assert "something broke" in told
        assert seconds < 15


def fails_before_its_own_save(folder: str) -> Any:
    class Saves(Callback):
        def on_save_point(self, run: Run) -> None:
            if run.state.global_step == 2:
                if run.rank == 1:
                    raise ValueError("something broke")
                run.save_checkpoint("mine")

    trainer = quiet_trainer(max_epochs=1, project_dir=folder, run_name="r", callbacks=[Saves()], timeout=20)
    try:
        trainer.fit(Adam(), loader(classes(40), 2))
    except Exception as error:
        return str(error)


def test_an_error_before_ones_own_save_reaches_all_ranks(two_ranks: Ranks, run_folder: Path) -> None:
    assert all("something broke" in told for told in two_ranks(fails_before_its_own_save, str(run_folder)))


def asks_differently(folder: str, at_end: bool) -> Any:
    class Asks(Callback):
        def on_save_point(self, run: Run) -> None:
            if run.state.global_step == (10 if at_end else 2):
                run.save_checkpoint(f"mine-{run.rank}")

    trainer = quiet_trainer(max_epochs=1, project_dir=folder, run_name="r", callbacks=[Asks()], timeout=20)
    try:
        trainer.fit(Adam(), loader(classes(40), 2))
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("at_end", [False, True])
def test_ranks_that_ask_for_different_checkpoints_are_told(two_ranks: Ranks, run_folder: Path, at_end: bool) -> None:
    assert all("mine-1" in told for told in two_ranks(asks_differently, str(run_folder), at_end))


def fails_twice(folder: str, rank: int) -> Any:
    """An error in a validation, which is a boundary; then one rank's on_exception fails too."""

    class Fails(Callback):
        def on_evaluation_batch_end(self, run: Run, stage: str, batch: Any, outputs: Any, sample_indices: Any) -> None:
            if run.state.global_step == 5:
                raise ValueError("something broke")

        def on_exception(self, run: Run, exception: BaseException) -> None:
            if run.rank == rank:
                raise KeyError("and again")

    trainer = quiet_trainer(
        max_epochs=1, project_dir=folder, run_name="r", callbacks=[Fails(), Checkpoint()], timeout=20
    )
    begun = time.monotonic()
    try:
        trainer.fit(Adam(), loader(classes(20), 2), loader(classes(8), 2))
    except Exception as error:
        return f"{error} {error.__context__}", time.monotonic() - begun


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_on_exception_of_one_rank_lets_nobody_wait(two_ranks: Ranks, run_folder: Path, rank: int) -> None:
    for told, seconds in two_ranks(fails_twice, str(run_folder), rank):
        assert "and again" in told and "something broke" in told
        assert seconds < 15
