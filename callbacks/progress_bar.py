"""How far the run is: a bar in a terminal or a notebook, a few whole lines in a log file.

    terminal   one line, redrawn in place: the running epoch, in its place for a while the running evaluation, then the
               epoch again with the results. The line of a finished epoch stays. What anybody prints, warns or logs
               meanwhile stands above it.
    notebook   the same lines as text in one output of the cell, drawn again in place; no widgets are needed
    elsewhere  (stderr is a file or a pipe) whole lines without carriage returns: at quarters of an epoch and at its end

Only rank 0 shows anything, and never on stdout, which is left to results. What is shown has been recorded
(`run.metrics`), so a bar never waits for the device, and the loss changes every `log_every_n_steps` steps; at the end
of an epoch it is the epoch's mean. "train/" is left out of names: so validation's results fit into 80 columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sanctuary_trainer import Callback
from sanctuary_trainer.callbacks.bars import (
    Bar,
    CellLine,
    CellOutput,
    Lines,
    keep_output_above,
    notebook_shell,
    on_terminal,
)

if TYPE_CHECKING:
    from torch import Tensor

    from sanctuary_trainer import Run

LOSSES = ("train/loss_epoch", "train/loss")


class ProgressBar(Callback):
    """Shows epoch, batches, speed, the training loss, values logged with `prog_bar=True` and validation's results.

    refresh_seconds: in a terminal or a notebook, time between two drawings of the line at least.
    line_seconds: elsewhere, time between two lines of one epoch at least.
    """

    def __init__(self, *, refresh_seconds: float = 0.2, line_seconds: float = 5.0) -> None:
        self.refresh_seconds = refresh_seconds
        self.line_seconds = line_seconds
        self._put_output_back: Callable[[], None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._epoch: Bar | CellLine | Lines | None = None
        self._epoch_title, self._epoch_batches, self._samples_before = "", 0, 0
        self._results: dict[str, float] = {}
        # A pass goes once through the data of an evaluation or of a prediction.
        self._pass: Bar | CellLine | Lines | None = None
        self._begin_pass()

    def setup(self, run: Run) -> None:
        self._reset()
        self._cell = None if notebook_shell() is None else CellOutput()
        self._live = self._cell is not None or on_terminal()
        # The one test that each batch pays for: when to draw again. Never, on the other ranks.
        self._next = 0.0 if run.is_main else math.inf
        if run.is_main and self._live:
            self._put_output_back = keep_output_above(self._visible)

    def on_train_epoch_start(self, run: Run) -> None:
        if run.is_main:
            self._results = {}
            self._open_epoch(run, batches=0)

    def on_train_batch_end(self, run: Run, batch: Any, batch_idx: int, loss: Tensor | None) -> None:
        self._epoch_batches = batch_idx + 1
        now = perf_counter()
        if now >= self._next:
            self._next = now + self.refresh_seconds
            self._draw_epoch(run)

    def on_train_epoch_end(self, run: Run) -> None:
        if self._epoch is not None:
            # run.state also counts the rounds in which this rank had no batch.
            self._epoch_batches = max(self._epoch_batches, run.state.batch)
            self._close_epoch(run, losses=LOSSES)

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        self._begin_pass()

    def on_evaluation_batch_end(
        self, run: Run, stage: str, batch: Any, outputs: Any, sample_indices: Sequence[Any] | None
    ) -> None:
        self._count_batch(run, stage)

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        if not run.is_main:
            return
        within_epoch = self._epoch is not None and self._epoch_batches != run.train_rounds
        # The epoch's own line shows the results; in a log file it may come much later.
        self._close_pass(run, stage, metrics, keep=run.verb != "fit" or (within_epoch and not self._live))
        if self._epoch is not None:
            self._results = dict(metrics)
            self._epoch.pause(perf_counter() - self._pass_began)
            self._draw_epoch(run)

    def on_predict_batch_end(self, run: Run, batch: Any, outputs: Any, sample_indices: Sequence[Any] | None) -> None:
        self._count_batch(run, "predict")

    def on_exception(self, run: Run, exception: BaseException) -> None:
        self._close_all(run)

    def on_fit_end(self, run: Run) -> None:
        self._close_all(run)

    def teardown(self, run: Run) -> None:
        self._close_all(run)
        if self._put_output_back is not None:
            self._put_output_back()
            self._put_output_back = None

    def _new(self, title: str, total: int | None, batches: int, began: float) -> Bar | CellLine | Lines:
        if self._cell is not None:
            return CellLine(title, total, batches, began, self._cell)
        if self._live:
            return Bar(title, total, batches, began)
        return Lines(title, total, batches, began, self.line_seconds)

    def _visible(self) -> Bar | None:
        """The bar that stands on the terminal's line now."""
        bar = self._epoch if self._pass is None else self._pass  # a bar of unknown total has no truth value
        return bar if isinstance(bar, Bar) else None

    def _close_all(self, run: Run) -> None:
        """Ends what is open, so that whatever is printed next begins on a line of its own."""
        if self._pass_batches and run.is_main and run.verb == "predict":
            self._close_pass(run, "predict", {}, keep=True)
        if self._pass is not None:
            self._pass.close(keep=False)
            self._pass = None
        if self._epoch is not None:
            self._close_epoch(run)

    def _open_epoch(self, run: Run, batches: int) -> None:
        of = "" if run.max_epochs is None else f"/{run.max_epochs}"
        self._epoch_title = f"epoch {run.state.epoch + 1}{of}"
        self._epoch_batches, self._samples_before = batches, run.state.samples
        self._epoch = self._new(self._epoch_title, run.train_rounds, batches, perf_counter())

    def _draw_epoch(self, run: Run, losses: Sequence[str] = LOSSES[-1:]) -> None:
        if self._epoch is None:  # an epoch that a resumed run continues has no start
            self._open_epoch(run, self._epoch_batches)
        assert self._epoch is not None
        values: dict[str, float | str] = {}
        if run.max_steps is not None:
            values["step"] = f"{run.state.global_step}/{run.max_steps}"
        for name in [name for name in losses if name in run.metrics][:1]:
            values["loss"] = run.metrics[name]
        for name, value in run.progress_metrics.items():
            if name not in LOSSES:
                values[name.removeprefix("train/")] = value
        values |= self._results
        samples = run.state.samples - self._samples_before
        self._epoch.draw(self._epoch_batches, run.train_rounds, values, samples)

    def _close_epoch(self, run: Run, losses: Sequence[str] = LOSSES[-1:]) -> None:
        assert self._epoch is not None
        self._draw_epoch(run, losses)
        self._epoch.close(keep=True)
        self._epoch = None

    def _begin_pass(self) -> None:
        self._pass_batches, self._pass_began, self._loader_name = 0, perf_counter(), ""

    def _count_batch(self, run: Run, stage: str) -> None:
        if run.loader_name != self._loader_name:
            if self._pass is not None:
                self._pass.close(keep=False)
                self._pass = None
            self._pass_batches, self._loader_name = 0, run.loader_name
        self._pass_batches += 1
        now = perf_counter()
        if now >= self._next:
            self._next = now + self.refresh_seconds
            self._draw_pass(run, stage, {})

    def _draw_pass(self, run: Run, stage: str, values: Mapping[str, float]) -> None:
        if self._pass is None:
            title = f"{stage}/{self._loader_name}" if self._loader_name else stage
            if self._epoch is not None:
                title = f"{self._epoch_title}, {title}"
            self._pass = self._new(title, run.evaluation_rounds, 0, self._pass_began)
        self._pass.draw(self._pass_batches, run.evaluation_rounds, values)

    def _close_pass(self, run: Run, stage: str, values: Mapping[str, float], *, keep: bool) -> None:
        if keep:
            self._draw_pass(run, stage, values)
        if self._pass is not None:
            self._pass.close(keep=keep)
            self._pass = None
        self._pass_batches = 0
