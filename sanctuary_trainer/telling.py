"""How a rank that fails tells the others, so that all of them end together and with its text.

What can be told depends on what the others do next, and that is known at every moment of training:

    before this rank has synced its window    join it with zeros and the flag "failed": no collective is added
    after its sync, before the step's end     if a log, a validation, a checkpoint or an end falls on the step, all
                                              ranks ask each other there (`told_when_due`); else they go on to a window:
                                              join that one
    after that                                the next window; at an epoch's end, and in evaluation, all ranks ask each
                                              other

Where rank 0 deals the batches (`dispatch_batches`), the others also wait for each round until all ranks have taken it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from sanctuary_trainer.executor import Executor
    from sanctuary_trainer.feed import Feed
    from sanctuary_trainer.run import Run
    from sanctuary_trainer.state import RunState

_NO_CONTEXT = nullcontext()


class Telling:
    """Follows what the other ranks do next, and tells them of an error there."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._several = run.devices.world_size > 1
        # Once this rank has synced: "step" (the end of the window), "window", or something else (None).
        self._next: str | None = None
        self._rounds = self._steps = 0  # rounds taken and steps made when the window began
        self.due = False  # whether all ranks meet at the step that is being made

    def begin_window(self, feed: Feed) -> bool:
        """Note that a window begins; whether what the ranks tell each other in it may be read one window later."""
        if not self._several:
            return False
        run, self._next = self._run, "step"
        run.carry_save()
        self._rounds, self._steps = feed.taken, run.state.global_step
        feed.begin_window(run.plan.accumulation)
        return self._reads_late(feed)

    def told_when_due(self, epoch_ends: bool) -> AbstractContextManager[None]:
        """For the hooks of a step: where a log, a validation or an end follows, their errors are told to all ranks."""
        if not self._several:
            return _NO_CONTEXT
        self.due = self._falls_on_step(self._run.state, epoch_ends)
        self._next = None if self.due else "window"
        return self._run.devices.together() if self.due else _NO_CONTEXT

    def goes_on(self, epoch_ends: bool) -> None:
        """The step is done and all that falls on it: note whether a window follows."""
        self._next = None if epoch_ends or self._run.state.stop_reason is not None else "window"

    def fail(self, error: Exception, feed: Feed) -> None:
        """This rank failed in training: tell the others where that can be, and raise with them.

        It returns at once where it cannot be: the collectives of a backward are under way, or the others are at
        something else than training. Then the end of this process, or the timeout, tells them.
        """
        run, executor = self._run, self._run.executor
        if executor is None or not self._several or executor.in_sync or run.devices.told is error:
            return
        if executor.has_synced and self._next == "step":  # before it was known what falls on the step
            window = executor.finish()
            run.hear_save(window.save)
            run.count(feed, feed.taken - self._rounds, 0, window)
            ends = run.state.batch == run.plan.rounds if feed.sized else not (feed.more or window.more)
            if self._falls_on_step(run.state, ends):
                run.devices.raise_together(error)
            self._next = "window"
        if executor.has_synced and self._next is None:
            return
        if executor.has_synced:
            run.carry_save()
            executor.begin(late=self._reads_late(feed, made=self._steps + 1))
        elif executor.entered and isinstance(executor.module, DistributedDataParallel):
            # The forward that died has sent its buffers already; the others would not answer a second time.
            executor.module.require_forward_param_sync = False
        _join_failed(executor, feed)
        if executor.late:  # the others read it in the window after
            executor.begin()
            feed.begin_window(feed.window)
            _join_failed(executor, feed)
        run.devices.raise_together(error)

    def _reads_late(self, feed: Feed, made: int = 0) -> bool:
        """Whether nothing falls on the window to come, so that every rank goes on to the one after at once."""
        if not (self._run.devices.reads_late and feed.sized and feed.num_samples is not None):
            return False
        state, plan = self._run.state, self._run.plan
        after = replace(state, batch=state.batch + plan.accumulation, global_step=max(made, state.global_step))
        return not self._falls_on_step(after, plan.rounds is None or after.batch >= plan.rounds)

    def _falls_on_step(self, state: RunState, epoch_ends: bool) -> bool:
        """Whether all ranks meet at the coming step: for a log, a validation, a checkpoint or an end."""
        run = self._run
        saves = run.save_asked or run.callbacks.saves_at(state.global_step + 1)
        return saves or run.plan.falls_on_step(state, epoch_ends)


def _join_failed(executor: Executor, feed: Feed) -> None:
    if feed.dealt:
        if not executor.entered:
            if feed.owed == feed.window and feed.more:
                feed.take()
            # DDP may send something in a window's first forward, which the others run after its first round.
            executor.execute(None, 0, 0, False, join=True)
        while feed.owed > 0 and feed.more:
            feed.take()
    executor.join(failed=True)
    if executor.dispatch.ride is None:  # then the others sum what they tell in a collective of its own
        executor.finish()
