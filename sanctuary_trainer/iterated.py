"""Data that is iterated: begun anew, begun at a state, or read again (private to streams.py).

Torch's protocol: state_dict() tells where an iteration stands, load_state_dict(state) lets the next one begin there.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from copy import deepcopy
from typing import Any
from warnings import warn

from sanctuary_trainer.errors import DataError


class Iterated:
    """A data set or loader, iterated from its beginning or from a state.

    As torchdata does, the object and the iterator that it gives are both asked for a state. An object that remembers
    where its last iteration was left is taken back to its beginning.

    Args:
        owner: what is iterated.
        once: ask the iterator only where the owner itself has no state.

    Attributes:
        left: whether an iteration was begun and not read to its end; the reader says when it was.
    """

    def __init__(self, owner: Any, *, once: bool = False) -> None:
        self._owner, self._once = owner, once
        self._holders: list[Any] = []
        self._beginning: tuple[Any] | None = None  # the state in which it came
        self.left = False

    def open(self, state: Any = None) -> Iterator[Any]:
        """Begin an iteration, where the state says."""
        owner = self._owner
        if self._beginning is None:
            self._beginning = (_state_before(owner),)
        of_owner, of_items = state or (self._beginning[0] if self.left else None, None)
        self.left = True
        if of_owner is not None:
            _load(owner, of_owner)
        items: Iterator[Any] = iter(owner)
        if of_items is not None:
            _load(items, of_items)
        asked = [None if items is owner else owner, items]
        if self._once and items is not owner and _has_state(owner):
            asked[1] = None
        self._holders = [each if _has_state(each) else None for each in asked]
        return items

    def state(self) -> bytes | None:
        """Where the iteration stands now; None where it cannot tell. Pickled: it may change while it is on its way."""
        if all(each is None for each in self._holders):
            return None
        states = [None if each is None else each.state_dict() for each in self._holders]
        try:
            return pickle.dumps(states)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            names = " and ".join(type(each).__name__ for each in self._holders if each is not None)
            raise DataError(
                f"What state_dict() of {names} gives cannot be kept: {error}. Give numbers, strings, bytes, tensors, "
                "arrays, and lists, tuples and dicts of these."
            ) from error


def _has_state(owner: Any) -> bool:
    """Whether it has torch's protocol. A state_dict that wants arguments is another's."""
    save, load = getattr(owner, "state_dict", None), getattr(owner, "load_state_dict", None)
    if not callable(save) or not callable(load):
        return False
    try:
        inspect.signature(save).bind()
    except (TypeError, ValueError):
        return False
    return True


def _state_before(owner: Any) -> Any:
    """The state before anything was iterated; None where it has none, or none yet."""
    if not _has_state(owner):
        return None
    try:
        return deepcopy(owner.state_dict())
    except (AttributeError, LookupError, TypeError, RuntimeError):  # e.g. it asks an iterator that is still to come
        return None


def _load(owner: Any, state: Any) -> None:
    if not _has_state(owner):
        raise DataError(
            f"The position that was saved holds a state of the data, but {type(owner).__name__} has no "
            "load_state_dict to take it. Give the former data, or resume from the end of an epoch."
        )
    owner.load_state_dict(deepcopy(state))


def plain(state: Any) -> Any:
    """A state as it can be written."""
    return pickle.loads(state) if isinstance(state, bytes) else state


def warn_of_reading_again(what: str, name: str, used: int, of: str) -> None:
    told = (
        f"The {what} of the {name} loader has no state_dict and load_state_dict: to continue the epoch it reads and "
        f"drops the {used} {of} that are used up."
    )
    warn(f"{told} With both methods it would begin where it stopped.", stacklevel=3)
