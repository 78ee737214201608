"""Half an epoch of logged values as plain data: saved with a run, and taken over when it goes on.

    saved(series, logged)             what a series means, what is pending and what was folded; None if nothing is
    take_over(series, state, device)  into a series of the same meaning; states of several ranks one after the other

Nothing is folded before its time: a run that is not stopped folds later, and its sum would end in another bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sanctuary_trainer.errors import CheckpointError
from sanctuary_trainer.series import Series, join


def saved(series: Series, logged: bool) -> dict[str, Any] | None:
    """One series as plain data.

    Args:
        series: of training.
        logged: whether a metric object was logged under its name since the last reading.

    Returns:
        Its name, its meaning, `values` and `weights` as they are, and the pairs `step` and `epoch`.
    """
    if not (logged or series.values or series.step is not None or series.epoch is not None):
        return None
    return {
        "name": series.name,
        **_meaning(series),
        "values": list(series.values),
        "weights": list(series.weights),
        "step": series.step,
        "epoch": series.epoch,
    }


def _meaning(series: Series) -> dict[str, Any]:
    axes = {"on_step": series.on_step, "on_epoch": series.on_epoch}
    return {"reduce": series.reduce, **axes, "metric": series.path or None}


def series_of(state: Mapping[str, Any], with_epoch: Collection[str]) -> Series:
    """A series of the meaning that was saved, without values; what is in `with_epoch` has its value over the epoch."""
    name = state["name"]
    series = Series(name, state["reduce"], state["on_step"], state["on_epoch"] or name in with_epoch)
    series.path = state["metric"] or ""
    return series


def take_over(series: Series, state: Mapping[str, Any], device: torch.device) -> None:
    """Add what was saved to a series.

    Args:
        series: may hold what was taken over from another rank.
        state: what `saved` gave.
        device: where pending tensors go. Those of the host were saved as numbers.

    Raises:
        CheckpointError: the series means something else.
    """
    meaning = _meaning(series)
    if changed := [name for name, value in meaning.items() if state[name] != value]:
        was, now = ({name: source[name] for name in changed} for source in (state, meaning))
        raise CheckpointError(
            f"The checkpoint holds half an epoch of {series.name!r} with {_text(was)}, and now it has {_text(now)}. "
            "Log it as before, or resume from the end of an epoch."
        )
    series.values += [_on(device, value) for value in state["values"]]
    series.weights += [_on(device, weight) for weight in state["weights"]]
    # Pairs may stay on the host: the next fold takes them to its device.
    if state["step"] is not None:
        series.step = join(series.step, state["step"], series.reduce)
    if state["epoch"] is not None:
        series.epoch = join(series.epoch, state["epoch"], series.reduce)


def _on(device: torch.device, item: float | Tensor) -> float | Tensor:
    return item.to(device) if isinstance(item, Tensor) else item


def _text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def metric_of(series: Series, task: nn.Module) -> nn.Module:
    """The metric object that was logged under the series' name.

    Raises:
        CheckpointError: the task has none at its path any more.
    """
    module: nn.Module | None = dict(task.named_modules()).get(series.path)
    if module is None:
        raise CheckpointError(
            f"The checkpoint holds {series.name!r} as the metric self.{series.path}, which the task has not. Resume "
            "with the task as it was, or from the end of an epoch."
        )
    return module


def device_of(task: nn.Module) -> torch.device:
    """The device of a task's first parameter or buffer, or the CPU."""
    for tensor in (*task.parameters(), *task.buffers()):
        return tensor.device
    return torch.device("cpu")
