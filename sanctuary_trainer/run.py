"""`Run`: every live object of one run under one name.

A verb of the `Trainer` builds a Run, hands it to a loop and takes it apart again; the Trainer itself holds settings
only. Callbacks and tasks receive it and use its public attributes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Never

import torch

from sanctuary_trainer.asked import Gathers, Request
from sanctuary_trainer.balance import Balance
from sanctuary_trainer.callback import Callbacks
from sanctuary_trainer.checkpoint_folder import remove_checkpoint
from sanctuary_trainer.data import BEGINNING, Fetched, RankLoader, Start
from sanctuary_trainer.devices import Devices
from sanctuary_trainer.executor import Executor, Window
from sanctuary_trainer.feed import Feed, limited
from sanctuary_trainer.foreign import refuse_unknown
from sanctuary_trainer.learned import OOMEvent
from sanctuary_trainer.metrics import is_metric_or_collection
from sanctuary_trainer.optimization import Optimization
from sanctuary_trainer.plan import Plan
from sanctuary_trainer.records import Records
from sanctuary_trainer.recovery import Recovery
from sanctuary_trainer.signals import Signals
from sanctuary_trainer.state import RunState
from sanctuary_trainer.task import VisionTask
from sanctuary_trainer.telling import Telling
from sanctuary_trainer.tracking import Tracking


class Run:
    """One run of one verb.

    Attributes:
        verb: "fit", "validate", "test" or "predict".
        stage: what is going on: "train", "sanity", "val", "test" or "predict".
        task: the user's task, not wrapped.
        state: where the run stands.
        plan: when things happen.
        devices: device, ranks and what they agree on.
        callbacks: all callbacks as one.
        settings: the Trainer's settings, with the launcher's word where nothing was given.
        hparams: what the tracker shows as hyper-parameters.
        metrics: the latest value of every logged name, over all ranks.
        progress_metrics: those of them that were logged with `prog_bar=True`.
        run_dir: the folder of this fit; None in other verbs.
        tracking: the trackers; None in other verbs.
        clock: where this rank's time goes: laps "data", "h2d", "forward", "backward", "wait" (for other ranks and for
            communication), "optimizer", "callbacks", "logging", "validation", "checkpoint"; read `clock.totals()`.
        train_loader, evaluation_loaders: the loaders of this rank; evaluation loaders by name ("" for a single one).
        loader_name: the evaluation loader that is being read.
        evaluation_rounds: rounds of the running evaluation or prediction; None when unknown.
        variants: name -> makes a context in which the task holds other weights; filled by callbacks in `on_fit_start`.
            Each validation is repeated inside, the values of it are `val/accuracy_NAME` beside `val/accuracy`, and
            afterwards the task's metric objects are as before. `on_evaluation_batch_end` is not fired there, and
            nothing that communicates may stand in the context.
        variant: the name of the variant that a validation is being repeated with, else "".
        batch_samples: samples of the batch that is being worked on; None when unknown or between batches.
        execute: runs one batch forward and backward: `execute(batch, batch_idx, size, sync, ...)`. A callback may
            replace it in `on_fit_start` by a function of the same arguments that calls it.
        call_step: runs one batch of evaluation or prediction: `call_step(step, batch, batch_idx)` returns the step's
            outputs. A callback may replace it in `setup` in the same way.
        recovery: runs a batch in pieces when memory asks for it; see `OOMFallback`.
        deadline: time.monotonic() after which the run stops.
        telling: how this rank tells the others that it failed.
        ends_epoch: whether the run is at what falls on the end of an epoch.
        validated: whether a validation has taken place in this fit; sanity validation does not count.
        run_id: tells this run from others, also in a folder that several share; the same after a resume.
        checkpoints: the checkpoints of this run that rank 0 found when it began, and the step of each.
        save_asked: at a save point, whether somebody asked for one with `save_soon`; the same on all ranks.
        owes_saves: at a save point, whether the run was cut off while it wrote the checkpoints of this boundary.
        at_boundary: whether a checkpoint written now could be continued exactly; the same on all ranks in
            `on_exception`.
        best_checkpoint: the best checkpoint so far, or the last where nothing is watched; set by `Checkpoint`.
    """

    execute: Callable[..., tuple[torch.Tensor, float] | None]

    def __init__(self, verb: str, task: VisionTask, devices: Devices, settings: dict[str, Any], seed: int) -> None:
        self.verb, self.task, self.devices, self.settings, self.seed = verb, task, devices, settings, seed
        self.stage = {"fit": "train", "validate": "val"}.get(verb, verb)
        self.state = RunState()
        self.plan = Plan(rounds=None)
        self.callbacks = Callbacks(task)
        self.clock = devices.clock
        self.records = Records(devices, task)
        self.call_step: Callable[..., Any] = self._call_step
        self.recovery = Recovery(self)
        self.oom_events: tuple[OOMEvent, ...] = ()  # of all ranks, once the fit is over
        self.metrics: dict[str, float] = {}
        self.progress_metrics: dict[str, float] = {}
        self.hparams: dict[str, Any] = {}
        self.run_dir: Path | None = None
        self.tracking: Tracking | None = None
        self.optimization: Optimization | None = None
        self.executor: Executor | None = None
        self.train_loader: RankLoader | None = None
        self.train_limit: int | None = None
        self.evaluation_loaders: dict[str, RankLoader] = {}
        self.evaluation_limits: dict[str, int | None] = {}
        self.loader_name = ""
        self.evaluation_rounds: int | None = None
        self.variants: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        self.variant = ""
        self.batch_samples: int | None = None
        self.deadline: float | None = None
        self._stop: str | None = None
        self._adapts = type(task).on_after_batch_to_device is not VisionTask.on_after_batch_to_device
        self._throughput = (time.perf_counter(), 0)
        self._trained = 0  # samples since the start, over all ranks
        self.telling = Telling(self)
        self._working = False
        self.validated = False
        self.ends_epoch = False
        self.monitors_checked = False
        self.compiled: list[torch.nn.Module] = []  # what this run compiled
        self.signals = Signals()
        self.run_id, self.attempt = "", 0
        self.checkpoints: dict[Path, int] = {}
        self.continued: Path | None = None  # the checkpoint that this run goes on from,
        self.saved: dict[str, Any] = {}  # what it tells of the run,
        self.generators: dict[str, Any] | None = None  # and the generators of this rank
        self.began = time.monotonic()  # earlier by what former attempts took
        self.requests: list[Request] = []  # checkpoints that were asked for at this save point
        self.gathers = Gathers()
        self.balance: Balance | None = None  # on rank 0 what `LoadBalance` found; once the fit is over, on all ranks
        self.saves_soon = self.heard_late = self.save_asked = False
        self.at_boundary = False
        # What a checkpoint of now has still before it: the last step's validation, the epoch's end, other checkpoints.
        self.owes_evaluation = self.owes_epoch_end = self.owes_saves = False
        self.reached: Any = None  # where a stream of a continued epoch stands
        self.epoch_feed: Feed | None = None  # of the running epoch
        self.best_checkpoint: Path | None = None

    # What callbacks and tasks use

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.devices.device

    @property
    def rank(self) -> int:
        """This process's number among all, from 0."""
        return self.devices.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self.devices.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.devices.is_main

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers; empty outside fit."""
        return [] if self.optimization is None else self.optimization.optimizers

    @property
    def schedulers(self) -> list[Any]:
        """The learning-rate schedulers; empty outside fit."""
        return [] if self.optimization is None else self.optimization.schedulers

    @property
    def train_rounds(self) -> int | None:
        """Rounds of a training epoch after limits, of a stream the limit; None when unknown."""
        return limited(self.plan.rounds, self.train_limit)

    @property
    def max_epochs(self) -> int | None:
        """The limit of epochs; None for no such limit."""
        return self.plan.max_epochs

    @property
    def max_steps(self) -> int | None:
        """The limit of steps; None for no such limit."""
        return self.plan.max_steps

    @property
    def estimated_stepping_batches(self) -> int | None:
        """The number of steps of the whole run: exact under limits, accumulation and any number of ranks.

        An upper bound where updates can be left out (fp16, a step that returns None); None when neither the loader nor
        `max_steps` can tell.
        """
        return self.plan.total_steps

    def stop(self, reason: str) -> None:
        """Ask for the end of the run, on any rank: all ranks end at the same step, once min_steps and min_epochs allow.

        Args:
            reason: becomes `result.stop_reason`.
        """
        if self._stop is None:
            self._stop = reason

    def save_checkpoint(
        self,
        folder: str | Path,
        *,
        weights_only: bool = False,
        pretrained: bool = True,
        last: bool = False,
        keeps: Collection[Path] = (),
        done: Callable[[Path | None, str | None], None] | None = None,
    ) -> Request:
        """Ask for a checkpoint, on all ranks alike, in `on_save_point` or, where `at_boundary`, in `on_exception`.

        It is written when all callbacks have run. One that cannot be written leaves the former one as it is: a warning
        while the run goes on, a `CheckpointError` on every rank when it was the run's last. Weights that are not finite
        are not written, with a warning.

        Args:
            folder: the checkpoint; a relative one lies in the run's folder. One of this run is replaced; where another
                run or a file has that name, a number is added.
            weights_only: nothing but the weights, so that no run can go on from it.
            pretrained: also call `save_pretrained` of the task's transformers models.
            keeps: checkpoints of this run that are not to be replaced: here, too, a number is added.
            last: let a link `last` beside it point to it, or be a copy of it where the file system has no links.
            done: called on all ranks with the path that was written, or None and the reason.
        """
        assert self.run_dir is not None
        self.requests.append(Request(self.run_dir / folder, weights_only, pretrained, last, keeps, done))
        return self.requests[-1]

    def remove_checkpoint(self, folder: Path) -> None:
        """Remove a checkpoint of this run, on rank 0; does nothing where there is none, and warns where it cannot."""
        if self.is_main:
            try:
                remove_checkpoint(folder, self.run_id)
            except OSError as error:
                self.warn(f"The checkpoint {folder} could not be removed: {error}.")

    def save_soon(self) -> None:
        """Ask, on any rank, for a save point with `save_asked`: all ranks come to it at the same step."""
        self.saves_soon = True

    def log(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        prog_bar: bool = False,
        reduce: str = "mean",
        batch_size: int | torch.Tensor | None = None,
        **unknown: Never,
    ) -> None:
        """Record a value; see `VisionTask.log`. Outside a batch its weight is 1; at an epoch's end, the epoch's."""
        refuse_unknown(self.log, unknown)
        weight: float | torch.Tensor | None = batch_size
        if weight is None:
            weight = self.batch_samples if self._working else 1
        if self.ends_epoch and self.stage == "train" and on_step is None and on_epoch is None:
            on_step, on_epoch = False, True  # there is no step that it could belong to
        self.records.add(
            self._prefix,
            name,
            value,
            weight=weight,
            on_step=on_step,
            on_epoch=on_epoch,
            prog_bar=prog_bar,
            reduce=reduce,
        )

    def log_dict(self, values: Mapping[str, Any], **settings: Any) -> None:
        """`log` each of these values, or each metric of a torchmetrics collection, with the same settings."""
        if is_metric_or_collection(values):  # a collection: its metrics share states and are computed together
            self.log("", values, **settings)
            return
        for name, value in values.items():
            self.log(name, value, **settings)

    def log_image(self, name: str, images: Any) -> None:
        """Show images in the tracker; see `VisionTask.log_image`. Rank 0's are shown; nothing in sanity validation."""
        if self.tracking is not None and self.stage != "sanity":
            full = self.full_name(name) + (f"_{self.variant}" if self.variant else "")
            if self.recovery.is_shown(full):
                return
            # A validation may be left and done again: its images come at its end.
            self.tracking.log_images(full, images, self.state.global_step, later=self.stage == "val")

    def gather(self, value: Any, then: Callable[[list[Any]], None]) -> None:
        """Ask, on all ranks alike, that `then` be called on rank 0 with every rank's value.

        In a fit's `on_log`, in `on_evaluation_end`, and in `on_save_point` where an epoch or the run ends. It is done
        once all callbacks have run the hook, in which ranks may not wait for each other. What `then` logs and shows
        still belongs to that moment; what it raises is raised on all ranks.

        value: goes between processes pickled, with its tensors on the CPU. `then` gets a list of them in rank order.
        """
        self.gathers.ask(value, then)

    def keep_epoch(self, name: str) -> None:
        """Keep the value over the epoch, too, of a full name that the task logs per step alone: as `name_epoch`."""
        self.records.keep_epoch([name])

    def full_name(self, name: str) -> str:
        """`name` with the prefix of its stage, unless it has a "/"."""
        return name if "/" in name else f"{self._prefix}/{name}"

    def message(self, text: str, *, every_rank: bool = False) -> None:
        """Tell the person at the terminal something, without breaking a bar.

        every_rank: also where this is not rank 0: what one rank alone knows.
        """
        if self.is_main or every_rank:
            from tqdm import tqdm

            tqdm.write(text)

    def warn(self, text: str) -> None:
        """Warn, on rank 0 only."""
        if self.is_main:
            warnings.warn(text, stacklevel=3)

    # What the loops use

    @property
    def _prefix(self) -> str:
        stage = "val" if self.stage == "sanity" else self.stage
        return f"{stage}/{self.loader_name}" if self.loader_name and stage != "train" else stage

    def feed(self, loader: RankLoader, *, start: Start = BEGINNING, limit: int | None = None) -> Feed:
        """The batches of the running epoch, or of an evaluation, on this rank's device."""
        return Feed(
            loader,
            self.device,
            epoch=self.state.epoch if self.stage == "train" else 0,
            start=start,
            limit=limit,
            non_blocking=self.settings["non_blocking"],
            channels_last=self.settings["channels_last"],
            dealt=self.settings["dispatch_batches"],
            first_batch=self.state.batch if self.stage == "train" else 0,
            clock=self.clock if self.stage == "train" else None,
        )

    def begin_batch(self, fetched: Fetched) -> Any:
        """Take note of the batch that is worked on now; returns it as the task wants it on the device."""
        self.batch_samples = fetched.size if fetched.size is not None else self.task.batch_size(fetched.batch)
        self._working = True
        return self.task.on_after_batch_to_device(fetched.batch, self.stage) if self._adapts else fetched.batch

    def _call_step(self, step: Callable[[Any, int], Any], batch: Any, batch_idx: int) -> Any:
        with self.devices.autocast():
            return step(batch, batch_idx)

    def end_batch(self) -> None:
        """No batch is worked on any more."""
        self.batch_samples = None
        self._working = False

    def publish(self, values: dict[str, float]) -> None:
        """Values that are equal on all ranks: remember them, show them, track them."""
        if not values or self.stage == "sanity":
            return
        self.metrics.update(values)
        for name in self.records.prog_bar_names:
            if name in values:
                self.progress_metrics[name] = values[name]
        if self.verb == "fit":
            with self.gathers.settling(self.devices):
                step = self.state.global_step
                self.callbacks.on_log(self, values, step)
                if self.tracking is not None:
                    self.tracking.log(values, step, self.state.epoch)

    def step_values(self) -> dict[str, float]:
        """What the curves get at this step, over all ranks."""
        assert self.optimization is not None
        now, (since, before) = time.perf_counter(), self._throughput
        if self._trained > before and now > since:
            speed = (self._trained - before) / (now - since)  # by this rank's clock: the ranks' mean is recorded
            self.records.add("train", "samples_per_second", speed, weight=1.0)
        self._throughput = (now, self._trained)
        values = self.records.step_values()
        for name, rate in self.optimization.learning_rates.items():
            values.setdefault(f"train/{name}", rate)  # a task's own log of that name comes first
        if self.optimization.gradient_norm is not None:
            values.setdefault("train/grad_norm", float(self.optimization.gradient_norm))
        return values

    def read_rest(self) -> None:
        """Keep in `metrics` what was recorded since the last points of the curves, which get no point for it."""
        rest = self.records.step_values()
        if (name := "memory/oom_events") in rest:
            self.publish({name: rest[name]})  # each event is told
        self.metrics.update({**rest, **self.records.epoch_values("train")})

    def count(self, feed: Feed, rounds: int, samples: int, window: Window) -> None:
        """A window is done: count it alike on all ranks.

        Args:
            feed: the epoch.
            rounds: the window's rounds on this rank.
            samples: its samples over all ranks as the sampler knows them; 0 when it does not.
            window: what the ranks told each other, which counts where the sampler does not know.
        """
        feed.begin_window(self.plan.accumulation)
        if not feed.sized:  # streams may have ended on some ranks; while one has more, it has filled its window
            short = -(-window.batches // self.devices.world_size)
            rounds, samples = self.plan.accumulation if window.more else short, window.samples
        samples = samples or window.samples
        self.state.batch += rounds
        self.state.samples += samples
        self._trained += samples

    @property
    def wants_stop(self) -> bool:
        """Whether this rank asks for the end of the run."""
        if self.deadline is not None and self._stop is None and time.monotonic() >= self.deadline:
            self._stop = "max_time"
        return self._stop is not None or self.signals.received is not None

    def settle_stop(self, asked: bool | None = None) -> None:
        """Obey a stop that any rank asked for, on all ranks alike.

        Args:
            asked: whether any rank asked, as the ranks told each other in a step; None to find out now.
        """
        if self.devices.world_size == 1:
            asked = self.wants_stop
        elif asked is None:
            asked = self.devices.agree([float(self.wants_stop)])[0] > 0
        if not asked or self.state.stop_reason is not None:
            return
        signals, reasons = zip(*self.devices.gather_objects((self.signals.received, self._stop)), strict=True)
        if not self.plan.may_stop(self.state):
            reasons = ()  # a signal does not wait for min_steps and min_epochs
        self.state.stop_reason = next((reason for reason in (*signals, *reasons) if reason is not None), None)

    def hear_save(self, asked: bool) -> None:
        """Note whether any rank asked for a checkpoint in the window.

        What was told late is known here while another rank may fail without knowing it: it holds for the next window,
        at whose end all ranks meet.
        """
        if self.executor is not None and self.executor.late:
            self.heard_late = self.heard_late or asked
        else:
            self.save_asked = self.save_asked or asked

    def carry_save(self) -> None:
        """A window begins: what was told late in the one before holds for it."""
        self.save_asked, self.heard_late = self.save_asked or self.heard_late, False

    def settle_end(self) -> None:
        """At a fit's end, let all ranks know what each met: signals (also the last one), memory's events, balance."""
        own = (self.signals.received, [tuple(event) for event in self.recovery.learned.events], self.balance)
        signals, events, balances = zip(*self.devices.gather_objects(own), strict=True)
        self.balance = balances[0]
        self.signals.obeyed = next((name for name in signals if name is not None), None)
        met = sorted((OOMEvent(*event) for rank in events for event in rank), key=lambda event: event.step)
        self.oom_events = tuple(met)

    def evaluated(self) -> dict[str, float]:
        """The values of the evaluation loader that was just read, over all ranks."""
        return self.records.epoch_values(self._prefix)

    def expected_samples(self, feed: Feed, first: Fetched | None) -> float:
        """The samples of the coming window over all ranks, as far as they are known before it: alike on all ranks.

        What is off here is put right by one factor after the window, so a guess costs exactness nothing.

        Args:
            feed: the epoch.
            first: this rank's first round of the window; None when it has none.
        """
        plan, ranks = self.plan, self.devices.world_size
        rounds, batch_size = plan.accumulation, feed.batch_size
        if feed.sized and plan.rounds is not None:
            rounds = min(rounds, plan.rounds - self.state.batch)
        if feed.sized and batch_size is not None and feed.num_samples is not None:
            return min(rounds * ranks * batch_size, feed.num_samples - self.state.samples)
        if feed.sized and first is not None and first.total is not None:
            return rounds * first.total
        if ranks == 1 and first is not None:
            return rounds * (first.size or self.task.batch_size(first.batch) or 1)
        return rounds * ranks * (batch_size or 1)

    def pause_throughput(self, seconds: float) -> None:
        """Leave time that was not spent on training out of its speed."""
        since, samples = self._throughput
        self._throughput = (since + seconds, samples)
