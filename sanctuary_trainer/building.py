"""What a verb builds before its loop: loaders, plan, run folder, seeds, compiled modules.

Each function does one thing to the run it is given; the order stands in `trainer.py`.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sanctuary_trainer.data import RankLoader
from sanctuary_trainer.devices import launcher_compile
from sanctuary_trainer.errors import DataError, NotSupportedError, RunFolderError, SettingsError, TaskError
from sanctuary_trainer.feed import limited
from sanctuary_trainer.finding import RUN, found_run, newest_run
from sanctuary_trainer.plan import Plan
from sanctuary_trainer.run import Run
from sanctuary_trainer.settings import limit_rounds
from sanctuary_trainer.task import VisionTask

DATA_METHODS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


def check_limits(settings: Mapping[str, Any]) -> None:
    """A fit needs an end."""
    if all(settings[name] is None for name in ("max_epochs", "max_steps", "max_time")):
        raise SettingsError("fit has no end: give the Trainer max_epochs, max_steps or max_time.")


def check_data(data: Any, loaders: Mapping[str, Any]) -> None:
    """`data=` makes loaders, and nothing that makes loaders is given as one.

    Raises:
        DataError: with what was given.
    """
    for name, loader in loaders.items():
        if any(callable(getattr(loader, method, None)) for method in DATA_METHODS):
            raise DataError(
                f"The {name} loader is a {type(loader).__name__}, which makes loaders itself: give it as data=."
            )
    if data is None:
        return
    if isinstance(data, type):
        raise DataError(f"data= got the class {data.__name__}; give an instance, {data.__name__}().")
    if not any(callable(getattr(data, method, None)) for method in DATA_METHODS):
        raise DataError(
            f"data= got {type(data).__name__}, which has none of {', '.join(f'{m}()' for m in DATA_METHODS)}."
        )
    given = [name for name, loader in loaders.items() if loader is not None]
    if given:
        raise DataError(f"Both data= and a {given[0]} loader were given; give one of the two.")


def _loader_of(run: Run, name: str, given: Any, data: Any) -> Any:
    """The loader that was given, else the data object's, else the task's."""
    if given is not None:
        return given
    for owner in (data, run.task):
        method = getattr(owner, f"{name}_dataloader", None)
        made_by = getattr(method, "__module__", None) or ""
        if made_by.split(".")[0] in ("lightning", "pytorch_lightning"):
            continue  # a LightningDataModule's own, which raises: the user has not written one
        loader = method() if callable(method) else None
        if loader is not None and not (isinstance(loader, list | tuple | dict) and not loader):
            return loader
    return None


def check_task(task: Any, verb: str) -> None:
    """What is wrong with a task before anything is built for it.

    Raises:
        TaskError: it is no task, is in a run, hides a method, or has a step that cannot take a batch.
        NotSupportedError: it optimizes by itself.
    """
    if isinstance(task, type):
        raise TaskError(f"{verb} got the class {task.__name__}; give an instance, {task.__name__}().")
    if not isinstance(task, VisionTask):
        raise TaskError(f"{verb} got {type(task).__name__}; an instance of a VisionTask subclass was expected.")
    name = type(task).__name__
    hidden = [method for method in ("batch_size", "split_batch") if not callable(getattr(task, method))]
    if hidden:
        raise TaskError(
            f"{name} has an attribute {hidden[0]}, which hides the method of that name: give it another name."
        )
    if getattr(task, "automatic_optimization", True) is not True:
        raise NotSupportedError(
            f"{name} sets automatic_optimization: manual and alternating (GAN) optimization come later. "
            "Return the loss from training_step and let the trainer step."
        )
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        signature = inspect.signature(getattr(task, step))
        if "dataloader_idx" in signature.parameters:
            raise TaskError(
                f"{name}.{step} takes dataloader_idx, which is not given here: self.run.loader_name is the name of the "
                "evaluation loader that is being read."
            )
        try:
            signature.bind(None, 0)
        except TypeError as error:
            raise TaskError(
                f"{name}.{step} cannot be called: {error}. Write it as {step}(self, batch, batch_idx)."
            ) from None
    if task._run is not None:
        raise TaskError(f"{name} is in a run already: one task cannot be in two at once.")


def build_loaders(run: Run, loaders: dict[str, Any], data: Any) -> None:
    """Give the run its loaders, each as this rank reads it, and the plan of a fit.

    Args:
        run: the run.
        loaders: what was given to the verb, by "train", "val", "test" or "predict".
        data: the object that makes those which were not given.

    Raises:
        DataError: a loader is missing or gives nothing.
        SettingsError: a limit or an interval does not fit a loader.
    """
    settings = run.settings

    def ranked(name: str, loader: Any, shuffle: bool | None = None) -> RankLoader:
        return RankLoader(
            loader,
            rank=run.rank,
            world_size=run.world_size,
            seed=run.seed,
            shard_data=settings["shard_data"],
            dispatch=run.devices if settings["dispatch_batches"] and run.world_size > 1 else None,
            shuffle=shuffle,
            name=name,
        )

    for name, given in loaders.items():
        loader = _loader_of(run, name, given, data)
        if loader is None and name != "val":
            raise DataError(
                f"{run.verb} has no {name} loader: give one, or data= with {name}_dataloader(), "
                f"or define {name}_dataloader in {type(run.task).__name__}."
            )
        if loader is None and run.verb == "validate":
            raise DataError("validate has no validation loader: give one, or define val_dataloader.")
        if loader is None:
            continue
        limit = settings[f"limit_{name}_batches"]
        if name == "train" and isinstance(loader, list | tuple) and loader and all(map(_is_loader, loader)):
            raise DataError(f"fit got {len(loader)} training loaders; give one, e.g. of a ConcatDataset.")
        if name == "train":
            overfit = settings["overfit_batches"] is not None
            run.train_loader = ranked(name, loader, False if overfit else None)
            run.train_limit = limit_rounds(limit, run.train_loader.num_rounds, "limit_train_batches")
            continue
        several = _by_name(loader)
        if name == "predict" and len(several) != 1:
            raise DataError(f"predict takes one loader, and got {len(several)}; call it once for each.")
        for key, one in several.items():
            run.evaluation_loaders[key] = ranked(name, one)
            rounds = run.evaluation_loaders[key].num_rounds
            run.evaluation_limits[key] = limit_rounds(limit, rounds, f"limit_{name}_batches")


def check_alike(run: Run) -> None:
    """Check that the ranks hold the same data, and give a fit its plan.

    Ranks that hold data of another length, or count otherwise, would lose samples or wait for ever.

    Raises:
        DataError: on every rank alike.
    """
    loaders = {f"evaluation loader {name!r}": loader for name, loader in run.evaluation_loaders.items()}
    if run.train_loader is not None:
        loaders["training loader"] = run.train_loader
    everywhere = run.devices.gather_objects({name: loader.assumed for name, loader in loaders.items()})
    for rank, other in enumerate(everywhere):
        if list(other) != list(everywhere[0]) and set(other) == set(everywhere[0]):
            raise DataError(
                f"The loaders come in the order {list(everywhere[0])} on rank 0 and {list(other)} on rank {rank}: the "
                "ranks would evaluate different data together. Build them in one order on every rank."
            )
        for name in {**everywhere[0], **other}:
            first, there = everywhere[0].get(name), other.get(name)
            if first != there:
                raise DataError(
                    f"The {name} is not the same on all ranks: {first or 'none'} on rank 0, {there or 'none'} on rank "
                    f"{rank}. Build it alike on every rank (it is sharded for you), or give the Trainer "
                    "shard_data=False where each rank has data of its own."
                )
    if run.verb == "fit":
        run.plan = _plan(run)


def convert(run: Run) -> None:
    """Bring the task to its device, in the form that the settings ask for.

    Raises:
        SettingsError: synchronised batch norm was asked for on a CPU.
    """
    settings, task, devices = run.settings, run.task, run.devices
    if settings["sync_batchnorm"] and devices.world_size > 1 and run.verb == "fit":
        if devices.device.type == "cpu":
            raise SettingsError("sync_batchnorm=True works on accelerators only, and this run is on a CPU.")
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(task)
    task.to(devices.device)
    if settings["channels_last"]:
        for tensor in (*task.parameters(), *task.buffers()):
            if tensor.ndim == 4:  # module.to(memory_format=...) refuses a task that has 3-d convolutions too
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def _by_name(loader: Any) -> dict[str, Any]:
    """Several loaders by their names, or the single one under ""."""
    if isinstance(loader, Mapping):
        return {str(name): one for name, one in loader.items()}
    if isinstance(loader, list | tuple) and loader and all(map(_is_loader, loader)):
        return {str(number): one for number, one in enumerate(loader)}
    return {"": loader}


def _is_loader(item: Any) -> bool:
    """Whether an item of a list is a loader, and not a batch of a list of batches."""
    a_batch = isinstance(item, torch.Tensor | np.ndarray | list | tuple | Mapping | str | bytes)
    return hasattr(item, "__iter__") and not a_batch


def _plan(run: Run) -> Plan:
    settings, loader = run.settings, run.train_loader
    assert loader is not None
    rounds = limited(loader.num_rounds, run.train_limit) if loader.num_rounds is not None else None
    if not loader.sized:  # each rank knows its own data only: the run is as long as the longest
        everywhere = run.devices.gather_objects(rounds)
        rounds = None if None in everywhere else max(everywhere)
    if rounds == 0:
        raise DataError(
            f"The training loader gives no batch: {loader.num_samples} samples, batch size {loader.batch_size}, "
            f"{run.world_size} ranks, limit_train_batches={settings['limit_train_batches']}. "
            "With drop_last=True a data set must fill one batch on every rank."
        )
    interval = settings["val_check_interval"]
    if isinstance(interval, float) and rounds is None:
        raise SettingsError(
            f"val_check_interval={interval} is a fraction of an epoch, and the training loader has no length; "
            "give a whole number of steps."
        )
    accumulation = settings["gradient_accumulation_steps"]
    if rounds is not None and rounds < accumulation:
        run.warn(
            f"An epoch has {rounds} batches on each rank and gradient_accumulation_steps is {accumulation}: "
            "each epoch is one step over all of its batches."
        )
    validates = bool(run.evaluation_loaders) and any(limit != 0 for limit in run.evaluation_limits.values())
    if validates and type(run.task).validation_step is VisionTask.validation_step:
        raise TaskError(f"A validation loader was given, but {type(run.task).__name__} has no validation_step.")
    plan = Plan(
        rounds=rounds,
        accumulation=accumulation,
        max_epochs=settings["max_epochs"],
        max_steps=settings["max_steps"],
        min_epochs=settings["min_epochs"] or 0,
        min_steps=settings["min_steps"] or 0,
        val_check_interval=interval,
        check_val_every_n_epoch=settings["check_val_every_n_epoch"],
        validates=validates,
        log_every_n_steps=settings["log_every_n_steps"],
    )
    every, epochs = plan.check_val_every_n_epoch, plan.max_epochs
    too_long = isinstance(interval, int) and plan.total_steps is not None and interval > plan.total_steps
    if validates and (too_long or (epochs is not None and every > epochs)):
        run.warn(
            f"A validation loader was given, but the run ends before the first validation: {plan.total_steps} steps, "
            f"{epochs} epochs, val_check_interval={interval}, check_val_every_n_epoch={every}."
        )
    return plan


def compile_children(run: Run) -> None:
    """Compile the task's child modules in place: keys keep their names and logging stays out of the graph."""
    wanted = run.settings["compile"]
    if wanted is None:
        wanted = launcher_compile()
    if not wanted:
        return
    arguments = dict(wanted) if isinstance(wanted, Mapping) else {} if wanted is True else {"backend": wanted}
    for child in run.task.children():
        if any(True for _ in child.parameters()) and child._compiled_call_impl is None:
            child.compile(**arguments)
            run.compiled.append(child)


def make_run_dir(run: Run, continued: Path | None, resumes: bool) -> Path:
    """The run's folder, made by rank 0; the others learn its name.

    Args:
        run: the run.
        continued: the folder of the run that goes on; None where there is none.
        resumes: whether a run may be continued, so that a folder of the name may hold what is left of it.

    Raises:
        RunFolderError: the folder cannot be made, or holds another run.
    """
    project_dir, run_name = Path(run.settings["project_dir"]), run.settings["run_name"]
    if run.settings["fast_dev_run"]:
        return run.devices.on_main(lambda: Path(tempfile.mkdtemp(prefix="fast_dev_run_")))
    if run_name is None:
        name = type(run.task).__name__.lower()
        return run.devices.on_main(lambda: continued or found_run(_numbered(project_dir, name)))
    folder = project_dir / run_name
    goes_on = run.continued is None or (continued is not None and continued.resolve() == folder.resolve())
    may_hold = resumes and goes_on
    return run.devices.on_main(lambda: folder if may_hold and (folder / RUN).exists() else found_run(claim(folder)))


def _numbered(project_dir: Path, name: str) -> Path:
    """A new folder `name-1`, or with the number after the last."""
    last = newest_run(project_dir, name)
    number = 0 if last is None else int(last.name.rpartition("-")[2])
    while True:  # another run may take the number in between: mkdir says so
        number += 1
        folder = project_dir / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise RunFolderError(f"The folder {folder} cannot be made: {error}") from error


def claim(folder: Path) -> Path:
    """Make `folder`, which may be there and empty.

    Raises:
        RunFolderError: it cannot be made or holds something.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holds = any(not path.match(f".{RUN}.*.partial") for path in folder.iterdir())  # of a start that was killed
    except OSError as error:
        raise RunFolderError(f"The folder {folder} cannot be made: {error}") from error
    if holds:
        raise RunFolderError(
            f"The folder {folder} is not empty: it holds another run's files. Give another name, or remove it; "
            'fit(..., resume="auto") goes on with the run in it.'
        )
    return folder


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Ask torch for deterministic algorithms inside, if wanted; what has none is named in a warning."""
    if not wanted:
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    # warn_only: an operation without a deterministic form is named in a warning instead of ending the run.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
