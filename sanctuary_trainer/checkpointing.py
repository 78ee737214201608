"""Data on disk: a JSON skeleton, and every tensor in safetensors. No pickle, so reading a file runs no code.

    encode(value, tensors, name)  -> what json.dumps takes; tensors go to `tensors`, under names beginning with `name`
    decode(skeleton, tensors)     -> the value

What JSON does not have is tagged: {"$tensor": name}, {"$complex": name}, {"$tuple": [...]},
{"$dict": [[key, value], ...]}, {"$path": text}, {"$numpy": name, "scalar": bool}, {"$float": "nan"}, {"$bytes": text}.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch

from sanctuary_trainer.errors import DataError


def encode(value: Any, tensors: dict[str, torch.Tensor], name: str = "") -> Any:
    """The JSON skeleton of a value of any nesting.

    Args:
        value: numbers, strings, bytes, None, tensors, numpy arrays and scalars, paths, lists, tuples (named ones become
            tuples), mappings and dataclasses (become dicts).
        tensors: takes the tensors; filled.
        name: where in the whole this value stands.

    Raises:
        DataError: something else is in it, by its place and type.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, torch.Tensor):
        tensors[name] = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        return {"$complex" if value.is_complex() else "$tensor": name}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if isinstance(value, list):
        return [encode(item, tensors, f"{name}.{place}") for place, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, tensors, f"{name}.{place}") for place, item in enumerate(value)]}
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, Mapping | type):
        value = {field: getattr(value, field) for field in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, tensors, f"{name}.{key}") for key, item in value.items()}
        pairs = [
            [encode(k, tensors, f"{name}.{n}k"), encode(v, tensors, f"{name}.{n}")]
            for n, (k, v) in enumerate(value.items())
        ]
        return {"$dict": pairs}
    return _encode_numpy(value, tensors, name)


def _encode_numpy(value: Any, tensors: dict[str, torch.Tensor], name: str) -> Any:
    import numpy

    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
        array = numpy.array(value)
        tensors[name] = torch.from_numpy(numpy.atleast_1d(array)).reshape(array.shape)
        return {"$numpy": name, "scalar": isinstance(value, numpy.generic)}
    if isinstance(value, numpy.str_):
        return str(value)
    raise DataError(
        f"{name.strip('.') or 'The value'} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "written; numbers, strings, bytes, paths, tensors, arrays, and lists, tuples and dicts of these can."
    )


def decode(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value whose skeleton this is.

    Raises:
        DataError: the skeleton names a tensor that is not there, or has an unknown tag.
    """
    if isinstance(skeleton, list):
        return [decode(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next((key for key in skeleton if key.startswith("$")), None)
    if tag is None:
        return {key: decode(item, tensors) for key, item in skeleton.items()}
    content = skeleton[tag]
    if tag in ("$tensor", "$complex", "$numpy") and content not in tensors:
        raise DataError(f"The tensor {content!r} is missing.")
    match tag:
        case "$tensor":
            return tensors[content]
        case "$complex":
            return torch.view_as_complex(tensors[content])
        case "$numpy":
            array = tensors[content].numpy()
            return array[()] if skeleton["scalar"] else array
        case "$tuple":
            return tuple(decode(item, tensors) for item in content)
        case "$dict":
            return {decode(key, tensors): decode(item, tensors) for key, item in content}
        case "$path":
            return Path(content)
        case "$float":
            return float(content)
        case "$bytes":
            return base64.b64decode(content)
    raise DataError(f"The tag {tag!r} is unknown; the file was written by another version.")


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file whole or not at all: beside it, to disk, then renamed.

    Tensors that share memory are written each on its own.
    """
    from safetensors.torch import save

    # Copies: safetensors refuses tensors that share memory or are not contiguous.
    own = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    write_file(path, save(own, dict(metadata or {})))


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; when this returns it is on the disk."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_tensors(path: Path, only_metadata: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file.

    Raises:
        DataError: the file is missing, cut short, or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {} if only_metadata else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return tensors, metadata
