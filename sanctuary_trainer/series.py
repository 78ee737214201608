"""One logged name: its pending values and weights, folded on their device into two numbers.

    series.values, series.weights    lists that a step appends to                   no wait
    series.fold()                    [weighted sum or extreme; weight or count]     no wait
    read_pairs(pairs)                the numbers                                    waits once per device
    over_ranks(reduce, pairs)        one number of all ranks' pairs

A pair is float64 where the device has it; weight 0 means that the value is not looked at, and NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from sanctuary_trainer.errors import TaskError

REDUCTIONS: Final = ("mean", "sum", "min", "max")

# So many pending values are folded into two: memory stays constant, and a fold's few kernels cost nothing per step.
FOLD_AT: Final = 128


class Series:
    """One name of one stage: what is pending, and what was folded since the last reading of either axis."""

    def __init__(self, name: str, reduce: str, on_step: bool, on_epoch: bool) -> None:
        self.name = name
        self.reduce = reduce
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.asked: tuple[bool | None, bool | None, str] | None = None
        self.metric: nn.Module | None = None
        self.path = ""
        self.values: list[float | Tensor] = []
        self.weights: list[float | Tensor] = []
        # [weighted sum or extreme, weight or count], float64 where the device has it
        self.step: Tensor | None = None
        self.epoch: Tensor | None = None

    @property
    def epoch_name(self) -> str:
        """The name of the value over the epoch."""
        return f"{self.name}_epoch" if self.on_step and self.on_epoch else self.name

    @property
    def curves(self) -> set[str]:
        """The names that its values go by."""
        return {self.name, self.epoch_name}

    def clear(self) -> None:
        """Forget what was logged, not what the name means."""
        self.values, self.weights, self.step, self.epoch = [], [], None, None

    def fold(self) -> None:
        """Reduce what is pending to two numbers, on the device where the values are, without waiting for it."""
        if not self.values:
            return
        values, weights = self.values, self.weights
        self.values, self.weights = [], []
        with torch.inference_mode(False), torch.no_grad():
            new = _fold(values, weights, self.reduce)
            if self.on_step:
                self.step = join(self.step, new, self.reduce)
            if self.on_epoch:
                self.epoch = join(self.epoch, new, self.reduce)


def kept(value: Tensor) -> float | Tensor:
    """One element as it is now: on the host a number, which nobody waits for there; else a copy on its device."""
    if value.is_cpu:
        return value.item()
    # A copy, because `loss += penalty` after the log would change the pending value.
    return value.detach().clone().reshape(())


def as_number(name: str, value: Any) -> float:
    """A number that is no float: an int, numpy's, fractions, anything else that knows how to be a float."""
    if hasattr(value, "__float__"):
        try:
            return float(value)
        except OverflowError:
            raise TaskError(
                f"log({name!r}) got {type(value).__name__}, a number beyond a float's range of 1.8e308."
            ) from None
        except (TypeError, ValueError):
            pass
    raise TaskError(
        f"log({name!r}) got {type(value).__name__} {value!r:.80}; a number, a tensor of one element or a torchmetrics "
        "metric was expected."
    )


def as_weight(name: str, value: Any) -> float | Tensor:
    """A weight that is not simply an int of at least 0, checked where that needs no wait for a device."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = kept(value)
        if isinstance(value, Tensor):
            return value
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise TaskError(f"log({name!r}) got batch_size={value!r:.80}; a number of samples, at least 0, was expected.")
    return number


def _fold(values: Sequence[float | Tensor], weights: Sequence[float | Tensor], reduce: str) -> Tensor:
    """[sum of value x weight, sum of weights], or [sum, min or max; count]: two numbers, where the values are."""
    # Types first: `isinstance(number, Tensor)` costs 0.2 us, 256 times.
    tensors = [] if {*map(type, values), *map(type, weights)} <= {float, int} else [*values, *weights]
    device = next((item.device for item in tensors if isinstance(item, Tensor)), None)
    if device is None:
        return torch.tensor(_host_fold(values, weights, reduce), dtype=torch.float64)
    dtype = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
    column = _column(values, device, dtype)
    if reduce == "mean":
        weight = _column(weights, device, dtype)
        # where: a mean over nothing is NaN, and its weight 0 says that it is not to be looked at.
        return torch.stack([torch.where(weight == 0, 0.0, column * weight).sum(), weight.sum()])
    folded = column.sum() if reduce == "sum" else column.amin() if reduce == "min" else column.amax()
    return torch.stack([folded, torch.full_like(folded, len(values))])


def _host_fold(values: Sequence[Any], weights: Sequence[Any], reduce: str) -> tuple[float, float]:
    if reduce == "mean":
        total = sum([value * weight for value, weight in zip(values, weights, strict=True) if weight != 0])
        return total, sum(weights)
    return _extreme_or_sum(reduce, values), len(values)


def _column(items: Sequence[float | Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    if not any(isinstance(item, Tensor) for item in items):
        # non_blocking: a plain copy to the device would wait for everything queued there.
        return torch.tensor(items, dtype=dtype).to(device, non_blocking=True)
    return torch.stack([torch.as_tensor(item).to(device, dtype, non_blocking=True) for item in items])


def join(old: Tensor | None, new: Tensor, reduce: str) -> Tensor:
    if old is None:
        return new
    old = old.to(new.device, new.dtype, non_blocking=True)
    if reduce in ("mean", "sum"):
        return old + new
    extreme = torch.minimum if reduce == "min" else torch.maximum  # both keep NaN
    return torch.stack([extreme(old[0], new[0]), old[1] + new[1]])


def read_pairs(pairs: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Read pairs from their devices, waiting once per device."""
    read: list[tuple[float, float]] = [(0.0, 0.0)] * len(pairs)
    for device in {pair.device for pair in pairs}:
        here = [i for i, pair in enumerate(pairs) if pair.device == device]
        for i, (value, weight) in zip(here, torch.stack([pairs[i] for i in here]).tolist(), strict=True):
            read[i] = (value, weight)
    return read


def over_ranks(reduce: str, pairs: Sequence[tuple[float, float]]) -> float | None:
    present = [(value, weight) for value, weight in pairs if weight != 0]
    if not present:
        return None
    values = [value for value, _ in present]
    return sum(values) / sum(weight for _, weight in present) if reduce == "mean" else _extreme_or_sum(reduce, values)


def _extreme_or_sum(reduce: str, values: Sequence[float]) -> float:
    if reduce == "sum":
        return sum(values)
    if any(math.isnan(value) for value in values):
        return math.nan  # min and max would pass over it
    return min(values) if reduce == "min" else max(values)
