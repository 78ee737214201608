"""Training.

sanity validation; or, in a run that is continued, the generators as they were saved
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

from sanctuary_trainer.data import Start
from sanctuary_trainer.loops.boundaries import end_epoch, finish_what_is_owed, save_point, train_step
from sanctuary_trainer.loops.evaluate import evaluate
from sanctuary_trainer.resuming import begin_attempt, restore_generators
from sanctuary_trainer.signals import Interrupted

if TYPE_CHECKING:
    from sanctuary_trainer.executor import Executor, Window
    from sanctuary_trainer.feed import Feed
    from sanctuary_trainer.run import Run


def fit(run: Run) -> None:
    """Train until a limit is reached or somebody asks to stop; `run.state.stop_reason` says which."""
    with run.devices.together():
        run.callbacks.on_fit_start(run)
    begin_attempt(run)
    assert run.executor is not None
    try:
        if run.continued is None:
            sanity_validation(run)
        else:
            run.executor.rehearse(run.saved["rest"]["gradient_order"])
            restore_generators(run)
        run.at_boundary = True
        run.settle_stop()
        run.clock.start()
        finish_what_is_owed(run)
        while run.state.stop_reason is None:
            train_epoch(run)
    except Interrupted:
        run.settle_stop()
        if run.at_boundary:  # not in sanity validation
            save_point(run, together=True)
    run.read_rest()
    run.settle_end()


def sanity_validation(run: Run) -> None:
    """A few rounds of validation before training, so that what is wrong with it is found now; they leave no trace."""
    rounds = run.settings["num_sanity_val_steps"]
    if not (run.plan.validates and rounds):
        return
    metrics = evaluate(run, "sanity", limit=rounds)
    known = [*metrics, *(f"{name}_{variant}" for variant in run.variants for name in metrics)]
    for text in run.optimization.unknown_monitors(known) if run.optimization is not None else ():
        run.warn(text)


def train_epoch(run: Run) -> None:
    """Train to the end of the running epoch, or to the end of the run if that comes first."""
    state, plan, loader, executor = run.state, run.plan, run.train_loader, run.executor
    assert loader is not None and executor is not None
    begun = state.batch > 0 or state.samples > 0
    steps = -1 if begun else state.global_step  # of a continued epoch it is not known
    with run.devices.together():
        run.at_boundary = begun  # else what the hook does would be done again
        if not begun:
            run.callbacks.on_train_epoch_start(run)
    run.clock.lap("callbacks")
    executor.follow_frozen()
    executor.begin()
    # A loader with known rounds reads no batch that the limit of steps leaves unused.
    limit = plan.rounds_left(state, loader.num_samples is not None)
    if not loader.sized:
        limit = None if run.train_limit is None else run.train_limit - state.batch
    start = Start(state.samples, state.batch, run.reached)
    with closing(run.feed(loader, start=start, limit=limit)) as feed:
        run.reached = None
        goes_on = feed.more or not feed.sized  # of a stream the first window tells
        ends = feed.sized and state.batch == plan.rounds  # continued where only the epoch's end is left
        run.epoch_feed = feed
        try:
            while goes_on and state.stop_reason is None:
                window = train_window(run, feed, executor)
                if window.failed:
                    run.devices.raise_together(None)
                goes_on = feed.more or (window.more and not feed.sized)
                ends = state.batch == plan.rounds if feed.sized else not goes_on
                train_step(run, window, epoch_ends=ends)
        except Exception as error:  # where steps are run: the other ranks must hear of it
            run.telling.fail(error, feed)
            raise
    if ends:
        end_epoch(run, made=state.global_step - steps)


def train_window(run: Run, feed: Feed, executor: Executor) -> Window:
    """Forward and backward of the rounds of one window; a rank without batches joins with zeros."""
    clock, hooks, rounds, samples = run.clock, run.callbacks, 0, 0
    executor.begin(late=run.telling.begin_window(feed))
    for index in range(run.plan.accumulation):
        if not feed.more:
            break
        fetched = feed.take()
        run.at_boundary = False
        clock.lap("data")
        if index == 0:
            executor.expect(run.expected_samples(feed, fetched))
        rounds += 1
        samples += fetched.total or 0
        if fetched.batch is None:
            continue
        more = feed.more
        sync = index + 1 == run.plan.accumulation or not more
        batch, batch_idx, size = run.begin_batch(fetched), feed.batch_idx, run.batch_samples
        size = 1 if size is None else size
        executor.count(size)
        hooks.on_train_batch_start(run, batch, batch_idx)
        save, run.saves_soon = run.saves_soon, run.saves_soon and not sync
        result = run.execute(batch, batch_idx, size, sync, more=more, stop=run.wants_stop, save=save)
        clock.lap("backward")  # with what a callback did around the batch
        feed.read_ahead()
        if result is not None:
            run.records.add_loss(*result)
        hooks.on_train_batch_end(run, batch, batch_idx, None if result is None else result[0])
        clock.lap("callbacks")
    run.end_batch()
    if not rounds:
        executor.expect(run.expected_samples(feed, None))
    if not executor.has_synced:
        executor.join(more=feed.more, stop=run.wants_stop, save=run.saves_soon)
        run.saves_soon = False
    window = executor.finish()
    run.count(feed, rounds, samples, window)
    return window
