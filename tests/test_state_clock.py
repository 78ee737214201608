"""What counts: the state of a run, and the seconds of its laps."""

import dataclasses
import time
import timeit

import pytest

from sanctuary_trainer.clock import Clock
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
    assert clock.take() == {"data": 3.0, "compute": 12.0}


def test_time_before_start_belongs_to_no_lap(clock_and_time: tuple[Clock, list[float]]) -> None:
    clock, now = clock_and_time
    now[0] += 50.0
    clock.start()
    now[0] += 1.0
    clock.lap("data")
    assert clock.take() == {"data": 1.0}


def test_take_starts_again_at_nothing_and_total_goes_on(clock_and_time: tuple[Clock, list[float]]) -> None:
    clock, now = clock_and_time
    now[0] += 1.0
    clock.lap("data")
    assert clock.take() == {"data": 1.0}
    assert clock.take() == {}
    now[0] += 2.0
    clock.lap("data")
    assert clock.total("data") == 3.0
    assert clock.take() == {"data": 2.0}
    assert clock.total("data") == 3.0
    assert clock.total("never") == 0.0


def test_what_was_taken_is_not_changed_by_later_laps(clock_and_time: tuple[Clock, list[float]]) -> None:
    clock, now = clock_and_time
    now[0] += 1.0
    clock.lap("data")
    taken = clock.take()
    now[0] += 1.0
    clock.lap("data")
    assert taken == {"data": 1.0}


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
