"""When a backward's gradients arrive, and how long DDP holds it up in between: told by hooks, on sampled steps only.

    a gradient is complete -> our first hook -> DDP's, which may call a communication hook -> our second hook
                              (the time from the first to the second is "wait")
    the last gradient -> DDP waits for what it has sent -> backward returns
                              (the time from there is "wait", too)

Where the executor gives `ride` its gradient in a backward of its own, DDP's wait at the end is that backward and needs
no hooks. They are needed where DDP must get all gradients in one backward, and where a communication hook of the
user's may hold the backward up: it stays theirs, DDP takes one only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sanctuary_trainer.clock import Clock


def needs_hooks(module: nn.Module, rides_apart: bool) -> bool:
    """Whether the time that a backward of `module` (DDP's) waits can only be told with hooks."""
    return not rides_apart or bool(getattr(module, "_comm_hooks", None))


@contextmanager
def waits_told(module: nn.Module, clock: Clock) -> Iterator[None]:
    """In a backward that runs inside, count as "wait" what it spends in DDP, and after its last gradient."""
    began: float | None = None
    last: float | None = None

    def begins(parameter: torch.Tensor) -> None:
        nonlocal began
        began = clock.enter()

    def ends(*gradients: Any) -> None:
        nonlocal last
        if began is not None:
            clock.leave("wait", began)
            last = clock.enter()

    handles = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(begins))
            # DDP's hook on the same node was there first, and so runs first.
            handles.append(_accumulation(parameter).register_hook(ends))
    try:
        yield
        if last is not None:
            clock.leave("wait", last)
    finally:
        for handle in handles:
            handle.remove()


def _accumulation(parameter: torch.Tensor) -> Any:
    """The node of the graph that adds a gradient to `parameter.grad`."""
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return node.next_functions[0][0]
