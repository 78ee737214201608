"""What each rank reads: every sample once, in one order, under the same seeds wherever it is fetched.

Ranks are simulated: one RankLoader for each, in this process. Where rank 0 deals, each rank has a thread.
"""

import multiprocessing
import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from sanctuary_trainer.data import BEGINNING, Fetched, RankLoader, Start
from sanctuary_trainer.errors import DataError, NotSupportedError, RankError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")


class Numbers(Dataset[int]):
    """Sample i is the number i. Remembers what was read and which epochs it was told."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.read: list[int] = []
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def draws() -> list[float]:
    """Numbers of each global generator. Odd numbers of normals, of which numpy and Python keep the second."""
    normals = [random.gauss(), np.random.randn(), float(torch.randn(()))]
    return [*normals, random.random(), np.random.rand(), float(torch.rand(()))]


class Drawing(Dataset[list[float]]):
    """Sample i is [i, epoch, ...draws of every generator there is, also of its own]."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, 0
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.legacy, self.torch = np.random.RandomState(1), torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> list[float]:
        own = [self.python.random(), self.numpy.random(), self.legacy.rand()]
        return [index, self.epoch, *draws(), *own, float(torch.rand((), generator=self.torch))]


class Spawnable(Drawing):
    """Without a torch.Generator, which torch cannot send to a spawned worker."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.torch = None  # type: ignore[assignment]


def collate_drawing(samples: list[list[float]]) -> list[list[float]]:
    return [[*sample, *draws()] for sample in samples]


def drawing_loader(n: int = 12, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Drawing(n), 4, collate_fn=collate_drawing, **kwargs)


class Stream(IterableDataset[Any]):
    """The numbers below n, of which each worker reads its part; sample i is [i, epoch, ...draws] with noise."""

    def __init__(self, n: int, shuffle: bool = False, noise: bool = False) -> None:
        self.n, self.shuffle, self.noise = n, shuffle, noise
        self.read = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        assert info is None or info.dataset is self
        numbers = list(range(self.n))[worker::workers]
        if self.shuffle:
            random.shuffle(numbers)
        for number in numbers:
            self.read += 1
            yield [number, self.epochs[-1], *draws()] if self.noise else number


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


def make_ranks(make: Callable[[], Any], ranks: int, seed: int = 0, **kwargs: Any) -> list[RankLoader]:
    return [RankLoader(make(), rank=rank, world_size=ranks, seed=seed, **kwargs) for rank in range(ranks)]


def read(
    make: Callable[[], Any],
    ranks: int,
    epoch: int = 0,
    start: Start = BEGINNING,
    limit: int | None = None,
    **kwargs: Any,
) -> list[list[Fetched]]:
    """What each rank is given in one epoch."""
    return [list(loader.epoch(epoch, start=start, limit=limit)) for loader in make_ranks(make, ranks, **kwargs)]


def samples(fetched: Fetched) -> list[Any]:
    if fetched.batch is None:
        return []
    return fetched.batch.tolist() if isinstance(fetched.batch, torch.Tensor) else list(fetched.batch)


def everything(by_rank: list[list[Fetched]]) -> list[Any]:
    return [sample for rank in by_rank for fetched in rank for sample in samples(fetched)]


def in_order(by_rank: list[list[Fetched]]) -> list[Any]:
    """The samples of all ranks, sorted by their keys."""
    batches = [fetched for rank in by_rank for fetched in rank]
    pairs = [pair for each in batches for pair in zip(each.keys, samples(each), strict=True)]
    assert len({key for key, _ in pairs}) == len(pairs)
    return [sample for _, sample in sorted(pairs, key=lambda pair: pair[0])]


def alone(make: Callable[[], Any], **kwargs: Any) -> list[Any]:
    """The samples in the order in which one process reads them."""
    return everything(read(make, 1, **kwargs))


def torch_alone(loader: Iterable[Any]) -> list[Any]:
    """The samples in the order in which a DataLoader gives them without us."""
    return [sample for batch in loader for sample in batch.tolist()]


def global_states() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()
    return (random.getstate(), numpy_state[1].tolist(), numpy_state[2:], torch.get_rng_state().tolist())


# --- dealing a data set with keys ---


@given(
    n=st.integers(0, 40),
    batch=st.integers(1, 5),
    ranks=st.integers(1, 4),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_each_sample_comes_once_and_rounds_are_one_ranks_batches(
    n: int, batch: int, ranks: int, drop_last: bool, shuffle: bool, epoch: int
) -> None:
    def make() -> DataLoader[int]:
        return DataLoader(Numbers(n), batch, shuffle=shuffle and n > 0, drop_last=drop_last)

    loaders = make_ranks(make, ranks)
    by_rank = [list(loader.epoch(epoch)) for loader in loaders]
    order = alone(lambda: DataLoader(Numbers(n), batch, shuffle=shuffle and n > 0), epoch=epoch)
    per_round = ranks * batch
    used = n - n % per_round if drop_last else n
    assert sorted(order) == list(range(n))
    assert in_order(by_rank) == order[:used]
    for loader, rank in zip(loaders, by_rank, strict=True):
        assert loader.sized and loader.num_rounds == len(rank) == -(-used // per_round)
        assert loader.num_samples == n and loader.batch_size == batch
    for k, parts in enumerate(zip(*by_rank, strict=True)):
        # R ranks with batches of B read in round k what one rank with batches of R x B reads.
        of_round = order[:used][k * per_round : (k + 1) * per_round]
        assert [sample for part in parts for sample in samples(part)] == of_round
        assert {part.total for part in parts} == {len(of_round)}
        sizes = [part.size for part in parts]
        assert sizes == [len(samples(part)) for part in parts] and max(sizes) - min(sizes) <= 1
        assert [part.indices for part in parts] == [samples(part) for part in parts]
        assert all((part.batch is None) == (part.size == 0) for part in parts)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rounds_are_right_for_every_size(ranks: int) -> None:
    for n in range(1, 22):
        loaders = make_ranks(lambda n=n: DataLoader(TensorDataset(torch.arange(n)), 4), ranks)
        by_rank = [list(loader.epoch(0)) for loader in loaders]
        assert {loader.num_rounds for loader in loaders} == {len(rank) for rank in by_rank} == {-(-n // (4 * ranks))}
        ids = [id_ for rank in by_rank for fetched in rank if fetched.batch for id_ in fetched.batch[0].tolist()]
        assert sorted(ids) == list(range(n))
        assert sorted(index for rank in by_rank for fetched in rank for index in fetched.indices or ()) == list(
            range(n)
        )


def test_shuffling_follows_the_epoch_and_the_seed_alone() -> None:
    """Case 99."""

    def make() -> DataLoader[int]:
        torch.manual_seed(random.randrange(1000))  # the ranks' global generators differ
        return DataLoader(Numbers(16), 4, shuffle=True)

    for ranks in (1, 2):
        orders = [in_order(read(make, ranks, epoch=epoch)) for epoch in range(3)]
        assert len({tuple(order) for order in orders}) == 3
        assert all(sorted(order) == list(range(16)) for order in orders)
        assert orders == [alone(make, epoch=epoch) for epoch in range(3)]
        assert orders[0] != in_order(read(make, ranks, seed=1))
        for epoch in range(3):
            first, *others = [set(everything([rank])) for rank in read(make, ranks, epoch=epoch)]
            assert all(first.isdisjoint(other) for other in others)


def test_data_set_and_samplers_are_told_the_epoch() -> None:
    class Told(SequentialSampler):
        def __init__(self, data_source: Numbers) -> None:
            super().__init__(data_source)
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    inner = Numbers(16)
    sampler = Told(inner)
    loader = RankLoader(DataLoader(Subset(inner, range(16)), 4, sampler=sampler), rank=0, world_size=2, seed=0)
    for epoch in range(3):
        list(loader.epoch(epoch))
    assert inner.epochs == [0, 1, 2] and sampler.epochs == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_an_epoch_keeps_its_number_while_another_loader_reads_the_data(stream: bool) -> None:
    """As validation does in the middle of a training epoch."""
    data: Any = Stream(8, noise=True) if stream else Numbers(8)
    shared = data if stream else Subset(data, range(8))
    train, val = (RankLoader(DataLoader(shared, 4, collate_fn=list), rank=0, world_size=1, seed=0) for _ in range(2))
    for epoch in (1, 2):
        told = []
        for _ in train.epoch(epoch):
            told.append(data.epochs[-1])
            list(val.epoch(0))
            assert data.epochs[-1] == 0
        assert told == [epoch, epoch]


class Shuffler(Sampler[int]):
    """A sampler as users write them: draws with what it is given, or with a generator of its own."""

    def __init__(self, n: int, draw: str) -> None:
        self.n, self.draw = n, draw
        self.python, self.numpy, self.torch = random.Random(), np.random.default_rng(), torch.Generator()

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.n))
        if self.draw == "random":
            random.shuffle(order)
        elif self.draw == "numpy":
            np.random.shuffle(order)
        elif self.draw == "own random":
            self.python.shuffle(order)
        elif self.draw == "own numpy":
            order = self.numpy.permutation(self.n).tolist()
        elif self.draw == "own torch":
            order = torch.randperm(self.n, generator=self.torch).tolist()
        yield from order


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomSampler(Numbers(21)),
    "with generator": lambda: RandomSampler(Numbers(21), generator=torch.Generator().manual_seed(3)),
    "subset": lambda: SubsetRandomSampler(range(5, 20)),
    "weighted": lambda: WeightedRandomSampler([1.0] * 10 + [3.0] * 11, 30),
    "list": lambda: [4, 2, 2, 9, 20],
    **{draw: lambda draw=draw: Shuffler(21, draw) for draw in ("numpy", "own random", "own numpy", "own torch")},
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_all_ranks_draw_one_order_with_any_sampler(kind: str) -> None:
    def make() -> DataLoader[int]:
        random.seed(), np.random.seed(), torch.seed()
        return DataLoader(Numbers(21), 4, sampler=SAMPLERS[kind]())

    orders = [alone(make, epoch=epoch) for epoch in range(2)]
    if kind != "list":
        assert orders[0] != orders[1]
    for ranks in (2, 3):
        assert [in_order(read(make, ranks, epoch=epoch)) for epoch in range(2)] == orders


def test_drawing_an_order_leaves_the_generators_as_they_were() -> None:
    sampler = Shuffler(8, "own torch")
    generator = torch.Generator().manual_seed(5)
    held = (sampler.python, sampler.numpy, sampler.torch, sampler.torch.get_state().tolist())
    loader = DataLoader(Numbers(8), 4, sampler=sampler, generator=generator)
    np.random.randn()
    before, generator_before = global_states(), generator.get_state().tolist()
    list(RankLoader(loader, rank=0, world_size=1, seed=0).epoch(0))
    assert global_states() == before and generator.get_state().tolist() == generator_before
    assert held == (sampler.python, sampler.numpy, sampler.torch, sampler.torch.get_state().tolist())


def test_the_seed_of_the_users_generator_chooses_the_order() -> None:
    def make(seed: int) -> Callable[[], DataLoader[int]]:
        return lambda: DataLoader(Numbers(16), 4, shuffle=True, generator=torch.Generator().manual_seed(seed))

    assert alone(make(1)) == alone(make(1)) != alone(make(2))


class Buckets(Sampler[list[int]]):
    """A batch sampler whose batches differ in size, in another order each epoch."""

    def __init__(self, sizes: list[int], claimed: int | None = None) -> None:
        self.sizes, self.claimed = sizes, len(sizes) if claimed is None else claimed

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> Iterator[list[int]]:
        ends = np.cumsum(self.sizes).tolist()
        batches = [list(range(end - size, end)) for end, size in zip(ends, self.sizes, strict=True)]
        random.shuffle(batches)
        yield from batches


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_whole_batches_of_a_custom_batch_sampler_are_dealt(ranks: int) -> None:
    sizes = [3, 1, 4, 1, 5, 2, 6]

    def make() -> DataLoader[int]:
        return DataLoader(Numbers(sum(sizes)), batch_sampler=Buckets(sizes))

    loaders = make_ranks(make, ranks)
    by_rank = [list(loader.epoch(1)) for loader in loaders]
    (one,) = read(make, 1, epoch=1)
    batches = [samples(fetched) for fetched in one]
    assert in_order(by_rank) == everything([one])
    for rank, (loader, fetched) in enumerate(zip(loaders, by_rank, strict=True)):
        assert loader.sized and loader.num_rounds == len(fetched) == -(-len(sizes) // ranks)
        assert [samples(each) for each in fetched if each.batch is not None] == batches[rank::ranks]
        assert [each.size for each in fetched] == [len(samples(each)) for each in fetched]
    for k, parts in enumerate(zip(*by_rank, strict=True)):
        assert {part.total for part in parts} == {sum(map(len, batches[k * ranks : (k + 1) * ranks]))}


def test_a_batch_sampler_made_by_hand_is_as_the_loaders_own() -> None:
    def make() -> DataLoader[int]:
        return DataLoader(Numbers(21), batch_sampler=BatchSampler(RandomSampler(Numbers(21)), 4, False))

    assert in_order(read(make, 2)) == alone(lambda: DataLoader(Numbers(21), 4, shuffle=True))
    assert make_ranks(make, 2)[0].batch_size == 4


class Rows(Dataset[torch.Tensor]):
    """Fetches one row for a number, several for a list of numbers."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.arange(21).reshape(7, 3)[index] if isinstance(index, int) else torch.tensor(index)


def test_without_a_batch_size_what_the_data_set_gives_is_one_batch() -> None:
    by_rank = read(lambda: DataLoader(Rows(), batch_size=None, sampler=range(7)), 2)
    assert [[samples(each) for each in rank] for rank in by_rank] == [
        [[0, 1, 2], [6, 7, 8], [12, 13, 14], [18, 19, 20]],
        [[3, 4, 5], [9, 10, 11], [15, 16, 17], []],
    ]
    assert [each.keys for each in by_rank[1]] == [[(1,)], [(3,)], [(5,)], []]
    assert {(each.size, each.indices) for each in by_rank[0]} == {(None, None)}

    by_rank = read(
        lambda: DataLoader(Rows(), batch_size=None, sampler=BatchSampler(SequentialSampler(Rows()), 4, False)), 2
    )
    assert in_order(by_rank) == list(range(21))
    assert [each.size for each in by_rank[1]] == [4, 4, 1]
    assert everything(by_rank[:1]) == [index for each in by_rank[0] for index in each.indices or ()]


class Endless(Sampler[int]):
    """Draws for ever, or for `n` samples, and has no length."""

    def __init__(self, n: int | None = None) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        drawn = 0
        while self.n is None or drawn < self.n:
            yield random.randrange(21)
            drawn += 1


def test_an_endless_sampler_is_drawn_as_it_is_needed() -> None:
    def make() -> DataLoader[int]:
        return DataLoader(Numbers(21), 4, sampler=Endless())

    order = alone(make, limit=6)
    before = global_states()
    by_rank = read(make, 2, limit=3)
    assert global_states() == before
    assert in_order(by_rank) == order and len(order) == 24
    assert [len(rank) for rank in by_rank] == [3, 3]
    loader = make_ranks(make, 2)[0]
    assert not loader.sized and loader.num_rounds is None and loader.num_samples is None


@pytest.mark.parametrize("n", [8, 9, 13])
def test_a_sampler_without_a_length_may_end(n: int) -> None:
    by_rank = read(lambda: DataLoader(Numbers(21), 4, sampler=Endless(n)), 2)
    assert in_order(by_rank) == alone(lambda: DataLoader(Numbers(21), 4, sampler=Endless(n)))
    assert len(everything(by_rank)) == n
    assert all(fetched.batch is not None for rank in by_rank for fetched in rank)


def test_a_length_that_is_too_long_is_refused() -> None:
    with pytest.raises(DataError, match="sampler Buckets of the val loader has length 3 but gave 2"):
        read(lambda: DataLoader(Numbers(4), batch_sampler=Buckets([2, 2], claimed=3)), 1, name="val")


def test_an_epoch_ends_where_the_length_says() -> None:
    with pytest.warns(UserWarning, match="gives more than its length 1"):
        (rank,) = read(lambda: DataLoader(Numbers(4), batch_sampler=Buckets([2, 2], claimed=1)), 1)
    assert len(rank) == 1


# --- samplers and loaders that were sharded by others ---


class OwnSharding(DistributedSampler[int]):
    pass


def test_a_distributed_sampler_is_not_sharded_twice() -> None:
    def make(rank: int, kind: type = DistributedSampler) -> DataLoader[int]:
        data = Numbers(21)
        return DataLoader(data, 4, sampler=kind(data, num_replicas=2, rank=rank, seed=7))

    loaders = [RankLoader(make(rank), rank=rank, world_size=2, seed=0) for rank in range(2)]
    orders = [in_order([list(loader.epoch(epoch)) for loader in loaders]) for epoch in range(2)]
    assert orders[0] != orders[1] and all(sorted(order) == list(range(21)) for order in orders)
    assert loaders[0].sized and loaders[0].num_samples == 21
    whole = DistributedSampler(Numbers(21), 1, 0, seed=7)
    whole.set_epoch(1)
    assert orders[1] == list(whole)  # the user's seed keeps its meaning

    with pytest.warns(UserWarning, match="OwnSharding of the train loader shards the data itself"):
        loaders = [RankLoader(make(rank, OwnSharding), rank=rank, world_size=2, seed=0) for rank in range(2)]
    by_rank = [list(loader.epoch(0)) for loader in loaders]
    repeated = next(iter(OwnSharding(Numbers(21), 1, 0, seed=7)))
    assert Counter(everything(by_rank)) == Counter([*range(21), repeated])
    assert not loaders[0].sized and {fetched.total for rank in by_rank for fetched in rank} == {None}
    assert len(in_order(by_rank)) == 22


def prepare(loader: DataLoader[Any], rank: int, **kwargs: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.data_loader.prepare_data_loader(
        loader, num_processes=2, process_index=rank, put_on_device=kwargs.get("dispatch_batches", False), **kwargs
    )


@pytest.mark.parametrize("kind", ["shuffle", "seedable", "dispatcher", "sampler of batches", "stream", "distributed"])
def test_what_accelerate_prepared_is_undone(kind: str) -> None:
    settings = {"seedable": {"use_seedable_sampler": True}, "dispatcher": {"dispatch_batches": True}}.get(kind, {})

    def make(rank: int) -> Any:
        torch.manual_seed(rank)  # accelerate draws a seed from the rank's own generator
        data = Rows()
        if kind == "stream":
            loader = DataLoader(Stream(21), 4)
        elif kind == "sampler of batches":
            loader = DataLoader(data, None, sampler=BatchSampler(RandomSampler(data), 4, False))
        elif kind == "distributed":
            loader = DataLoader(Numbers(21), 4, sampler=DistributedSampler(Numbers(21), 2, rank))
        else:
            loader = DataLoader(Numbers(21), 4, shuffle=True)
        return prepare(loader, rank, **settings)

    loaders = [RankLoader(make(rank), rank=rank, world_size=2, seed=0) for rank in range(2)]
    orders = [in_order([list(loader.epoch(epoch)) for loader in loaders]) for epoch in range(2)]
    assert all(sorted(order) == list(range(21)) for order in orders)
    assert (orders[0] == orders[1]) is (kind == "stream")
    assert loaders[0].batch_size == (None if kind == "sampler of batches" else 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_of_torchdata_is_as_torchs(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        torch.seed()  # its own RandomSampler draws a seed from here, another one on each rank
        return stateful.StatefulDataLoader(Numbers(21), 4, shuffle=True, num_workers=workers)

    assert in_order(read(make, 2)) == alone(lambda: DataLoader(Numbers(21), 4, shuffle=True))
    stream = in_order(read(lambda: stateful.StatefulDataLoader(Stream(21), 4, num_workers=workers), 2))
    assert stream == torch_alone(DataLoader(Stream(21), 4, num_workers=workers))
    data = Numbers(21)
    loaders = [
        stateful.StatefulDataLoader(
            data, 4, sampler=stateful.sampler.StatefulDistributedSampler(data, num_replicas=2, rank=rank)
        )
        for rank in range(2)
    ]
    by_rank = [list(RankLoader(loaders[rank], rank=rank, world_size=2, seed=0).epoch(0)) for rank in range(2)]
    assert sorted(everything(by_rank)) == list(range(21))


def test_what_ranks_must_have_alike_can_be_compared() -> None:
    def assumed(n: int, seed: int, **kwargs: Any) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(Numbers(n), 4, shuffle=True, generator=generator)
        return RankLoader(loader, rank=0, world_size=2, seed=0, **kwargs).assumed

    assert assumed(21, 1) == assumed(21, 1) == {"samples": 21, "rounds": 3, "batch size": 4, "seeds": [1]}
    assert assumed(21, 1) != assumed(21, 2) and assumed(21, 1) != assumed(22, 1)
    assert assumed(21, 1, shard_data=False) == {} == assumed(21, 1, dispatch=Ring(2).at(0))
    stream = RankLoader(DataLoader(Stream(21), 4), rank=0, world_size=2, seed=0)
    assert stream.assumed == {"samples": None, "rounds": None, "batch size": 4, "seeds": []}


def test_what_accelerate_split_or_skipped_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = DataLoader(Numbers(21), 4)
    for given_loader in (
        prepare(loader, 0, split_batches=True),
        prepare(DataLoader(Stream(21), 4), 0, split_batches=True),
        accelerate.data_loader.skip_first_batches(prepare(loader, 0), 1),
    ):
        with pytest.raises(DataError, match="Give the DataLoader as it was before"):
            RankLoader(given_loader, rank=0, world_size=2, seed=0)


# --- limits, positions, orders ---


@pytest.mark.parametrize("workers", [0, 2])
def test_no_more_than_the_limit_is_read(workers: int) -> None:
    data = Numbers(40)
    loader = RankLoader(DataLoader(data, 4, num_workers=workers), rank=1, world_size=2, seed=0)
    assert [samples(fetched) for fetched in loader.epoch(0, limit=2)] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    if not workers:
        assert data.read == [4, 5, 6, 7, 12, 13, 14, 15]
    assert list(loader.epoch(0, limit=0)) == []
    assert len(list(loader.epoch(0, limit=99))) == loader.num_rounds == 5


@given(
    n=st.integers(1, 40),
    batch=st.integers(1, 4),
    before=st.integers(1, 3),
    after=st.integers(1, 3),
    rounds=st.integers(0, 4),
)
def test_an_epoch_goes_on_where_it_stopped_on_any_number_of_ranks(
    n: int, batch: int, before: int, after: int, rounds: int
) -> None:
    def make() -> DataLoader[int]:
        return DataLoader(Numbers(n), batch, shuffle=True)

    first = read(make, before, epoch=2, limit=rounds)
    used = len(everything(first))
    loaders = make_ranks(make, after)
    rest = [list(loader.epoch(2, start=Start(used))) for loader in loaders]
    assert in_order(first) + in_order(rest) == alone(make, epoch=2)
    assert [key for rank in rest for fetched in rank for key in fetched.keys if key[0] < used] == []
    assert not {index for loader in loaders for index in loader._reader._source.dataset.read} & set(everything(first))  # type: ignore[attr-defined]


def test_a_continued_epoch_draws_what_the_uninterrupted_one_drew() -> None:
    whole = read(drawing_loader, 2, epoch=1)
    rest = read(drawing_loader, 2, epoch=1, start=Start(8))
    assert [[fetched.batch for fetched in rank] for rank in rest] == [
        [fetched.batch for fetched in rank[1:]] for rank in whole
    ]


def test_whole_batches_go_on_inside_a_batch() -> None:
    def make() -> DataLoader[int]:
        return DataLoader(Numbers(9), batch_sampler=Buckets([3, 2, 4]))

    order = alone(make)
    for start in range(10):
        assert in_order(read(make, 2, start=Start(start))) == order[start:]


def test_overfitting_reads_the_same_samples_in_the_order_of_the_data_set() -> None:
    subset = SubsetRandomSampler([7, 3, 5])
    distributed = DistributedSampler(Numbers(9), 2, 0)
    for epoch in range(2):
        assert alone(lambda: DataLoader(Numbers(9), 4, shuffle=True), shuffle=False, epoch=epoch) == list(range(9))
        assert alone(lambda: DataLoader(Numbers(9), 4, sampler=subset), shuffle=False, epoch=epoch) == [7, 3, 5]
        assert in_order(
            read(lambda: DataLoader(Numbers(9), 4, sampler=distributed), 2, shuffle=False, epoch=epoch)
        ) == list(range(9))

    sharded = DataLoader(Numbers(9), 4, sampler=OwnSharding(Numbers(9), 2, 1))
    with pytest.warns(UserWarning, match="OwnSharding"):
        loader = RankLoader(sharded, rank=1, world_size=2, seed=0, shuffle=False)
    assert len(everything([list(loader.epoch(0))])) == 5  # its share, not the whole

    def custom() -> DataLoader[int]:
        return DataLoader(Numbers(9), batch_sampler=Buckets([3, 2, 4]))

    assert alone(custom, shuffle=False, epoch=0) == alone(custom, shuffle=False, epoch=1) == alone(custom, epoch=0)


def test_overfitting_reads_streams_and_ready_batches_as_in_epoch_0() -> None:
    for make in (lambda: DataLoader(Stream(9, shuffle=True, noise=True), 4, collate_fn=collate_drawing), Batches):
        first = alone(make, shuffle=False)
        assert alone(make, shuffle=False, epoch=1) == first == alone(make) != alone(make, epoch=1)


# --- seeds ---


def test_augmentation_is_the_same_with_any_workers_and_differs_elsewhere() -> None:
    """Case 101: random, numpy and torch, in data set and collate, and generators that the data set holds."""
    drawn = {
        (workers, persistent): {
            (rank, epoch): [fetched.batch for fetched in loader.epoch(epoch)]
            for rank in range(2)
            for loader in [
                RankLoader(
                    drawing_loader(num_workers=workers, persistent_workers=persistent), rank=rank, world_size=2, seed=3
                )
            ]
            for epoch in range(2)
        }
        for workers, persistent in [(0, False), (2, False), (2, True), (3, False)]
    }
    first = drawn[0, False]
    assert all(other == first for other in drawn.values())
    rows = [row for batches in first.values() for batch in batches for row in batch]
    assert len(rows) == 24 and {row[1] for row in rows} == {0, 1}
    numbers = [number for row in rows for number in row[2:]]
    assert len(set(numbers)) == len(numbers) == 24 * 16  # no number twice in ranks, workers, epochs, generators
    assert read(drawing_loader, 1, seed=4)[0][0].batch != read(drawing_loader, 1, seed=3)[0][0].batch


class Noise:
    """Holds a generator, as a transform or a collate may."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, samples: list[Any]) -> list[Any]:
        return [(sample, float(self.rng.random())) for sample in samples]


class Noisy(Dataset[Any]):
    """Draws from generators that stand in a transform and in a list, which is made anew in each epoch."""

    def __init__(self) -> None:
        self.transform = Noise()
        self.rngs = [random.Random(0)]

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.rngs = [random.Random(0)]

    def __getitem__(self, index: int) -> Any:
        return self.transform([self.rngs[0].random()])[0]


class NoisyStream(Noisy, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return (self[k] for k in (range(8) if info is None else range(info.id, 8, info.num_workers)))


@pytest.mark.parametrize("kind", [Noisy, NoisyStream])
def test_generators_in_transforms_lists_and_collate_differ_in_each_batch(kind: type[Any]) -> None:
    def numbers(workers: int, persistent: bool = False) -> list[float]:
        made = DataLoader(kind(), 2, collate_fn=Noise(), num_workers=workers, persistent_workers=persistent)
        loader = RankLoader(made, rank=0, world_size=1, seed=0)
        read = [fetched.batch for epoch in range(2) for fetched in loader.epoch(epoch)]
        loader.close()
        return [number for batch in read for (listed, drawn), collated in batch for number in (listed, drawn, collated)]

    one = numbers(1)
    assert len(set(one)) == len(one) and one == numbers(0) == numbers(1, persistent=True)
    two = numbers(2)
    assert len(set(two)) == len(two) and (kind is NoisyStream or two == one)


def test_fetching_leaves_the_global_generators_as_they_were() -> None:
    for odd in range(2):
        for _ in range(odd):
            random.gauss(), np.random.randn(), torch.randn(())
        before = global_states()
        loader = RankLoader(drawing_loader(), rank=0, world_size=1, seed=0)
        data = loader._reader._source.dataset  # type: ignore[attr-defined]
        held = data.python, data.numpy, data.legacy, data.torch
        for _ in loader.epoch(0):
            assert global_states() == before
            assert (data.python, data.numpy, data.legacy, data.torch) == held
        streams = RankLoader(DataLoader(Stream(8, noise=True), 4, collate_fn=list), rank=0, world_size=1, seed=0)
        for _ in streams.epoch(0):
            assert global_states() == before


def test_an_error_in_the_data_set_leaves_the_generators_as_they_were() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            draws()
            raise KeyError(f"no image {index}")

    before = global_states()
    with pytest.raises(KeyError, match="no image 0"):
        alone(lambda: DataLoader(Broken(4), 4))
    assert global_states() == before


def test_numpys_old_functions_work_inside_a_data_set() -> None:
    class Seeding(Numbers):
        def __getitem__(self, index: int) -> Any:
            np.random.seed(index)
            state = np.random.get_state()
            first = np.random.rand()
            np.random.set_state(state)
            return [first, np.random.rand()]

    before = global_states()
    (fetched,) = read(lambda: DataLoader(Seeding(2), 2, collate_fn=list), 1)[0]
    expected = [np.random.RandomState(index).rand() for index in range(2)]
    assert fetched.batch == [[value, value] for value in expected]
    assert global_states() == before


def tag(samples: list[Any]) -> list[Any]:
    info = get_worker_info()
    assert info is not None
    return [(sample, info.dataset.tag, info.dataset.seed) for sample in samples]  # type: ignore[attr-defined]


def init_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.tag = f"worker {worker}"  # type: ignore[attr-defined]
    info.dataset.seed = torch.initial_seed()  # type: ignore[attr-defined]


def test_worker_init_fn_sees_the_users_data_set_and_steady_seeds() -> None:
    def make() -> DataLoader[Any]:
        torch.seed()
        return DataLoader(Numbers(8), 4, num_workers=2, worker_init_fn=init_worker, collate_fn=tag)

    rows = alone(make)
    assert [row[:2] for row in rows] == [(i, f"worker {i // 4}") for i in range(8)]
    assert rows == alone(make) and rows[0][2] != rows[4][2] and rows[0][2] != alone(make, epoch=1)[0][2]


@pytest.mark.slow
def test_spawned_workers_draw_the_same() -> None:
    def make(workers: int) -> Callable[[], DataLoader[Any]]:
        options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"} if workers else {}
        return lambda: DataLoader(Spawnable(8), 4, collate_fn=collate_drawing, **options)

    assert alone(make(1), epoch=2) == alone(make(0), epoch=2)
    assert alone(
        lambda: DataLoader(Stream(8), 4, num_workers=1, multiprocessing_context="spawn"), epoch=2, limit=1
    ) == list(range(4))


def test_persistent_workers_see_new_epochs_and_outlive_an_early_end() -> None:
    for make in (
        lambda: drawing_loader(24, num_workers=2, persistent_workers=True),
        lambda: DataLoader(Stream(24, noise=True), 4, num_workers=2, persistent_workers=True, collate_fn=list),
    ):
        others = set(multiprocessing.active_children())
        loader = RankLoader(make(), rank=0, world_size=1, seed=0)
        epochs = loader.epoch(0)
        next(epochs)
        workers = set(multiprocessing.active_children()) - others
        assert len(workers) == 2
        epochs.close()
        for epoch in range(1, 3):
            rows = everything([list(loader.epoch(epoch))])
            assert {row[1] for row in rows} == {epoch} and sorted(row[0] for row in rows) == list(range(24))
        assert len(list(loader.epoch(3, limit=2))) == 2
        assert set(multiprocessing.active_children()) - others == workers
        loader.close()
        assert not workers & set(multiprocessing.active_children())


def test_an_early_end_ends_the_workers() -> None:
    for make in (lambda: drawing_loader(40, num_workers=2), lambda: DataLoader(Stream(40), 4, num_workers=2)):
        others = set(multiprocessing.active_children())
        epoch = RankLoader(make(), rank=0, world_size=1, seed=0).epoch(0)
        next(epoch)
        workers = set(multiprocessing.active_children()) - others
        assert len(workers) == 2
        epoch.close()
        assert not workers & set(multiprocessing.active_children())


# --- streams ---


@given(n=st.integers(0, 40), batch=st.integers(1, 4), ranks=st.integers(1, 4), drop_last=st.booleans())
def test_each_sample_of_a_stream_comes_once(n: int, batch: int, ranks: int, drop_last: bool) -> None:
    by_rank = read(lambda: DataLoader(Stream(n), batch, drop_last=drop_last), ranks)
    used = n - n % (ranks * batch) if drop_last else n
    assert in_order(by_rank) == list(range(used))
    sizes = [sum(fetched.size or 0 for fetched in rank) for rank in by_rank]
    assert max(sizes) - min(sizes) <= 1
    assert all(fetched.indices is None for rank in by_rank for fetched in rank)
    for k in range(used // (ranks * batch)):  # full rounds are what one rank with batches of R x B reads
        of_round = [sample for rank in by_rank for sample in samples(rank[k])]
        assert sorted(of_round) == list(range(k * ranks * batch, (k + 1) * ranks * batch))


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_keys_of_a_stream_give_the_order_of_one_process(workers: int, ranks: int) -> None:
    def make() -> DataLoader[int]:
        return DataLoader(Stream(29), 4, num_workers=workers)

    assert in_order(read(make, ranks)) == torch_alone(make())


def test_ranks_read_one_stream_however_it_draws() -> None:
    def make(workers: int = 0) -> Callable[[], DataLoader[Any]]:
        def of_rank() -> DataLoader[Any]:
            random.seed()
            return DataLoader(Stream(22, shuffle=True, noise=True), 4, collate_fn=list, num_workers=workers)

        return of_rank

    for workers in (0, 2):
        rows = {epoch: in_order(read(make(workers), 2, epoch=epoch)) for epoch in range(2)}
        numbers = [number for epoch in rows.values() for row in epoch for number in row[2:]]
        assert len(numbers) == len(set(numbers))  # ranks, workers and epochs differ
        for epoch, of_epoch in rows.items():
            assert sorted(row[0] for row in of_epoch) == list(range(22))
            assert {row[1] for row in of_epoch} == {epoch}
            assert [row[0] for row in of_epoch] != sorted(row[0] for row in of_epoch)
            assert of_epoch == in_order(read(make(workers), 2, epoch=epoch))
    assert alone(make(0)) == alone(make(1))


def test_collate_of_a_stream_draws_differently_on_each_rank() -> None:
    by_rank = read(lambda: DataLoader(Stream(16), 4, collate_fn=lambda batch: [draws() for _ in batch]), 2)
    numbers = [number for row in everything(by_rank) for number in row]
    assert len(numbers) == len(set(numbers)) == 16 * 6


def test_a_streams_own_generator_follows_the_epoch() -> None:
    class Shuffled(Stream):
        def __init__(self, n: int) -> None:
            super().__init__(n)
            self.generator = torch.Generator()

        def __iter__(self) -> Iterator[int]:
            yield from torch.randperm(self.n, generator=self.generator).tolist()

    for workers in (0, 1):
        loaders = make_ranks(lambda workers=workers: DataLoader(Shuffled(21), 4, num_workers=workers), 2)
        orders = [in_order([list(loader.epoch(epoch)) for loader in loaders]) for epoch in (0, 1, 0)]
        assert orders[0] != orders[1] and orders[0] == orders[2]
        assert sorted(orders[0]) == list(range(21))


def test_streams_that_shard_themselves_are_read_whole() -> None:
    class Own(Stream):
        def __init__(self, rank: int) -> None:
            super().__init__(7 + 2 * rank)
            self.rank = rank

        def __iter__(self) -> Iterator[int]:
            return (100 * self.rank + number for number in super().__iter__())

    loaders = [
        RankLoader(DataLoader(Own(rank), 4), rank=rank, world_size=2, seed=0, shard_data=False) for rank in range(2)
    ]
    by_rank = [list(loader.epoch(0)) for loader in loaders]
    assert [everything([rank]) for rank in by_rank] == [list(range(7)), list(range(100, 109))]
    assert sorted(in_order(by_rank)) == [*range(7), *range(100, 109)]
    assert not loaders[0].sized and loaders[0].num_samples is None


def test_what_is_known_of_a_streams_length_is_told() -> None:
    def rounds(n: int, ranks: int, **kwargs: Any) -> int | None:
        loader = make_ranks(lambda: DataLoader(SizedStream(n), 4, **kwargs), ranks)[0]
        assert not loader.sized and loader.batch_size == 4 and loader.num_samples == n
        return loader.num_rounds

    assert [rounds(21, ranks) for ranks in (1, 2, 3)] == [6, 3, 2]
    assert [rounds(21, ranks, drop_last=True) for ranks in (1, 2, 3)] == [5, 2, 1]
    assert rounds(21, 2, num_workers=1) == 3 and rounds(21, 2, num_workers=2) is None
    assert make_ranks(lambda: DataLoader(Stream(21), 4), 1)[0].num_rounds is None


@pytest.mark.parametrize("claimed", [5, 9, 12])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_length_of_a_stream_that_is_not_true_is_told_once(claimed: int, workers: int) -> None:
    class Claiming(Stream):
        def __len__(self) -> int:
            return claimed

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for loader in make_ranks(lambda: DataLoader(Claiming(9), 2, num_workers=workers, drop_last=True), 2):
            list(loader.epoch(0, limit=1))  # left before its end
            before = len(told)
            for epoch in range(2):
                list(loader.epoch(epoch))
            expected = [] if claimed == 9 else [f"Claiming of the train loader has length {claimed} but gave 9 samples"]
            assert len(told) == before + len(expected)
            assert all(text in str(each.message) for text, each in zip(expected, told[before:], strict=True))
    assert len(told) == (0 if claimed == 9 else 2)


def test_a_stream_without_a_batch_size_is_dealt_item_by_item() -> None:
    by_rank = read(lambda: DataLoader(Stream(5), batch_size=None), 2)
    assert [[fetched.batch for fetched in rank] for rank in by_rank] == [[0, 2, 4], [1, 3]]
    assert [[fetched.keys for fetched in rank] for rank in by_rank] == [
        [[(0, 0, 0)], [(2, 0, 0)], [(4, 0, 0)]],
        [[(1, 0, 0)], [(3, 0, 0)]],
    ]
    assert {fetched.size for rank in by_rank for fetched in rank} == {None}


def test_a_limited_stream_is_read_no_further() -> None:
    stream = Stream(40)
    loader = RankLoader(DataLoader(stream, 4), rank=1, world_size=2, seed=0)
    assert [samples(fetched) for fetched in loader.epoch(0, limit=2)] == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert stream.read == 16  # two rounds of both ranks
    with_workers = RankLoader(DataLoader(Stream(40), 4, num_workers=2), rank=0, world_size=1, seed=0)
    assert len(list(with_workers.epoch(0, limit=3))) == 3
    assert list(loader.epoch(0, limit=0)) == [] and stream.read == 16


def test_data_pipes_are_read_without_workers_only() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    def make(workers: int = 0) -> DataLoader[Any]:
        return DataLoader(IterableWrapper(range(12)).shuffle().sharding_filter(), 3, shuffle=True, num_workers=workers)

    orders = [in_order(read(make, 2, epoch=epoch)) for epoch in (0, 1, 0)]
    assert sorted(orders[0]) == list(range(12)) and orders[0] == orders[2] != orders[1]
    with pytest.raises(NotSupportedError, match="IterDataPipe"):
        read(lambda: make(2), 1)


# --- ready batches ---


class Batches:
    """Batches of the numbers below 10, in another order each time it is iterated."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(10).tolist()
        yield from (order[k : k + 3] for k in range(0, 10, 3))


class SizedBatches(Batches):
    def __init__(self, claimed: int) -> None:
        self.claimed = claimed

    def __len__(self) -> int:
        return self.claimed


def test_a_list_of_batches_is_dealt() -> None:
    batches = [torch.tensor([3 * k, 3 * k + 1]) for k in range(5)]
    loaders = make_ranks(lambda: batches, 2)
    by_rank = [list(loader.epoch(0)) for loader in loaders]
    assert [[fetched.batch for fetched in rank] for rank in by_rank] == [batches[0::2], [*batches[1::2], None]]
    assert [[fetched.keys for fetched in rank] for rank in by_rank] == [[[(0,)], [(2,)], [(4,)]], [[(1,)], [(3,)], []]]
    assert loaders[0].sized and loaders[0].num_rounds == 3
    assert [len(rank) for rank in read(lambda: batches, 2, limit=2)] == [2, 2]
    assert read(list, 2) == [[], []]


def test_any_iterable_of_batches_is_dealt_alike_on_all_ranks() -> None:
    for make, sized in ((Batches, False), (lambda: SizedBatches(4), True)):
        loaders = make_ranks(make, 3)
        for epoch in range(2):
            by_rank = [list(loader.epoch(epoch)) for loader in loaders]
            assert sorted(everything(by_rank)) == list(range(10))
            assert [len(rank) for rank in by_rank] == ([2, 2, 2] if sized else [2, 1, 1])
            assert everything(by_rank) == everything([list(loader.epoch(epoch)) for loader in loaders])
        assert {loader.sized for loader in loaders} == {sized}
        assert everything([list(loaders[0].epoch(0))]) != everything([list(loaders[0].epoch(1))])


def test_a_length_of_ready_batches_must_be_true() -> None:
    with pytest.raises(DataError, match="loader has length 6 but gave at most 4 batches"):
        read(lambda: SizedBatches(6), 1)
    assert [len(rank) for rank in read(lambda: SizedBatches(2), 1)] == [2]


def test_an_iterator_is_read_once() -> None:
    loader = RankLoader((torch.zeros(2) for _ in range(3)), rank=0, world_size=1, seed=0, name="val")
    assert len(list(loader.epoch(0))) == 3
    with pytest.raises(DataError, match="val loader is an iterator, which can be read only once"):
        list(loader.epoch(1))


def test_a_loader_with_an_iter_of_its_own_gives_what_that_gives() -> None:
    class Doubled(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (2 * batch for batch in super().__iter__())

    loaders = make_ranks(lambda: Doubled(Numbers(21), 4, shuffle=True), 2)
    orders = []
    for epoch in (0, 1, 0):
        by_rank = [list(loader.epoch(epoch)) for loader in loaders]
        assert sorted(everything(by_rank)) == list(range(0, 42, 2))
        assert [len(rank) for rank in by_rank] == [3, 3]
        orders.append(everything(by_rank))
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (3, "is a int; expected a torch DataLoader or an iterable of batches"),
        ("abc", "is a str"),
        (torch.zeros(3), "is a Tensor"),
        ({"a": 1}, "is a dict"),
        (Numbers(3), r"is a Numbers; .* Wrap the data set: DataLoader\(dataset, batch_size=...\)"),
    ],
)
def test_what_is_no_loader_is_refused(loader: Any, told: str) -> None:
    with pytest.raises(DataError, match="The train loader " + told):
        RankLoader(loader, rank=0, world_size=1, seed=0)


# --- rank 0 reads and deals ---


class Ring:
    """Carries objects from rank 0's thread to the others."""

    def __init__(self, ranks: int) -> None:
        self.queues: list[Queue[Any]] = [Queue() for _ in range(ranks)]
        self.scatters = [0] * ranks

    def at(self, rank: int) -> Any:
        ring = self

        class Dispatch:
            world_size = len(ring.queues)

            def __init__(self) -> None:
                self.rank = rank

            def scatter(self, objects: list[Any] | None) -> Any:
                ring.scatters[rank] += 1
                assert (objects is not None) == (rank == 0)
                for queue, item in zip(ring.queues, objects or (), strict=False):
                    queue.put(item)
                return ring.queues[rank].get(timeout=20)

        return Dispatch()


def dispatched(make: Callable[[int], Any], ranks: int, epochs: int = 1, **kwargs: Any) -> list[list[list[Any]]]:
    """For each epoch what each rank is given, or the exception that ended it."""
    ring = Ring(ranks)
    loaders = [
        RankLoader(make(rank), rank=rank, world_size=ranks, seed=0, dispatch=ring.at(rank)) for rank in range(ranks)
    ]
    results: list[list[Any]] = [[] for _ in range(ranks)]

    def run(rank: int) -> None:
        for epoch in range(epochs):
            given_: list[Any] = []
            results[rank].append(given_)
            try:
                given_ += loaders[rank].epoch(epoch, **kwargs)
            except Exception as error:
                given_.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert len(set(ring.scatters)) == 1 and all(queue.empty() for queue in ring.queues)
    return [[results[rank][epoch] for rank in range(ranks)] for epoch in range(epochs)]


class Untouched(Numbers):
    """A data set whose samples may be read on rank 0 alone."""

    def __init__(self, n: int, rank: int) -> None:
        super().__init__(n)
        self.rank = rank

    def __getitem__(self, index: int) -> int:
        assert self.rank == 0
        return index


@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_0_deals_what_the_ranks_would_have_read(ranks: int) -> None:
    for n in (0, 1, 7, 16, 21):
        make = lambda rank, n=n: DataLoader(Untouched(n, rank), 4, shuffle=n > 0)  # noqa: E731
        for epoch, by_rank in enumerate(dispatched(make, ranks, epochs=2)):
            expected = read(lambda n=n: DataLoader(Numbers(n), 4, shuffle=n > 0), ranks, epoch=epoch)
            for mine, own in zip(by_rank, expected, strict=True):
                assert [samples(fetched) for fetched in mine] == [samples(fetched) for fetched in own]
                assert [fetched[1:] for fetched in mine] == [fetched[1:] for fetched in own]
    (by_rank,) = dispatched(lambda rank: drawing_loader(), ranks)
    assert [[f.batch for f in rank] for rank in by_rank] == [
        [f.batch for f in rank] for rank in read(drawing_loader, ranks)
    ]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_rank_0_deals_streams_and_ready_batches(ranks: int, workers: int) -> None:
    for n in (0, 3, 4, 21, 24):
        (by_rank,) = dispatched(lambda rank, n=n: DataLoader(Stream(n), 4, num_workers=workers), ranks)
        assert in_order(by_rank) == torch_alone(DataLoader(Stream(n), 4, num_workers=workers))
        lengths = [len(rank) for rank in by_rank]
        assert lengths == sorted(lengths, reverse=True) and max(lengths) - min(lengths) <= 1
        for parts in zip(*by_rank, strict=False):
            assert len(parts) < ranks or {p.total for p in parts} == {sum(len(samples(p)) for p in parts)}
    if not workers:
        for make in (lambda rank: Batches(), lambda rank: SizedBatches(4), lambda rank: [[0, 1], [2]]):
            (by_rank,) = dispatched(make, ranks)
            assert sorted(everything(by_rank)) == list(range(3 if isinstance(make(0), list) else 10))


def test_a_rank_that_is_dealt_nothing_ends_in_the_same_round() -> None:
    """It must not wait for another deal: rank 0 may next be in a collective in which that rank is missing."""
    ring = Ring(2)
    first, second = (
        RankLoader(DataLoader(Stream(4), 4), rank=rank, world_size=2, seed=0, dispatch=ring.at(rank)).epoch(0)
        for rank in range(2)
    )
    assert samples(next(first)) == [0, 1, 2, 3]
    assert next(second, None) is None and next(first, None) is None
    assert ring.scatters == [1, 1]


def test_dealing_stops_at_the_limit() -> None:
    for make in (
        lambda rank: DataLoader(Numbers(40), 4),
        lambda rank: DataLoader(Stream(40), 4),
        lambda rank: Batches(),
    ):
        for by_rank in dispatched(make, 2, epochs=2, limit=2):
            assert [len(rank) for rank in by_rank] == [2, 2]
    stream = Stream(40)
    dispatched(lambda rank: DataLoader(stream, 4), 2, limit=2)
    assert stream.read == 16


def test_what_is_known_beforehand_is_the_same_when_rank_0_deals() -> None:
    ring = Ring(2)
    for rank in range(2):
        loader = RankLoader(DataLoader(SizedStream(21), 4), rank=rank, world_size=2, seed=0, dispatch=ring.at(rank))
        assert (loader.num_rounds, loader.sized, loader.num_samples, loader.batch_size) == (3, False, 21, 4)
        loader = RankLoader([1, 2, 3], rank=rank, world_size=2, seed=0, dispatch=ring.at(rank))
        assert (loader.num_rounds, loader.sized) == (2, True)


def test_an_error_of_rank_0_reaches_the_others() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 9:
                raise ValueError("image 9 is broken")
            return index

    def unreadable() -> Any:
        return DataLoader(Numbers(4), batch_sampler=Buckets([2, 2], claimed=3))

    for make, error, rounds in (
        (lambda rank: DataLoader(Broken(21), 4), ValueError, 1),
        (lambda rank: unreadable(), DataError, 0),  # while the order is drawn
    ):
        ((first, *others),) = dispatched(make, 2)
        assert len(first) == rounds + 1 and type(first[-1]) is error
        for other in others:
            assert len(other) == rounds + 1 and type(other[-1]) is RankError
            assert str(first[-1]) in str(other[-1])


def test_rank_0_cannot_deal_what_the_ranks_shard_themselves() -> None:
    sampler = OwnSharding(Numbers(21), 2, 0)
    with pytest.raises(DataError, match="rank 0 would read its own part only"):
        RankLoader(DataLoader(Numbers(21), 4, sampler=sampler), rank=0, world_size=2, seed=0, dispatch=Ring(2).at(0))
