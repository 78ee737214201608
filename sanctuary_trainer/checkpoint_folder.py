"""A checkpoint's folder: written whole or not at all, compared with its manifest, removed.

    .step_00000120.ID.partial/       made beside; ID is the run's
      model.safetensors              the task's own keys                                   weights.py
      state.json                     all else that is equal on all ranks                   checkpointing.py
      NAME.safetensors               the tensors of the entry NAME of state.json
      rank_00000.safetensors, ...    what one rank alone knows
      manifest.json                  size and SHA-256 of each file; last
    every file and the folder to the disk
    step_00000120  ->  .step_00000120.ID.former     only where there is one of this name
    .step_00000120.ID.partial  ->  step_00000120    from here on it is the checkpoint

A process that is killed leaves hidden folders: `tidy` gives a former checkpoint its name back, and removes the rest.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from sanctuary_trainer.checkpointing import FILE_MODE, STATE, WEIGHTS, read_json, read_state, to_disk, umask, write_file
from sanctuary_trainer.errors import CheckpointError

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"  # written last: a folder without one is no checkpoint
COPY: Final = ".copy"  # in what is a copy because it cannot be a link
PLACE: Final = ("global_step", "attempt", "epoch", "batch", "order")  # in the manifest: later ones are greater


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
    from safetensors import SafetensorError

    beside, former = _hidden(folder, owner, "partial"), _hidden(folder, owner, "former")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(beside, ignore_errors=True)
    _settle(former)
    try:
        beside.mkdir()
        try:
            fill(beside)
        except SafetensorError as error:  # transformers lets it through
            raise OSError(str(error)) from error
        files = sorted(path for path in beside.rglob("*") if path.is_file())
        for path in files:
            os.chmod(path, FILE_MODE & ~umask())  # safetensors lets nobody else read what it writes
        with ThreadPoolExecutor(1) as disk:  # it waits while this thread computes
            written = disk.submit(_all_to_disk, files)
            listed = {path.relative_to(beside).as_posix(): _sealed(path) for path in files}
            written.result()
        write_file(beside / MANIFEST, json.dumps({"format": FORMAT, **about, "files": listed}, indent=1).encode())
        for inner in (*(path for path in beside.rglob("*") if path.is_dir()), beside):
            to_disk(inner)
        _put(beside, folder, former)
        to_disk(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        _settle(former)


def write_link(link: Path, target: Path, owner: str) -> None:
    """Let a link point to a checkpoint beside it, or be a copy where the file system has no links.

    Raises:
        OSError: it could not be made.
    """
    if link.is_dir() and not link.is_symlink() and not (link / COPY).exists():
        raise OSError("a checkpoint has this name")
    beside, former = _hidden(link, owner, "partial"), _hidden(link, owner, "former")
    _clear(beside)
    _settle(former)
    try:
        try:
            beside.symlink_to(target.name)
        except OSError:
            shutil.copytree(target, beside)
            (beside / COPY).touch()
        _put(beside, link, former)
    finally:
        _clear(beside)
        _settle(former)


def _put(beside: Path, folder: Path, former: Path) -> None:
    """Give a complete folder, or a link, its name; what has it goes out of the way and is removed by `_settle`."""
    if folder.is_dir() and not folder.is_symlink():  # its name goes to no second one: for a moment none has it
        os.rename(folder, former)
    elif folder.is_symlink() and not beside.is_symlink():
        folder.unlink()
    os.replace(beside, folder)


def remove_checkpoint(folder: Path, owner: str) -> None:
    """Remove a checkpoint, if it is this run's; what is half removed has no name by which it is taken for a whole one.

    Raises:
        OSError: its name could not be taken from it.
    """
    if not folder.is_symlink() and read_manifest(folder).get("run") == owner:
        hidden = _hidden(folder, owner, "removed")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def tidy(folder: Path, owner: str) -> None:
    """Put in order what a killed process of this run left unfinished in a folder of checkpoints."""
    for hidden in folder.glob(f".*.{owner}.*"):
        if hidden.suffix == ".former":
            _settle(hidden)
        elif hidden.suffix in (".partial", ".removed"):
            _clear(hidden)


def restore_former(folder: Path) -> None:
    """Where a process was killed between giving up a checkpoint's name and giving it to the new one, undo it."""
    if not folder.exists():
        for hidden in folder.parent.glob(f".{glob.escape(folder.name)}.*.former"):
            os.rename(hidden, folder)
            return


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


def _clear(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _all_to_disk(files: list[Path]) -> None:
    for file in files:
        to_disk(file)


def _sealed(path: Path) -> dict[str, Any]:
    """A file's size and checksum."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def read_checkpoint(folder: str | Path, *names: str) -> dict[str, Any]:
    """What a checkpoint holds besides the weights, compared with its manifest first.

    Args:
        folder: the checkpoint.
        names: of entries of its `state.json` ("callbacks", "optimizer", "hparams", ...); all when none is given.

    Raises:
        CheckpointError: it is missing or broken.
    """
    folder = Path(folder)
    check_whole(folder)
    return read_state(folder, *names)


def read_manifest(folder: Path) -> dict[str, Any]:
    """A checkpoint's manifest; empty where there is none, or where it is not one."""
    try:
        manifest = read_json(folder / MANIFEST)
    except CheckpointError:
        return {}
    kinds = {"format": int, "files": dict, "kind": str, "run": str} | dict.fromkeys(PLACE, int)
    return manifest if all(isinstance(manifest.get(name), kind) for name, kind in kinds.items()) else {}


def check_whole(folder: Path) -> None:
    """Compare a checkpoint with its manifest.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    known = read_json(folder / MANIFEST).get("format")
    if isinstance(known, int) and known > FORMAT:
        raise CheckpointError(f"{folder} has format {known}; this version reads up to {FORMAT}.")
    files = read_manifest(folder).get("files", {})
    if not {STATE, WEIGHTS} <= files.keys():
        raise CheckpointError(f"{folder / MANIFEST} is damaged: it is no manifest of a checkpoint.")
    for name, told in files.items():
        try:
            size = (folder / name).stat().st_size
            if size != told["bytes"]:
                raise CheckpointError(f"{folder / name} is damaged: {size} bytes instead of {told['bytes']}.")
            with open(folder / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != told["sha256"]:
                    raise CheckpointError(f"{folder / name} is damaged: its checksum is not the manifest's.")
        except FileNotFoundError:
            raise CheckpointError(f"{folder / name} is missing.") from None
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
        except (KeyError, TypeError):
            raise CheckpointError(f"{folder / MANIFEST} is damaged: it does not tell of {name}.") from None
