"""A block whose activations are computed again in the backward pass instead of being kept.

    block.forward = Recomputed(block, name)    its own keys, class and hooks stay as they are
    del block.forward                          and it is as before

    forward    the block as it is; of what it saves for its backward, nothing is kept but its inputs
    backward   the block once more, from these inputs, with the same random numbers and autocast; what the first time
               changed in its buffers (running statistics, power iterations) is not changed a second time

The checkpoint is torch's, the non-reentrant one: frozen layers before or inside cut nothing off.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from sanctuary_trainer import TaskError

if TYPE_CHECKING:
    from torch import Tensor, nn

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_written = attrgetter("_version")  # how often a tensor was written to; torch has no public name for it


class Recomputed:
    """Stands in for a block's `forward`. Without gradients, as in validation, it is the original and nothing more.

    Args:
        block: the module; what its `forward` is now is what will be called.
        name: its name in the task, for errors.

    Raises:
        TaskError: when called: the block's inputs are changed in place, so that they could not be computed from again;
            or it begins to change a buffer that it did not change the first time.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        self.original = block.forward
        self.what = f"{name} ({type(block).__name__})"
        self.buffers = [
            (owner, buffer) for owner in block.modules() for buffer, _ in owner.named_buffers(recurse=False)
        ]
        self.copied: list[tuple[nn.Module, str]] | None = None  # buffers that a call changes; None: not known yet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        args, kwargs = _held(args), _held(kwargs)
        # As two arguments: torch has settings of its own among the keywords, and finds the tensors' devices in these.
        return checkpoint(partial(self._run, _Recomputation(self.what)), args, kwargs, use_reentrant=False)

    def _run(self, recomputation: _Recomputation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block, the first time or once more."""
        if torch.compiler.is_compiling():  # in a graph what is computed again changes no buffer
            return self.original(*args, **kwargs)
        if recomputation.inputs is not None:
            with recomputation:
                return self.original(*args, **kwargs)
        recomputation.inputs = [(tensor, _version(tensor)) for tensor in _tensors((args, kwargs))]
        before = self._before()
        output = self.original(*args, **kwargs)
        recomputation.check_inputs()
        recomputation.buffers = self._changed(before)
        return output

    def _before(self) -> list[_Buffer]:
        """Every buffer as it is, with a copy of those that the block may change."""
        found = []
        for owner, name in self.buffers:
            value = getattr(owner, name)
            if value is not None:
                # What a norm computes in training does not depend on what its statistics were.
                copies = not isinstance(owner, _NormBase) and (self.copied is None or (owner, name) in self.copied)
                found.append(_Buffer(owner, name, value, _version(value), value.clone() if copies else None))
        return found

    def _changed(self, before: list[_Buffer]) -> list[_Buffer]:
        """Those that the call has changed."""
        changed = [each for each in before if each.has_changed()]
        for each in changed:
            if each.copy is None and not isinstance(each.owner, _NormBase):
                raise TaskError(
                    f"Gradient checkpointing: {self.what} begins to change its buffer {each.name!r} as it computes, "
                    "and did not in the first step. It cannot be computed again as it was: leave it out with layers=."
                )
        if self.copied is None:
            self.copied = [(each.owner, each.name) for each in changed]
        return changed


class _Buffer(NamedTuple):
    """A buffer before the block was called: how often it was written to, and a copy where one is needed."""

    owner: nn.Module
    name: str
    value: Tensor
    version: int
    copy: Tensor | None

    def has_changed(self) -> bool:
        if self.name in STATISTICS and self.owner.training:
            return True  # torch's batch norm writes to its statistics without counting it
        return getattr(self.owner, self.name) is not self.value or _version(self.value) != self.version


class _Recomputation:
    """Around a recomputation, as often as there is one: buffers that change have what they had before, and afterwards
    what they have now."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.inputs: list[tuple[Tensor, int]] | None = None  # and how often each was written to; None: not run yet
        self.buffers: list[_Buffer] = []
        self.own: list[tuple[nn.Module, str, Any]] = []

    def __enter__(self) -> None:
        self.check_inputs()
        lent = [
            (each.value if each.copy is None else each.copy).clone() for each in self.buffers
        ]  # may run out of memory
        self.own = [(each.owner, each.name, getattr(each.owner, each.name)) for each in self.buffers]
        for each, value in zip(self.buffers, lent, strict=True):
            setattr(each.owner, each.name, value)

    def __exit__(self, *raised: object) -> None:
        for owner, name, value in self.own:
            setattr(owner, name, value)

    def check_inputs(self) -> None:
        if any(_version(tensor) != version for tensor, version in self.inputs or ()):
            raise TaskError(
                f"Gradient checkpointing: an input of {self.what} was changed in place, in it or after it, so that it "
                "cannot be computed from again. Leave this block out with layers=, or let nothing work in place there "
                "(inplace=False, x = x + y instead of x += y)."
            )


def _held(value: Any) -> Any:
    """`value` in lists and dicts of its own, since a caller may go on to fill them."""
    if type(value) in (list, tuple):
        return type(value)([_held(item) for item in value])
    if type(value) is dict:
        return {key: _held(item) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else int(_written(tensor))
