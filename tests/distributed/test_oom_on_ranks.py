"""One rank runs out of memory: it goes on in pieces, and the others see a slow rank, or hear of its end."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sanctuary_trainer import NotSupportedError, OutOfMemoryError, RankError
from sanctuary_trainer.callbacks import Checkpoint, OOMFallback
from tests.bombs import Bombed, bombed_loader, out_of_memory
from tests.distributed.workers import Ranks
from tests.small_tasks import quiet_trainer, weights
from tests.test_recovery import AsksForInputs

Arm = dict[str, Any]


def fit(
    arm: Arm | None = None,
    *,
    bomb: int = 2,
    task: dict[str, Any] | None = None,
    callbacks: list[Any] | None = None,
    samples: int = 48,
    val: int = 0,
    resume: Any = None,
    **settings: Any,
) -> tuple[Bombed, Any]:
    torch.manual_seed(0)
    bombed = Bombed(**(task or {}))
    if arm is not None:
        bombed.bombs[bomb].arm(**arm)
    defaults: dict[str, Any] = {"max_epochs": 1, "seed": 3, "log_every_n_steps": 1, "timeout": 30}
    trainer = quiet_trainer(**(defaults | settings), callbacks=[*(callbacks or []), OOMFallback()])
    return bombed, trainer.fit(bombed, bombed_loader(samples, 8), bombed_loader(val, 8) if val else None, resume=resume)


def results(arm: Arm | None = None, **settings: Any) -> Any:
    """Weights, steps, metrics, events, sizes of the pieces of this rank."""
    task, result = fit(arm, **settings)
    sizes = [a.size for a in task.bombs[settings.get("bomb", 2)].attempts if a.where == "forward" and not a.fired]
    metrics = {name: value for name, value in result.metrics.items() if "second" not in name}
    return weights(task), result.global_step, metrics, result.oom_events, sizes


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_rank_that_runs_out_changes_nothing_on_any(two_ranks: Ranks, where: str) -> None:
    arm = {"where": where, "above": 3, "ranks": (1,), "batch_idxs": (1,)}
    found, expected = two_ranks(results, arm), two_ranks(results)
    for rank in range(2):
        own, steps, metrics, events, _ = found[rank]
        plain, plain_steps, plain_metrics, _, _ = expected[rank]
        assert torch.equal(own, found[0][0])
        assert torch.allclose(own, plain, rtol=0, atol=1e-12)
        assert steps == plain_steps == 3
        assert [(e.rank, e.step, e.tried, e.piece_size) for e in events] == [(1, 1, 8, 2)]
        assert plain_metrics == pytest.approx({name: metrics[name] for name in plain_metrics}, abs=1e-12)
        assert (metrics["memory/oom_events"], metrics["memory/piece_size"]) == (1.0, 2.0)
    assert found[0][4] == [8, 8, 8]
    # A backward that breaks off has its forward behind it.
    tried = [8, 4, 2, 2, 2, 2] if where == "backward" else [2, 2, 2, 2]
    assert found[1][4] == [8, *tried, 2, 2, 2, 2]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("ranks", [(0,), (2,), (0, 1, 2)])
def test_three_ranks(three_ranks: Ranks, where: str, ranks: tuple[int, ...]) -> None:
    arm = {"where": where, "above": 1, "ranks": ranks, "batch_idxs": (0,)}
    found = three_ranks(results, arm, samples=72, gradient_accumulation_steps=2)
    expected = three_ranks(results, samples=72, gradient_accumulation_steps=2)
    for (own, steps, _, events, _), (plain, plain_steps, *_) in zip(found, expected, strict=True):
        assert torch.allclose(own, plain, rtol=0, atol=1e-12)
        assert steps == plain_steps
        assert [event.rank for event in events] == list(ranks)


def evaluated() -> Any:
    task, result = fit({"where": "forward", "above": 2, "ranks": (1,), "stages": ("val",)}, val=29, max_epochs=2)
    plain, expected = fit(val=29, max_epochs=2)
    same = torch.equal(weights(task), weights(plain))
    names = ("val/accuracy", "val/loss")
    return same, [result.metrics[name] - expected.metrics[name] for name in names], len(result.oom_events)


def test_a_validation_that_runs_out_on_one_rank_is_exact_and_leaves_training_alone(two_ranks: Ranks) -> None:
    for same, differences, events in two_ranks(evaluated):
        assert same
        assert differences == pytest.approx([0.0, 0.0], abs=1e-12)
        assert events == 1


def give_up(where: str, batch_idx: int, **settings: Any) -> Any:
    began = time.monotonic()
    arm = {"where": where, "above": 0, "ranks": (1,), "batch_idxs": (batch_idx,)}
    with pytest.raises((OutOfMemoryError, RankError)) as caught:
        fit(arm, bomb=1, **settings)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("batch_idx", "accumulation"), [(0, 1), (1, 3), (2, 3), (2, 1)])
def test_a_sample_that_does_not_fit_ends_all_ranks_with_its_text(
    two_ranks: Ranks, where: str, batch_idx: int, accumulation: int
) -> None:
    (name, text, seconds), (own, own_text, _) = two_ranks(
        give_up, where, batch_idx, gradient_accumulation_steps=accumulation
    )
    assert (name, own) == ("RankError", "OutOfMemoryError")
    assert "piece of 1 sample" in text and "piece of 1 sample" in own_text
    assert seconds < 20  # and not by the timeout


def resumed(folder: str) -> Any:
    """Rank 1 alone knows what it learned before it was cut."""
    found = []
    for name, stops in (("straight", (5,)), ("cut", (3, 5))):
        for number, stop in enumerate(stops):
            task, result = fit(
                {"where": "backward", "above": 3, "ranks": (1,), "steps": (1,)},
                task={"dropout": 0.2},
                samples=80,
                callbacks=[Checkpoint(every_n_steps=1, save_top_k=-1)],
                project_dir=folder,
                run_name=name,
                max_epochs=None,
                max_steps=stop,
                log_with="tensorboard",
                resume="auto" if number else None,
            )
        lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
        curves = [{k: v for k, v in json.loads(x).items() if k != "time" and "second" not in k} for x in lines]
        sizes = [a.size for a in task.bombs[2].attempts if a.where == "forward"]
        found.append((weights(task), curves, result.oom_events, sizes))
    return found


def test_each_rank_goes_on_with_what_it_had_learned(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank, (straight, cut) in enumerate(two_ranks(resumed, str(tmp_path))):
        assert torch.equal(straight[0], cut[0])
        assert straight[1] == cut[1]
        assert straight[2] == cut[2] and len(cut[2]) == 1
        assert set(cut[3]) == ({2} if rank == 1 else {8})


def refused(kind: str) -> str:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import DDPCommunicationHookType

    settings: dict[str, Any] = {}
    if kind == "power":
        hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)
        settings = {"accelerator": Accelerator(cpu=True, kwargs_handlers=[hook]), "cpu": None, "timeout": None}
    task = Bombed()
    if kind == "norm":
        task.norm = nn.SyncBatchNorm(4)
    with pytest.raises(NotSupportedError) as caught:
        quiet_trainer(**{"max_steps": 1, "timeout": 30} | settings, callbacks=[OOMFallback()]).fit(
            task, bombed_loader(16)
        )
    return str(caught.value)


@pytest.mark.parametrize(("kind", "text"), [("power", "PowerSGD"), ("norm", "SyncBatchNorm (norm)")])
def test_what_a_rank_cannot_repeat_alone_is_refused_before_the_run(two_ranks: Ranks, kind: str, text: str) -> None:
    for found in two_ranks(refused, kind):
        assert text in found


def behind_the_last(accumulation: int) -> Any:
    found = []
    for above in (100, 3):
        torch.manual_seed(0)
        task = AsksForInputs()
        task.bombs[-1].arm("backward", above, ranks=(1,))
        trainer = quiet_trainer(
            max_epochs=1, timeout=30, gradient_accumulation_steps=accumulation, callbacks=[OOMFallback()]
        )
        trainer.fit(task, bombed_loader(48, 8))
        found.append(weights(task))
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_rank_that_runs_out_behind_the_last_parameter_is_complete(two_ranks: Ranks, accumulation: int) -> None:
    for plain, found in two_ranks(behind_the_last, accumulation):
        assert torch.allclose(plain, found, rtol=0, atol=1e-12)


def with_a_hook_that_compresses(where: str, kind: str) -> Any:
    from datetime import timedelta

    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import DDPCommunicationHookType, InitProcessGroupKwargs

    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=[
            DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16),
            InitProcessGroupKwargs(timeout=timedelta(seconds=30)),
        ],
    )
    task = Bombed()
    error = out_of_memory if kind == "memory" else partial(ValueError, "mine")
    task.bombs[1].arm(where, 0, ranks=(1,), batch_idxs=(1,), error=error)  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises((OutOfMemoryError, RankError, ValueError)) as caught:
        quiet_trainer(max_steps=3, cpu=None, accelerator=accelerator, callbacks=[OOMFallback()]).fit(
            task, bombed_loader(64, 8)
        )
    return type(caught.value).__name__, time.monotonic() - began


@pytest.mark.parametrize(("where", "kind"), [("forward", "memory"), ("backward", "memory"), ("forward", "value")])
def test_with_a_hook_that_compresses_too_all_ranks_hear_of_an_error(two_ranks: Ranks, where: str, kind: str) -> None:
    (first, seconds), (second, _) = two_ranks(with_a_hook_that_compresses, where, kind)
    assert (first, second) == ("RankError", "OutOfMemoryError" if kind == "memory" else "ValueError")
    assert seconds < 20


def buffers() -> Any:
    """Batch norm on both ranks; rank 1 fails in a forward after DDP sent rank 0's buffers."""
    found = []
    for arm in (None, {"where": "forward", "above": 4, "ranks": (1,), "batch_idxs": (1,), "times": 1}):
        torch.manual_seed(0)
        task = Bombed(norm="bn")
        if arm is not None:
            task.bombs[-1].arm(**arm)  # type: ignore[arg-type]
        with pytest.warns(UserWarning, match="Batch norm") if arm and task_rank() == 1 else nothing():
            quiet_trainer(max_steps=3, seed=1, timeout=30, callbacks=[OOMFallback()]).fit(task, bombed_loader(48, 8))
        found.append(int(task.layers[0][1].num_batches_tracked))  # type: ignore[index, arg-type]
    return found


def task_rank() -> int:
    import os

    return int(os.environ.get("RANK", "0"))


def nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_buffers_that_ddp_sent_before_the_failure_are_those_that_come_back(two_ranks: Ranks) -> None:
    # DDP gives rank 0's buffers to all in each step; in the last one rank 1 runs in pieces of 4 and counts two.
    assert two_ranks(buffers) == [[3, 3], [3, 4]]
