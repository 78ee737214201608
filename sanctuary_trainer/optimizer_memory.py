"""An optimizer's step that runs out of memory: made once more with less, or an error that says what is lost.

    what there is before -> step -> out of memory: all as it was -> release -> once more without foreach

A step changes weights in place, so it can be made again only where nothing moved, or where there are copies. An
optimizer allocates its state in its first step, so that is the step that does not fit: for it, copies are kept on the
host, on an accelerator through the second try too. Of later steps only version counters are noted, which tell whether a
tensor was written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from sanctuary_trainer.errors import OutOfMemoryError
from sanctuary_trainer.out_of_memory import is_out_of_memory, peak, release

# Of each optimizer that made a step: the parameters that it keeps no state for, by id; and whether version counters
# show what it writes. They do not where it writes to `parameter.data`, nor where one kernel writes to many tensors, as
# torch's fused ones do everywhere and its foreach ones where they are no loop, on accelerators.
_KNOWN: WeakKeyDictionary[Optimizer, tuple[set[int], bool]] = WeakKeyDictionary()


def step_within_memory(optimizers: Sequence[Optimizer], *, on_event: Callable[..., object]) -> None:
    """Step each optimizer; where memory runs out and all can be put back, step that one once more, without foreach.

    Args:
        optimizers: in their order; one that has stepped is not stepped again.
        on_event: called as `on_event(error, retried=True)` after a second try that was made, and with False before
            OutOfMemoryError is raised.

    Raises:
        OutOfMemoryError: the step does not fit into memory, or cannot be repeated. From the first try's error.
    """
    for optimizer in optimizers:
        _step(optimizer, _Before(optimizer), on_event)


def _step(optimizer: Optimizer, before: _Before, on_event: Callable[..., object]) -> None:
    error = _attempt(optimizer)
    if error is not None:
        _once_more(optimizer, before, error, on_event)
    before.learn()


def _attempt(optimizer: Optimizer) -> Exception | None:
    """The step, and its error if that is out of memory."""
    try:
        optimizer.step()
    except Exception as error:
        if is_out_of_memory(error):
            return error
        raise
    return None


def _once_more(optimizer: Optimizer, before: _Before, first: Exception, on_event: Callable[..., object]) -> None:
    whole = before.put_back()
    release(first)
    tried = "and it stopped half way, so it cannot be repeated"
    if whole:
        # With it temporaries are as large as all parameters together, else as one of them. Fused kernels have none.
        with_foreach = [
            g for g in optimizer.param_groups if g.get("foreach", False) in (None, True) and not g.get("fused")
        ]
        for group in with_foreach:
            group["foreach"] = False
        before.spare_memory()
        second = _attempt(optimizer)
        if second is None:
            on_event(first, retried=True)
            return
        whole = before.put_back()
        release(second)
        tried = f"nor did it in a second try{', parameter by parameter' if with_foreach else ''}"
    on_event(first, retried=False)
    moved = "are" if before.visible else "may be"
    left = f'The weights {moved} half updated: go on from the last checkpoint of the run, fit(resume="last").'
    device = optimizer.param_groups[0]["params"][0].device
    raise OutOfMemoryError(
        f"The step of {type(optimizer).__name__} did not fit into memory, {tried}. "
        f"{'Nothing moved: weights and optimizer are as before it.' if whole else left} The peak was {peak(device)}. "
        "Take an optimizer with less state (SGD, Adafactor, one of 8 bits), give it foreach=False, or train a smaller "
        "model, fewer of its parameters, or weights in bfloat16."
    ) from first


class _Before:
    """What an optimizer and its parameters hold before a step, as far as it may have to be put back."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.groups = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
        self.states = _states(optimizer)
        self.tensors: list[Tensor] = [*self.parameters]
        # In pairs, since hashing a tensor takes longer than all else here.
        self.entries = [[(key, _held(entry, self.tensors)) for key, entry in state.items()] for state in self.states]
        self.versions = _versions(self.tensors)
        self.on_cpu = all(p.is_cpu for p in self.parameters)
        torchs = type(optimizer).__module__.startswith("torch.optim") and not any(g.get("fused") for g in self.groups)
        self.stateless, self.visible = _KNOWN.get(optimizer, (set[int](), torchs and self.on_cpu))
        self.new = self._without_state() - self.stateless
        self.copies = self._copy() if self.new else None

    def put_back(self) -> bool:
        """Make all as it was; False, and nothing is changed, where tensors moved and there are no copies."""
        if self.copies is not None:
            with torch.no_grad():
                for tensor, kept in zip(self.tensors, self.copies, strict=True):
                    tensor.copy_(kept)
            self.versions = _versions(self.tensors)  # what was written here is not the optimizer's
        elif not self.visible or _versions(self.tensors) != self.versions:
            return False
        for state, entries in zip(self.states, self.entries, strict=True):
            state.clear()  # a half-made entry would be taken for a whole one
            state.update((key, _held(entry, [])) for key, entry in entries)
        for group, settings in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(settings)
        return True

    def spare_memory(self) -> None:
        """Give up copies that lie in the memory that is short: a second try matters more than what it leaves."""
        if self.on_cpu:
            self.copies = None

    def learn(self) -> None:
        """Remember, after the optimizer's first step, what it keeps state for and whether its writing shows."""
        if self.parameters and (self.new or self.optimizer not in _KNOWN):
            own = slice(len(self.parameters))
            unseen = [a == b for a, b in zip(_versions(self.parameters), self.versions[own], strict=True)]
            _KNOWN[self.optimizer] = (self.stateless | self._without_state(), not any(unseen))

    def _without_state(self) -> set[int]:
        with_state = {id(key) for state in self.states for key, entry in state.items() if entry}
        return {id(p) for p in self.parameters} - with_state

    def _copy(self) -> list[Tensor] | None:
        try:
            return [tensor.detach().to("cpu", copy=True) for tensor in self.tensors]
        except Exception as error:
            if is_out_of_memory(error):
                release(error)
                return None
            raise


def _states(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """The optimizer's state, and that of one inside it, as in timm's Lookahead."""
    inside = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return [each.state for each in (optimizer, *inside) if isinstance(getattr(each, "state", None), dict)]


def _held(value: Any, tensors: list[Tensor]) -> Any:
    """The same values in dicts and lists of their own; adds the tensors among them to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, list | tuple):
        own = [_held(item, tensors) for item in value]
        return own if isinstance(value, list) else value
    elif isinstance(value, dict):
        copied = dict(value) if type(value) is dict else copy(value)
        for key, item in value.items():
            if isinstance(item, Tensor):  # most are, and a call for each would double the time
                tensors.append(item)
            elif isinstance(item, dict | list | tuple):
                copied[key] = _held(item, tensors)
        return copied
    return value


def _versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """How often each was written to; tensors of inference mode, which do not tell, cannot be written to outside it."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]
