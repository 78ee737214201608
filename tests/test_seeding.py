"""Generators that stand in for the global ones, and leave them as they were."""

import pickle
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, default_collate

from sanctuary_trainer.owners import held_by
from sanctuary_trainer.seeding import Generators, may_draw, mix


def draw() -> list[float]:
    return [random.random(), random.gauss(), np.random.rand(), np.random.randn(), float(torch.rand(()))]


def states() -> Any:
    numpy_state = np.random.get_state(legacy=False)
    return repr((random.getstate(), numpy_state, torch.get_rng_state().tolist()))


def test_a_seed_means_the_same_on_every_machine_and_in_every_version() -> None:
    # A run that is resumed with a later version must draw what the first one would have drawn.
    assert mix(1, 2, 3) == 5809300636878265108
    assert mix(-1) == 15035169530955190612
    assert len({mix(a, b) for a in range(-50, 50) for b in range(100)}) == 10_000


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64, np.random.Philox])
@pytest.mark.parametrize("drawn", [0, 1, 2, 623, 624, 625])
def test_nothing_is_seen_outside(bits: Any, drawn: int) -> None:
    """Also the normal that numpy keeps beside its bits, with any bit generator that a user gave it."""
    users = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(bits(5))
        for _ in range(drawn):
            np.random.randint(10), random.random()
        for _ in range(drawn % 3):
            np.random.randn()
        before, own = states(), np.random.get_bit_generator()
        generators = Generators()
        inside = []
        for _ in range(2):
            with generators.seeded(7):
                inside.append(draw())
            assert states() == before and np.random.get_bit_generator() is own
        assert inside[0] == inside[1]
    finally:
        np.random.set_bit_generator(users)


def test_the_draws_follow_the_seed_in_any_process() -> None:
    first, second = Generators(), pickle.loads(pickle.dumps(Generators()))
    with first.seeded(1):
        drawn = draw()
    random.random(), np.random.randn(), torch.rand(())
    with second.seeded(1):
        assert draw() == drawn
        second.reseed(1)
        assert draw() == drawn
    with second.seeded(2):
        assert all(a != b for a, b in zip(draw(), drawn, strict=True))


def test_resumable_generators_go_on() -> None:
    class Owner:
        python = None

        def __init__(self) -> None:
            self.python, self.numpy = random.Random(0), np.random.default_rng(0)

    owner = Owner()
    held = owner.python, owner.numpy, owner.python.getstate()

    def numbers() -> list[float]:
        return [random.random(), np.random.rand(), float(torch.rand(())), owner.python.random(), owner.numpy.random()]

    generators = Generators([owner], resumable=True).seeded(3)
    with generators:
        whole = [numbers(), numbers()]
    generators.seeded(3)
    parts = []
    for _ in range(2):
        with generators:
            parts.append(numbers())
        random.random(), np.random.rand(), torch.rand(())
    assert parts == whole
    assert held == (owner.python, owner.numpy, owner.python.getstate())


def test_generators_are_replaced_wherever_an_owner_holds_them() -> None:
    class Noise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rng = random.Random(0)

        def draw(self) -> float:
            return self.rng.random()

    noise, inner, named, lone = (Noise() for _ in range(4))
    network = torch.nn.Sequential(torch.nn.Linear(1, 1), Noise())
    shared, listed = np.random.default_rng(0), [random.Random(0)]
    method, options = noise.draw, {"rng": random.Random(0)}
    owner = SimpleNamespace(
        parts=(inner, random.Random(0)), named={"noise": named, "rng": shared}, rng=shared, rngs=listed, network=network
    )
    owner.me = owner
    owners = [owner, method, partial(print, lone, **options)]
    options = owners[2].keywords

    def held() -> list[Any]:
        return [
            *(each.rng for each in (noise, inner, named, lone)),
            *(owner.rng, owner.named["rng"], listed[0], options["rng"]),
        ]

    def kept() -> list[Any]:
        return [owner.parts[1], network[1].rng]

    before, never = held(), kept()
    with Generators(owners).seeded(1):
        inside = held()
        assert not any(new is old for new, old in zip(inside, before, strict=True))
        assert inside[4] is inside[5] and len({each.random() for each in inside[:4] + inside[5:]}) == 7
        assert all(new is old for new, old in zip(kept(), never, strict=True))
    assert all(new is old for new, old in zip(held(), before, strict=True))


def test_a_long_list_is_not_looked_into() -> None:
    owner = SimpleNamespace(samples=[random.Random(0) for _ in range(101)])
    before = list(owner.samples)
    with Generators([owner]).seeded(1):
        assert all(new is old for new, old in zip(owner.samples, before, strict=True))


def test_only_what_cannot_draw_is_spared_the_seeding() -> None:
    class Own(TensorDataset):
        pass

    tensors = TensorDataset(torch.zeros(4))
    assert not may_draw(tensors, default_collate)
    assert not may_draw(ConcatDataset([Subset(tensors, [0]), tensors]), default_collate)
    assert may_draw(Own(torch.zeros(4)), default_collate)
    assert may_draw(ConcatDataset([tensors, Own(torch.zeros(4))]), default_collate)
    assert may_draw(StackDataset(tensors), default_collate)
    assert may_draw(tensors, list)


def test_what_a_data_set_holds_is_found_once() -> None:
    class Wrapper(Dataset[Any]):
        def __init__(self, inner: Any) -> None:
            self.inner, self.again, self.me = inner, inner, self

    tensors = TensorDataset(torch.zeros(4))
    subset = Subset(tensors, [0])
    both = ConcatDataset([subset, tensors])
    wrapper = Wrapper(both)
    assert held_by(wrapper, Dataset) == [wrapper, both, subset, tensors]
