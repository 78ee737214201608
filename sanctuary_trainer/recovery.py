"""Gradient replay: hand gradients to DDP that no forward of this rank has made.

A rank that has nothing to give in a round (its stream ended, its batches were left out) still owes DDP one gradient for
each parameter, else its peers wait for ever. `zero_loss` gives them: zeros, without running the model and without a
collective of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


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
