"""Which checkpoint a run goes on from, and to which run a folder belongs.

    choose(resume, ...)    "auto": the newest whole one of the run, or none; "last": the same, and one must be there;
                           a path: that one, or the newest of the run whose folder it is
    begin_attempt(...)     `run.json`: the run's id, and at which step each of its attempts began

A run that went back to step 100 has left a branch behind: what its former attempt saved after step 100 is not taken
for its newest checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from sanctuary_trainer.checkpoint_folder import MANIFEST, PLACE, check_whole, read_manifest, restore_former, tidy
from sanctuary_trainer.checkpointing import STATE, WEIGHTS, read_json, write_file
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
        raise CheckpointError(f'resume="last" found no whole checkpoint in {where}.{_told(found.broken)}')
    return found


def newest_run(project_dir: Path, task: str) -> Path | None:
    """The folder `task-NUMBER` with the highest number."""
    numbered = {int(path.name.rpartition("-")[2]): path for path in runs_of(project_dir, task)}
    return numbered[max(numbered)] if numbered else None


def runs_of(project_dir: Path, task: str) -> list[Path]:
    """The folders `task-NUMBER`."""
    return [path for path in project_dir.glob(f"{task}-*") if path.name.removeprefix(f"{task}-").isdigit()]


def found_run(run_dir: Path) -> Path:
    """Make a folder that of a run, first of all: whatever is left in it is then known for the run's; returns it."""
    write_file(
        run_dir / RUN, json.dumps({"id": uuid.uuid4().hex[:12], "starts": [], "folders": [CHECKPOINTS]}).encode()
    )
    return run_dir


def look_at_run(run_dir: Path, continued: Path | None, saved: Mapping[str, Any]) -> tuple[str, int, dict[Path, int]]:
    """What is known of the run in a folder before an attempt begins.

    Args:
        run_dir: the folder.
        continued: the checkpoint from which it goes on; one in the folder tells the run's id where `run.json` is lost.
        saved: what that checkpoint tells.

    Returns:
        The run's id, a new one where there is none; the number of the attempt, from 0; its checkpoints and their steps.
    """
    about = _about(run_dir)
    own_id = saved["run"]["id"] if continued is not None and run_dir.resolve() in continued.parents else None
    run_id = about.get("id") or own_id or uuid.uuid4().hex[:12]
    found = {path: read_manifest(path) for folder in _folders(run_dir, about) for path in _checkpoints_in(folder)}
    own = {path: told["global_step"] for path, told in found.items() if told.get("run") == run_id}
    return run_id, len(about.get("starts", [])), own


def begin_attempt(run_dir: Path, run_id: str, step: int) -> None:
    """Note in `run.json` that an attempt begins at a step, and remove what killed ones left unfinished."""
    about = _about(run_dir)
    about["id"] = run_id
    about["starts"] = [*about.get("starts", []), step]
    about.setdefault("folders", [CHECKPOINTS])
    write_file(run_dir / RUN, json.dumps(about, indent=1).encode())
    for stray in run_dir.glob(f".{RUN}.*.partial"):
        stray.unlink()
    _tidy(run_dir, about)


def note_folder(run_dir: Path, folder: Path) -> None:
    """Note in `run.json` that checkpoints of the run lie in a folder."""
    about = _about(run_dir)
    name = str(folder.relative_to(run_dir)) if folder.is_relative_to(run_dir) else os.path.abspath(folder)
    if about and name not in about["folders"]:
        about["folders"].append(name)
        write_file(run_dir / RUN, json.dumps(about, indent=1).encode())


def free_name(folder: Path, run_id: str, keeps: Collection[Path] = ()) -> Path:
    """The folder's name, or with a number where one has it that is to be kept, or that is not this run's."""
    name, number = folder, 1
    while name in keeps or (name.exists() and read_manifest(name).get("run") != run_id):
        number += 1
        name = folder.with_name(f"{folder.name}-{number}")
    return name


def _named(path: Path, project_dir: Path) -> Chosen:
    """What a path stands for: a checkpoint, a folder of checkpoints, or a run's folder."""
    restore_former(path)
    if not path.is_dir():
        raise CheckpointError(f"resume={str(path)!r}: there is no such folder.")
    if not _is_checkpoint(path):
        found = _newest(path)
        if found.folder is None:
            raise CheckpointError(
                f"resume={str(path)!r}: it is no checkpoint, and holds no whole one.{_told(found.broken)}"
            )
        return found._replace(run_dir=found.run_dir or _run_of(found.folder, project_dir))
    path = path.resolve()
    check_whole(path)
    if read_manifest(path)["kind"] != "full":
        raise CheckpointError(
            f"{path} holds weights only, so that no run can go on from it. Load them before fit: task.load_weights."
        )
    return Chosen(path, _run_of(path, project_dir), [])


def _run_of(checkpoint: Path, project_dir: Path) -> Path | None:
    """The folder of the run that wrote a checkpoint: above it, or among the project's."""
    run_id = read_manifest(checkpoint)["run"]
    near = [*checkpoint.parents, *(path.parent for path in project_dir.glob(f"*/{RUN}"))]
    return next((folder for folder in near if _about(folder).get("id") == run_id), None)


def _newest(path: Path) -> Chosen:
    """The newest whole checkpoint of a run, given its folder or one of its folders of checkpoints."""
    run_dir = next((folder for folder in (path, *path.parents) if (folder / RUN).exists()), None)
    about = {} if run_dir is None else _about(run_dir)
    if run_dir is not None:
        _tidy(run_dir, about)
    folders = [*_folders(path, about), path] if run_dir in (None, path) else [path]
    found = {each.resolve(): None for folder in folders for each in _checkpoints_in(folder)}
    broken: list[str] = []
    for checkpoint in sorted(found, key=_place, reverse=True):
        if not _may_go_on(read_manifest(checkpoint), about):
            continue
        try:
            check_whole(checkpoint)
        except CheckpointError as error:
            broken.append(str(error))
            continue
        return Chosen(checkpoint, run_dir, broken)
    return Chosen(None, run_dir, broken)


def _may_go_on(told: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Whether a run may go on from a checkpoint, by its manifest; one without is looked at, to be told of.

    It is complete, the run's own, and lies on the branch that the run's last attempt goes on with.
    """
    if not told:
        return True
    if told["kind"] != "full" or told["run"] != about.get("id", told["run"]):
        return False
    later = about.get("starts", [])[told["attempt"] + 1 :]
    return all(told["global_step"] <= start for start in later)


def _place(path: Path) -> tuple[int, ...]:
    """What checkpoints are ordered by; of one without a manifest the number in its name."""
    told = read_manifest(path)
    if told:
        return tuple(told[name] for name in PLACE)
    digits = re.findall(r"\d+", path.name)
    return (int(digits[-1]) if digits else 0,)


def _checkpoints_in(folder: Path) -> Iterator[Path]:
    """What is a checkpoint there, or was meant to be one; bare weights may be anybody's."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.is_symlink() and not path.name.startswith(".") and _is_checkpoint(path, MANIFEST, STATE):
            yield path


def _is_checkpoint(path: Path, *files: str) -> bool:
    return any((path / name).is_file() for name in files or (MANIFEST, STATE, WEIGHTS))


def _folders(run_dir: Path, about: Mapping[str, Any]) -> list[Path]:
    return [run_dir / name for name in about.get("folders", [CHECKPOINTS])]


def _tidy(run_dir: Path, about: Mapping[str, Any]) -> None:
    for folder in _folders(run_dir, about) if about else ():
        tidy(folder, about["id"])


def _about(run_dir: Path) -> dict[str, Any]:
    """What `run.json` tells; empty where there is none, or where it is not one."""
    try:
        about = read_json(run_dir / RUN)
    except CheckpointError:
        return {}
    kinds = {"id": str, "starts": list, "folders": list}
    return about if all(isinstance(about.get(name), kind) for name, kind in kinds.items()) else {}


def _told(broken: list[str]) -> str:
    return f" Broken: {' '.join(broken)}" if broken else ""
