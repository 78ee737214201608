"""Validation and test: every sample exactly once on any number of ranks.

    modules in eval mode, training's metrics and generators put aside, rank 0's buffers on every rank
    for each loader
      for each round: one batch on each rank that has one; all agree once whether to go on
      values over all ranks
    in validation, the same once more with each of the run's variants: other weights
    hooks, then what they asked to gather over the ranks
    everything put back

The task itself is called, not its wrapper: DDP would broadcast buffers in each forward and wait for ranks that have
no batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sanctuary_trainer.errors import TaskError
from sanctuary_trainer.feed import limited
from sanctuary_trainer.seeding import generators_aside
from sanctuary_trainer.signals import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from sanctuary_trainer.data import Fetched, RankLoader
    from sanctuary_trainer.run import Run


def evaluate(run: Run, stage: str, limit: int | None = None) -> dict[str, float]:
    """Evaluate with every evaluation loader of the run.

    Args:
        run: the run.
        stage: "sanity", "val" or "test".
        limit: rounds of each loader at most, beside its own limit.

    Returns:
        The logged values over all ranks, by full name; the same on every rank.
    """
    with evaluating(run, stage):
        with run.devices.together():
            run.callbacks.on_evaluation_start(run, stage)
        metrics = read_through(run, stage, limit)
        for name, make in run.variants.items() if stage == "val" else ():
            values = with_variant(run, name, make)
            if both := metrics.keys() & values.keys():
                raise TaskError(f"{min(both)!r} is logged by the task and is a value of {name!r}. Use another name.")
            metrics.update(values)
        run.at_boundary = False  # what is shown now would be shown again
        run.publish(metrics)
        with run.gathers.settling(run.devices):
            run.callbacks.on_evaluation_end(run, stage, metrics)
        with run.devices.together():
            if run.tracking is not None:
                run.tracking.show_held()
        late = run.evaluated()
        run.publish(late)
        metrics.update(late)
    if stage == "val" and run.optimization is not None:
        run.validated = True
        run.optimization.new_values(metrics)
    return metrics


def read_through(run: Run, stage: str, limit: int | None = None) -> dict[str, float]:
    """One pass through every evaluation loader of the run; see `evaluate`."""
    step = run.task.test_step if stage == "test" else run.task.validation_step
    metrics: dict[str, float] = {}
    with generators_aside(run.device):  # what a step draws is the same with every variant
        for name, loader in run.evaluation_loaders.items():
            run.loader_name = name

            def one(batch: Any, batch_idx: int, fetched: Fetched) -> None:
                outputs = run.call_step(step, batch, batch_idx)
                if not run.variant:
                    run.callbacks.on_evaluation_batch_end(run, stage, batch, outputs, fetched.indices)

            walk(run, loader, limited(run.evaluation_limits[name], limit), one)
            metrics.update(run.evaluated())
    run.loader_name = ""
    return metrics


def with_variant(run: Run, name: str, make: Callable[[], AbstractContextManager[None]]) -> dict[str, float]:
    """A second pass of validation while the task holds other weights; its `val/accuracy` is `val/accuracy_NAME`.

    The task's metric objects are as before afterwards, since what the first pass left in them may still be read.
    """
    with ExitStack() as stack:
        with run.devices.together():
            stack.enter_context(make())
        run.devices.broadcast_tensors(run.task.buffers())
        stack.enter_context(run.records.aside(leave_no_trace=True))
        stack.callback(setattr, run, "variant", "")
        run.variant = name
        values = read_through(run, "val")
    return {f"{key}_{name}": value for key, value in values.items()}


def walk(run: Run, loader: RankLoader, limit: int | None, one: Callable[[Any, int, Fetched], None]) -> None:
    """Call `one(batch, batch_idx, fetched)` for each batch of this rank, in step with the other ranks.

    An exception on one rank ends all of them in the same round; a signal does so inside fit, with `Interrupted`.
    """
    run.evaluation_rounds = limited(loader.num_rounds, limit)
    feed, error, batch_idx = None, None, 0
    try:
        while True:
            try:
                if feed is None:
                    feed = run.feed(loader, limit=limit)
                if feed.more:
                    fetched = feed.take()
                    if fetched.batch is not None:
                        one(run.begin_batch(fetched), batch_idx, fetched)
                        feed.read_ahead()
                        run.end_batch()
                    batch_idx += 1
                more = feed.more
            except Exception as raised:  # noqa: BLE001 - where a step is run: the other ranks must hear of it
                error, more = raised, False
            signal = run.verb == "fit" and run.signals.received is not None
            going_on, failed, left = run.devices.agree([float(more), float(error is not None), float(signal)])
            if failed:
                run.devices.raise_together(error)
            if left:
                raise Interrupted
            if not going_on:
                return
    finally:
        if feed is not None:
            feed.close()


@contextmanager
def evaluating(run: Run, stage: str) -> Iterator[None]:
    """Evaluation's surroundings: modules in eval mode, no gradients, rank 0's buffers on every rank.

    Afterwards, also after an exception, every module's own mode, the generators and training's metrics are as before.
    """
    former, run.stage = run.stage, stage
    modes = [(module, module.training) for module in run.task.modules()]
    begun = time.perf_counter()
    run.devices.broadcast_tensors(run.task.buffers())
    try:
        with (
            run.clock.whole("validation"),
            run.records.aside(leave_no_trace=stage == "sanity"),
            generators_aside(run.device),
            torch.no_grad(),
        ):
            run.task.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
        run.end_batch()
        run.loader_name, run.stage = "", former
        run.pause_throughput(time.perf_counter() - begun)
