"""What `configure_optimizers` may return, and the step of an optimizer.

    step: gradients x factor where they are not those of the mean yet -> clip -> hooks -> optimizers -> schedulers

Schedulers are stepped once per step, epoch or new value of a metric, never after a skipped update. They are not given
to accelerate, which would step them once per process.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sanctuary_trainer.errors import SettingsError, TaskError

_SCHEDULER_KEYS = ("scheduler", "interval", "frequency", "monitor", "name", "strict", "reduce_on_plateau")
_FORMS = (
    "an optimizer, a list of optimizers, (optimizers, schedulers), or a dict with the keys "
    '"optimizer" and "lr_scheduler" (or a list of such dicts)'
)


@dataclass
class Schedule:
    """A learning-rate scheduler and when it is stepped.

    Attributes:
        scheduler: anything with `step()` and `state_dict()`.
        interval: "step" or "epoch".
        frequency: step it every that many intervals.
        monitor: for a scheduler that watches a metric, the metric's full name, e.g. "val/loss".
        seen: intervals or values so far.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    seen: int = 0

    def advance(self, *arguments: float) -> None:
        """One interval, or one value of the metric, has passed."""
        self.seen += 1
        if self.seen % self.frequency == 0:
            self.scheduler.step(*arguments)


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
        self.optimizers, self.schedules = _parse(returned)
        self.clip, self.clip_algorithm, self.scaler = clip, clip_algorithm, scaler
        _check_parameters(self.optimizers, task)
        for schedule in self.schedules:
            owner = getattr(schedule.scheduler, "optimizer", None)
            if isinstance(owner, Optimizer) and all(owner is not optimizer for optimizer in self.optimizers):
                raise TaskError(
                    f"{type(schedule.scheduler).__name__} drives an optimizer that configure_optimizers did not "
                    "return. Build the scheduler on the optimizer that is returned with it."
                )
        self.parameters = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        self._by_step = [s for s in self.schedules if s.interval == "step" and s.monitor is None]
        self.gradient_norm: torch.Tensor | None = None  # before clipping, of the last step
        self.learning_rates: dict[str, float] = self._rates()  # those that the last recorded step used
        self.zero_grad()

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers, in the order in which they were returned."""
        return [schedule.scheduler for schedule in self.schedules]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def average(self, factor: float | torch.Tensor | None) -> None:
        """Turn the summed gradients of a window into those of its mean (unscaled under fp16)."""
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
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
        made = True
        if self.scaler is None:
            for optimizer in self.optimizers:
                optimizer.step()
        else:
            before = self.scaler.get_scale()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
            made = self.scaler.get_scale() >= before  # it shrinks when a gradient overflowed and the update was skipped
        self.zero_grad()
        if made:
            for schedule in self._by_step:
                schedule.advance()
        return made

    def end_epoch(self) -> None:
        """Step the schedulers that go by epochs."""
        for schedule in self.schedules:
            if schedule.interval == "epoch" and schedule.monitor is None:
                schedule.advance()

    def new_values(self, values: Mapping[str, float]) -> None:
        """Step the schedulers that watch one of these freshly computed metrics."""
        for schedule in self.schedules:
            if schedule.monitor is not None and schedule.monitor in values:
                schedule.advance(values[schedule.monitor])

    def check_monitors(self, known: Iterable[str]) -> None:
        """Raise when a scheduler watches something that a whole epoch and its validation did not log.

        Raises:
            SettingsError: naming the nearest metric that there is.
        """
        names = list(known)
        for schedule in self.schedules:
            if schedule.monitor is not None and schedule.monitor not in names:
                near = difflib.get_close_matches(schedule.monitor, names, n=1, cutoff=0.3)
                raise SettingsError(
                    f"{type(schedule.scheduler).__name__} watches {schedule.monitor!r}, which nothing has logged; "
                    f"there are {', '.join(sorted(names)) or 'no metrics'}."
                    + (f" Did you mean {near[0]!r}?" if near else "")
                )

    def _rates(self) -> dict[str, float]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if len(groups) == 1:
            return {"lr": float(groups[0]["lr"])}
        return {f"lr/{group.get('name', index)}": float(group["lr"]) for index, group in enumerate(groups)}


def _parse(returned: Any) -> tuple[list[Optimizer], list[Schedule]]:
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _parse_dict(returned)
    if isinstance(returned, tuple) and len(returned) == 2 and not isinstance(returned[1], Optimizer | Mapping):
        optimizers, schedulers = returned
        return _as_optimizers(optimizers), [_schedule(s) for s in _as_list(schedulers)]
    if isinstance(returned, Sequence) and returned and all(isinstance(item, Mapping) for item in returned):
        parsed = [_parse_dict(item) for item in returned]
        return [o for optimizers, _ in parsed for o in optimizers], [s for _, schedules in parsed for s in schedules]
    return _as_optimizers(returned), []


def _parse_dict(item: Mapping[str, Any]) -> tuple[list[Optimizer], list[Schedule]]:
    unknown = [key for key in item if key not in ("optimizer", "lr_scheduler", "monitor")]
    if unknown or "optimizer" not in item:
        raise TaskError(
            f"configure_optimizers returned a dict with the keys {sorted(map(str, item))}; "
            '"optimizer" and, if wanted, "lr_scheduler" and "monitor" were expected.'
        )
    schedules = [_schedule(s, item.get("monitor")) for s in _as_list(item.get("lr_scheduler"))]
    return _as_optimizers(item["optimizer"]), schedules


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _as_optimizers(value: Any) -> list[Optimizer]:
    optimizers = _as_list(value)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TaskError(
                f"configure_optimizers returned {type(optimizer).__name__} where an optimizer was expected. "
                f"It may return {_FORMS}."
            )
    if not optimizers:
        raise TaskError(f"configure_optimizers returned no optimizer. It may return {_FORMS}.")
    return optimizers


def _schedule(value: Any, monitor: str | None = None) -> Schedule:
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in _SCHEDULER_KEYS]
        if unknown or "scheduler" not in value:
            raise TaskError(
                f"A scheduler's dict has the keys {sorted(map(str, value))}; "
                '"scheduler", "interval", "frequency" and "monitor" were expected.'
            )
        schedule = Schedule(
            value["scheduler"],
            value.get("interval", "epoch"),
            value.get("frequency", 1),
            value.get("monitor", monitor),
        )
    else:
        schedule = Schedule(value, monitor=monitor)
    scheduler = schedule.scheduler
    if not callable(getattr(scheduler, "step", None)):
        raise TaskError(f"{type(scheduler).__name__} was given as a scheduler but has no step().")
    if schedule.interval not in ("step", "epoch"):
        raise TaskError(f'A scheduler\'s interval is {schedule.interval!r}; "step" or "epoch" was expected.')
    frequency: Any = schedule.frequency
    if not isinstance(frequency, int) or frequency < 1:
        raise TaskError(f"A scheduler's frequency is {frequency!r}; a whole number of at least 1 was expected.")
    watches = isinstance(scheduler, ReduceLROnPlateau)
    if watches and schedule.monitor is None:
        raise TaskError(
            'ReduceLROnPlateau needs to know what it watches: return {"optimizer": optimizer, '
            '"lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}.'
        )
    if not watches and isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        # Lightning's users often leave "monitor" beside a scheduler that takes no metric.
        schedule.monitor = None
    return schedule


def _check_parameters(optimizers: list[Optimizer], task: torch.nn.Module) -> None:
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise TaskError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not "
                        "the task's. Build the optimizers in configure_optimizers, from self.parameters()."
                    )
                if owners.setdefault(id(parameter), number) != number:
                    raise TaskError(
                        f"Two optimizers hold the parameter {names[id(parameter)]!r}; give it to one of them."
                    )
