"""How a run goes on from a checkpoint.

    look_up(...)             which checkpoint; before anything is built
    restore_task(run)        the weights; before the optimizers are built
    restore_training(run)    optimizers, schedulers, scaler; which parameters are frozen, which modules asleep
    restore_run(run)         counts, metrics, records, position in the data, callbacks; what has changed is told
    restore_generators(run)  last, because hooks may draw

Every rank reads: the folder lies where all machines see it.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sanctuary_trainer import finding
from sanctuary_trainer.checkpoint_folder import check_whole
from sanctuary_trainer.checkpointing import WEIGHTS, read_rank, read_state
from sanctuary_trainer.data import Start
from sanctuary_trainer.errors import CheckpointError, DataError
from sanctuary_trainer.finding import Chosen, choose
from sanctuary_trainer.hparams import flatten_hparams
from sanctuary_trainer.saving import data_facts, point_last, versions
from sanctuary_trainer.seeding import mix
from sanctuary_trainer.weights import load_weights, plain_names

if TYPE_CHECKING:
    from sanctuary_trainer.devices import Devices
    from sanctuary_trainer.run import Run

_LIGHT = ("task", "run", "progress", "metrics", "settings", "versions", "data", "modules", "rest")  # no large tensors


def load_checkpoint(task: torch.nn.Module, checkpoint: Any) -> None:
    """Give a task the weights of a checkpoint.

    Args:
        task: the task.
        checkpoint: a checkpoint's folder, a file of weights, or what `fit` returned.

    Raises:
        CheckpointError: there is none, it is broken, or another task's.
    """
    path = getattr(checkpoint, "best_checkpoint", checkpoint)
    if path is None:
        raise CheckpointError("The fit wrote no checkpoint: give a path, or test the task as it is.")
    if not isinstance(path, str | Path):
        raise CheckpointError(f"checkpoint={checkpoint!r}: a path, or what fit returned, was expected.")
    path = Path(path)
    if path.is_dir():
        check_whole(path)
        path = path / WEIGHTS
    try:
        load_weights(task, path)
    except DataError as error:
        raise CheckpointError(str(error)) from error


def look_up(
    devices: Devices, settings: Mapping[str, Any], task: str, resume: str | Path
) -> tuple[Chosen, dict[str, Any]]:
    """Which checkpoint a run goes on from, the same on all ranks, and what it tells before anything is built.

    Args:
        devices: the ranks.
        settings: the Trainer's.
        task: the qualified name of the task's class.
        resume: see `Trainer.fit`.

    Raises:
        CheckpointError: there is none where one is demanded, or it is broken or another task's.
    """
    project_dir, run_name = Path(settings["project_dir"]), settings["run_name"]
    name = task.rpartition(".")[2].lower()  # of a class in a function or a class, as in the names of run folders
    chosen: Chosen = devices.on_main(lambda: choose(resume, project_dir, run_name, name))
    if chosen.broken and devices.is_main:
        instead = f"Going on from {chosen.folder}." if chosen.folder else "Starting fresh."
        warnings.warn(f"{' '.join(chosen.broken)} {instead}", stacklevel=4)
    state: dict[str, Any] = {}
    if chosen.folder is not None:
        with devices.together():
            state = read_state(chosen.folder, *_LIGHT)
            if state.get("task") != task:
                raise CheckpointError(
                    f"{chosen.folder} is a checkpoint of {state.get('task')}, and the task is a {task}. "
                    "Only weights can go over: task.load_weights."
                )
    return chosen, state


def restore_task(run: Run) -> None:
    """The weights and buffers."""
    assert run.continued is not None
    try:
        load_weights(run.task, run.continued / WEIGHTS)
    except DataError as error:
        raise CheckpointError(f"No run of this task can go on from {run.continued}. {error}") from error


def restore_training(run: Run) -> list[str]:
    """Optimizers, schedulers, scaler; and which parameters are frozen and which modules in eval mode.

    Returns:
        What has changed in how the optimizers are configured.

    Raises:
        CheckpointError: they are others.
    """
    assert run.continued is not None and run.optimization is not None
    changed = run.optimization.load_state_dict(read_state(run.continued, "optimizer")["optimizer"])
    modules, plain = run.saved["modules"], plain_names(run.task)
    for name, parameter in run.task.named_parameters():
        parameter.requires_grad_(plain(name) not in modules["frozen"])
    for name, module in run.task.named_modules():
        module.training = plain(name) not in modules["asleep"]
    return changed


def restore_run(run: Run, changed: list[str]) -> None:
    """Counts, metrics, records, callbacks; then tell from where the run goes on, and what is not as it was.

    Raises:
        CheckpointError: the epoch cannot be continued with this data, or a part is broken.
    """
    assert run.continued is not None
    saved = run.saved
    for name, value in saved["progress"].items():
        setattr(run.state, name, value)
    rest = saved["rest"]
    run.metrics.update(saved["metrics"])
    run.progress_metrics.update(rest["progress_metrics"])
    run.validated, run.monitors_checked = rest["validated"], rest["monitors_checked"]
    run.owes_evaluation, run.owes_epoch_end, run.owes_saves = rest["owes"]
    former = saved["data"]["ranks"]
    mine = [run.rank] if former == run.world_size else list(range(run.rank, former, run.world_size))
    parts = {rank: read_rank(run.continued, rank) for rank in dict.fromkeys([0, *mine])}
    run.records.load_state_dict([parts[rank]["records"] for rank in mine])
    run.recovery.learned.load_state_dict([parts[rank]["recovery"] for rank in mine or [0]], events=bool(mine))
    run.reached = parts[mine[0] if former == run.world_size else 0]["reached"]
    _place_in_epoch(run)
    run.generators = parts[run.rank]["generators"] if former == run.world_size else None
    _check_schedulers(run)
    _restore_callbacks(run)
    _tell(run, changed)


def begin_attempt(run: Run) -> None:
    """From here on the run is this attempt's: files are cut and the trackers opened, since nothing refused the run."""
    assert run.run_dir is not None and run.tracking is not None
    with run.devices.together():
        if run.is_main:
            finding.begin_attempt(run.run_dir, run.run_id, run.state.global_step)
            own = {path.resolve() for path in run.checkpoints}
            if run.continued is not None and run.continued in own and run.saved["rest"]["is_last"]:
                point_last(run, run.continued)  # the run may have been cut off before it did
        run.tracking.open()


def restore_generators(run: Run) -> None:
    """Python's, numpy's and torch's; on another number of ranks each is seeded from its rank and the step."""
    saved = run.generators
    if saved is None:
        seed = mix(run.seed, run.state.epoch, run.state.global_step, run.world_size, run.rank)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        return
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.default_generator.set_state(saved["torch"])
    if saved["device"] is not None and run.device.type != "cpu":
        torch.get_device_module(run.device).set_rng_state(saved["device"])
    run.generators = None


def _check_schedulers(run: Run) -> None:
    """One that was made for a number of steps (OneCycleLR) fails after them: better before the run than then."""
    assert run.optimization is not None
    left = run.plan.steps_left(run.state)
    for schedule in run.optimization.schedules:
        most, made = getattr(schedule.scheduler, "total_steps", None), getattr(schedule.scheduler, "last_epoch", 0)
        wanted = made + (left or 0) // schedule.frequency
        if isinstance(most, int) and schedule.interval == "step" and wanted > most:
            raise CheckpointError(
                f"{type(schedule.scheduler).__name__} was made for {most} steps, and the run would come to {wanted}. "
                "Keep limits, ranks and batch size as they were, or begin anew from the weights: task.load_weights."
            )


def _restore_callbacks(run: Run) -> None:
    assert run.continued is not None
    states = read_state(run.continued, "callbacks")["callbacks"]
    for callback in run.callbacks:
        if callback.state_key in states:
            callback.load_state_dict(states.pop(callback.state_key))
        elif callback.state_dict():
            run.warn(f"{callback.state_key} has no state in {run.continued}: it starts fresh.")
    for key in states:
        run.warn(f"{run.continued} has a state of {key}, and no callback of this run takes it.")


def _place_in_epoch(run: Run) -> None:
    """Count the rounds of a begun epoch anew where its rest is dealt otherwise than its beginning."""
    assert run.train_loader is not None
    state, plan, loader, before, now = run.state, run.plan, run.train_loader, run.saved["data"], data_facts(run)
    begun = state.batch or state.samples
    if not begun or all(before[name] == now[name] for name in now if name != "gradient_accumulation_steps"):
        return
    samples = loader.num_samples
    if samples is not None and state.samples > samples:
        raise CheckpointError(
            f"{run.continued} lies {state.samples} samples into an epoch, which now has {samples}. "
            "Go on with the former data, or from the end of an epoch."
        )
    done = -(-state.batch * before["ranks"] // now["ranks"])
    if samples is not None and loader.batch_size is not None:
        done = -(-state.samples // (loader.batch_size * now["ranks"]))
    if plan.rounds is None:
        state.batch = done
        return
    left = loader.rounds_left(state.epoch, Start(state.samples, state.batch, run.reached))
    limited = max(0, plan.rounds - done)
    state.batch = plan.rounds - (limited if left is None or plan.rounds != loader.num_rounds else left)


def _tell(run: Run, changed: list[str]) -> None:
    """Say from where the run goes on, and warn of what is not as it was and changes what it computes."""
    state, saved = run.state, run.saved
    place = f", {state.samples} samples into it" if state.samples else ""
    run.message(f"Going on from {run.continued}: step {state.global_step}, epoch {state.epoch}{place}.")
    before, now = saved["data"], data_facts(run)
    found = [f"{name} {before[name]} -> {now[name]}" for name in now if before[name] != now[name]]
    was, is_now = (_samples_of_a_step(facts) for facts in (before, now))
    if was != is_now:
        found.append(f"samples of a step {was} -> {is_now}")
    if before["data set length"] != now["data set length"] and state.samples:
        found.append("the rest of this epoch is of another order, so that samples may come twice or not at all")
    if run.settings["seed"] not in (None, run.seed):
        found.append(f"seed {run.seed} -> {run.settings['seed']} (the run goes on with {run.seed})")
    if found := [*found, *changed]:
        run.warn(f"Changed since the checkpoint: {'; '.join(found)}.")
    settings = flatten_hparams(run.hparams["trainer"])
    apart = ("seed", "ranks", "gradient_accumulation_steps", "project_dir", "run_name")
    others = [
        f"{name} {there[name]} -> {here[name]}"
        for there, here in ((saved["settings"], settings), (saved["versions"], versions()))
        for name in here
        if name in there and there[name] != here[name] and name not in apart
    ]
    if others:
        run.message(f"Other settings than at the checkpoint: {'; '.join(others)}.")


def _samples_of_a_step(facts: Mapping[str, Any]) -> int | None:
    size = facts["batch size"]
    return None if size is None else facts["ranks"] * size * facts["gradient_accumulation_steps"]
