"""What falls on the end of a window and on the end of an epoch of training.

train_step   gradients of the mean, hooks, clip, optimizers, schedulers; count the step; log, validate, stop, save point
end_epoch    the epoch's values, validation, schedulers, hooks; count the epoch; stop, save point
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from sanctuary_trainer.errors import DataError
from sanctuary_trainer.loops.evaluate import evaluate

if TYPE_CHECKING:
    from sanctuary_trainer.executor import Window
    from sanctuary_trainer.run import Run


def train_step(run: Run, window: Window, epoch_ends: bool) -> None:
    """The optimizers' step that ends a window, and what falls on it."""
    state, plan, hooks, optimization = run.state, run.plan, run.callbacks, run.optimization
    assert optimization is not None
    made, logs = False, plan.logs(state.global_step + 1)
    with run.telling.told_when_due(epoch_ends):
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
    run.telling.goes_on(epoch_ends)
    if made and not epoch_ends:
        with run.devices.together() if state.stop_reason is not None else nullcontext():  # else a window follows
            hooks.on_save_point(run)


def end_epoch(run: Run, made: int) -> None:
    """What falls on the end of an epoch that made so many steps."""
    state, plan, optimization = run.state, run.plan, run.optimization
    assert optimization is not None
    if state.batch == 0:
        raise DataError("The training loader gave no batch on any rank; nothing was trained. Check the data set.")
    if not made:
        run.warn(f"Epoch {state.epoch} made no step: training_step left out every batch, or every update overflowed.")
    run.ends_epoch = True
    values = run.records.epoch_values("train")
    run.publish(values)
    if plan.validates_at_epoch_end(state):
        evaluate(run, "val")
    optimization.end_epoch()
    with run.devices.together():
        run.callbacks.on_train_epoch_end(run)
    late = run.records.epoch_values("train")  # what was logged by that hook
    run.publish(late)
    optimization.new_values({**values, **late})
    run.ends_epoch = False
    if not run.monitors_checked and (run.validated or not plan.validates):
        run.monitors_checked = True
        for text in optimization.check_monitors(run.metrics):
            run.warn(text)
    state.end_epoch()
    run.settle_stop()
    state.stop_reason = state.stop_reason or plan.finished(state)
    with run.devices.together():
        run.callbacks.on_save_point(run)
