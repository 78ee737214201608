"""Which checkpoint a run goes on from, and to which run a folder belongs.

    choose(resume, ...)    "auto": the newest whole one of the run, or none; "last": the same, and one must be there;
                           a path: that one, or the newest of the run whose folder it is
    open_run(run_dir, saved) `run.json`: the run's id, and at which step each of its attempts began

A run that went back to step 100 has left a branch behind: what its former attempt saved after step 100 is not taken
for its newest checkpoint.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from sanctuary_trainer.checkpointing import MANIFEST, STATE, WEIGHTS, check_whole, read_json, tidy, write_file
from sanctuary_trainer.errors import CheckpointError

RUN: Final = "run.json"
CHECKPOINTS: Final = "checkpoints"  # the folder in a run's folder where checkpoints lie unless another is asked for


class Chosen(NamedTuple):
    """What a run goes on from.

    Attributes:
        folder: the checkpoint; None to start fresh.
        run_dir: the folder of its run; None when it lies in none.
        broken: why newer ones were passed over.
    """

    folder: Path | None
    run_dir: Path | None
    broken: list[str]


def choose(resume: str | Path, project_dir: Path, run_name: str | None, task: str) -> Chosen:
    """Find what `resume` means.

    Args:
        resume: "auto", "last", or a path.
        project_dir, run_name: where the run lies; without a name it is the task's newest.
        task: the name of the task in the names of its runs.

    Raises:
        CheckpointError: none is there where one is demanded, or the one that was named is broken.
    """
    if resume not in ("auto", "last"):
        return _named(Path(resume), project_dir)
    run_dir = project_dir / run_name if run_name is not None else newest_run(project_dir, task)
    found = _newest(run_dir) if run_dir is not None and run_dir.is_dir() else Chosen(None, None, [])
    if found.folder is None and resume == "last":
        where = run_dir or f"{project_dir}/{task}-*"
        broken = f" Broken: {' '.join(found.broken)}" if found.broken else ""
        raise CheckpointError(f'resume="last" found no whole checkpoint in {where}.{broken}')
    return found


def newest_run(project_dir: Path, task: str) -> Path | None:
    """The folder `task-NUMBER` with the highest number."""
    numbered = {int(path.name.rpartition("-")[2]): path for path in runs_of(project_dir, task)}
    return numbered[max(numbered)] if numbered else None


def runs_of(project_dir: Path, task: str) -> list[Path]:
    """The folders `task-NUMBER`."""
    return [path for path in project_dir.glob(f"{task}-*") if path.name.removeprefix(f"{task}-").isdigit()]


def open_run(run_dir: Path, saved: Mapping[str, Any]) -> tuple[str, int]:
    """Note in `run.json` that an attempt begins.

    Args:
        run_dir: the run's folder.
        saved: what the checkpoint tells from which it goes on; empty for a fresh start.

    Returns:
        The run's id, and the number of this attempt, from 0.
    """
    about = _about(run_dir)
    step = saved["progress"]["global_step"] if saved else 0
    about.setdefault("id", uuid.uuid4().hex[:12])
    about["starts"] = [*about.get("starts", []), step]
    about.setdefault("folders", [CHECKPOINTS])
    write_file(run_dir / RUN, json.dumps(about, indent=1).encode())
    for folder in _folders(run_dir, about):
        tidy(folder, about["id"])
    return about["id"], len(about["starts"]) - 1


def note_folder(run_dir: Path, folder: Path) -> None:
    """Note in `run.json` that checkpoints of the run lie in a folder."""
    about = _about(run_dir)
    name = str(folder.relative_to(run_dir)) if folder.is_relative_to(run_dir) else str(folder.resolve())
    if name not in about.get("folders", []):
        about["folders"] = [*about.get("folders", []), name]
        write_file(run_dir / RUN, json.dumps(about, indent=1).encode())


def free_name(folder: Path, run_id: str) -> Path:
    """The folder's name, or with a number where a checkpoint of another run has it."""
    name, number = folder, 1
    while name.exists() and _manifest(name).get("run") != run_id:
        number += 1
        name = folder.with_name(f"{folder.name}-{number}")
    return name


def _named(path: Path, project_dir: Path) -> Chosen:
    """What a path stands for: a checkpoint, a folder of checkpoints, or a run's folder."""
    if not path.is_dir():
        raise CheckpointError(f"resume={str(path)!r}: there is no such folder.")
    if not _is_checkpoint(path):
        found = _newest(path)
        if found.folder is None:
            broken = f" Broken: {' '.join(found.broken)}" if found.broken else ""
            raise CheckpointError(f"resume={str(path)!r}: it is no checkpoint, and holds no whole one.{broken}")
        return found._replace(run_dir=found.run_dir or _run_of(found.folder, project_dir))
    path = path.resolve()
    check_whole(path)
    if _manifest(path).get("kind") != "full":
        raise CheckpointError(
            f"{path} holds weights only, so that no run can go on from it. Load them before fit: task.load_weights."
        )
    return Chosen(path, _run_of(path, project_dir), [])


def _run_of(checkpoint: Path, project_dir: Path) -> Path | None:
    """The folder of the run that wrote a checkpoint: above it, or among the project's."""
    run_id = _manifest(checkpoint).get("run")
    near = [*checkpoint.parents, *(path.parent for path in project_dir.glob(f"*/{RUN}"))]
    return next((folder for folder in near if _about(folder).get("id") == run_id), None)


def _newest(run_dir: Path) -> Chosen:
    about = _about(run_dir)
    broken: list[str] = []
    found = [path for folder in (*_folders(run_dir, about), run_dir) for path in _checkpoints_in(folder)]
    for path in sorted(set(found), key=_place, reverse=True):
        told = _manifest(path)
        if told.get("kind", "full") != "full" or told.get("run", about.get("id")) != about.get("id", told.get("run")):
            continue
        if not _is_live(told, about):
            continue
        try:
            check_whole(path)
        except CheckpointError as error:
            broken.append(str(error))
            continue
        return Chosen(path, run_dir if about else None, broken)
    return Chosen(None, run_dir if about else None, broken)


def _is_live(told: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Whether a checkpoint lies on the branch that the run's last attempt goes on with."""
    later = about.get("starts", [])[told.get("attempt", 0) + 1 :]
    return all(told.get("global_step", 0) <= start for start in later)


def _place(path: Path) -> tuple[int, ...]:
    """What checkpoints are ordered by; of one without a manifest the number in its name."""
    told = _manifest(path)
    if "global_step" in told:
        return told["global_step"], told["attempt"], told["epoch"], told["batch"]
    digits = re.findall(r"\d+", path.name)
    return (int(digits[-1]) if digits else 0), 0, 0, 0


def _checkpoints_in(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink() and not path.name.startswith(".") and _is_checkpoint(path):
                yield path.resolve()


def _is_checkpoint(path: Path) -> bool:
    """Whether this is a checkpoint, or was meant to be one."""
    return any((path / name).exists() for name in (MANIFEST, STATE, WEIGHTS))


def _folders(run_dir: Path, about: Mapping[str, Any]) -> list[Path]:
    return [run_dir / name for name in about.get("folders", [CHECKPOINTS])]


def _about(run_dir: Path) -> dict[str, Any]:
    try:
        return read_json(run_dir / RUN)
    except CheckpointError:
        return {}


def _manifest(path: Path) -> dict[str, Any]:
    try:
        return read_json(path / MANIFEST)
    except CheckpointError:
        return {}
