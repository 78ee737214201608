"""What steps log: means by samples, axes, agreement of ranks that log different things."""

import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sanctuary_trainer.errors import SettingsError, TaskError
from sanctuary_trainer.records import Records


class Alone:
    """A world of one rank, which must not be asked to gather."""

    world_size = 1

    def gather_objects(self, obj: Any) -> list[Any]:
        raise AssertionError("one rank has nobody to gather from")

    def gather_floats(self, values: list[float]) -> list[list[float]]:
        raise AssertionError("one rank has nobody to gather from")


class ThreadRank:
    """One of several ranks that are threads. A gather that not every rank joins fails within seconds."""

    def __init__(self, rank: int, world_size: int, meeting: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.world_size, self._meeting, self._table = rank, world_size, meeting, table
        self.gathers: list[str] = []

    def _gather(self, kind: str, obj: Any) -> list[Any]:
        self.gathers.append(kind)
        self._table[self.rank] = (kind, obj)
        self._meeting.wait(5)
        everyone = list(self._table)
        self._meeting.wait(5)
        assert {other for other, _ in everyone} == {kind}, "ranks met in different collectives"
        return [obj for _, obj in everyone]

    def gather_objects(self, obj: Any) -> list[Any]:
        return self._gather("objects", obj)

    def gather_floats(self, values: list[float]) -> list[list[float]]:
        rows: list[list[float]] = self._gather("floats", list(values))
        assert len({len(row) for row in rows}) == 1, "ranks sent different lengths"
        return rows


def on_ranks(world_size: int, function: Callable[[ThreadRank], Any]) -> list[Any]:
    """What the function returns on each rank; the error of one rank ends all, and is raised here."""
    meeting, table = threading.Barrier(world_size), [None] * world_size
    outcomes: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = function(ThreadRank(rank, world_size, meeting, table))
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        raise ExceptionGroup("ranks", [error for error in errors if isinstance(error, Exception)])
    return outcomes


def records() -> Records:
    return Records(Alone(), nn.Linear(1, 1))


def test_a_short_last_batch_weighs_what_it_holds() -> None:
    log = records()
    for value, samples in ((0.7, 256), (0.8, 256), (0.9, 10)):
        log.add("val", "loss", torch.tensor(value, dtype=torch.float64), weight=samples)
    assert log.epoch_values("val") == {"val/loss": pytest.approx(393 / 522, abs=1e-15)}
    assert log.epoch_values("val") == {}


def test_the_stage_decides_prefix_and_axis() -> None:
    log = records()
    log.add("train", "loss_a", 1.0, weight=1)
    log.add("train", "b", 2.0, weight=1, on_step=False)
    log.add("train", "both", 3.0, weight=1, on_epoch=True)
    log.add("train", "mine/c", 4.0, weight=1)
    log.add("val", "d", 5.0, weight=1)
    log.add("test", "d", 6.0, weight=1)
    log.add("val/NAME", "d", 7.0, weight=1)
    assert log.step_values() == {"mine/c": 4.0, "train/both": 3.0, "train/loss_a": 1.0}
    assert log.step_values() == {}
    assert log.epoch_values("train") == {"train/b": 2.0, "train/both_epoch": 3.0}
    assert log.epoch_values("val") == {"val/d": 5.0}
    assert log.epoch_values("test") == {"test/d": 6.0}
    assert log.epoch_values("val/NAME") == {"val/NAME/d": 7.0}


def test_a_shared_step_may_ask_for_on_step_in_an_evaluation_too() -> None:
    log = records()
    log.add("val", "loss", 1.0, weight=1, on_step=True, on_epoch=True)
    log.add("val", "accuracy", 2.0, weight=1, on_step=True)
    assert log.step_values() == {}
    assert log.epoch_values("val") == {"val/accuracy": 2.0, "val/loss": 1.0}


def test_step_values_are_the_mean_since_the_last_reading_and_the_epoch_s_of_all() -> None:
    log = records()
    for value in (1.0, 2.0):
        log.add_loss(torch.tensor(value), 4)
    assert log.step_values() == {"train/loss": 1.5}
    log.add_loss(torch.tensor(6.0), 2)
    assert log.step_values() == {"train/loss": 6.0}
    log.add_loss(torch.tensor(0.0), 2)
    assert log.epoch_values("train") == {"train/loss_epoch": (4 + 8 + 12 + 0) / 12}
    assert log.step_values() == {"train/loss": 0.0}, "what the epoch read is still due on the step axis"
    assert log.epoch_values("train") == {}


def test_reductions() -> None:
    log = records()
    for value in (3, True, torch.tensor([2])):
        for reduce in ("mean", "sum", "min", "max"):
            log.add("val", reduce, value, weight=5, reduce=reduce)
    assert log.epoch_values("val") == {"val/max": 3.0, "val/mean": 2.0, "val/min": 1.0, "val/sum": 6.0}


def test_nan_stays_nan_and_weight_zero_is_not_looked_at() -> None:
    log = records()
    for reduce in ("mean", "sum", "min", "max"):
        for value in (1.0, math.nan, 2.0):
            log.add("val", reduce, value, weight=1, reduce=reduce)
    for value, weight in ((math.nan, 0), (3.0, 2), (torch.tensor(math.inf), torch.tensor(0))):
        log.add("val", "labelled", value, weight=weight)
    log.add("val", "nothing", math.nan, weight=0)
    values = log.epoch_values("val")
    assert values.pop("val/labelled") == 3.0
    assert sorted(values) == ["val/max", "val/mean", "val/min", "val/sum"]
    assert all(math.isnan(value) for value in values.values())


def test_a_value_is_recorded_as_it_was_when_it_was_logged() -> None:
    log = records()
    loss = torch.tensor(1.0, requires_grad=True) * 2
    log.add("train", "cross_entropy", loss, weight=1)
    loss += 100.0
    assert log.step_values() == {"train/cross_entropy": 2.0}


def test_nothing_grows_with_the_number_of_steps() -> None:
    log = records()
    for i in range(100_000):
        log.add_loss(torch.tensor(float(i % 2)), 3)
    assert log._loss is not None and len(log._loss.values) < 128
    assert log.step_values() == {"train/loss": 0.5}


def test_tensors_that_stay_on_their_device_fold_to_the_same_numbers() -> None:
    from sanctuary_trainer.series import _fold

    # As an accelerator would leave them: tensors of several kinds, weights as numbers or tensors.
    values = [torch.tensor(0.7, dtype=torch.bfloat16), torch.tensor(2), 0.5, torch.tensor(math.nan)]
    weights = [4, torch.tensor(2), 1.0, 0]
    for reduce in ("mean", "sum", "min", "max"):
        numbers = [float(value) for value in values]
        mine = _fold(values, weights, reduce)
        assert mine.dtype == torch.float64
        assert torch.equal(mine.nan_to_num(-1), _fold(numbers, list(map(float, weights)), reduce).nan_to_num(-1))


def test_the_task_s_own_loss_replaces_the_trainer_s() -> None:
    log = records()
    log.add_loss(torch.tensor(9.0), 1)
    log.add("train", "loss", 1.0, weight=1)
    log.add_loss(torch.tensor(9.0), 1)
    assert log.step_values() == {"train/loss": 1.0}
    assert log.epoch_values("train") == {}
    assert "train/loss" not in log.prog_bar_names


def test_a_watched_name_keeps_its_epoch_value_too() -> None:
    log = records()
    log.keep_epoch({"train/loss", "train/mine", "val/loss"})
    for value in (1.0, 2.0):
        log.add_loss(torch.tensor(value), 1)
        log.add("train", "mine", value, weight=1, on_epoch=False)
        log.add("train", "other", value, weight=1)
        log.step_values()
    log.add("val", "loss", 5.0, weight=1)
    assert log.epoch_values("train") == {"train/loss_epoch": 1.5, "train/mine_epoch": 1.5}
    assert log.epoch_values("val") == {"val/loss": 5.0}


def test_two_names_do_not_write_one_curve() -> None:
    log = records()
    with pytest.raises(TaskError, match=r"log\('train/loss_epoch'\) would write.*which 'train/loss' writes too"):
        log.add("train", "loss_epoch", 1.0, weight=1, on_step=False)
    log.add("train", "a", 1.0, weight=1, on_epoch=True)
    with pytest.raises(TaskError, match=r"'train/a_epoch', which 'train/a' writes too.*Use another name"):
        log.add("train", "a_epoch", 2.0, weight=1)
    log.add("train", "b_epoch", 2.0, weight=1, on_step=False)
    with pytest.raises(TaskError, match=r"log\('train/b'\) would write the curve 'train/b_epoch'"):
        log.add("train", "b", 2.0, weight=1, on_epoch=True)
    log.add("val", "a_epoch", 3.0, weight=1)
    log.add("train", "loss", 1.0, weight=1)
    log.add("train", "loss_epoch", 4.0, weight=1, on_step=False)
    assert log.epoch_values("train") == {"train/a_epoch": 1.0, "train/b_epoch": 2.0, "train/loss_epoch": 4.0}


def test_progress_bar_names() -> None:
    log = records()
    log.add("train", "a", 1.0, weight=1, on_step=True, on_epoch=True, prog_bar=True)
    log.add("train", "b", 1.0, weight=1)
    log.add("train", "c", 1.0, weight=1, prog_bar=True)
    assert list(log.prog_bar_names) == ["train/loss", "train/a", "train/a_epoch", "train/c"]


def test_one_name_has_one_meaning() -> None:
    log = records()
    log.add("train", "a", 1.0, weight=1)
    log.add("train", "a", 1.0, weight=1, on_step=True)
    log.add("train", "train/a", 1.0, weight=1)
    with pytest.raises(TaskError, match=r"log\('train/a'\) was called with reduce='sum', on_step=True.*before with"):
        log.add("train", "a", 1.0, weight=1, reduce="sum")
    with pytest.raises(TaskError, match="on_epoch=True"):
        log.add("train", "train/a", 1.0, weight=1, on_epoch=True)
    assert log.step_values() == {"train/a": 1.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.zeros(2, 3),
            r"log\('val/a'\) got a tensor of shape \(2, 3\), torch.float32; one real number was expected",
        ),
        (torch.zeros(0), r"shape \(0,\)"),
        ("0.5", "got str '0.5'"),
        (None, "got NoneType"),
        ([1.0], "got list"),
        (torch.tensor(1j), "torch.complex64; one real number was expected"),
        (1 + 2j, "got complex"),
        (10**400, "got int, a number beyond a float's range"),
    ],
)
def test_what_is_no_number_is_refused(value: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        records().add("val", "a", value, weight=1)


def test_names_are_text() -> None:
    for name in (5, ["a"]):
        with pytest.raises(TaskError, match=r"of type .*; a name is a str"):
            records().add("val", name, 1.0, weight=1)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=r"log\(''\) got 1 and no name"):
        records().add("val", "", 1, weight=1)


@pytest.mark.parametrize(
    "weight", ["3", -1, math.nan, math.inf, 1j, torch.tensor([1, 2]), torch.tensor(-1), [1]], ids=str
)
def test_a_weight_is_a_number_of_samples(weight: Any) -> None:
    with pytest.raises(TaskError, match=r"log\('val/a'\) got batch_size=.*; a number of samples, at least 0"):
        records().add("val", "a", 1.0, weight=weight)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(SettingsError, match="reduce='median'; expected one of mean, sum, min, max"):
        records().add("val", "a", 1.0, weight=1, reduce="median")
    with pytest.raises(SettingsError, match="neither on_step nor on_epoch"):
        records().add("train", "a", 1.0, weight=1, on_step=False, on_epoch=False)
    with pytest.raises(SettingsError, match="neither on_step nor on_epoch"):
        records().add("val", "a", 1.0, weight=1, on_epoch=False)


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    log = records()
    for i, value in enumerate((np.float32(0.5), np.float64(0.5), np.int64(2), np.array(0.25))):
        log.add("val", str(i), value, weight=np.int64(3))
    assert log.epoch_values("val") == {"val/0": 0.5, "val/1": 0.5, "val/2": 2.0, "val/3": 0.25}


def test_an_unknown_batch_size_counts_one_and_warns_once() -> None:
    log = records()
    with pytest.warns(UserWarning, match=r"'val/loss'.*batch_size="):
        log.add("val", "loss", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.add("val", "loss", 2.0)
        log.add("val", "largest", 1.0, reduce="max")
        assert log.epoch_values("val") == {"val/largest": 1.0, "val/loss": 1.5}
        log.add("val", "loss", 3.0)


def test_ranks_are_one_mean_by_samples() -> None:
    def log(rank: ThreadRank) -> dict[str, float]:
        mine = Records(rank, nn.Linear(1, 1))
        mine.add("val", "loss", [0.7, 0.8, 0.9][rank.rank], weight=[256, 256, 10][rank.rank])
        for reduce in ("sum", "min", "max"):
            mine.add("val", reduce, float(rank.rank), weight=1, reduce=reduce)
        return mine.epoch_values("val")

    values = on_ranks(3, log)
    assert values[0] == values[1] == values[2]
    assert [list(value) for value in values] == [["val/loss", "val/max", "val/min", "val/sum"]] * 3
    assert values[0]["val/loss"] == pytest.approx(393 / 522, abs=1e-15)
    assert (values[0]["val/sum"], values[0]["val/min"], values[0]["val/max"]) == (3.0, 0.0, 2.0)


def test_a_key_that_one_rank_alone_logs_is_its_own_value() -> None:
    def log(rank: ThreadRank) -> Any:
        mine = Records(rank, nn.Linear(1, 1))
        for name in ("a", "b") if rank.rank == 0 else ("b", "rare_loss", "a"):
            mine.add("train", name, {"a": 1.0, "b": 3.0, "rare_loss": 7.0}[name] + rank.rank, weight=2, on_step=False)
        if rank.rank == 1:
            mine.add("train", "smallest", -5.0, weight=1, on_step=False, reduce="min")
        return list(mine.epoch_values("train").items())

    values = on_ranks(2, log)
    assert values[0] == values[1]
    assert values[0] == [("train/a", 1.5), ("train/b", 3.5), ("train/rare_loss", 8.0), ("train/smallest", -5.0)]


def test_keys_in_another_order_need_no_exchange_of_names() -> None:
    def log(rank: ThreadRank) -> Any:
        mine = Records(rank, nn.Linear(1, 1))
        for name in ("a", "b") if rank.rank == 0 else ("b", "a"):
            mine.add("train", name, {"a": 1.0, "b": 3.0}[name], weight=2)
        return mine.step_values(), rank.gathers

    assert on_ranks(2, log) == [({"train/a": 1.0, "train/b": 3.0}, ["floats", "floats"])] * 2


def test_a_rank_that_logged_nothing_joins() -> None:
    def log(rank: ThreadRank) -> Any:
        mine = Records(rank, nn.Linear(1, 1))
        if rank.rank == 1:
            mine.add_loss(torch.tensor(2.0), 4)
        return mine.step_values(), mine.epoch_values("train"), mine.epoch_values("val"), mine.step_values()

    assert on_ranks(3, log) == [({"train/loss": 2.0}, {"train/loss_epoch": 2.0}, {}, {})] * 3


def test_nan_of_one_rank_reaches_all() -> None:
    def log(rank: ThreadRank) -> Any:
        mine = Records(rank, nn.Linear(1, 1))
        for reduce in ("mean", "sum", "min", "max"):
            mine.add("val", reduce, math.nan if rank.rank else 1.0, weight=1, reduce=reduce)
        return [math.isnan(value) for value in mine.epoch_values("val").values()]

    assert on_ranks(2, log) == [[True] * 4] * 2


def test_ranks_that_mean_two_things_by_one_name_all_fail() -> None:
    def log(rank: ThreadRank) -> None:
        mine = Records(rank, nn.Linear(1, 1))
        mine.add("val", "a", 1.0, weight=1, reduce="sum" if rank.rank else "max")
        mine.epoch_values("val")

    with pytest.raises(ExceptionGroup) as caught:
        on_ranks(2, log)
    assert len(caught.value.exceptions) == 2
    assert all("'val/a' in two ways: rank 1 as sum" in str(error) for error in caught.value.exceptions)


@pytest.mark.gpu
def test_logging_never_waits_for_the_device() -> None:
    log = records()
    losses = [torch.tensor(value, device="cuda", requires_grad=True) * 2 for value in (1.0, 2.0)]
    samples = torch.tensor(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(300):
            log.add_loss(losses[i % 2], 4)
            log.add("train", "a", losses[i % 2], weight=samples, on_epoch=True)
            log.add("train", "b", losses[i % 2] if i % 3 else 5.0, weight=4, reduce="max")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert log.step_values() == {"train/a": 3.0, "train/b": 5.0, "train/loss": 3.0}
    assert log.epoch_values("train") == {"train/a_epoch": 3.0, "train/loss_epoch": 3.0}
