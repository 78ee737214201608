"""What happens when: pure functions of the settings and of the state, equal on all ranks.

an epoch  = rounds (one batch on each rank), in windows of `accumulation` rounds, the last one shorter
a window  = one step (an optimizer update), unless every rank's whole window was left out
validate  = after a step (val_check_interval) or at the end of an epoch
log       = every log_every_n_steps steps
finished  = max_steps or max_epochs reached, or a stop that min_steps and min_epochs allow
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor

from sanctuary_trainer.state import RunState


@dataclass(frozen=True)
class Plan:
    """The settings of one fit that decide when things happen.

    Attributes:
        rounds: rounds of one epoch after limits; None when the loader cannot tell.
        accumulation: rounds in a window.
        max_epochs, max_steps: limits of the run; None means no such limit.
        min_epochs, min_steps: a stop asked by a callback or by `max_time` waits for these.
        val_check_interval: int: every that many steps, counted across epochs; float: that fraction of an epoch's
            steps; None: at the end of an epoch.
        check_val_every_n_epoch: validate in every that many epochs.
        validates: whether there is anything to validate with.
        log_every_n_steps: steps between two points of the curves.
    """

    rounds: int | None
    accumulation: int = 1
    max_epochs: int | None = None
    max_steps: int | None = None
    min_epochs: int = 0
    min_steps: int = 0
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int = 1
    validates: bool = False
    log_every_n_steps: int = 50

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of a whole epoch, the shorter last window included; None when the loader cannot tell."""
        return None if self.rounds is None else ceil(self.rounds / self.accumulation)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run: exact for loaders with a length, an upper bound where updates can be left out.

        None when neither the loader nor `max_steps` can tell.
        """
        per_epoch, limit = self.steps_per_epoch, self.max_steps
        if per_epoch is None or self.max_epochs is None:
            return limit
        total = per_epoch * self.max_epochs
        return total if limit is None else min(total, limit)

    def steps_left(self, state: RunState) -> int | None:
        """Steps from here to the end of the run; None when neither the loader nor `max_steps` can tell."""
        per_epoch, limit = self.steps_per_epoch, self.max_steps
        until_limit = None if limit is None else max(0, limit - state.global_step)
        if per_epoch is None or self.max_epochs is None:
            return until_limit
        left = max(0, per_epoch * (self.max_epochs - state.epoch) - ceil(state.batch / self.accumulation))
        return left if until_limit is None else min(left, until_limit)

    def rounds_left(self, state: RunState, continues: bool) -> int | None:
        """How many more rounds the running epoch may draw.

        Args:
            state: where the run stands.
            continues: whether the loader can be continued from a position. Then nothing is read that no step will use,
                and where an update is left out, so that more is needed after all, the epoch is opened again.
        """
        left = None if self.rounds is None else self.rounds - state.batch
        if self.max_steps is None or not continues:
            return left
        until_limit = (self.max_steps - state.global_step) * self.accumulation
        return until_limit if left is None else min(left, until_limit)

    def logs(self, step: int) -> bool:
        """Whether the curves get a point at this step."""
        return step % self.log_every_n_steps == 0

    def _validates_in(self, epoch: int) -> bool:
        return self.validates and (epoch + 1) % self.check_val_every_n_epoch == 0

    def validates_after_step(self, state: RunState, made: bool = True) -> bool:
        """Whether to validate now, after a window; `state` counts it, and its step if one was made, as done."""
        interval = self.val_check_interval
        if interval is None or not self._validates_in(state.epoch):
            return False
        if isinstance(interval, int):
            return made and state.global_step % interval == 0
        assert self.steps_per_epoch is not None  # checked before the run
        # Exact arithmetic: 0.1 * 30 is 3.0000000000000004 in floats and would move a validation by a step.
        every = Fraction(str(interval)) * self.steps_per_epoch
        step = ceil(state.batch / self.accumulation)
        return floor(step / every) > floor((step - 1) / every)

    def falls_on_step(self, state: RunState, epoch_ends: bool) -> bool:
        """Whether a log, a validation or an end falls on the coming step; `state` counts its window, not the step."""
        step = state.global_step + 1
        if epoch_ends or self.logs(step) or (self.max_steps is not None and step >= self.max_steps):
            return True
        return self.val_check_interval is not None and self.validates_after_step(replace(state, global_step=step))

    def validates_at_epoch_end(self, state: RunState) -> bool:
        """Whether to validate at the end of the running epoch."""
        return self.val_check_interval is None and self._validates_in(state.epoch)

    def may_stop(self, state: RunState) -> bool:
        """Whether a stop that somebody asked for may be obeyed already."""
        return state.global_step >= self.min_steps and state.epoch >= self.min_epochs

    def finished(self, state: RunState) -> str | None:
        """The reason why the run is over, or None: "max_steps" or "max_epochs"."""
        if self.max_epochs is not None and state.epoch >= self.max_epochs:
            return self.out_of_steps(state) or "max_epochs"
        return self.out_of_steps(state)

    def out_of_steps(self, state: RunState) -> str | None:
        """The reason "max_steps" when all steps are made, or None."""
        return "max_steps" if self.max_steps is not None and state.global_step >= self.max_steps else None
