"""Plain data: what a checkpoint holds and gives back as it was.

Numbers, strings, bytes, None, torch's dtypes, tensors, numpy's numbers and arrays; lists, tuples, sets, dicts and
Counters of these. Subclasses (named tuples, defaultdicts) are not: they would come back as something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from types import NoneType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

_SCALARS: Final = (NoneType, bool, int, float, str, bytes, torch.dtype)


def is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold it and give it back as it was."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(is_plain, value))
    if type(value) in (dict, Counter):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biufc"
    return isinstance(value, Tensor) or type(value) in _SCALARS


def is_same(a: Any, b: Any) -> bool:
    """Whether two values are equal in all, types too; NaN differs from itself, which only saves it once more."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if type(a) is dict:
        return list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def copied(value: Any, device: torch.device | None = None) -> Any:
    """Plain data with memory of its own, its tensors on the device if one is given."""
    if isinstance(value, Tensor):
        return value.detach().to(value.device if device is None else device, copy=True)
    if type(value) is dict:
        return {key: copied(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item, device) for item in value)
    return copy(value)
