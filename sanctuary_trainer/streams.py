"""How one rank reads data without keys: a stream, in whichever process, or ready batches (private to data.py).

StreamReader.open(epoch)
  Stream, in whichever process:  for each round of this worker
    R x B samples, the same on every rank, under                    (READ, seed, epoch, worker, round)
    each R-th is this rank's; collate under                         (BATCH, seed, epoch, worker, round, rank)

BatchesReader.open(epoch)
  for each batch, on every rank:  next() under                      (READ, seed, epoch, number of the batch)
    each R-th is this rank's

Both continue an epoch
  from a state      that a data set or loader with torch's protocol (state_dict, load_state_dict) gave after each round
  by reading again  what is used up, under the seeds that it was read under, else
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple
from warnings import warn

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from sanctuary_trainer.errors import DataError
from sanctuary_trainer.iterated import Iterated, plain, warn_of_reading_again
from sanctuary_trainer.owners import length, set_epoch, tell_again
from sanctuary_trainer.reading import (
    BEGINNING,
    NONE,
    Fetched,
    Loader,
    Part,
    Places,
    Reader,
    Source,
    Start,
    WorkerInit,
    nothing,
    shut_down,
    workers_apart,
)
from sanctuary_trainer.seeding import BATCH, READ, Generators, mix

_FOR_EVER = (1 << 63) - 1


class _Place(NamedTuple):
    """Where the stream of one worker stands.

    Attributes:
        rounds: rounds that it gave.
        samples: samples that it gave to all ranks.
        state: of the data set and of its iterator; None where they have none.
        sizes: (rounds, samples of a full one), in the order in which they were read; more than one where the number
            of ranks or the batch size changed.
    """

    rounds: int = 0
    samples: int = 0
    state: Any = None
    sizes: tuple[tuple[int, int], ...] = ()

    def after(self, end: int, per_round: int, state: Any) -> _Place:
        """Where it stands when it has given another round, up to sample `end`."""
        former, (rounds, size) = self.sizes[:-1], self.sizes[-1] if self.sizes else (0, per_round)
        if size != per_round:
            former, rounds = self.sizes, 0
        return _Place(self.rounds + 1, end, state, (*former, (rounds + 1, per_round)))

    @property
    def ended(self) -> bool:
        """Whether its last round was not full."""
        return self.samples < sum(rounds * size for rounds, size in self.sizes)


_FIRST = _Place()


class Stream(IterableDataset[tuple[int, int, Any, bytes | None]]):
    """Reads an IterableDataset, in whichever process, and forms this rank's batches.

    Every rank reads the same stream, so what the data set draws is seeded alike on all; collate is seeded by rank.

    Yields:
        (worker, end, batch, state): the batch holds each R-th sample of that worker's stream, up to `end`; none where
        other ranks have the last ones and another worker's round follows. The state is the data set's after it.
    """

    def __init__(self, source: Source, part: Part, seed: int) -> None:
        self.dataset, self._collate = source.dataset, source.collate
        self._batch_size, self._drops = source.batch_size, source.drop_last
        self._part, self._seed, self._keeps_state = part, seed, source.name == "train"
        self.datasets = source.datasets()
        self._generators = Generators([*self.datasets, source.collate])
        self._data = Iterated(source.dataset)
        self.places: dict[int, _Place] = {}  # where each worker begins, in an epoch that is continued
        # Shared memory: persistent workers hold a copy of this object from an earlier epoch.
        self.epoch_and_limit = RawArray("q", 2)
        self.samples_read = RawArray("q", max(1, source.options["num_workers"]))  # by each worker to its end; else -1

    def __iter__(self) -> Iterator[tuple[int, int, Any, bytes | None]]:
        part, info = self._part, get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch, limit = self.epoch_and_limit
        ranks, mine = part.dealt, part.share_of(part.rank)
        per_round = ranks * (self._batch_size or 1)
        place, data = self.places.get(worker, _FIRST), self._data
        seed, end = partial(self._seed_of, epoch, worker), place.samples
        samples = iter(()) if place.ended else self._begun(place, epoch, seed)
        for k in range(place.rounds, place.rounds + limit):
            self._tell(epoch, anew=k <= place.rounds + 1)
            with self._generators.seeded(seed(0 if samples is None else k)):
                if samples is None:
                    samples = data.open() if place.state is None else self._going_on(place.state, seed(k))
                kept, n = _each(ranks, mine, islice(samples, per_round))
                end += n
                if n < per_round:
                    self.samples_read[worker], data.left = end, False
                if n == 0 or (self._drops and n < per_round) or not (kept or workers > 1):
                    return
                state, batch = data.state() if self._keeps_state else None, None
                if kept:
                    if self._collate is not default_collate:
                        self._generators.reseed(mix(BATCH, self._seed, epoch, worker, k, part.rank))
                    batch = self._collate(kept if self._batch_size else kept[0])
            yield worker, end, batch, state
            if n < per_round:
                return

    def _seed_of(self, epoch: int, worker: int, k: int) -> int:
        return mix(READ, self._seed, epoch, worker, k, self._part.rank if self._part.own else -1)

    def _tell(self, epoch: int, anew: bool) -> None:
        if tell_again(self.datasets, epoch) or anew:
            self._generators.look_up_anew()

    def _begun(self, place: _Place, epoch: int, seed: Callable[[int], int]) -> Iterator[Any] | None:
        """Read again what is used up, where no state tells where that ends; None where nothing is begun yet."""
        if place.state is not None or not place.rounds:
            return None
        numbers, n = iter(range(place.rounds)), 0
        samples: Iterator[Any] | None = None
        for rounds, size in place.sizes:
            for k in islice(numbers, rounds):
                self._tell(epoch, anew=k == 0)
                with self._generators.seeded(seed(k)):
                    samples = self._data.open() if samples is None else samples
                    n += sum(1 for _ in islice(samples, size))
        if n != place.samples:
            raise DataError(
                f"The data set {type(self.dataset).__name__} gave {n} samples where it gave {place.samples} before. "
                "Give the former data, or resume from the end of an epoch."
            )
        return samples

    def _going_on(self, state: Any, now: int) -> Iterator[Any]:
        """Read on from a state; begun inside `with`, under the seed under which the iteration once began.

        An order is drawn when an iteration begins, which for most is with its first sample, and mostly from a
        generator that the data set holds: it has to be drawn again as it was. So these go over to the seed of the
        present round after the first sample, the global ones before it.
        """
        samples = self._data.open(state)
        self._generators.reseed(now, held=False)
        for sample in samples:
            self._generators.reseed(now, globally=False)
            yield sample
            break
        yield from samples


def _each(ranks: int, mine: int, samples: Iterable[Any]) -> tuple[list[Any], int]:
    """Keep each `ranks`-th sample, from the one numbered `mine`; also count them all."""
    kept, n = [], 0
    for n, sample in enumerate(samples, start=1):
        if (n - 1) % ranks == mine:
            kept.append(sample)
    return kept, n


class StreamReader(Reader):
    """An IterableDataset (`same_order`: as in epoch 0, always). Ranks' streams end apart: they must agree on it."""

    sized = False

    def __init__(self, source: Source, part: Part, seed: int, same_order: bool) -> None:
        self._source, self._part, self._same_order, self._warned = source, part, same_order, False
        self.batch_size = source.batch_size
        self._workers: int = source.options["num_workers"]
        self._stream = Stream(source, part, seed)
        self._init = WorkerInit(source.worker_init)
        self._loader = Loader(
            source,
            seed,
            part.rank,
            dataset=self._stream,
            batch_size=None,
            collate_fn=_as_it_is,
            worker_init_fn=self._init,
        )

    @property
    def num_samples(self) -> int | None:
        return length(self._source.dataset) if self._part.counted_by is None else None

    @property
    def num_rounds(self) -> int | None:
        samples = length(self._source.dataset)
        if samples is None or self._workers > 1:  # each worker has an incomplete round
            return None
        per_round = self._part.dealt * (self.batch_size or 1)
        return samples // per_round if self._source.drop_last else -(-samples // per_round)

    def drawing(self) -> list[Any]:
        return self._source.datasets()

    def open(self, epoch: int, start: Start, limit: int | None) -> Generator[Fetched, None, None]:
        continues, (last, places) = start != BEGINNING, self._saved(start)
        if continues:  # persistent workers begin in another order, with places of their own
            self.close()
        self._stream.places = places
        self._init.first = 0 if last is None else (last + 1) % max(1, self._workers)
        epoch = 0 if self._same_order else epoch
        set_epoch(self._stream.datasets, epoch)
        self._stream.samples_read[:] = [-1] * len(self._stream.samples_read)
        self._stream.epoch_and_limit[:] = [epoch, _FOR_EVER if limit is None else limit]
        return self._read(epoch, limit, continues)

    def close(self) -> None:
        self._loader.close()

    def _saved(self, start: Start) -> tuple[int | None, dict[int, _Place]]:
        """The worker that gave the last round, and the place of each."""
        name = self._source.name
        saved = self._part.saved(start, "stream", name)
        if saved is None:
            if start == BEGINNING:
                return None, {}
            raise DataError(
                f"The {name} loader reads a stream, and where it stood after {start.samples} samples was not saved. "
                "Resume from the end of an epoch."
            )
        before = saved["workers"]
        if max(1, before) != max(1, self._workers):
            raise DataError(
                f"The {name} loader read its stream with num_workers={before}, and now has {self._workers}: its rest "
                f"is of another order. Give num_workers={before}, or resume from the end of an epoch."
            )
        places = {worker: _Place(*place) for worker, place in saved["places"].items()}
        again = sum(place.samples for place in places.values() if place.state is None and not place.ended)
        if again and (self._part.own or self._part.rank == 0):
            what = f"data set {type(self._source.dataset).__name__}"
            warn_of_reading_again(what, name, again, "samples")
        return saved["last"], places

    def _read(self, epoch: int, limit: int | None, continues: bool) -> Generator[Fetched, None, None]:
        part, places = self._part, self._stream.places
        per_round = part.dealt * (self.batch_size or 1)
        try:
            with self._loader.reading(epoch, patient=continues) as batches:
                for worker, end, batch, state in islice(batches, limit):
                    before = places.get(worker, _FIRST)
                    places = {**places, worker: before.after(end, per_round, state)}
                    reached = partial(self._plain, worker, places)
                    positions = range(before.samples + part.share_of(part.rank), end, part.dealt)
                    if not positions:
                        yield nothing(None, reached)
                        continue
                    key = Places(positions, worker, self.batch_size or 1, part.counted_by)
                    size = None if self.batch_size is None else len(positions)
                    yield Fetched(batch, None, key, size, size if part.ranks == 1 else None, reached)
        finally:
            if continues:
                self.close()
                self._stream.places, self._init.first = {}, 0
        self._check_length(self._stream.samples_read[:])

    def _plain(self, last: int, places: dict[int, _Place]) -> dict[str, Any]:
        each = {worker: tuple(place._replace(state=plain(place.state))) for worker, place in places.items()}
        return self._part.to_save("stream", workers=self._workers, last=last, places=each)

    def _check_length(self, read: list[int]) -> None:
        expected = length(self._source.dataset)
        if expected in (None, sum(read)) or -1 in read or self._warned:
            return
        self._warned = True
        data = f"The data set {type(self._source.dataset).__name__} of the {self._source.name} loader"
        told = (
            f"{data} has length {expected} but gave {sum(read)} samples in an epoch, so that rounds and schedules that"
        )
        warn(f"{told} follow its length are wrong. Correct its __len__, or what a worker reads.", stacklevel=2)


def _as_it_is(batch: Any) -> Any:
    return batch


class BatchesReader(Reader):
    """Any iterable of ready batches: batch k goes to rank k % R. A list is indexed; all else every rank reads whole.

    Args:
        same_order: read every epoch as epoch 0.
    """

    def __init__(self, batches: Any, part: Part, seed: int, name: str, same_order: bool) -> None:
        self._batches, self._part, self._seed, self._name = batches, part, seed, name
        self._same_order = same_order
        size = getattr(batches, "batch_size", None)
        self.batch_size = size if isinstance(size, int) else None
        self._read_before = False
        self._generators = Generators(self.drawing())
        self._data = Iterated(batches, once=True)

    @property
    def sized(self) -> bool:
        return length(self._batches) is not None and (self._part.ranks == 1 or not self._part.own)

    @property
    def num_rounds(self) -> int | None:
        batches = length(self._batches)
        return None if batches is None else -(-batches // self._part.dealt)

    def rounds_left(self, epoch: int, start: Start) -> int | None:
        batches = length(self._batches)
        return None if batches is None else -(-max(0, batches - self._saved(start)[0]) // self._part.dealt)

    def drawing(self) -> list[Any]:
        """What of a loader with an __iter__ of its own may hold an epoch or a generator."""
        return [
            self._batches,
            *(getattr(self._batches, part, None) for part in ("batch_sampler", "sampler", "dataset")),
        ]

    def open(self, epoch: int, start: Start, limit: int | None) -> Generator[Fetched, None, None]:
        used, read, state = self._saved(start)
        if self._read_before and isinstance(self._batches, Iterator):
            raise DataError(
                f"The {self._name} loader is an iterator, which can be read only once. Give a list, a DataLoader or an "
                "object whose __iter__ begins anew."
            )
        self._read_before = True
        if used > read and state is None and not self._listed and (self._part.own or self._part.rank == 0):
            warn_of_reading_again(type(self._batches).__name__, self._name, used, "batches")
        epoch = 0 if self._same_order else epoch
        set_epoch(self.drawing(), epoch)
        rounds = self.rounds_left(epoch, start)
        if limit is not None:
            rounds = limit if rounds is None else min(limit, rounds)
        return self._read(epoch, rounds, used, read, state)

    def close(self) -> None:
        shut_down(getattr(self._batches, "_iterator", None))

    @property
    def _listed(self) -> bool:
        return isinstance(self._batches, list | tuple)

    def _saved(self, start: Start) -> tuple[int, int, Any]:
        """How many batches are used up on all ranks, after how many this rank's state was taken, and the state."""
        saved = self._part.saved(start, "batches", self._name)
        if saved is None:
            return start.rounds * self._part.dealt, 0, None
        return saved["used"], saved["read"], saved["state"]

    def _read(self, epoch: int, rounds: int | None, used: int, read: int, state: Any) -> Generator[Fetched, None, None]:
        part, end = self._part, length(self._batches)
        with self._opened(epoch, read, state) as (batch_at, state_now):
            for _ in count() if rounds is None else range(rounds):
                first, used = used, used + part.dealt if end is None else min(end, used + part.dealt)
                for rank in part.mine:
                    number = first + part.share_of(rank)
                    batch = NONE if end is not None and number >= end else batch_at(number)
                    if batch is NONE and (end is None or number < end):
                        self._check_end(number)
                        return
                    if batch is not NONE:
                        state = state_now()
                        read = 0 if state is None else number + 1
                    if used == end and not self._listed:
                        batch_at(end)  # many a loader begins anew only when it was read to its end
                    reached = partial(self._plain, used, read, state)
                    if batch is NONE:
                        yield nothing(None, reached)
                        continue
                    places = Places(range(number, number + 1), rank=part.counted_by)
                    yield Fetched(batch, None, places, None, None, reached)

    def _plain(self, used: int, read: int, state: Any) -> dict[str, Any]:
        return self._part.to_save("batches", used=used, read=read, state=plain(state))

    @contextmanager
    def _opened(
        self, epoch: int, read: int, state: Any
    ) -> Iterator[tuple[Callable[[int], Any], Callable[[], bytes | None]]]:
        """Begin an epoch, or go on where `read` batches are read.

        Gives a function that reads on to the batch of a number, NONE after the last, and one that tells the state.
        """
        if self._listed:
            yield self._batches.__getitem__, lambda: None
            return
        own = self._part.rank if self._part.own else -1
        generators, drawing, data = self._generators, self.drawing(), self._data
        generators.look_up_anew()
        iterator: Iterator[Any] | None = None

        def batch_at(number: int) -> Any:
            nonlocal iterator, read
            batch = None
            while read <= number and batch is not NONE:
                tell_again(drawing, epoch)
                now = mix(READ, self._seed, epoch, own, read)
                with generators.seeded(mix(READ, self._seed, epoch, own, 0) if iterator is None else now):
                    if iterator is None:
                        iterator = data.open(state)
                        if read:
                            generators.reseed(now, held=False)  # see Stream._going_on
                    batch = next(iterator, NONE)
                read += 1
            data.left = batch is not NONE
            return batch

        try:
            with workers_apart(self._batches):
                yield batch_at, data.state if self._name == "train" else lambda: None
        finally:
            if not getattr(self._batches, "persistent_workers", False):
                shut_down(iterator)

    def _check_end(self, batches: int) -> None:
        expected = length(self._batches)
        if expected is not None:
            raise DataError(
                f"The {self._name} loader has length {expected} but gave at most {batches} batches. Correct its "
                "__len__, or remove it: a loader of unknown length works too."
            )
