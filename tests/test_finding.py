"""Which checkpoint a run goes on from: the newest whole one of its own branch, or the one that was named."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from sanctuary_trainer import CheckpointError, RunFolderError
from sanctuary_trainer.callbacks import Checkpoint
from sanctuary_trainer.finding import Chosen, begin_attempt, choose, free_name, look_at_run, newest_run, note_folder
from tests.small_tasks import Line, floats, loader, quiet_trainer
from tests.test_checkpointing import OTHER, hidden, visible, write

FOLDER = Path("runs/line-1")
CHECKPOINTS = FOLDER / "checkpoints"


def fit(steps: int, resume: Any = None, every: int = 2, keep: int = -1, task: Any = None, **settings: Any) -> Any:
    """Fits to so many steps of one sample each, 3 an epoch; a checkpoint every 2 and at the end."""
    task = Line(learning_rate=1.0) if task is None else task
    checkpoint = settings.pop("checkpoint", None) or Checkpoint(every_n_steps=every, save_top_k=keep)
    trainer = quiet_trainer(**{"max_steps": steps, "max_epochs": 99, "callbacks": [checkpoint], "seed": 0, **settings})
    return trainer.fit(task, loader(floats([1, 2, 4]), 1), resume=resume)


def stop(*arguments: Any) -> None:
    raise ValueError("soon")


def seen(steps: int, resume: Any, **settings: Any) -> tuple[int, list[str]]:
    """How many steps are made to come to so many, and what is warned of."""
    task = Line()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(steps, resume, task=task, **settings)
    assert result.global_step == steps
    return len(task.steps), [str(each.message) for each in caught]


def step(number: int, folder: Path = CHECKPOINTS) -> Path:
    return folder / f"step_{number:08d}"


def chosen(resume: Any = "auto", name: str | None = "line-1") -> Chosen:
    return choose(resume, Path("runs"), name, "line")


# The newest whole one


def test_auto_takes_the_newest_of_this_tasks_newest_run() -> None:
    fit(2)
    fit(6)
    fit(3, run_name="other")
    assert newest_run(Path("runs"), "line") == Path("runs/line-2")
    found = chosen(name=None)
    assert found.folder == step(6, Path("runs/line-2/checkpoints")).resolve() and found.broken == []
    assert found.run_dir == Path("runs/line-2")
    made, told = seen(8, "auto")
    assert made == 2 and told == []
    assert visible(Path("runs")) == ["line-1", "line-2", "other"]


def test_a_task_defined_inside_a_function_finds_its_runs() -> None:
    class Inner(Line):
        pass

    fit(2, task=Inner())
    assert fit(4, "last", task=Inner()).run_dir == Path("runs/inner-1")


def test_auto_starts_fresh_where_there_is_none_and_last_demands_one() -> None:
    with pytest.raises(CheckpointError, match=r'resume="last" found no whole checkpoint in runs/line-\*'):
        fit(2, "last")
    with pytest.raises(CheckpointError, match=r'resume="last" found no whole checkpoint in runs/mine'):
        fit(2, "last", run_name="mine")
    assert not Path("runs").exists()
    made, told = seen(4, "auto", run_name="mine")
    assert made == 4 and told == []
    assert seen(6, "last", run_name="mine") == (2, [])


def test_auto_goes_on_in_the_folder_of_a_run_that_saved_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Line, "training_step", stop)
        with pytest.raises(ValueError, match="soon"):
            fit(4, run_name="mine")
    assert visible(Path("runs/mine/checkpoints")) == []
    assert seen(4, "auto", run_name="mine") == (4, [])
    with pytest.raises(RunFolderError, match="not empty"):
        fit(4, run_name="mine")


DAMAGES = ["truncated weights", "missing optimizer", "tampered state", "no manifest", "half a manifest", "only a state"]


def damage(folder: Path, how: str) -> str:
    """Breaks a checkpoint; returns the name of the file that is to be told."""
    if how == "truncated weights":
        os.truncate(folder / "model.safetensors", 10)
        return "model.safetensors"
    if how == "missing optimizer":
        (folder / "rank_00000.safetensors").unlink()
        return "rank_00000.safetensors"
    if how == "tampered state":
        content = (folder / "state.json").read_bytes()
        (folder / "state.json").write_bytes(content.replace(b'"global_step"', b'"global_ctep"'))
        return "state.json"
    if how == "only a state":
        for path in list(folder.iterdir()):
            if path.name != "state.json":
                path.unlink()
    elif how == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        os.truncate(folder / "manifest.json", 100)
    return "manifest.json"


@pytest.mark.parametrize("how", DAMAGES)
def test_auto_passes_over_a_broken_checkpoint_with_one_warning(how: str) -> None:
    fit(6)
    file = damage(step(6), how)
    for resume in ("auto", "last", FOLDER, CHECKPOINTS, str(FOLDER)):
        shutil.copytree("runs", "kept")
        made, told = seen(8, resume)
        assert made == 4, resume
        assert len(told) == 1 and str(step(6)) in told[0] and file in told[0] and "step_00000004" in told[0]
        shutil.rmtree("runs")
        Path("kept").rename("runs")
    with pytest.raises(CheckpointError, match=file) as caught:
        fit(8, step(6))
    assert str(step(6)) in str(caught.value)


def test_all_broken_ones_are_told_in_one_warning_and_the_run_starts_fresh() -> None:
    fit(4)
    files = [damage(step(2), "missing optimizer"), damage(step(4), "no manifest")]
    with pytest.raises(CheckpointError, match="Broken: ") as caught:
        fit(4, "last")
    assert all(file in str(caught.value) for file in files)
    with pytest.raises(CheckpointError, match=r"it is no checkpoint, and holds no whole one\. Broken: "):
        fit(4, FOLDER)
    made, told = seen(4, "auto")
    assert made == 4 and len(told) == 1 and all(file in told[0] for file in files) and "Starting fresh" in told[0]


def test_what_is_no_checkpoint_is_not_told_of() -> None:
    fit(2)
    for folder in (FOLDER / "final", CHECKPOINTS / "exported"):
        folder.mkdir()
        (folder / "model.safetensors").touch()  # as save_pretrained leaves it
    (CHECKPOINTS / ".hidden").mkdir()
    (CHECKPOINTS / ".hidden" / "state.json").touch()
    (CHECKPOINTS / "a file").touch()
    assert chosen() == Chosen(step(2).resolve(), FOLDER, [])


def test_checkpoints_without_a_manifest_are_ordered_by_the_number_in_their_name() -> None:
    fit(6)
    damage(step(2), "no manifest")
    assert chosen().broken == []
    damage(step(6), "no manifest")
    assert len(chosen().broken) == 1 and chosen().folder == step(4).resolve()


# One that is named


def test_a_path_demands_that_one() -> None:
    fit(6)
    assert seen(6, step(4)) == (2, [])
    with pytest.raises(CheckpointError, match=r"resume='runs/line-1/checkpoints/none': there is no such folder"):
        fit(6, CHECKPOINTS / "none")
    Path("empty").mkdir()
    with pytest.raises(CheckpointError, match="resume='empty': it is no checkpoint, and holds no whole one"):
        fit(6, Path("empty"))


def test_bare_weights_are_refused_by_name_and_passed_over_by_auto() -> None:
    fit(4, checkpoint=Checkpoint(weights_only=True, every_n_steps=2, save_top_k=-1))
    with pytest.raises(CheckpointError, match=r"holds weights only.*task\.load_weights"):
        fit(6, step(4))
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        fit(6, "last")
    assert seen(6, "auto") == (6, [])


def test_a_link_and_a_moved_folder_are_followed() -> None:
    fit(4, checkpoint=Checkpoint(every_n_steps=2, save_last=True))
    assert seen(6, CHECKPOINTS / "last", checkpoint=Checkpoint(every_n_steps=2, save_last=True)) == (2, [])
    Path("runs").rename("moved")
    assert seen(8, "last", project_dir="moved", checkpoint=Checkpoint(every_n_steps=2, save_last=True)) == (2, [])
    assert visible(Path("moved/line-1/checkpoints")) == ["last", "step_00000008"]


def test_another_name_starts_a_run_of_its_own_from_it() -> None:
    fit(4)
    result = fit(6, step(4), run_name="second")
    assert result.run_dir == Path("runs/second")
    assert visible(CHECKPOINTS) == ["step_00000002", "step_00000004"]
    assert visible(Path("runs/second/checkpoints")) == ["step_00000006"]
    ids = [json.loads((run / "run.json").read_bytes())["id"] for run in (FOLDER, Path("runs/second"))]
    assert ids[0] != ids[1]
    assert seen(8, "auto", run_name="second") == (2, [])


def test_a_run_goes_on_from_a_folder_elsewhere(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    checkpoint = Checkpoint(folder=shared, every_n_steps=2, save_top_k=-1)
    fit(4, checkpoint=checkpoint)
    for number, resume in enumerate(("auto", shared, shared / "step_00000004", FOLDER)):
        result = fit(6 + 2 * number, resume, checkpoint=checkpoint)
        assert result.run_dir.resolve() == FOLDER.resolve(), resume
        assert result.best_checkpoint == step(6 + 2 * number, shared)


# Branches


def test_abandoned_checkpoints_are_not_taken() -> None:
    fit(6)
    assert seen(3, step(2)) == (1, [])  # goes back, and saves its end, step 3
    assert visible(CHECKPOINTS) == [f"step_0000000{n}" for n in (2, 3, 4, 6)]
    for resume in ("auto", "last", FOLDER, CHECKPOINTS):
        assert choose(resume, Path("runs"), "line-1", "line").folder == step(3).resolve(), resume
    assert seen(6, "auto") == (3, [])
    assert chosen().folder == step(6).resolve()
    assert seen(8, "auto") == (2, [])


def test_an_attempt_that_saved_nothing_leaves_its_start_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    fit(6)
    with monkeypatch.context() as patch:
        patch.setattr(Line, "training_step", stop)
        with pytest.raises(ValueError, match="soon"):
            fit(8, step(2))
    assert chosen().folder == step(2).resolve()
    damage(step(2), "missing optimizer")
    assert chosen().folder is None


def test_a_fresh_start_abandons_all_before_it() -> None:
    fit(4)
    for number in (2, 4):
        damage(step(number), "missing optimizer")
    seen(2, "auto")
    assert chosen().folder == step(2).resolve()
    assert [entry["starts"] for entry in [json.loads((FOLDER / "run.json").read_bytes())]] == [[0, 0]]


# run.json


def test_an_attempt_is_noted_and_what_is_there_is_told(tmp_path: Path) -> None:
    run_id, attempt, there = look_at_run(tmp_path, None, {})
    assert attempt == 0 and there == {}
    assert list(tmp_path.iterdir()) == []
    begin_attempt(tmp_path, run_id, 0)
    shared = tmp_path.parent / "shared"
    for folder in (tmp_path / "checkpoints", tmp_path / "b", shared):
        note_folder(tmp_path, folder)
        note_folder(tmp_path, folder)
        write(folder / "mine", 1.0, run_id)
        write(folder / "theirs", 1.0, OTHER)
        for owner in (run_id, OTHER):
            (folder / f".x.{owner}.partial").mkdir()
    (tmp_path / ".run.json.17.partial").touch()
    again, attempt, there = look_at_run(tmp_path, None, {})
    begin_attempt(tmp_path, again, 7)
    assert (again, attempt) == (run_id, 1)
    assert there == {folder / "mine": 3 for folder in (tmp_path / "checkpoints", tmp_path / "b", shared)}
    assert json.loads((tmp_path / "run.json").read_bytes()) == {
        "id": run_id,
        "starts": [0, 7],
        "folders": ["checkpoints", "b", str(shared)],
    }
    assert hidden(tmp_path) == []
    assert all(hidden(folder) == [f".x.{OTHER}.partial"] for folder in (tmp_path / "checkpoints", shared))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"id": 3}'])
def test_a_broken_run_json_is_replaced(tmp_path: Path, content: str) -> None:
    fit(4)
    (FOLDER / "run.json").write_text(content)
    assert seen(6, "auto") == (2, [])
    assert seen(8, "auto") == (2, [])


def test_a_name_that_another_run_has_gets_a_number(tmp_path: Path) -> None:
    write(tmp_path / "best", 1.0, OTHER)
    assert free_name(tmp_path / "best", "me") == tmp_path / "best-2"
    write(tmp_path / "best-2", 1.0, "me")
    (tmp_path / "best-3").mkdir()
    assert free_name(tmp_path / "best", "me") == tmp_path / "best-2"
    assert free_name(tmp_path / "best-3", "me") == tmp_path / "best-3-2"
    assert free_name(tmp_path / "new", "me") == tmp_path / "new"


def test_a_former_checkpoint_is_found_again_before_the_run_looks_for_one() -> None:
    """A process was killed when the former one had no name any more and the new one not yet."""
    fit(4, keep=1)
    run_id = json.loads((FOLDER / "run.json").read_bytes())["id"]
    hidden_name = CHECKPOINTS / f".step_00000004.{run_id}.former"
    for resume in ("auto", "last", step(4), FOLDER, CHECKPOINTS):
        step(4).rename(hidden_name)
        assert choose(resume, Path("runs"), "line-1", "line").folder == step(4).resolve(), resume
        assert hidden(CHECKPOINTS) == []


def test_a_start_that_was_killed_at_once_is_no_other_run() -> None:
    folder = Path("runs/run")
    folder.mkdir(parents=True)
    (folder / ".run.json.17.partial").touch()
    assert seen(2, "auto", run_name="run") == (2, [])
    for path in [*folder.iterdir()]:  # killed when its first file was there
        if path.name != "run.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "checkpoints").mkdir()
    assert seen(2, "auto", run_name="run") == (2, [])


def test_a_link_that_was_cut_off_is_made_when_the_run_goes_on() -> None:
    fit(2, None, callbacks=[Checkpoint(save_last=True)])
    link = CHECKPOINTS / "last"
    link.unlink()
    link.symlink_to("step_00000001")  # of one that is gone
    fit(2, "auto", callbacks=[Checkpoint(save_last=True)])
    assert link.resolve() == step(2).resolve()
