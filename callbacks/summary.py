"""What a fit trains, in one short table at its start, and what came out, in another at its end.

Classifier on cpu, bf16, 2 ranks
  module    type                parameters  trainable
  model     ResNet              11,181,642      5,130
  accuracy  MulticlassAccuracy           0          0
  total     44.8 MB             11,181,642      5,130

Ended after 1,200 steps, 3 epochs: max_epochs
  val/accuracy      0.9812
  train/loss_epoch  0.1043
  files             runs/Classifier-3
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from sanctuary_trainer import Callback

if TYPE_CHECKING:
    from torch import Tensor

    from sanctuary_trainer import Run, VisionTask

MOST_ROWS = 20
LONGEST_CELL = 40  # characters


class Summary(Callback):
    """Tells, on rank 0, what a fit trains and on what, and what it reached; a fit that fails reaches nothing."""

    def on_fit_start(self, run: Run) -> None:
        if run.is_main:
            precision = "full precision" if run.devices.mixed_precision == "no" else run.devices.mixed_precision
            ranks = "1 process" if run.world_size == 1 else f"{run.world_size} ranks"
            title = f"{type(run.task).__name__} on {run.device}, {precision}, {ranks}"
            run.message(_table(title, _module_rows(run.task), numbers=(2, 3)))

    def on_fit_end(self, run: Run) -> None:
        if run.is_main and run.state.stop_reason is not None:
            steps, epochs = _many(run.state.global_step, "step"), _many(run.state.epoch, "epoch")
            files = "" if run.run_dir is None else f"\n  in {run.run_dir}"  # a path is never cut
            if run.best_checkpoint is not None:
                files += f"\n  checkpoint {run.best_checkpoint.name}"
            run.message(_table(f"Ended after {steps}, {epochs}: {run.state.stop_reason}", _result_rows(run)) + files)


def _module_rows(task: VisionTask) -> list[Sequence[str]]:
    """Name, type, parameters and trainable parameters of the task's modules; tied weights count once in the total."""
    rows: list[Sequence[str]] = [
        (name, type(module).__name__, *_counts(module.parameters())) for name, module in task.named_children()
    ]
    own = list(task.parameters(recurse=False))
    if own:
        rows.append(("(its own)", "Parameter", *_counts(own)))
    if len(rows) > MOST_ROWS:
        rows[MOST_ROWS:] = [(f"({len(rows) - MOST_ROWS} more)",)]
    held = sum(tensor.nbytes for tensor in (*task.parameters(), *task.buffers()) if not is_lazy(tensor))
    total = ("total", f"{held / 1e6:.1f} MB", *_counts(task.parameters()))
    return [("module", "type", "parameters", "trainable"), *rows, total]


def _result_rows(run: Run) -> list[Sequence[str]]:
    """Name and last value of what was recorded, evaluation's before training's."""
    names = sorted(run.metrics, key=lambda name: (name.startswith("train/"), name))
    rows: list[Sequence[str]] = [(name, f"{run.metrics[name]:.5g}") for name in names[:MOST_ROWS]]
    if len(names) > MOST_ROWS:
        rows.append((f"({len(names) - MOST_ROWS} more)",))
    return rows


def _counts(parameters: Iterable[Tensor]) -> tuple[str, str]:
    """Parameters and trainable ones; "?" stands for those that have no shape before the first batch."""
    everything = list(parameters)
    return _sum(everything), _sum([parameter for parameter in everything if parameter.requires_grad])


def _sum(parameters: Sequence[Tensor]) -> str:
    known = sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))
    return f"{known:,}" if not any(map(is_lazy, parameters)) else f"{known:,} + ?"


def _many(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _table(title: str, rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """The title and the rows under it in columns; those of `numbers` end at the right."""
    short = [tuple(map(_cut, row)) for row in rows]
    columns = range(max(map(len, short), default=0))
    widths = [max(len(row[column]) for row in short if len(row) > column) for column in columns]
    lines = []
    for row in short:
        cells = [row[i].rjust(widths[i]) if i in numbers else row[i].ljust(widths[i]) for i in range(len(row))]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join([title, *lines])


def _cut(cell: str) -> str:
    """The cell, its middle left out where it is too long: the end of a name tells more than its middle."""
    if len(cell) <= LONGEST_CELL:
        return cell
    half = (LONGEST_CELL - 3) // 2
    return f"{cell[: LONGEST_CELL - 3 - half]}...{cell[-half:]}"
