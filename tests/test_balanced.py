"""BalancedBatchSampler: every sample once, equal cost within a round, and rounds as a plain shuffle makes them."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from sanctuary_trainer import BalancedBatchSampler, DataError, SettingsError
from sanctuary_trainer.data import RankLoader, Start

from .small_tasks import Line, floats, quiet_trainer
from .test_data import Drawing, Numbers, collate_drawing
from .test_data_position import same_rounds
from .test_resume import Everything, Noisy


def log_normal(count: int, deviation: float) -> list[float]:
    """Costs as the pixels of photographs are spread."""
    draw = random.Random(3)
    return [draw.lognormvariate(0, deviation) for _ in range(count)]


SIZES = log_normal(50, 1.0)


def rounds_of(batches: Sequence[Any], ranks: int) -> list[Sequence[Any]]:
    return [batches[begin : begin + ranks] for begin in range(0, len(batches), ranks)]


def cost_of(batch: Sequence[int], costs: Sequence[float]) -> float:
    return math.fsum(costs[sample] for sample in batch)


# What is dealt


@given(
    costs=st.lists(st.floats(0, 1e6), max_size=40),
    batch_size=st.integers(1, 5),
    ranks=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_each_sample_comes_once_and_ranks_get_equal_counts(
    costs: list[float], batch_size: int, ranks: int, shuffle: bool, drop_last: bool
) -> None:
    sampler = BalancedBatchSampler(costs, batch_size, ranks=ranks, shuffle=shuffle, drop_last=drop_last)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    full, rest = divmod(len(costs), batch_size * ranks)
    sizes = [len(batch) for batch in batches]
    assert sizes[: full * ranks] == [batch_size] * full * ranks
    last = sizes[full * ranks :]
    assert sum(last) == (0 if drop_last else rest)
    assert len(last) == (0 if drop_last else min(rest, ranks))
    assert not last or max(last) - min(last) <= 1
    samples = [sample for batch in batches for sample in batch]
    assert len(set(samples)) == len(samples)
    assert drop_last or sorted(samples) == list(range(len(costs)))


def test_the_most_expensive_sample_goes_first_to_the_batch_that_costs_least() -> None:
    costs = [9, 3, 8, 2, 1, 0.5, 5, 4, 6, 3, 2, 1, 7, 1, 2]
    assert list(BalancedBatchSampler(costs, 3, ranks=2, shuffle=False)) == [
        *([0, 3, 4], [1, 2, 5]),  # 9 | 8, then 3 beside 8, 2 beside 9; of equal batches the first is given more
        *([6, 7, 11], [8, 9, 10]),  # 6 | 5, then 4 beside 5, 3 beside 6, 2 beside 9
        *([12, 13], [14]),  # 7 | 2, and the second batch is full
    ]


@pytest.mark.parametrize(
    "costs", [[0] * 512, [1] * 512, [i % 7 == 0 for i in range(512)]], ids=["none", "equal", "few"]
)
def test_samples_of_equal_cost_share_batches_as_in_a_plain_shuffle(costs: list[float]) -> None:
    """Where neighbours in the data set are of one of 8 classes, a batch of 8 holds 8 * (1 - (7 / 8) ** 8) = 5.3."""
    torch.manual_seed(0)
    batches = [batch for _ in range(8) for batch in BalancedBatchSampler(costs, 8, ranks=8)]
    classes = sum(len({sample // 64 for sample in batch}) for batch in batches) / len(batches)
    assert 5.1 < classes < 5.5  # standard deviation 0.04


def greedy(costs: Sequence[float], samples: Sequence[int], ranks: int, batch_size: int) -> list[list[int]]:
    """The same rule in its plainest form."""
    batches: list[list[int]] = [[] for _ in range(ranks)]
    for sample in sorted(samples, key=lambda sample: (-costs[sample], sample)):
        open_ones = [batch for batch in batches if len(batch) < batch_size]
        min(open_ones, key=lambda batch: cost_of(batch, costs)).append(sample)
    return batches


@pytest.mark.parametrize(("batch_size", "ranks"), [(1, 3), (2, 2), (4, 3), (3, 8)])
def test_a_round_has_the_samples_of_a_plain_shuffle_and_the_batches_of_the_greedy_rule(
    batch_size: int, ranks: int
) -> None:
    sampler = BalancedBatchSampler(SIZES, batch_size, ranks=ranks)
    torch.manual_seed(7)
    found = rounds_of(list(sampler), ranks)
    torch.manual_seed(7)
    shuffled = torch.randperm(len(SIZES)).tolist()
    for number in range(len(SIZES) // (batch_size * ranks)):
        samples = shuffled[number * batch_size * ranks : (number + 1) * batch_size * ranks]
        assert {frozenset(batch) for batch in found[number]} == {
            frozenset(batch) for batch in greedy(SIZES, samples, ranks, batch_size)
        }


def test_rounds_cost_far_less_than_those_of_a_plain_shuffle() -> None:
    def slowest(batches: Sequence[Sequence[int]]) -> float:
        return sum(max(cost_of(batch, costs) for batch in each) for each in rounds_of(batches, 4))

    costs = log_normal(1024, 0.5)
    ideal = sum(costs) / 4
    plain = slowest(torch.randperm(1024).reshape(-1, 8).tolist())
    balanced = slowest(list(BalancedBatchSampler(costs, 8, ranks=4)))
    assert plain > 1.15 * ideal
    assert balanced < 1.02 * ideal


@pytest.mark.parametrize("others", [[1] * 7, list(range(7)), [99] * 7])
def test_the_most_expensive_sample_comes_to_each_rank_as_often(others: list[float]) -> None:
    costs = [*others, 100]
    sampler = BalancedBatchSampler(costs, 4, ranks=2)
    torch.manual_seed(0)
    on_rank_0 = sum(7 in next(iter(sampler)) for _ in range(400))
    assert 160 < on_rank_0 < 240  # fair: 200, standard deviation 10


def test_one_rank_reads_a_plain_shuffle() -> None:
    torch.manual_seed(1)
    found = list(BalancedBatchSampler(SIZES, 8))
    torch.manual_seed(1)
    expected = torch.randperm(50).split(8)
    assert [sorted(batch) for batch in found] == [sorted(batch.tolist()) for batch in expected]
    assert [sample for batch in found for sample in batch] == torch.cat(expected).tolist()


@pytest.mark.parametrize(
    "costs",
    [
        tuple(range(20)),
        torch.arange(20),
        torch.arange(20, dtype=torch.bfloat16, requires_grad=True),
        np.arange(20, dtype=np.int16),
        [torch.tensor(value) for value in range(20)],
        lambda index: index,
    ],
    ids=["tuple", "tensor", "bfloat16", "array", "tensors", "function"],
)
def test_costs_of_any_form_deal_alike(costs: Any) -> None:
    def batches(costs: Any) -> list[list[int]]:
        torch.manual_seed(2)
        return list(BalancedBatchSampler(costs, 3, ranks=2, num_samples=20))

    assert batches(costs) == batches(list(range(20)))


def test_sizes_may_be_numpys() -> None:
    sampler = BalancedBatchSampler(lambda index: index, np.int64(3), ranks=np.int32(2), num_samples=np.int64(20))
    assert (type(sampler.batch_size), sampler.batch_size, sampler.ranks, len(sampler)) == (int, 3, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], 0), "batch_size=0; expected a whole number from 1"),
        (([1, 2], "2"), "batch_size='2'; expected"),
        (([1, 2], 2.0), "batch_size=2.0; expected"),
        (([1, 2], True), "batch_size=True; expected"),
        (([1, 2], 1, {"ranks": 0}), "ranks=0; expected a whole number from 1"),
        (([1, 2], 1, {"shuffle": "no"}), "shuffle='no'; expected True or False"),
        (([1, 2], 1, {"drop_last": 1}), "drop_last=1; expected True or False"),
        ((len, 1, {"num_samples": 2.0}), "num_samples=2.0; expected a whole number from 0"),
        (([1, -2.5], 1), r"costs\[1\]=-2.5; expected a finite number of 0 or more. 1 of 2 are wrong"),
        (([math.nan, 1, math.inf], 1), r"costs\[0\]=nan; .* 2 of 3"),
        (([1, None], 1), r"costs\[1\]=nan"),
        (([[1, 2], [3, 4]], 1), r"costs of shape \(2, 2\); expected one number per sample, such as height \* width"),
        (([[1, 2], [3]], 1), "expected one number per sample"),
        ((["a"], 1), "expected one number per sample as costs: could not convert string to float: 'a'"),
        (([10**400], 1), "expected one number per sample as costs: int too large"),
        (([torch.ones((), requires_grad=True)], 1), "expected one number per sample as costs: Can't call numpy"),
        ((3.0, 1), r"costs of shape \(\)"),
        (([1, 2, 3], 1, {"num_samples": 4}), "3 costs for num_samples=4"),
        ((len, 1), r"Give num_samples=len\(dataset\)"),
    ],
    ids=lambda value: f"{value!s:.60}",
)
def test_what_cannot_be_dealt_is_told_at_once(arguments: tuple[Any, ...], message: str) -> None:
    settings = arguments[2] if len(arguments) > 2 else {}
    with pytest.raises(SettingsError, match=message):
        BalancedBatchSampler(*arguments[:2], **settings)


# In loaders


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_reads_what_the_sampler_gives(workers: int) -> None:
    sampler = BalancedBatchSampler(SIZES, 4, ranks=3)
    loader = DataLoader(Numbers(50), batch_sampler=sampler, num_workers=workers, generator=torch.Generator())
    torch.manual_seed(3)
    found = [batch.tolist() for batch in loader]
    torch.manual_seed(3)
    assert found == list(sampler)
    assert len(loader) == len(found) == 3 * 4 + 2


def make_loader(ranks: int, workers: int = 0) -> Callable[[int], DataLoader[Any]]:
    def make(rank: int) -> DataLoader[Any]:
        sampler = BalancedBatchSampler(SIZES, 4, ranks=ranks)
        return DataLoader(
            Drawing(50),
            batch_sampler=sampler,
            collate_fn=collate_drawing,
            num_workers=workers,
            persistent_workers=False,
        )

    return make


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_gets_its_batch_of_each_round(ranks: int) -> None:
    loaders = [RankLoader(make_loader(ranks)(rank), rank=rank, world_size=ranks, seed=9) for rank in range(ranks)]
    orders = []
    for epoch in range(2):
        rounds = list(zip(*(loader.epoch(epoch) for loader in loaders), strict=True))
        assert len(rounds) == loaders[0].num_rounds == math.ceil(50 / 4 / ranks)
        orders.append([sample for fetched in rounds for each in fetched for sample in each.indices or ()])
        assert sorted(orders[-1]) == list(range(50))
        for fetched in rounds[: 50 // 4 // ranks]:
            batches = [each.indices or [] for each in fetched]
            expected = greedy(SIZES, [sample for batch in batches for sample in batch], ranks, 4)
            assert sorted(map(sorted, batches)) == sorted(map(sorted, expected))
            assert {each.total for each in fetched} == {4 * ranks}
    assert orders[0] != orders[1]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (3, 0), (1, 2), (2, 2)])
def test_an_epoch_goes_on_behind_any_of_its_rounds(ranks: int, workers: int) -> None:
    whole = same_rounds(make_loader(ranks, workers), ranks)
    assert sorted(sample[0] for sample in whole.samples) == list(range(50))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_epoch_for_a_given_number_of_ranks_goes_on_with_any(ranks: int) -> None:
    """What is left is dealt in whole batches."""
    batches = [each.indices for each in RankLoader(make_loader(3)(0), rank=0, world_size=1, seed=9).epoch(1)]
    loaders = [RankLoader(make_loader(3)(rank), rank=rank, world_size=ranks, seed=9) for rank in range(ranks)]
    rest = [loader.epoch(1, start=Start(samples=2 * 3 * 4, rounds=2)) for loader in loaders]
    found = [each.indices for fetched in zip(*rest, strict=True) for each in fetched if each.batch is not None]
    assert found == batches[2 * 3 :]
    same_rounds(make_loader(3), ranks)


def test_a_fit_reads_every_sample_once_with_any_workers() -> None:
    def given(workers: int) -> list[Any]:
        task = Everything()
        sampler = BalancedBatchSampler(SIZES[:22], 4, num_samples=22)
        train = DataLoader(Noisy(22), batch_sampler=sampler, num_workers=workers)
        result = quiet_trainer(max_epochs=2, seed=5).fit(task, train, DataLoader(Noisy(10), 4))
        assert result.global_step == 12
        return task.given

    found = given(0)
    assert given(2) == found
    for epoch in range(2):
        assert sorted(sample for at, _, batch in found if at == epoch for sample in batch) == list(range(22))
    assert [batch for at, _, batch in found if at == 0] != [batch for at, _, batch in found if at == 1]


@pytest.mark.parametrize("length", [5, 7])
def test_costs_of_another_number_of_samples_are_refused_before_the_fit(length: int) -> None:
    loader = DataLoader(floats(range(length)), batch_sampler=BalancedBatchSampler([1.0] * 6, 2))
    with pytest.raises(DataError, match=rf"costs of 6 samples, and its data set holds {length}\. Give one cost"):
        quiet_trainer(max_epochs=1).fit(Line(), loader)
