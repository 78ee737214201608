"""Gradient replay: complete the gradients of a batch whose backward broke off, without a collective of its own.

    replay.note()                             before an attempt: how the gradients stand
    the attempt breaks off
    replay.missing()                          the parameters that have got none from it
    replay.gradients(missing, sums, step, ..) of a piece of the batch, aside: neither .grad nor DDP's hooks see them
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
from sanctuary_trainer.errors import NotSupportedError, OutOfMemoryError

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
        self._before: dict[int, tuple[Tensor, int]] = {}  # place among the parameters -> gradient and its version
        self._given: set[int] | None = None
        self._hooks: list[Any] = []

    def note(self) -> None:
        """An attempt begins: note how the gradients stand."""
        if self._executor.dispatch is not self._dispatch:
            self._dispatch = self._executor.dispatch
            self.parameters = [p for p in self._dispatch.parameters() if p.requires_grad]
        gradients = [parameter.grad for parameter in self.parameters]
        self._before = {place: (g, g._version) for place, g in enumerate(gradients) if g is not None}
        self._given = None
        if self._before and any(gradient._is_view() for gradient, _ in self._before.values()):
            # Views of one bucket share a version: it does not tell which of them has changed.
            given = self._given = set()
            self._hooks = [p.register_post_accumulate_grad_hook(lambda p: given.add(id(p))) for p in self.parameters]

    def unhook(self) -> None:
        """The attempt is over."""
        while self._hooks:
            self._hooks.pop().remove()

    def forget(self) -> None:
        """The batch is done: hold none of its gradients until the next one."""
        self._before = {}
        self.unhook()

    @property
    def waits(self) -> bool:
        """Whether DDP waits for gradients once a forward that syncs is over."""
        return isinstance(self._executor.module, DistributedDataParallel)

    def missing(self) -> list[nn.Parameter]:
        """The trainable parameters, the ride included, that got no gradient since `note`."""
        if self._given is not None:
            return [p for p in self.parameters if id(p) not in self._given]
        return [p for place, p in enumerate(self.parameters) if self._stands(p.grad, self._before.get(place))]

    @staticmethod
    def _stands(gradient: Tensor | None, before: tuple[Tensor, int] | None) -> bool:
        if gradient is None or before is None:
            return gradient is None and before is None
        return gradient is before[0] and gradient._version == before[1]

    def broke_off(self) -> bool:
        """Whether the attempt died in its backward. Afterwards another may begin."""
        executor = self._executor
        in_backward, executor.in_backward, executor.in_sync = executor.in_backward, False, False
        if not in_backward and self.waits:
            # What DDP sends before a forward is sent, and the others would not answer a second time.
            executor.module.require_forward_param_sync = False  # type: ignore[assignment]
        return in_backward

    def gradients(
        self, parameters: Sequence[nn.Parameter], into: list[Tensor | None], step: Callable[[], Any], size: int
    ) -> tuple[Tensor, float] | None:
        """Run a step aside and add the gradients of its weighted loss to `into`, one for each of the `parameters`.

        Returns:
            The loss as the user returned it (detached) and its weight; None when the step left the batch out.
        """
        executor = self._executor
        ride = executor.dispatch.ride
        scaled, _, loss, weight = executor.dispatch(step, size, executor.share, NOTHING)
        if loss is None:
            return None
        _refuse_reentrant(scaled)
        wanted = [parameter for parameter in parameters if parameter is not ride]
        with _without_hooks(wanted):
            loss_of_backward = executor.scaled_up(scaled)
            found = torch.autograd.grad(loss_of_backward, wanted, allow_unused=True) if wanted else ()
        gradients = iter(found)
        del found, scaled, loss_of_backward
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

        A parameter whose gradient is None has no part in the loss. One process leaves it so; DDP waits for all of them,
        unless it looks for those that are unused.

        Raises:
            OutOfMemoryError: DDP is not complete now: memory ran out in a hook, after a gradient had come.
        """
        executor = self._executor
        ride = executor.dispatch.ride
        for number, parameter in enumerate(parameters):
            if parameter is ride:
                carried = executor.carried if sync else NOTHING
                gradients[number] = torch.tensor([weight, *carried[1:]], dtype=ride.dtype).to(ride.device)
        waits = sync and self.waits
        if waits and not executor.module.find_unused_parameters:
            gradients[:] = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        there = [number for number, gradient in enumerate(gradients) if gradient is not None]
        targets = [parameters[number] for number in there]
        values = [gradient for gradient in gradients if gradient is not None]
        gradients.clear()
        if targets:
            executor.in_sync = sync
            with executor.noting_order(sync):
                _Given.apply(values, *targets).backward()
            executor.in_sync = False
        if waits:
            self._check_complete()
        executor.settle(weight, sync)

    def _check_complete(self) -> None:
        module: Any = self._executor.module
        try:
            module._check_reducer_finalized()
        except RuntimeError as error:
            self._executor.in_sync = True  # nobody can join any more: the others hear of it by our end
            raise OutOfMemoryError(
                "Memory ran out in backward where it cannot be made good: in a hook that runs when a gradient has come "
                "(a communication hook, register_post_accumulate_grad_hook), or with find_unused_parameters=True after "
                "the last gradient. Begin with smaller pieces: OOMFallback(piece_size=...)."
            ) from error

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


def _refuse_reentrant(loss: Tensor) -> None:
    """A reentrant checkpoint runs a backward of its own, which gives gradients to parameters past the asking."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise NotSupportedError(
                "Memory ran out in a backward with reentrant checkpointing, whose gradients cannot be had of some "
                "parameters alone. Call torch.utils.checkpoint with use_reentrant=False, or use GradientCheckpointing."
            )
        waiting += [following for following, _ in node.next_functions]


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
