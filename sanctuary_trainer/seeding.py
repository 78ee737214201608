"""Seeds of the data path: the generators of Python, numpy and torch, replaced for the time of one batch and put back.

Every number comes from `mix(what, seed, epoch, ...)`, so the same batch draws the same in any process, and what the
training step draws (dropout, MixUp) does not depend on how the batch was fetched.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from sanctuary_trainer.owners import generators_of

__all__ = [
    "BATCH",
    "ORDER",
    "READ",
    "WORKERS",
    "Generators",
    "generators_aside",
    "may_draw",
    "mix",
    "seed_everything",
    "waiting_normal",
]

ORDER, BATCH, READ, WORKERS = range(4)  # the first argument of `mix`: what is drawn

_numpy_random: Any = np.random  # its stubs lack get_bit_generator and set_bit_generator
_MT19937_BYTES = 4 * 624 + 4  # of its state: the key and the position in it


def mix(*values: int) -> int:
    """Hash integers to 64 bits, the same on every machine."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "little")


class Generators:
    """Stand in for the global generators inside `with`; outside they are as if nothing had been drawn.

        with generators.seeded(mix(BATCH, seed, epoch, position)):
            ...

    Those that the owners hold (torch.Generator, random.Random, numpy's Generator and RandomState; in attributes, and
    in the objects, short lists and dicts there) are replaced too: a copy of them in each worker would draw the same
    numbers in all, and in every epoch. A torch.Generator's own initial_seed() still chooses among orders.

    torch.manual_seed is not used: it would seed CUDA too, and in a forked worker touch it.

    Args:
        owners: the objects that may hold generators.
        resumable: keep the states on leaving, so that `with generators:` goes on where the last one stopped.
    """

    def __init__(self, owners: Iterable[Any] = (), *, resumable: bool = False) -> None:
        self._owners, self._resumable = list(owners), resumable
        self._seed: int | None = 0
        self._begin()

    def _begin(self) -> None:
        self._numpy: Any = None  # a RandomState, made once (0.4 ms) and seeded anew for each batch (4 us)
        self._slots: list[tuple[Any, Any]] | None = None  # where the owners' generators are, once looked up
        self._held: list[Any] = []  # the owners' generators while ours are in their places
        self._own: tuple[Any, Any, list[Any]] | None = None
        self._outer: tuple[Any, Any, Any, float | None] | None = None

    def __getstate__(self) -> dict[str, Any]:  # for a worker that is spawned
        return {"_owners": self._owners, "_resumable": self._resumable, "_seed": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def seeded(self, seed: int) -> Generators:
        """Let the next `with` begin from this seed."""
        self._seed = seed
        return self

    def look_up_anew(self) -> None:
        """Let the next `with` look for the owners' generators again: they were told something and may hold others."""
        self._slots = None

    def reseed(self, seed: int, *, globally: bool = True, held: bool = True) -> None:
        """Begin anew from this seed inside a running `with`.

        Args:
            seed: of all numbers that follow.
            globally: of the global generators.
            held: of those that the owners hold.
        """
        if globally:
            random.seed(seed)
            torch.default_generator.manual_seed(seed)
            self._numpy.seed(seed & 0xFFFFFFFF)
            _numpy_random.set_bit_generator(self._bits)  # again: np.random drops the second normal of a pair
        if not held:
            return
        made: dict[int, Any] = {}  # what is held in two places stays one
        for number, each in enumerate(self._held):
            if id(each) not in made:
                made[id(each)] = _alike(each, mix(seed, number))
        self._put([made[id(each)] for each in self._held])

    def __enter__(self) -> None:
        if self._slots is None:
            self._slots = generators_of(self._owners)
        self._held = [holder[key] for holder, key in self._slots]
        bits, normal = self._swap_numpy()
        self._outer = (random.getstate(), torch.default_generator.get_state(), bits, normal)
        if self._seed is not None:
            self.reseed(self._seed)
        elif self._own is not None:
            random.setstate(self._own[0])
            torch.default_generator.set_state(self._own[1])
            self._put(self._own[2])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._outer is not None and self._slots is not None
        if self._resumable:
            held = [holder[key] for holder, key in self._slots]
            self._own, self._seed = (random.getstate(), torch.default_generator.get_state(), held), None
        python, torch_state, bits, normal = self._outer
        random.setstate(python)
        torch.default_generator.set_state(torch_state)
        _numpy_random.set_bit_generator(bits)
        if normal is not None:
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": normal})
        self._put(self._held)

    def _put(self, generators: list[Any]) -> None:
        for (holder, key), generator in zip(self._slots or (), generators, strict=True):
            holder[key] = generator

    def _swap_numpy(self) -> tuple[Any, float | None]:
        """Put our bit generator in place of numpy's; return the other, and the normal that was drawn with its bits."""
        if self._numpy is None:
            self._bits = np.random.MT19937(0)  # the default kind: np.random.seed and get_state want it
            self._numpy = np.random.RandomState(self._bits)
        outer = _numpy_random.get_bit_generator()
        normal = waiting_normal(outer)
        _numpy_random.set_bit_generator(self._bits)
        return outer, normal


def waiting_normal(bits: Any) -> float | None:
    """Look at the second normal of a pair, which np.random keeps outside its bit generator and drops when that is set.

    np.random.get_state() tells it too, in 0.15 ms. Here one normal is drawn, and the bits are put back: when none were
    used, it was the one that waited.
    """
    if not isinstance(bits, np.random.MT19937):
        state: Any = np.random.get_state(legacy=False)
        return state["gauss"] if state["has_gauss"] else None
    address = bits.ctypes.state_address
    before = ctypes.string_at(address, _MT19937_BYTES)
    normal = np.random.standard_normal()
    if ctypes.string_at(address, _MT19937_BYTES) == before:
        return normal
    ctypes.memmove(address, before, _MT19937_BYTES)
    return None


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


def may_draw(dataset: Any, collate: Any) -> bool:
    """Whether fetching can use random numbers. Only what surely cannot is spared the seeding (0.06 ms a batch)."""
    if collate is not default_collate:
        return True
    if type(dataset) is Subset:
        return may_draw(dataset.dataset, collate)
    if type(dataset) is ConcatDataset:
        return any(may_draw(part, collate) for part in dataset.datasets)
    return type(dataset) is not TensorDataset


@contextmanager
def generators_aside(device: torch.device) -> Iterator[None]:
    """Put the global generators of Python, numpy, torch's CPU and this device aside, and back as they were."""
    python, cpu, numbers = random.getstate(), torch.default_generator.get_state(), np.random.get_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(cpu)
        np.random.set_state(numbers)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
