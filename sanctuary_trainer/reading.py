"""How one rank reads a data set with keys through a DataLoader that we build (private to data.py and streams.py).

MapReader.open(epoch)
  set_epoch on samplers and data set
  draw the order under generators of its own                        (ORDER, seed, epoch)
  for each round:  the next R x B keys, in R equal contiguous shares
    Fetch, in whichever process:  data set and collate under        (BATCH, seed, epoch, number of the batch)

An epoch is continued behind so many samples of its order, or batches where nobody knows how many samples they hold;
nothing of these is read.
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple
from warnings import warn

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SequentialSampler, get_worker_info

from sanctuary_trainer.errors import DataError
from sanctuary_trainer.owners import held_by, length, set_epoch, tell_again
from sanctuary_trainer.seeding import BATCH, ORDER, WORKERS, Generators, may_draw, mix

NONE: Any = object()  # what next() gives after the end


class Places(NamedTuple):
    """Where samples stand in the order in which one process reads, kept short: few ask for it."""

    positions: range
    worker: int | None = None  # of a stream, which counts positions per worker
    batch_size: int = 1
    rank: int | None = None  # of data that every rank counts for itself

    def keys(self) -> list[tuple[int, ...]]:
        """What to sort by: (position,), or for a stream (batch, worker, place in the batch)."""
        if self.worker is None:
            keys: list[tuple[int, ...]] = [(position,) for position in self.positions]
        else:
            keys = [(p // self.batch_size, self.worker, p % self.batch_size) for p in self.positions]
        return keys if self.rank is None else [(*key, self.rank) for key in keys]


class Start(NamedTuple):
    """Where an epoch is continued; by default at its beginning.

    Attributes:
        samples: samples of the epoch that are used up, over all ranks.
        rounds: rounds of it that are done.
        reached: what `Feed.reached` gave then, on this rank; on another number of ranks than then, on rank 0.
    """

    samples: int = 0
    rounds: int = 0
    reached: Any = None


BEGINNING = Start()


class Fetched(NamedTuple):
    """What one rank gets in one round.

    Attributes:
        batch: as the user's collate made it, on the host; None when this rank has nothing in this round.
        indices: the data set's keys of the samples; None when unknown (streams, ready batches).
        places: where the samples stand; of a batch of unknown size there is one place.
        size: samples of this rank; None when unknown (ask the task).
        total: samples of the round over all ranks; None when unknown.
        reached: gives where the data stands after this round, as plain data; None where the samples used tell it.
    """

    batch: Any
    indices: list[Any] | None
    places: Places
    size: int | None
    total: int | None
    reached: Callable[[], Any] | None = None

    @property
    def keys(self) -> list[tuple[int, ...]]:
        """Sorting the samples of all ranks by these gives the order in which one process reads; one per place."""
        return self.places.keys()


def nothing(total: int | None, reached: Callable[[], Any] | None = None) -> Fetched:
    """What a rank gets in a round that has too few samples for it."""
    return Fetched(None, [], Places(range(0)), 0, total, reached)


@dataclass(frozen=True)
class Part:
    """Which part of the data is read in this process.

    Attributes:
        rank, ranks: this process and how many there are.
        mine: the ranks whose batches are read here: this one, or all when this process deals to the others.
        own: nothing is dealt, because the data of each rank is its own already.
    """

    rank: int
    ranks: int
    mine: tuple[int, ...]
    own: bool

    @property
    def dealt(self) -> int:
        """How many ranks the data is dealt to."""
        return 1 if self.own else self.ranks

    def share_of(self, rank: int) -> int:
        """Which of the dealt shares goes to a rank."""
        return 0 if self.own else rank

    @property
    def counted_by(self) -> int | None:
        """The rank that counts its samples from 0 for itself; None where all count together."""
        return self.rank if self.own and self.ranks > 1 else None

    def to_save(self, kind: str, **where: Any) -> dict[str, Any]:
        """What `Fetched.reached` gives: where data of this kind stands, and for which ranks."""
        return {"kind": kind, "ranks": self.ranks, "own": self.counted_by is not None, **where}

    def saved(self, start: Start, kind: str, name: str) -> Mapping[str, Any] | None:
        """The position in data of this kind that was saved; None where there is none but the samples used.

        Raises:
            DataError: this rank cannot go on from it.
        """
        saved: Mapping[str, Any] | None = start.reached
        if saved is not None and saved["kind"] != kind:
            raise DataError(
                f"The {name} loader reads {_KINDS[kind]}, and the epoch to be continued was one of "
                f"{_KINDS[saved['kind']]}. Give the former loader, or resume from the end of an epoch."
            )
        own = self.counted_by is not None
        if start == BEGINNING or (saved is None and not own):
            return saved
        if saved is None or ((saved["own"] or own) and (own, self.ranks) != (saved["own"], saved["ranks"])):
            before = "one rank, or dealt to several," if saved is None else f"{saved['ranks']} rank(s)"
            raise DataError(
                f"In the {name} loader each rank {'reads' if own else 'read'} data of its own, so that an epoch begun "
                f"on {before} cannot be continued on {self.ranks}. Resume with the former number of processes and the "
                "former shard_data, or from the end of an epoch."
            )
        return saved


_KINDS = {"keys": "a data set with keys", "stream": "a stream", "batches": "ready batches"}


@dataclass(frozen=True)
class Source:
    """A user's DataLoader taken apart: what is read, and how the loader that we build must read it."""

    dataset: Any
    batch_sampler: Any  # None with batch_size=None
    sampler: Any
    batch_size: int | None
    drop_last: bool
    collate: Callable[[Any], Any]
    worker_init: Callable[[int], None] | None
    options: dict[str, Any]  # num_workers, pin_memory, ...: passed on as they are
    name: str

    def samplers(self) -> list[Any]:
        """The samplers at work, the outermost first."""
        return held_by(self.sampler if self.batch_sampler is None else self.batch_sampler, Sampler)

    def datasets(self) -> list[Any]:
        """The data set, and those that it holds."""
        return held_by(self.dataset, Dataset)


class Reader(ABC):
    """Reads one kind of data; what it tells of its size is as in RankLoader."""

    batch_size: int | None = None

    @property
    def num_samples(self) -> int | None:
        return None

    @property
    @abstractmethod
    def num_rounds(self) -> int | None: ...

    @property
    @abstractmethod
    def sized(self) -> bool: ...

    @abstractmethod
    def drawing(self) -> list[Any]:
        """What draws the order that must be alike on all ranks."""

    def rounds_left(self, epoch: int, start: Start) -> int | None:
        """Rounds of an epoch that is continued; None where not `sized`."""
        return None

    @abstractmethod
    def open(self, epoch: int, start: Start, limit: int | None) -> Generator[Fetched, None, None]:
        """Read one epoch: for each round one item per rank in `Part.mine`."""

    @abstractmethod
    def close(self) -> None:
        """End persistent workers."""


class Loader:
    """The DataLoader that we build: with a generator of its own (opening it draws from one), and closed for sure."""

    def __init__(self, source: Source, seed: int, rank: int, **parts: Any) -> None:
        self._seed, self._rank = seed, rank
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(generator=self._generator, **parts, **source.options)
        self._timeout = self._loader.timeout

    @contextmanager
    def reading(self, epoch: int, patient: bool = False) -> Iterator[Iterator[Any]]:
        """Begin an epoch; `patient` waits as long as it takes for workers that first read again what is used up."""
        # What a worker_init_fn may seed other libraries with (torch.initial_seed() in a worker) follows from this;
        # persistent workers draw it once, in whichever epoch they begin.
        epoch = 0 if self._loader.persistent_workers else epoch
        self._generator.manual_seed(mix(WORKERS, self._seed, epoch, self._rank))
        self._loader.timeout = 0 if patient else self._timeout
        batches = iter(self._loader)
        try:
            yield batches
        finally:
            if not self._loader.persistent_workers:
                shut_down(batches)

    def close(self) -> None:
        shut_down(self._loader._iterator)
        self._loader._iterator = None


def shut_down(batches: Any) -> None:
    """End the workers of a DataLoader's iterator, if it is one and has any."""
    end = getattr(batches, "_shutdown_workers", None)
    if end is not None:
        end()


def leave_group() -> None:
    """Move a worker to a process group of its own.

    Launchers send SIGTERM to whole groups, and a run that ends by it still needs its workers.
    """
    with suppress(OSError):
        os.setpgid(0, 0)


@contextmanager
def workers_apart(loader: Any) -> Iterator[None]:
    """Let the workers that a DataLoader with an __iter__ of its own starts leave this process's group, too."""
    init = getattr(loader, "worker_init_fn", None)
    if isinstance(loader, DataLoader):
        loader.worker_init_fn = partial(_begin_apart, init)
    try:
        yield
    finally:
        if isinstance(loader, DataLoader):
            loader.worker_init_fn = init


def _begin_apart(init: Callable[[int], None] | None, worker: int) -> None:
    leave_group()
    if init is not None:
        init(worker)


class WorkerInit:
    """What a worker does first: a process group of its own, and at the end the user's worker_init_fn.

    get_worker_info() shows the user's data set, where ours would stand.

    Args:
        init: the user's worker_init_fn.
        wrapped: whether the loader was given our data set, which holds the user's.

    Attributes:
        first: the number of the worker whose batch comes first. The process that DataLoader asks first takes its
            number, seeds and part of the data.
    """

    def __init__(self, init: Callable[[int], None] | None, wrapped: bool = True) -> None:
        self._init, self._wrapped = init, wrapped
        self.first = 0

    def __call__(self, process: int) -> None:
        leave_group()
        info: Any = get_worker_info()
        worker = (process + self.first) % info.num_workers
        seed = info.seed - process + worker
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        np.random.seed(mix(seed) & 0xFFFFFFFF)
        for name, value in (("id", worker), ("seed", seed)):  # the class is frozen
            object.__setattr__(info, name, value)
        if self._wrapped:
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._init is not None:
            self._init(worker)


class _Indices(list[Any]):
    """The keys of one batch, with what its fetch needs to know wherever it happens."""

    def __init__(self, keys: Iterable[Any], seed: int, epoch: int) -> None:
        super().__init__(keys)
        self.seed, self.epoch = seed, epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return _Indices, (list(self), self.seed, self.epoch)


class _Fetch:
    """Data set and collate as one function of `_Indices`, under the seed of the batch.

    It stands in both of DataLoader's places, data set and collate_fn, so that one seeding covers both.

    Args:
        single: the loader has batch_size=None: one key is fetched, and its batch passed to collate as it is.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], single: bool) -> None:
        self.dataset, self._collate, self._single = dataset, collate, single
        self._datasets = held_by(dataset, Dataset)
        self.generators = Generators([*self._datasets, collate])

    def __getitems__(self, indices: _Indices) -> _Indices:
        return indices

    def __call__(self, indices: _Indices) -> Any:
        dataset = self.dataset
        if tell_again(self._datasets, indices.epoch):
            self.generators.look_up_anew()
        with self.generators.seeded(indices.seed):
            if self._single:
                return self._collate(dataset[indices[0]])
            fetch_all = getattr(dataset, "__getitems__", None)
            return self._collate(fetch_all(indices) if fetch_all else [dataset[key] for key in indices])


class _Lists:
    """The batch sampler of the loader that we build. DataLoader calls iter() twice an epoch and keeps the second."""

    def __init__(self) -> None:
        self.begin: Callable[[], Iterator[Any]] = lambda: iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


_Take = Callable[[int], list[Any]]  # gives the next n entries of an order, fewer at its end

# What one rank gets in one round, before it is fetched: the keys that the loader fetches (None when there is nothing
# for this rank), then the fields of Fetched after the batch. A plain tuple: one is made for every training batch.
_Share = tuple[list[Any] | None, tuple[Any, ...]]


class MapReader(Reader):
    """A data set with keys. Lists of keys are dealt, so every rank knows each round of the epoch beforehand.

    With torch's own BatchSampler samples are dealt, so that R ranks with batches of B read what one rank with batches
    of R x B would; what a custom batch sampler, or a loader with batch_size=None, gives is dealt in whole batches. One
    for as many ranks as there are (`ranks` is None) may have `after(samples)`, which gives a sampler of the rest of an
    epoch: so it can be dealt to another R.

    Args:
        same_order: draw the order of epoch 0 in every epoch.
    """

    def __init__(self, source: Source, part: Part, seed: int, same_order: bool) -> None:
        self._source, self._part, self._seed = source, part, seed
        self._single = source.batch_sampler is None
        self._by_samples = type(source.batch_sampler) is BatchSampler
        self._drops = False
        self._sampler = source.sampler if self._single else source.batch_sampler
        if self._by_samples:
            self.batch_size, self._drops = self._sampler.batch_size, self._sampler.drop_last
            self._sampler = self._sampler.sampler
            if self._drops and source.name != "train" and length(self._sampler) is not None:
                # In evaluation the samples are those that one process reads, on any number of ranks.
                self._sampler, self._drops = (
                    _WholeBatches(self._sampler, self._source.batch_sampler.batch_size),
                    False,
                )
        # Only of rounds made for these ranks: else what is used up may end inside of one.
        gives_rest = hasattr(self._sampler, "after") and getattr(self._sampler, "ranks", 0) is None
        self._gives_rest = gives_rest and not part.own
        self._per_round = part.dealt * (self.batch_size or 1)  # samples; batches where whole batches are dealt
        self._same_order = same_order
        self._waiting: deque[_Share] = deque()  # what was sent to the loader and has not come back
        self._lists = _Lists()
        self._dealt, self._counted_by = part.dealt, part.counted_by
        self._between = part.ranks // part.dealt  # batches of one rank are so many numbers apart
        self._shares = [(rank, part.share_of(rank)) for rank in part.mine]
        self._order = Generators(self.drawing(), resumable=True)  # once: making one takes 0.4 ms
        self._plain = not self._single and not may_draw(source.dataset, source.collate)
        self._fetch = fetch = _Fetch(source.dataset, source.collate, self._single)
        self._loader = Loader(
            source,
            seed,
            part.rank,
            dataset=source.dataset if self._plain else fetch,
            batch_sampler=self._lists,
            collate_fn=source.collate if self._plain else fetch,
            worker_init_fn=WorkerInit(source.worker_init, wrapped=not self._plain),
        )

    @property
    def num_samples(self) -> int | None:
        return length(self._sampler) if self._by_samples else None

    @property
    def sized(self) -> bool:
        return length(self._sampler) is not None and (self._part.ranks == 1 or not self._part.own)

    @property
    def num_rounds(self) -> int | None:
        entries = length(self._sampler)
        if entries is None:
            return None
        return entries // self._per_round if self._drops else -(-entries // self._per_round)

    def drawing(self) -> list[Any]:
        return self._source.samplers()

    def open(self, epoch: int, start: Start, limit: int | None) -> Generator[Fetched, None, None]:
        set_epoch(self._source.datasets(), epoch)
        self._fetch.generators.look_up_anew()
        take = self._draw(0 if self._same_order else epoch, start)
        send = self._send(take, epoch, self._skip(take, start), limit)
        self._lists.begin = lambda: send
        return self._read(epoch)

    def rounds_left(self, epoch: int, start: Start) -> int | None:
        entries = length(self._sampler)
        if not self.sized or entries is None:
            return None
        if self._by_samples:
            entries -= min(entries, start.samples)
        elif start != BEGINNING:
            take = self._draw(0 if self._same_order else epoch, start)
            _, _, chunk = self._skip(take, start)
            entries = len(chunk) + len(take(entries))
        return entries // self._per_round if self._drops else -(-entries // self._per_round)

    def close(self) -> None:
        self._loader.close()

    def _read(self, epoch: int) -> Generator[Fetched, None, None]:
        waiting = self._waiting
        waiting.clear()
        with self._loader.reading(epoch) as batches:
            for batch in batches:
                yield Fetched(batch, *waiting.popleft()[1])
        if self.sized:  # what still waits are the ranks that have nothing in the last round
            for _, (_, _, _, total, *reached) in waiting:
                yield nothing(total, *reached)

    def _send(
        self, take: _Take, epoch: int, start: tuple[int, int, list[Any]], limit: int | None
    ) -> Iterator[list[Any]]:
        """Give the loader the keys of one batch after the other, and note what they are."""
        position, number, chunk = start
        deal = self._deal_samples if self._by_samples else self._deal_batches
        for _ in count() if limit is None else range(limit):
            chunk += take(self._per_round - len(chunk))
            if not chunk or (self._drops and len(chunk) < self._per_round):
                return
            shares = deal(chunk, position, number, epoch)
            position += len(chunk) if self._by_samples else sum(_size(batch) or 1 for batch in chunk)
            number += self._part.ranks
            if self._counted_by is not None or (self._single and _size(chunk[0]) is None):
                reached = partial(self._part.to_save, "keys", samples=position, batches=number // self._between)
                shares = [(keys, (*known, reached)) for keys, known in shares]
            for share in shares:
                self._waiting.append(share)
                if share[0] is not None:
                    yield share[0]
            chunk = []

    def _draw(self, epoch: int, start: Start) -> _Take:
        """Draw the order of one epoch."""
        sampler = self._sampler
        set_epoch(self.drawing(), epoch)
        if self._gives_rest:
            sampler = sampler.after(self._used(start)[0])
        entries = length(sampler)
        if entries is not None and type(sampler) in (SequentialSampler, range):
            rest = iter(range(entries))  # not a list: there may be 1e9
            return lambda n: list(islice(rest, n))
        generators = self._order.seeded(mix(ORDER, self._seed, epoch))
        with generators:
            order = iter(sampler)
            drawn = [] if entries is None else list(islice(order, entries))
            more = entries is not None and next(order, NONE) is not NONE
        if entries is not None:
            self._check_length(entries, len(drawn), more)
            rest = iter(drawn)
            return lambda n: list(islice(rest, n))

        def take(n: int) -> list[Any]:
            with generators:
                return list(islice(order, n))

        return take

    def _check_length(self, entries: int, drawn: int, more: bool) -> None:
        """A length that is not true would let the ranks' schedules and the last window go wrong."""
        sampler = f"The sampler {type(self._sampler).__name__} of the {self._source.name} loader"
        if drawn < entries:
            raise DataError(
                f"{sampler} has length {entries} but gave {drawn}. Correct its __len__, or remove it: a loader of "
                "unknown length works too."
            )
        if more:
            warn(f"{sampler} gives more than its length {entries}; an epoch ends there.", stacklevel=2)

    def _used(self, start: Start) -> tuple[int, int]:
        """Samples and batches of this part that are used up."""
        saved = self._part.saved(start, "keys", self._source.name)
        return (
            (start.samples, start.rounds * self._part.dealt) if saved is None else (saved["samples"], saved["batches"])
        )

    def _skip(self, take: _Take, start: Start) -> tuple[int, int, list[Any]]:
        """Leave out what is used up.

        Returns:
            The position reached, the number of the next batch, and what is left of a whole batch used in part.
        """
        samples, batches = self._used(start)
        if self._gives_rest:
            return samples, batches * self._between, []
        if self.batch_size is not None:
            return len(take(samples)), -(-samples // self.batch_size) * self._between, []
        first = take(1) if samples or batches else []
        if first and _size(first[0]) is None:
            position = len(first) + len(take(max(0, batches - 1)))
            return position, position * self._between, []
        position, number = 0, 0
        while position < samples and (entries := first or take(1)):
            size, first = len(entries[0]), []
            if position + size > samples:
                return samples, number, [entries[0][samples - position :]]
            position, number = position + size, number + self._between
        return position, number, first

    def _deal_samples(self, chunk: list[Any], position: int, number: int, epoch: int) -> list[_Share]:
        shares: list[_Share] = []
        counted_by, dealt = self._counted_by, self._dealt
        begin, end = 0, len(chunk)
        total = None if counted_by is not None else end
        for rank, share in self._shares:
            keys = chunk
            if dealt > 1:
                begin, end = equal_share(len(chunk), dealt, share)
                keys = chunk[begin:end]
            if not self._plain:
                keys = _Indices(keys, mix(BATCH, self._seed, epoch, number + rank), epoch)
            places = Places(range(position + begin, position + end), None, 1, counted_by)
            shares.append((keys or None, (keys, places, end - begin, total)))
        return shares

    def _deal_batches(self, chunk: list[Any], position: int, number: int, epoch: int) -> list[_Share]:
        part = self._part
        shares: list[_Share] = []
        sizes = [_size(batch) for batch in chunk]
        total = None if None in sizes or part.counted_by is not None else sum(size or 0 for size in sizes)
        for rank in part.mine:
            share = part.share_of(rank)
            if share >= len(chunk):
                shares.append((None, (None, Places(range(0)), 0, total)))
                continue
            batch, size = chunk[share], sizes[share]
            first = position + sum(size or 1 for size in sizes[:share])
            keys = [batch] if self._single else list(batch)
            if not self._plain:
                keys = _Indices(keys, mix(BATCH, self._seed, epoch, number + rank), epoch)
            indices = None if size is None else list(batch)
            places = Places(range(first, first + (1 if size is None else size)), rank=part.counted_by)
            shares.append((keys, (indices, places, size, total)))
        return shares


class _WholeBatches(Sampler[Any]):
    """What a sampler gives, without the samples that would not fill a batch."""

    def __init__(self, sampler: Any, batch_size: int) -> None:
        self._sampler, self._batch_size = sampler, batch_size

    def __len__(self) -> int:
        return len(self._sampler) // self._batch_size * self._batch_size

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), len(self))


def equal_share(n: int, ranks: int, rank: int) -> tuple[int, int]:
    """Begin and end of a rank's contiguous share of n; sizes differ by one at most, the larger first."""
    if ranks == 1:
        return 0, n
    size, larger = divmod(n, ranks)
    begin = rank * size + min(rank, larger)
    return begin, begin + size + (rank < larger)


def _size(batch: Any) -> int | None:
    """Number of keys in what a sampler gives for one batch; None when it is one key (of a whole batch)."""
    return None if isinstance(batch, str | bytes) else length(batch)
