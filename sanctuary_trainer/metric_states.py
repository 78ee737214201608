"""What metric objects hold, as plain data: for a run that stops in the middle of an epoch and goes on elsewhere.

    remember(task)                   how each metric was made; kept with the metric, so that it outlives a run
    metric_states(task)              path -> how the metric differs from that, of every metric that does
    load_metric_states(task, parts)  every metric as it was made, then as it was saved; ranks' parts are merged

A metric differs in its states, in its number of updates and in its other attributes that are plain data. These are what
outlives a reset (MinMaxMetric's extremes), what the first batch told (the compute groups of a MetricCollection, the
classes of a MeanIoU and how long its states are) and where a window stands (Running). What every metric has (caches,
flags of torchmetrics' own synchronisation) is left out; and a setting that does not change is the code's.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from sanctuary_trainer.errors import CheckpointError
from sanctuary_trainer.metrics import is_metric, is_updated, merge, own_states, reset
from sanctuary_trainer.plain import copied, is_plain, is_same, tensors_in

_MADE: Final = "_as_made"  # in vars() of each metric, collection and tracker
_HOST: Final = torch.device("cpu")

_Entry = Mapping[str, Any]


def remember(task: nn.Module) -> None:
    """Take note of how each metric of the task was made, when it is seen for the first time."""
    for module in _objects(task).values():
        if _MADE not in vars(module):
            vars(module)[_MADE] = _as_it_is(module)


def metric_states(task: nn.Module) -> dict[str, dict[str, Any]]:
    """What the metrics hold that they were not made with, by their path in the task.

    The tensors are those in use: write them before the next update changes them. A metric that was made after the last
    `remember` counts as changed in all its plain attributes. Warns of an attribute that grew and is no plain data.
    """
    return {path: entry for path, module in _objects(task).items() if (entry := _entry(path, module))}


def load_metric_states(task: nn.Module, parts: Sequence[Mapping[str, _Entry]]) -> None:
    """Give every metric what was saved of it; one of which nothing was saved is as it was made.

    Args:
        task: the task, on its device.
        parts: what `metric_states` gave, of each rank that this rank takes over, in their order. States are merged as
            over ranks; other attributes are those of the first rank that updated the metric.

    Raises:
        CheckpointError: a metric is not there any more, is another one, or cannot go on from several ranks.
    """
    remember(task)
    _make_steps(task, parts)
    modules = _objects(task)
    saved: dict[str, list[_Entry]] = {}
    for path, entry in (item for part in parts for item in part.items()):
        if "members" in entry and entry["members"] != _members(modules.get(path)):
            continue  # its compute groups would leave new members out; the next update finds them anew
        _check_metric(path, modules.get(path), entry)
        saved.setdefault(path, []).append(entry)
    for module in modules.values():
        _make_anew(module)
    with torch.inference_mode(False), torch.no_grad():
        for path, entries in saved.items():
            _restore(path, modules[path], entries)


def _objects(task: nn.Module) -> dict[str, Any]:
    """path -> each metric, collection and tracker, the outer ones first."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return {}
    kinds = (torchmetrics.Metric, torchmetrics.MetricCollection, torchmetrics.MetricTracker)
    return {path: module for path, module in task.named_modules() if isinstance(module, kinds)}


def _is_tracker(module: nn.Module) -> bool:
    """Whether it makes its steps at run time: copies of a metric, in a list."""
    return isinstance(module, nn.ModuleList)


def _members(module: nn.Module | None) -> list[str] | None:
    """The names in a collection; it holds nothing itself."""
    return list(module._modules) if isinstance(module, nn.ModuleDict) else None


# Saving


def _as_it_is(module: nn.Module) -> dict[str, Any]:
    attributes, rest = _attributes(module)
    return {"attributes": copied(attributes), "forms": _forms(module), "rest": rest}


def _attributes(module: nn.Module) -> tuple[dict[str, Any], dict[str, int]]:
    """Attributes of its own that are no states: those that are plain data, and the length of the other collections."""
    states = vars(module).get("_defaults", {})
    own = {name: value for name, value in vars(module).items() if name not in _everybodys() and name not in states}
    plain = {name: value for name, value in own.items() if is_plain(value)}
    return plain, {n: len(v) for n, v in own.items() if n not in plain and isinstance(v, Collection)}


@cache
def _everybodys() -> frozenset[str]:
    """The attributes that every module or every metric has."""
    return frozenset({*vars(nn.Module()), *vars(sys.modules["torchmetrics"].SumMetric()), _MADE})


def _forms(module: nn.Module) -> dict[str, str]:
    """Type and shape of what each state is reset to."""
    defaults = vars(module).get("_defaults", {})
    return {name: f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else "list" for name, v in defaults.items()}


def _entry(path: str, module: Any) -> dict[str, Any] | None:
    """What is saved of one metric; None where it is as it was made."""
    attributes, rest = _attributes(module)
    made = vars(module).get(_MADE, {"attributes": {}, "forms": _forms(module), "rest": rest})
    _warn_of(path, module, [name for name, length in rest.items() if length != made["rest"].get(name, 0)])
    as_made, forms = made["attributes"], _forms(module)
    changed = {n: value for n, value in attributes.items() if n not in as_made or not is_same(value, as_made[n])}
    moved = {name: module._defaults[name] for name, form in forms.items() if form != made["forms"].get(name)}
    steps = module.n_steps if _is_tracker(module) else 0
    parts: tuple[tuple[str, Any], ...] = (("attributes", changed), ("defaults", moved), ("steps", steps))
    entry = {key: part for key, part in parts if part}
    if is_metric(module) and is_updated(module):
        entry["states"] = {name: vars(module)[name] for name in own_states(module)}
        entry["updates"] = module._update_count
    if not entry:
        return None
    if isinstance(module, nn.ModuleDict):
        entry["members"] = _members(module)
    if getattr(module, "device", _HOST) != _HOST:  # lists of samples are often left on the host, and are to be so again
        held = {**changed, **entry.get("states", {})}
        entry["on_host"] = [name for name, value in held.items() if any(tensor.is_cpu for tensor in tensors_in(value))]
    return {"class": type(module).__name__, **entry}


def _warn_of(path: str, module: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        kind = type(vars(module)[name]).__name__
        warnings.warn(
            f"self.{path}.{name}, a {kind}, is no plain data: no checkpoint holds it, and a resumed run finds it as it "
            "was made. Make it a state (add_state), or a plain list or dict.",
            stacklevel=2,
        )


# Loading


def _make_steps(task: nn.Module, parts: Sequence[Mapping[str, _Entry]]) -> None:
    """Give each MetricTracker the steps that were saved, as its `increment` makes them."""
    for path, tracker in _objects(task).items():
        if _is_tracker(tracker):
            steps = max((part[path].get("steps", 0) for part in parts if path in part), default=0)
            while tracker.n_steps > steps:
                tracker._modules.popitem()
            while tracker.n_steps < steps:
                tracker.increment()


def _check_metric(path: str, module: Any, entry: _Entry) -> None:
    instead = "Resume with the task as it was, or start a new run from the checkpoint's weights."
    if module is None:
        raise CheckpointError(
            f"The checkpoint holds data of self.{path}, a {entry['class']}, which the task has not. {instead}"
        )
    if type(module).__name__ != entry["class"]:
        raise CheckpointError(
            f"The checkpoint holds data of self.{path} as a {entry['class']}, and now it is a "
            f"{type(module).__name__}. {instead}"
        )
    states, defaults = entry.get("states", {}), {**vars(module).get("_defaults", {}), **entry.get("defaults", {})}
    if states and states.keys() != set(own_states(module)):
        raise CheckpointError(
            f"The checkpoint holds the states {', '.join(states)} of self.{path}, a {entry['class']}, and now it has "
            f"{', '.join(own_states(module)) or 'none'}. {instead}"
        )
    for name, state in states.items():
        was, now = ([*getattr(value, "shape", ())] for value in (state, defaults[name]))
        if _is_elementwise(module, name) and was != now and math.prod(now) > 1:
            raise CheckpointError(
                f"The checkpoint holds the state {name} of self.{path}, a {entry['class']}, in the shape {was}, and "
                f"now it has {now}. {instead}"
            )


def _is_elementwise(metric: Any, name: str) -> bool:
    kind = getattr(metric._reductions.get(name), "__name__", "")
    return kind in ("dim_zero_sum", "dim_zero_mean", "dim_zero_min", "dim_zero_max")


def _make_anew(module: Any) -> None:
    """Leave a metric as it was made."""
    attributes = copied(vars(module)[_MADE]["attributes"])
    for name in _attributes(module)[0].keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)
    if is_metric(module):
        reset(module)


def _restore(path: str, module: Any, entries: Sequence[_Entry]) -> None:
    updated = [entry for entry in entries if "states" in entry]
    first = (updated or entries)[0]
    for name, value in first.get("attributes", {}).items():
        vars(module)[name] = copied(value, _device(module, name, first))
    for name, default in first.get("defaults", {}).items():
        module._defaults[name] = copied(default, module.device)
        if name in own_states(module):
            vars(module)[name] = copied(default, module.device)
    if not updated:
        return
    counts = [max(entry["updates"], 1) for entry in updated]
    for name in own_states(module):
        states = [entry["states"][name] for entry in updated]
        if len(states) > 1 and isinstance(states[0], Tensor) and module._reductions[name] is None:
            raise CheckpointError(
                f"The state {name} of self.{path}, a {first['class']}, has no reduction, so that one rank cannot go on "
                f"from {len(states)}. Resume on as many ranks as before, or from the end of an epoch."
            )
        state = states[0] if len(states) == 1 else merge(module, name, counts, states)
        vars(module)[name] = copied(state, _device(module, name, first))
    module._update_count = sum(entry["updates"] for entry in updated)


def _device(module: Any, name: str, entry: _Entry) -> torch.device | None:
    return _HOST if name in entry.get("on_host", ()) else getattr(module, "device", None)
