"""What counts: the state of a run, and the seconds of its laps."""

from __future__ import annotations

import dataclasses
import time
import timeit

import pytest
import torch

from sanctuary_trainer.clock import Clock, Trail
from sanctuary_trainer.state import RunState


def test_a_run_begins_with_nothing_done() -> None:
    assert dataclasses.asdict(RunState()) == {
        "epoch": 0,
        "batch": 0,
        "global_step": 0,
        "samples": 0,
        "stop_reason": None,
    }


def test_the_end_of_an_epoch_moves_the_position_to_the_next_ones_start_and_keeps_the_steps() -> None:
    state = RunState(epoch=2, batch=5, global_step=15, samples=160)
    state.end_epoch()
    assert state == RunState(epoch=3, batch=0, global_step=15, samples=0)


def test_a_misspelt_field_of_the_state_is_refused() -> None:
    with pytest.raises(AttributeError):
        RunState().step = 1  # type: ignore[attr-defined]


@pytest.fixture
def clock_and_time(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, list[float]]:
    """A clock that reads `time[0]`, seconds."""
    now = [100.0]
    monkeypatch.setattr("sanctuary_trainer.clock.perf_counter", lambda: now[0])
    return Clock(), now


def test_a_lap_is_the_time_since_the_one_before_and_names_add_up(clock_and_time: tuple[Clock, list[float]]) -> None:
    clock, now = clock_and_time
    clock.start()
    for data, compute in [(1.0, 4.0), (2.0, 8.0)]:
        now[0] += data
        clock.lap("data")
        now[0] += compute
        clock.lap("compute")
    assert clock.totals() == {"data": 3.0, "compute": 12.0}
    assert (clock.total("data"), clock.total("never")) == (3.0, 0.0)


def test_time_before_start_belongs_to_no_lap(clock_and_time: tuple[Clock, list[float]]) -> None:
    clock, now = clock_and_time
    now[0] += 50.0
    clock.start()
    now[0] += 1.0
    clock.lap("data")
    assert clock.totals() == {"data": 1.0}


def test_a_lap_inside_another_one_is_left_out_of_it(clock_and_time: tuple[Clock, list[float]]) -> None:
    clock, now = clock_and_time
    now[0] += 1.0
    began = clock.enter()
    now[0] += 4.0
    clock.leave("wait", began)
    now[0] += 2.0
    clock.lap("logging")
    now[0] += 8.0
    clock.lap("data")
    assert clock.totals() == {"wait": 4.0, "logging": 3.0, "data": 8.0}


def test_laps_inside_laps_count_once(clock_and_time: tuple[Clock, list[float]]) -> None:
    clock, now = clock_and_time
    hook = clock.enter()
    now[0] += 1.0
    collective = clock.enter()
    now[0] += 4.0
    clock.leave("wait", collective)
    now[0] += 2.0
    clock.leave("callbacks:EMA", hook)
    now[0] += 8.0
    clock.lap("callbacks")
    assert clock.totals() == {"wait": 4.0, "callbacks:EMA": 3.0, "callbacks": 8.0}


def test_what_holds_every_rank_up_counts_whole(clock_and_time: tuple[Clock, list[float]]) -> None:
    clock, now = clock_and_time
    with clock.whole("validation"):
        began = clock.enter()
        now[0] += 4.0
        clock.leave("wait", began)
        now[0] += 1.0
    assert clock.totals() == {"validation": 5.0}


def test_totals_are_not_changed_by_later_laps(clock_and_time: tuple[Clock, list[float]]) -> None:
    clock, now = clock_and_time
    now[0] += 1.0
    clock.lap("data")
    totals = clock.totals()
    now[0] += 1.0
    clock.lap("data")
    assert totals == {"data": 1.0}


class Passing:
    """An event as torch's accelerators record it, in a queue whose time is `now[0]` seconds."""

    def __init__(self, now: list[float]) -> None:
        self.at = now[0]

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Passing) -> float:
        return 1000 * (later.at - self.at)


def test_a_trail_tells_the_laps_on_the_devices_own_timeline(clock_and_time: tuple[Clock, list[float]]) -> None:
    clock, _ = clock_and_time  # the host's time stands still
    queue = [0.0]
    clock.trail = trail = Trail(torch.device("cpu"), lambda: Passing(queue))  # type: ignore[arg-type,return-value]
    queue[0] = 1.0
    clock.lap("data")
    queue[0] = 3.0
    began = clock.enter()
    queue[0] = 7.0
    clock.leave("wait", began)
    queue[0] = 15.0
    clock.lap("logging")
    queue[0] = 31.0
    clock.enter()  # of what is left later counts what was entered last
    queue[0] = 63.0
    began = clock.enter()
    queue[0] = 127.0
    clock.leave("wait", began)
    queue[0] = 255.0
    clock.lap("backward")
    queue[0] = 511.0
    clock.enter()  # of no lap yet
    assert trail.seconds() == {"data": 1.0, "wait": 4.0 + 64.0, "logging": 2.0 + 8.0, "backward": 48.0 + 128.0}


def test_what_counts_whole_has_one_lap_on_a_devices_timeline(clock_and_time: tuple[Clock, list[float]]) -> None:
    """A validation of ten thousand batches puts no event into the queue for each of them."""
    clock, _ = clock_and_time
    queue, events = [0.0], list[Passing]()

    def record() -> Passing:
        events.append(Passing(queue))
        return events[-1]

    clock.trail = trail = Trail(torch.device("cpu"), record)  # type: ignore[arg-type]
    with clock.whole("validation"):
        for _ in range(100):
            began = clock.enter()
            queue[0] += 1.0
            clock.leave("wait", began)
    assert trail.seconds() == {"validation": 100.0} and len(events) == 2


@pytest.mark.gpu
def test_a_copy_beside_the_devices_computing_takes_none_of_its_time() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    matrix, host = torch.eye(8192, device=device), torch.ones(64_000_000).pin_memory()  # 256 MB
    copies = torch.cuda.Stream(device)
    torch.cuda.synchronize()
    trail = Trail(device)
    for _ in range(20):
        matrix = matrix @ matrix
    with torch.cuda.stream(copies):
        trail.mark(None)
        copy = host.to(device, non_blocking=True)
        trail.mark("h2d", inner=True)
    trail.mark("forward")
    seconds = trail.seconds()
    assert seconds["forward"] > 20 * 2 * 8192**3 / 1e15 and seconds["h2d"] < 0.001
    torch.cuda.synchronize()
    assert float(copy[-1]) == 1.0


def test_the_clock_reads_real_seconds() -> None:
    clock = Clock()
    clock.start()
    before = time.perf_counter()
    time.sleep(0.01)
    clock.lap("sleep")
    assert 0.01 <= clock.total("sleep") <= time.perf_counter() - before


def test_a_lap_may_stand_in_the_loop() -> None:
    clock = Clock()
    seconds = min(timeit.repeat(lambda: clock.lap("data"), number=2000, repeat=10)) / 2000
    assert seconds < 5e-6  # about 0.25e-6 on an idle machine
