"""Seeds of the data path: Python's, numpy's and torch's CPU generators, swapped for the time of one batch and put back.

Every number comes from `mix(what, seed, epoch, ...)`, so the same batch draws the same in any process, and what the
training step draws (dropout, MixUp) does not depend on how the batch was fetched.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np
import torch

__all__ = ["BATCH", "ORDER", "READ", "WORKERS", "Drawing", "Generators", "mix"]

ORDER, BATCH, READ, WORKERS = range(4)  # the first argument of `mix`: what is drawn

_BITS = (1 << 64) - 1
_numpy_random: Any = np.random  # its stubs lack get_bit_generator and set_bit_generator


def mix(*values: int) -> int:
    """Hash integers to 64 bits, the same on every machine (the finalizer of splitmix64: Steele, Lea, Flood 2014)."""
    state = 0
    for value in values:
        state = ((state ^ value) + 0x9E3779B97F4A7C15) & _BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _BITS
        state ^= state >> 31
    return state


class Generators:
    """Stand in for the three global generators inside `with`; outside they are as if nothing had been drawn.

        with generators.seeded(mix(BATCH, seed, epoch, position)):    # 55 us for entering and leaving
            ...

    torch.manual_seed is not used: it would seed (and, in a forked worker, touch) CUDA too.

    Args:
        resumable: keep the states on leaving, so that `with generators:` goes on where the last one stopped (25 us).
    """

    def __init__(self, *, resumable: bool = False) -> None:
        self._resumable = resumable
        self._seed: int | None = 0
        self._own: tuple[Any, torch.Tensor] | None = None
        self._outer: tuple[Any, torch.Tensor, Any] | None = None
        self._numpy: Any = None  # a RandomState: made once (0.4 ms), seeded anew for each batch (4 us)

    def __getstate__(self) -> dict[str, Any]:  # a worker that is spawned makes its own
        return {"_resumable": self._resumable, "_seed": 0, "_own": None, "_outer": None, "_numpy": None}

    def seeded(self, seed: int) -> Generators:
        """Let the next `with` begin from this seed."""
        self._seed = seed
        return self

    def reseed(self, seed: int) -> None:
        """Begin anew from this seed inside a running `with`."""
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        self._numpy.seed(seed & 0xFFFFFFFF)

    def __enter__(self) -> None:
        numpy_random = self._swap_numpy()
        self._outer = (random.getstate(), torch.default_generator.get_state(), numpy_random)
        if self._seed is not None:
            self.reseed(self._seed)
        elif self._own is not None:
            random.setstate(self._own[0])
            torch.default_generator.set_state(self._own[1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._outer is not None
        if self._resumable:
            self._own = (random.getstate(), torch.default_generator.get_state())
            self._seed = None
        python, torch_state, bits = self._outer
        random.setstate(python)
        torch.default_generator.set_state(torch_state)
        _numpy_random.set_bit_generator(bits)
        self._outer = None

    def _swap_numpy(self) -> Any:
        """Put our bit generator in place of numpy's; return the other."""
        if self._numpy is None:
            self._bits = np.random.MT19937(0)  # the default kind: np.random.seed and get_state work on no other
            self._numpy = np.random.RandomState(self._bits)
        outer = _numpy_random.get_bit_generator()
        _numpy_random.set_bit_generator(self._bits)
        return outer


class Drawing:
    """Draw an order under generators of its own: the global ones and those that a sampler keeps as attributes.

    Enter it again to go on drawing (a sampler without end).

    Args:
        owners: samplers whose attributes may be generators (torch.Generator, random.Random, numpy's).
        seed: mixed with a torch.Generator's own initial_seed(), which thereby still chooses among orders.
    """

    def __init__(self, owners: Iterable[Any], seed: int) -> None:
        self._global = Generators(resumable=True).seeded(seed)
        self._kept: list[tuple[dict[str, Any], str, Any]] = []
        for number, (attributes, name) in enumerate(_generator_attributes(owners)):
            self._kept.append((attributes, name, _alike(attributes[name], mix(seed, number))))

    def __enter__(self) -> None:
        self._swap()
        self._global.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._global.__exit__(kind, error, traceback)
        self._swap()

    def _swap(self) -> None:
        for i, (attributes, name, other) in enumerate(self._kept):
            self._kept[i] = (attributes, name, attributes[name])
            attributes[name] = other


def _generator_attributes(owners: Iterable[Any]) -> list[tuple[dict[str, Any], str]]:
    return [
        (attributes, name)
        for attributes in (vars(owner) for owner in owners if hasattr(owner, "__dict__"))
        for name, value in attributes.items()
        if _alike(value, 0) is not None
    ]


def _alike(generator: Any, seed: int) -> Any:
    """Make a generator of the same kind from a seed; None for anything that is none."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(mix(seed, generator.initial_seed()))
    if isinstance(generator, random.Random):
        return random.Random(seed)
    if isinstance(generator, np.random.Generator):
        return np.random.default_rng(seed)
    if isinstance(generator, np.random.RandomState):
        return np.random.RandomState(seed & 0xFFFFFFFF)
    return None
