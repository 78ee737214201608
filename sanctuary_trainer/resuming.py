"""What a checkpoint holds of a run, and how a run takes it back.

    write_requested(run)             at a save point: each rank's own part is gathered, rank 0 writes

    look_up(...)                     a run is to be continued: which checkpoint; before anything is built
    restore_task(run)                the weights; before the optimizers are built
    restore_training(run)            optimizers, schedulers, scaler; which parameters are frozen, which modules asleep
    restore_run(run)                 counts, metrics, records, position in the data, callbacks; what has changed is told
    restore_generators(run)          last, because hooks may draw

Only rank 0 writes, and every rank reads: the folder lies where all machines see it.
"""

from __future__ import annotations

import platform
import random
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sanctuary_trainer.checkpoint_folder import check_whole, write_checkpoint, write_link
from sanctuary_trainer.checkpointing import WEIGHTS, encode, rank_file, read_rank, read_state, write_rank, write_state
from sanctuary_trainer.data import Start
from sanctuary_trainer.errors import CheckpointError, DataError
from sanctuary_trainer.finding import Chosen, choose, free_name, note_folder
from sanctuary_trainer.hparams import flatten_hparams
from sanctuary_trainer.seeding import mix
from sanctuary_trainer.weights import load_weights, plain_names, save_weights, unwrapped

if TYPE_CHECKING:
    from sanctuary_trainer.devices import Devices
    from sanctuary_trainer.run import Request, Run


_LIGHT = ("task", "run", "progress", "metrics", "settings", "versions", "data", "modules", "rest")  # no large tensors


# Writing


def write_requested(run: Run) -> None:
    """Write the checkpoints that were asked for, on all ranks together; none goes on before they are complete.

    Those from which a run can go on come last: they know of the others, which callbacks have taken note of by then.

    Raises:
        CheckpointError: one could not be written and the run ends here; on every rank.
    """
    requests, run.requests = run.requests, []
    with run.devices.together():
        own = rank_file(_rank_state(run))
    ranks = run.devices.gather_objects(own)
    folders = dict.fromkeys(request.folder for request in requests)
    groups = [[request for request in requests if request.folder == folder] for folder in folders]
    lost = []
    for order, group in enumerate(sorted(groups, key=_is_full)):
        path, failure = run.devices.on_main(partial(_written, run, group, ranks, order))
        with run.devices.together():
            for request in group:
                if request.done is not None:
                    request.done(path, failure)
        ends = path is None and run.state.stop_reason is not None
        if failure is not None and ends and not failure.startswith(_NOT_FINITE):
            lost.append(failure)
        elif failure is not None:
            run.warn(f"{failure} The checkpoints before stay.")
    if lost:
        raise CheckpointError(f"The run's last checkpoint could not be written. {' '.join(lost)}")


_NOT_FINITE = "The weights are not finite"


def _is_full(group: list[Request]) -> bool:
    return not all(request.weights_only for request in group)


def _written(run: Run, group: list[Request], ranks: list[bytes], order: int) -> tuple[Path | None, str | None]:
    """Write one checkpoint on rank 0: its path, or why there is none."""
    assert run.run_dir is not None and run.tracking is not None
    full = _is_full(group)
    if not _is_finite(run.task):
        return None, f"{_NOT_FINITE} at step {run.state.global_step}; they were not saved."
    try:
        keeps = {run.run_dir / path for request in group for path in request.keeps}
        folder = free_name(group[0].folder, run.run_id, keeps)
        for request in group:
            request.folder, request.begun = folder, True
        note_folder(run.run_dir, folder.parent)
        state = _state(run, full)
        about = {"kind": "full" if full else "weights", "run": run.run_id, "attempt": run.attempt, "order": order}
        place = {name: state["progress"][name] for name in ("global_step", "epoch", "batch")}

        def fill(beside: Path) -> None:
            save_weights(run.task, beside / WEIGHTS, sync=False)
            write_state(beside, state)
            for rank, content in enumerate(ranks if full else ()):
                write_rank(beside, rank, content)
            if any(request.pretrained for request in group):
                for name, model in _pretrained(run.task):
                    model.save_pretrained(beside / name)

        write_checkpoint(folder, run.run_id, about | place, fill)
    except OSError as error:
        return None, f"The checkpoint {group[0].folder} could not be written: {error}."
    link = free_name(folder.with_name("last"), run.run_id)
    try:
        if any(request.last for request in group) and link != folder:
            write_link(link, folder, run.run_id)
    except OSError as error:
        return folder, f"The link {link} to {folder} could not be made: {error}."
    return folder, None


def _is_finite(task: torch.nn.Module) -> bool:
    """Whether all weights are; buffers may hold infinity on purpose (masks)."""
    weights = [p.detach() for p in task.parameters() if p.element_size() > 1]  # torch cannot say it of 8 bits
    if not weights:
        return True
    # A sum of each first: that needs no memory, and it is finite only where all are. The sum of finite ones may not be.
    sums = torch.stack([weight.sum().isfinite().to(weights[0].device) for weight in weights])
    return bool(sums.all()) or all(bool(weight.isfinite().all()) for weight in weights)


def _pretrained(task: torch.nn.Module) -> list[tuple[str, Any]]:
    """The task's transformers models, by the attribute that holds them."""
    children = [(name, unwrapped(child)) for name, child in task.named_children()]
    return [(n, child) for n, child in children if callable(getattr(child, "save_pretrained", None))]


def _state(run: Run, full: bool) -> dict[str, Any]:
    """What is equal on all ranks, as rank 0 has it."""
    assert run.optimization is not None and run.tracking is not None and run.run_dir is not None
    state: dict[str, Any] = {
        "task": type(run.task).__qualname__,
        "hparams": {name: value for name, value in run.task.hparams.items() if _can_be_encoded(value)},
        "run": {
            "id": run.run_id,
            "name": run.run_dir.name,
            "seed": run.seed,
            "elapsed": time.monotonic() - run.began,
        },
        "progress": {**asdict(run.state), "stop_reason": None},
        "metrics": dict(run.metrics),
        "settings": flatten_hparams(run.hparams["trainer"]),
        "versions": _versions(),
    }
    if not full:
        return state
    plain = plain_names(run.task)
    return state | {
        "data": data_facts(run),
        "modules": {
            "frozen": [plain(name) for name, each in run.task.named_parameters() if not each.requires_grad],
            "asleep": [plain(name) for name, module in run.task.named_modules() if not module.training],
        },
        "optimizer": run.optimization.state_dict(),
        "callbacks": {callback.state_key: own for callback in run.callbacks if (own := callback.state_dict())},
        "rest": {
            "progress_metrics": dict(run.progress_metrics),
            "validated": run.validated,
            "monitors_checked": run.monitors_checked,
            "owes_evaluation": run.owes_evaluation,
            "tracking": run.tracking.reached(),
        },
    }


def check_can_be_saved(run: Run) -> None:
    """Encode what a checkpoint would hold of callbacks, optimizers and modules: what cannot be is told before the run.

    Raises:
        DataError: naming it.
    """
    assert run.optimization is not None
    for callback in run.callbacks:
        encode(callback.state_dict(), {}, callback.state_key)
    encode(run.optimization.state_dict(), {}, "optimizer")
    for name, value in run.task.state_dict().items():
        if not isinstance(value, torch.Tensor):  # what a module gives in get_extra_state
            encode(value, {}, name)


def _can_be_encoded(value: Any) -> bool:
    try:
        encode(value, {})
    except DataError:
        return False
    return True


def _versions() -> dict[str, str]:
    return {
        "sanctuary_trainer": sys.modules["sanctuary_trainer"].__version__,  # of a checkout too
        "torch": torch.__version__,
        "accelerate": version("accelerate"),
        "python": platform.python_version(),
    }


def data_facts(run: Run) -> dict[str, Any]:
    """What a position in the epoch depends on."""
    assert run.train_loader is not None
    return {
        "ranks": run.world_size,
        "batch size": run.train_loader.batch_size,
        "data set length": run.train_loader.num_samples,
        "rounds of an epoch": run.plan.rounds,
        "gradient_accumulation_steps": run.plan.accumulation,
    }


def _rank_state(run: Run) -> dict[str, Any]:
    """What this rank alone knows."""
    in_epoch = run.epoch_feed is not None and run.state.batch > 0
    return {
        "generators": _generators(run.device),
        "records": run.records.state_dict(),
        "reached": run.epoch_feed.reached if in_epoch and run.epoch_feed is not None else None,
    }


def _generators(device: torch.device) -> dict[str, Any]:
    on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.default_generator.get_state(),
        "device": on_device,
    }


def settle_boundary(run: Run, error: BaseException) -> None:
    """At an error, keep `run.at_boundary` only where all ranks are at one and can write a checkpoint together."""
    if run.world_size > 1:
        told = run.devices.told is error  # on every rank, or on none
        run.at_boundary = told and run.devices.agree([float(run.at_boundary)])[0] == run.world_size


# Taking back


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
    run.owes_evaluation = rest["owes_evaluation"]
    former = saved["data"]["ranks"]
    mine = [run.rank] if former == run.world_size else list(range(run.rank, former, run.world_size))
    parts = {rank: read_rank(run.continued, rank) for rank in dict.fromkeys([0, *mine])}
    run.records.load_state_dict([parts[rank]["records"] for rank in mine])
    run.reached = parts[mine[0] if former == run.world_size else 0]["reached"]
    _place_in_epoch(run)
    run.generators = parts[run.rank]["generators"] if former == run.world_size else None
    _restore_callbacks(run)
    _tell(run, changed)


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
        for there, here in ((saved["settings"], settings), (saved["versions"], _versions()))
        for name in here
        if name in there and there[name] != here[name] and name not in apart
    ]
    if others:
        run.message(f"Other settings than at the checkpoint: {'; '.join(others)}.")


def _samples_of_a_step(facts: Mapping[str, Any]) -> int | None:
    size = facts["batch size"]
    return None if size is None else facts["ranks"] * size * facts["gradient_accumulation_steps"]
