"""What falls on the end of a window and on the end of an epoch of training.

train_step     gradients of the mean, hooks, clip, optimizers, schedulers; count the step; log
finish_step    validate, stop, save point
end_epoch      validation, the epoch's values, schedulers, hooks; count the epoch; stop, save point
save_point     the hooks, then the checkpoints that they asked for
finish_what_is_owed   what a continued run had still before it

A signal leaves a validation at once (`Interrupted`): what is saved then is the moment before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sanctuary_trainer.errors import DataError
from sanctuary_trainer.loops.evaluate import evaluate
from sanctuary_trainer.saving import drop_requests, write_requested

if TYPE_CHECKING:
    from sanctuary_trainer.executor import Window
    from sanctuary_trainer.run import Run


def train_step(run: Run, window: Window, epoch_ends: bool) -> None:
    """The optimizers' step that ends a window, and what falls on it."""
    state, plan, hooks, optimization, clock = run.state, run.plan, run.callbacks, run.optimization, run.clock
    assert optimization is not None
    made, logs = False, plan.logs(state.global_step + 1)
    run.hear_save(window.save)
    with run.telling.told_when_due(epoch_ends):
        if window.updates:
            optimization.average(window.factor)
            clock.lap("optimizer")
            hooks.on_before_optimizer_step(run)
            optimization.clip_gradients()
            made = optimization.step(record=logs)
            clock.lap("optimizer")
        else:
            optimization.zero_grad()
        if made:
            state.global_step += 1
            hooks.on_train_step_end(run)
            clock.lap("callbacks")
    if made and logs:
        run.publish(run.step_values())
        clock.lap("logging")
    finish_step(run, window.stop, epoch_ends, made)


def finish_step(run: Run, stop: bool, epoch_ends: bool, made: bool) -> None:
    """Validate where that falls on the step, stop, save.

    Args:
        run: the run.
        stop: whether any rank asked to stop, as the ranks told each other in the window.
        epoch_ends: whether the epoch's end follows.
        made: whether there was an update.
    """
    state, plan = run.state, run.plan
    if plan.validates_after_step(state, made):
        run.at_boundary, run.owes_evaluation, run.owes_epoch_end = True, True, epoch_ends
        evaluate(run, "val")
        run.at_boundary = run.owes_evaluation = run.owes_epoch_end = False
        run.settle_stop()
    run.settle_stop(stop)
    state.stop_reason = state.stop_reason or plan.out_of_steps(state)
    run.telling.goes_on(epoch_ends)
    if not epoch_ends and (made or state.stop_reason is not None):  # a run may end in a window that was left out
        save_point(run, together=run.telling.due or state.stop_reason is not None)  # else a window follows
    else:
        run.at_boundary = not epoch_ends


def finish_what_is_owed(run: Run) -> None:
    """What a checkpoint had still before it when the run that wrote it was cut off."""
    run.telling.due, owes_evaluation, owes_epoch_end = True, run.owes_evaluation, run.owes_epoch_end
    run.owes_evaluation = run.owes_epoch_end = False
    if owes_evaluation:
        finish_step(run, False, epoch_ends=owes_epoch_end, made=True)
    if owes_epoch_end:
        end_epoch(run, made=1)
    run.state.stop_reason = run.state.stop_reason or run.plan.finished(run.state)
    if run.owes_saves:
        save_point(run, together=True)
        run.owes_saves = False


def end_epoch(run: Run, made: int) -> None:
    """What falls on the end of an epoch that made so many steps."""
    state, plan, optimization = run.state, run.plan, run.optimization
    assert optimization is not None
    if state.batch == 0:
        raise DataError("The training loader gave no batch on any rank; nothing was trained. Check the data set.")
    if not made:
        run.warn(f"Epoch {state.epoch} made no step: training_step left out every batch, or every update overflowed.")
    if plan.validates_at_epoch_end(state):
        run.at_boundary = run.owes_epoch_end = True
        evaluate(run, "val")
        run.at_boundary = False
    run.owes_epoch_end = False
    run.ends_epoch = True
    values = run.records.epoch_values("train")
    run.publish(values)
    run.clock.lap("logging")
    optimization.end_epoch()
    with run.devices.together():
        run.callbacks.on_train_epoch_end(run)
    run.clock.lap("callbacks")
    late = run.records.epoch_values("train")  # what was logged by that hook
    run.publish(late)
    run.clock.lap("logging")
    optimization.new_values({**values, **late})
    run.ends_epoch = False
    if not run.monitors_checked and (run.validated or not plan.validates):
        run.monitors_checked = True
        for text in optimization.check_monitors(run.metrics):
            run.warn(text)
    state.end_epoch()
    run.settle_stop()
    state.stop_reason = state.stop_reason or plan.finished(state)
    save_point(run, together=True)


def save_point(run: Run, together: bool) -> None:
    """A boundary at which the run could be continued: the hooks, then the checkpoints that they asked for.

    Every callback's hook runs, also after one that raised, so that all ranks know whether checkpoints follow.

    Args:
        run: the run.
        together: whether something else than a window follows, so that an error must be told here.
    """
    error: Exception | None = None
    run.at_boundary = True
    try:
        run.callbacks.on_save_point(run)
    except Exception as raised:  # noqa: BLE001 - the other ranks may be about to write a checkpoint
        error = raised
    try:
        if together:
            run.gathers.settle(run.devices, error)
        elif error is not None:
            raise error
    except BaseException:
        drop_requests(run)  # not every rank may have come to ask
        raise
    if run.requests:
        with run.clock.whole("checkpoint"):
            write_requested(run)
    run.clock.lap("checkpoint")
    run.save_asked = False
