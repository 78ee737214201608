"""BalancedBatchSampler in a fit on 1, 2 and 3 ranks: every sample once, equal cost, and the same after a cut."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from sanctuary_trainer import BalancedBatchSampler
from sanctuary_trainer.callbacks import Checkpoint
from tests.distributed.workers import Ranks
from tests.small_tasks import quiet_trainer, weights
from tests.test_balanced import greedy, log_normal
from tests.test_resume import Cut, CutAt, Everything, Noisy

COUNT, BATCH_SIZE = 22, 3
COSTS = log_normal(COUNT, 1.0)
EPOCHS = 2


def fit_balanced(folder: str, name: str, *cuts: CutAt, workers: int = 0, **settings: Any) -> Everything:
    task = Everything()
    task.net[1] = torch.nn.Identity()  # batch norm refuses the one sample that a rank may get in a last round
    sampler = BalancedBatchSampler(COSTS, BATCH_SIZE, num_samples=COUNT)
    train = DataLoader(Noisy(COUNT), batch_sampler=sampler, num_workers=workers)
    callbacks = [Checkpoint(every_n_steps=1), *cuts]
    trainer = quiet_trainer(
        max_epochs=EPOCHS, seed=5, project_dir=folder, run_name=name, callbacks=callbacks, **settings
    )
    try:
        trainer.fit(task, train, DataLoader(Noisy(10), 4), resume="auto")
    except Cut:
        assert cuts
    return task


def straight(folder: str, **settings: Any) -> list[tuple[int, int, list[int]]]:
    """The epoch, the number in it, and the samples of each batch."""
    return fit_balanced(folder, "straight", **settings).given


def check(ranks: int, given: list[list[tuple[int, int, list[int]]]]) -> None:
    """Each sample comes once an epoch, and each round that is full is dealt by the rule."""
    orders = []
    for epoch in range(EPOCHS):
        rounds: dict[int, list[list[int]]] = {}
        for of_one in given:
            for at, number, samples in of_one:
                if at == epoch:
                    rounds.setdefault(number, []).append(samples)
        assert list(rounds) == list(range(-(-COUNT // (ranks * BATCH_SIZE))))
        orders.append([sample for batches in rounds.values() for batch in batches for sample in batch])
        assert sorted(orders[-1]) == list(range(COUNT))
        *full, last = rounds.values()
        for batches in full:
            expected = greedy(COSTS, [sample for batch in batches for sample in batch], ranks, BATCH_SIZE)
            assert sorted(map(sorted, batches)) == sorted(map(sorted, expected))
        sizes = [len(batch) for batch in last]
        assert max(sizes) - min(sizes) <= 1
    assert orders[0] != orders[1]


def test_ranks_are_counted_when_the_fit_reads(
    one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks, run_folder: Path
) -> None:
    for ranks in (one_rank, two_ranks, three_ranks):
        check(ranks.world_size, ranks(straight, str(run_folder / str(ranks.world_size))))


def test_rank_0_deals_equal_cost_to_the_others(two_ranks: Ranks, run_folder: Path) -> None:
    dealt = two_ranks(straight, str(run_folder / "dealt"), dispatch_batches=True)
    assert dealt == two_ranks(straight, str(run_folder / "read"))


def cut_and_go_on(folder: str, workers: int) -> Any:
    whole = fit_balanced(folder, "straight", workers=workers)
    given: dict[tuple[int, int], list[int]] = {}
    for cut in (CutAt("on_train_batch_start", 1), CutAt("on_train_batch_end", 3), None):
        task = fit_balanced(folder, "cut", *([cut] if cut else []), workers=workers)
        given |= {(epoch, number): samples for epoch, number, samples in task.given}
    assert given == {(epoch, number): samples for epoch, number, samples in whole.given}
    assert len(task.given) < len(whole.given)
    return torch.equal(weights(whole), weights(task))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fit_that_was_cut_off_goes_on_bit_for_bit(two_ranks: Ranks, run_folder: Path, workers: int) -> None:
    assert two_ranks(cut_and_go_on, str(run_folder), workers, timeout=100) == [True, True]


def test_three_ranks_go_on_bit_for_bit(three_ranks: Ranks, run_folder: Path) -> None:
    assert three_ranks(cut_and_go_on, str(run_folder), 0, timeout=100) == [True] * 3


def cut(folder: str, step: int) -> list[int]:
    task = fit_balanced(folder, "cut", CutAt("on_train_batch_start", step))
    return [sample for _, _, samples in task.given for sample in samples]


def go_on(folder: str) -> list[tuple[int, list[int]]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Changed since the checkpoint")
        task = fit_balanced(folder, "cut")
    return [(number, samples) for epoch, number, samples in task.given if epoch == 0]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_another_number_of_ranks_balances_the_rest_of_the_epoch(
    before: int, after: int, one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks, run_folder: Path
) -> None:
    ranks = {1: one_rank, 2: two_ranks, 3: three_ranks}
    used = [sample for of_one in ranks[before](cut, str(run_folder), 1) for sample in of_one]
    rounds: dict[int, list[list[int]]] = {}
    for of_one in ranks[after](go_on, str(run_folder)):
        for number, samples in of_one:
            rounds.setdefault(number, []).append(samples)
    rest = [sample for batches in rounds.values() for batch in batches for sample in batch]
    assert len(used) == before * BATCH_SIZE and sorted(used + rest) == list(range(COUNT))
    for batches in list(rounds.values())[:-1]:
        expected = greedy(COSTS, [sample for batch in batches for sample in batch], after, BATCH_SIZE)
        assert sorted(map(sorted, batches)) == sorted(map(sorted, expected))
