"""The optimizers and schedulers of a run, and one step of them.

    step: gradients x factor where they are not those of the mean yet -> hooks -> clip -> optimizers -> schedulers

Schedulers are stepped once per step, epoch or new value of a metric, never after a skipped update nor before the first
one. They are not given to accelerate, which would step them once per process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer

from sanctuary_trainer.configured import check_parameters, parse
from sanctuary_trainer.errors import TaskError
from sanctuary_trainer.optimizer_memory import step_within_memory
from sanctuary_trainer.optimizer_state import configuration, learning_rates, load_scaler, put_back, take
from sanctuary_trainer.watched import check_monitors, unknown_monitors


class _Together:
    """All optimizers, as the one whose gradients torch's scaler looks at: an overflow in any leaves out all of them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self.on_out_of_memory: Callable[..., object] | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> bool:
        """True, which the scaler hands on; None where it makes no step."""
        if self.on_out_of_memory is not None:
            step_within_memory(self.optimizers, on_event=self.on_out_of_memory)
            return True
        for optimizer in self.optimizers:
            optimizer.step()
        return True


class Optimization:
    """The optimizers and schedulers of one run.

    Args:
        returned: what `configure_optimizers` returned.
        task: whose parameters they must hold.
        clip: the largest gradient norm or value; None not to clip.
        clip_algorithm: "norm" (over all parameters together) or "value".
        scaler: the gradient scaler of fp16, else None.

    Raises:
        TaskError: `returned` has none of the forms, holds foreign or shared parameters, or a scheduler of another
            optimizer.
        NotSupportedError: an optimizer's step needs a closure.

    `updates` counts the updates made.
    """

    def __init__(
        self,
        returned: Any,
        task: torch.nn.Module,
        *,
        clip: float | None = None,
        clip_algorithm: str = "norm",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.optimizers, self.schedules = parse(returned)
        self._together = _Together(self.optimizers)
        self.clip, self.clip_algorithm, self.scaler = clip, clip_algorithm, scaler
        check_parameters(self.optimizers, task)
        for schedule in self.schedules:
            owner = getattr(schedule.scheduler, "optimizer", None)
            if isinstance(owner, Optimizer) and all(owner is not optimizer for optimizer in self.optimizers):
                raise TaskError(
                    f"{type(schedule.scheduler).__name__} drives an optimizer that configure_optimizers did not "
                    "return. Build the scheduler on the optimizer that is returned with it."
                )
        self._task = task
        self.gradient_norm: torch.Tensor | None = None  # before clipping, of the last step
        self.learning_rates = learning_rates(self._together.param_groups)  # those that the last recorded step used
        self.updates = 0
        self._unscaled = False
        self._valued: set[str] = set()  # every name that had a value of an epoch or an evaluation
        self._configured = configuration(self.optimizers, self.schedules, task, scaler)  # of the run's first start
        self.zero_grad()

    @property
    def on_out_of_memory(self) -> Callable[..., object] | None:
        """Who is told of an optimizer's step that ran out of memory (see `step_within_memory`); None not to try."""
        return self._together.on_out_of_memory

    @on_out_of_memory.setter
    def on_out_of_memory(self, told: Callable[..., object] | None) -> None:
        self._together.on_out_of_memory = told

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters of all optimizers, also of groups that were added later."""
        return [p for o in self.optimizers for group in o.param_groups for p in group["params"]]

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers, in the order in which they were returned."""
        return [schedule.scheduler for schedule in self.schedules]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            if type(optimizer).zero_grad is Optimizer.zero_grad:  # whose bookkeeping costs ten times what it does
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            else:
                optimizer.zero_grad(set_to_none=True)

    def average(self, factor: float | torch.Tensor | None) -> None:
        """Turn the summed gradients of a window into those of its mean (unscaled under fp16)."""
        if self.scaler is not None:
            self._unscaled = any(parameter.grad is not None for parameter in self.parameters)
            if self._unscaled:
                self.scaler.unscale_(cast(Optimizer, self._together))
        if factor is not None:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor)

    def clip_gradients(self) -> None:
        """Clip the finished gradients, if asked to."""
        if self.clip is not None and self.clip_algorithm == "norm":
            self.gradient_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        elif self.clip is not None:
            torch.nn.utils.clip_grad_value_(self.parameters, self.clip)

    def step(self, record: bool = False) -> bool:
        """Step every optimizer, then the schedulers that go by steps; returns whether an update was made.

        Args:
            record: keep the learning rates that this step uses in `learning_rates`.

        Raises:
            OutOfMemoryError: with `on_out_of_memory` set, where a step does not fit into memory.
        """
        if record:
            self.learning_rates = learning_rates(self._together.param_groups)
        if self.scaler is not None and self._unscaled:
            # A wait for the device that fp16 cannot do without: whether a gradient overflowed.
            made = bool(self.scaler.step(cast(Optimizer, self._together)))
            self.scaler.update()
        else:
            made = self._together.step()
        self.zero_grad()
        if made:
            self.updates += 1
            for schedule in self.schedules:
                if schedule.interval == "step" and schedule.monitor is None:
                    schedule.advance()
        return made

    def end_epoch(self) -> None:
        """Step the schedulers that go by epochs, once there was an update: before, they would skip their first rate."""
        for schedule in self.schedules:
            if self.updates and schedule.interval == "epoch" and schedule.monitor is None:
                schedule.advance()

    def new_values(self, values: Mapping[str, float]) -> None:
        """Step the schedulers that watch one of these values, freshly computed at the end of an epoch or evaluation.

        Who watches a series of steps ("train/loss") gets its value over the epoch ("train/loss_epoch").
        """
        self._valued.update(values)
        for schedule in self.schedules:
            value = values.get(schedule.monitor or "", values.get(f"{schedule.monitor}_epoch"))
            if self.updates and schedule.monitor is not None and value is not None:
                schedule.advance(value)

    @property
    def monitors(self) -> set[str]:
        """The names that schedulers watch."""
        return {schedule.monitor for schedule in self.schedules if schedule.monitor is not None}

    def unknown_monitors(self, known: Iterable[str]) -> list[str]:
        """What to warn of after sanity validation: each watched name of validation that is not in `known`."""
        return unknown_monitors(self.schedules, set(known))

    def check_monitors(self, known: Iterable[str]) -> list[str]:
        """Raise when a scheduler watches a name that had no value after a whole epoch and its validation.

        Args:
            known: every name that was logged, on whatever axis.

        Returns:
            What to warn of: the same, of schedulers with `"strict": False`.

        Raises:
            SettingsError: naming the nearest that had one.
        """
        return check_monitors(self.schedules, self._valued, set(known))

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on but the weights; its tensors are those in use.

        Raises:
            CheckpointError: an optimizer holds a parameter that is no longer the task's.
        """
        return {
            **take(self.optimizers, self.schedules, self._task),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),  # a wait for the device
            "updates": self.updates,
            "valued": sorted(self._valued),
            "configured": self._configured,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Go on from a state; returns what differs from the configuration that its run began with, one text each.

        Raises:
            CheckpointError: the optimizers, their schedulers or their groups do not fit, and nothing was changed; or an
                object's own load_state_dict failed.
        """
        before, now = state["configured"], self._configured
        texts = put_back(state, before, now, self.optimizers, self.schedules, self._task)
        texts += load_scaler(self.scaler, state["scaler"])
        self.updates, self._valued, self._configured = state["updates"], set(state["valued"]), before
        self.learning_rates = learning_rates(self._together.param_groups)
        return texts
