"""The three kinds of data, each read for the ranks that this process reads for (private to data.py).

    MapReader      a data set with keys      the order is drawn, dealt to ranks as lists of keys, and fetched
    StreamReader   an IterableDataset        every rank reads the same stream and takes each R-th sample
    BatchesReader  any iterable of batches   whole batches in turn

Within one epoch, on every rank alike:

    MapReader.open
      set_epoch on samplers and data set
      draw the order under generators of its own           (seed, epoch)
      for each round:  the next R x B keys, in R equal contiguous shares
        Fetch (in the worker):  seed (seed, epoch, number of the batch), data set, collate
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from .errors import DataError, NotSupportedError
from .seeding import BATCH, ORDER, READ, WORKERS, Drawing, Generators, mix


class Fetched(NamedTuple):
    """What one rank gets in one round.

    Attributes:
        batch: as the user's collate made it, on the host; None when this rank has nothing in this round.
        indices: the data set's keys of the samples; None when unknown (streams, ready-made batches).
        keys: what to sort all ranks' samples by to get the order in which one process reads: one per sample, or one
            for the batch where its number of samples is unknown.
        size: samples of this rank; None when unknown (ask the task).
        total: samples of the round over all ranks; None when unknown.
    """

    batch: Any | None
    indices: list[Any] | None
    keys: list[tuple[int, ...]]
    size: int | None
    total: int | None


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

    def place(self, rank: int) -> int:
        """Which of the dealt parts goes to a rank."""
        return 0 if self.own else rank

    @property
    def suffix(self) -> tuple[int, ...]:
        """What makes a sort key unique among ranks that number their own data from 0."""
        return (self.rank,) if self.own and self.ranks > 1 else ()


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
    options: dict[str, Any] = field(default_factory=dict)  # num_workers, pin_memory, ...: passed on as they are
    name: str = "train"

    @property
    def workers(self) -> int:
        return int(self.options.get("num_workers", 0))

    def samplers(self) -> list[Any]:
        """The samplers at work, the outermost first, also those that a custom one holds in an attribute."""
        found: list[Any] = []
        queue = [self.sampler if self.batch_sampler is None else self.batch_sampler]
        while queue:
            sampler = queue.pop(0)
            if not any(sampler is other for other in found):
                found.append(sampler)
                queue += [value for value in getattr(sampler, "__dict__", {}).values() if isinstance(value, Sampler)]
        return found


class Reader(ABC):
    """Reads one kind of data. `num_rounds` and the others are as in RankLoader."""

    batch_size: int | None = None

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch, None when unknown."""
        return None

    @property
    def sized(self) -> bool:
        """Whether `num_rounds` is exact and alike on all ranks."""
        return False

    @property
    @abstractmethod
    def num_rounds(self) -> int | None:
        """Rounds of an epoch, None when unknown."""

    @abstractmethod
    def open(self, epoch: int, start_samples: int, limit: int | None) -> Generator[Fetched, None, None]:
        """Read one epoch: for each round one item per rank in `Part.mine`."""

    @abstractmethod
    def close(self) -> None:
        """End persistent workers."""


class Indices(list[Any]):
    """The keys of one batch, with what its fetch needs to know wherever it happens."""

    __slots__ = ("epoch", "seed")

    def __init__(self, keys: Iterable[Any], seed: int, epoch: int) -> None:
        super().__init__(keys)
        self.seed, self.epoch = seed, epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return Indices, (list(self), self.seed, self.epoch)


class Fetch:
    """Data set and collate as one function of `Indices`, under seeds of the batch.

    It stands in both of DataLoader's places, data set and collate_fn, so that one seeding covers both.

    Args:
        single: the loader has batch_size=None: one key is fetched and passed to collate without a list around it.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], single: bool) -> None:
        self.dataset, self._collate, self._single = dataset, collate, single
        self._generators = Generators()
        self._epoch: int | None = None

    def __getitems__(self, indices: Indices) -> Indices:
        return indices

    def __call__(self, indices: Indices) -> Any:
        dataset = self.dataset
        if indices.epoch != self._epoch:
            self._epoch = indices.epoch
            if get_worker_info() is not None:  # the main process has told its own copy already
                set_epoch(dataset, indices.epoch)
        with self._generators.seeded(indices.seed):
            if self._single:
                return self._collate(dataset[indices[0]])
            fetch_all = getattr(dataset, "__getitems__", None)
            return self._collate(fetch_all(indices) if fetch_all else [dataset[key] for key in indices])


class WorkerInit:
    """Show the user's data set in get_worker_info(), where ours would stand, then call the user's worker_init_fn."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        object.__setattr__(info, "dataset", getattr(info, "dataset").dataset)  # noqa: B009 (info is not None here)
        if self._init is not None:
            self._init(worker)


class _Loader:
    """The DataLoader that we build: with a generator of its own (opening it draws from one), and closed for sure."""

    def __init__(self, source: Source, seed: int, rank: int, **parts: Any) -> None:
        self._seed, self._rank = seed, rank
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(generator=self._generator, **parts, **source.options)

    @contextmanager
    def reading(self, epoch: int) -> Iterator[Iterator[Any]]:
        # What worker_init_fn may seed other libraries with (torch.initial_seed() in a worker) follows from this.
        self._generator.manual_seed(mix(WORKERS, self._seed, epoch, self._rank))
        batches = iter(self._loader)
        try:
            yield batches
        finally:
            if not self._loader.persistent_workers:
                _shut_down(batches)

    def close(self) -> None:
        _shut_down(self._loader._iterator)
        self._loader._iterator = None


def _shut_down(batches: Any) -> None:
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


class _Lists:
    """The batch sampler of the loader that we build. DataLoader calls iter() twice an epoch and keeps the second."""

    def __init__(self) -> None:
        self.begin: Callable[[], Iterator[Any]] = lambda: iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


class _Share(NamedTuple):
    """What one rank gets in one round, before it is fetched; `send` goes to the loader, None when there is nothing."""

    send: Any
    indices: list[Any] | None
    first: int
    size: int | None
    total: int | None


class MapReader(Reader):
    """A data set with keys: lists of keys are dealt, so each rank knows every round of the epoch beforehand."""

    def __init__(self, source: Source, part: Part, seed: int, shuffle: bool | None) -> None:
        self._source, self._part, self._seed = source, part, seed
        self._single = source.batch_sampler is None
        self._sampler: Any = source.sampler if self._single else source.batch_sampler
        self._by_samples = type(self._sampler) is BatchSampler and not self._single
        self._drops = self._by_samples and bool(self._sampler.drop_last)
        if self._by_samples:
            self.batch_size = int(self._sampler.batch_size)
            self._sampler = self._sampler.sampler
        self._per_round = part.dealt * (self.batch_size or 1)  # samples; batches where whole batches are dealt
        self._repeat = shuffle is False
        if self._repeat and isinstance(self._sampler, RandomSampler | DistributedSampler):
            self._sampler = range(len(source.dataset))
        self._waiting: deque[_Share] = deque()  # what was sent to the loader and has not come back
        self._lists = _Lists()
        self._plain = not self._single and not _may_draw(source.dataset, source.collate)
        fetch = Fetch(source.dataset, source.collate, self._single)
        self._loader = _Loader(
            source,
            seed,
            part.rank,
            dataset=source.dataset if self._plain else fetch,
            batch_sampler=self._lists,
            collate_fn=source.collate if self._plain else fetch,
            worker_init_fn=source.worker_init if self._plain else WorkerInit(source.worker_init),
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

    def open(self, epoch: int, start_samples: int, limit: int | None) -> Generator[Fetched, None, None]:
        if start_samples and not self.sized:
            raise NotSupportedError(
                f"An epoch of the {self._source.name} loader cannot be continued at sample {start_samples}: the number "
                "of its samples is not known."
            )
        set_epoch(self._source.dataset, epoch)
        shares = self._shares(self._draw(0 if self._repeat else epoch), epoch, start_samples, limit)
        self._lists.begin = lambda: self._send(shares)
        return self._read(epoch)

    def close(self) -> None:
        self._loader.close()

    def _read(self, epoch: int) -> Generator[Fetched, None, None]:
        waiting, suffix = self._waiting, self._part.suffix
        waiting.clear()
        with self._loader.reading(epoch) as batches:
            for batch in batches:
                _, indices, first, size, total = waiting.popleft()
                keys: list[tuple[int, ...]] = list(zip(range(first, first + (1 if size is None else size))))
                if suffix:
                    keys = [key + suffix for key in keys]
                yield Fetched(batch, indices, keys, size, total)
        if self.sized:  # what still waits are the ranks that have nothing in the last round
            for share in waiting:
                yield Fetched(None, [], [], 0, share.total)

    def _send(self, shares: Iterator[_Share]) -> Iterator[Any]:
        for share in shares:
            self._waiting.append(share)
            if share.send is not None:
                yield share.send

    def _draw(self, epoch: int) -> Callable[[int], list[Any]]:
        """Draw the order of one epoch: a function that gives the next n entries of it, fewer at its end."""
        sampler, entries = self._sampler, length(self._sampler)
        owners = self._source.samplers()
        for owner in owners:
            set_epoch(owner, epoch)
        drawing = Drawing(owners, mix(ORDER, self._seed, epoch))
        if entries is None:
            with drawing:
                endless = iter(sampler)

            def take(n: int) -> list[Any]:
                with drawing:
                    return list(islice(endless, n))

            return take
        with drawing:
            order = iter(sampler)
            drawn = list(islice(order, entries))
            more = next(order, None) is not None
        self._check_length(entries, len(drawn), more)
        rest = iter(drawn)
        return lambda n: list(islice(rest, n))

    def _check_length(self, entries: int, drawn: int, more: bool) -> None:
        """A length that is not true would let ranks, schedules and the last window disagree."""
        name = type(self._sampler).__name__
        if drawn < entries:
            raise DataError(
                f"The sampler {name} of the {self._source.name} loader has length {entries} but gave {drawn}. "
                "Correct its __len__, or remove it: a loader of unknown length works too."
            )
        if more:
            warn(
                f"The sampler {name} of the {self._source.name} loader gives more than its length {entries}; "
                "an epoch ends there.",
                stacklevel=2,
            )

    def _shares(
        self, take: Callable[[int], list[Any]], epoch: int, start_samples: int, limit: int | None
    ) -> Iterator[_Share]:
        position, number, chunk = self._skip(take, start_samples)
        deal = self._deal_samples if self._by_samples else self._deal_batches
        for _ in count() if limit is None else range(limit):
            chunk += take(self._per_round - len(chunk))
            if not chunk or (self._drops and len(chunk) < self._per_round):
                return
            yield from deal(chunk, position, number, epoch)
            position += sum(_size(entry) or 1 for entry in chunk) if not self._by_samples else len(chunk)
            number += self._part.ranks
            chunk = []

    def _skip(self, take: Callable[[int], list[Any]], start: int) -> tuple[int, int, list[Any]]:
        """Leave out the samples that are used up. Returns the position, the number of the next batch, and, of a whole
        batch that was used in part, what is left.
        """
        if self._by_samples:
            assert self.batch_size is not None
            return len(take(start)), -(-start // self.batch_size), []
        position, number = 0, 0
        while position < start and (entries := take(1)):
            size = _size(entries[0])
            if size is None:
                raise NotSupportedError(
                    f"An epoch of the {self._source.name} loader cannot be continued at sample {start}: with "
                    "batch_size=None the number of samples of a batch is not known."
                )
            if position + size > start:
                return start, number, [entries[0][start - position :]]
            position, number = position + size, number + 1
        return position, number, []

    def _deal_samples(self, chunk: list[Any], position: int, number: int, epoch: int) -> Iterator[_Share]:
        part = self._part
        total = None if part.suffix else len(chunk)
        for rank in part.mine:
            begin, end = equal_share(len(chunk), part.dealt, part.place(rank))
            keys = chunk[begin:end]
            if not self._plain:
                keys = Indices(keys, mix(BATCH, self._seed, epoch, number + rank), epoch)
            yield _Share(keys or None, keys, position + begin, len(keys), total)

    def _deal_batches(self, chunk: list[Any], position: int, number: int, epoch: int) -> Iterator[_Share]:
        part = self._part
        sizes = [_size(entry) for entry in chunk]
        known = None if None in sizes or part.suffix else sum(size or 0 for size in sizes)
        for rank in part.mine:
            place = part.place(rank)
            if place >= len(chunk):
                yield _Share(None, None, 0, 0, known)
                continue
            entry, first = chunk[place], position + sum(size or 1 for size in sizes[:place])
            keys = [entry] if self._single else list(entry)
            if not self._plain:
                keys = Indices(keys, mix(BATCH, self._seed, epoch, number + rank), epoch)
            indices = keys if not self._single else None if sizes[place] is None else list(entry)
            yield _Share(keys, indices, first, sizes[place], known)


class Stream(IterableDataset[tuple[int, int, int, Any]]):
    """Reads an IterableDataset, in whichever process, and forms this rank's batches.

    Every rank reads the same stream, so what the data set draws is seeded alike on all; collate is seeded by rank.

    Yields:
        (worker, first, end, batch): the batch holds the samples range(first, end, R) of that worker's stream.
    """

    def __init__(self, source: Source, part: Part, seed: int) -> None:
        self.dataset, self._collate = source.dataset, source.collate
        self._batch_size, self._drops = source.batch_size, source.drop_last
        self._part, self._seed = part, seed
        self._draws = source.collate is not default_collate
        self._generators = Generators()
        # Shared memory: persistent workers hold a copy of this object from an earlier epoch.
        self.epoch_and_limit = torch.zeros(2, dtype=torch.int64)
        if source.workers:
            self.epoch_and_limit.share_memory_()

    def __iter__(self) -> Iterator[tuple[int, int, int, Any]]:
        part, info = self._part, get_worker_info()
        worker = 0 if info is None else info.id
        epoch, limit = self.epoch_and_limit.tolist()
        if info is not None:
            set_epoch(self.dataset, epoch)
        ranks, mine = part.dealt, part.place(part.rank)
        per_round = ranks * (self._batch_size or 1)
        samples: Iterator[Any] | None = None
        for k in range(limit):
            seed = mix(READ, self._seed, epoch, worker, k, part.rank if part.own else -1)
            with self._generators.seeded(seed):
                samples = iter(self.dataset) if samples is None else samples
                kept, n = self._keep(islice(samples, per_round), ranks, mine)
                if not kept or (self._drops and n < per_round):
                    return
                if self._draws:
                    self._generators.reseed(mix(BATCH, self._seed, epoch, worker, k, part.rank))
                batch = self._collate(kept if self._batch_size else kept[0])
            yield worker, k * per_round + mine, k * per_round + n, batch
            if n < per_round:
                return

    @staticmethod
    def _keep(samples: Iterator[Any], ranks: int, mine: int) -> tuple[list[Any], int]:
        kept, n = [], 0
        for n, sample in enumerate(samples, start=1):
            if (n - 1) % ranks == mine:
                kept.append(sample)
        return kept, n


class StreamReader(Reader):
    """An IterableDataset. A rank's stream may end before another's, so ranks must agree about the end."""

    def __init__(self, source: Source, part: Part, seed: int) -> None:
        self._source, self._part = source, part
        self.batch_size = source.batch_size
        self._stream = Stream(source, part, seed)
        self._loader = _Loader(
            source,
            seed,
            part.rank,
            dataset=self._stream,
            batch_size=None,
            collate_fn=_as_it_is,
            worker_init_fn=WorkerInit(source.worker_init),
        )

    @property
    def num_samples(self) -> int | None:
        return None if self._part.suffix else length(self._source.dataset)

    @property
    def num_rounds(self) -> int | None:
        samples = length(self._source.dataset)
        if samples is None or self._source.workers > 1:
            return None
        per_round = self._part.dealt * (self.batch_size or 1)
        return samples // per_round if self._source.drop_last else -(-samples // per_round)

    def open(self, epoch: int, start_samples: int, limit: int | None) -> Generator[Fetched, None, None]:
        if start_samples:
            raise NotSupportedError(
                f"An epoch of the {self._source.name} loader cannot be continued at sample {start_samples}: a stream "
                "has no position to go to."
            )
        set_epoch(self._source.dataset, epoch)
        self._stream.epoch_and_limit.copy_(torch.tensor([epoch, _FOR_EVER if limit is None else limit]))
        return self._read(epoch, limit)

    def close(self) -> None:
        self._loader.close()

    def _read(self, epoch: int, limit: int | None) -> Generator[Fetched, None, None]:
        part, size = self._part, self.batch_size
        suffix = part.suffix
        with self._loader.reading(epoch) as batches:
            for worker, first, end, batch in islice(batches, limit):
                positions = range(first, end, part.dealt)
                if size is None:
                    yield Fetched(batch, None, [(first, worker, 0, *suffix)], None, None)
                    continue
                keys: list[tuple[int, ...]] = [(p // size, worker, p % size, *suffix) for p in positions]
                yield Fetched(batch, None, keys, len(keys), len(keys) if part.ranks == 1 else None)


class BatchesReader(Reader):
    """Any iterable of ready batches: batch k goes to rank k % R. A list is indexed; all else every rank reads whole."""

    def __init__(self, batches: Any, part: Part, seed: int, name: str) -> None:
        self._batches, self._part, self._seed, self._name = batches, part, seed, name
        self._read_once = isinstance(batches, Iterator)
        size = getattr(batches, "batch_size", None)
        self.batch_size = size if isinstance(size, int) else None

    @property
    def sized(self) -> bool:
        return length(self._batches) is not None and (self._part.ranks == 1 or not self._part.own)

    @property
    def num_rounds(self) -> int | None:
        batches = length(self._batches)
        return None if batches is None else -(-batches // self._part.dealt)

    def open(self, epoch: int, start_samples: int, limit: int | None) -> Generator[Fetched, None, None]:
        if start_samples:
            raise NotSupportedError(
                f"An epoch of the {self._name} loader cannot be continued at sample {start_samples}: it is an iterable "
                "of batches of unknown size. Give a DataLoader."
            )
        if self._batches is None:
            raise DataError(
                f"The {self._name} loader is an iterator, which can be read only once. Give a list, a DataLoader or an "
                "object whose __iter__ begins anew."
            )
        set_epoch(self._batches, epoch)
        batches = self._batches
        if self._read_once:
            self._batches = None
        return self._read(batches, epoch, limit)

    def close(self) -> None:
        _shut_down(getattr(self._batches, "_iterator", None))

    def _read(self, batches: Any, epoch: int, limit: int | None) -> Generator[Fetched, None, None]:
        part, end, position = self._part, length(batches), 0
        rounds = None if end is None else -(-end // part.dealt)
        rounds = limit if rounds is None else rounds if limit is None else min(rounds, limit)
        if isinstance(batches, list | tuple):
            generators, iterator = None, None
        else:
            generators = Generators(resumable=True).seeded(mix(READ, self._seed, epoch, part.rank if part.own else -1))
            with generators:
                iterator = iter(batches)
        try:
            for k in count() if rounds is None else range(rounds):
                for rank in part.mine:
                    number = k * part.dealt + part.place(rank)
                    if end is not None and number >= end:
                        yield Fetched(None, [], [], 0, None)
                        continue
                    if generators is None or iterator is None:
                        batch = batches[number]
                    else:
                        with generators:
                            batch = next(islice(iterator, number - position, None), _END)
                        position = number + 1
                    if batch is _END:
                        self._check_end(end)
                        return
                    yield Fetched(batch, None, [(number, *part.suffix)], None, None)
        finally:
            if not getattr(batches, "persistent_workers", False):
                _shut_down(iterator)

    def _check_end(self, end: int | None) -> None:
        if end is not None:
            raise DataError(
                f"The {self._name} loader has length {end} but gave fewer batches. Correct its __len__, or remove it: "
                "a loader of unknown length works too."
            )


_END: Any = object()
_FOR_EVER = (1 << 63) - 1


def _as_it_is(batch: Any) -> Any:
    return batch


def length(sized: Any) -> int | None:
    """len() where there is one that works."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def set_epoch(target: Any, epoch: int) -> None:
    """Tell a sampler or data set the epoch, where it wants to know."""
    tell = getattr(target, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def equal_share(n: int, ranks: int, rank: int) -> tuple[int, int]:
    """Begin and end of a rank's contiguous share of n; sizes differ by one at most, the larger first."""
    size, larger = divmod(n, ranks)
    begin = rank * size + min(rank, larger)
    return begin, begin + size + (rank < larger)


def _size(entry: Any) -> int | None:
    return len(entry) if isinstance(entry, list | tuple) else length(entry) if not isinstance(entry, str) else None


def _may_draw(dataset: Any, collate: Any) -> bool:
    """Whether fetching can use random numbers. Only what surely cannot is spared the seeding (0.06 ms a batch)."""
    if collate is not default_collate:
        return True
    if type(dataset) is Subset:
        return _may_draw(dataset.dataset, collate)
    if type(dataset) is ConcatDataset:
        return any(_may_draw(part, collate) for part in dataset.datasets)
    return type(dataset) is not TensorDataset
