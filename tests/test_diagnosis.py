"""From the seconds of each step, lap and rank to the cause: with made-up times, of which it is known what they cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sanctuary_trainer.balance import Measured
from sanctuary_trainer.clock import LAPS
from sanctuary_trainer.diagnosis import CAUSES, Finding, Times, diagnose
from sanctuary_trainer.history import History

Floats = npt.NDArray[np.float64]
STEPS = 120
FORWARD, BACKWARD, MESSAGE = 30.0, 60.0, 2.0  # of a balanced step


def made(
    ranks: int = 2,
    steps: int = STEPS,
    noise: float = 0.05,
    cost: Any = 100.0,
    samples: Any = 8.0,
    message: Any = MESSAGE,
    seed: int = 0,
    **more: Any,
) -> Times:
    """Steps of forward, backward and a message, each rank with noise of its own.

    more: by lap, seconds added, in any shape that (steps, ranks) takes; the ranks wait for the slowest in each step.
    """
    draw = np.random.default_rng(seed)
    laps = np.zeros((steps, ranks, len(LAPS)))
    for lap, seconds in (("forward", FORWARD), ("backward", BACKWARD)):
        laps[:, :, LAPS.index(lap)] = seconds * draw.normal(1, noise, (steps, ranks)).clip(0.1)
    for lap, seconds in more.items():
        laps[:, :, LAPS.index(lap)] += seconds
    own = laps.sum(2)
    laps[:, :, LAPS.index("wait")] = own.max(1, keepdims=True) - own + np.zeros((steps, 1)) + message
    return Times(
        laps=laps,
        samples=np.broadcast_to(samples, (steps, ranks)).astype(float),
        cost=np.broadcast_to(cost, (steps, ranks)).astype(float),
        processor=None,
        classes=[{} for _ in range(ranks)],
        memory=[0.5] * ranks,
        places=[(f"host{rank // 4}", f"cuda:{rank % 4}") for rank in range(ranks)],
        workers=[2] * ranks,
        cores=[8] * ranks,
    )


def on(*ranks: int, of: int = 2, seconds: Any = 50.0) -> Floats:
    """(1, of) or (steps, of): so many seconds on these ranks, else none."""
    which = np.zeros((1, of))
    which[0, list(ranks)] = 1.0
    return np.reshape(seconds, (-1, 1)) * which


def every(steps: int, seconds: float, after: int = 0) -> Floats:
    """(STEPS,) seconds in one step of so many."""
    return np.where(np.arange(STEPS) % steps == steps - 1, seconds, 0.0) * (np.arange(STEPS) >= after)


def told(findings: list[Finding]) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.cause, finding.ranks) for finding in findings]


def one(times: Times) -> Finding:
    findings = diagnose(times)
    assert len(findings) == 1, findings
    return findings[0]


# One cause


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_nothing_is_told_of_a_balanced_run(ranks: int, noise: float) -> None:
    for seed in range(10):
        assert diagnose(made(ranks, noise=noise, seed=seed)) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("lap", "cause"),
    [
        ("data", "slow_data_on_rank"),
        ("h2d", "slow_data_on_rank"),
        ("forward", "slow_compute_on_rank"),
        ("backward", "slow_compute_on_rank"),
        ("optimizer", "slow_compute_on_rank"),
        ("callbacks", "slow_callbacks"),
        ("logging", "slow_logging"),
        ("checkpoint", "slow_checkpoint"),
        ("validation", "slow_validation"),
    ],
)
def test_what_one_rank_takes_longer_is_what_all_lose(lap: str, cause: str, rank: int) -> None:
    finding = one(made(**{lap: on(rank)}))
    assert (finding.cause, finding.ranks, finding.chronic) == (cause, (rank,), True)
    assert finding.share == pytest.approx(50 / (FORWARD + BACKWARD + MESSAGE + 50), abs=0.03)
    assert f"rank {rank} (host host0, cuda:{rank})" in finding.evidence


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(
    ("lap", "cause"),
    [
        ("data", "slow_data"),
        ("callbacks", "slow_callbacks"),
        ("logging", "slow_logging"),
        ("checkpoint", "slow_checkpoint"),
    ],
)
def test_what_all_ranks_wait_for_concerns_all(lap: str, cause: str, ranks: int) -> None:
    finding = one(made(ranks, **{lap: 50.0}))
    assert (finding.cause, finding.ranks, finding.chronic) == (cause, (), True)
    assert finding.share == pytest.approx(50 / (FORWARD + BACKWARD + MESSAGE + 50), abs=0.03)


def test_computing_is_no_cause_where_all_ranks_do_it() -> None:
    assert diagnose(made(forward=500.0, backward=500.0, optimizer=500.0)) == []


@pytest.mark.parametrize(("seconds", "causes"), [(40.0, []), (60.0, ["slow_validation"])])
def test_validation_is_told_from_a_third_of_the_time(seconds: float, causes: list[str]) -> None:
    assert [finding.cause for finding in diagnose(made(validation=seconds))] == causes


@pytest.mark.parametrize(("seconds", "causes"), [(15.0, []), (30.0, ["slow_compute_on_rank"])])
def test_computing_on_cpus_is_told_from_a_fifth_on(seconds: float, causes: list[str]) -> None:
    times = made(forward=on(1, seconds=seconds))
    assert told(diagnose(times)) == [("slow_compute_on_rank", (1,))]
    on_cpus = dataclasses.replace(times, places=[("host0", "cpu")] * 2)
    assert [finding.cause for finding in diagnose(on_cpus)] == causes
    as_usual = dataclasses.replace(on_cpus, processor=np.array([1.0, 0.9]))  # a tenth is noise
    assert [finding.cause for finding in diagnose(as_usual)] == causes
    shared = dataclasses.replace(on_cpus, processor=np.array([1.0, 0.8]))  # another process has the core of rank 1
    assert told(diagnose(shared)) == [("slow_compute_on_rank", (1,))]


@pytest.mark.parametrize(("message", "causes"), [(10.0, []), (40.0, ["slow_communication"])])
def test_communication_is_what_the_slowest_rank_waits_for_too(message: float, causes: list[str]) -> None:
    for ranks in (2, 8):
        assert [finding.cause for finding in diagnose(made(ranks, message=message))] == causes
    assert diagnose(made(1, message=message)) == []


def test_memory_that_is_nearly_full_is_told_after_what_costs_time() -> None:
    times = dataclasses.replace(made(data=on(1)), memory=[0.5, 0.95])
    assert told(diagnose(times)) == [("slow_data_on_rank", (1,)), ("memory_nearly_full", (1,))]
    assert diagnose(dataclasses.replace(made(), memory=[0.5, 0.91])) == []
    without = dataclasses.replace(made(steps=0), memory=[0.95, 0.99])
    assert told(diagnose(without)) == [("memory_nearly_full", (0, 1))]
    assert "rank 1 (host host0, cuda:1) holds 99 %" in diagnose(without)[0].evidence


# What rows say and means do not


def test_two_ranks_that_are_slow_in_unlike_steps_do_not_hide_each_other() -> None:
    """Rank 0 logs for 1000 in one step of ten and rank 1 waits 100 more for data in each: their means are equal."""
    findings = diagnose(made(logging=on(0, seconds=every(10, 1000.0)), data=on(1, seconds=100.0)))
    assert told(findings) == [("slow_logging", (0,)), ("slow_data_on_rank", (1,))]
    assert [finding.share for finding in findings] == pytest.approx([90 / 282, 90 / 282], abs=0.05)


def test_two_ranks_that_are_slow_in_the_same_steps_share_what_that_costs() -> None:
    findings = diagnose(made(callbacks=on(0, seconds=100.0), data=on(1, seconds=100.0)))
    assert sorted(told(findings)) == [("slow_callbacks", (0,)), ("slow_data_on_rank", (1,))]
    assert sum(finding.share for finding in findings) == pytest.approx(100 / 192, abs=0.05)


def test_what_hides_behind_a_slower_rank_costs_nothing() -> None:
    assert told(diagnose(made(data=on(0, seconds=30.0), forward=on(1, seconds=100.0)))) == [
        ("slow_compute_on_rank", (1,))
    ]


def test_data_that_comes_in_bursts_out_of_step_costs_the_sum() -> None:
    """Two workers finish at once, so that a rank waits in every other step; each rank in its own."""
    odd = np.arange(STEPS)[:, None] % 2
    finding = one(made(data=100.0 * np.concatenate([odd, 1 - odd], axis=1)))
    assert (finding.cause, finding.ranks) == ("slow_data", ())
    assert finding.share == pytest.approx(100 / 192, abs=0.04)


def test_bursts_of_many_workers_are_no_outliers() -> None:
    finding = one(made(steps=64 * 8, data=on(1, seconds=np.where(np.arange(64 * 8) % 64 == 0, 64 * 50.0, 0.0))))
    assert (finding.cause, finding.ranks) == ("slow_data_on_rank", (1,))
    assert finding.share == pytest.approx(50 / 142, abs=0.05)


def test_workers_that_only_seem_to_keep_up_are_slow_too() -> None:
    """Rank 0 waits for rank 1's data, so that its own workers have time to catch up; in some steps they have not."""
    some = np.where(np.arange(STEPS) % 10 == 0, 30.0, 0.0)
    times = made(data=on(0, seconds=some) + on(1, seconds=40.0))
    assert told(diagnose(times)) == [("slow_data", ())]
    # Of many ranks one that hesitates now and then is no slow one.
    some = on(5, of=8, seconds=some) + on(1, of=8, seconds=40.0)
    assert told(diagnose(made(8, data=some))) == [("slow_data_on_rank", (1,))]
    # Without workers nobody catches up: rank 0 reads that long.
    assert told(diagnose(dataclasses.replace(times, workers=[0, 0]))) == [("slow_data_on_rank", (1,))]


@pytest.mark.parametrize("lap", ["data", "forward", "wait"])
@pytest.mark.parametrize("step", [0, 57, STEPS - 1])
def test_a_machine_that_paused_once_is_no_cause(lap: str, step: int) -> None:
    pause = np.where(np.arange(STEPS) == step, 5000.0, 0.0)
    assert diagnose(made(message=2.0 + pause[:, None]) if lap == "wait" else made(**{lap: on(1, seconds=pause)})) == []


def test_a_pause_does_not_hide_what_lasts() -> None:
    seconds = on(1, seconds=np.where(np.arange(STEPS) == 40, 5000.0, 50.0))
    finding = one(made(forward=seconds))
    assert (finding.cause, finding.ranks) == ("slow_compute_on_rank", (1,))


def test_shares_are_of_the_time_that_a_few_long_validations_take_too() -> None:
    # Each step waits 100 for its message, and the last one has a validation that takes as long as all of them.
    step = FORWARD + BACKWARD + 100.0
    times = made(noise=0.01, message=100.0, validation=on(0, 1, seconds=every(STEPS, STEPS * step)))
    shares = {finding.cause: finding.share for finding in diagnose(times)}
    assert shares["slow_validation"] == pytest.approx(0.5, abs=0.02)
    assert shares["slow_communication"] == pytest.approx(50.0 / step, abs=0.02)


def test_a_pause_in_the_largest_batch_does_not_make_work_uneven() -> None:
    for seed in range(10):
        cost = np.random.default_rng(seed).uniform(50, 150, (STEPS, 2))
        pause = np.where(cost == cost[:, 1].max(), 5000.0, 0.0)
        assert diagnose(made(cost=cost, forward=pause, seed=seed)) == []


def test_noise_of_single_steps_does_not_change_what_a_slow_rank_costs() -> None:
    """Where both ranks differ from step to step by a third, each is the slower one in some of them."""
    shares = [one(made(noise=0.3, forward=on(1, seconds=30.0), seed=seed)).share for seed in range(10)]
    assert np.mean(shares) == pytest.approx(30 / 122, rel=0.12)


def test_noise_that_comes_and_goes_is_no_slow_rank() -> None:
    """Another job takes half of a core for a while; over the run that comes to a seventh of the time."""
    busy = np.where((np.arange(STEPS) >= 30) & (np.arange(STEPS) < 50), 90.0, 0.0)
    assert diagnose(made(forward=on(1, seconds=busy))) == []


def test_noise_that_lasts_for_a_part_of_the_run_is_seldom_taken_for_a_slow_rank() -> None:
    told = 0
    for seed in range(400):
        noise = np.random.default_rng(1000 + seed).normal(0, 30, (8, 2)).clip(-25)  # a third of a step
        told += bool(diagnose(made(seed=seed, forward=noise.repeat(STEPS // 8, axis=0))))
    assert told <= 20


def test_in_a_long_run_what_comes_and_goes_often_enough_is_told() -> None:
    busy = np.where(np.arange(4000) % 500 < 150, 90.0, 0.0)
    finding = one(made(steps=4000, forward=on(1, seconds=busy)))
    assert (finding.cause, finding.ranks) == ("slow_compute_on_rank", (1,))


def test_what_began_late_in_a_long_run_is_told() -> None:
    """An eighth of it, which in a short run may be another job's."""
    late = np.where(np.arange(4000) >= 3500, 400.0, 0.0)
    assert told(diagnose(made(steps=4000, forward=on(1, seconds=late)))) == [("slow_compute_on_rank", (1,))]
    assert diagnose(made(forward=on(1, seconds=late[::33][:STEPS]))) == []


# Unequal work


def test_more_samples_on_a_rank_cost_what_dealing_them_evenly_would_save() -> None:
    """Rank 1 has twice as many, and takes twice as long: dealt evenly, a step is three quarters."""
    finding = one(made(samples=[[8, 16]], cost=[[100, 200]], forward=on(1, seconds=30.0), backward=on(1, seconds=60.0)))
    assert (finding.cause, finding.ranks, finding.chronic) == ("uneven_samples", (1,), True)
    assert finding.share == pytest.approx(45 / 182, abs=0.02)
    assert "16 samples in a step, the others 8" in finding.evidence


def test_samples_are_the_work_where_the_cost_does_not_tell() -> None:
    times = made(samples=[[8, 16]], cost=1.0, forward=on(1, seconds=30.0), backward=on(1, seconds=60.0))
    assert told(diagnose(times)) == [("uneven_samples", (1,))]


def test_larger_samples_on_a_rank_are_uneven_work() -> None:
    finding = one(made(cost=[[100, 200]], forward=on(1, seconds=30.0), backward=on(1, seconds=60.0)))
    assert (finding.cause, finding.ranks) == ("uneven_work", (1,))
    assert "100 % more work" in finding.evidence and "BalancedBatchSampler" in finding.advice


def test_a_few_more_samples_that_are_much_larger_are_uneven_work() -> None:
    times = made(samples=[[8, 9]], cost=[[100, 200]], forward=on(1, seconds=30.0), backward=on(1, seconds=60.0))
    assert told(diagnose(times)) == [("uneven_work", (1,))]


def test_batches_that_are_large_in_turn_concern_no_rank() -> None:
    large = np.arange(STEPS)[:, None] % 2 == np.arange(2)
    finding = one(made(cost=np.where(large, 200, 100), forward=30.0 * large, backward=60.0 * large))
    assert (finding.cause, finding.ranks, finding.chronic) == ("uneven_work", (), True)
    assert finding.share == pytest.approx(45 / 182, abs=0.03)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_no_batches_any_more_leaves_the_samples_to_the_other(rank: int) -> None:
    ended = (np.arange(STEPS) >= STEPS // 2)[:, None] * on(1 - rank, seconds=1.0)
    times = made(samples=8.0 * (1 - ended), cost=100.0 * (1 - ended))
    times.laps[:, :, LAPS.index("forward")] *= 1 - ended
    times.laps[:, :, LAPS.index("backward")] *= 1 - ended
    times.laps[:, :, LAPS.index("wait")] += (FORWARD + BACKWARD) * ended
    assert told(diagnose(times))[0] == ("uneven_samples", (rank,))


def test_work_that_is_read_longer_too_is_told_once() -> None:
    times = made(cost=[[100, 200]], samples=[[8, 16]], data=[[100, 200]], backward=on(1, seconds=90.0))
    assert ("slow_data_on_rank", (1,)) not in told(diagnose(times))
    assert told(diagnose(times))[0] == ("slow_data", ()) or told(diagnose(times))[0] == ("uneven_samples", (1,))


def test_a_slow_rank_with_a_little_more_work_is_slow() -> None:
    assert told(diagnose(made(cost=[[100, 103]], backward=on(1, seconds=100.0)))) == [("slow_compute_on_rank", (1,))]


def test_a_cost_that_time_does_not_follow_is_no_cause() -> None:
    draw = np.random.default_rng(1)
    for seed in range(10):
        assert diagnose(made(cost=draw.uniform(50, 150, (STEPS, 2)), seed=seed)) == []
        assert diagnose(made(cost=[[100, 200]], seed=seed)) == []


def test_work_and_slowness_are_told_apart() -> None:
    """Rank 1 has 1.5 times the work and takes 3 times as long: twice as long for what it has."""
    findings = diagnose(made(cost=[[100, 150]], forward=on(1, seconds=60.0), backward=on(1, seconds=120.0)))
    assert told(findings) == [("slow_compute_on_rank", (1,))]
    cost = np.random.default_rng(1).uniform(50, 150, (STEPS, 2)) * [1.0, 3.0]
    findings = diagnose(made(cost=cost, forward=cost * [1.0, 2.0]))
    assert sorted(told(findings)) == [("slow_compute_on_rank", (1,)), ("uneven_work", (1,))]


@pytest.mark.parametrize("cost", [0.0, np.nan, np.inf, -5.0])
def test_a_cost_that_says_nothing_is_left_out(cost: float) -> None:
    draw = np.random.default_rng(1)
    strange = np.where(draw.random((STEPS, 2)) < 0.5, cost, 100.0)
    for each in (strange, cost):
        findings = diagnose(made(cost=each, data=on(1)))
        assert told(findings) == [("slow_data_on_rank", (1,))]
        assert all(np.isfinite(finding.share) for finding in findings)


# Many ranks


@pytest.mark.parametrize("ranks", [3, 8, 64])
def test_one_slow_rank_of_many_is_found(ranks: int) -> None:
    for slow in (0, ranks // 2, ranks - 1):
        assert told(diagnose(made(ranks, data=on(slow, of=ranks)))) == [("slow_data_on_rank", (slow,))]


@pytest.mark.parametrize("slow", [(2, 3), (0, 3, 5), (4, 5, 6, 7)])
def test_a_group_of_slow_ranks_is_named_together(slow: tuple[int, ...]) -> None:
    finding = one(made(8, forward=on(*slow, of=8, seconds=80.0)))
    assert (finding.cause, finding.ranks) == ("slow_compute_on_rank", slow)
    assert finding.share == pytest.approx(80 / 180, abs=0.06)


def test_ranks_of_unlike_slowness_are_named_from_half_of_the_slowest_on() -> None:
    slowness = np.array([[0.0, 0, 0, 0, 0, 20, 60, 80]])
    assert one(made(8, forward=slowness)).ranks == (6, 7)


def test_one_fast_rank_is_nothing_to_be_told() -> None:
    assert diagnose(made(8, forward=-on(3, of=8, seconds=25.0))) == []


def test_hosts_and_ranks_of_a_large_group_are_shortened() -> None:
    finding = one(made(64, forward=on(*range(32, 64), of=64, seconds=80.0)))
    assert finding.ranks == tuple(range(32, 64))
    assert "ranks 32, 33, 34, 35, 36, 37 and 26 more (hosts host10, host11, host12)" in finding.evidence


# Chronic or not


@pytest.mark.parametrize(
    ("seconds", "chronic"),
    [
        (every(10, 500.0), True),
        (every(30, 1500.0), True),
        (every(60, 3000.0), False),
        (every(10, 1000.0, after=60), True),
        (every(10, 1000.0)[::-1] * (np.arange(STEPS) < 60), False),
        (every(STEPS, 5000.0), False),
        (every(STEPS, 5000.0)[::-1], False),
    ],
    ids=[
        "often",
        "in every second part",
        "twice",
        "since half",
        "until half",
        "once at the end",
        "once at the beginning",
    ],
)
def test_chronic_is_what_goes_on(seconds: Floats, chronic: bool) -> None:
    for times in (made(checkpoint=on(0, seconds=seconds)), made(checkpoint=seconds[:, None])):
        finding = one(times)
        assert (finding.cause, finding.chronic) == ("slow_checkpoint", chronic)


# Advice


def test_workers_are_advised_by_what_decoding_takes() -> None:
    """2 workers, 50 of wait in a step of 140: a batch takes 280 to decode; the rest of a step is 90, so 4 keep up."""
    finding = one(made(data=on(1), noise=0.0))
    assert "Raise num_workers from 2 to 4" in finding.advice
    alone = dataclasses.replace(made(1, data=200.0, noise=0.0), workers=[0], cores=[2])
    assert "Raise num_workers from 0 to 2, all cores of this rank" in one(alone).advice
    enough = dataclasses.replace(made(data=on(1), noise=0.0), workers=[8, 8])
    assert "has 8 cores and 8 workers" in one(enough).advice


def test_a_rank_whose_core_others_use_is_told_from_one_whose_device_is_slow() -> None:
    times = made(forward=on(1, seconds=90.0))
    assert "clock and temperature" in one(times).advice
    shared = dataclasses.replace(times, processor=np.array([0.98, 0.5]), workers=[0, 0], cores=[1, 1])
    assert "it had 0.50 s of processor for each second of work, the others 0.98" in one(shared).evidence
    assert "cores of its own" in one(shared).advice
    crowded = dataclasses.replace(shared, workers=[4, 4])
    assert "its 4 workers" in one(crowded).advice


def test_the_class_that_takes_most_of_it_is_named() -> None:
    times = made(callbacks=on(0))
    named = dataclasses.replace(times, classes=[{"callbacks:EMA": 40.0, "callbacks:Other": 9.0}, {}])
    assert "most of it in EMA" in one(named).evidence and "Have EMA work less often" in one(named).advice


# A long run


def remembered(
    steps: int,
    ranks: int = 2,
    classes: dict[str, float] | None = None,
    processor: Sequence[float] | None = None,
    **more: Any,
) -> History:
    """The history of steps as `made` makes them, heard of in pieces.

    classes: seconds of each step on all ranks.
    processor: by rank, seconds of it in each step.
    """
    times, history, of_classes = made(ranks, steps=steps, **more), History(), classes or {}
    for begin in range(0, steps, 50):
        part = slice(begin, begin + 50)
        history.add(
            [
                Measured(
                    names=(*LAPS, *of_classes),
                    seconds=np.pad(times.laps[part, rank], ((0, 0), (0, len(of_classes)))).astype(np.float32)
                    + np.array([0.0] * len(LAPS) + list(of_classes.values()), np.float32),
                    samples=times.samples[part, rank].tolist(),
                    cost=times.cost[part, rank].tolist(),
                    processor_seconds=None if processor is None else processor[rank] * len(times.laps[part]),
                    memory_bytes=0,
                    memory_share=0.0,
                    host="host0",
                    device=f"cuda:{rank}",
                    workers=2,
                    cores=8,
                )
                for rank in range(ranks)
            ]
        )
    return history


def test_ranks_that_are_slow_in_turn_are_told_of_a_long_run_too() -> None:
    """A mean of steps would have both equally slow, and both waiting: for nothing but messages, it would seem."""
    odd = np.arange(20_000)[:, None] % 2
    balance = remembered(20_000, data=100.0 * np.concatenate([odd, 1 - odd], axis=1)).balance()
    assert told(list(balance.findings)) == [("slow_data", ())]
    assert balance.findings[0].share == pytest.approx(100 / 192, abs=0.04)


def test_every_step_of_a_long_run_counts_alike() -> None:
    """What was 10 ms a step in its first half, in one step of 500, is 5 of the whole run."""
    steps = np.arange(20_000)
    validation = np.where((steps % 500 == 499) & (steps < 10_000), 5000.0, 0.0)[:, None]
    balance = remembered(20_000, noise=0.0, validation=validation).balance()
    (first, second) = balance.ranks
    assert first.seconds["validation"] == second.seconds["validation"] == pytest.approx(5.0, rel=0.01)
    assert balance.steps == 20_000 and balance.step_seconds == pytest.approx(FORWARD + BACKWARD + MESSAGE + 5, rel=0.01)


@pytest.mark.parametrize(("ranks", "rows"), [(2, 4096), (500, 524)])
def test_the_history_of_a_long_run_is_bounded(ranks: int, rows: int) -> None:
    steps = 2 * rows + 100
    history = remembered(steps, ranks)
    assert rows / 2 - 50 < len(history.rows) <= rows
    assert history.balance().steps == steps
    assert len(history.recent) == 200


@pytest.mark.parametrize("steps", [100, 20_000])
def test_the_processors_time_is_compared_with_a_ranks_own_work(steps: int) -> None:
    """Rank 0 works for 90 of its step and waits for 92, in which it needs no processor."""
    balance = remembered(steps, noise=0.0, forward=on(1, seconds=90.0), processor=(88.2, 90.0)).balance()
    assert told(list(balance.findings)) == [("slow_compute_on_rank", (1,))]
    assert "it had 0.50 s of processor for each second of work, the others 0.98" in balance.findings[0].evidence


@pytest.mark.parametrize("recent", [False, True])
def test_a_class_is_named_where_it_takes_half_of_the_time_of_a_long_run(recent: bool) -> None:
    for seconds, named in ((60.0, True), (10.0, False)):
        rest = 100.0 - seconds  # of hooks that have no class
        balance = remembered(5000, callbacks=rest, classes={"callbacks:EMA": seconds}).balance(recent)
        assert balance.verdict == "slow_callbacks"
        assert ("EMA" in balance.findings[0].evidence) == named


# What must hold for any times


laps = st.sampled_from([lap for lap in LAPS if lap != "wait"])
causes = st.lists(st.tuples(laps, st.integers(0, 4), st.sampled_from([10.0, 40.0, 160.0])), max_size=3)


def with_causes(chosen: list[tuple[str, int, float]], ranks: int = 5, **settings: Any) -> Times:
    more: dict[str, Floats] = {}
    for lap, rank, seconds in chosen:
        more[lap] = more.get(lap, np.zeros((1, ranks))) + on(rank, of=ranks, seconds=seconds)
    return made(ranks, **more, **settings)


def facts(findings: list[Finding], names: Any = None) -> list[tuple[Any, ...]]:
    return sorted(
        (f.cause, tuple(sorted(names[rank] for rank in f.ranks)) if names else f.ranks, round(f.share, 6), f.chronic)
        for f in findings
    )


@given(chosen=causes, factor=st.sampled_from([1e-6, 1e-3, 0.37, 1e4]), seed=st.integers(0, 5))
def test_a_common_factor_on_all_times_changes_nothing(
    chosen: list[tuple[str, int, float]], factor: float, seed: int
) -> None:
    times = with_causes(chosen, seed=seed)
    slower = dataclasses.replace(times, laps=times.laps * factor)
    assert facts(diagnose(slower)) == facts(diagnose(times))


@given(chosen=causes, order=st.permutations(range(5)), noise=st.sampled_from([0.0, 0.05]), uneven=st.booleans())
def test_permuting_the_ranks_permutes_the_findings(
    chosen: list[tuple[str, int, float]], order: list[int], noise: float, uneven: bool
) -> None:
    cost = np.random.default_rng(3).uniform(50, 150, (STEPS, 5)) if uneven else 100.0
    times = with_causes(chosen, noise=noise, cost=cost)
    times.laps[:, :, LAPS.index("backward")] += times.cost / 4
    moved = dataclasses.replace(
        times,
        laps=times.laps[:, order],
        samples=times.samples[:, order],
        cost=times.cost[:, order],
        places=[times.places[rank] for rank in order],
    )
    assert facts(diagnose(moved), order) == facts(diagnose(times), range(5))


@given(
    steps=st.integers(0, 12),
    ranks=st.integers(1, 4),
    zero=st.booleans(),
    data=st.data(),
)
def test_shares_are_numbers_between_0_and_1_whatever_the_times(
    steps: int, ranks: int, zero: bool, data: st.DataObject
) -> None:
    values = st.sampled_from([0.0, 0.0, 1e-9, 1.0, 3.0, 1e6])
    shape = (steps, ranks, len(LAPS))
    drawn = data.draw(st.lists(values, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    every_lap = np.zeros(shape) if zero else np.reshape(drawn, shape)
    cost = np.reshape(data.draw(st.lists(values, min_size=steps * ranks, max_size=steps * ranks)), (steps, ranks))
    with np.errstate(all="raise"):
        findings = diagnose(
            dataclasses.replace(made(ranks, steps=max(steps, 1)), laps=every_lap, cost=cost, samples=cost)
        )
    for finding in findings:
        assert finding.cause in CAUSES and 0.0 <= finding.share <= 1.0 and finding.evidence and finding.advice
        assert all(0 <= rank < ranks for rank in finding.ranks) and "nan" not in finding.evidence
    if zero or not steps:
        assert findings == []
