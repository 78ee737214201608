"""What `configure_optimizers` may return, in one form: optimizers, and schedulers with their times."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sanctuary_trainer.errors import NotSupportedError, TaskError

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
        strict: whether it is an error that nothing logs the metric.
        counts: whether it is to be told how many intervals have passed, as timm's schedulers are.
        seen: intervals or values so far.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    counts: bool = False
    seen: int = 0

    def advance(self, *metric: float) -> None:
        """One interval, or one value of the metric, has passed."""
        self.seen += 1
        if self.seen % self.frequency:
            return
        if not self.counts:
            self.scheduler.step(*metric)
        elif self.interval == "epoch":
            self.scheduler.step(self.seen, *metric)
        else:
            self.scheduler.step_update(self.seen)


def parse(returned: Any) -> tuple[list[Optimizer], list[Schedule]]:
    """The optimizers and schedules in what `configure_optimizers` returned.

    Raises:
        TaskError: it has none of the forms.
        NotSupportedError: an optimizer cannot be stepped without a closure.
    """
    if isinstance(returned, Mapping):
        return _from_dict(returned)
    if _is_pair(returned):
        optimizers, schedulers = returned
        return _as_optimizers(optimizers), [_schedule(s) for s in _as_list(schedulers)]
    if isinstance(returned, Sequence) and returned and all(isinstance(item, Mapping) for item in returned):
        parsed = [_from_dict(item) for item in returned]
        return [o for optimizers, _ in parsed for o in optimizers], [s for _, schedules in parsed for s in schedules]
    return _as_optimizers(returned), []


def _is_pair(returned: Any) -> bool:
    """Whether it is (optimizers, schedulers); a list only where its first half is one, as Lightning has it."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        return False
    first, second = returned
    in_halves = isinstance(returned, tuple) or isinstance(first, tuple | list)
    return in_halves and not isinstance(first, Mapping) and not isinstance(second, Optimizer)


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
        # The step of an optimizer that has a scheduler is wrapped, so the class is asked. SAM's own implementation
        # gives its closure a default and then asserts that it was given; these two methods are how it is known.
        kind = type(optimizer)
        if len(_required(kind.step)) > 1 or (hasattr(kind, "first_step") and hasattr(kind, "second_step")):
            raise NotSupportedError(
                f"{kind.__name__} calls the forward and backward pass itself, through a closure that its step() is "
                "given; this version runs them once per batch. Use an optimizer whose step() needs no argument."
            )
    if not optimizers:
        raise TaskError(f"configure_optimizers returned no optimizer. It may return {_FORMS}.")
    return optimizers


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that must be given."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _schedule(value: Any, monitor: str | None = None) -> Schedule:
    settings = value if isinstance(value, Mapping) else {"scheduler": value}
    unknown = [key for key in settings if key not in _SCHEDULER_KEYS]
    if unknown or "scheduler" not in settings:
        raise TaskError(
            f"A scheduler's dict has the keys {sorted(map(str, settings))}; "
            '"scheduler", "interval", "frequency" and "monitor" were expected.'
        )
    scheduler = settings["scheduler"]
    if isinstance(scheduler, Optimizer):
        raise TaskError(f"{type(scheduler).__name__} stands where a scheduler was expected. Return {_FORMS}.")
    if not callable(getattr(scheduler, "step", None)):
        raise TaskError(f"{type(scheduler).__name__} was given as a scheduler but has no step().")
    by_updates = getattr(scheduler, "t_in_epochs", True) is False  # of timm's schedulers
    schedule = Schedule(
        scheduler,
        settings.get("interval", "step" if by_updates else "epoch"),
        settings.get("frequency", 1),
        settings.get("monitor", monitor),
        settings.get("strict", True),
        counts=callable(getattr(scheduler, "step_update", None)) and not isinstance(scheduler, LRScheduler),
    )
    if schedule.interval not in ("step", "epoch"):
        raise TaskError(f'A scheduler\'s interval is {schedule.interval!r}; "step" or "epoch" was expected.')
    frequency: Any = schedule.frequency
    if not isinstance(frequency, int) or frequency < 1:
        raise TaskError(f"A scheduler's frequency is {frequency!r}; a whole number of at least 1 was expected.")
    if _watches(schedule, settings.get("reduce_on_plateau")):
        _check_watching(schedule)
    else:
        schedule.monitor = None  # Lightning's users often leave "monitor" beside a scheduler that takes no metric
        _check_counting(schedule)
    return schedule


def _watches(schedule: Schedule, asked: bool | None) -> bool:
    """Whether the scheduler is stepped with a metric; `asked` is what "reduce_on_plateau" says, None if nothing."""
    scheduler = schedule.scheduler
    if isinstance(scheduler, ReduceLROnPlateau):
        return True
    if asked is not None:
        return asked
    if isinstance(getattr(scheduler, "lr_scheduler", None), ReduceLROnPlateau):  # timm's PlateauLRScheduler
        return True
    return schedule.monitor is not None and not schedule.counts and not isinstance(scheduler, LRScheduler)


def _check_watching(schedule: Schedule) -> None:
    name = type(schedule.scheduler).__name__
    if schedule.monitor is None:
        raise TaskError(
            f'{name} needs to know what it watches: return {{"optimizer": optimizer, '
            '"lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}.'
        )
    if schedule.interval == "step":
        raise TaskError(
            f'{name} watches {schedule.monitor!r} and has the interval "step", but a metric has one value per epoch '
            'or validation, none per step. Leave "interval" out; "frequency" counts the values.'
        )


def _check_counting(schedule: Schedule) -> None:
    scheduler, name = schedule.scheduler, type(schedule.scheduler).__name__
    if schedule.counts:
        in_epochs = getattr(scheduler, "t_in_epochs", None)
        if in_epochs is not None and in_epochs != (schedule.interval == "epoch"):
            raise TaskError(
                f"{name} was built with t_in_epochs={in_epochs} but has the interval {schedule.interval!r}, by which "
                "it would never change the learning rate. Let the two agree, or leave the interval out."
            )
    elif needed := _required(scheduler.step):
        raise TaskError(
            f"{name}.step() needs {', '.join(needed)}. For a scheduler that is stepped with a metric return "
            '{"scheduler": scheduler, "monitor": "val/loss", "reduce_on_plateau": True}.'
        )


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
