"""Metric objects (torchmetrics): recognised, put aside, merged over ranks, and their results as scalars.

torchmetrics is never imported here unless a task brought it: the import alone costs seconds.

    metrics_aside(task, logged)    around an evaluation: training's states go aside and come back
    computed(task, paths, ranks)   give every metric the states of all ranks, compute, give its own back, reset
    entries(name, result)          what compute returned, as names and numbers

Only a metric object that was logged is put aside, computed and reset. What a task updates and computes itself (the best
value so far, a confusion matrix) is its own.

torchmetrics' own synchronisation is not used: it needs every rank to call it, and dies or loses samples where list
states are uneven or empty.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sanctuary_trainer.errors import TaskError

_Packed = tuple[int, dict[str, Any]]  # number of updates, states


class Ranks(Protocol):
    """What reducing over ranks needs of `Devices`. Every rank must join each gather, in the same order."""

    @property
    def world_size(self) -> int: ...

    def gather_objects(self, obj: Any) -> list[Any]: ...

    def gather_floats(self, values: list[float]) -> list[list[float]]: ...


def is_metric(value: object) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def is_metric_or_collection(value: object) -> bool:
    """Whether this is an object of torchmetrics that has a result."""
    if not isinstance(value, nn.Module):
        return False
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, (torchmetrics.Metric, torchmetrics.MetricCollection))


def metrics_in(module: nn.Module) -> list[Any]:
    return [inner for inner in module.modules() if is_metric(inner)]


def own_states(metric: Any) -> list[str]:
    """ClasswiseWrapper shows its inner metric's states as its own; merged twice they would count double."""
    return [name for name in metric._defaults if name in vars(metric)]


def is_updated(metric: Any) -> bool:
    # Wrappers do not count their updates, and a metric inside one that shares another's states (compute groups) is
    # not told of them: these show it in their states. Comparing waits for the device, so it comes second.
    counted = metric._update_count > 0 and len(metrics_in(metric)) == 1
    return counted or any(not _is_default(vars(metric)[name], metric._defaults[name]) for name in own_states(metric))


def _is_default(state: Any, default: Any) -> bool:
    if isinstance(default, Tensor):
        return isinstance(state, Tensor) and torch.equal(state.cpu(), default.cpu())
    return len(state) == 0


def reset(metric: Any) -> None:
    # A state made under inference mode could not be added to in place by the next training step.
    with torch.inference_mode(False):
        metric.reset()


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state) if isinstance(state, list) else state


def updates(module: nn.Module) -> dict[int, int]:
    """How often each metric in the module was updated since its reset, by id, where it was."""
    return {id(metric): metric._update_count for metric in metrics_in(module) if metric._update_count}


@contextmanager
def metrics_aside(task: nn.Module, logged: Iterable[nn.Module] = (), *, leave_no_trace: bool = False) -> Iterator[None]:
    """Put the states of logged metrics aside for an evaluation, and back afterwards, also after an exception.

    Inside, each of `logged` starts as its own `reset` leaves it. Afterwards those that held data have exactly the
    states of before; the others are reset, which leaves what outlives a reset by the metric's own rule (MinMaxMetric's
    extremes, FID's real features). leave_no_trace: afterwards every metric of the task is exactly as before (sanity
    validation).
    """
    metrics = list({id(metric): metric for top in logged for metric in metrics_in(top)}.values())
    kept = metrics_in(task) if leave_no_trace else metrics
    saved = [
        (metric, dict(vars(metric)))
        for metric in kept
        if leave_no_trace or any(is_updated(inner) for inner in metrics_in(metric))
    ]
    with torch.inference_mode(False), torch.no_grad():
        for metric, attributes in saved:
            for name in own_states(metric):
                # Copies, because `reset` empties lists in place and an update adds to tensors in place.
                vars(metric)[name] = _copied(attributes[name])
    for metric in metrics:
        reset(metric)
    try:
        yield
    finally:
        for metric in metrics:
            reset(metric)
        for metric, attributes in saved:
            vars(metric).clear()
            vars(metric).update(attributes)


def reset_metrics(module: nn.Module) -> None:
    """Reset every metric in a module."""
    for metric in metrics_in(module):
        reset(metric)


def computed(task: nn.Module, paths: Sequence[str], devices: Ranks) -> dict[str, Any]:
    """What the metrics at these paths of the task compute over all ranks, by path; resets them.

    Every rank must call it with the same paths. A metric that no rank updated is left out.
    """
    modules = dict(task.named_modules())
    if missing := sorted(set(paths) - modules.keys()):
        raise TaskError(
            f"Another rank logged the metric self.{missing[0]}, which the task has not on this rank. Make metrics in "
            "__init__ or setup, on all ranks."
        )
    tops: dict[str, Any] = {path: modules[path] for path in paths}
    inside = {id(metric) for top in tops.values() for metric in metrics_in(top)}
    metrics = [module for module in modules.values() if id(module) in inside]  # in the same order on all ranks
    with _merged(metrics, devices) as updated, torch.inference_mode():
        results = {
            path: top.compute()
            for path, top in tops.items()
            if any(id(metric) in updated for metric in metrics_in(top))
        }
    for top in tops.values():
        reset(top)
    return results


@contextmanager
def _merged(metrics: Sequence[Any], devices: Ranks) -> Iterator[set[int]]:
    """Give every metric the states of all ranks for the time of a compute; yields ids of those updated on any rank.

    A rank that did not update a metric takes no part in merging it, and a state of one rank stays as it is: so empty
    ranks change nothing. torchmetrics' own synchronisation is off inside.
    """
    alone = devices.world_size == 1
    mine = [_packed(metric, states=not alone) if is_updated(metric) else None for metric in metrics]
    everyone = [mine] if alone else devices.gather_objects(mine)
    saved = [dict(vars(metric)) for metric in metrics]
    updated: set[int] = set()
    try:
        for i, metric in enumerate(metrics):
            parts: list[_Packed] = [part for packed in everyone if (part := packed[i]) is not None]
            counts = [count for count, _ in parts]
            vars(metric).update(_to_sync=False, _computed=None, _update_count=sum(counts))
            if parts:
                updated.add(id(metric))
            for name in own_states(metric) if parts and not alone else ():
                vars(metric)[name] = merge(metric, name, counts, [states[name] for _, states in parts])
        yield updated
    finally:
        for metric, attributes in zip(metrics, saved, strict=True):
            # Only what was set above: a compute may keep something of its own (MinMaxMetric's extremes).
            names = ["_to_sync", "_computed", "_update_count", *own_states(metric)]
            vars(metric).update({name: attributes[name] for name in names})


def _packed(metric: Any, *, states: bool) -> _Packed:
    own = own_states(metric) if states else []
    return max(metric._update_count, 1), {name: _to(vars(metric)[name], torch.device("cpu")) for name in own}


def merge(metric: Any, name: str, counts: Sequence[int], states: Sequence[Any]) -> Any:
    """One state of the ranks that updated the metric, in rank order, as one process would have it."""
    reduction = metric._reductions.get(name)
    kind = getattr(reduction, "__name__", "") if reduction is not None else "none"
    if isinstance(metric._defaults[name], list):
        joined: Any = [item for state in states for item in (state if isinstance(state, list) else [state])]
        if kind not in ("none", "dim_zero_cat") and len(states) > 1:
            joined = reduction(joined)
        return _to(joined, torch.device("cpu") if metric.compute_on_cpu else metric.device)
    tensors = [torch.as_tensor(state) for state in states]
    if len(tensors) == 1:
        joined = tensors[0]
    elif kind == "dim_zero_cat":
        joined = torch.cat([tensor.reshape(-1) if tensor.dim() == 0 else tensor for tensor in tensors])
    elif kind == "dim_zero_mean":
        # By updates, as torchmetrics itself joins a mean with the next batch's.
        joined = sum(tensor.double() * count for tensor, count in zip(tensors, counts, strict=True)) / sum(counts)
        joined = joined.to(tensors[0].dtype if tensors[0].is_floating_point() else torch.get_default_dtype())
    else:
        joined = torch.stack(tensors) if kind == "none" else reduction(torch.stack(tensors))
    return _to(joined, metric.device)


def _to(state: Any, device: torch.device) -> Any:
    """A state with every tensor in it on a device; compact, because pickling a view sends all that it views."""
    if isinstance(state, Tensor):
        state = state.detach().to(device)
        is_view = state.untyped_storage().nbytes() > state.numel() * state.element_size()
        return state.clone() if is_view else state
    if isinstance(state, Mapping):
        return {key: _to(item, device) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_to(item, device) for item in state)
    return state


def entries(name: str, result: Any) -> Iterator[tuple[str, float]]:
    """A metric's result as scalars: `name`, `name/key` of a dict, `name_0` ... of a vector or a list of several.

    A name that ends with "/" stands for its stage alone: it is put before keys that have no "/" of their own.
    """
    if isinstance(result, Mapping):
        for key, value in result.items():
            bare = name.endswith("/")
            yield from entries(str(key) if bare and "/" in str(key) else f"{name.removesuffix('/')}/{key}", value)
    elif name.endswith("/"):
        raise TaskError(
            f"log_dict got a metric that computes {type(result).__name__}, no dict, so that its value has no name. "
            "Give it one: self.log(name, metric)."
        )
    elif (isinstance(result, Tensor) and result.dim() == 0) or isinstance(result, (float, int)):
        yield name, float(result)
    elif (isinstance(result, Tensor) and result.dim() == 1) or isinstance(result, (list, tuple)):
        items = result.tolist() if isinstance(result, Tensor) else result
        for i, item in enumerate(items):
            yield from entries(name if len(items) == 1 else f"{name}_{i}", item)
    elif hasattr(result, "__float__") and not isinstance(result, Tensor):
        yield name, float(result)
    else:
        what = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise TaskError(
            f"The metric logged as {name!r} computed {what}; numbers, vectors and dicts of these can be logged. "
            "Show the rest as an image, for example."
        )
