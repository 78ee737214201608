"""Hyper-parameters of any kind as names with numbers and texts, which is what trackers show and files compare."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def flatten_hparams(hparams: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Hyper-parameters as trackers take them: nested names joined by "/", numbers and bools kept, the rest as text.

    Mappings and dataclasses are flattened. A sequence is text, `[1, 2]`; a class or function its qualified name; a
    tensor of one element its number, a larger one `tensor of shape (64, 3), float32`. NaN, infinity and what no float
    holds are text, too: TensorBoard's table would leave the number out. A field of a dataclass that was never set is
    left out.
    """
    return dict(_flattened("", hparams))


def _flattened(prefix: str, value: Any) -> Iterator[tuple[str, bool | int | float | str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
        }
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            yield from _flattened(f"{prefix}/{_text(key)}" if prefix else _text(key), inner)
    elif isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        yield from _flattened(prefix, value.item())
    elif isinstance(value, (bool, int, float)) and abs(value) <= sys.float_info.max:  # NaN is not
        yield prefix, value
    elif hasattr(value, "dtype") and getattr(value, "shape", None) == () and hasattr(value, "tolist"):
        number = value.tolist()  # numpy's numbers; of some kinds (longdouble) they stay numpy's
        yield from _flattened(prefix, str(number) if hasattr(number, "dtype") else number)
    else:
        yield prefix, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        return str(value).encode(errors="backslashreplace").decode()  # file names may hold bytes that are no text
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return hex(value)  # Python refuses to write more than 4300 decimal digits
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        module = getattr(value, "__module__", None)  # str.upper has none, len.__get__ has None
        return f"{module}.{value.__qualname__}" if module else str(value.__qualname__)
    if isinstance(value, (list, tuple)):
        open_, shut = "[]" if isinstance(value, list) else "()"
        return open_ + ", ".join(_text(item) for item in value) + shut
    return repr(value)
