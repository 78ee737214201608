"""What the data sets, samplers and collate of a loader hold, how long they are, and which epoch they were told."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import torch

__all__ = ["generators_of", "held_by", "initial_seeds", "length", "set_epoch", "tell_again"]

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_LEAVES = (str, bytes, int, float, type(None), torch.Tensor, np.ndarray, type, ModuleType)  # hold no generators
_DEPTH = 8  # steps from an owner: dataset.transform.transforms[0].rng takes 4
_FEW = 100  # entries; a longer list is one of samples

_told: dict[int, int] = {}  # by id: the epoch that was last told in this process


def held_by(root: Any, kind: type) -> list[Any]:
    """List an object and those of a kind that it holds in attributes, as Subset and BatchSampler do, each once."""
    found: list[Any] = []
    queue = [root]
    while queue:
        each = queue.pop(0)
        if not any(each is other for other in found):
            found.append(each)
            parts = getattr(each, "datasets", ())
            held = [*getattr(each, "__dict__", {}).values(), *(parts if isinstance(parts, list | tuple) else ())]
            queue += [value for value in held if isinstance(value, kind)]
    return found


def initial_seeds(owners: Iterable[Any]) -> list[int]:
    """The seeds of the torch generators in the owners' attributes: what their orders depend on beside ours."""
    values = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    return [value.initial_seed() for value in values if isinstance(value, torch.Generator)]


def generators_of(owners: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Find every (dict or list, key) that holds a generator, the nearest to the owners first.

    A generator that stands in a tuple itself stays as it is; networks (modules with parameters) are passed over.
    """
    found: list[tuple[Any, Any]] = []
    level = list(owners)
    seen = {id(owner) for owner in level}
    for _ in range(_DEPTH):
        entries = [(holder, *entry) for holder in map(_holder, level) for entry in _entries(holder)]
        level = []
        for holder, key, value in entries:
            if isinstance(value, _KINDS):
                found += [] if isinstance(holder, tuple) else [(holder, key)]
            elif not isinstance(value, _LEAVES) and id(value) not in seen and not _is_network(value):
                seen.add(id(value))
                level.append(value)
    return found


def _holder(owner: Any) -> Any:
    """The dict, list or tuple in which an object holds others."""
    if isinstance(owner, list | tuple | dict):
        return owner if len(owner) <= _FEW else ()
    if isinstance(owner, partial):
        return owner.func, owner.args, owner.keywords
    return (owner.__self__,) if isinstance(owner, MethodType) else getattr(owner, "__dict__", ())


def _entries(holder: Any) -> Iterable[tuple[Any, Any]]:
    return holder.items() if isinstance(holder, dict) else enumerate(holder)


def _is_network(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) and next(value.parameters(), None) is not None


def length(sized: Any) -> int | None:
    """len() where there is one that works."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def set_epoch(targets: Iterable[Any], epoch: int) -> None:
    """Tell samplers and data sets the epoch, where they want to know."""
    for target in targets:
        tell = getattr(target, "set_epoch", None)
        if callable(tell):
            tell(epoch)
        _told[id(target)] = epoch


def tell_again(targets: Iterable[Any], epoch: int) -> bool:
    """Tell it to those who last heard another: of another loader of the same data, or in a worker that lives on."""
    others = [target for target in targets if _told.get(id(target)) != epoch]
    set_epoch(others, epoch)
    return bool(others)
