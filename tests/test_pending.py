"""Half an epoch of logged values, saved and taken over: bit for bit what a run that is not stopped has."""

import json
import math
import random
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from sanctuary_trainer.checkpointing import decode, encode
from sanctuary_trainer.errors import CheckpointError, TaskError
from sanctuary_trainer.records import Records
from sanctuary_trainer.series import FOLD_AT
from tests.test_records import Alone, ThreadRank, on_ranks

Step = Callable[[Records, int], None]


def through_a_file(state: Mapping[str, Any]) -> Any:
    """What comes back of it from JSON and safetensors."""
    tensors: dict[str, Tensor] = {}
    skeleton = json.dumps(encode(state, tensors))
    written = safetensors.torch.save({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()})
    return decode(json.loads(skeleton), safetensors.torch.load(written))


def continued(log: Records, task: nn.Module | None = None) -> Records:
    """What a fresh process makes of a run's records."""
    state = through_a_file(log.state_dict())
    fresh = Records(Alone(), nn.Linear(1, 1) if task is None else task)
    fresh.load_state_dict([state])
    return fresh


def points(step: Step, steps: int, read_every: int = 50, stops: Collection[int] = ()) -> str:
    """Every value that a run of two epochs gives, as text, so that NaN equals NaN and -0.0 not 0.0."""
    log, read = Records(Alone(), nn.Linear(1, 1)), []
    for done in range(1, steps + 1):
        step(log, done)
        if done % read_every == 0:
            read.append(log.step_values())
        if done == steps // 2 or done == steps:
            read.append(log.epoch_values("train"))
        if done in stops:
            log = continued(log)
    return repr([*read, log.step_values(), list(log.prog_bar_names)])


def value(done: int) -> float:
    return random.Random(done).uniform(-1, 1) * 10 ** random.Random(-done).uniform(-8, 8)


def log_everything(log: Records, done: int) -> None:
    log.add_loss(torch.tensor(value(done)), done % 7)
    log.add("train", "weighted", value(done), weight=torch.tensor(done % 5), on_epoch=True, prog_bar=True)
    log.add("train", "epoch", value(done), weight=done % 3, on_step=False)
    for reduce in ("sum", "min", "max"):
        log.add("train", reduce, value(done), weight=1, reduce=reduce, on_epoch=True)
    log.add("train", "nan_min", math.nan if done == 7 else value(done), weight=1, reduce="min", on_step=False)
    log.add("train", "masked", math.nan if done % 2 else value(done), weight=0 if done % 2 else 3)
    log.add("train", "nothing", math.nan, weight=0)
    log.add("train", "infinite", math.inf, weight=1)
    if done > 350:
        log.add("train", "late", done, weight=1)


@pytest.mark.parametrize(
    "stops", [[1], [50], [99], [FOLD_AT - 1], [FOLD_AT], [200], [201], [310, 311, 399], [400]], ids=str
)
def test_a_run_that_was_stopped_reads_the_values_of_one_that_was_not(stops: list[int]) -> None:
    whole = points(log_everything, 400, read_every=90)
    assert "late" in whole and "nan" in whole
    assert points(log_everything, 400, read_every=90, stops=stops) == whole


def test_it_is_the_same_after_every_step() -> None:
    whole = points(log_everything, 20, read_every=7)
    assert points(log_everything, 20, read_every=7, stops=range(1, 21)) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_pending_values_of_a_device_keep_their_type(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(item: Tensor) -> Tensor:  # as on an accelerator
        return item.detach().clone().reshape(())

    for module in ("records", "series"):
        monkeypatch.setattr(f"sanctuary_trainer.{module}.kept", kept)

    def step(log: Records, done: int) -> None:
        item = torch.tensor(1000 * random.Random(done).random()).to(dtype)
        log.add("train", "mean", item, weight=torch.tensor(done % 4), on_epoch=True)
        log.add("train", "largest", item, weight=1, reduce="max", on_step=False)
        log.add("train", "mixed", item if done % 2 else 0.1, weight=done % 3, on_step=False)

    log = Records(Alone(), nn.Linear(1, 1))
    step(log, 1)
    state = continued(log).state_dict()
    assert [item.dtype for one in state["series"] for item in one["values"]] == [dtype] * 3
    assert points(step, 300, stops=[100, 129, 201]) == points(step, 300)


def test_a_state_is_plain_and_holds_only_what_is_pending() -> None:
    log = Records(Alone(), nn.Linear(1, 1))
    log_everything(log, 3)
    assert through_a_file(log.state_dict()).keys() == log.state_dict().keys()
    log.step_values()
    log.epoch_values("train")
    assert log.state_dict()["series"] == []
    log.add("val", "loss", 1.0, weight=1)
    assert log.state_dict()["series"] == []


def test_what_was_there_before_is_forgotten() -> None:
    log, other = Records(Alone(), nn.Linear(1, 1)), Records(Alone(), nn.Linear(1, 1))
    for records, samples in ((log, 1), (other, 100)):
        for done in range(200):
            records.add("train", "a", float(done), weight=samples, on_epoch=True)
        records.add_loss(torch.tensor(5.0 * samples), 1)
    other.add("train", "b", 1.0, weight=1)
    other.load_state_dict([through_a_file(log.state_dict())])
    assert (other.step_values(), other.epoch_values("train")) == (log.step_values(), log.epoch_values("train"))


def test_the_task_s_own_loss_stays_the_task_s() -> None:
    log = Records(Alone(), nn.Linear(1, 1))
    log.add("train", "loss", 1.0, weight=1)
    log = continued(log)
    log.add_loss(torch.tensor(9.0), 1)
    assert "train/loss" not in log.prog_bar_names
    assert (log.step_values(), log.epoch_values("train")) == ({"train/loss": 1.0}, {})
    log = continued(log)
    log.add_loss(torch.tensor(9.0), 1)
    assert log.step_values() == {}


def test_a_watched_name_stays_watched() -> None:
    log = Records(Alone(), nn.Linear(1, 1))
    log.keep_epoch({"train/a"})
    log.add("train", "a", 1.0, weight=1)
    log.step_values()
    log = continued(log)
    log.add("train", "a", 2.0, weight=1)
    assert log.epoch_values("train") == {"train/a_epoch": 1.5}


def test_who_was_warned_is_not_warned_again() -> None:
    log = Records(Alone(), nn.Linear(1, 1))
    with pytest.warns(UserWarning, match="'train/a'"):
        log.add("train", "a", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        continued(log).add("train", "a", 1.0)


def test_a_name_that_means_something_else_now_is_told() -> None:
    log = Records(Alone(), nn.Linear(1, 1))
    log.add("train", "a", 1.0, weight=1, on_epoch=True)
    with pytest.raises(
        CheckpointError, match=r"log\('train/a'\).*reduce='sum'.*but in the checkpoint with reduce='mean'"
    ):
        continued(log).add("train", "a", 1.0, weight=1, on_epoch=True, reduce="sum")
    state = through_a_file(log.state_dict())
    other = Records(Alone(), nn.Linear(1, 1))
    other.add("train", "a", 1.0, weight=1)
    with pytest.raises(CheckpointError, match=r"'train/a' with on_epoch=True, and now it has on_epoch=False"):
        other.load_state_dict([state])
    log = continued(log)
    log.add("train", "a", 1.0, weight=1, on_epoch=True)
    with pytest.raises(TaskError, match="but before with"):
        log.add("train", "a", 1.0, weight=1)


def test_a_name_that_is_watched_since_the_checkpoint_has_no_whole_epoch() -> None:
    log = Records(Alone(), nn.Linear(1, 1))
    log.add("train", "a", 1.0, weight=1)
    other = Records(Alone(), nn.Linear(1, 1))
    other.keep_epoch({"train/a"})
    with pytest.raises(CheckpointError, match=r"'train/a' with on_epoch=False, and now it has on_epoch=True"):
        other.load_state_dict([through_a_file(log.state_dict())])


def test_between_epochs_a_name_may_change_its_meaning() -> None:
    log = Records(Alone(), nn.Linear(1, 1))
    log.add("train", "a", 1.0, weight=1, on_step=False)
    log.epoch_values("train")
    log = continued(log)
    log.add("train", "a", 1.0, weight=1, on_step=False, reduce="sum")
    assert log.epoch_values("train") == {"train/a": 1.0}


def log_some(log: Records, rank: int, done: int) -> None:
    log.add_loss(torch.tensor(value(100 * rank + done)), done % 4)
    log.add("train", "sum", 1, reduce="sum", weight=1, on_epoch=True)
    log.add("train", "least", value(100 * rank + done), reduce="min", weight=1, on_step=False)
    if rank == 1:
        log.add("train", "rare", value(done), weight=2, on_epoch=True)


def after_a_change(
    former: int, now: int, step: Callable[[Records, int, int], None], make: Any, fold: bool
) -> list[Any]:
    """The values of each rank now, after steps on the former ranks and then on these."""

    def first(rank: ThreadRank) -> Any:
        log = Records(rank, make())
        for done in range(130 if fold else 5):
            step(log, rank.rank, done)
        return through_a_file(log.state_dict())

    states = on_ranks(former, first)

    def second(rank: ThreadRank) -> Any:
        log = Records(rank, make())
        log.load_state_dict(states[rank.rank :: now])
        for done in range(200, 207):
            step(log, rank.rank, done)
        return {
            **log.step_values(),
            **log.epoch_values("train"),
            "rest": log.step_values() or log.epoch_values("train"),
        }

    return on_ranks(now, second)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize(("former", "now"), [(2, 1), (1, 2), (3, 2), (2, 3), (3, 1)])
def test_on_another_number_of_ranks_nothing_is_lost_or_counted_twice(former: int, now: int, fold: bool) -> None:
    log = Records(Alone(), nn.Linear(1, 1))
    rows = [(rank, done) for rank in range(former) for done in range(130 if fold else 5)]
    for rank, done in [*rows, *((rank, done) for rank in range(now) for done in range(200, 207))]:
        log_some(log, rank, done)
    expected = {**log.step_values(), **log.epoch_values("train")}
    for values in after_a_change(former, now, log_some, lambda: nn.Linear(1, 1), fold):
        assert values.pop("rest") == {}
        assert values == pytest.approx(expected, rel=1e-12)
        assert values["train/sum_epoch"] == expected["train/sum_epoch"] == len(rows) + 7 * now


def test_ranks_that_mean_two_things_by_one_name_are_told() -> None:
    states = []
    for reduce in ("mean", "sum"):
        log = Records(Alone(), nn.Linear(1, 1))
        log.add("train", "a", 1.0, weight=1, reduce=reduce)
        states.append(log.state_dict())
    with pytest.raises(CheckpointError, match="'train/a' with reduce='sum', and now it has reduce='mean'"):
        Records(Alone(), nn.Linear(1, 1)).load_state_dict(states)


def test_a_rank_whose_task_did_not_log_its_loss_yet_follows_one_whose_did() -> None:
    states = []
    for own in (False, True):
        log = Records(Alone(), nn.Linear(1, 1))
        log.add_loss(torch.tensor(9.0), 1)
        if own:
            log.add("train", "loss", 1.0, weight=1)
        states.append(log.state_dict())
    for order in (states, states[::-1]):
        joined = Records(Alone(), nn.Linear(1, 1))
        joined.load_state_dict(order)
        assert (joined.step_values(), joined.epoch_values("train")) == ({"train/loss": 1.0}, {})


@pytest.mark.gpu
def test_pending_values_return_to_the_device() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None

    def step(log: Records, done: int) -> None:
        item = torch.tensor(value(done), device=device)
        log.add_loss(item, done % 3)
        log.add("train", "a", item.bfloat16(), weight=torch.tensor(done % 4, device=device), on_step=False)

    def read(stops: Sequence[int]) -> Any:
        log = Records(Alone(), nn.Linear(1, 1, device=device))
        for done in range(300):
            step(log, done)
            if done in stops:
                log = continued(log, nn.Linear(1, 1, device=device))
        assert all(item.device.type == device.type for item in log.state_dict()["series"][0]["values"])
        return log.step_values(), log.epoch_values("train")

    assert read([100, 127, 128]) == read([])
