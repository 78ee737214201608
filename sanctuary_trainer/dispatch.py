"""The module that DDP wraps: calls a step of the task, weighs its loss, and lets this rank's counts ride along.

    forward(step, size, share, carried)
      step()                                  -> loss, weight (read_output)
      scaled loss = loss x weight / share     zeros for every parameter where a rank has no loss to give
      ride x [weight, counts, flags]          whose gradient arrives summed over the ranks, in DDP's own buckets

A rank that has nothing to give (its stream ended, its batches were left out) still owes DDP one gradient for each
parameter, else its peers wait for ever: `zero_loss` gives them, without running the model and without a collective.

It is a wrapper of its own so that DDP's hooks fire for any step; users never see it, and keys never carry its prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sanctuary_trainer.errors import TaskError

# What rides: the weight, samples and batches of this rank in the window, and how many ranks say each of these.
RIDE = ("weight", "samples", "batches", "more", "stop", "failed", "save")
NOTHING = [0.0] * len(RIDE)


class Dispatch(nn.Module):
    """What DDP wraps: calls a step of the task and returns what backward starts from."""

    ride: nn.Parameter | None

    def __init__(self, task: nn.Module, *, joins: bool, rides: bool) -> None:
        super().__init__()
        self.task = task
        trainable = [parameter for parameter in task.parameters() if parameter.requires_grad]
        if not trainable:
            raise TaskError(f"{type(task).__name__} has no parameter that requires a gradient: nothing can be trained.")
        self.trainable = trainable
        self.in_order: list[nn.Parameter] | None = None  # in which order they get gradients of zeros, if it matters
        self.joins = joins
        # Called with a step instead of it, when DDP has sent what it sends before a forward.
        self.around_step: Callable[[Callable[[], Any]], Any] | None = None
        self.sent: Callable[[], None] | None = None  # called at that moment, too
        if rides:
            # In float32 beside half-precision weights: 2048 samples are the most that fp16 can count.
            kind = torch.float64 if trainable[0].dtype == torch.float64 else torch.float32
            self.ride = nn.Parameter(torch.zeros(len(RIDE), dtype=kind, device=trainable[0].device))
        else:
            self.ride = None

    def named(self, error: RuntimeError) -> Exception:
        """DDP's error about parameters that the step before did not use, with their names instead of numbers."""
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if numbers is None:
            return error
        names = [name for name, p in self.named_parameters() if p.requires_grad]
        return unused_error([names[int(number)].removeprefix("task.") for number in numbers[1].split()])

    def without_gradient(self) -> list[str]:
        """The names of the trainable parameters that have no gradient."""
        return [name for name, p in self.task.named_parameters() if p.requires_grad and p.grad is None]

    def forward(
        self, step: Callable[[], Any] | None, size: float, share: float, carried: list[float]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, float]:
        """Run `step` and weigh its loss.

        Args:
            step: the task's step with its batch bound; None to join with zeros.
            size: samples of the batch, the weight unless the step gives another.
            share: expected samples of the window / ranks: what a loss x weight is divided by.
            carried: what this rank tells the others with this batch, in the order of `RIDE`; its weight is put in here.

        Returns:
            scaled loss, the ride's term, the loss as the user returned it (detached), its weight. Without a step, or
            when the batch is left out, the user's loss is None and the weight is 0.
        """
        if self.sent is not None:
            self.sent()
        loss, weight = None, 0.0
        if step is not None:
            loss, weight = read_output(step() if self.around_step is None else self.around_step(step), size)
        scaled: torch.Tensor | None = None
        if loss is not None:
            divisor = share / weight
            scaled = loss if divisor == 1.0 else loss / divisor
        elif self.joins:
            scaled = zero_loss(self.in_order or self.trainable, in_order=self.in_order is not None)
        detached = None if loss is None else loss.detach()
        if self.ride is None:
            return scaled, None, detached, weight
        # Made on the host and copied without waiting: torch.tensor(..., device=...) would wait for the device.
        told = torch.tensor([weight, *carried[1:]], dtype=self.ride.dtype).to(self.ride.device, non_blocking=True)
        return scaled, self.ride.dot(told), detached, weight


class _Zeros(torch.autograd.Function):
    """A scalar 0 whose backward gives every parameter a gradient of zeros (also one that holds NaN)."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def zero_loss(parameters: Sequence[torch.Tensor], in_order: bool = False) -> torch.Tensor:
    """A scalar loss of 0 with a gradient of zeros for each of the `parameters` (at least one).

    in_order: let them get it one after the other, as they stand.
    """
    if not in_order:
        loss: torch.Tensor = _Zeros.apply(*parameters)
        return loss
    # Of what is ready, autograd takes what was made last.
    return sum(
        (zero_loss([parameter]) for parameter in reversed(parameters)), torch.zeros((), device=parameters[0].device)
    )


def read_output(output: Any, size: float) -> tuple[torch.Tensor | None, float]:
    """The loss and the weight in what `training_step` returned; (None, 0.0) when the batch is left out.

    Raises:
        TaskError: it is neither a scalar tensor with a graph, nor a dict with "loss", nor None.
    """
    if type(output) is torch.Tensor and output.dim() == 0 and output.requires_grad:
        return output, size  # what most steps return, and a third of a check's time saved
    loss, weight = output, size
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise TaskError(
                f'training_step returned a dict with the keys {sorted(map(str, output))}; the key "loss" is missing.'
            )
        loss = output["loss"]
        if output.get("weight") is not None:
            weight = _number(output["weight"])
    if loss is None or weight == 0.0:
        return None, 0.0  # a weight of 0 is known before the loss is looked at: a mean over nothing is NaN
    if not isinstance(loss, torch.Tensor):
        raise TaskError(
            f"training_step returned {type(loss).__name__}; a scalar loss tensor, "
            '{"loss": loss, "weight": n} or None was expected.'
        )
    if loss.numel() != 1:
        raise TaskError(
            f"training_step returned a loss of shape {tuple(loss.shape)}; reduce it to one number, e.g. .mean()."
        )
    if not loss.requires_grad:
        raise TaskError(
            "training_step returned a loss without a graph, so nothing can be learned from it. "
            "Do not detach it or compute it under torch.no_grad(), and check that some parameter requires a gradient."
        )
    return loss.reshape(()) if loss.dim() else loss, weight


def _number(weight: Any) -> float:
    """A weight as a number. One on an accelerator is waited for: that it is 0 must be known before backward."""
    if isinstance(weight, torch.Tensor) and weight.numel() != 1:
        raise TaskError(f"training_step returned a weight of shape {tuple(weight.shape)}; one number was expected.")
    try:
        number = float(weight)
    except (TypeError, ValueError):
        raise TaskError(f"training_step returned weight={weight!r}; a number was expected.") from None
    if not 0.0 <= number < float("inf"):
        raise TaskError(f"training_step returned weight={number}; a finite number of at least 0 was expected.")
    return number


def unused_error(names: list[str]) -> TaskError:
    """The error for parameters, by name, that would let the other ranks wait."""
    return TaskError(
        f"These parameters got no gradient from training_step: {', '.join(names[:5])}"
        f"{f' and {len(names) - 5} more' if len(names) > 5 else ''}. On several ranks freeze them "
        "(requires_grad_(False)), use them, or give the Trainer find_unused_parameters=True."
    )
