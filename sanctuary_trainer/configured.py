"""What `configure_optimizers` may return, in one form: optimizers, and schedulers with their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sanctuary_trainer.errors import TaskError

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


def parse(returned: Any) -> tuple[list[Optimizer], list[Schedule]]:
    """The optimizers and schedules in what `configure_optimizers` returned.

    Raises:
        TaskError: it has none of the forms.
    """
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _from_dict(returned)
    if isinstance(returned, tuple) and len(returned) == 2 and not isinstance(returned[1], Optimizer | Mapping):
        optimizers, schedulers = returned
        return _as_optimizers(optimizers), [_schedule(s) for s in _as_list(schedulers)]
    if isinstance(returned, Sequence) and returned and all(isinstance(item, Mapping) for item in returned):
        parsed = [_from_dict(item) for item in returned]
        return [o for optimizers, _ in parsed for o in optimizers], [s for _, schedules in parsed for s in schedules]
    return _as_optimizers(returned), []


def _from_dict(item: Mapping[str, Any]) -> tuple[list[Optimizer], list[Schedule]]:
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


def check_parameters(optimizers: list[Optimizer], task: torch.nn.Module) -> None:
    """Every parameter must be the task's, and in one optimizer only.

    Raises:
        TaskError: naming the optimizer and the parameter.
    """
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
