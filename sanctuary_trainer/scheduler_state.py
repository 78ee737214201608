"""The state of a scheduler and of those inside it: taken as data, and put back.

Functions, modules and the optimizers that schedulers hold are no state: they are those of the new configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import ref

from torch.nn import Module
from torch.optim import Optimizer

from sanctuary_trainer.configured import Schedule
from sanctuary_trainer.errors import CheckpointError
from sanctuary_trainer.plain import copied, tensors_in

_LIVE = (FunctionType, BuiltinFunctionType, MethodType, partial, ref, type, Module, Optimizer)
# Attributes that follow from the learning rates, which are compared themselves.
_DERIVED = ("base_lrs", "base_values", "_last_lr", "_init_lrs")
_TIMING = ("interval", "frequency")


def take_schedule(schedule: Schedule) -> dict[str, Any]:
    """What is stored of a schedule; None for a scheduler that says nothing of itself."""
    return {
        **{key: getattr(schedule, key) for key in ("seen", *_TIMING)},
        "states": {path: _take(part) for path, part in _family(schedule.scheduler).items()},
    }


def check_functions(schedule: Schedule, saved: Mapping[str, Any]) -> None:
    """Functions cannot be stored, so there must be as many as there were.

    Raises:
        CheckpointError: there are not.
    """
    for path, part in _family(schedule.scheduler).items():
        was, now = (saved["states"].get(path) or {}).get("lr_lambdas", []), getattr(part, "lr_lambdas", [])
        if len(was) != len(now):
            raise CheckpointError(
                f"{class_name(part)} had {len(was)} functions, one for each group of parameters, when the checkpoint "
                f"was written, and has {len(now)} now. Functions are not stored; give it the same number to resume."
            )


def load_schedule(schedule: Schedule, saved: Mapping[str, Any]) -> list[str]:
    """Put back what `take_schedule` took; returns what could not be, to be told.

    Raises:
        CheckpointError: a scheduler's own load_state_dict failed.
    """
    texts = []
    for key in ("seen", *_TIMING):
        setattr(schedule, key, saved[key])
    for path, part in _family(schedule.scheduler).items():
        state = saved["states"].get(path)
        if state is None:
            texts.append(f"{class_name(part)} has no state_dict() with a load_state_dict(): it begins anew")
            continue
        with taking_back(part):
            # Rates that are tensors lie where they are configured to.
            device = next((tensor.device for tensor in tensors_in(part.state_dict())), None)
            part.load_state_dict(copied(state, device))
            if "restore_lr" in state:
                part.restore_lr = state["restore_lr"]
    return texts


def schedule_class(schedule: Schedule) -> str:
    """The scheduler's class, with those of the schedulers inside it."""
    first, *inside = map(class_name, _family(schedule.scheduler).values())
    return f"{first} of {' and '.join(inside)}" if inside else first


def schedule_settings(schedule: Schedule) -> dict[str, Any]:
    """Everything that a freshly built scheduler was given, as far as it is data: "gamma", "_schedulers.0.gamma", ..."""
    settings: dict[str, Any] = {key: getattr(schedule, key) for key in (*_TIMING, "monitor")}
    for path, part in _family(schedule.scheduler).items():
        own = {key: value for key, value in _attributes(part).items() if key not in _DERIVED}
        settings |= {f"{path}.{key}".lstrip("."): value for key, value in own.items()}
    return settings


def _take(scheduler: Any) -> Any:
    if not _is_scheduler(scheduler):
        return None
    state = without_live(scheduler.state_dict())
    # timm's plateau leaves out the rates before its noise, and the counts of the scheduler in it, a part of its own.
    return state | {"restore_lr": scheduler.restore_lr} if hasattr(scheduler, "restore_lr") else state


def _family(scheduler: Any) -> dict[str, Any]:
    """A scheduler and those inside it, by their paths: "", "_schedulers.0", ..."""
    family = {"": scheduler}
    waiting = [("", scheduler)]
    for path, holder in waiting:
        for key, value in _attributes(holder).items():
            several = (
                {f"{key}.{n}": v for n, v in enumerate(value)} if isinstance(value, list | tuple) else {key: value}
            )
            for name, part in several.items():
                if _is_scheduler(part) and all(part is not known for known in family.values()):
                    family[f"{path}.{name}".lstrip(".")] = part
                    waiting.append((f"{path}.{name}".lstrip("."), part))
    return family


def _attributes(instance: Any) -> dict[str, Any]:
    return getattr(instance, "__dict__", {})


def _is_scheduler(value: Any) -> bool:
    """Whether it is one that can tell its state and take it back."""
    named = all(callable(getattr(value, name, None)) for name in ("step", "state_dict", "load_state_dict"))
    return named and not isinstance(value, Optimizer | type)


# Also for optimizers


@contextmanager
def taking_back(what: Any) -> Iterator[None]:
    """Say of whom an error was, raised by an object's own code."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{class_name(what)} could not take back its state: {reason}") from error


def class_name(instance: Any) -> str:
    """The class and the package that it comes from: three libraries have an Adafactor."""
    package, dot, _ = type(instance).__module__.partition(".")
    return f"{package}.{type(instance).__name__}" if dot else type(instance).__name__


def without_live(value: Any) -> Any:
    """The value without entries that are code, or that have a state of their own."""
    if isinstance(value, dict) and not isinstance(value, Counter):
        return {key: without_live(inner) for key, inner in value.items() if not _is_live(inner)}
    return [without_live(inner) for inner in value] if type(value) is list else value


def _is_live(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(map(_is_live, value))
    return isinstance(value, _LIVE) or _is_scheduler(value)
