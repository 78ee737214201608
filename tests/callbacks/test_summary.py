"""The summary: what a fit trains, and what came out of it."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sanctuary_trainer.callback import Callbacks
from sanctuary_trainer.callbacks import Summary
from sanctuary_trainer.state import RunState


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).requires_grad_(False)
        self.head = nn.Linear(1000, 10)
        self.scale = nn.Parameter(torch.ones(3))


def new_run(task: nn.Module, **attributes: Any) -> Any:
    """What the summary reads of a run; `told` holds its messages."""
    told: list[str] = []
    given = {
        "task": task,
        "is_main": True,
        "world_size": 1,
        "device": torch.device("cpu"),
        "devices": types.SimpleNamespace(best_checkpoint=None, mixed_precision="no"),
        "state": RunState(),
        "metrics": {},
        "run_dir": None,
        "message": told.append,
        "told": told,
    }
    return types.SimpleNamespace(best_checkpoint=None, **{**given, **attributes})


def start(task: nn.Module, **attributes: Any) -> str:
    run = new_run(task, **attributes)
    Callbacks(None, [Summary()]).on_fit_start(run)
    (text,) = run.told
    return str(text)


def end(**attributes: Any) -> list[str]:
    run = new_run(nn.Module(), **attributes)
    Callbacks(None, [Summary()]).on_fit_end(run)
    return [line for text in run.told for line in text.splitlines()]


def test_the_task_is_shown_by_its_modules() -> None:
    lines = start(Task()).splitlines()
    assert lines[0] == "Task on cpu, full precision, 1 process"
    assert [line.split() for line in lines[1:]] == [
        ["module", "type", "parameters", "trainable"],
        ["backbone", "Sequential", "240", "0"],  # 3 x 3 x 3 x 8 + 8, and 2 x 8
        ["head", "Linear", "10,010", "10,010"],
        ["(its", "own)", "Parameter", "3", "3"],
        # (240 + 10,010 + 3) x 4 bytes, and of the batch norm 2 x 8 x 4 + 8 bytes of buffers
        ["total", "0.0", "MB", "10,253", "10,013"],
    ]
    assert len({len(line) for line in lines[1:]}) == 1  # numbers end in one column


def test_device_precision_and_ranks_are_named() -> None:
    devices = types.SimpleNamespace(best_checkpoint=None, mixed_precision="bf16")
    text = start(Task(), device=torch.device("cuda", 1), devices=devices, world_size=8)
    assert text.splitlines()[0] == "Task on cuda:1, bf16, 8 ranks"


def test_the_size_is_what_parameters_and_buffers_hold() -> None:
    task = nn.Module()
    task.small = nn.Linear(1000, 1000, bias=False).half()
    task.register_buffer("table", torch.zeros(1_000_000))
    assert "6.0 MB" in start(task)


def test_tied_weights_count_once_in_the_total() -> None:
    task = nn.Module()
    task.encode, task.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    task.decode.weight = task.encode.weight
    assert [line.split()[-2:] for line in start(task).splitlines()[2:]] == [["16", "16"]] * 3


def test_lazy_parameters_are_a_question_mark() -> None:
    task = nn.Module()
    task.lazy, task.norm, task.known = nn.LazyLinear(10), nn.LazyBatchNorm2d(), nn.Linear(2, 3)
    rows = {line.split()[0]: line.split()[2:] for line in start(task).splitlines()[2:]}
    assert rows["lazy"] == ["0", "+", "?", "0", "+", "?"]
    assert rows["known"] == ["9", "9"]
    assert rows["total"] == ["MB", "9", "+", "?", "9", "+", "?"]


def test_a_task_without_modules_is_shown_too() -> None:
    assert start(nn.Module()).splitlines()[-1].split() == ["total", "0.0", "MB", "0", "0"]


def test_long_names_are_cut_and_many_modules_counted() -> None:
    task = nn.Module()
    for number in range(100):
        task.add_module(f"a_name_that_is_much_too_long_for_a_table_{number:03}", nn.Identity())
    lines = start(task).splitlines()
    assert len(lines) == 24  # title, head, 20 modules, how many more, total
    assert lines[2].split()[0] == "a_name_that_is_much...ng_for_a_table_000"
    assert "(80 more)" in lines[-2]
    assert max(map(len, lines)) <= 80


def test_the_results_are_shown_at_the_end() -> None:
    lines = end(
        state=RunState(epoch=3, global_step=1200, stop_reason="max_epochs"),
        metrics={"train/loss": 0.123456789, "val/accuracy": 0.98125, "val/loss": float("nan")},
        run_dir=Path("runs") / ("a_long_name_of_a_run_" * 4),
    )
    assert lines == [
        "Ended after 1,200 steps, 3 epochs: max_epochs",
        "  val/accuracy  0.98125",
        "  val/loss      nan",
        "  train/loss    0.12346",
        f"  in {Path('runs') / ('a_long_name_of_a_run_' * 4)}",
    ]


def test_one_step_is_no_plural_and_no_metrics_are_no_table() -> None:
    assert end(state=RunState(epoch=1, global_step=1, stop_reason="max_steps")) == [
        "Ended after 1 step, 1 epoch: max_steps"
    ]


def test_many_results_are_cut_and_training_goes_first() -> None:
    metrics = {f"train/class_{n}": 0.0 for n in range(30)} | {f"val/class_{n}": 1.0 for n in range(15)}
    lines = end(state=RunState(stop_reason="max_steps"), metrics=metrics)
    assert len(lines) == 22
    assert sum("val/" in line for line in lines) == 15
    assert lines[-1] == "  (25 more)"


def test_a_fit_that_failed_has_no_results() -> None:
    assert end(state=RunState(global_step=5, stop_reason=None), metrics={"train/loss": 1.0}) == []


@pytest.mark.parametrize("hook", ["on_fit_start", "on_fit_end"])
def test_only_rank_0_tells(hook: str) -> None:
    run = new_run(Task(), is_main=False, state=RunState(stop_reason="max_steps"))
    getattr(Callbacks(None, [Summary()]), hook)(run)
    assert run.told == []


def test_the_table_needs_no_more_than_ascii() -> None:
    # A log with another encoding than UTF-8 must not end a run.
    start(Task()).encode("ascii")
