"""An epoch that is continued gives what the uninterrupted one would have given: samples, order, and what they draw.

Ranks are simulated as in test_data.py, each with a Feed; what a feed tells of its position is stored as a checkpoint
stores it, and the rest is read by fresh loaders of fresh data.
"""

import json
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler, get_worker_info

from sanctuary_trainer.checkpointing import decode, encode
from sanctuary_trainer.data import BEGINNING, RankLoader, Start
from sanctuary_trainer.errors import DataError
from sanctuary_trainer.feed import Feed, limited

from .test_data import (
    Buckets,
    Numbers,
    OwnSharding,
    Ring,
    Rows,
    Stream,
    collate_drawing,
    drawing_loader,
    draws,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes"),
    pytest.mark.filterwarnings("ignore:.*drops the .* that are used up"),
    pytest.mark.filterwarnings("ignore:The sampler OwnSharding"),
]
CPU = torch.device("cpu")
Make = Callable[[int], Any]  # the loader of a rank


def stored(reached: Any) -> Any:
    """What comes back from a checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    return decode(json.loads(json.dumps(encode(reached, tensors))), tensors)


def as_text(starts: list[Start]) -> str:
    """To compare by, tensors included."""
    tensors: dict[str, torch.Tensor] = {}
    return json.dumps([encode(starts, tensors), {name: tensor.tolist() for name, tensor in tensors.items()}])


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def make_loaders(make: Make, ranks: int, **kwargs: Any) -> list[RankLoader]:
    return [RankLoader(make(rank), rank=rank, world_size=ranks, seed=5, **kwargs) for rank in range(ranks)]


class Reading:
    """One epoch on all ranks, round by round.

    Attributes:
        rounds: for each round, what each rank was given: its batch, "-" for none; a rank that has ended is not in it.
        starts: for each round done, the `Start` of every rank.
    """

    def __init__(
        self, loaders: list[RankLoader], epoch: int, starts: list[Start] | None = None, limit: int | None = None
    ) -> None:
        starts = [BEGINNING] * len(loaders) if starts is None else starts
        feeds = [
            Feed(loader, CPU, epoch=epoch, start=start, limit=limit)
            for loader, start in zip(loaders, starts, strict=True)
        ]
        self.rounds: list[dict[int, Any]] = []
        self.starts = [starts]
        samples, done = starts[0][:2]
        for feed, start in zip(feeds, starts, strict=True):
            assert as_text([start]) == as_text([start._replace(reached=feed.reached)])
        for loader, start, feed in zip(loaders, starts, feeds, strict=True):
            left = loader.rounds_left(epoch, start)
            assert feed.rounds == (limited(left, limit) if loader.sized else None)
        while any(feed.more for feed in feeds):
            given = {rank: feed.take() for rank, feed in enumerate(feeds) if feed.more}
            self.rounds.append({rank: "-" if each.batch is None else plain(each.batch) for rank, each in given.items()})
            done += 1
            samples += sum(len(batch) for batch in self.rounds[-1].values() if isinstance(batch, list))
            self.starts.append([Start(samples, done, stored(feed.reached)) for feed in feeds])
        for feed in feeds:
            feed.close()

    @property
    def samples(self) -> list[Any]:
        return samples_of(self.rounds)


def samples_of(rounds: list[dict[int, Any]]) -> list[Any]:
    return [sample for given in rounds for batch in given.values() if batch != "-" for sample in batch]


def same_rounds(make: Make, ranks: int, limit: int | None = None, **kwargs: Any) -> Reading:
    """Continue an epoch after each of its rounds, and read the next one too."""
    loaders = make_loaders(make, ranks, **kwargs)
    whole, after = Reading(loaders, 1, limit=limit), Reading(loaders, 2, limit=limit)
    assert len(whole.rounds) > 1
    for done, starts in enumerate(whole.starts):
        left = None if limit is None else limit - done
        loaders = make_loaders(make, ranks, **kwargs)
        rest = Reading(loaders, 1, starts, left)
        assert [given for given in rest.rounds if given] == whole.rounds[done:], done
        assert list(map(as_text, rest.starts)) == list(map(as_text, whole.starts[done:])), done
        if done != 1:  # after one is enough, for the time it takes
            continue
        assert Reading(loaders, 2, limit=limit).rounds == after.rounds, done
    for loader in loaders:
        loader.close()
    return whole


# --- keys ---


class Remembering(Numbers):
    """Remembers over all its objects what was read."""

    ever: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.ever.append(index)
        return super().__getitem__(index)


class Ended(Sampler[int]):
    """A sampler that has no length."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(22))
        random.shuffle(order)
        yield from order


KEYS: dict[str, Make] = {
    "shuffled": lambda rank: DataLoader(Remembering(22), 3, shuffle=True),
    "sampler without length": lambda rank: DataLoader(Remembering(22), 3, sampler=Ended()),
    "batch sampler": lambda rank: DataLoader(Remembering(22), batch_sampler=Buckets([3, 1, 4, 1, 5, 2, 6])),
    "drawing": lambda rank: drawing_loader(22),
    "drawing in workers": lambda rank: drawing_loader(22, num_workers=2, persistent_workers=True),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KEYS)
def test_keys_are_continued_by_the_samples_used(kind: str, ranks: int) -> None:
    whole = same_rounds(KEYS[kind], ranks)
    assert {start.reached for starts in whole.starts for start in starts} == {None}


@pytest.mark.parametrize("kind", [kind for kind in KEYS if "drawing" not in kind])
def test_keys_that_are_used_up_are_not_read_again(kind: str) -> None:
    whole = Reading(make_loaders(KEYS[kind], 2), 1)
    for starts in whole.starts:
        Remembering.ever.clear()
        rest = Reading(make_loaders(KEYS[kind], 2), 1, starts)
        assert sorted(Remembering.ever) == sorted(rest.samples)


class RememberingRows(Rows):
    """One key is a ready batch, whose size nobody knows before it is read."""

    ever: list[int] = []

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.ever.append(index)
        return torch.tensor([index, *draws()])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ready_batches_under_keys_are_continued_by_their_number_and_not_read_again(ranks: int) -> None:
    def make(rank: int) -> Any:
        return DataLoader(RememberingRows(), batch_size=None, shuffle=True)

    whole = same_rounds(make, ranks)
    assert len(whole.rounds) == -(-21 // ranks)
    for done, starts in enumerate(whole.starts):
        RememberingRows.ever.clear()
        Reading(make_loaders(make, ranks), 1, starts)
        assert len(RememberingRows.ever) == max(0, 21 - done * ranks)
    sampler = BatchSampler(SequentialSampler(Rows()), 4, False)
    same_rounds(lambda rank: DataLoader(Rows(), batch_size=None, sampler=sampler), ranks)  # lists of keys tell the size


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("before", [1, 2, 3])
def test_ready_batches_under_keys_go_on_on_other_ranks(before: int, after: int) -> None:
    def make(rank: int) -> Any:
        return DataLoader(RememberingRows(), batch_size=None, shuffle=True)

    whole = Reading(make_loaders(make, before), 1)
    alone = [batch for given in Reading(make_loaders(make, 1), 1).rounds for batch in given.values()]
    for done, starts in enumerate(whole.starts):
        rest = Reading(make_loaders(make, after), 1, [starts[0]] * after)
        batches = [b for given in (*whole.rounds[:done], *rest.rounds) for b in given.values() if b != "-"]
        assert batches == alone


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("kind", [kind for kind in KEYS if "drawing" not in kind])
def test_keys_go_on_on_other_ranks(kind: str, before: int, after: int) -> None:
    make = KEYS[kind]
    whole, alone = Reading(make_loaders(make, before), 1), Reading(make_loaders(make, 1), 1).samples
    for done, starts in enumerate(whole.starts):
        rest = Reading(make_loaders(make, after), 1, [starts[0]] * after)
        assert [*samples_of(whole.rounds[:done]), *rest.samples] == alone


# --- data of each rank's own ---


class Own(OwnSharding):
    """Deals by itself, in an order of its own."""


def own_keys(rank: int, ranks: int) -> Any:
    data = Remembering(31)
    return DataLoader(data, 3, sampler=Own(data, num_replicas=ranks, rank=rank))


def own_batches(rank: int, ranks: int) -> Any:
    return DataLoader(Numbers(31), batch_sampler=Buckets([3, 1, 4 - rank, 1, 5, 2][rank:]))


def own_rows(rank: int, ranks: int) -> Any:
    return DataLoader(RememberingRows(), batch_size=None, sampler=range(rank, 21 - rank, ranks))


def own_drawing(rank: int, ranks: int) -> Any:
    return drawing_loader(22)


def own_stream(rank: int, ranks: int) -> Any:
    return DataLoader(Stream(16 - 6 * rank, noise=True), 3, collate_fn=collate_drawing, num_workers=2 * (rank == 0))


def own_ready(rank: int, ranks: int) -> Any:
    return ReadyBatches(7 + rank)


OWN = {"keys": own_keys, "batches": own_batches, "rows": own_rows, "drawing": own_drawing}
OWN |= {"stream": own_stream, "ready batches": own_ready}


@pytest.mark.parametrize("kind", OWN)
def test_each_rank_goes_on_in_data_of_its_own(kind: str) -> None:
    for ranks in (1, 2, 3):
        same_rounds(partial(OWN[kind], ranks=ranks), ranks, shard_data=False)


@pytest.mark.parametrize("kind", OWN)
def test_data_of_its_own_goes_on_on_as_many_ranks_only(kind: str) -> None:
    for before, after in ((1, 2), (2, 1), (2, 3)):
        make, now = (partial(OWN[kind], ranks=ranks) for ranks in (before, after))
        starts = Reading(make_loaders(make, before, shard_data=False), 1, limit=1).starts[1]
        told = f"data of its own, so that an epoch begun on ({before}|one) rank.* continued on {after}"
        with pytest.raises(DataError, match=told):
            Reading(make_loaders(now, after, shard_data=False), 1, [starts[0]] * after)
    if kind != "keys":
        with pytest.raises(DataError, match=r"rank reads? data of its own"):
            Reading(make_loaders(now, 2, shard_data=True), 1, [starts[0]] * 2)


# --- streams ---


def numbers_of(stream: Stream) -> range:
    info = get_worker_info()
    return range(stream.n) if info is None else range(info.id, stream.n, info.num_workers)


class Stateful(Stream):
    """A stream whose position is a state of it."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        for number in numbers_of(self)[self.position :]:
            self.position += 1
            self.read += 1
            yield [number, self.epochs[-1], *draws()]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Seeking(Stream):
    """A stream whose iterator has the state; it reads nothing that is used up. Its state is a living object."""

    def __iter__(self) -> Iterator[Any]:
        return SeekingIterator(self)


class SeekingIterator:
    def __init__(self, stream: Seeking) -> None:
        self.numbers = numbers_of(stream)
        self.stream, self.state = stream, {"position": torch.zeros((), dtype=torch.int64)}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        place = int(self.state["position"])
        if place == len(self.numbers):
            raise StopIteration
        self.state["position"] += 1
        self.stream.read += 1
        return [self.numbers[place], self.stream.epochs[-1], *draws()]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def streaming(kind: Callable[..., Any], workers: int = 0, n: int = 23, **options: Any) -> Make:
    def make(rank: int) -> Any:
        return DataLoader(kind(n, noise=True), 2, collate_fn=collate_drawing, num_workers=workers, **options)

    return make


STREAMS = {"read again": partial(Stream, shuffle=True), "state": Stateful, "state of the iterator": Seeking}


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", STREAMS)
def test_streams_go_on_in_the_order_of_the_workers(kind: str, ranks: int, workers: int) -> None:
    n = 13 if workers else 23
    whole = same_rounds(streaming(STREAMS[kind], workers, n), ranks)
    assert sorted(int(row[0]) for row in whole.samples) == list(range(n))
    numbers = [number for row in whole.samples for number in row[2:]]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_go_on_under_a_limit_in_persistent_workers_and_without_a_batch_size(kind: str) -> None:
    same_rounds(streaming(STREAMS[kind], 2), 2, limit=3)
    same_rounds(streaming(STREAMS[kind]), 2, limit=4)
    same_rounds(streaming(STREAMS[kind], 2, 13, persistent_workers=True), 1)
    same_rounds(streaming(STREAMS[kind], 3, 13, drop_last=True), 2)
    for workers in (0, 2):
        same_rounds(lambda rank, w=workers: DataLoader(STREAMS[kind](7, noise=True), None, num_workers=w), 2)


def test_an_epoch_may_be_continued_more_than_once_and_in_the_same_process() -> None:
    for kind in STREAMS.values():
        for workers, persistent in ((0, False), (2, True)):
            loaders = make_loaders(streaming(kind, workers, persistent_workers=persistent), 2)
            whole, after = Reading(loaders, 1), Reading(loaders, 2)
            starts, rounds = None, []
            for limit in (1, 1, 2, 1, 9):
                part = Reading(loaders, 1, starts, limit)
                starts, rounds = part.starts[-1], rounds + part.rounds
            assert [given for given in rounds if given] == whole.rounds and starts == whole.starts[-1]
            assert Reading(loaders, 2).rounds == after.rounds
            for loader in loaders:
                loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", STREAMS)
def test_streams_go_on_on_other_ranks_and_batch_sizes(kind: str, workers: int) -> None:
    make = streaming(STREAMS[kind], workers)
    alone = Reading(make_loaders(make, 1), 1).samples
    assert sorted(row[0] for row in alone) == list(range(23))
    for before, between, after in ((1, 2, 1), (2, 1, 3), (3, 2, 2)):
        whole = Reading(make_loaders(make, before), 1)
        for done, starts in list(enumerate(whole.starts))[1 :: 1 + workers]:
            part = Reading(make_loaders(make, between), 1, [starts[0]] * between, limit=1)
            rest = Reading(make_loaders(make, after), 1, [part.starts[-1][0]] * after)
            rows = [*samples_of(whole.rounds[:done]), *part.samples, *rest.samples]
            assert sorted(row[0] for row in rows) == list(range(23))
            numbers = [number for row in rows for number in row[2:]]
            assert len(numbers) == len(set(numbers))

    def larger(rank: int) -> Any:
        return DataLoader(STREAMS[kind](23, noise=True), 3, collate_fn=collate_drawing, num_workers=workers)

    starts = Reading(make_loaders(make, 2), 1, limit=2).starts
    part = Reading(make_loaders(larger, 2), 1, starts[2], limit=2)
    rest = Reading(make_loaders(make, 2), 1, part.starts[2])
    rows = [*Reading(make_loaders(make, 2), 1, limit=2).samples, *part.samples, *rest.samples]
    assert sorted(row[0] for row in rows) == list(range(23))


def test_one_worker_is_as_none_and_other_numbers_are_refused() -> None:
    for kind in STREAMS.values():
        whole = Reading(make_loaders(streaming(kind), 2), 1)
        assert Reading(make_loaders(streaming(kind, 1), 2), 1, whole.starts[2]).rounds == whole.rounds[2:]
        starts = Reading(make_loaders(streaming(kind, 1), 2), 1).starts[2]
        assert Reading(make_loaders(streaming(kind), 2), 1, starts).rounds == whole.rounds[2:]
        starts = Reading(make_loaders(streaming(kind, 3), 1), 1, limit=2).starts[-1]
        with pytest.raises(DataError, match=r"with num_workers=3, and now has 2: .* Give num_workers=3, or"):
            Reading(make_loaders(streaming(kind, 2), 1), 1, starts)


def test_a_stream_whose_position_was_not_saved_is_refused() -> None:
    with pytest.raises(DataError, match="where it stood after 8 samples was not saved"):
        Reading(make_loaders(streaming(Stream), 1), 1, [Start(8, 2)])


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_again_is_told_once_with_its_cost(workers: int) -> None:
    for kind, told in ((Stream, 1), (Stateful, 0), (Seeking, 0)):
        starts = Reading(make_loaders(streaming(kind, workers), 2), 1, limit=3).starts[3]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Reading(make_loaders(streaming(kind, workers), 2), 1, starts)
        texts = [str(each.message) for each in caught if "drops" in str(each.message)]
        assert len(texts) == told
        assert not told or "data set Stream of the train loader has no state_dict and load_state_dict: " in texts[0]
        assert not told or "it reads and drops the 12 samples that are used up." in texts[0]


def test_a_state_is_loaded_instead_of_reading_again() -> None:
    streams: list[Seeking] = []

    def make(rank: int) -> Any:
        streams.append(Seeking(23))
        return DataLoader(streams[-1], 2, collate_fn=list)

    starts = Reading(make_loaders(make, 2), 1, limit=3).starts[3]
    assert [stream.read for stream in streams] == [12, 12]
    Reading(make_loaders(make, 2), 1, starts)
    assert [stream.read for stream in streams] == [12, 12, 11, 11]


def test_data_that_gives_less_than_before_or_lost_its_state_is_refused() -> None:
    starts = Reading(make_loaders(streaming(Stream), 1), 1, limit=6).starts[6]
    with pytest.raises(DataError, match="Stream gave 5 samples where it gave 12 before"):
        Reading(make_loaders(streaming(Stream, n=5), 1), 1, starts)
    starts = Reading(make_loaders(streaming(Stateful), 1), 1, limit=6).starts[6]
    with pytest.raises(DataError, match="holds a state of the data, but Stream has no load_state_dict"):
        Reading(make_loaders(streaming(Stream), 1), 1, starts)
    with pytest.raises(DataError, match="reads ready batches, and the epoch to be continued was one of a stream"):
        Reading(make_loaders(lambda rank: [[1]], 1), 1, starts)


class Demanding(Stream):
    """Its state_dict is of another kind: it wants to be told."""

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_state_dict_that_wants_arguments_is_left_alone() -> None:
    same_rounds(streaming(Demanding), 1)


class Shuffled(Stateful):
    """Draws its order from a generator that it holds, when the iteration begins; its state is a number alone."""

    def __init__(self, n: int, copies: bool, drawing: bool, noise: bool) -> None:
        super().__init__(n, noise=drawing)
        self.generator, self.copies = np.random.default_rng(0), copies

    def __iter__(self) -> Iterator[Any]:
        generator = np.random.default_rng(self.generator.integers(1 << 60)) if self.copies else self.generator
        order = generator.permutation(self.n)
        for place in numbers_of(self)[self.position :]:
            self.position += 1
            yield [int(order[place]), *(draws() if self.noise else ())]
        self.position = 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("copies", [False, True])
def test_an_order_that_is_drawn_when_the_iteration_begins_is_drawn_again(copies: bool, workers: int) -> None:
    for noise in (False, True):
        whole = same_rounds(streaming(partial(Shuffled, copies=copies, drawing=noise), workers), 2)
        assert sorted(row[0] for row in whole.samples) == list(range(23))


class Remembered(Stateful):
    """Its state holds the generator from which it drew the order."""

    def __init__(self, n: int, noise: bool) -> None:
        super().__init__(n, noise=noise)
        self.generator = torch.Generator()
        self.begun: torch.Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.begun is not None:
            self.generator.set_state(self.begun)
        self.begun = self.generator.get_state()
        order = torch.randperm(self.n, generator=self.generator).tolist()
        for number in order[self.position :]:
            self.position += 1
            yield [number, *draws()]
        self.position, self.begun = 0, None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "begun": None if self.begun is None else self.begun.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.begun = None if state["begun"] is None else torch.tensor(state["begun"], dtype=torch.uint8)


def test_a_state_may_hold_generators() -> None:
    for workers in (0, 1):
        same_rounds(streaming(Remembered, workers), 2)


def told_worker(worker: int) -> None:
    info: Any = get_worker_info()
    assert info.id == worker
    info.dataset.told = [worker, torch.initial_seed(), info.seed, *draws()]


class Telling(Stream):
    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield [*sample, os.getpgid(0) == os.getpid(), *self.told]  # type: ignore[attr-defined]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_takes_anothers_part_takes_its_number_and_seeds(persistent: bool) -> None:
    options = {"worker_init_fn": told_worker, "persistent_workers": persistent}
    whole = same_rounds(streaming(Telling, 3, **options), 1)
    assert all(row[8] is True for row in whole.samples)


def test_workers_are_no_part_of_the_launchers_process_group() -> None:
    """It is sent SIGTERM as a whole, and a run that ends by it still needs its workers."""

    class Group(Numbers):
        def __getitem__(self, index: int) -> int:
            return os.getpgid(0)

    groups = Reading(make_loaders(lambda rank: DataLoader(Group(8), 2, num_workers=2), 1), 1).samples
    assert os.getpgid(0) not in groups and len(set(groups)) == 2


# --- ready batches ---


class ReadyBatches:
    """Batches that draw: each is [[number, ...draws]]; without a length."""

    def __init__(self, n: int = 7) -> None:
        self.n = n
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        random.random()
        for number in range(self.n):
            self.read.append(number)
            yield [[number, *draws()]]


class SizedReady(ReadyBatches):
    def __len__(self) -> int:
        return self.n


class StatefulReady(ReadyBatches):
    position = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.position, self.n):
            self.read.append(number)
            self.position = number + 1
            yield [[number, *draws()]]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class StatefulSized(StatefulReady):
    def __len__(self) -> int:
        return self.n


class Doubled(DataLoader[Any]):
    """A DataLoader of an __iter__ of its own."""

    def __iter__(self) -> Any:
        return ([2 * row[0], *row[1:]] for batch in super().__iter__() for row in [batch[0]])


READY: dict[str, Callable[[], Any]] = {
    "without length": ReadyBatches,
    "sized": SizedReady,
    "state": StatefulReady,
    "sized state": StatefulSized,
    "list": lambda: [[[k]] for k in range(7)],
    "iterator": lambda: iter(ReadyBatches()),
    "loader": lambda: Doubled(Numbers(14), 2, shuffle=True, collate_fn=collate_numbers),
    "loader with workers": lambda: Doubled(Numbers(14), 2, shuffle=True, collate_fn=collate_numbers, num_workers=2),
}


def collate_numbers(numbers: list[int]) -> Any:
    return [[*numbers, random.random()]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", READY)
def test_ready_batches_go_on(kind: str, ranks: int) -> None:
    make = lambda rank: READY[kind]()  # noqa: E731
    if kind == "iterator":
        whole = Reading(make_loaders(make, ranks), 1)
        for done, starts in enumerate(whole.starts):
            rest = Reading(make_loaders(make, ranks), 1, starts)
            assert [given for given in rest.rounds if given] == whole.rounds[done:]
        return
    same_rounds(make, ranks)
    same_rounds(make, ranks, limit=2)


@pytest.mark.parametrize("kind", READY)
def test_ready_batches_go_on_on_other_ranks(kind: str) -> None:
    make = lambda rank: READY[kind]()  # noqa: E731
    alone = samples_of(Reading(make_loaders(make, 1), 1).rounds)
    for before in (1, 2, 3):
        whole = Reading(make_loaders(make, before), 1)
        assert samples_of(whole.rounds) == alone
        for done, starts in list(enumerate(whole.starts))[:: 4 if "workers" in kind else 1]:
            for after in (1, 2, 3):
                rest = Reading(make_loaders(make, after), 1, [starts[0]] * after)
                assert [*samples_of(whole.rounds[:done]), *samples_of(rest.rounds)] == alone


def test_what_is_read_of_ready_batches_to_go_on() -> None:
    for kind, read in ((StatefulReady, [4, 5, 6]), (ReadyBatches, [0, 1, 2, 3, 4, 5, 6])):
        loaders = make_loaders(lambda rank, kind=kind: kind(), 2)
        starts = Reading(loaders, 1, limit=2).starts[2]
        again = [kind() for _ in range(2)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Reading(make_loaders(again.__getitem__, 2), 1, starts)
        assert [each.read for each in again] == [[3, *read] if kind is StatefulReady else read, read]
        texts = [str(each.message) for each in caught if "drops" in str(each.message)]
        assert len(texts) == (kind is ReadyBatches)
        assert not texts or "ReadyBatches of the train loader has no state_dict and load_state_dict: " in texts[0]
        assert not texts or "it reads and drops the 4 batches that are used up" in texts[0]


# --- rank 0 reads for all ---


def dispatched(make: Make, ranks: int, epoch: int, starts: list[Start], limit: int | None = None) -> list[list[Any]]:
    """For each rank what it was given in each round, with the reached position behind it."""
    ring = Ring(ranks)
    results: list[list[Any]] = [[] for _ in range(ranks)]
    dispatch = [ring.at(rank) for rank in range(ranks)]

    def run(rank: int) -> None:
        loader = RankLoader(make(rank), rank=rank, world_size=ranks, seed=5, dispatch=dispatch[rank])
        feed = Feed(loader, CPU, epoch=epoch, start=starts[rank], limit=limit, dealt=True)
        while feed.more:
            batch = feed.take().batch
            results[rank].append(("-" if batch is None else plain(batch), stored(feed.reached)))
        feed.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


DEALT: dict[str, Make] = {
    "keys": KEYS["shuffled"],
    "rows": lambda rank: DataLoader(RememberingRows(), batch_size=None),
    "stream": streaming(Stream),
    "stream in workers": streaming(Stream, 2),
    "stateful stream": streaming(Stateful, 2),
    "ready": lambda rank: ReadyBatches(),
    "stateful ready": lambda rank: StatefulSized(8),
    "list": lambda rank: [[[k]] for k in range(7)],
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", DEALT)
def test_what_rank_0_deals_goes_on(kind: str, ranks: int) -> None:
    make = DEALT[kind]
    whole = dispatched(make, ranks, 1, [BEGINNING] * ranks)
    assert all(reached is None for given in whole[1:] for _, reached in given)
    used = 0
    for done, (_, reached) in enumerate(whole[0][:-1], start=1):
        used += sum(len(given[done - 1][0]) for given in whole if given[done - 1][0] != "-")
        starts = [Start(used, done, reached if rank == 0 else None) for rank in range(ranks)]
        assert dispatched(make, ranks, 1, starts) == [given[done:] for given in whole]
        limited = dispatched(make, ranks, 1, starts, limit=1)
        assert limited == [given[done : done + 1] for given in whole]
        if "worker" not in kind and kind != "stateful stream":  # go on without dealing
            for after in (1, 2):
                rest = Reading(make_loaders(make, after), 1, [starts[0]] * after)
                former = [len(given[round_][0]) for given in whole for round_ in range(done) if given[round_][0] != "-"]
                assert sum(former) == used and [*samples_of(rest.rounds)] != []


# --- epochs that are left early, loaders of torchdata ---


@pytest.mark.parametrize("kind", ["stream", "stream in workers", "ready", "torchdata"])
def test_an_epoch_begins_at_its_beginning_wherever_the_last_was_left(kind: str) -> None:
    """Though the data remembers its place: the ranks left it at different ones, and a resumed run at none."""
    make: dict[str, Make] = {
        "stream": streaming(Stateful),
        "stream in workers": streaming(Stateful, 1, persistent_workers=True),
        "ready": lambda rank: StatefulSized(9),
        "torchdata": lambda rank: doubled_stateful(),
    }
    loaders = make_loaders(make[kind], 2)
    whole = Reading(loaders, 1)
    for limit in (1, 2, 0, 3):
        assert Reading(loaders, 1, limit=limit).rounds == whole.rounds[:limit]
    assert Reading(loaders, 1).rounds == whole.rounds
    for loader in loaders:
        loader.close()


def doubled_stateful() -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    class DoubledStateful(stateful.StatefulDataLoader):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Any:
            for numbers in super().__iter__():
                yield [[2 * number for number in numbers], random.random()]

    torch.manual_seed(3)  # its sampler takes a seed from here
    return DoubledStateful(Remembering(14), 2, shuffle=True, collate_fn=list)


def test_loaders_of_torchdata_go_on() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    same_rounds(lambda rank: stateful.StatefulDataLoader(Remembering(22), 3, shuffle=True), 2)
    same_rounds(lambda rank: stateful.StatefulDataLoader(Seeking(13, noise=True), 2, collate_fn=list, num_workers=2), 2)
    for ranks in (1, 2):
        whole = same_rounds(lambda rank: doubled_stateful(), ranks)
        assert sorted(n for batch in whole.samples if isinstance(batch, list) for n in batch) == list(range(0, 28, 2))
    starts = Reading(make_loaders(lambda rank: doubled_stateful(), 1), 1, limit=4).starts[4]
    assert starts[0].reached["state"] is not None
    Remembering.ever.clear()
    rest = Reading(make_loaders(lambda rank: doubled_stateful(), 1), 1, starts)
    assert len(rest.rounds) == 3 and len(Remembering.ever) == 6


def test_workers_of_a_loader_of_its_own_iter_leave_the_process_group_too() -> None:
    class Group(Numbers):
        def __getitem__(self, index: int) -> int:
            return os.getpgid(0)

    class Loader(DataLoader[Any]):
        def __iter__(self) -> Any:
            yield from super().__iter__()

    began: list[int] = []
    loader = Loader(Group(8), 2, num_workers=2, worker_init_fn=began.append)
    groups = Reading(make_loaders(lambda rank: loader, 1), 1).samples
    assert os.getpgid(0) not in groups and len(set(groups)) == 2
    assert loader.worker_init_fn == began.append and began == []


class Slow(Stream):
    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            time.sleep(0.3)
            yield sample


def test_reading_again_may_take_longer_than_the_loaders_timeout() -> None:
    make = streaming(Slow, 1, 14, timeout=1)
    whole = Reading(make_loaders(make, 1), 1, limit=6)
    assert Reading(make_loaders(make, 1), 1, whole.starts[6], limit=1).rounds


class Odd(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"position": lambda: None} if self.read else {"position": self.asked}  # type: ignore[attr-defined]


def test_a_state_that_cannot_be_kept_is_told() -> None:
    """One that is not there before the first sample is no matter."""
    with pytest.raises(DataError, match=r"What state_dict\(\) of Odd gives cannot be kept: .* Give numbers, strings"):
        Reading(make_loaders(streaming(Odd), 1), 1)
    Reading([RankLoader(streaming(Odd)(0), rank=0, world_size=1, seed=0, name="val")], 1)


@pytest.mark.slow
def test_spawned_workers_go_on() -> None:
    whole = Reading(make_loaders(streaming(Stateful, 2, 13), 1), 1)
    spawned = make_loaders(streaming(Stateful, 2, 13, multiprocessing_context="spawn"), 1)
    assert Reading(spawned, 1, whole.starts[3]).rounds == whole.rounds[3:]
