"""Gradient replay: complete the gradients of a batch whose backward broke off, without a collective of its own.

    replay.note()                             before an attempt: how the gradients stand
    the attempt breaks off
    replay.missing()                          the parameters that have got none from it
    replay.gradients(step, size, missing)     of a piece of the batch, aside: neither .grad nor DDP's hooks see them
    replay.hand_over(missing, sums, ...)      through the parameters' own AccumulateGrad, as the backward would have

DDP waits for one gradient of each parameter, and sends a bucket when it is full: what had come before the error is on
its way already. It is given exactly what it still waits for, and the other ranks see a slow rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sanctuary_trainer.dispatch import NOTHING, zero_loss

if TYPE_CHECKING:
    from sanctuary_trainer.executor import Executor


class _Given(torch.autograd.Function):
    """A scalar 0 whose backward gives each parameter the gradient that was made for it."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return None, *gradients


class Replay:
    """The gradients of one attempt at a batch: which it gave, and those that it did not, given later."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._dispatch: nn.Module | None = None
        self.parameters: list[nn.Parameter] = []
        self._before: list[tuple[Tensor | None, int]] = []
        self._given: set[int] | None = None
        self._hooks: list[Any] = []

    def note(self) -> None:
        """An attempt begins: note how the gradients stand."""
        if self._executor.dispatch is not self._dispatch:
            self._dispatch = self._executor.dispatch
            self.parameters = [p for p in self._dispatch.parameters() if p.requires_grad]
        gradients = [parameter.grad for parameter in self.parameters]
        self._before = [(g, 0 if g is None else g._version) for g in gradients]
        self._given = None
        if any(gradient is not None and gradient._is_view() for gradient in gradients):
            # Views of one bucket share a version: it does not tell which of them has changed.
            given = self._given = set()
            self._hooks = [p.register_post_accumulate_grad_hook(lambda p: given.add(id(p))) for p in self.parameters]

    def over(self) -> None:
        """The attempt is over."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    @property
    def waits(self) -> bool:
        """Whether DDP waits for gradients once a forward that syncs is over."""
        return isinstance(self._executor.module, DistributedDataParallel)

    def missing(self) -> list[nn.Parameter]:
        """The trainable parameters, the ride included, that got no gradient since `note`."""
        if self._given is not None:
            return [p for p in self.parameters if id(p) not in self._given]
        pairs = zip(self.parameters, self._before, strict=True)
        return [p for p, (grad, version) in pairs if p.grad is grad and (grad is None or grad._version == version)]

    def broke_off(self) -> bool:
        """Whether the attempt died in its backward. Afterwards another may begin."""
        executor = self._executor
        in_backward, executor.in_backward, executor.in_sync = executor.in_backward, False, False
        if not in_backward and self.waits:
            # What DDP sends before a forward is sent, and the others would not answer a second time.
            executor.module.require_forward_param_sync = False  # type: ignore[assignment]
        return in_backward

    def gradients(
        self, step: Callable[[], Any], size: int, parameters: Sequence[nn.Parameter], into: list[Tensor | None]
    ) -> tuple[Tensor | None, float]:
        """Run a step aside and add the gradients of its weighted loss to `into`, one for each of the `parameters`.

        Returns:
            The loss as the user returned it (detached) and its weight; None and 0 when the step left the batch out.
        """
        executor = self._executor
        ride = executor.dispatch.ride
        scaled, _, loss, weight = executor.dispatch(step, size, executor.share, NOTHING)
        if loss is None:
            return None, 0.0
        wanted = [parameter for parameter in parameters if parameter is not ride]
        with _without_hooks(wanted):
            found = torch.autograd.grad(executor.scaled_up(scaled), wanted, allow_unused=True)
        gradients = iter(found)
        del found, scaled
        for number, parameter in enumerate(parameters):
            gradient = None if parameter is ride else next(gradients)
            if gradient is not None:
                sum_ = into[number]
                # Not in place: autograd gives several parameters one tensor, or a number seen many times.
                into[number] = gradient if sum_ is None else sum_ + gradient
        return loss, weight

    def hand_over(
        self, parameters: Sequence[nn.Parameter], gradients: list[Tensor | None], weight: float, sync: bool
    ) -> None:
        """Give the parameters these gradients, the ride its counts, and so end the batch.

        A parameter whose gradient is None has no part in the loss: DDP knows, or says so as it does without us.
        """
        executor = self._executor
        ride = executor.dispatch.ride
        for number, parameter in enumerate(parameters):
            if parameter is ride:
                carried = executor.carried if sync else NOTHING
                gradients[number] = torch.tensor([weight, *carried[1:]], dtype=ride.dtype).to(ride.device)
        there = [number for number, gradient in enumerate(gradients) if gradient is not None]
        targets = [parameters[number] for number in there]
        values = [gradient for gradient in gradients if gradient is not None]
        gradients.clear()
        if targets:
            executor.in_sync = sync
            with executor.noting_order(sync):
                _Given.apply(values, *targets).backward()
            executor.in_sync = False
        executor.settle(weight, sync)

    def give_up(self) -> None:
        """Let the other ranks go on to where they hear of the error: DDP gets zeros for all that it still waits for."""
        executor, parameters = self._executor, self.missing()
        if not self.waits or not parameters:
            return
        if executor.module.find_unused_parameters:
            executor.in_sync = True  # for which of them DDP waits is not known: the others hear of it by our end
            return
        executor.in_sync = True
        zero_loss(parameters).backward()
        executor.in_sync = False
        executor.has_synced = True


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A user's hooks on gradients see the batch's, once, when they are handed over."""
    hooked = [(parameter, parameter._backward_hooks) for parameter in parameters if parameter._backward_hooks]
    for parameter, _ in hooked:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks
