"""A module's parameters and buffers on disk: one safetensors file with the module's own keys.

    save_weights(module, path)   of tied weights one is stored, the metadata name the others
    load_weights(module, path)   by key; tied weights stay tied

Keys carry no prefix of what is wrapped around a module (`torch.compile`, DDP): a file fits the plain module and the
wrapped one alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sanctuary_trainer.checkpointing import decode, encode, read_tensors, write_tensors
from sanctuary_trainer.errors import DataError

_ABOUT = "sanctuary_trainer"  # the one entry of the file's metadata: more would be written in a changing order
_PREFIXES = ("_orig_mod.", "module.", "_forward_module.")  # of others' files


def save_weights(module: nn.Module, path: Path, *, sync: bool = True) -> None:
    """Write a module's parameters and buffers; what its modules give in `get_extra_state` goes with them.

    sync: False where the caller brings the file to the disk.
    """
    plain = plain_names(module)
    own = {plain(name): value for name, value in module.state_dict().items()}
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    tied = {name: min(others) for name, others in _tied_names(tensors).items() if min(others) < name}
    tensors = {name: value for name, value in tensors.items() if name not in tied}
    extra = {name: encode(own[name], tensors, name) for name in own if name not in tensors and name not in tied}
    about = json.dumps({"tied": tied, "extra": extra}, sort_keys=True) if tied or extra else ""
    write_tensors(path, tensors, {_ABOUT: about} if about else None, sync=sync)


def load_weights(module: nn.Module, path: Path, strict: bool = True) -> list[str]:
    """Read parameters and buffers; see `VisionTask.load_weights`.

    Returns:
        The keys that were skipped; empty when strict.

    Raises:
        DataError: the file cannot be read, keys or shapes differ (strict), or not one key agrees.
    """
    found = _read(path)
    kind, state, plain = type(module).__name__, module.state_dict(), plain_names(module)
    real = {plain(name): name for name in state}
    own = {short: state[name] for short, name in real.items()}
    found = {_known(name, own): value for name, value in found.items()}
    for name, others in _tied_names(own).items():
        stored = next((other for other in others if other in found), None)
        if name not in found and stored is not None:
            found[name] = found[stored]
    matching = {name: value for name, value in found.items() if name in own and _fits(name, value, own[name])}
    reshaped = [
        f"{n} ({tuple(found[n].shape)} in the file, {tuple(own[n].shape)} here)"
        for n in found
        if n in own and n not in matching
    ]
    missing = [name for name in own if name not in found]
    foreign = [name for name in found if name not in own]
    if not matching and not (strict and reshaped):
        if reshaped:
            raise DataError(f"The weights {path} share no key of the same shape with {kind}: {_some(reshaped)}.")
        raise DataError(
            f"The weights {path} share no key with {kind}: the file has {_some(found)}, the task has {_some(own)}."
        )
    if strict and (reshaped or missing or foreign):
        parts = [("missing in the file", missing), ("not in the task", foreign), ("of another shape", reshaped)]
        told = "; ".join(f"{what}: {_some(names)}" for what, names in parts if names)
        raise DataError(f"The weights {path} do not fit {kind}: {told}. strict=False loads the rest.")
    module.load_state_dict({real[name]: value for name, value in matching.items()}, strict=False)
    return [*missing, *foreign, *(text.split(" ", 1)[0] for text in reshaped)]


def _read(path: Path) -> dict[str, Any]:
    try:
        tensors, metadata = read_tensors(path)
        about = json.loads(metadata.get(_ABOUT, '{"tied": {}, "extra": {}}'))
        tensors.update({name: tensors[other] for name, other in about["tied"].items()})
        extra = about["extra"]
        values = {name: decode(skeleton, tensors) for name, skeleton in extra.items()}
    except (DataError, ValueError, KeyError) as error:
        raise DataError(f"The weights {path} cannot be read: {error}") from error
    inside = tuple(f"{name}." for name in extra)
    return {n: t for n, t in tensors.items() if n not in extra and not (inside and n.startswith(inside))} | values


def _fits(name: str, value: Any, own: Any) -> bool:
    if not isinstance(own, torch.Tensor) or name.rpartition(".")[2] == "_extra_state":
        return True  # the module knows what it can take
    return isinstance(value, torch.Tensor) and own.shape == value.shape


def _known(name: str, own: Mapping[str, Any]) -> str:
    """The key as the module has it, where others' wrappers have put something before or into it."""
    if name in own:
        return name
    short = name.replace("_orig_mod.", "")
    for prefix in _PREFIXES:
        short = short if short in own else short.removeprefix(prefix)
    return short if short in own else name


def plain_names(module: nn.Module) -> Callable[[str], str]:
    """A function that leaves the names of wrappers out of a key of the module's state."""
    named = module.named_modules(remove_duplicate=False)  # keys name a module in every place where it is
    wrappers = {name: inner for name, each in named if (inner := _wraps(each)) is not None}
    if not wrappers:
        return str

    def plain(key: str) -> str:
        path, kept = "", []
        for part in key.split("."):
            if wrappers.get(path) != part:
                kept.append(part)
            path = f"{path}.{part}" if path else part
        return ".".join(kept)

    return plain


def _wraps(module: nn.Module) -> str | None:
    """Under which name a wrapper holds the module that it wraps; None for all others."""
    if type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:  # importing its class costs 1.5 s
        return "_orig_mod"
    return "module" if isinstance(module, DataParallel | DistributedDataParallel) else None


def unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, without what is wrapped around it."""
    while (inner := _wraps(module)) is not None:
        module = getattr(module, inner)
    return module


def _tied_names(state: Mapping[str, Any]) -> dict[str, list[str]]:
    """For each key whose tensor is stored under other keys too, those keys."""
    by_storage: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
            key = (*start, tensor.dtype, tensor.shape, tensor.stride())  # a transposed view holds other values
            by_storage.setdefault(key, []).append(name)
    return {name: [n for n in names if n != name] for names in by_storage.values() if len(names) > 1 for name in names}


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
