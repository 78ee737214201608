"""What steps log: sums kept on the device, metric objects, reduction over ranks, and the axes they go to.

    add(...)             append (value, weight) to lists; fold on the device when many are pending      no wait, no rank
    step_values()        every log_every_n_steps: fold, read, agree on the names, one packed gather     all ranks
    epoch_values(stage)  at the end of an epoch or an evaluation: the same, and the metric objects      all ranks
                         see metrics.py

Rules
  A name without "/" gets its stage's prefix; with both on_step and on_epoch the epoch's series is `name_epoch`.
  A mean is sum(value x weight) / sum(weight) over all steps and ranks; weight 0 means that the value is not looked at.
  sum, min and max know no weight. NaN stays NaN. A name that has no value, or no weight, is left out.
  A metric whose `compute` returns a dict gives `name/key`, a vector or a list gives `name_0`, `name_1`, ...; a metric
  logged under the empty name gives its keys alone. A metric that no rank updated gives no value.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from sanctuary_trainer.errors import SettingsError, TaskError
from sanctuary_trainer.metrics import Ranks, computed, entries, is_metric_or_collection

_REDUCTIONS: Final = ("mean", "sum", "min", "max")

# So many pending values are folded into two: memory stays constant, and a fold's few kernels cost nothing per step.
_FOLD_AT: Final = 128


class _Series:
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
        return f"{self.name}_epoch" if self.on_step and self.on_epoch else self.name

    def fold(self) -> None:
        """Reduce what is pending to two numbers, on the device where the values are, without waiting for it."""
        if not self.values:
            return
        values, weights = self.values, self.weights
        self.values, self.weights = [], []
        with torch.inference_mode(False), torch.no_grad():
            new = _fold(values, weights, self.reduce)
            if self.on_step:
                self.step = _join(self.step, new, self.reduce)
            if self.on_epoch:
                self.epoch = _join(self.epoch, new, self.reduce)


class Records:
    """Collects what the steps of one run log and reduces it over all ranks.

    `prog_bar_names`: every name that was logged with `prog_bar=True`, `name_epoch` and a metric's entries included; a
    dict for its order, the values mean nothing.
    """

    def __init__(self, devices: Ranks, task: nn.Module) -> None:
        self._devices = devices
        self._task = task
        self._series: dict[tuple[str, str], _Series] = {}
        self._calls: dict[tuple[str, str], _Series] = {}  # as logged, with or without prefix
        self._logged_metrics: dict[str, dict[str, _Series]] = {}  # stage -> name -> series, since the last reading
        self._paths: dict[int, str] = {}
        self._warned: set[str] = set()
        self._loss: _Series | None = _Series("train/loss", "mean", on_step=True, on_epoch=True)
        self._series["train", "train/loss"] = self._loss
        self.prog_bar_names: dict[str, None] = {"train/loss": None}

    def add_loss(self, loss: Tensor, weight: float | Tensor) -> None:
        """Record the training loss unasked: `train/loss` per step and `train/loss_epoch`.

        loss: 0-d, kept as it is until it is folded, so that nobody may change it in place. weight: samples, or what the
        step gave. Does nothing once the task logs `loss` in training itself.
        """
        series = self._loss
        if series is None:
            return
        series.values.append(loss.item() if loss.is_cpu else loss.detach())
        series.weights.append(_kept(weight) if isinstance(weight, Tensor) else weight)
        if len(series.values) >= _FOLD_AT:
            series.fold()

    def add(
        self,
        stage: str,
        name: str,
        value: Any,
        *,
        weight: float | Tensor | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        prog_bar: bool = False,
        reduce: str = "mean",
    ) -> None:
        """Record one value, or say that a metric object belongs to this stage.

        stage: "train", "sanity", "val", "test" or "predict". value: a number, a tensor of one element (copied, never
        waited for) or a torchmetrics metric or collection that is a submodule of the task. weight: samples behind the
        value; None when unknown. on_step: by default plain values in training; adds nothing in an evaluation, which has
        no steps. on_epoch: by default all else. reduce: "mean", "sum", "min" or "max", over steps and ranks.

        Raises `TaskError` for a value that is no scalar, a metric outside the task, or a name that means two things;
        `SettingsError` for axes or a reduction that cannot be.
        """
        series = self._calls.get((stage, name))
        if series is None or series.asked != (on_step, on_epoch, reduce):
            series = self._declare(stage, name, value, on_step, on_epoch, reduce)
        if prog_bar:
            self.prog_bar_names.update({series.name: None, series.epoch_name: None})
        if series.metric is not None or is_metric_or_collection(value):
            self._add_metric(stage, series, value)
            return
        if isinstance(value, Tensor):
            if value.dim() and value.numel() != 1:
                raise TaskError(
                    f"log({series.name!r}) got a tensor of shape {tuple(value.shape)}; one number was expected. "
                    "Reduce it first, for example with .mean()."
                )
            value = _kept(value)
        elif not isinstance(value, (float, int)):
            value = _number(series.name, value)
        if weight is None:
            weight = self._unknown_weight(series)
        series.values.append(value)
        series.weights.append(_kept(weight) if isinstance(weight, Tensor) else weight)
        if len(series.values) >= _FOLD_AT:
            series.fold()

    def step_values(self) -> dict[str, float]:
        """The on_step series since the last call, reduced over all ranks, by sorted name. All ranks must call it."""
        mine: dict[str, tuple[str, Tensor]] = {}
        for series in self._series.values():
            series.fold()
            if series.step is not None:
                mine[series.name] = (series.reduce, series.step)
                series.step = None
        return self._reduced(mine, {})

    def epoch_values(self, stage: str) -> dict[str, float]:
        """The on_epoch series and metric objects of a stage, reduced over all ranks, by sorted name; clears and resets.

        All ranks must call it, also one that logged nothing.
        """
        mine: dict[str, tuple[str, Tensor]] = {}
        for series in (series for (of, _), series in self._series.items() if of == stage):
            series.fold()
            if series.epoch is not None:
                mine[series.epoch_name] = (series.reduce, series.epoch)
                series.epoch = None
        return self._reduced(mine, self._logged_metrics.pop(stage, {}))

    def _declare(
        self, stage: str, name: str, value: Any, on_step: bool | None, on_epoch: bool | None, reduce: str
    ) -> _Series:
        full = name if "/" in name else f"{'val' if stage == 'sanity' else stage}/{name}"
        is_metric = is_metric_or_collection(value)
        step, epoch = _axes(full, stage, is_metric, on_step, on_epoch)
        if reduce not in _REDUCTIONS:
            raise SettingsError(f"log({full!r}) got reduce={reduce!r}; expected one of {', '.join(_REDUCTIONS)}.")
        series = self._series.get((stage, full))
        if series is None or series is self._loss:
            if series is not None:
                self._loss = None  # the task logs its loss itself: one curve of that name, the task's
                del self.prog_bar_names[series.name]
            series = self._series[stage, full] = _Series(full, reduce, step, epoch)
        elif (series.reduce, series.on_step, series.on_epoch) != (reduce, step, epoch):
            raise TaskError(
                f"log({full!r}) was called with reduce={reduce!r}, on_step={step}, on_epoch={epoch}, but before with "
                f"reduce={series.reduce!r}, on_step={series.on_step}, on_epoch={series.on_epoch}. One name has one "
                "meaning: use another name or the same settings."
            )
        series.asked = (on_step, on_epoch, reduce)
        self._calls[stage, name] = series
        return series

    def _add_metric(self, stage: str, series: _Series, metric: Any) -> None:
        if series.metric is not metric:
            if series.metric is not None or series.values or series.epoch is not None:
                before = "numbers" if series.metric is None else f"another {type(series.metric).__name__}"
                raise TaskError(
                    f"log({series.name!r}) got {type(metric).__name__}, but before it got {before}. "
                    "One name has one meaning: use another name."
                )
            if id(metric) not in self._paths:
                self._paths = {id(module): path for path, module in self._task.named_modules()}
            if id(metric) not in self._paths:
                raise TaskError(
                    f"log({series.name!r}) got a {type(metric).__name__} that is no submodule of the task, so that the "
                    "other ranks could not find it. Assign it in the task's __init__: self.accuracy = ..."
                )
            series.metric, series.path = metric, self._paths[id(metric)]
        self._logged_metrics.setdefault(stage, {})[series.name] = series

    def _unknown_weight(self, series: _Series) -> float:
        if series.reduce == "mean" and series.name not in self._warned:
            self._warned.add(series.name)
            warnings.warn(
                f"log({series.name!r}): the batch size is unknown, so that every batch counts alike in the mean. "
                "Give it with batch_size=.",
                stacklevel=5,
            )
        return 1.0

    def _reduced(self, mine: dict[str, tuple[str, Tensor]], metrics: dict[str, _Series]) -> dict[str, float]:
        kinds = {name: reduce for name, (reduce, _) in mine.items()}
        kinds.update({name: f"metric {series.path}" for name, series in metrics.items()})
        kinds = self._agreed(kinds)
        plain = [name for name, kind in kinds.items() if kind in _REDUCTIONS]
        read = dict(zip(mine, _read([pair for _, pair in mine.values()]), strict=True))
        packed = [number for name in plain for number in read.get(name, (0.0, 0.0))]
        rows = self._devices.gather_floats(packed) if plain and self._devices.world_size > 1 else [packed]
        pairs = {name: [(row[2 * i], row[2 * i + 1]) for row in rows] for i, name in enumerate(plain)}
        values = {name: value for name in plain if (value := _over_ranks(kinds[name], pairs[name])) is not None}
        wanted = {name: kind.removeprefix("metric ") for name, kind in kinds.items() if kind not in _REDUCTIONS}
        if wanted:
            values.update(self._metric_values(wanted))
        return dict(sorted(values.items()))

    def _agreed(self, mine: dict[str, str]) -> dict[str, str]:
        """Names and kinds of all ranks, sorted. The names travel only when the ranks differ."""
        if self._devices.world_size == 1:
            return dict(sorted(mine.items()))
        text = "\n".join(f"{name}\t{kind}" for name, kind in sorted(mine.items()))
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")  # exact in a float64
        rows = self._devices.gather_floats([float(digest), float(len(mine))])
        if all(row == rows[0] for row in rows):
            return dict(sorted(mine.items()))
        agreed: dict[str, str] = {}
        for rank, theirs in enumerate(self._devices.gather_objects(mine)):
            for name, kind in theirs.items():
                if agreed.setdefault(name, kind) != kind:
                    raise TaskError(
                        f"Ranks log {name!r} in two ways: rank {rank} as {kind}, a rank before it as {agreed[name]}. "
                        "One name has one meaning on all ranks."
                    )
        return dict(sorted(agreed.items()))

    def _metric_values(self, wanted: Mapping[str, str]) -> dict[str, float]:
        """name -> path of the metrics that some rank logged -> their values, the same on every rank."""
        results = computed(self._task, list(wanted.values()), self._devices)
        values: dict[str, float] = {}
        for name, path in wanted.items():
            if path in results:
                scalars = dict(entries(name, results[path]))
                values.update(scalars)
                if name in self.prog_bar_names:
                    self.prog_bar_names.update(dict.fromkeys(scalars))
        # A compute may draw random subsets (KID), and ranks must decide on the same number: rank 0's.
        return dict(self._devices.gather_objects(values)[0]) if self._devices.world_size > 1 else values


def _axes(name: str, stage: str, is_metric: bool, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    if is_metric and on_step:
        raise SettingsError(
            f"log({name!r}) got a metric object and on_step=True, but a metric is computed at the end of the epoch. "
            "For a value per step log what its forward returned."
        )
    if stage == "train" and not is_metric:
        step = on_step is not False
        epoch = not step if on_epoch is None else on_epoch
    else:
        step, epoch = False, on_epoch is not False
    if not (step or epoch):
        raise SettingsError(f"log({name!r}) got settings that leave it neither on_step nor on_epoch, so nowhere to go.")
    return step, epoch


def _number(name: str, value: Any) -> float:
    """A number that is neither float nor int: numpy's, fractions, anything else that knows how to be a float."""
    if hasattr(value, "__float__") and not isinstance(value, str):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise TaskError(
        f"log({name!r}) got {type(value).__name__} {value!r:.80}; a number, a tensor of one element or a torchmetrics "
        "metric was expected."
    )


def _kept(value: Tensor) -> float | Tensor:
    """One element as it is now: on the host a number, which nobody waits for there; else a copy on its device."""
    if value.is_cpu:
        return value.item()
    # A copy, because `loss += penalty` after the log would change the pending value.
    return value.detach().clone().reshape(())


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


def _join(old: Tensor | None, new: Tensor, reduce: str) -> Tensor:
    if old is None:
        return new
    old = old.to(new.device, new.dtype, non_blocking=True)
    if reduce in ("mean", "sum"):
        return old + new
    extreme = torch.minimum if reduce == "min" else torch.maximum  # both keep NaN
    return torch.stack([extreme(old[0], new[0]), old[1] + new[1]])


def _read(pairs: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Read pairs from their devices, waiting once per device."""
    read: list[tuple[float, float]] = [(0.0, 0.0)] * len(pairs)
    for device in {pair.device for pair in pairs}:
        here = [i for i, pair in enumerate(pairs) if pair.device == device]
        for i, (value, weight) in zip(here, torch.stack([pairs[i] for i in here]).tolist(), strict=True):
            read[i] = (value, weight)
    return read


def _over_ranks(reduce: str, pairs: Sequence[tuple[float, float]]) -> float | None:
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
