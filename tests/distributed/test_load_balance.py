"""What LoadBalance says of ranks that wait for each other, and that what it is told is so.

The causes are some of `benchmarks/load_balance.py`, which has them all, at a strength that no noise reaches.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.balance_injections import INJECTIONS, Sizes, train, work
from sanctuary_trainer import LAPS, Callback, RankError, TaskError
from sanctuary_trainer.callbacks import Checkpoint, LoadBalance
from tests.distributed.workers import Ranks
from tests.small_tasks import Net, classes, loader, quiet_trainer

STEPS = 25
BASE = 0.04  # seconds of a step without an injection, about
SLOW = 0.05  # seconds


@pytest.mark.parametrize(
    "title",
    [
        "data set of rank 1",
        "forward of rank 1",
        "callback of rank 0",
        "fewer samples on rank 1",
        "hook that sleeps on both",
    ],
)
def test_the_cause_is_named_with_its_ranks(two_ranks: Ranks, tmp_path: Path, title: str) -> None:
    injection = next(each for each in INJECTIONS if each.title == title)
    first, second = two_ranks(train, injection, 4.0, BASE, STEPS, str(tmp_path), sizes=Sizes(small=3))
    balance = first["balance"]
    assert balance == second["balance"]
    assert balance["verdict"] == injection.cause
    finding = balance["findings"][0]
    assert tuple(finding["ranks"]) == injection.whom
    assert finding["chronic"] and 0.1 <= finding["share"] <= 0.9
    for rank in injection.whom:
        assert f"rank {rank} (host " in finding["evidence"]


# What is left of a fit


class Working(Net):
    """Computes on one rank for so many seconds more, in forward or in backward."""

    def __init__(self, place: str = "", rank: int = 1, seconds: float = SLOW) -> None:
        super().__init__()
        here = int(os.environ.get("RANK", "0")) == rank
        self.place, self.seconds = place if here else "", seconds

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.place == "forward":
            work(self.seconds)
        if self.place == "backward":
            loss.register_hook(lambda gradient: work(self.seconds))
        return loss


def fit(task: Any, callbacks: list[Callback], steps: int = 20, **settings: Any) -> Any:
    trainer = quiet_trainer(**{"max_steps": steps, "log_every_n_steps": 5, "callbacks": callbacks, **settings})
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return trainer.fit(task, loader(classes(4 * ranks * steps), 4), loader(classes(8)))


def leave_a_report(folder: Path) -> Any:
    result = fit(Working("forward"), [LoadBalance()], project_dir=folder, run_name="run", log_with="tensorboard")
    return result.balance


def test_the_report_is_the_same_on_every_rank_and_lies_in_the_run_folder(two_ranks: Ranks, run_folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, second = two_ranks(leave_a_report, run_folder)
    assert first == second and len(first.ranks) == 2 and first.steps == 19
    assert json.loads((run_folder / "run" / "balance.json").read_text()) == json.loads(json.dumps(first.as_dict()))
    events = EventAccumulator(str(run_folder / "run")).Reload()
    scalars, tags = events.Tags()["scalars"], events.Tags()
    for lap in ("data", "forward", "backward", "wait", "optimizer"):
        for rank in (0, 1):
            points = events.Scalars(f"balance/{lap}/rank{rank}")
            assert [point.step for point in points] == [5, 10, 15, 20]
            assert all(0 <= point.value <= 100 for point in points)
    of_rank = [
        sum(events.Scalars(f"balance/{lap}/rank1")[-1].value for lap in LAPS if f"balance/{lap}/rank1" in scalars)
    ]
    assert of_rank == [pytest.approx(100, abs=10)]  # the ranks' rows begin and end where each of them syncs
    assert tags["images"] == ["balance/time_of_ranks"] and "balance/report" in tags["tensors"]


def test_rank_0_alone_prints_it(two_ranks: Ranks, run_folder: Path) -> None:
    first, second = two_ranks(leave_a_report, run_folder).outputs
    assert "Load balance: rank 1 (host " in first and "Load balance" not in second


# What the clock tells


class Ends(Callback):
    """The laps and the time between the first step and the last."""

    def on_fit_start(self, run: Any) -> None:
        self.told: list[tuple[float, dict[str, float]]] = []

    def on_train_step_end(self, run: Any) -> None:
        self.told.append((time.perf_counter(), run.clock.totals()))


def reckon_up(folder: Path) -> Any:
    ends = Ends()
    callbacks = [LoadBalance(), Checkpoint(every_n_steps=4), ends]
    began = time.perf_counter()
    fit(Working("forward"), callbacks, steps=20, project_dir=folder, val_check_interval=6)
    (first, before), (last, after) = ends.told[0], ends.told[-1]
    assert set(after) <= {name for name in after if name.partition(":")[0] in LAPS}
    return last - first, sum(after.values()) - sum(before.values()), time.perf_counter() - began


def test_the_laps_of_a_rank_are_all_the_time_of_its_loop(two_ranks: Ranks, run_folder: Path) -> None:
    for wall, laps, whole in two_ranks(reckon_up, run_folder):
        assert wall > 18 * SLOW
        # What lies between a lap and the look at it is microseconds, unless another process gets the core there.
        assert abs(laps - wall) < 0.05 * whole


class AsksDDP(Callback):
    """What DDP says of its first ten steps (its own clock; a prototype), beside ours, in seconds of a step."""

    def on_train_step_end(self, run: Any) -> None:
        if run.state.global_step == 10:
            told = run.executor.module._get_ddp_logging_data()
            self.ddp = told["avg_backward_comm_time"] / 1e9
            self.clock = run.clock.total("wait") / 10


def wait_beside_ddp() -> Any:
    asks = AsksDDP()
    fit(Working("backward"), [asks], steps=11, log_every_n_steps=1000, limit_val_batches=0)
    return asks.ddp, asks.clock


def test_the_wait_of_a_backward_is_what_ddp_says_of_it(two_ranks: Ranks) -> None:
    (ddp, clock), (ddp_slow, clock_slow) = two_ranks(wait_beside_ddp)
    assert ddp > 0.8 * SLOW and clock > 0.8 * SLOW
    assert clock == pytest.approx(ddp, rel=0.2) and clock_slow == pytest.approx(ddp_slow, abs=0.2 * SLOW)


class SendsByPython(Callback):
    def on_fit_start(self, run: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        run.executor.module.register_comm_hook(None, lambda state, bucket: allreduce_hook(state, bucket))


def wait_where_hooks_tell_it(kind: str) -> Any:
    callbacks = [LoadBalance(), *([SendsByPython()] if kind == "hook" else [])]
    return fit(Working("backward"), callbacks, steps=41, find_unused_parameters=kind == "unused").balance


@pytest.mark.parametrize("kind", ["hook", "unused"])
def test_waiting_is_told_from_computing_where_ddp_has_one_backward(two_ranks: Ranks, kind: str) -> None:
    balance, other = two_ranks(wait_where_hooks_tell_it, kind)
    assert balance == other and balance.steps == 8  # one of five
    fast, slow = (times.seconds for times in balance.ranks)
    assert fast["wait"] > 0.7 * SLOW > 2 * fast["backward"]
    assert slow["backward"] > SLOW > 2 * slow["wait"]
    assert (balance.verdict, balance.findings[0].ranks) == ("slow_compute_on_rank", (1,))


class SleepsAtLogs(Callback):
    def on_log(self, run: Any, values: Any, step: int) -> None:
        if "train/loss" in values:
            time.sleep(SLOW)


def log_where_steps_are_sampled() -> Any:
    return fit(Net(), [LoadBalance(), SleepsAtLogs()], steps=201, find_unused_parameters=True).balance


def test_what_falls_on_every_fifth_step_is_not_on_every_step_that_is_looked_at(two_ranks: Ranks) -> None:
    balance, _ = two_ranks(log_where_steps_are_sampled)
    assert balance.steps == 40
    for times in balance.ranks:
        assert 0.1 * SLOW < times.seconds["logging"] < 0.4 * SLOW


class Normed(Net):
    """DDP brings rank 0's running statistics over before each forward, and waits there for the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(5, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        return super().training_step((self.norm(features), labels), batch_idx)

    def on_train_batch_start(self, run: Any, batch: Any, batch_idx: int) -> None:
        if run.rank == 1:
            work(SLOW)


def wait_for_buffers() -> Any:
    return fit(Normed(), [LoadBalance()], steps=31).balance


def test_waiting_for_a_rank_before_a_forward_is_no_computing(two_ranks: Ranks) -> None:
    balance, _ = two_ranks(wait_for_buffers)
    fast, slow = (times.seconds for times in balance.ranks)
    assert fast["wait"] > 0.7 * SLOW > 2 * fast["forward"]
    assert slow["callbacks"] > 0.9 * SLOW
    assert (balance.verdict, balance.findings[0].ranks) == ("slow_callbacks", (1,))


# What it costs, and what may go wrong

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "scatter_object_list",
)


def collectives(with_balance: bool) -> Any:
    """Those of the loop by step: what is called at the log of step 5 and behind it belongs to 5."""
    calls: dict[int, list[str]] = {}

    class Counts(Callback):
        def on_train_batch_start(self, run: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self.run = run
                for name in COLLECTIVES:
                    setattr(dist, name, self.counted(name, getattr(dist, name)))

        def counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any, **settings: Any) -> Any:
                calls.setdefault(self.run.state.global_step, []).append(name)
                return call(*arguments, **settings)

            return counted

    callbacks: list[Callback] = [LoadBalance()] if with_balance else []
    fit(Net(), [*callbacks, Counts()], steps=12, limit_val_batches=0)
    return calls


def test_it_gathers_once_at_a_log_and_never_in_between(two_ranks: Ranks) -> None:
    without, _ = two_ranks(collectives, False)
    found, other = two_ranks(collectives, True)
    assert found == other and set(found) == set(without) == {5, 10, 12}
    for step in (5, 10):
        more = list(found[step])
        for name in without[step]:
            more.remove(name)
        assert sorted(more) == ["all_reduce", "gather_object"]  # the latter's errors are told to all
    assert not any("gather_object" in names for names in without.values())


class Fails(Callback):
    """On rank 1, in step 10, at which all ranks log."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def fail(self, hook: str, run: Any, step: int) -> None:
        if run.rank == 1 and hook == self.hook and step == 10:
            raise ValueError("rank 1 cannot go on")

    def on_train_batch_end(self, run: Any, batch: Any, batch_idx: int, loss: Any) -> None:
        self.fail("on_train_batch_end", run, run.state.global_step + 1)

    def on_log(self, run: Any, values: Any, step: int) -> None:
        self.fail("on_log", run, step)

    def on_save_point(self, run: Any) -> None:
        self.fail("on_save_point", run, run.state.global_step)


class CostsNothing(Net):
    def cost(self, batch: Any) -> Any:
        return "much" if self.run.rank == 1 and self.run.state.global_step == 9 else 1.0


def fail_at_a_log(hook: str, before: bool, folder: Path) -> Any:
    task = CostsNothing() if hook == "cost" else Net()
    callbacks: list[Callback] = [LoadBalance(), Fails(hook)]
    with pytest.raises((ValueError, TaskError, RankError)) as caught:
        fit(task, callbacks[:: 1 if before else -1], project_dir=folder, run_name="run")
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_log", "on_save_point", "cost"])
def test_an_error_on_one_rank_at_a_log_ends_all(two_ranks: Ranks, run_folder: Path, hook: str, before: bool) -> None:
    (first, text), (second, _) = two_ranks(fail_at_a_log, hook, before, run_folder, timeout=30.0)
    assert (first, second) == ("RankError", "TaskError" if hook == "cost" else "ValueError")
    assert ("rank 1 cannot go on" if hook != "cost" else "cost returned 'much'") in text


class FailsToTell(LoadBalance):
    """A report that cannot be made: on rank 0 alone, which has all rows."""

    def _hear(self, run: Any, of_ranks: Any) -> None:
        raise OSError("no space left")


def fail_to_tell() -> Any:
    with pytest.raises((OSError, RankError)) as caught:
        fit(Net(), [FailsToTell()])
    return type(caught.value).__name__, str(caught.value)


def test_an_error_of_rank_0_in_what_it_makes_of_the_rows_ends_all(two_ranks: Ranks) -> None:
    first, (second, text) = two_ranks(fail_to_tell, timeout=30.0)
    assert first[0] == "OSError" and second == "RankError" and "no space left" in text


class FullDisk(Callback):
    """The tracker of rank 0 takes no picture."""

    def on_fit_start(self, run: Any) -> None:
        def fails(*arguments: Any, **settings: Any) -> None:
            raise OSError("no space left")

        if run.tracking is not None:
            run.tracking.log_images = fails


def fail_to_show(folder: Path) -> Any:
    with pytest.raises((OSError, RankError)) as caught:
        fit(Net(), [LoadBalance(), FullDisk()], project_dir=folder, run_name="run")
    return type(caught.value).__name__, str(caught.value)


def test_a_tracker_that_cannot_take_the_report_ends_all_ranks_and_the_file_is_written(
    two_ranks: Ranks, run_folder: Path
) -> None:
    (first, _), (second, text) = two_ranks(fail_to_show, run_folder, timeout=30.0)
    assert first == "OSError" and second == "RankError" and "no space left" in text
    assert json.loads((run_folder / "run" / "balance.json").read_text())["steps"] == 19


def train_three(slow: int) -> Any:
    balance = fit(Working("forward", slow), [LoadBalance()]).balance
    return balance.verdict, balance.findings[0].ranks, [times.rank for times in balance.ranks]


def test_of_three_ranks_the_slow_one_is_named(three_ranks: Ranks) -> None:
    found = three_ranks(train_three, 2)
    assert list(found) == [("slow_compute_on_rank", (2,), [0, 1, 2])] * 3


def weights_of(with_balance: bool) -> Any:
    task = Net()
    fit(task, [LoadBalance()] if with_balance else [])
    return torch.cat([parameter.detach().reshape(-1) for parameter in task.parameters()])


def test_the_weights_are_those_of_a_fit_without(two_ranks: Ranks) -> None:
    without, _ = two_ranks(weights_of, False)
    for found in two_ranks(weights_of, True):
        assert torch.equal(found, without)
