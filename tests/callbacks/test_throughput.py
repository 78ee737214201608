"""How fast a fit is, on a clock that moves only when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from sanctuary_trainer import Callback, Run
from sanctuary_trainer.callbacks import Checkpoint, LoadBalance, Throughput
from tests.small_tasks import Line, Numbers, NumberStream, floats, quiet_trainer
from tests.test_budget import calls_per_step

# Sums of these are exact in floats.
DATA, FORWARD, BACKWARD = 0.125, 0.25, 0.5
STEP = DATA + FORWARD + BACKWARD


class Time:
    """Seconds that pass when `spend` is called."""

    def __init__(self) -> None:
        self.now = 2.0**40  # so late that a deadline on this clock is never reached on the machine's

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return stopped(monkeypatch)


def stopped(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The clock of the run, and of the callback, as one that stands still until time is spent."""
    time = Time()
    for name in ("clock.perf_counter", "callbacks.throughput.perf_counter", "callbacks.throughput.monotonic"):
        monkeypatch.setattr(f"sanctuary_trainer.{name}", time)
    return time


class Slow(Line):
    """Spends time in forward and in backward.

    extra: step -> seconds more in its forward.
    left_out: calls of training_step, from 0, that return None.
    at_step: called at the end of each step, before any callback.
    """

    def __init__(
        self,
        time: Time,
        extra: Mapping[int, float] | None = None,
        left_out: Collection[int] = (),
        at_step: Callable[[Run], None] | None = None,
    ) -> None:
        super().__init__(learning_rate=0.0)
        self.time, self.extra, self.left_out, self.at_step = time, extra or {}, left_out, at_step
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.time.spend(FORWARD + self.extra.get(self.run.state.global_step + 1, 0.0))
        self.calls += 1
        if self.calls - 1 in self.left_out:
            return None
        loss = (self.w * batch).mean()
        loss.register_hook(lambda gradient: self.time.spend(BACKWARD))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.time.spend(64.0)

    def on_train_step_end(self, run: Run) -> None:
        if self.at_step is not None:
            self.at_step(run)


class Points(Callback):
    """Keeps what was logged of the speed, by step."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}

    def on_log(self, run: Run, values: dict[str, float], step: int) -> None:
        speed = {name: value for name, value in values.items() if name.startswith("speed/")}
        if speed:
            assert step not in self.values
            self.values[step] = speed

    def of(self, name: str) -> dict[int, float]:
        return {step: values[f"speed/{name}"] for step, values in self.values.items() if f"speed/{name}" in values}


def slow_loader(time: Time, samples: Dataset[Any], batch_size: int = 2) -> DataLoader[Any]:
    """A loader that spends time on each batch."""

    def collate(values: Any) -> torch.Tensor:
        time.spend(DATA)
        return torch.stack(values)

    return DataLoader(samples, batch_size, collate_fn=collate)


def fit(time: Time, task: Slow | None = None, samples: int = 16, validate: bool = False, **settings: Any) -> Points:
    """Trains on that many samples, 2 in a batch; returns the points of the curves."""
    points = Points()
    callbacks = [*settings.pop("callbacks", [Throughput()]), points]
    data = settings.pop("data", None) or Numbers(floats(range(samples)))
    quiet_trainer(**{"max_epochs": 1, "log_every_n_steps": 4, "callbacks": callbacks, **settings}).fit(
        task or Slow(time), slow_loader(time, data), DataLoader(Numbers(floats(range(2))), 2) if validate else None
    )
    return points


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that the callback wrote since the last call."""
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("Throughput")]


# The values


def test_every_point_tells_of_the_steps_since_the_one_before(time: Time) -> None:
    points = fit(time, Slow(time, extra={2: 1.0, 3: 2.0, 4: 3.0, 5: 8.0}), samples=24)
    assert list(points.values) == [4, 8, 12]
    # Steps 2 to 4: the first has no step before it.
    assert points.values[4] == {
        "speed/samples_per_second": pytest.approx(6 / (3 * STEP + 6.0)),
        "speed/step_ms_median": pytest.approx(1000 * (STEP + 2.0)),
        "speed/step_ms_p95": pytest.approx(1000 * (STEP + 2.9)),  # between the last two of three
        "speed/model_share": pytest.approx(100 * (3 * (FORWARD + BACKWARD) + 6.0) / (3 * STEP + 6.0)),
        "speed/eta_seconds": pytest.approx(8 * (STEP + 2.0)),
    }
    assert points.of("samples_per_second")[8] == pytest.approx(8 / (4 * STEP + 8.0))
    assert points.of("step_ms_median")[8] == pytest.approx(1000 * STEP)
    assert points.of("step_ms_p95")[8] == pytest.approx(1000 * (STEP + 8.0 * 0.85))
    assert points.values[12] == {
        "speed/samples_per_second": pytest.approx(2 / STEP),
        "speed/step_ms_median": pytest.approx(1000 * STEP),
        "speed/step_ms_p95": pytest.approx(1000 * STEP),
        "speed/model_share": pytest.approx(100 * (FORWARD + BACKWARD) / STEP),
        "speed/eta_seconds": 0.0,
    }


def test_a_fit_that_logs_every_step_has_them_from_its_second_one_on(time: Time) -> None:
    points = fit(time, log_every_n_steps=1)
    assert list(points.values) == list(range(2, 9))
    assert points.of("samples_per_second") == dict.fromkeys(range(2, 9), pytest.approx(2 / STEP))
    assert points.of("eta_seconds") == {step: pytest.approx((8 - step) * STEP) for step in range(2, 9)}


class SlowToSave(Callback):
    """Spends 32 seconds in every checkpoint that is written."""

    def __init__(self, time: Time) -> None:
        self.time = time

    def state_dict(self) -> dict[str, Any]:
        self.time.spend(32.0)
        return {}


def test_validations_and_checkpoints_count_in_the_time_to_the_end_alone(time: Time, run_folder: Path) -> None:
    callbacks = [Throughput(), Checkpoint(every_n_steps=2), SlowToSave(time)]
    settings = {"val_check_interval": 2, "num_sanity_val_steps": 1, "project_dir": run_folder}
    points = fit(time, samples=24, validate=True, callbacks=callbacks, **settings)
    assert list(points.values) == [4, 8, 12]
    assert points.of("samples_per_second") == dict.fromkeys((4, 8, 12), pytest.approx(2 / STEP))
    assert points.of("step_ms_p95") == dict.fromkeys((4, 8, 12), pytest.approx(1000 * STEP))
    assert points.of("model_share") == dict.fromkeys((4, 8, 12), pytest.approx(100 * (FORWARD + BACKWARD) / STEP))
    # After step 2 there was one of each, by step 8 there were three.
    assert points.of("eta_seconds")[4] == pytest.approx(8 * (3 * STEP + 96.0) / 3)
    assert points.of("eta_seconds")[8] == pytest.approx(4 * (7 * STEP + 3 * 96.0) / 7)


class SlowAtSavePoints(Callback):
    def __init__(self, time: Time) -> None:
        self.time = time

    def on_save_point(self, run: Run) -> None:
        self.time.spend(32.0)


@pytest.mark.parametrize("beside", [[], [LoadBalance]])
def test_hooks_of_save_points_count_as_checkpoints_also_where_they_are_timed_by_class(
    time: Time, run_folder: Path, beside: list[Callable[[], Callback]]
) -> None:
    callbacks = [Throughput(), SlowAtSavePoints(time), *(make() for make in beside)]
    points = fit(time, callbacks=callbacks, project_dir=run_folder)
    assert points.of("samples_per_second") == dict.fromkeys((4, 8), pytest.approx(2 / STEP))
    assert points.of("eta_seconds")[4] == pytest.approx(4 * (STEP + 32.0))


def test_samples_are_counted_across_the_end_of_an_epoch(time: Time) -> None:
    # 3 steps an epoch, the last of one sample.
    points = fit(time, samples=5, max_epochs=4, validate=True)
    assert points.of("samples_per_second") == {
        4: pytest.approx((2 + 1 + 2) / (3 * STEP)),
        8: pytest.approx((2 + 1 + 2 + 2) / (4 * STEP)),
        12: pytest.approx((1 + 2 + 2 + 1) / (4 * STEP)),
    }
    assert points.of("step_ms_median") == dict.fromkeys((4, 8, 12), pytest.approx(1000 * STEP))


def test_a_step_of_several_batches_is_one_step(time: Time) -> None:
    # Windows of 3, 3 and 2 batches.
    points = fit(time, gradient_accumulation_steps=3, max_epochs=2, log_every_n_steps=3)
    assert points.of("samples_per_second") == {3: pytest.approx(2 / STEP), 6: pytest.approx(2 / STEP)}
    assert points.of("step_ms_median") == {3: pytest.approx(1000 * 2.5 * STEP), 6: pytest.approx(1000 * 3 * STEP)}
    assert points.of("eta_seconds")[3] == pytest.approx(3 * 2.5 * STEP)


def test_a_window_without_an_update_belongs_to_the_step_after_it(time: Time) -> None:
    # Of 8 batches the third and the fourth are left out: 6 steps, the third of them three times as long.
    points = fit(time, Slow(time, left_out=[2, 3]), log_every_n_steps=3)
    seconds = 2 * STEP + 2 * (DATA + FORWARD)
    assert points.of("samples_per_second")[3] == pytest.approx(8 / seconds)
    assert points.of("step_ms_median")[3] == pytest.approx(1000 * seconds / 2)
    assert points.of("model_share")[3] == pytest.approx(100 * (4 * FORWARD + 2 * BACKWARD) / seconds)
    assert points.of("eta_seconds")[3] == pytest.approx(3 * seconds / 2)
    assert points.of("samples_per_second")[6] == pytest.approx(2 / STEP)


# The time to the end


def test_of_a_stream_it_is_known_only_with_a_limit_of_steps(time: Time) -> None:
    def eta(**limits: Any) -> dict[int, float]:
        return fit(time, data=NumberStream(floats(range(32))), **limits).of("eta_seconds")

    assert eta(max_epochs=1) == {}
    assert eta(max_epochs=1, max_time=3600) == {}  # the epoch may end before
    assert eta(max_epochs=None, max_steps=12) == {4: 8 * STEP, 8: 4 * STEP, 12: 0.0}
    assert eta(max_epochs=1, max_steps=12) == {4: 8 * STEP, 8: 4 * STEP, 12: 0.0}


def with_deadline(time: Time, seconds: float) -> Callable[[Run], None]:
    """A deadline that many seconds after the first step, and an end after 16 steps."""
    first: list[float] = []

    def at_step(run: Run) -> None:
        first[:1] = first[:1] or [time.now]
        run.deadline = first[0] + seconds
        if run.state.global_step == 16:
            run.stop("enough")

    return at_step


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_steps": 16}, {4: 10 - 3 * STEP, 8: 10 - 7 * STEP, 12: 10 - 11 * STEP, 16: 0.0}),
        ({"max_steps": 12}, {4: 8 * STEP, 8: 4 * STEP, 12: 0.0}),
        ({"max_steps": None}, {4: 10 - 3 * STEP, 8: 10 - 7 * STEP, 12: 10 - 11 * STEP, 16: 0.0}),
        ({"max_steps": 16, "min_steps": 14}, {4: 10 * STEP, 8: 6 * STEP, 12: 2 * STEP, 16: 0.0}),
    ],
    ids=str,
)
def test_a_limit_of_time_ends_it_where_that_comes_first(time: Time, stream: bool, limits: Any, expected: Any) -> None:
    samples = floats(range(64))
    data = NumberStream(samples) if stream else Numbers(samples)
    task = Slow(time, at_step=with_deadline(time, 10.0))
    points = fit(time, task, data=data, max_epochs=None, max_time=3600, **limits)
    assert points.of("eta_seconds") == expected


def test_a_limit_of_time_waits_for_the_least_number_of_epochs(time: Time) -> None:
    task = Slow(time, at_step=with_deadline(time, 2.0))
    points = fit(time, task, samples=8, max_epochs=4, min_epochs=3, max_time=3600)
    assert points.of("eta_seconds") == {4: 8 * STEP, 8: 4 * STEP, 12: 0.0, 16: 0.0}


# Fits of all kinds


def test_a_fit_with_fewer_steps_than_a_point_needs_tells_it_at_its_end(
    time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    points = fit(time, Slow(time, extra={6: 4.0}), log_every_n_steps=50)
    assert points.values == {}
    rate, share = 14 / (7 * STEP + 4.0), 100 * (7 * (FORWARD + BACKWARD) + 4.0) / (7 * STEP + 4.0)
    assert (rate, share) == (pytest.approx(1.383, abs=5e-4), pytest.approx(91.36, abs=5e-3))
    assert told(capsys) == [
        "Throughput: 1.38 samples/s, 875 ms per step (95 % under 3,675 ms), 91.4 % of the time in the model"
    ]


def test_the_line_at_the_end_is_about_all_steps_whatever_the_points_were(
    time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = []
    for every in (1, 3, 50):
        extra = {2: 1.0, 7: 3.0, 12: 2.0}
        fit(time, Slow(time, extra), samples=10, max_epochs=3, log_every_n_steps=every, validate=True)
        lines += told(capsys)
    assert len(lines) == 3 and len(set(lines)) == 1


def test_a_fit_of_one_step_tells_nothing(time: Time, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(time, max_steps=1, log_every_n_steps=1).values == {}
    assert told(capsys) == []


def test_every_fit_of_one_instance_begins_anew(time: Time, capsys: pytest.CaptureFixture[str]) -> None:
    throughput = Throughput()
    first = fit(time, callbacks=[throughput])
    [line] = told(capsys)
    time.spend(4096.0)
    second = fit(time, callbacks=[throughput])
    assert second.values == first.values and set(first.values) == {4, 8}
    assert told(capsys) == [line]


def test_a_fit_that_fails_tells_nothing_and_leaves_nothing_to_the_next(
    time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(run: Run) -> None:
        if run.state.global_step == 6:
            raise ZeroDivisionError("in step 6")

    throughput = Throughput()
    expected = fit(time).values
    told(capsys)
    with pytest.raises(ZeroDivisionError, match="in step 6"):
        fit(time, Slow(time, at_step=fail), callbacks=[throughput])
    assert told(capsys) == []
    time.spend(4096.0)
    assert fit(time, callbacks=[throughput]).values == expected


class Fails(Callback):
    def setup(self, run: Run) -> None:
        raise ZeroDivisionError("in setup")


def test_a_fit_that_fails_before_it_begins_tells_nothing_of_the_one_before(
    time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    throughput = Throughput()
    fit(time, callbacks=[throughput])
    assert len(told(capsys)) == 1
    with pytest.raises(ZeroDivisionError, match="in setup"):
        fit(time, callbacks=[Fails(), throughput])
    assert told(capsys) == []


def test_a_run_that_is_continued_is_judged_by_its_own_steps(
    time: Time, capsys: pytest.CaptureFixture[str], run_folder: Path
) -> None:
    def train(max_steps: int, data: DataLoader[Any], extra: dict[int, float], resume: str | None = None) -> Points:
        points = Points()
        trainer = quiet_trainer(
            max_steps=max_steps,
            log_every_n_steps=4,
            callbacks=[Throughput(), Checkpoint(), points],
            project_dir=run_folder,
            run_name="parts",
        )
        trainer.fit(Slow(time, extra), data, resume=resume)
        return points

    data = slow_loader(time, Numbers(floats(range(20))))
    train(6, data, {})
    told(capsys)
    time.spend(4096.0)
    points = train(16, data, {7: 512.0, 8: 1.0}, resume="last")
    # Step 7 is the first one of this attempt and ends at an unknown time after its beginning.
    assert list(points.values) == [8, 12, 16]
    assert points.of("samples_per_second") == {8: 2 / (STEP + 1.0), 12: 2 / STEP, 16: 2 / STEP}
    assert points.of("step_ms_median") == {8: 1000 * (STEP + 1.0), 12: 1000 * STEP, 16: 1000 * STEP}
    assert points.of("eta_seconds") == {8: 8 * (STEP + 1.0), 12: pytest.approx(4 * (STEP + 1.0 / 5)), 16: 0.0}
    [line] = told(capsys)
    assert line.startswith(f"Throughput: {18 / (9 * STEP + 1.0):.2f} samples/s, 875 ms per step")


# What it costs


def test_it_adds_at_most_4_python_calls_to_a_step() -> None:
    bare, _ = calls_per_step(quiet_trainer(max_epochs=1))
    number, which = calls_per_step(quiet_trainer(max_epochs=1, callbacks=[Throughput()]))
    assert number <= bare + 4, f"{number:g} calls per step, {bare:g} without: {which}"


def test_the_times_of_a_long_fit_take_no_more_and_no_more_memory(
    time: Time, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sanctuary_trainer.callbacks.throughput.MOST_STEPS", 8)
    fit(time, Slow(time, dict.fromkeys(range(80), 1.0)), samples=200, log_every_n_steps=2)
    rate = 2 * 99 / (99 * STEP + 78)  # of all steps; times are of the last ones
    [line] = told(capsys)
    assert line.startswith(f"Throughput: {rate:.2f} samples/s, 875 ms per step (95 % under 875 ms)")
