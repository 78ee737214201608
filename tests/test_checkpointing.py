"""A checkpoint on disk: whole or not at all at whatever moment a process dies, and told to be broken where it is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import sanctuary_trainer.checkpoint_folder as checkpoint_folder
from sanctuary_trainer import CheckpointError, DataError
from sanctuary_trainer.checkpoint_folder import (
    check_whole,
    read_manifest,
    remove_checkpoint,
    restore_former,
    tidy,
    write_checkpoint,
    write_link,
)
from sanctuary_trainer.checkpointing import (
    rank_file,
    read_json,
    read_rank,
    read_state,
    read_tensors,
    to_disk,
    write_file,
    write_rank,
    write_state,
    write_tensors,
)

OWNER, OTHER = "0123456789ab", "ba9876543210"
ABOUT = {"kind": "full", "run": OWNER, "global_step": 3, "attempt": 0, "epoch": 1, "batch": 2, "order": 0}


def filler(value: float) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        write_tensors(folder / "model.safetensors", {"w": torch.full((1000,), value)})
        write_state(folder, {"value": value, "optimizer": {"moment": torch.full((3,), value)}})
        write_rank(folder, 0, rank_file({"value": value}))

    return fill


def write(folder: Path, value: float, owner: str = OWNER) -> None:
    write_checkpoint(folder, owner, ABOUT | {"run": owner}, filler(value))


def value_of(folder: Path) -> Any:
    check_whole(folder)
    weights, state = read_tensors(folder / "model.safetensors")[0]["w"], read_state(folder)
    assert read_rank(folder, 0) == {"value": state["value"]}
    assert weights.unique().tolist() == state["optimizer"]["moment"].unique().tolist() == [state["value"]]
    return state["value"]


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


# What is written


def test_a_checkpoint_is_a_folder_of_json_and_safetensors_with_a_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step_3"
    write(folder, 1.5)
    files = visible(folder)
    assert files == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "rank_00000.safetensors",
        "state.json",
    ]
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert {name: manifest[name] for name in ABOUT} == ABOUT and manifest["format"] == 1
    assert sorted(manifest["files"]) == [name for name in files if name != "manifest.json"]
    for name, told in manifest["files"].items():
        assert told["bytes"] == (folder / name).stat().st_size
        assert len(told["sha256"]) == 64
    assert value_of(folder) == 1.5
    assert hidden(folder.parent) == []


def test_files_in_folders_of_a_checkpoint_are_sealed_too(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        filler(1.0)(folder)
        (folder / "model" / "deep").mkdir(parents=True)
        (folder / "model" / "deep" / "config.json").write_text("{}")

    write_checkpoint(tmp_path / "a", OWNER, ABOUT, fill)
    check_whole(tmp_path / "a")
    (tmp_path / "a" / "model" / "deep" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"deep/config.json is damaged: its checksum"):
        check_whole(tmp_path / "a")


def test_who_may_read_what_is_written_is_decided_by_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_tensors(tmp_path / "a.safetensors", {"w": torch.zeros(1)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o640


def test_state_comes_back_and_names_can_be_asked_for(tmp_path: Path) -> None:
    state = {"a": {"x": torch.arange(3), "y": (1, None)}, "b": [float("nan")], "empty": {}}
    write_state(tmp_path, state)
    back = read_state(tmp_path)
    assert list(back) == ["a", "b", "empty"] and back["empty"] == {}
    assert back["a"]["y"] == (1, None) and torch.equal(back["a"]["x"], state["a"]["x"])  # type: ignore[call-overload]
    assert list(read_state(tmp_path, "empty", "unknown")) == ["empty"]


def test_tensors_that_share_memory_or_lie_elsewhere_are_written_each_on_its_own(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"whole": whole, "row": whole[1], "transposed": whole.t(), "same": whole, "none": torch.zeros(0, 3)}
    write_tensors(tmp_path / "t.safetensors", tensors)
    back, metadata = read_tensors(tmp_path / "t.safetensors")
    assert metadata == {}
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64),
        *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_tensors_of_every_kind_keep_it(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.0, 2.0]).to(dtype)
    write_tensors(tmp_path / "t.safetensors", {"t": tensor})
    back = read_tensors(tmp_path / "t.safetensors")[0]["t"]
    assert back.dtype == dtype and back.tolist() == tensor.tolist()


# Whole or not at all

STEPS = ["mkdir", "fill", "half a file", "filled", "sealed", "manifest", "out of the way", "named", "removed"]


@contextmanager
def dying(at: str) -> Iterator[None]:
    """Inside, the process leaves at once: before the step of that name, or in the middle of a file."""
    real = {name: getattr(os, name) for name in ("mkdir", "rename", "replace", "fsync")}
    real_rmtree, real_sealed = shutil.rmtree, checkpoint_folder._sealed

    def leave(*arguments: Any, **settings: Any) -> Any:
        os._exit(9)

    def rename(source: Any, target: Any) -> None:
        if str(target).endswith(".former") and at == "out of the way":
            leave()
        real["rename"](source, target)

    def replace(source: Any, target: Any) -> None:
        if str(source).endswith(f"{OWNER}.partial"):
            if at == "named":
                leave()
        elif Path(target).name == "manifest.json" and at == "manifest":
            leave()
        real["replace"](source, target)

    def rmtree(path: Any, **settings: Any) -> None:
        if str(path).endswith(".former") and at == "removed":
            leave()
        real_rmtree(path, **settings)

    patch = pytest.MonkeyPatch()
    patch.setattr(os, "rename", rename)
    patch.setattr(os, "replace", replace)
    patch.setattr(shutil, "rmtree", rmtree)
    if at == "mkdir":
        patch.setattr(os, "mkdir", leave)
    if at == "filled":
        patch.setattr(checkpoint_folder, "_sealed", leave)
    if at == "sealed":
        patch.setattr(checkpoint_folder, "_sealed", lambda path: (real_sealed(path), path.stem == "state" and leave()))
    try:
        yield
    finally:
        patch.undo()


def die_in_a_write(folder: Path, value: float, at: str) -> None:
    """Writes in a child that dies at that step."""
    child = os.fork()
    if child == 0:
        try:
            with dying(at):

                def fill(inner: Path) -> None:
                    if at == "fill":
                        os._exit(9)
                    filler(value)(inner)
                    if at == "half a file":
                        os.truncate(inner / "model.safetensors", 2000)
                        os._exit(9)

                write_checkpoint(folder, OWNER, ABOUT, fill)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, at


@pytest.mark.parametrize("at", STEPS)
@pytest.mark.parametrize("recover", ["tidy", "restore_former"])
def test_a_process_that_dies_in_a_write_leaves_the_former_checkpoint(tmp_path: Path, at: str, recover: str) -> None:
    folder = tmp_path / "last"
    write(folder, 1.0)
    die_in_a_write(folder, 2.0, at)
    if folder.exists():  # before anybody puts things in order: what has the name is whole
        assert value_of(folder) == (2.0 if at == "removed" else 1.0)
    else:
        assert at == "named"
    if recover == "restore_former":
        restore_former(folder)
    else:
        tidy(tmp_path, OWNER)
        assert hidden(tmp_path) == []
    assert value_of(folder) == (2.0 if at == "removed" else 1.0)
    write(folder, 3.0)
    assert value_of(folder) == 3.0 and visible(tmp_path) == ["last"]
    tidy(tmp_path, OWNER)
    assert value_of(folder) == 3.0 and hidden(tmp_path) == []


@pytest.mark.parametrize("at", [*STEPS[:-3], "named"])
def test_a_process_that_dies_in_the_first_write_leaves_nothing_of_that_name(tmp_path: Path, at: str) -> None:
    folder = tmp_path / "last"
    die_in_a_write(folder, 2.0, at)
    assert visible(tmp_path) == []
    tidy(tmp_path, OWNER)
    assert list(tmp_path.iterdir()) == []


def test_unfinished_folders_of_other_runs_are_left_alone(tmp_path: Path) -> None:
    names = [f".step_1.{OTHER}.partial", f".step_2.{OTHER}.former", f".a.{OTHER}.removed", f".{OWNER}", ".x.partial"]
    for name in [*names, f".step_1.{OWNER}.partial", f".step.4.{OWNER}.former", f".step_5.{OWNER}.removed"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    tidy(tmp_path, OWNER)
    assert hidden(tmp_path) == sorted(names)
    assert visible(tmp_path) == ["step.4"]
    restore_former(tmp_path / "step_2")
    assert visible(tmp_path) == ["step.4", "step_2"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("odd"), SystemExit()])
def test_a_write_that_raises_changes_nothing(tmp_path: Path, error: BaseException) -> None:
    folder = tmp_path / "last"
    write(folder, 1.0)

    def fill(inner: Path) -> None:
        filler(2.0)(inner)
        raise error

    with pytest.raises(type(error)):
        write_checkpoint(folder, OWNER, ABOUT, fill)
    assert value_of(folder) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_a_name_that_cannot_be_given_leaves_the_former_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, replace = tmp_path / "last", os.replace
    write(folder, 1.0)

    def refusing(source: Any, target: Any) -> None:
        if Path(target) == folder:
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refusing)
    with pytest.raises(OSError, match="Input/output"):
        write(folder, 2.0)
    assert value_of(folder) == 1.0 and hidden(tmp_path) == []


def test_what_safetensors_could_not_write_is_an_error_of_the_system(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(OSError, match="nowhere"):
        write_tensors(tmp_path / "nowhere" / "t.safetensors", {"t": torch.zeros(1)})

    def fill(folder: Path) -> None:  # as transformers writes
        save_file({"t": torch.zeros(1)}, folder / "nowhere" / "t.safetensors")

    with pytest.raises(OSError, match=r"(?i)no such file"):
        write_checkpoint(tmp_path / "a", OWNER, ABOUT, fill)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_file(path, b"first")
    monkeypatch.setattr(os, "fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_file(path, b"second")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"first"]


def test_a_folder_that_cannot_be_brought_to_the_disk_is_no_error_where_no_folder_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(number: int) -> Callable[[int], None]:
        def refuse(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        return refuse

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", fsync(errno.EINVAL))
    to_disk(tmp_path)
    with pytest.raises(OSError, match="Invalid"):
        to_disk(tmp_path / "file")
    monkeypatch.setattr(os, "fsync", fsync(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        to_disk(tmp_path)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own; skips where none can be made."""
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_leaves_the_former_checkpoint_and_no_other_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "600k") as disk:

        def fill(folder: Path) -> None:
            write_tensors(folder / "model.safetensors", {"w": torch.ones(100_000)})
            write_state(folder, {})

        write_checkpoint(disk / "a", OWNER, ABOUT, fill)
        for name in ("a", "b"):
            with pytest.raises(OSError, match=r"(?i)no space"):
                write_checkpoint(disk / name, OWNER, ABOUT, fill)
        check_whole(disk / "a")
        assert [path.name for path in disk.iterdir()] == ["a"]


# Removing, and the link to the newest


def test_only_a_runs_own_checkpoints_are_removed(tmp_path: Path) -> None:
    write(tmp_path / "mine", 1.0)
    write(tmp_path / "theirs", 1.0, OTHER)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("mine")
    for name in ("theirs", "folder", "link", "nothing", "mine"):
        remove_checkpoint(tmp_path / name, OWNER)
    assert visible(tmp_path) == ["folder", "link", "theirs"] and hidden(tmp_path) == []


def test_what_is_half_removed_has_no_name_by_which_it_is_taken_for_whole(tmp_path: Path) -> None:
    write(tmp_path / "a", 1.0)
    child = os.fork()
    if child == 0:
        pytest.MonkeyPatch().setattr(os, "unlink", lambda *arguments, **settings: os._exit(9))
        remove_checkpoint(tmp_path / "a", OWNER)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert visible(tmp_path) == [] and hidden(tmp_path) == [f".a.{OWNER}.removed"]
    write(tmp_path / "a", 2.0)
    remove_checkpoint(tmp_path / "a", OWNER)  # what is left of the former one is not in the way
    assert list(tmp_path.iterdir()) == []


def refuse_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)


@pytest.mark.parametrize("links", [True, False])
def test_a_link_points_to_the_newest_and_a_copy_stands_in_for_it(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        refuse_links(monkeypatch)
    for value in (1.0, 2.0, 3.0):
        target = tmp_path / f"step_{value:.0f}"
        write(target, value)
        write_link(tmp_path / "last", target, OWNER)
        assert value_of(tmp_path / "last") == value
        assert (tmp_path / "last").is_symlink() == links
        assert hidden(tmp_path) == []
    assert visible(tmp_path) == ["last", "step_1", "step_2", "step_3"]
    if links:
        assert os.readlink(tmp_path / "last") == "step_3", "so that the folder may be moved"


def test_a_link_and_a_copy_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", 1.0)
    for links in (True, False, True):
        with monkeypatch.context() as patch:
            if not links:
                refuse_links(patch)
            write_link(tmp_path / "last", tmp_path / "a", OWNER)
        assert (tmp_path / "last").is_symlink() == links and value_of(tmp_path / "last") == 1.0
    assert hidden(tmp_path) == []


def test_a_link_does_not_take_the_place_of_a_checkpoint_but_a_checkpoint_that_of_a_link(tmp_path: Path) -> None:
    write(tmp_path / "last", 1.0)
    write(tmp_path / "a", 2.0)
    with pytest.raises(OSError, match="a checkpoint has this name"):
        write_link(tmp_path / "last", tmp_path / "a", OWNER)
    assert value_of(tmp_path / "last") == 1.0
    remove_checkpoint(tmp_path / "last", OWNER)
    write_link(tmp_path / "last", tmp_path / "a", OWNER)
    write(tmp_path / "last", 3.0)
    assert not (tmp_path / "last").is_symlink()
    assert value_of(tmp_path / "last") == 3.0 and value_of(tmp_path / "a") == 2.0 and hidden(tmp_path) == []


def test_a_copy_that_was_cut_off_is_tidied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_links(monkeypatch)
    write(tmp_path / "a", 1.0)
    write_link(tmp_path / "last", tmp_path / "a", OWNER)
    child = os.fork()
    if child == 0:
        pytest.MonkeyPatch().setattr(shutil, "copy2", lambda *arguments, **settings: os._exit(9))
        monkeypatch.setattr(shutil.copytree, "__defaults__", (False, None, shutil.copy2, False, False))
        write_link(tmp_path / "last", tmp_path / "a", OWNER)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert value_of(tmp_path / "last") == 1.0 and hidden(tmp_path) == [f".last.{OWNER}.partial"]
    tidy(tmp_path, OWNER)
    assert hidden(tmp_path) == []


# Broken ones


def damage(folder: Path, how: str) -> None:
    model, manifest = folder / "model.safetensors", folder / "manifest.json"
    told = json.loads(manifest.read_bytes())
    if how == "truncated":
        os.truncate(model, model.stat().st_size // 2)
    elif how == "tampered":
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        model.write_bytes(content)
    elif how == "missing":
        (folder / "optimizer.safetensors").unlink()
    elif how == "a folder":
        model.unlink()
        model.mkdir()
    elif how == "no manifest":
        manifest.unlink()
    elif how == "half a manifest":
        os.truncate(manifest, manifest.stat().st_size // 2)
    elif how == "a list":
        manifest.write_text("[]")
    elif how == "newer":
        manifest.write_text(json.dumps({"format": 99}))
    elif how == "no files":
        manifest.write_text(json.dumps(told | {"files": {}}))
    elif how == "odd files":
        manifest.write_text(json.dumps(told | {"files": dict.fromkeys(told["files"], 3)}))
    else:
        assert how.startswith("no ")
        manifest.write_text(json.dumps({name: value for name, value in told.items() if name != how[3:]}))


BROKEN = {
    "truncated": r"model\.safetensors is damaged: \d+ bytes instead of \d+",
    "tampered": r"model\.safetensors is damaged: its checksum",
    "missing": r"optimizer\.safetensors is missing",
    "a folder": r"model\.safetensors is damaged: \d+ bytes instead of \d+|model\.safetensors cannot be read",
    "no manifest": r"manifest\.json is missing",
    "half a manifest": r"manifest\.json cannot be read",
    "a list": r"manifest\.json holds no object but list",
    "newer": r"has format 99; this version reads up to 1",
    "no files": r"manifest\.json is damaged",
    "odd files": r"manifest\.json is damaged: it does not tell of model\.safetensors",
    "no run": r"manifest\.json is damaged",
    "no kind": r"manifest\.json is damaged",
    "no global_step": r"manifest\.json is damaged",
    "no attempt": r"manifest\.json is damaged",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_checkpoint_is_told_by_file_and_reason(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "step_3"
    write(folder, 1.0)
    check_whole(folder)
    damage(folder, how)
    with pytest.raises(CheckpointError, match=BROKEN[how]) as caught:
        check_whole(folder)
    assert str(folder) in str(caught.value)


def test_a_manifest_that_is_none_tells_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a", 1.0)
    assert read_manifest(tmp_path / "a")["global_step"] == 3
    for how in ("no run", "half a manifest", "no manifest"):
        write(tmp_path / how, 1.0)
        damage(tmp_path / how, how)
        assert read_manifest(tmp_path / how) == {}
        remove_checkpoint(tmp_path / how, OWNER)
        assert (tmp_path / how).is_dir(), "nobody knows whose it is"


def test_broken_parts_are_told_where_they_are_read(tmp_path: Path) -> None:
    filler(1.0)(tmp_path)
    (tmp_path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match="optimizer cannot be read"):
        read_state(tmp_path)
    assert read_state(tmp_path, "value") == {"value": 1.0}
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors cannot be read"):
        read_rank(tmp_path, 1)
    write_tensors(tmp_path / "rank_00001.safetensors", {"a": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors cannot be read"):
        read_rank(tmp_path, 1)
    os.truncate(tmp_path / "rank_00000.safetensors", 5)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors cannot be read"):
        read_rank(tmp_path, 0)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        read_state(tmp_path)
    with pytest.raises(CheckpointError, match=r"none\.json is missing"):
        read_json(tmp_path / "none.json")
    with pytest.raises(DataError, match="cannot be read"):
        read_tensors(tmp_path / "none.safetensors")
