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
  A metric object that was logged is the trainer's to compute and reset, and begins every evaluation empty; the task's
  other metrics are left alone.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from sanctuary_trainer.errors import CheckpointError, SettingsError, TaskError
from sanctuary_trainer.metric_states import load_metric_states, metric_states, remember
from sanctuary_trainer.metrics import (
    Ranks,
    computed,
    entries,
    is_metric_or_collection,
    metrics_aside,
    reset_metrics,
    updates,
)
from sanctuary_trainer.pending import device_of, metric_of, saved, series_of, take_over
from sanctuary_trainer.series import FOLD_AT, REDUCTIONS, Series, as_number, as_weight, kept, over_ranks, read_pairs


class Records:
    """Collects what the steps of one run log and reduces it over all ranks.

    `prog_bar_names`: every name that was logged with `prog_bar=True`, `name_epoch` and a metric's entries included; a
    dict for its order, the values mean nothing.
    """

    def __init__(self, devices: Ranks, task: nn.Module) -> None:
        self._devices = devices
        self._task = task
        self._series: dict[tuple[str, str], Series] = {}
        self._calls: dict[tuple[str, str], Series] = {}  # as logged, with or without prefix
        self._logged_metrics: dict[str, dict[str, Series]] = {}  # stage -> name -> series, since the last reading
        self._paths: dict[int, str] = {}
        self._warned: set[str] = set()
        self._filled: dict[int, int] = {}  # id -> updates of the metrics that held data when the evaluation began
        self._with_epoch: set[str] = set()
        self._marked = False  # whether somebody may rewind what was added
        self._loss: Series | None = Series("train/loss", "mean", on_step=True, on_epoch=True)
        self._series["train", "train/loss"] = self._loss
        self.prog_bar_names: dict[str, None] = {"train/loss": None}
        remember(task)

    def add_loss(self, loss: Tensor, weight: float) -> None:
        """Record the training loss unasked: `train/loss` per step and `train/loss_epoch`.

        loss: 0-d, kept as it is until it is folded, so that nobody may change it in place. weight: samples, or what the
        step gave. Does nothing once the task logs `loss` in training itself.
        """
        series = self._loss
        if series is None:
            return
        series.values.append(loss.item() if loss.is_cpu else loss.detach())
        series.weights.append(weight)
        if len(series.values) >= FOLD_AT:
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

        stage: "train", "val", "test" or "predict", or one of several loaders of these: "val/NAME". value: a number, a
        tensor of one element (copied, never waited for) or a torchmetrics metric or collection that is a submodule of
        the task. weight: samples behind the value; None when unknown. on_step: by default plain values in training;
        adds nothing in an evaluation, which has no steps. on_epoch: by default all else. reduce: "mean", "sum", "min"
        or "max", over steps and ranks.

        Raises `TaskError` for a value that is no scalar, a weight that is no number of at least 0, a metric outside the
        task, or a name that means two things; `SettingsError` for axes or a reduction that cannot be.
        """
        if not isinstance(name, str):
            raise TaskError(f"log got the name {name!r:.80} of type {type(name).__name__}; a name is a str.")
        series = self._calls.get((stage, name))
        if series is None or series.asked != (on_step, on_epoch, reduce):
            series = self._declare(stage, name, value, on_step, on_epoch, reduce)
        if prog_bar:
            self.prog_bar_names.update({series.name: None, series.epoch_name: None})
        if series.metric is not None or is_metric_or_collection(value):
            self._add_metric(stage, series, value)
            return
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                raise TaskError(
                    f"log({series.name!r}) got a tensor of shape {tuple(value.shape)}, {value.dtype}; one real number "
                    "was expected. Reduce it first, for example with .mean() or .abs()."
                )
            value = kept(value)
        elif type(value) is not float:
            value = as_number(series.name, value)
        if weight is None:
            weight = self._unknown_weight(series)
        elif type(weight) is not int or weight < 0:
            weight = as_weight(series.name, weight)
        series.values.append(value)
        series.weights.append(weight)
        if len(series.values) >= FOLD_AT and not self._marked:
            series.fold()

    def mark(self) -> dict[Series, int]:
        """How much is pending of each series: what `rewind` goes back to. From now on nothing is folded in between."""
        self._marked = True
        for series in self._series.values():
            if len(series.values) >= FOLD_AT:
                series.fold()
        return {series: len(series.values) for series in self._series.values()}

    def rewind(self, mark: Mapping[Series, int]) -> None:
        """Forget what was logged since this mark was taken."""
        for series in self._series.values():
            length = mark.get(series, 0)
            del series.values[length:], series.weights[length:]

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
        for series in self._of(stage):
            series.fold()
            if series.epoch is not None:
                mine[series.epoch_name] = (series.reduce, series.epoch)
                series.epoch = None
        return self._reduced(mine, self._logged_metrics.pop(stage, {}))

    def keep_epoch(self, names: Collection[str]) -> None:
        """Of these full names keep the value over the epoch, too, where the task logs them on_step alone.

        `epoch_values` gives it as `name_epoch`: who watches the name itself (a scheduler) finds its epoch there.
        """
        self._with_epoch.update(names)
        for series in self._series.values():
            series.on_epoch = series.on_epoch or series.name in self._with_epoch

    @contextmanager
    def aside(self, *, leave_no_trace: bool = False) -> Iterator[None]:
        """Around an evaluation: logged metrics begin it empty, and training's states come back; see `metrics_aside`."""
        logged = [series.metric for series in self._series.values() if series.metric is not None]
        with metrics_aside(self._task, logged, leave_no_trace=leave_no_trace):
            self._filled = updates(self._task)
            yield

    def close(self) -> None:
        """Reset metrics that were logged and not read: a run that was interrupted leaves nothing to the next."""
        for series in (series for logged in self._logged_metrics.values() for series in logged.values()):
            assert series.metric is not None
            reset_metrics(series.metric)
        self._logged_metrics.clear()

    def state_dict(self) -> dict[str, Any]:
        """This rank's half of an epoch of training as plain data: what was logged and not read, and all metrics.

        Its tensors are those in use: write them before the next step changes them.
        """
        logged = self._logged_metrics.get("train", {})
        return {
            "series": [state for one in self._of("train") if (state := saved(one, one.name in logged)) is not None],
            "metrics": metric_states(self._task),
            "prog_bar_names": list(self.prog_bar_names),
            "with_epoch": sorted(self._with_epoch),
            "warned": sorted(self._warned),
            "task_logs_loss": self._loss is None,
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with half an epoch; what was recorded in training or held by a metric before is forgotten.

        Args:
            states: what `state_dict` gave on each rank that this rank takes over, in their order: its own; on another
                number of ranks several or none, so that each former rank goes on in exactly one.

        Raises:
            CheckpointError: the task has changed: a metric that was saved is gone or another one, or a name means
                something else; or a metric cannot go on from several ranks.
        """
        load_metric_states(self._task, [state["metrics"] for state in states])
        self._logged_metrics.pop("train", None)
        for series in self._of("train"):
            series.clear()
        task_logs_loss = any(state["task_logs_loss"] for state in states)
        if task_logs_loss and self._loss is not None:
            del self._series["train", self._loss.name]
            self._loss = None
        if states:
            self.prog_bar_names = dict.fromkeys(name for state in states for name in state["prog_bar_names"])
        for state in states:
            self._with_epoch.update(state["with_epoch"])
            self._warned.update(state["warned"])
            for one in state["series"]:
                # The trainer's loss of a rank whose task did not log its own yet, which another rank's did.
                if one["name"] != "train/loss" or state["task_logs_loss"] == task_logs_loss:
                    self._take_over(one)

    def _take_over(self, state: Mapping[str, Any]) -> None:
        series = self._series.setdefault(("train", state["name"]), series_of(state, self._with_epoch))
        take_over(series, state, device_of(self._task))
        if state["metric"] is not None:
            series.metric = metric_of(series, self._task)
            self._logged_metrics.setdefault("train", {})[series.name] = series

    def _of(self, stage: str) -> list[Series]:
        return [series for (of, _), series in self._series.items() if of == stage]

    def _declare(
        self, stage: str, name: str, value: Any, on_step: bool | None, on_epoch: bool | None, reduce: str
    ) -> Series:
        is_metric = is_metric_or_collection(value)
        if not name and not is_metric:
            raise TaskError(f"log('') got {value!r:.80} and no name; only a metric that computes a dict may have none.")
        full = name if "/" in name else f"{stage}/{name}"
        if not name:
            full = f"{stage}/{self._path(name, value)}/"  # of several collections without a name each has its own
        step, epoch = _axes(full, stage, is_metric, on_step, on_epoch)
        epoch = epoch or full in self._with_epoch
        if reduce not in REDUCTIONS:
            raise SettingsError(f"log({full!r}) got reduce={reduce!r}; expected one of {', '.join(REDUCTIONS)}.")
        series = self._series.get((stage, full))
        if series is None or series is self._loss:
            before, series = series, Series(full, reduce, step, epoch)
            self._refuse_shared_curve(stage, series)
            if before is not None:
                self._loss = None  # the task logs its loss itself: one curve of that name, the task's
                del self.prog_bar_names[before.name]
            self._series[stage, full] = series
        elif (series.reduce, series.on_step, series.on_epoch) != (reduce, step, epoch):
            error, where = (TaskError, "before") if series.asked else (CheckpointError, "in the checkpoint")
            raise error(
                f"log({full!r}) was called with reduce={reduce!r}, on_step={step}, on_epoch={epoch}, but {where} with "
                f"reduce={series.reduce!r}, on_step={series.on_step}, on_epoch={series.on_epoch}. One name has one "
                "meaning: use another name or the same settings."
            )
        series.asked = (on_step, on_epoch, reduce)
        if name:
            self._calls[stage, name] = series
        return series

    def _refuse_shared_curve(self, stage: str, series: Series) -> None:
        for (of, name), other in self._series.items():
            if of == stage and name != series.name and (shared := series.curves & other.curves):
                raise TaskError(
                    f"log({series.name!r}) would write the curve {min(shared)!r}, which {name!r} writes too: with "
                    "on_step and on_epoch the second series is called name_epoch. Use another name."
                )

    def _add_metric(self, stage: str, series: Series, metric: Any) -> None:
        if series.metric is not metric:
            if series.metric is not None or series.values or series.epoch is not None:
                before = "numbers" if series.metric is None else f"another {type(series.metric).__name__}"
                raise TaskError(
                    f"log({series.name!r}) got {type(metric).__name__}, but before it got {before}. "
                    "One name has one meaning: use another name."
                )
            series.metric, series.path = metric, self._path(series.name, metric)
            if stage != "train" and any(count > self._filled.get(i, count) for i, count in updates(metric).items()):
                warnings.warn(
                    f"log({series.name!r}): {type(metric).__name__} held samples from before this evaluation, and they "
                    "count in its first value. Use one metric for each stage, or reset it before.",
                    stacklevel=5,
                )
        self._logged_metrics.setdefault(stage, {})[series.name] = series

    def _path(self, name: str, metric: nn.Module) -> str:
        if id(metric) not in self._paths:
            self._paths = {id(module): path for path, module in self._task.named_modules()}
        if id(metric) not in self._paths:
            raise TaskError(
                f"log({name!r}) got a {type(metric).__name__} that is no submodule of the task, so that the other "
                "ranks could not find it. Assign it in the task's __init__: self.accuracy = ..."
            )
        return self._paths[id(metric)]

    def _unknown_weight(self, series: Series) -> float:
        if series.reduce == "mean" and series.name not in self._warned:
            self._warned.add(series.name)
            warnings.warn(
                f"log({series.name!r}): the batch size is unknown, so that every batch counts alike in the mean. "
                "Give it with batch_size=.",
                stacklevel=5,
            )
        return 1.0

    def _reduced(self, mine: dict[str, tuple[str, Tensor]], metrics: dict[str, Series]) -> dict[str, float]:
        kinds = {name: reduce for name, (reduce, _) in mine.items()}
        kinds.update({name: f"metric {series.path}" for name, series in metrics.items()})
        kinds = self._agreed(kinds)
        plain = [name for name, kind in kinds.items() if kind in REDUCTIONS]
        read = dict(zip(mine, read_pairs([pair for _, pair in mine.values()]), strict=True))
        packed = [number for name in plain for number in read.get(name, (0.0, 0.0))]
        rows = self._devices.gather_floats(packed) if plain and self._devices.world_size > 1 else [packed]
        pairs = {name: [(row[2 * i], row[2 * i + 1]) for row in rows] for i, name in enumerate(plain)}
        values = {name: value for name in plain if (value := over_ranks(kinds[name], pairs[name])) is not None}
        wanted = {name: kind.removeprefix("metric ") for name, kind in kinds.items() if kind not in REDUCTIONS}
        if wanted:
            found = self._metric_values(wanted)
            if both := values.keys() & found.keys():
                raise TaskError(f"{min(both)!r} is logged as a number and is an entry of a metric. Use another name.")
            values.update(found)
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
                scalars = dict(entries(name.removesuffix(f"{path}/"), results[path]))
                if both := values.keys() & scalars.keys():
                    raise TaskError(f"{min(both)!r} is an entry of two metrics that are logged. Give one a prefix.")
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
