"""Data on disk: a JSON skeleton, and every tensor in safetensors. No pickle, so reading a file runs no code.

    encode(value, tensors, name)  -> what json.dumps takes; tensors go to `tensors`, under names beginning with `name`
    decode(skeleton, tensors)     -> the value

What JSON does not have is tagged: {"$tensor": name}, {"$complex": name}, {"$tuple": [...]},
{"$dict": [[key, value], ...]}, {"$path": text}, {"$numpy": name, "scalar": bool}, {"$float": "nan"}, {"$bytes": text},
{"$set": [...]}, {"$frozenset": [...]}, {"$counter": [[key, number], ...]}, {"$dtype": "bfloat16"}.

A checkpoint is a folder, written whole or not at all:

    .step_00000120.ID.partial/       made beside; ID is the run's
      model.safetensors              the task's own keys                                   weights.py
      state.json                     all else that is equal on all ranks: `write_state`
      NAME.safetensors               the tensors of the entry NAME of state.json
      rank_00000.safetensors, ...    what one rank alone knows: `write_rank`
      manifest.json                  size and SHA-256 of each file; last
    every file and the folder to the disk
    step_00000120  ->  .step_00000120.ID.former     only where there is one of this name
    .step_00000120.ID.partial  ->  step_00000120    from here on it is the checkpoint
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, Final

import torch

from sanctuary_trainer.errors import CheckpointError, DataError

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"  # written last: a folder without one is no checkpoint
STATE: Final = "state.json"
WEIGHTS: Final = "model.safetensors"


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
        own = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        return {"$complex" if value.is_complex() else "$tensor": _keep(own, tensors, name)}
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


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file whole or not at all: beside it, to disk, then renamed.

    Tensors that share memory are written each on its own.

    Args:
        path: the file.
        tensors: by name.
        metadata: one entry at most: safetensors writes several in an order that differs from run to run.

    Raises:
        OSError: it could not be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with _beside(path) as beside:
        try:
            save_file(_each_its_own(tensors), beside, dict(metadata or {}))
        except SafetensorError as error:  # what the system said is in it (no space left), without its number
            raise OSError(f"{path}: {error}") from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; when this returns it is on the disk."""
    with _beside(path) as beside:
        beside.write_bytes(content)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield beside
        os.chmod(beside, 0o666 & ~_umask())  # safetensors lets nobody else read what it writes
        to_disk(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _umask() -> int:
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


# Checkpoints


def write_checkpoint(folder: Path, owner: str, about: Mapping[str, Any], fill: Callable[[Path], None]) -> None:
    """Write a checkpoint whole or not at all; a former one of this name stays until the new one is complete.

    Args:
        folder: the checkpoint; its parent is made when it is missing.
        owner: the run's id, which tells its unfinished folders from those of others.
        about: what is to be known of it without reading it; stands in the manifest.
        fill: writes the files into the folder that it is given.

    Raises:
        OSError: it could not be written, and nothing has changed.
    """
    beside, former = _hidden(folder, owner, "partial"), _hidden(folder, owner, "former")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        fill(beside)
        files = sorted(path for path in beside.rglob("*") if path.is_file())
        listed = {path.relative_to(beside).as_posix(): _sealed(path) for path in files}
        write_file(beside / MANIFEST, json.dumps({"format": FORMAT, **about, "files": listed}, indent=1).encode())
        for inner in (*(path for path in beside.rglob("*") if path.is_dir()), beside):
            to_disk(inner)
        if folder.is_dir():  # a name cannot be given to a second folder: for a moment the former has none
            os.rename(folder, former)
        os.rename(beside, folder)
        to_disk(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        _settle(former)


def remove_checkpoint(folder: Path, owner: str) -> None:
    """Remove a checkpoint; one that is half removed has no name by which it could be taken for a whole one."""
    hidden = _hidden(folder, owner, "removed")
    with suppress(FileNotFoundError):
        os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def tidy(folder: Path, owner: str) -> None:
    """Remove what a killed process of this run left unfinished in a folder of checkpoints."""
    for hidden in folder.glob(f".*.{owner}.*"):
        if hidden.suffix == ".former":
            _settle(hidden)
        elif hidden.suffix in (".partial", ".removed"):
            shutil.rmtree(hidden, ignore_errors=True)


def _hidden(folder: Path, owner: str, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{owner}.{what}")


def _settle(former: Path) -> None:
    """Give a former checkpoint its name back if the new one did not come to be; else remove it."""
    if not former.is_dir():
        return
    folder = former.with_name(former.name[1:].rsplit(".", 2)[0])
    if folder.exists():
        shutil.rmtree(former, ignore_errors=True)
    else:
        os.rename(former, folder)


def _sealed(path: Path) -> dict[str, Any]:
    """Bring a file to the disk; its size and checksum."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest}


def check_whole(folder: Path) -> None:
    """Compare a checkpoint with its manifest.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    manifest = read_json(folder / MANIFEST)
    files = manifest.get("files")
    if not isinstance(files, dict) or not isinstance(manifest.get("format"), int):
        raise CheckpointError(f"{folder / MANIFEST} is no manifest of a checkpoint.")
    if manifest["format"] > FORMAT:
        raise CheckpointError(f"{folder} has format {manifest['format']}; this version reads up to {FORMAT}.")
    for name, told in files.items():
        try:
            size = (folder / name).stat().st_size
            if size != told["bytes"]:
                raise CheckpointError(f"{folder / name} is damaged: {size} bytes instead of {told['bytes']}.")
            with open(folder / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != told["sha256"]:
                    raise CheckpointError(f"{folder / name} is damaged: its checksum is not the manifest's.")
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state.json`; the tensors of its entry NAME go to `NAME.safetensors`."""
    skeleton: dict[str, Any] = {}
    for name, value in state.items():
        tensors: dict[str, torch.Tensor] = {}
        skeleton[name] = encode(value, tensors, name)
        if tensors:
            write_tensors(folder / f"{name}.safetensors", tensors)
    write_file(folder / STATE, json.dumps(skeleton, indent=1, allow_nan=False).encode())


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


def write_rank(folder: Path, rank: int, skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write what one rank alone knows, encoded; its skeleton stands in the file's metadata."""
    write_tensors(folder / _rank_file(rank), tensors, {"state": json.dumps(skeleton, allow_nan=False)})


def read_rank(folder: Path, rank: int) -> Any:
    """What `write_rank` wrote.

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
