"""`Trainer`: settings, their checks, and the four verbs.

    fit, validate, test, predict
      devices, seed, data.prepare_data and setup, task.setup, loaders       -> a Run
      task to its device, callbacks.setup
      fit: train mode, optimizers, wrapping, run folder, trackers
      the loop
      on_exception, on_fit_end, teardown, trackers closed, task set free     always

A Trainer holds settings and nothing that lives: a second `fit` inherits nothing from the first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Never

from sanctuary_trainer.balance import Balance
from sanctuary_trainer.building import (
    build_loaders,
    check_alike,
    check_data,
    check_limits,
    check_task,
    claim,
    compile_children,
    convert,
    determinism,
    make_run_dir,
)
from sanctuary_trainer.callback import Callback, Callbacks, with_defaults
from sanctuary_trainer.devices import Devices
from sanctuary_trainer.errors import SettingsError, TaskError
from sanctuary_trainer.executor import Executor
from sanctuary_trainer.finding import Chosen, look_at_run
from sanctuary_trainer.foreign import explain_attribute, refuse_unknown
from sanctuary_trainer.learned import OOMEvent
from sanctuary_trainer.loops.evaluate import evaluate
from sanctuary_trainer.loops.fit import fit
from sanctuary_trainer.loops.predict import Predictions, predict
from sanctuary_trainer.metric_states import remember
from sanctuary_trainer.optimization import Optimization
from sanctuary_trainer.out_of_memory import is_out_of_memory
from sanctuary_trainer.resuming import load_checkpoint, look_up, restore_run, restore_task, restore_training
from sanctuary_trainer.run import Run
from sanctuary_trainer.saving import check_can_be_saved, settle_boundary, write_requested
from sanctuary_trainer.seeding import seed_everything
from sanctuary_trainer.settings import Limit, check_settings
from sanctuary_trainer.signals import exit_status
from sanctuary_trainer.task import VisionTask
from sanctuary_trainer.tracking import Tracking, check_log_with


@dataclass(frozen=True)
class FitResult:
    """What came of a `fit`.

    Attributes:
        metrics: the last value of everything that was logged, over all ranks.
        stop_reason: "max_epochs", "max_steps", "max_time", or what somebody gave to `run.stop`.
        run_dir: the folder with the curves and `metrics.jsonl`.
        global_step: optimizer updates that were made.
        best_checkpoint: the best checkpoint by the first `Checkpoint` that watches something, else the last one; None
            where none was written.
        oom_events: what did not fit into memory, on all ranks, by step; see `OOMFallback`.
        balance: whether all ranks work all the time, and what keeps them from it; None without `LoadBalance`, and where
            the fit made no step after its first.
    """

    metrics: dict[str, float]
    stop_reason: str
    run_dir: Path
    global_step: int
    best_checkpoint: Path | None = None
    oom_events: tuple[OOMEvent, ...] = ()
    balance: Balance | None = None


class Trainer:
    """Trains, evaluates and predicts with a `VisionTask`, on one process or on many.

    Args:
        max_epochs: limit of a fit; at least one of this, `max_steps` and `max_time` is required.
        max_steps: limit of a fit, in optimizer updates.
        max_time: limit of a fit: seconds, a `timedelta`, or "DD:HH:MM:SS".
        min_epochs: a stop that a callback or `max_time` asks for waits for so many epochs.
        min_steps: and for so many steps.
        gradient_accumulation_steps: batches on each rank in one step; None: what the launcher says, else 1.
        gradient_clip_val: clip the finished gradients to it.
        gradient_clip_algorithm: by "norm" or by "value".
        val_check_interval: int: validate every that many steps, counted across epochs; float: every that fraction of an
            epoch's steps; None: at the end of an epoch.
        check_val_every_n_epoch: validate in every that many epochs.
        num_sanity_val_steps: rounds of validation before training, which leave no trace.
        limit_train_batches: int: that many batches on each rank; float in [0, 1]: that fraction of the loader.
        limit_val_batches: the same of a validation loader.
        limit_test_batches: of a test loader.
        limit_predict_batches: of a prediction loader.
        overfit_batches: train on this much of the loader, unshuffled, the same in every epoch; limits validation too.
        fast_dev_run: run everything once (True) or for that many steps, tracker included, in a temporary folder.
        log_every_n_steps: steps between two points of the curves.
        mixed_precision: "no", "bf16" or "fp16"; None: what the launcher says.
        cpu: True to stay on the CPU; None: what the launcher says.
        accelerator: a ready `accelerate.Accelerator` to work with.
        non_blocking: let copies to the device run while the host goes on.
        dispatch_batches: rank 0 reads all batches and deals them.
        shard_data: False for streams that shard themselves: each rank reads its loader as it is.
        sync_batchnorm: batch-norm statistics over all ranks (accelerators only).
        find_unused_parameters: let DDP look for parameters that a step did not use.
        timeout: seconds a rank waits for the others before it fails; None: torch's default of 30 minutes.
        compile: True, a torch.compile backend, or a dict of its arguments: compiles the task's child modules.
        channels_last: the task and its image batches in channels-last memory format.
        seed: seeds `random`, numpy and torch at the start, and the order of the data; None: the order is drawn anew.
        deterministic: ask torch for deterministic algorithms.
        log_with: "tensorboard", another tracker that accelerate knows, several of them, or None for none.
        project_dir: the run's folder is `project_dir/run_name`.
        run_name: None: the task's name with a number.
        callbacks: instances, or names given by `register_callback`.
        default_callbacks: add the progress bar and the summary.

    Raises:
        SettingsError: a setting is wrong, or two contradict each other.
    """

    def __init__(
        self,
        *,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        max_time: float | str | timedelta | None = None,
        min_epochs: int | None = None,
        min_steps: int | None = None,
        gradient_accumulation_steps: int | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        val_check_interval: int | float | None = None,
        check_val_every_n_epoch: int = 1,
        num_sanity_val_steps: int = 2,
        limit_train_batches: Limit = None,
        limit_val_batches: Limit = None,
        limit_test_batches: Limit = None,
        limit_predict_batches: Limit = None,
        overfit_batches: Limit = None,
        fast_dev_run: bool | int = False,
        log_every_n_steps: int = 50,
        mixed_precision: str | None = None,
        cpu: bool | None = None,
        accelerator: Any = None,
        non_blocking: bool = True,
        dispatch_batches: bool = False,
        shard_data: bool = True,
        sync_batchnorm: bool = False,
        find_unused_parameters: bool = False,
        timeout: float | None = None,
        compile: bool | str | Mapping[str, Any] | None = None,  # noqa: A002 - torch's name
        channels_last: bool = False,
        seed: int | None = None,
        deterministic: bool = False,
        log_with: Any = "tensorboard",
        project_dir: str | Path = "runs",
        run_name: str | None = None,
        callbacks: Sequence[Callback | str] | Callback | str = (),
        default_callbacks: bool = True,
        **unknown: Never,
    ) -> None:
        settings = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        refuse_unknown(Trainer, unknown)
        self.settings = check_settings(settings)
        check_log_with(log_with)
        given = [callbacks] if isinstance(callbacks, Callback | str) else list(callbacks or ())
        Callbacks(None, given)  # names and duplicates are checked before anything is built
        self._callbacks = given

    # The four verbs

    def fit(
        self,
        task: VisionTask,
        train: Any = None,
        val: Any = None,
        *,
        data: Any = None,
        resume: Any = None,
        **unknown: Never,
    ) -> FitResult:
        """Train a task from its present weights, with new optimizers.

        Args:
            task: the task; its weights are changed in place.
            train: the training loader; else `data`'s, else the task's own.
            val: the validation loader, or a list or dict of several, whose names become prefixes ("val/NAME/loss").
            data: any object with `train_dataloader()` and friends; `prepare_data()` (on one rank of each machine) and
                `setup(stage)` are called where it has them.
            resume: continue a run instead of starting one. "auto": from the newest whole checkpoint of the run
                `run_name`, or without a name of this task's newest run; fresh where there is none. "last": the same,
                and one must be there. A path: that checkpoint, or the newest of the run whose folder it is.

        Raises:
            SystemExit: a signal (SIGTERM, SIGINT, SIGUSR1) ended the run; the status is 128 + its number.
            CheckpointError: the checkpoint is missing, broken or of another task; or the last one could not be written.
            SettingsError: no limit of training was given, or a setting does not fit the data.
            DataError: there is no training loader, or it gives no batch.
            TaskError: the task cannot be trained as it is.
            RankError: another rank failed.
        """
        refuse_unknown(Trainer.fit, unknown)
        if not isinstance(resume, str | Path | None):
            raise SettingsError(f'resume={resume!r}; "auto", "last" or a path was expected.')
        with self._run("fit", task, {"train": train, "val": val}, data, resume=resume) as run, run.signals.taken():
            fit(run)
        if run.signals.obeyed is not None:
            raise SystemExit(exit_status(run.signals.obeyed))
        reason = run.state.stop_reason
        assert run.run_dir is not None and reason is not None
        return FitResult(
            metrics=dict(run.metrics),
            stop_reason=reason,
            run_dir=run.run_dir,
            global_step=run.state.global_step,
            best_checkpoint=run.best_checkpoint,
            oom_events=run.oom_events,
            balance=run.balance,
        )

    def validate(
        self, task: VisionTask, val: Any = None, *, data: Any = None, checkpoint: Any = None, **unknown: Never
    ) -> dict[str, float]:
        """Evaluate a task with `validation_step`; returns the logged values, over all ranks, by full name.

        checkpoint: take the weights from there first: a checkpoint's folder, a file of weights, or what `fit` returned
            (its best checkpoint).
        """
        refuse_unknown(Trainer.validate, unknown)
        with self._run("validate", task, {"val": val}, data, checkpoint=checkpoint) as run:
            return evaluate(run, "val")

    def test(
        self, task: VisionTask, test: Any = None, *, data: Any = None, checkpoint: Any = None, **unknown: Never
    ) -> dict[str, float]:
        """Evaluate a task with `test_step`; returns the logged values, over all ranks, by full name.

        checkpoint: as in `validate`.
        """
        refuse_unknown(Trainer.test, unknown)
        with self._run("test", task, {"test": test}, data, checkpoint=checkpoint) as run:
            return evaluate(run, "test")

    def predict(
        self,
        task: VisionTask,
        loader: Any = None,
        *,
        data: Any = None,
        checkpoint: Any = None,
        return_predictions: bool = True,
        output_dir: str | Path | None = None,
        **unknown: Never,
    ) -> list[Any] | Predictions | None:
        """Predict every sample of a loader once.

        Args:
            task: the task.
            loader: the loader; else `data`'s, else the task's own.
            data: as in `fit`.
            checkpoint: as in `validate`.
            return_predictions: False: the outputs are only shown to `on_predict_batch_end`.
            output_dir: a new or empty folder to write the predictions to, in constant memory.

        Returns:
            A list of one item per sample, in the order in which one process would read them, the same on every rank;
            16-bit floats come back as float32. With `output_dir` a `Predictions` that reads them from there. Else None.

        Raises:
            DataError: `predict_step` did not return one item per sample.
            RunFolderError: `output_dir` is not empty.
        """
        refuse_unknown(Trainer.predict, unknown)
        with self._run("predict", task, {"predict": loader}, data, checkpoint=checkpoint) as run:
            folder = None if output_dir is None else run.devices.on_main(lambda: claim(Path(output_dir)))
            [(name, ranked)] = run.evaluation_loaders.items()
            keep = return_predictions or folder is not None
            found = predict(run, ranked, run.evaluation_limits[name], keep=keep, output_dir=folder)
            return found if return_predictions else None

    # How a run is made

    @contextmanager
    def _run(
        self,
        verb: str,
        task: VisionTask,
        loaders: dict[str, Any],
        data: Any,
        *,
        resume: str | Path | None = None,
        checkpoint: Any = None,
    ) -> Iterator[Run]:
        settings = dict(self.settings)
        check_task(task, verb)
        if verb == "fit":
            check_limits(settings)
        check_data(data, loaders)
        devices = Devices(
            mixed_precision=settings["mixed_precision"],
            cpu=settings["cpu"],
            accelerator=settings["accelerator"],
            timeout=settings["timeout"],
            find_unused_parameters=settings["find_unused_parameters"],
        )
        if settings["gradient_accumulation_steps"] is None:
            settings["gradient_accumulation_steps"] = devices.accumulation
        with ExitStack() as stack:
            stack.callback(devices.close)
            chosen, saved = Chosen(None, None, []), dict[str, Any]()
            if resume is not None and not settings["fast_dev_run"]:
                chosen, saved = look_up(devices, settings, type(task).__qualname__, resume)
            seed = _seed(settings, saved, devices)
            if settings["seed"] is not None:
                seed_everything(seed + devices.rank)
            run = Run(verb, task, devices, settings, seed)
            run.continued, run.saved = chosen.folder, saved
            task._run = run
            status = "failure"
            stack.callback(setattr, task, "_run", None)
            stack.callback(run.records.close)
            stack.enter_context(determinism(settings["deterministic"]))
            stack.callback(lambda: self._take_apart(run, data, status))
            try:
                self._build(run, loaders, data, chosen.run_dir, resume is not None)
                if checkpoint is not None:
                    with devices.together():
                        load_checkpoint(task, checkpoint)
                yield run
                status = "success"
            except BaseException as error:
                explain_attribute(error, task)
                if is_out_of_memory(error) and not run.recovery.in_use:
                    error.add_note("callbacks=[OOMFallback()] lets a batch that does not fit go on in pieces.")
                with devices.together() if settle_boundary(run, error) else nullcontext():
                    run.callbacks.on_exception(run, error)
                if run.requests and run.at_boundary and not isinstance(error, KeyboardInterrupt):
                    write_requested(run)
                raise

    def _build(
        self, run: Run, loaders: dict[str, Any], data: Any, run_dir: Path | None = None, resumes: bool = False
    ) -> None:
        settings, task, devices = run.settings, run.task, run.devices
        if callable(getattr(data, "prepare_data", None)):
            with devices.together():
                if devices.is_local_main:
                    data.prepare_data()
        # What the user wrote may fail on one rank only: in blocks without a collective, so that all ranks hear of it.
        with devices.together():
            if callable(getattr(data, "setup", None)):
                data.setup(run.verb)
            task.setup(run.verb)
            build_loaders(run, loaders, data)
        check_alike(run)
        with devices.together():
            convert(run)
            given = with_defaults(self._callbacks) if settings["default_callbacks"] else self._callbacks
            run.callbacks = Callbacks(task, given)
            run.callbacks.setup(run)
            remember(task)  # metrics as they are made: a checkpoint holds what has changed of them
            changed = self._build_optimizers(run) if run.verb == "fit" else []
        if run.verb == "fit":
            self._build_fit(run, make_run_dir(run, run_dir, resumes), changed)
        else:  # in fit DDP does this: ranks that made different weights would give a result of none of them
            devices.broadcast_tensors(task.parameters())
        compile_children(run)

    def _build_optimizers(self, run: Run) -> list[str]:
        """Give the run its optimizers, as they were at its checkpoint; returns what was configured otherwise then."""
        settings, task = run.settings, run.task
        if not any(parameter.requires_grad for parameter in task.parameters()):
            raise TaskError(f"{type(task).__name__} has no parameter that requires a gradient: nothing can be trained.")
        if run.continued is not None:
            restore_task(run)
        task.train_mode()
        run.optimization = Optimization(
            task.configure_optimizers(),
            task,
            clip=settings["gradient_clip_val"],
            clip_algorithm=settings["gradient_clip_algorithm"],
            scaler=run.devices.scaler,
        )
        run.records.keep_epoch(run.optimization.monitors)
        return [] if run.continued is None else restore_training(run)

    def _build_fit(self, run: Run, run_dir: Path, changed: list[str]) -> None:
        settings = run.settings
        run.executor = Executor(run.task, run.devices)
        run.execute = run.executor.execute
        run.run_dir = run_dir
        run.run_id, run.attempt, run.checkpoints = run.devices.on_main(
            lambda: look_at_run(run_dir, run.continued, run.saved)
        )
        chosen = {key: value for key, value in settings.items() if key not in ("callbacks", "accelerator")}
        run.hparams = {**run.task.hparams, "trainer": {**chosen, "seed": run.seed, "ranks": run.world_size}}
        with run.devices.together():
            if run.callbacks.has("on_save_point"):
                check_can_be_saved(run)
            if run.continued is not None:
                restore_run(run, changed)
            run.tracking = Tracking(
                run_dir,
                log_with=settings["log_with"],
                is_main=run.is_main,
                hparams=run.hparams,
                reached=run.saved["rest"]["tracking"] if run.saved else None,
                step=run.state.global_step + 1 if run.saved else 0,
            )
        run.began = time.monotonic() - (run.saved["run"]["elapsed"] if run.saved else 0.0)
        if settings["max_time"] is not None:
            run.deadline = run.began + settings["max_time"]

    def _take_apart(self, run: Run, data: Any, status: str) -> None:
        with ExitStack() as stack:  # each of these is done, whatever another raises; the last one first
            if run.optimization is not None:
                stack.callback(run.optimization.zero_grad)
            for child in run.compiled:
                stack.callback(setattr, child, "_compiled_call_impl", None)
            for loader in (run.train_loader, *run.evaluation_loaders.values()):
                if loader is not None:
                    stack.callback(loader.close)
            if run.tracking is not None:
                stack.callback(run.tracking.close, status)
            if callable(getattr(data, "teardown", None)):
                stack.callback(data.teardown, run.verb)
            stack.callback(lambda: run.callbacks.teardown(run))
            if run.verb == "fit":
                stack.callback(lambda: run.callbacks.on_fit_end(run))
            run.recovery.close()
            run.gathers.closed = True
            run.executor, run.execute = None, _over  # DDP's hooks leave the parameters with the executor


def _seed(settings: Mapping[str, Any], saved: Mapping[str, Any], devices: Devices) -> int:
    """The run's seed, the same on all ranks: that of the run which goes on, what is set, or a new one."""
    if saved:
        return int(saved["run"]["seed"])
    given = settings["seed"]
    seed: int = devices.broadcast_object(random.SystemRandom().getrandbits(31) if given is None else given)
    return seed


def _over(*arguments: Any, **settings: Any) -> None:
    raise TaskError("The run is over: run.execute works while it trains.")
