"""Data on disk: a JSON skeleton, and every tensor in safetensors. No pickle, so reading a file runs no code.

    encode(value, tensors, name)  -> what json.dumps takes; tensors go to `tensors`, under names beginning with `name`
    decode(skeleton, tensors)     -> the value

What JSON does not have is tagged: {"$tensor": name}, {"$complex": name}, also with "shape" and "strides" of one that
lies in another order than usual (channels last) and is stored flat; {"$tuple": [...]},
{"$dict": [[key, value], ...]}, {"$path": text}, {"$numpy": name, "scalar": bool}, {"$float": "nan"}, {"$bytes": text},
{"$set": [...]}, {"$frozenset": [...]}, {"$counter": [[key, number], ...]}, {"$dtype": "bfloat16"}.

Files of a checkpoint are `state.json`, a file of tensors for each of its entries that has some, and one for each rank;
the folder around them is `checkpoint_folder.py`'s.
"""

from __future__ import annotations

import base64
import errno
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, Final

import torch

from sanctuary_trainer.errors import CheckpointError, DataError

STATE: Final = "state.json"
WEIGHTS: Final = "model.safetensors"
FILE_MODE: Final = 0o666


def encode(value: Any, tensors: dict[str, torch.Tensor], name: str = "") -> Any:
    """The JSON skeleton of a value of any nesting.

    Args:
        value: numbers, strings, bytes, None, tensors, torch's dtypes, numpy arrays and scalars, paths, lists, tuples
            (named ones become tuples), sets, counters, mappings and dataclasses (become dicts).
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
        return _encode_tensor(value.detach(), tensors, name)
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if isinstance(value, list):
        return [encode(item, tensors, f"{name}.{place}") for place, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, tensors, f"{name}.{place}") for place, item in enumerate(value)]}
    if isinstance(value, set | frozenset):  # a set has no order of its own, and equal ones are to give equal bytes
        items = encode(sorted(value, key=repr), tensors, name)
        return {"$frozenset" if isinstance(value, frozenset) else "$set": items}
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, Mapping | type):
        value = {field: getattr(value, field) for field in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, name)
    return _encode_numpy(value, tensors, name)


def _encode_tensor(value: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> Any:
    tag, own = ("$complex", torch.view_as_real(value)) if value.is_complex() else ("$tensor", value)
    usual = torch.empty(own.shape, device="meta").stride()
    # The order is part of a state: fused kernels walk through a parameter and its moments in memory, side by side, and
    # give wrong values without a word where the two differ. empty_like keeps the strides of what has no gaps.
    if own.stride() != usual and torch.empty_like(own, device="meta").stride() == own.stride():
        flat = own.as_strided((own.numel(),), (1,))
        return {tag: _keep(flat, tensors, name), "shape": list(own.shape), "strides": list(own.stride())}
    return {tag: _keep(own, tensors, name)}


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, torch.Tensor], name: str) -> Any:
    counter = isinstance(value, Counter)  # a plain dict would not count: MultiStepLR's milestones are one
    if not counter and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, tensors, f"{name}.{key}") for key, item in value.items()}
    pairs = [
        [encode(key, tensors, f"{name}.{n}k"), encode(item, tensors, f"{name}.{n}")]
        for n, (key, item) in enumerate(value.items())
    ]
    return {"$counter" if counter else "$dict": pairs}


def _keep(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> str:
    """Take the tensor under that name, or one near it: {"a.b": x} and {"a": {"b": y}} would have the same."""
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def _encode_numpy(value: Any, tensors: dict[str, torch.Tensor], name: str) -> Any:
    import numpy

    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
        array = numpy.array(value)
        own = torch.from_numpy(numpy.atleast_1d(array)).reshape(array.shape)
        return {"$numpy": _keep(own, tensors, name), "scalar": isinstance(value, numpy.generic)}
    if isinstance(value, numpy.str_):
        return str(value)
    raise DataError(
        f"{name.strip('.') or 'The value'} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "written; numbers, strings, bytes, paths, tensors, arrays, and lists, tuples, sets and dicts of these can."
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
        case "$tensor" | "$complex":
            own = tensors[content]
            if "strides" in skeleton:
                own = own.as_strided(skeleton["shape"], skeleton["strides"])
            return torch.view_as_complex(own) if tag == "$complex" else own
        case "$numpy":
            array = tensors[content].numpy()
            return array[()] if skeleton["scalar"] else array
        case "$tuple":
            return tuple(decode(item, tensors) for item in content)
        case "$dict":
            return {decode(key, tensors): decode(item, tensors) for key, item in content}
        case "$counter":
            return Counter({decode(key, tensors): decode(item, tensors) for key, item in content})
        case "$set":
            return {decode(item, tensors) for item in content}
        case "$frozenset":
            return frozenset(decode(item, tensors) for item in content)
        case "$dtype" if isinstance(dtype := getattr(torch, content, None), torch.dtype):
            return dtype
        case "$path":
            return Path(content)
        case "$float":
            return float(content)
        case "$bytes":
            return base64.b64decode(content)
    raise DataError(f"The tag {tag!r} is unknown; the file was written by another version.")


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None, *, sync: bool = True
) -> None:
    """Write a safetensors file whole or not at all: beside it, to disk, then renamed.

    Tensors that share memory are written each on its own.

    Args:
        path: the file.
        tensors: by name.
        metadata: one entry at most: safetensors writes several in an order that differs from run to run.
        sync: False where the caller brings the file to the disk, as with all files of a checkpoint.

    Raises:
        OSError: it could not be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with _beside(path, sync) as beside:
        try:
            save_file(_each_its_own(tensors), beside, dict(metadata or {}))
        except SafetensorError as error:  # what the system said is in it (no space left), without its number
            raise OSError(f"{path}: {error}") from error


def write_file(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file whole or not at all; when this returns it is on the disk, if `sync`."""
    with _beside(path, sync) as beside:
        beside.write_bytes(content)


@contextmanager
def _beside(path: Path, sync: bool) -> Iterator[Path]:
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield beside
        os.chmod(beside, FILE_MODE & ~umask())  # safetensors lets nobody else read what it writes
        if sync:
            to_disk(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def umask() -> int:
    """What new files of this process do not allow."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _each_its_own(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the host; copies where safetensors refuses one: it shares memory or is not contiguous."""
    own: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        storages.add(tensor.untyped_storage().data_ptr())
        own[name] = tensor
    return own


def to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot do it for a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


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


# The files of a checkpoint


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state.json` into a checkpoint; the tensors of its entry NAME go to `NAME.safetensors`."""
    skeleton: dict[str, Any] = {}
    for name, value in state.items():
        tensors: dict[str, torch.Tensor] = {}
        skeleton[name] = encode(value, tensors, name)
        if tensors:
            write_tensors(folder / f"{name}.safetensors", tensors, sync=False)
    # Without indent: Python's fast encoder has none, and the skeleton of an optimizer is long.
    write_file(folder / STATE, json.dumps(skeleton, allow_nan=False).encode(), sync=False)


def read_state(folder: Path, *names: str) -> dict[str, Any]:
    """These entries of a checkpoint's state, or all; those that it has not are left out.

    Raises:
        CheckpointError: a file is missing or broken.
    """
    skeleton = read_json(folder / STATE)
    state: dict[str, Any] = {}
    for name in names or skeleton:
        if name not in skeleton:
            continue
        path = folder / f"{name}.safetensors"
        try:
            state[name] = decode(skeleton[name], read_tensors(path)[0] if path.exists() else {})
        except DataError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read. {error}") from error
    return state


def rank_file(state: Any) -> bytes:
    """The content of a file for what one rank alone knows, as it is sent to the rank that writes.

    Raises:
        DataError: something in it cannot be written.
    """
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    skeleton = json.dumps(encode(state, tensors, "rank"), allow_nan=False)
    return save(_each_its_own(tensors), {"state": skeleton})


def write_rank(folder: Path, rank: int, content: bytes) -> None:
    """Write what `rank_file` made."""
    write_file(folder / _rank_file(rank), content, sync=False)


def read_rank(folder: Path, rank: int) -> Any:
    """What one rank alone knew.

    Raises:
        CheckpointError: the file is missing or broken.
    """
    try:
        tensors, metadata = read_tensors(folder / _rank_file(rank))
        return decode(json.loads(metadata["state"]), tensors)
    except (DataError, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder / _rank_file(rank)} cannot be read: {error}") from error


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """An object of JSON.

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no object but {type(value).__name__}.")
    return value
