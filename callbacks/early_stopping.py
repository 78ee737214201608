"""Ends a fit whose metric no longer improves.

    a fresh value of the monitor       with each validation; of training, with each epoch
      better than the best             it is the best, and no value is bad any more
      else                             one bad value more
    while the last value says so       it is not finite, it reached the threshold, or `patience` values are bad
      the fit is asked to stop         as soon as min_steps and min_epochs allow it

All of it is decided from values over all ranks, so that all ranks decide alike.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sanctuary_trainer import Callback, RunState, SettingsError
from sanctuary_trainer.callbacks.naming import nearest

if TYPE_CHECKING:
    from sanctuary_trainer import Run

MOST_NAMES = 20


class EarlyStopping(Callback):
    """Asks for the end of a fit when `monitor` has not improved for `patience` fresh values.

    A value counts once, when it is computed, and an epoch without one counts nothing. A metric of training counts by
    its value over the epoch: "train/loss" means what is shown as "train/loss_epoch". Two of them can watch two metrics.

    Args:
        monitor: the full name of a logged value: "val/loss", "val/NAME/loss" of one of several loaders.
        mode: "min" or "max": which way is better.
        patience: fresh values in a row without improvement after which it asks to stop.
        min_delta: only a change of more than this is an improvement.
        check_finite: stop at the first value that is NaN or infinite; else such a value is one without improvement.
        stopping_threshold: stop once a value is at least (mode "max") or at most (mode "min") this.
        strict: a monitor that the first whole validation did not log (of training, the first epoch) is an error; False:
            a warning.

    Raises:
        SettingsError: an argument is wrong, or nothing logs the monitor.

    `best` is the best value so far, None before there is one; `bad_values` counts those since.
    """

    identifying = ("monitor", "mode")

    def __init__(
        self,
        monitor: str,
        mode: str,
        patience: int = 3,
        min_delta: float = 0.0,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        strict: bool = True,
    ) -> None:
        _check("monitor", monitor, _is_full_name(monitor), 'a full name with its stage, like "val/loss",')
        _check("mode", mode, mode in ("min", "max"), '"min" or "max"')
        whole = hasattr(patience, "__index__") and not isinstance(patience, bool)
        _check("patience", patience, whole and patience >= 1, "a whole number of at least 1")
        _check("min_delta", min_delta, _is_number(min_delta) and min_delta >= 0, "a number of at least 0")
        if stopping_threshold is not None:
            _check("stopping_threshold", stopping_threshold, _is_number(stopping_threshold), "a number or None")
        for name, switch in (("check_finite", check_finite), ("strict", strict)):
            _check(name, switch, isinstance(switch, bool), "True or False")
        self.monitor, self.mode, self.patience, self.min_delta = monitor, mode, int(patience), float(min_delta)
        self.check_finite, self.stopping_threshold, self.strict = check_finite, stopping_threshold, strict
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        self.bad_values = 0
        self._last: float | None = None
        self._moment: list[Any] | None = None  # when the last value was counted
        self._told_missing = False

    def setup(self, run: Run) -> None:
        if run.verb == "fit":
            self._reset()

    def on_fit_start(self, run: Run) -> None:
        run.keep_epoch(self.monitor)
        if self._of_validation and not run.plan.validates:
            run.warn(f"EarlyStopping watches {self.monitor!r}, and this fit has nothing to validate with.")
        self._ask(run)  # in a continued run, which may have been at its end

    def on_log(self, run: Run, values: dict[str, float], step: int) -> None:
        if run.stage == "train" and not run.ends_epoch:
            return  # points of the curves within the epoch
        value = values.get(self.monitor, values.get(f"{self.monitor}_epoch"))
        # Also what a hook logs at the end comes here, and a validation that a signal cut off comes again.
        moment = [run.stage, run.state.epoch, run.state.batch]
        if value is not None and moment != self._moment:
            self._moment = moment
            self._count(value)
            self._ask(run)

    def on_train_epoch_end(self, run: Run) -> None:
        self._ask(run)

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        if stage == "sanity" and self._of_validation:
            # Sanity validation is not repeated with the run's variants.
            known = [*metrics, *(f"{name}_{variant}" for name in metrics for variant in run.variants)]
            if self.monitor not in known:
                what = f"EarlyStopping watches {self.monitor!r}, which sanity validation did not log."
                run.warn(what + nearest(self.monitor, known))

    def on_save_point(self, run: Run) -> None:
        """Here all values of a validation or an epoch have come, also those that its hooks logged."""
        if self._last is None and not self._told_missing:
            epoch_over = run.state.batch == 0 and (run.validated or not run.plan.validates)
            if epoch_over or (run.validated and self._of_validation):
                self._tell_missing(run)

    def saves_at(self, step: int) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad_values": self.bad_values, "last": self._last, "moment": self._moment}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.bad_values = state["best"], state["bad_values"]
        self._last, self._moment = state["last"], state["moment"]

    @property
    def _of_validation(self) -> bool:
        return self.monitor.startswith("val/")

    def _count(self, value: float) -> None:
        self._last = value
        gain = math.inf if self.best is None else (value - self.best) * (1 if self.mode == "max" else -1)
        if math.isfinite(value) and gain > self.min_delta:
            self.best, self.bad_values = value, 0
        else:
            self.bad_values += 1

    def _ask(self, run: Run) -> None:
        """Asks to stop while there is a reason and it may be obeyed: a stop that was asked for cannot be taken back,
        and until min_steps and min_epochs are reached the metric may improve again."""
        reason = self._reason()
        done = RunState(epoch=run.state.epoch + run.ends_epoch, global_step=run.state.global_step)
        if reason is not None and run.plan.may_stop(done):
            run.stop(f"EarlyStopping: {reason}")

    def _reason(self) -> str | None:
        """Why the fit should end by the last value and the present settings; None to go on."""
        last, threshold = self._last, self.stopping_threshold
        if last is None:
            return None
        if self.check_finite and not math.isfinite(last):
            return f"{self.monitor} is {last}"
        if threshold is not None and (last >= threshold if self.mode == "max" else last <= threshold):
            return f"{self.monitor} is {last:.6g} and has reached {threshold:.6g}"
        if self.bad_values < self.patience:
            return None
        more = f" by more than {self.min_delta:g}" if self.min_delta else ""
        before = "been finite" if self.best is None else f"improved on {self.best:.6g}{more}"
        return (
            f"{self.monitor} has not {before}; values without improvement: {self.bad_values}, the last of them "
            f"{last:.6g} (patience {self.patience})"
        )

    def _tell_missing(self, run: Run) -> None:
        self._told_missing = True
        text = f"EarlyStopping watches {self.monitor!r}, which "
        if self.monitor in run.metrics:
            text += "has values of single steps and none of an epoch."
        else:
            names = sorted(run.metrics)
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            text += f"nothing has logged; there are {', '.join(names[:MOST_NAMES]) or 'no metrics'}{more}."
            text += nearest(self.monitor, names)
        if self.strict:
            raise SettingsError(f"{text} (strict=False goes on without it.)")
        run.warn(text)


def _check(name: str, value: object, fine: bool, expected: str) -> None:
    if not fine:
        raise SettingsError(f"EarlyStopping got {name}={value!r}; {expected} was expected.")


def _is_full_name(value: object) -> bool:
    return isinstance(value, str) and "/" in value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
