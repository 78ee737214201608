"""How fast a fit trains: samples per second, time per step, time to its end, share of the time in the model.

    at the end of each step       its time: since the end of the step before, less validations and checkpoints
    at each point of the curves   what the steps since the point before came to
    at the end of the fit         what all of them came to, in one line

The first step of a fit, also of one that is continued, has no step before it: it is counted nowhere. It is also the one
in which a model is compiled and kernels are chosen.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from math import floor, log10
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, NamedTuple

from sanctuary_trainer import Callback

if TYPE_CHECKING:
    from sanctuary_trainer import Run

MOST_STEPS = 1_000_000  # whose times are kept for the last line, at least: 8 to 16 MB


class Throughput(Callback):
    """Logs how fast a fit trains, at every point of the curves, and tells it in one line at the end.

    `speed/samples_per_second`   samples of all ranks in a second
    `speed/step_ms_median`       milliseconds from the end of one step to the end of the next
    `speed/step_ms_p95`          95 % of the steps took at most this
    `speed/eta_seconds`          to the end of the fit; no value where that is not known
    `speed/model_share`          percent of the steps' time in forward and backward

    Each rank measures the steps since the point before by its own clock, and the mean over the ranks is logged: samples
    are those of all ranks, times are averaged, and the percentile is the mean of the ranks' own. Validations and
    checkpoints are left out; they count in `eta_seconds` alone, which goes by the mean of all steps since the fit began
    or was continued. Windows without an update, with their samples, belong to the step after them.

    All times are the host's: nothing waits for a device. On an accelerator the host runs ahead until it reads a value,
    as it does for each point: so the samples per second and the time to the end are right, and the other three tell
    what the host does.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._first: _Moment | None = None  # the end of the first step
        self._point: _Moment | None = None  # of the step at the last point of the curves
        # Of the last step. Not a _Moment, which takes 0.5 us to make.
        self._last: tuple[float, float, int, int, dict[str, float]] = (0.0, 0.0, 0, 0, {})
        self._epochs_before = 0  # samples of the epochs that are over
        self._since_point = array("d")  # seconds of the steps
        self._until_point = array("d")

    def on_train_step_end(self, run: Run) -> None:
        state, laps, now = run.state, run.clock.totals(), perf_counter()
        # Hooks of save points have laps of their own where they are timed by class: "checkpoint:EMA".
        aside = [seconds for name, seconds in laps.items() if name.startswith(("validation", "checkpoint"))]
        trained, before = now - sum(aside), self._last[1]
        self._last = (now, trained, state.global_step, self._epochs_before + state.samples, laps)
        if self._first is None:
            self._first = self._point = _Moment(*self._last)
            return
        self._since_point.append(trained - before)
        if run.plan.logs(state.global_step):
            self._log(run)

    def on_train_epoch_end(self, run: Run) -> None:
        self._epochs_before += run.state.samples

    def on_fit_end(self, run: Run) -> None:
        first, last, times = self._first, _Moment(*self._last), self._until_point + self._since_point
        self._reset()  # the next fit, or one that fails before it begins, finds nothing of this one
        if run.is_main and run.state.stop_reason is not None and first is not None and times:
            samples, median, p95, share = (_shown(value) for value in _speed(first, last, times).values())
            run.message(
                f"Throughput: {samples} samples/s, {median} ms per step (95 % under {p95} ms), "
                f"{share} % of the time in the model"
            )

    def _log(self, run: Run) -> None:
        assert self._first is not None and self._point is not None
        now = _Moment(*self._last)
        values = _speed(self._point, now, self._since_point)
        left = _seconds_left(run, (now.clock - self._first.clock) / (now.step - self._first.step))
        if left is not None:
            values["eta_seconds"] = left
        run.log_dict({f"speed/{name}": value for name, value in values.items()})
        self._point = now
        self._until_point.extend(self._since_point)
        del self._since_point[:]
        if len(self._until_point) > 2 * MOST_STEPS:
            del self._until_point[:-MOST_STEPS]


class _Moment(NamedTuple):
    """The end of a step.

    clock: seconds on the host's clock.
    trained: the same, without validations and checkpoints.
    step: the run's steps so far.
    samples: of this attempt so far, over all ranks.
    laps: seconds of each lap of this rank so far.
    """

    clock: float
    trained: float
    step: int
    samples: int
    laps: dict[str, float]

    @property
    def in_model(self) -> float:
        """Seconds of forward and backward."""
        return self.laps.get("forward", 0.0) + self.laps.get("backward", 0.0)


def _speed(begin: _Moment, end: _Moment, times: Sequence[float]) -> dict[str, float]:
    """What the steps between two moments came to; times: seconds of each."""
    seconds, ordered = end.trained - begin.trained, sorted(times)
    return {
        "samples_per_second": (end.samples - begin.samples) / seconds,
        "step_ms_median": 1000 * _quantile(ordered, 0.5),
        "step_ms_p95": 1000 * _quantile(ordered, 0.95),
        "model_share": 100 * (end.in_model - begin.in_model) / seconds,
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The value under which this share of the values lies; between two of them as a straight line runs."""
    place = share * (len(ordered) - 1)
    low = floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _seconds_left(run: Run, step: float) -> float | None:
    """Seconds to the end of the fit where a step takes `step` seconds; None where it is not known."""
    plan, state = run.plan, run.state
    steps = plan.steps_left(state)
    left = None if steps is None else steps * step
    if run.deadline is None or (left is None and plan.max_epochs is not None):  # epochs of unknown length
        return left
    # max_time waits for these.
    of_epochs = replace(plan, max_epochs=plan.min_epochs, max_steps=None).steps_left(state) if plan.min_epochs else 0
    if of_epochs is None:
        return left
    until = max(run.deadline - monotonic(), step * max(of_epochs, plan.min_steps - state.global_step), 0.0)
    return until if left is None else min(left, until)


def _shown(value: float) -> str:
    """With three digits, or more before the point: 0.123, 12.3, 1,234."""
    digits = 2 - floor(log10(value)) if value > 0 else 0
    return f"{value:,.{max(digits, 0)}f}"
