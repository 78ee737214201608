"""What several ranks log of their speed, each on a clock that moves only when the test says so."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.callbacks.test_throughput import BACKWARD, FORWARD, STEP, Slow, fit, stopped
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
