"""What several ranks log of their speed, each on a clock that moves only when the test says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sanctuary_trainer.callbacks import Checkpoint, Throughput
from tests.callbacks.test_throughput import BACKWARD, FORWARD, STEP, Slow, SlowToSave, Time, fit, stopped
from tests.distributed.workers import Ranks


def train(extra: tuple[float, float], **settings: Any) -> Any:
    """Trains with `extra[rank]` seconds more in each step; gives the points of the curves."""
    with pytest.MonkeyPatch.context() as patch:
        time = stopped(patch)
        own = extra[int(os.environ["RANK"])]
        return fit(time, Slow(time, dict.fromkeys(range(99), own)), **settings).values


def test_samples_are_those_of_all_ranks_and_times_their_mean(two_ranks: Ranks) -> None:
    # 9 rounds of 2 and 2 samples, one of 1 and 1.
    found = two_ranks(train, (1.0, 3.0), samples=38, log_every_n_steps=5)
    assert found[0] == found[1]
    slow, slower, model = STEP + 1.0, STEP + 3.0, FORWARD + BACKWARD
    expected = {
        "speed/step_ms_median": pytest.approx(1000 * (STEP + 2.0)),
        "speed/step_ms_p95": pytest.approx(1000 * (STEP + 2.0)),
        "speed/model_share": pytest.approx(50 * ((model + 1.0) / slow + (model + 3.0) / slower)),
    }
    assert found[0] == {
        5: {
            **expected,
            "speed/samples_per_second": pytest.approx((4 / slow + 4 / slower) / 2),
            "speed/eta_seconds": pytest.approx(5 * (STEP + 2.0)),
        },
        10: {
            **expected,
            "speed/samples_per_second": pytest.approx((18 / slow + 18 / slower) / 10),
            "speed/eta_seconds": 0.0,
        },
    }


def test_rank_0_alone_tells_it_at_the_end(two_ranks: Ranks) -> None:
    first, second = two_ranks(train, (0.0, 0.0)).outputs
    assert "Throughput: 4.57 samples/s, 875 ms per step (95 % under 875 ms)" in first
    assert "Throughput" not in second


class SlowToValidate(Slow):
    """Slow on rank 1 alone."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.time.spend(64.0 * self.run.rank)


def meeting(function: Callable[..., Any], time: Time) -> Callable[..., Any]:
    """The collective, at whose end all ranks have the time of the latest."""

    def call(*args: Any, **settings: Any) -> Any:
        result = function(*args, **settings)
        latest = torch.tensor(time.now, dtype=torch.float64)
        all_reduce(latest, dist.ReduceOp.MAX)
        time.now = float(latest)
        return result

    return call


all_reduce = dist.all_reduce
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "broadcast",
)


def train_with_waits(run_folder: Path) -> Any:
    """Validations are slow on rank 1 and checkpoints on rank 0, which the other one waits for."""
    with pytest.MonkeyPatch.context() as patch:
        time = stopped(patch)
        for name in COLLECTIVES:
            patch.setattr(dist, name, meeting(getattr(dist, name), time))
        callbacks = [Throughput(), Checkpoint(every_n_steps=2), SlowToSave(time)]
        settings = {"val_check_interval": 2, "validate": True, "project_dir": run_folder}
        points = fit(time, SlowToValidate(time), samples=48, callbacks=callbacks, **settings)
        return points.values


def test_waiting_in_validations_and_checkpoints_does_not_count_either(two_ranks: Ranks, run_folder: Path) -> None:
    found = two_ranks(train_with_waits, run_folder)
    assert found[0] == found[1]
    for step, values in found[0].items():
        assert values["speed/samples_per_second"] == pytest.approx(4 / STEP), step
        assert values["speed/step_ms_p95"] == pytest.approx(1000 * STEP), step
    assert found[0][8]["speed/eta_seconds"] == pytest.approx(4 * (7 * STEP + 3 * 96.0) / 7)
