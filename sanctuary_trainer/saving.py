"""What a checkpoint holds of a run: taken from it at a save point, and written by rank 0.

write_requested(run)
  each rank's own part is gathered     generators, records, position in a stream
  for each folder that was asked for   bare weights first: what a run goes on from knows of them
    rank 0 writes it whole or not at all; all ranks learn its path, or why there is none
    done(path, failure)                of each who asked, on all ranks
"""

from __future__ import annotations

import platform
import random
import sys
import time
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from sanctuary_trainer.checkpoint_folder import write_checkpoint, write_link
from sanctuary_trainer.checkpointing import WEIGHTS, encode, rank_file, write_rank, write_state
from sanctuary_trainer.errors import CheckpointError, DataError
from sanctuary_trainer.finding import free_name, note_folder
from sanctuary_trainer.hparams import flatten_hparams
from sanctuary_trainer.weights import plain_names, save_weights, unwrapped

if TYPE_CHECKING:
    from sanctuary_trainer.asked import Request
    from sanctuary_trainer.run import Run


def write_requested(run: Run) -> None:
    """Write the checkpoints that were asked for, on all ranks together; none goes on before they are complete.

    Those from which a run can go on come last: they know of the others, which callbacks have taken note of by then.

    Raises:
        CheckpointError: one could not be written and the run ends here; on every rank.
    """
    requests, run.requests = run.requests, []
    everywhere = run.devices.gather_objects([str(request.folder) for request in requests])
    if any(asked != everywhere[0] for asked in everywhere):
        raise CheckpointError(
            f"The ranks ask for different checkpoints: {everywhere}. Call run.save_checkpoint on all ranks alike."
        )
    folders = dict.fromkeys(request.folder for request in requests)
    groups = sorted(([r for r in requests if r.folder == folder] for folder in folders), key=_is_full)
    ranks: list[bytes] = []
    if any(map(_is_full, groups)):
        with run.devices.together():
            own = rank_file(_rank_state(run))
        ranks = run.devices.gather_on_main(own)
    lost = []
    for order, group in enumerate(groups):
        run.owes_saves = order + 1 < len(groups)
        written = run.devices.on_main(partial(_written, run, group, ranks, order))
        with run.devices.together():
            for request in group:
                if request.done is not None:
                    request.done(written.path, written.failure or None)
        if written.is_lost and run.state.stop_reason is not None:
            lost.append(written.failure)
        elif written.failure:
            run.warn(f"{written.failure} The checkpoints before stay.")
    if lost:
        raise CheckpointError(f"The run's last checkpoint could not be written. {' '.join(lost)}")


def drop_requests(run: Run) -> None:
    """Write nothing of what was asked for, and say so to who asked."""
    requests, run.requests = run.requests, []
    for request in requests:
        if request.done is not None:
            request.done(None, "An error came before it was written.")


class _Written(NamedTuple):
    """What came of a checkpoint. is_lost: whether a run that ends without it has lost something."""

    path: Path | None
    failure: str = ""
    is_lost: bool = False


def _is_full(group: list[Request]) -> bool:
    return not all(request.weights_only for request in group)


def _written(run: Run, group: list[Request], ranks: list[bytes], order: int) -> _Written:
    """Write one checkpoint on rank 0."""
    assert run.run_dir is not None and run.tracking is not None
    full = _is_full(group)
    if not _is_finite(run.task):
        return _Written(None, f"The weights are not finite at step {run.state.global_step}; they were not saved.")
    try:
        keeps = {run.run_dir / path for request in group for path in request.keeps}
        folder = free_name(group[0].folder, run.run_id, keeps)
        for request in group:
            request.folder, request.begun = folder, True
        note_folder(run.run_dir, folder.parent)
        state = _state(run, full)
        if full:
            state["rest"]["is_last"] = any(request.last for request in group)
        about = {"kind": "full" if full else "weights", "run": run.run_id, "attempt": run.attempt, "order": order}
        place = {name: state["progress"][name] for name in ("global_step", "epoch", "batch")}

        def fill(beside: Path) -> None:
            save_weights(run.task, beside / WEIGHTS, sync=False)
            write_state(beside, state)
            for rank, content in enumerate(ranks if full else ()):
                write_rank(beside, rank, content)
            if any(request.pretrained for request in group):
                for name, part in _pretrained(run.task):
                    part.save_pretrained(beside / name)

        write_checkpoint(folder, run.run_id, about | place, fill)
    except OSError as error:
        return _Written(None, f"The checkpoint {group[0].folder} could not be written: {error}.", is_lost=True)
    try:
        if any(request.last for request in group):
            point_last(run, folder)
    except OSError as error:
        return _Written(folder, f"The link {folder.with_name('last')} to {folder} could not be made: {error}.")
    return _Written(folder)


def point_last(run: Run, folder: Path) -> None:
    """Let `last` beside a checkpoint point to it."""
    link = free_name(folder.with_name("last"), run.run_id)
    if link != folder:
        write_link(link, folder, run.run_id)


def _is_finite(task: torch.nn.Module) -> bool:
    """Whether all weights are; buffers may hold infinity on purpose (masks)."""
    weights = [p.detach() for p in task.parameters() if p.element_size() > 1]  # torch cannot say it of 8 bits
    if not weights:
        return True
    # A sum of each first: that needs no memory, and it is finite only where all are. The sum of finite ones may not be.
    sums = torch.stack([weight.sum().isfinite().to(weights[0].device) for weight in weights])
    return bool(sums.all()) or all(bool(weight.isfinite().all()) for weight in weights)


def _pretrained(task: torch.nn.Module) -> list[tuple[str, Any]]:
    """The task's transformers models, and with each the task's image processor, by the attribute of the model."""
    children = [(name, unwrapped(child)) for name, child in task.named_children()]
    processors = [each for each in [getattr(task, "image_processor", None)] if hasattr(each, "save_pretrained")]
    return [(n, part) for n, child in children if hasattr(child, "save_pretrained") for part in (child, *processors)]


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
        "versions": versions(),
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
            "gradient_order": [] if run.executor is None else run.executor.order,
            "monitors_checked": run.monitors_checked,
            "owes": (run.owes_evaluation, run.owes_epoch_end, run.owes_saves),
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


def versions() -> dict[str, str]:
    """Of what computes."""
    return {
        "sanctuary_trainer": sys.modules["sanctuary_trainer"].__version__,  # of a checkout too
        "torch": torch.__version__,
        "accelerate": version("accelerate"),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),  # by which sums on a CPU are split
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
        "recovery": run.recovery.learned.state_dict(),
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


def settle_boundary(run: Run, error: BaseException) -> bool:
    """At an error, keep `run.at_boundary` only where all ranks are at one and can write a checkpoint together.

    Returns:
        Whether all ranks are here, with this error.
    """
    told = run.world_size == 1 or run.devices.told is error  # on every rank, or on none
    run.at_boundary = told and run.devices.agree([float(run.at_boundary)])[0] == run.world_size
    return told
