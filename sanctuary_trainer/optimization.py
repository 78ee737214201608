"""The optimizers and schedulers of a run, and one step of them.

    step: gradients x factor where they are not those of the mean yet -> hooks -> clip -> optimizers -> schedulers

Schedulers are stepped once per step, epoch or new value of a metric, never after a skipped update nor before the first
one. They are not given to accelerate, which would step them once per process.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, cast

import torch
from torch.optim import Optimizer

from sanctuary_trainer.configured import Schedule, check_parameters, parse
from sanctuary_trainer.errors import SettingsError, TaskError


class _Together:
    """All optimizers, as the one whose gradients torch's scaler looks at: an overflow in any leaves out all of them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> bool:
        """True, which the scaler hands on; None where it makes no step."""
        for optimizer in self.optimizers:
            optimizer.step()
        return True


class Optimization:
    """The optimizers and schedulers of one run.

    Args:
        returned: what `configure_optimizers` returned.
        task: whose parameters they must hold.
        clip: the largest gradient norm or value; None not to clip.
        clip_algorithm: "norm" (over all parameters together) or "value".
        scaler: the gradient scaler of fp16, else None.

    Raises:
        TaskError: `returned` has none of the forms, holds foreign or shared parameters, or a scheduler of another
            optimizer.
        NotSupportedError: an optimizer's step needs a closure.

    `updates` counts the updates made.
    """

    def __init__(
        self,
        returned: Any,
        task: torch.nn.Module,
        *,
        clip: float | None = None,
        clip_algorithm: str = "norm",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.optimizers, self.schedules = parse(returned)
        self._together = _Together(self.optimizers)
        self.clip, self.clip_algorithm, self.scaler = clip, clip_algorithm, scaler
        check_parameters(self.optimizers, task)
        for schedule in self.schedules:
            owner = getattr(schedule.scheduler, "optimizer", None)
            if isinstance(owner, Optimizer) and all(owner is not optimizer for optimizer in self.optimizers):
                raise TaskError(
                    f"{type(schedule.scheduler).__name__} drives an optimizer that configure_optimizers did not "
                    "return. Build the scheduler on the optimizer that is returned with it."
                )
        self._by_step = [s for s in self.schedules if s.interval == "step" and s.monitor is None]
        self.gradient_norm: torch.Tensor | None = None  # before clipping, of the last step
        self.learning_rates: dict[str, float] = self._rates()  # those that the last recorded step used
        self.updates = 0
        self._unscaled = False
        self._valued: set[str] = set()  # every name that had a value of an epoch or an evaluation
        self.zero_grad()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters of all optimizers, also of groups that were added later."""
        return [p for o in self.optimizers for group in o.param_groups for p in group["params"]]

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers, in the order in which they were returned."""
        return [schedule.scheduler for schedule in self.schedules]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            if type(optimizer).zero_grad is Optimizer.zero_grad:  # whose bookkeeping costs ten times what it does
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            else:
                optimizer.zero_grad(set_to_none=True)

    def average(self, factor: float | torch.Tensor | None) -> None:
        """Turn the summed gradients of a window into those of its mean (unscaled under fp16)."""
        if self.scaler is not None:
            self._unscaled = any(parameter.grad is not None for parameter in self.parameters)
            if self._unscaled:
                self.scaler.unscale_(cast(Optimizer, self._together))
        if factor is not None:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor)

    def clip_gradients(self) -> None:
        """Clip the finished gradients, if asked to."""
        if self.clip is not None and self.clip_algorithm == "norm":
            self.gradient_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        elif self.clip is not None:
            torch.nn.utils.clip_grad_value_(self.parameters, self.clip)

    def step(self, record: bool = False) -> bool:
        """Step every optimizer, then the schedulers that go by steps; returns whether an update was made.

        Args:
            record: keep the learning rates that this step uses in `learning_rates`.
        """
        if record:
            self.learning_rates = self._rates()
        if self.scaler is not None and self._unscaled:
            # A wait for the device that fp16 cannot do without: whether a gradient overflowed.
            made = bool(self.scaler.step(cast(Optimizer, self._together)))
            self.scaler.update()
        else:
            made = self._together.step()
        self.zero_grad()
        if made:
            self.updates += 1
            for schedule in self._by_step:
                schedule.advance()
        return made

    def end_epoch(self) -> None:
        """Step the schedulers that go by epochs, once there was an update: before, they would skip their first rate."""
        for schedule in self.schedules:
            if self.updates and schedule.interval == "epoch" and schedule.monitor is None:
                schedule.advance()

    def new_values(self, values: Mapping[str, float]) -> None:
        """Step the schedulers that watch one of these values, freshly computed at the end of an epoch or evaluation.

        Who watches a series of steps ("train/loss") gets its value over the epoch ("train/loss_epoch").
        """
        self._valued.update(values)
        for schedule in self.schedules:
            value = values.get(schedule.monitor or "", values.get(f"{schedule.monitor}_epoch"))
            if self.updates and schedule.monitor is not None and value is not None:
                schedule.advance(value)

    @property
    def monitors(self) -> set[str]:
        """The names that schedulers watch."""
        return {schedule.monitor for schedule in self.schedules if schedule.monitor is not None}

    def unknown_monitors(self, known: Iterable[str]) -> list[str]:
        """What to warn of after sanity validation: each watched name of validation that is not in `known`."""
        names = list(known)
        return [
            f"{_watching(schedule)}, which sanity validation did not log.{_nearest(schedule.monitor, names)}"
            for schedule in self.schedules
            if schedule.monitor is not None and schedule.monitor.startswith("val/") and schedule.monitor not in names
        ]

    def check_monitors(self, known: Iterable[str]) -> list[str]:
        """Raise when a scheduler watches a name that had no value after a whole epoch and its validation.

        Args:
            known: every name that was logged, on whatever axis.

        Returns:
            What to warn of: the same, of schedulers with `"strict": False`.

        Raises:
            SettingsError: naming the nearest that had one.
        """
        texts, names = [], set(known)
        for schedule in self.schedules:
            monitor = schedule.monitor
            if monitor is None or monitor in self._valued or f"{monitor}_epoch" in self._valued:
                continue
            if monitor in names:
                text = f", which is a series of steps. Log it with on_epoch=True and watch '{monitor}_epoch'."
            else:
                there = ", ".join(sorted(self._valued)) or "no metrics"
                text = f", which nothing has logged; there are {there}.{_nearest(monitor, self._valued)}"
            if schedule.strict:
                raise SettingsError(_watching(schedule) + text)
            texts.append(_watching(schedule) + text)
        return texts

    def _rates(self) -> dict[str, float]:
        """The learning rates that there are, by `lr`, or `lr/NAME` of a named group among several, or `lr/INDEX`."""
        groups = self._together.param_groups
        rates: dict[str, float] = {}
        names: set[str] = set()
        for index, group in enumerate(groups):
            name = str(group.get("name", index))
            if name in names:
                name = next(free for n in count(2) if (free := f"{name}_{n}") not in names)
            names.add(name)
            if group.get("lr") is not None:  # transformers' Adafactor has None where it chooses its own
                rates["lr" if len(groups) == 1 else f"lr/{name}"] = float(group["lr"])
        return rates


def _watching(schedule: Schedule) -> str:
    return f"{type(schedule.scheduler).__name__} watches {schedule.monitor!r}"


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.3)
    return f" Did you mean {near[0]!r}?" if near else ""
