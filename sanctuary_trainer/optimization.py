"""The optimizers and schedulers of a run, and one step of them.

    step: gradients x factor where they are not those of the mean yet -> clip -> hooks -> optimizers -> schedulers

Schedulers are stepped once per step, epoch or new value of a metric, never after a skipped update. They are not given
to accelerate, which would step them once per process.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from sanctuary_trainer.configured import check_parameters, parse
from sanctuary_trainer.errors import SettingsError, TaskError


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
        self.clip, self.clip_algorithm, self.scaler = clip, clip_algorithm, scaler
        check_parameters(self.optimizers, task)
        for schedule in self.schedules:
            owner = getattr(schedule.scheduler, "optimizer", None)
            if isinstance(owner, Optimizer) and all(owner is not optimizer for optimizer in self.optimizers):
                raise TaskError(
                    f"{type(schedule.scheduler).__name__} drives an optimizer that configure_optimizers did not "
                    "return. Build the scheduler on the optimizer that is returned with it."
                )
        self._by_step = [s for s in self.schedules if s.interval == "step" and s.monitor is None]
        self.gradient_norm: torch.Tensor | None = None  # before clipping, of the last step
        self.learning_rates: dict[str, float] = self._rates()  # those that the last recorded step used
        self.zero_grad()

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
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
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
        """
        if record:
            self.learning_rates = self._rates()
        made = True
        if self.scaler is None:
            for optimizer in self.optimizers:
                optimizer.step()
        else:
            before = self.scaler.get_scale()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
            made = self.scaler.get_scale() >= before  # it shrinks when a gradient overflowed and the update was skipped
        self.zero_grad()
        if made:
            for schedule in self._by_step:
                schedule.advance()
        return made

    def end_epoch(self) -> None:
        """Step the schedulers that go by epochs."""
        for schedule in self.schedules:
            if schedule.interval == "epoch" and schedule.monitor is None:
                schedule.advance()

    def new_values(self, values: Mapping[str, float]) -> None:
        """Step the schedulers that watch one of these freshly computed metrics."""
        for schedule in self.schedules:
            if schedule.monitor is not None and schedule.monitor in values:
                schedule.advance(values[schedule.monitor])

    def check_monitors(self, known: Iterable[str]) -> None:
        """Raise when a scheduler watches something that a whole epoch and its validation did not log.

        Raises:
            SettingsError: naming the nearest metric that there is.
        """
        names = list(known)
        for schedule in self.schedules:
            if schedule.monitor is not None and schedule.monitor not in names:
                near = difflib.get_close_matches(schedule.monitor, names, n=1, cutoff=0.3)
                raise SettingsError(
                    f"{type(schedule.scheduler).__name__} watches {schedule.monitor!r}, which nothing has logged; "
                    f"there are {', '.join(sorted(names)) or 'no metrics'}."
                    + (f" Did you mean {near[0]!r}?" if near else "")
                )

    def _rates(self) -> dict[str, float]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if len(groups) == 1:
            return {"lr": float(groups[0]["lr"])}
        return {f"lr/{group.get('name', index)}": float(group["lr"]) for index, group in enumerate(groups)}
