"""An optimizer's step that runs out of memory: the first one is made once more, a later one ends the run.

    first:  copies on the host -> step -> out of memory: all as it was -> release -> once more without foreach
    later:  step -> out of memory: OutOfMemoryError

A step changes weights in place, so it can be made again only where there are copies. An optimizer allocates its state
in its first step, so that is the one that does not fit, and copies are made for it alone: a later step costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from sanctuary_trainer.errors import OutOfMemoryError
from sanctuary_trainer.out_of_memory import is_out_of_memory, peak, release

# How many parameters an optimizer had when its first step was made.
_STEPPED: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
_HALF = 'Weights and optimizer may be half updated: go on from the run\'s last checkpoint, fit(resume="last").'


def step_within_memory(optimizers: Sequence[Optimizer], *, on_event: Callable[..., object]) -> None:
    """Step each optimizer; where memory runs out in its first step, put all back and step once more, without foreach.

    A first step is that in this process, and that after the number of its parameters changed.

    Args:
        optimizers: in their order; one that has stepped is not stepped again.
        on_event: called as `on_event(error, retried=True)` after a second try that was made, and with False before
            OutOfMemoryError is raised.

    Raises:
        OutOfMemoryError: the step does not fit into memory, or cannot be repeated. From the first try's error.
    """
    for optimizer in optimizers:
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        if _STEPPED.get(optimizer) != count:
            _first_step(optimizer, on_event)
            _STEPPED[optimizer] = count
        elif (error := _attempt(optimizer)) is not None:
            _end(optimizer, error, f"and only a first step is repeated. {_HALF}", on_event)


def _first_step(optimizer: Optimizer, on_event: Callable[..., object]) -> None:
    put_back = _copied(optimizer)
    first = _attempt(optimizer)
    if first is None:
        return
    if put_back is None:
        _end(optimizer, first, f"nor did copies, without which it is not repeated. {_HALF}", on_event)
    put_back()
    release(first)
    # With it temporaries are as large as all parameters together, else as one of them. Fused kernels have none.
    with_foreach = [g for g in optimizer.param_groups if g.get("foreach", False) in (None, True) and not g.get("fused")]
    for group in with_foreach:
        group["foreach"] = False
    if _device(optimizer).type == "cpu":
        put_back = None  # its copies lie in the memory that is short
    second = _attempt(optimizer)
    if second is None:
        on_event(first, retried=True)
        return
    if put_back is not None:
        put_back()
    release(second)
    how = ", parameter by parameter" if with_foreach else ""
    left = _HALF if put_back is None else "Nothing moved: weights and optimizer are as before it."
    _end(optimizer, first, f"nor did it in a second try{how}. {left}", on_event)


def _attempt(optimizer: Optimizer) -> Exception | None:
    """The step, and its error if that is out of memory."""
    try:
        optimizer.step()
    except Exception as error:
        if is_out_of_memory(error):
            return error
        raise
    return None


def _copied(optimizer: Optimizer) -> Callable[[], None] | None:
    """Copies on the host of all that a step may write; what comes back puts them back. None where they do not fit."""
    inside = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]  # as in timm's Lookahead
    states = [each.state for each in (optimizer, *inside) if isinstance(getattr(each, "state", None), dict)]
    settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    leaves, structure = tree_flatten((states, settings))
    tensors = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    try:
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    except Exception as error:
        if is_out_of_memory(error):
            release(error)
            return None
        raise

    def put_back() -> None:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        states_before, settings_before = tree_unflatten(leaves, structure)  # new dicts and lists each time
        for state, entries in zip(states, states_before, strict=True):
            state.clear()  # a half-made entry would be taken for a whole one
            state.update(entries)
        for group, values in zip(optimizer.param_groups, settings_before, strict=True):
            group.update(values)

    return put_back


def _end(optimizer: Optimizer, error: Exception, how: str, on_event: Callable[..., object]) -> NoReturn:
    release(error)
    on_event(error, retried=False)
    raise OutOfMemoryError(
        f"The step of {type(optimizer).__name__} did not fit into memory, {how} The peak was "
        f"{peak(_device(optimizer))}. Take an optimizer with less state (SGD, Adafactor, one of 8 bits), give it "
        "foreach=False, or train a smaller model, fewer of its parameters, or weights in bfloat16."
    ) from error


def _device(optimizer: Optimizer) -> torch.device:
    return next(p.device for group in optimizer.param_groups for p in group["params"])  # type: ignore[no-any-return]
