"""Checkpoints of several ranks: one writes, all decide alike and wait; one that dies leaves the former checkpoint."""

from __future__ import annotations

import errno
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sanctuary_trainer import Callback, Run, SanctuaryError
from sanctuary_trainer.callbacks import Checkpoint
from sanctuary_trainer.checkpoint_folder import check_whole, read_manifest
from sanctuary_trainer.checkpointing import read_tensors
from sanctuary_trainer.weights import load_weights, save_weights
from tests.callbacks.test_checkpoint import Clock, Scripted, Ticks, best, check_several_verbs, left, several_verbs, w_of
from tests.distributed.workers import Ranks
from tests.small_tasks import Line, Net, classes, floats, loader, quiet_trainer, weights
from tests.test_checkpointing import hidden, small_disk, visible


def fit(*callbacks: Callback, task: Any = None, resume: Any = None, values: Any = (4, 3, 2, 1), **settings: Any) -> Any:
    """Fits on 2 steps an epoch, as many epochs as there are values."""
    task = Scripted(values) if task is None else task
    defaults: dict[str, Any] = {"max_epochs": len(values), "run_name": "run", "callbacks": callbacks, "timeout": 30}
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    data = loader(floats([1] * 2 * ranks), 1)
    return quiet_trainer(**{**defaults, **settings}).fit(task, data, data, resume=resume)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def on_rank(number: int, change: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Patches something for good: the process of a rank lives for one call."""
    if rank() == number:
        change(pytest.MonkeyPatch())


def caught(call: Callable[[], Any]) -> tuple[str, list[str]]:
    """What was raised, and what was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            call()
            raised = ""
        except (SanctuaryError, KeyError) as error:
            raised = f"{type(error).__name__}: {error}"
    return raised, [str(each.message) for each in told if "checkpoint" in str(each.message)]


# All decide alike


def fit_and_look(**settings: Any) -> Any:
    checkpoint = best(**settings)
    result = fit(checkpoint)
    assert result.best_checkpoint is not None
    there = result.best_checkpoint.is_dir()
    return str(result.best_checkpoint), there, visible(result.best_checkpoint.parent), checkpoint.state_dict()


@pytest.mark.parametrize("name", ["step_{step:08d}", "best", "val/acc {val/acc}"])
def test_ranks_agree_on_the_best_and_it_is_there_when_fit_returns(two_ranks: Ranks, name: str) -> None:
    first, second = two_ranks(fit_and_look, name=name)
    assert first == second
    path, there, names, state = first
    assert there and names == [Path(path).name] and w_of(Path(path)) == -8
    assert state["ranked"] == [(Path("checkpoints", names[0]), 8, 1.0)]


def fit_in_a_shared_folder(folder: str) -> Any:
    found = []
    for number in (1, 2):
        checkpoint = best(folder=folder, name="best", save_top_k=2)
        result = fit(checkpoint, run_name=f"run-{number}", values=[1, 3, 2])
        found.append((str(result.best_checkpoint), [entry.path.name for entry in checkpoint.kept]))
    checkpoint = best(folder=folder, name="best", save_top_k=2)
    result = fit(checkpoint, run_name="run-2", values=[1, 3, 2, 0], resume="auto")
    return [*found, (str(result.best_checkpoint), [entry.path.name for entry in checkpoint.kept])]


def test_ranks_agree_on_a_name_that_only_rank_0_can_choose(two_ranks: Ranks, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    first, second = two_ranks(fit_in_a_shared_folder, str(shared))
    assert first == second
    owners = {name: read_manifest(shared / name)["run"] for name in visible(shared)}
    ids = [owners[Path(path).name] for path, _ in first]
    assert ids[0] != ids[1] == ids[2]
    assert w_of(Path(first[0][0])) == -2 and w_of(Path(first[2][0])) == -8
    assert [sum(owner == each for owner in owners.values()) for each in ids[:2]] == [2, 2]


def every_by_the_clock(ahead: list[float]) -> Any:
    """Each rank's clock goes at its own speed: so many seconds a step."""

    class Fast(Ticks):
        def on_train_step_end(self, run: Run) -> None:
            self.clock.now += ahead[rank()]

    checkpoint = Checkpoint(every=3, save_top_k=-1)
    clock = Clock(pytest.MonkeyPatch())
    fit(Fast(clock), checkpoint, values=[0] * 6)
    return [entry.step for entry in checkpoint.kept]


@pytest.mark.parametrize(("ahead", "steps"), [([1, 100], [12, 8, 4]), ([1, 0], [12, 8, 4]), ([0, 100], [12])])
def test_the_clock_of_rank_0_alone_decides_and_all_save_at_the_same_step(
    two_ranks: Ranks, ahead: list[float], steps: list[int]
) -> None:
    assert two_ranks(every_by_the_clock, ahead) == [steps, steps]
    assert left() == sorted(steps)


# All wait


class Times(Callback):
    """Asks for a checkpoint, and keeps how long it took until this rank heard that it is complete, and if it is."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.whole: list[bool] = []

    def on_save_point(self, run: Run) -> None:
        began = time.monotonic()

        def done(path: Path | None, failure: str | None) -> None:
            self.seconds.append(time.monotonic() - began)
            assert path is not None
            check_whole(path)
            self.whole.append(hidden(path.parent) == [])

        if run.state.batch == 0:
            run.save_checkpoint("mine/only", done=done)


def slow_write() -> Any:
    import sanctuary_trainer.saving as saving

    write = saving.write_checkpoint

    def slowly(folder: Path, owner: str, about: Any, fill: Any) -> None:
        def filling(inner: Path) -> None:
            fill(inner)
            time.sleep(2)

        write(folder, owner, about, filling)

    on_rank(0, lambda patch: patch.setattr(saving, "write_checkpoint", slowly))
    times = Times()
    fit(times, values=[1, 2])
    return times.seconds, times.whole


def test_no_rank_goes_on_before_a_slow_write_is_complete(two_ranks: Ranks) -> None:
    for seconds, whole in two_ranks(slow_write):
        assert len(seconds) == 2 and min(seconds) >= 2
        assert whole == [True, True]


def load_blindly(path: str, blind: int) -> Any:
    def close_its_eyes(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(os.path, "exists", lambda path: False)
        patch.setattr(Path, "exists", lambda path: False)
        patch.setattr(Path, "is_file", lambda path: False)

    on_rank(blind, close_its_eyes)
    found = [caught(partial(fit, Checkpoint(), resume=resume, values=[0] * 3))[0] for resume in (path, "auto")]
    task = Line()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tested = caught(lambda: quiet_trainer().test(task, loader(floats([1]), 1), checkpoint=path))[0]
    return [*found, tested], task.w.item()


@pytest.mark.parametrize("blind", [0, 1])
def test_what_one_rank_does_not_see_fails_on_all_or_on_none(two_ranks: Ranks, one_rank: Ranks, blind: int) -> None:
    one_rank(fit, Checkpoint(), values=[0] * 2)
    (first, w), (second, w_too) = two_ranks(load_blindly, "runs/run/checkpoints/step_00000004", blind)
    assert [bool(text) for text in first] == [bool(text) for text in second]
    assert w == w_too


# What goes wrong


def fail_to_write(kind: str, last: bool) -> Any:
    import sanctuary_trainer.saving as saving

    write = saving.write_checkpoint
    error = OSError(errno.ENOSPC, "No space left on device") if kind == "system" else KeyError("odd")

    def failing(folder: Path, owner: str, about: Any, fill: Any) -> None:
        if about["epoch"] == (3 if last else 2):
            raise error
        write(folder, owner, about, fill)

    on_rank(0, lambda patch: patch.setattr(saving, "write_checkpoint", failing))
    checkpoint = Checkpoint(on_exception=False)
    raised, told = caught(lambda: fit(checkpoint, values=[0] * 3))
    return raised, told, [entry.step for entry in checkpoint.kept]


def test_a_write_that_fails_on_rank_0_is_known_to_all(two_ranks: Ranks) -> None:
    (first, told, kept), (second, silent, kept_too) = two_ranks(fail_to_write, "system", last=False)
    assert first == second == "" and len(told) == 1 and silent == [] and kept == kept_too == [6]
    assert "No space left on device. The checkpoints before stay." in told[0]


def test_a_last_write_that_fails_is_an_error_on_every_rank(two_ranks: Ranks) -> None:
    for raised, told, kept in two_ranks(fail_to_write, "system", last=True):
        assert raised.startswith("CheckpointError: The run's last checkpoint could not be written. ")
        assert "No space left on device" in raised and told == [] and kept == [4]
    assert left() == [4]


@pytest.mark.parametrize("last", [True, False])
def test_an_exception_in_a_write_reaches_all_ranks(two_ranks: Ranks, last: bool) -> None:
    (first, *_), (second, *_) = two_ranks(fail_to_write, "odd", last=last)
    assert first == "KeyError: 'odd'"
    assert second.startswith("RankError") and "rank 0: KeyError: 'odd'" in second
    assert left() == [4 if last else 2]


def fill_the_disk(disk: str) -> Any:
    task = Scripted([0] * 3)
    task.register_buffer("load", torch.zeros(50_000, dtype=torch.float64))
    checkpoint = Checkpoint(folder=disk)
    raised, told = caught(lambda: fit(checkpoint, task=task, values=[0] * 3))
    return raised, told, [entry.step for entry in checkpoint.kept]


def test_a_disk_that_is_full_for_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "700k") as disk:
        results = two_ranks(fill_the_disk, str(disk))
        for number, (raised, told, kept) in enumerate(results):
            assert raised.startswith("CheckpointError: The run's last") and "no space left" in raised.lower()
            assert kept == [2] and len(told) == (1 if number == 0 else 0)
        assert left(disk) == [2]


def without_permission(folder: str) -> Any:
    """As a user who may not write there after step 3; root may everywhere."""

    class Forbids(Callback):
        def on_train_step_end(self, run: Run) -> None:
            if run.state.global_step == 3:
                os.chmod(folder, 0o555)

    checkpoint = Checkpoint(folder=folder)
    root = os.geteuid() == 0
    if root:
        os.chmod(folder, 0o777)
        os.chown(folder, 65534, -1)
        os.seteuid(65534)
    try:
        os.chdir(Path(folder).parent)
        raised, told = caught(lambda: fit(checkpoint, Forbids(), values=[0] * 3))
        os.chmod(folder, 0o777)
    finally:
        if root:
            os.seteuid(0)
    return raised, told, [entry.step for entry in checkpoint.kept]


def test_a_folder_where_writing_is_not_permitted_any_more(one_rank: Ranks) -> None:
    with tempfile.TemporaryDirectory() as outer:
        os.chmod(outer, 0o777)
        folder = Path(outer, "checkpoints")
        folder.mkdir()
        ((raised, told, kept),) = one_rank(without_permission, str(folder))
        assert raised.startswith("CheckpointError: The run's last") and "Permission denied" in raised
        assert len(told) == 1 and "Permission denied" in told[0] and kept == [2]
        assert left(folder) == [2]


# Killed


def die_in_a_write(at: str, epoch: int, name: str) -> None:
    """Fits; in the save point of that epoch rank 0 dies in the middle of it."""
    import sanctuary_trainer.checkpoint_folder as checkpoint_folder
    import sanctuary_trainer.saving as saving

    save, put = saving.save_weights, checkpoint_folder._put

    def dying_save(module: nn.Module, path: Path, **settings: Any) -> None:
        save(module, path, **settings)
        if module.run.state.epoch == epoch and at == "half a file":  # type: ignore[union-attr]
            os.truncate(path, path.stat().st_size // 2)
            os._exit(9)

    def dying_put(beside: Path, folder: Path, former: Path) -> None:
        if checkpoint_folder.read_manifest(beside)["epoch"] != epoch:
            return put(beside, folder, former)
        if at == "before":
            os._exit(9)
        if at == "between" and folder.exists():
            os.rename(folder, former)
            os._exit(9)
        put(beside, folder, former)
        os._exit(9)

    on_rank(0, lambda patch: patch.setattr(saving, "save_weights", dying_save))
    on_rank(0, lambda patch: patch.setattr(checkpoint_folder, "_put", dying_put))
    fit(Checkpoint(name=name), values=[0] * 4)


def go_on(name: str, resume: Any) -> Any:
    task, checkpoint = Scripted([0] * 4), Checkpoint(name=name)
    raised, told = caught(lambda: fit(checkpoint, task=task, values=[0] * 4, resume=resume))
    assert raised == ""
    return len(task.steps), told, [entry.path.name for entry in checkpoint.kept]


@pytest.mark.parametrize("name", ["last", "step_{step:08d}"])
@pytest.mark.parametrize("at", ["half a file", "before", "between", "after"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_killed_in_a_write_goes_on_from_the_checkpoint_before(
    one_rank: Ranks, two_ranks: Ranks, ranks: int, at: str, name: str
) -> None:
    group = {1: one_rank, 2: two_ranks}[ranks]
    outcomes = group.outcomes(die_in_a_write, at, 3, name)
    assert outcomes[0].error == "left with exit status 9 and no outcome"
    assert all(outcome.error and "hung" not in outcome.error for outcome in outcomes)
    folder = Path("runs/run/checkpoints")
    for path in folder.iterdir():
        if not path.name.startswith("."):
            check_whole(path)
    (folder / ".step_00000009.ba9876543210.partial").mkdir()  # another run's
    complete = at == "after" or (at == "between" and name != "last")
    for steps, told, kept in group(go_on, name, "last"):
        assert told == [] and steps == (2 if complete else 4)
        assert kept == ["last" if name == "last" else "step_00000008"]
    assert hidden(folder) == [".step_00000009.ba9876543210.partial"]
    (folder / ".step_00000009.ba9876543210.partial").rmdir()
    assert left() == [8]


# What is wrapped around a module


class Wrapped(Net):
    """A network that is compiled, or whose first layer is."""

    def __init__(self, which: str) -> None:
        super().__init__(seed=7)
        if which == "whole":
            self.net: Any = torch.compile(self.net, backend="eager")
        elif which == "a layer":
            self.net[0] = torch.compile(self.net[0], backend="eager")


def fit_wrapped(which: str, resume: Any, **settings: Any) -> Any:
    task = Wrapped(which)
    data = loader(classes(16), 4)
    settings = {"max_epochs": 1, "run_name": "run", "seed": 3, "callbacks": [Checkpoint(save_top_k=-1)], **settings}
    result = quiet_trainer(**settings).fit(task, data, data, resume=resume)
    assert result.best_checkpoint is not None
    fresh = Wrapped(which)
    fresh.load_weights(result.best_checkpoint / "model.safetensors")
    assert torch.equal(weights(fresh), weights(task))
    return sorted(read_tensors(result.best_checkpoint / "model.safetensors")[0]), weights(task)


@pytest.mark.parametrize("which", ["nothing", "whole", "a layer"])
def test_keys_carry_no_wrappers_name_whatever_the_ranks_wrap(two_ranks: Ranks, one_rank: Ranks, which: str) -> None:
    expected = ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]
    for keys, found in two_ranks(fit_wrapped, which, None):
        assert keys == expected
        plain = Net()
        (path,) = Path("runs/run/checkpoints").iterdir()
        assert plain.load_weights(path / "model.safetensors") == []
        assert torch.equal(weights(plain), found)


def wrap_in_ddp(folder: str) -> list[str]:
    quiet_trainer().validate(Net(), loader(classes(4)))  # which connects the ranks
    path = Path(folder, f"{rank()}.safetensors")
    first, second = Net(seed=1), Net(seed=2)
    wrapped = nn.parallel.DistributedDataParallel(nn.ModuleDict({"task": first}))
    save_weights(wrapped, path)
    assert load_weights(nn.ModuleDict({"task": second}), path) == [] and torch.equal(weights(first), weights(second))
    save_weights(nn.ModuleDict({"task": Net(seed=3)}), path)
    assert load_weights(wrapped, path) == [] and torch.equal(weights(first), weights(Net(seed=3)))
    return sorted(read_tensors(path)[0])


def test_a_module_in_ddp_has_its_own_keys_both_ways(two_ranks: Ranks, tmp_path: Path) -> None:
    expected = [f"task.net.{layer}.{name}" for layer in (0, 2) for name in ("bias", "weight")]
    assert two_ranks(wrap_in_ddp, str(tmp_path)) == [expected, expected]


# Several verbs


def test_several_verbs_on_two_ranks_leave_one_of_everything(two_ranks: Ranks) -> None:
    (first, hooks, found), (second, hooks_too, found_too) = two_ranks(several_verbs)
    assert first == second and hooks == hooks_too and torch.equal(found, found_too)
    check_several_verbs(first, hooks, steps=2)
