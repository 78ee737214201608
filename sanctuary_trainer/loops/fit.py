"""Training.

sanity validation
while nothing ends the run
  epoch
    while this epoch has more                         a window: gradient_accumulation_steps rounds, fewer at the end
      for each of its rounds: run.execute(batch)      forward, backward; gradients sync on the last one
      gradients of the mean, clip, optimizers, schedulers
      count: batch, samples, global_step
      log, validate, save point                       where they fall on this step
    epoch's values, validation, schedulers, count: epoch, save point
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from sanctuary_trainer.errors import DataError
from sanctuary_trainer.loops.evaluate import evaluate

if TYPE_CHECKING:
    from sanctuary_trainer.executor import Executor, Window
    from sanctuary_trainer.feed import Feed
    from sanctuary_trainer.run import Run


def fit(run: Run) -> None:
    """Train until a limit is reached or somebody asks to stop; `run.state.stop_reason` says which."""
    with run.devices.together():
        run.callbacks.on_fit_start(run)
    sanity = run.settings["num_sanity_val_steps"]
    if run.plan.validates and sanity:
        evaluate(run, "sanity", limit=sanity)
    run.state.stop_reason = run.plan.finished(run.state)
    try:
        while run.state.stop_reason is None:
            train_epoch(run)
    except Exception as error:  # where steps are run: the other ranks must hear of it
        run.fail(error)
        raise


def train_epoch(run: Run) -> None:
    """Train to the end of the running epoch, or to the end of the run if that comes first."""
    state, plan, loader, executor = run.state, run.plan, run.train_loader, run.executor
    assert loader is not None and executor is not None
    executor.begin()
    if state.batch == 0:
        run.callbacks.on_train_epoch_start(run)
    executor.follow_frozen()
    # A loader with known rounds reads no batch that the limit of steps leaves unused.
    limit = plan.rounds_left(state, loader.num_samples is not None) if loader.sized else run.train_limit
    with closing(run.feed(loader, start_samples=state.samples, limit=limit)) as feed:
        run.clock.start()
        goes_on = feed.more or not feed.sized  # of a stream the first window tells
        while goes_on and state.stop_reason is None:
            window = train_window(run, feed, executor)
            if window.failed:
                run.devices.raise_together(None)
            goes_on = feed.more or (window.more and not feed.sized)
            train_step(run, window, epoch_ends=not goes_on)
    if state.batch == plan.rounds if feed.sized else not goes_on:
        end_epoch(run)


def train_window(run: Run, feed: Feed, executor: Executor) -> Window:
    """Forward and backward of the rounds of one window; a rank without batches joins with zeros."""
    clock, hooks, rounds, samples = run.clock, run.callbacks, 0, 0
    executor.begin(late=run.begin_window(feed))
    for index in range(run.plan.accumulation):
        if not feed.more:
            break
        fetched = feed.take()
        clock.lap("data")
        if index == 0:
            executor.expect(run.expected_samples(feed, fetched))
        rounds += 1
        samples += fetched.total or 0
        if fetched.batch is None:
            continue
        more = feed.more
        sync = index + 1 == run.plan.accumulation or not more
        size, batch_idx = run.begin_batch(fetched), run.state.batch + index
        executor.count(size)
        hooks.on_train_batch_start(run, fetched.batch, batch_idx)
        result = run.execute(fetched.batch, batch_idx, size, sync, more=more, stop=run.wants_stop)
        feed.read_ahead()
        if result is not None:
            run.records.add_loss(*result)
        clock.lap("execute")
        hooks.on_train_batch_end(run, fetched.batch, batch_idx, None if result is None else result[0])
        clock.lap("callbacks")
    run.end_batch()
    if not rounds:
        executor.expect(run.expected_samples(feed, None))
    executor.join(more=feed.more, stop=run.wants_stop)
    window = executor.finish()
    run.count(feed, rounds, samples, window)
    return window


def train_step(run: Run, window: Window, epoch_ends: bool) -> None:
    """The optimizers' step that ends a window, and what falls on it."""
    state, plan, hooks, optimization = run.state, run.plan, run.callbacks, run.optimization
    assert optimization is not None
    made, logs = False, plan.logs(state.global_step + 1)
    with run.told_when_due(epoch_ends):
        if window.updates:
            optimization.average(window.factor)
            hooks.on_before_optimizer_step(run)
            optimization.clip_gradients()
            made = optimization.step(record=logs)
            run.clock.lap("optimizer")
        else:
            optimization.zero_grad()
        if made:
            state.global_step += 1
            hooks.on_train_step_end(run)
    if made and logs:
        run.publish(run.step_values())
    run.clock.lap("callbacks")
    if plan.validates_after_step(state, made):
        evaluate(run, "val")
        run.settle_stop()
    run.settle_stop(window.stop)
    state.stop_reason = state.stop_reason or plan.out_of_steps(state)
    run.goes_on(epoch_ends)
    if made and not epoch_ends:
        hooks.on_save_point(run)


def end_epoch(run: Run) -> None:
    """What falls on the end of an epoch."""
    state, plan, optimization = run.state, run.plan, run.optimization
    assert optimization is not None
    if state.batch == 0:
        raise DataError("The training loader gave no batch on any rank; nothing was trained. Check the data set.")
    values = run.records.epoch_values("train")
    run.publish(values)
    optimization.new_values(values)
    if plan.validates_at_epoch_end(state):
        evaluate(run, "val")
    optimization.end_epoch()
    with run.devices.together():
        run.callbacks.on_train_epoch_end(run)
    run.publish(run.records.epoch_values("train"))
    if run.validated or not plan.validates:
        optimization.check_monitors(run.metrics)
    state.end_epoch()
    run.settle_stop()
    state.stop_reason = state.stop_reason or plan.finished(state)
    run.callbacks.on_save_point(run)
