"""Which rank is slow, why, what it costs everybody, and what to try first.

    each batch      how much work it is
    each sync       the laps of the clock since the sync before are one row of this rank
    each log        every rank's rows come to rank 0: scalars of each rank; a severe cause is told at once
    the end         the verdict: in the console, as a page and a picture in TensorBoard, in balance.json, in `result`

All ranks leave a sync together, so that times of steps do not tell them apart; the time that a rank waits there does.
On an accelerator the laps are read off its own timeline, on a fifth of the steps.
"""

from __future__ import annotations

import json
import os
import platform
import random
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sanctuary_trainer import LAPS, Callback, History, Measured, TaskError, Trail
from sanctuary_trainer.callbacks.balance_page import balance_page, balance_text
from sanctuary_trainer.callbacks.rank_memory import rank_memory

if TYPE_CHECKING:
    from sanctuary_trainer import Balance, Run

FILE = "balance.json"
# A quarter of everybody's time is worth an interruption, once it lasts.
SEVERE = 0.25
LEAST_STEPS = 40  # before a cause is told at once: the first steps of a run are unlike the rest
# Where a row costs events on the device or hooks on the gradients: one of so many steps, drawn, since logs, validations
# and checkpoints fall on every n-th.
SAMPLE_EVERY = 5
SHOW_SECONDS = 300.0  # between two pictures: one costs 15 ms and 40 kB
MOST_CURVES = 16  # ranks with curves of their own
MOST_COST = 1e100  # of a batch: sums and squares of it are finite


class LoadBalance(Callback):
    """Finds what keeps ranks waiting, on one process what the time goes on beside the model.

    `result.balance` is a `Balance` on every rank: a verdict, findings with evidence and advice, the times of each rank.
    Rank 0 logs `balance/LAP/rankR` in percent of a step, the picture `balance/time_of_ranks`, the page
    `balance/report`, and writes `balance.json` into the run's folder. How much work a batch is tells
    `VisionTask.cost`.

    It costs one small gather at each log and about 15 us a step. A fit that is continued begins with an empty history.

    Raises:
        TaskError: `VisionTask.cost` gives no number, one below 0 or not finite, or one that lies on the device.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._history, self._told = History(), set[tuple[str, tuple[int, ...]]]()
        self._totals: dict[str, float] | None = None  # of the clock at the last sync
        self._begins: list[dict[str, float]] = []  # of the rows: the clock's totals
        self._ends: list[dict[str, float]] = []
        self._trails: list[Trail] = []
        self._samples: list[float] = []
        self._costs: list[float] = []
        self._batch_samples = self._batch_cost = 0.0
        self._place: dict[str, Any] = {}
        self._steps, self._check = 0, LEAST_STEPS
        self._draw, self._sampled = random.Random(0), 0  # alike on all ranks
        self._shown = time.monotonic()
        self._processor = self._last_processor = 0.0  # at the last sync, and at that before the first row

    def on_fit_start(self, run: Run) -> None:
        self._reset()
        if not callable(getattr(run.task, "cost", None)):
            raise TaskError(
                f"{type(run.task).__name__}.cost is {run.task.cost!r:.80}; LoadBalance asks cost(batch) how much work "
                "a batch is. Call what you keep there by another name."
            )
        self._place = {"host": platform.node(), "device": _name(run), "cores": _cores()}
        run.callbacks.time_with(run.clock)

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        self._batch_samples += run.batch_samples or 0
        cost = run.task.cost(batch)
        self._batch_cost += cost if type(cost) in (int, float) and 0 <= cost <= MOST_COST else _number(cost, run)

    def on_before_optimizer_step(self, run: Run) -> None:
        clock, before, sampled = run.clock, self._totals, True
        self._totals, self._processor = clock.totals(), time.process_time()
        if before is None:
            self._last_processor = self._processor
        on_device = run.device.type != "cpu"
        if on_device or (run.executor is not None and run.executor.needs_sampling):
            sampled, place, self._steps = clock.sampling, self._steps % SAMPLE_EVERY, self._steps + 1
            if clock.trail is not None:
                self._trails.append(clock.trail)
            if place == 0:
                self._sampled = self._draw.randrange(SAMPLE_EVERY)
            clock.sampling = place == self._sampled
            clock.trail = Trail(run.device) if clock.sampling and on_device else None
        if before is not None and sampled:
            self._begins.append(before)
            self._ends.append(self._totals)
            self._samples.append(self._batch_samples)
            self._costs.append(self._batch_cost)
        self._batch_samples = self._batch_cost = 0.0

    def on_log(self, run: Run, values: dict[str, float], step: int) -> None:
        if run.stage == "train" and self._samples:
            self._gather(run)

    def on_save_point(self, run: Run) -> None:
        if run.state.stop_reason is not None:  # what came after the last log
            self._gather(run)

    def saves_at(self, step: int) -> bool:
        return False

    def on_fit_end(self, run: Run) -> None:
        run.clock.trail, run.clock.sampling = None, False
        if not (run.is_main and self._history.steps):
            return
        failed = run.balance is None  # else it was made and shown when all ranks met for the last time
        run.balance = run.balance or self._history.balance()
        run.message(balance_text(run.balance))
        if run.run_dir is not None:
            beside = run.run_dir / f".{FILE}.partial"  # whoever reads the file finds all of it
            try:
                beside.write_text(json.dumps(run.balance.as_dict(), indent=1) + "\n", encoding="utf-8")
                beside.replace(run.run_dir / FILE)
            except OSError as error:
                run.warn(f"{FILE} could not be written: {error}.")
        if failed:
            self._show(run, run.balance)

    def teardown(self, run: Run) -> None:
        self._reset()

    def _gather(self, run: Run) -> None:
        """Bring this rank's rows to rank 0; equally many on every rank."""
        begins, ends = self._begins, self._ends
        if self._trails:  # in place of the host's time, on an accelerator's
            ends = [trail.seconds() for trail in self._trails]
            begins = [{}] * len(ends)
        memory_bytes, memory_share = rank_memory(run.device)
        measured = Measured.of(
            begins,
            ends,
            samples=self._samples,
            cost=self._costs,
            # Where not all steps are rows, it is not known which part of it they took.
            processor_seconds=None if self._steps else self._processor - self._last_processor,
            memory_bytes=memory_bytes,
            memory_share=memory_share,
            workers=None if run.train_loader is None else run.train_loader.num_workers,
            **self._place,
        )
        self._last_processor = self._processor
        self._begins, self._ends, self._trails, self._samples, self._costs = [], [], [], [], []
        run.gather(measured, partial(self._hear, run))

    def _hear(self, run: Run, of_ranks: list[Measured]) -> None:
        """On rank 0: take in what all ranks measured, and tell what cannot wait."""
        history = self._history
        history.add(of_ranks)
        if not history.steps:
            return
        if run.tracking is not None and of_ranks[0].samples:
            run.tracking.log(curves(history, len(of_ranks[0].samples)), run.state.global_step, run.state.epoch)
        if run.state.stop_reason is not None:
            run.balance = history.balance()
            self._show(run, run.balance)  # here, where an error of the tracker's ends all ranks
            return
        if history.steps >= self._check:
            self._check = history.steps + len(history.recent)
            self._tell_severe(run, history.balance(recent=True))
        if time.monotonic() - self._shown >= SHOW_SECONDS:
            self._show(run, history.balance())

    def _tell_severe(self, run: Run, balance: Balance) -> None:
        for finding in balance.findings:
            key = (finding.cause, finding.ranks)
            if finding.share >= SEVERE and finding.chronic and key not in self._told:
                self._told.add(key)
                whom = "" if len(balance.ranks) == 1 else "everybody "
                text = f"{finding.evidence}; this costs {whom}{100 * finding.share:.0f} %. {finding.advice}"
                run.message(f"Load balance: {text}")

    def _show(self, run: Run, balance: Balance) -> None:
        if run.tracking is None:
            return
        from sanctuary_trainer.callbacks.balance_picture import balance_picture

        self._shown, step = time.monotonic(), run.state.global_step
        run.tracking.log_images("balance/time_of_ranks", balance_picture(balance), step)
        run.tracking.log_text("balance/report", balance_page(balance), step)


def curves(history: History, last: int) -> dict[str, float]:
    """Percent of a step that each rank spent on each lap in the last rows; of many ranks their extremes."""
    rows = history.recent[-last:, :, : len(LAPS)].mean(0)  # (R, laps)
    percent = 100 * rows / max(float(rows.sum(1).mean()), 1e-12)
    values: dict[str, float] = {}
    for lap, of_ranks in zip(LAPS, percent.T.tolist(), strict=True):
        if not any(of_ranks):
            continue
        if len(of_ranks) <= MOST_CURVES:
            values |= {f"balance/{lap}/rank{rank}": value for rank, value in enumerate(of_ranks)}
        else:
            ordered = sorted(of_ranks)
            values |= {f"balance/{lap}/min": ordered[0], f"balance/{lap}/max": ordered[-1]}
            values[f"balance/{lap}/median"] = ordered[len(ordered) // 2]
    return values


def _number(cost: Any, run: Run) -> float:
    if isinstance(cost, Tensor) and cost.device.type != "cpu":
        raise TaskError(
            f"{type(run.task).__name__}.cost returned a tensor on {cost.device}: reading it would wait for the device "
            "in every step. Reckon with shapes and lengths, which the host knows."
        )
    with suppress(TypeError, ValueError, OverflowError):
        number = float(cost)
        if 0 <= number <= MOST_COST:  # not NaN either
            return number
    raise TaskError(
        f"{type(run.task).__name__}.cost returned {cost!r:.80}; a number was expected, from 0 to {MOST_COST:g}."
    )


def _name(run: Run) -> str:
    if run.device.type != "cuda":
        return str(run.device)
    from torch.cuda import get_device_name

    return f"{run.device} {get_device_name(run.device)}"


def _cores() -> int:
    """Cores that this rank may use: those it is pinned to, else its part of the machine's."""
    every = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    if own < every:
        return own
    return max(own // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
