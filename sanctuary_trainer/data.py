"""Loaders on ranks: which samples a rank gets, in which order, under which seeds, and where the epoch stands.

    RankLoader(loader).epoch(e)
      user's loader  -> taken apart (accelerate's wrapping and DistributedSampler undone)
      reader         -> reading.py: a data set with keys; streams.py: a stream, or ready batches; dealt to R ranks
      Fetched        -> one per round and rank: the batch, and what is known of its samples

With dispatch rank 0 reads for all ranks and deals:

    rank 0:  read a round (one Fetched per rank) -> scatter -> its own
    others:                                         scatter -> its own
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, Protocol
from warnings import warn

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from sanctuary_trainer.balanced import BalancedBatchSampler
from sanctuary_trainer.errors import DataError, NotSupportedError, RankError
from sanctuary_trainer.owners import initial_seeds
from sanctuary_trainer.reading import BEGINNING, Fetched, MapReader, Part, Reader, Source, Start, nothing
from sanctuary_trainer.streams import BatchesReader, StreamReader

__all__ = ["BEGINNING", "Dispatcher", "Fetched", "RankLoader", "Start"]


class Dispatcher(Protocol):
    """Carries objects from rank 0 to the others."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def scatter(self, objects: list[Any] | None) -> Any:
        """Give rank r the r-th of rank 0's objects; the other ranks pass None."""


class _Dealt(NamedTuple):
    """What rank 0 sends to one rank for one round."""

    fetched: Fetched | None  # None: the data has ended
    last: bool = False  # no round follows: the other ranks must not wait for one
    error: str | None = None


class RankLoader:
    """A user's loader as one rank reads it: sharded by us, seeded by us, the same order on any number of ranks.

    Args:
        loader: a torch DataLoader of any kind (also prepared by accelerate, also of torchdata), or any iterable of
            batches that can be iterated anew each epoch.
        rank, world_size: this process and how many there are.
        seed: orders and augmentation are functions of it and of the epoch.
        shard_data: False where the data of each rank is its own already; not together with `dispatch`.
        dispatch: rank 0 reads and deals to the others through this.
        shuffle: False reads in the order of the data set (a sampler that is no plain shuffle, a stream or ready
            batches: as in epoch 0, always).
        name: "train", "val", ... for messages.

    Raises:
        DataError: the loader is nothing that can be read.
        NotSupportedError: it reads an IterDataPipe in workers.
    """

    def __init__(
        self,
        loader: Any,
        *,
        rank: int,
        world_size: int,
        seed: int,
        shard_data: bool = True,
        dispatch: Dispatcher | None = None,
        shuffle: bool | None = None,
        name: str = "train",
    ) -> None:
        self._dispatch = dispatch if world_size > 1 else None
        self._ranks = world_size
        source = _source(loader, name)
        own = not shard_data
        if source is not None and world_size > 1 and (sharding := _sharding_samplers(source)):
            own = self._own_sharding(type(sharding[0]).__name__, name)
        self._own = own
        self.num_workers: int | None = None if source is None else source.options["num_workers"]  # processes that read
        self._reader = self._open_reader(source, loader, Part(rank, world_size, (rank,), own), seed, shuffle, name)

    def _own_sharding(self, sampler: str, name: str) -> bool:
        if self._dispatch is not None:
            raise DataError(
                f"The sampler {sampler} of the {name} loader shards the data itself, so that with "
                "dispatch_batches=True rank 0 would read its own part only. Give a sampler of the whole data."
            )
        warn(
            f"The sampler {sampler} of the {name} loader shards the data itself and is left to do so; samples that it "
            "repeats to fill up its shards count twice. Torch's own DistributedSampler would be replaced.",
            stacklevel=3,
        )
        return True

    def _open_reader(
        self, source: Source | None, loader: Any, part: Part, seed: int, shuffle: bool | None, name: str
    ) -> Reader:
        if source is not None and not isinstance(source.dataset, IterableDataset):
            _check_costs(source)
            if self._dispatch is not None:
                part = Part(part.rank, part.ranks, tuple(range(part.ranks)), own=False)
            if shuffle is False:
                source = replace(
                    source,
                    batch_sampler=_unshuffled(source.batch_sampler, source.dataset),
                    sampler=_unshuffled(source.sampler, source.dataset),
                )
            return MapReader(source, part, seed, same_order=shuffle is False)
        if self._dispatch is not None:  # batches are read as one process does, and dealt R at a time
            part = Part(0, 1, (0,), own=False)
        if source is not None:
            return StreamReader(source, part, seed, same_order=shuffle is False)
        return BatchesReader(loader, part, seed, name, same_order=shuffle is False)

    @property
    def sized(self) -> bool:
        """Whether `num_rounds` is exact and alike on all ranks; else the ranks must agree about the end."""
        return self._reader.sized

    @property
    def num_rounds(self) -> int | None:
        """Rounds of an epoch, one batch per rank each; an estimate where not `sized`, None when unknown."""
        rounds = self._reader.num_rounds
        if rounds is None or self._dispatch is None or isinstance(self._reader, MapReader):
            return rounds
        return -(-rounds // self._ranks)

    def rounds_left(self, epoch: int, start: Start) -> int | None:
        """Rounds of an epoch that is continued: what is left is dealt anew. None where not `sized`.

        Args:
            epoch: from 0.
            start: where it is continued; alike on all ranks but for what an own `reached` tells beyond it.
        """
        if not self.sized or start == BEGINNING:
            return self.num_rounds if self.sized else None
        rounds = self._reader.rounds_left(epoch, self._counted(start))
        if rounds is None or self._dispatch is None or isinstance(self._reader, MapReader):
            return rounds
        return -(-rounds // self._ranks)

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch over all ranks, None when unknown."""
        return self._reader.num_samples

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch of one rank, None when unknown."""
        return self._reader.batch_size

    @property
    def assumed(self) -> dict[str, Any]:
        """What must be the same on all ranks for each sample to come once: worth comparing before the first epoch.

        Empty where nothing need be: each rank has data of its own, or rank 0 reads for all.
        """
        if self._own or self._dispatch is not None:
            return {}
        seeds = initial_seeds(self._reader.drawing())
        return {"samples": self.num_samples, "rounds": self.num_rounds, "batch size": self.batch_size, "seeds": seeds}

    def epoch(
        self, epoch: int, *, start: Start = BEGINNING, limit: int | None = None
    ) -> Generator[Fetched, None, None]:
        """Read one epoch, or its first `limit` rounds.

        Sized data gives exactly min(num_rounds, limit) items on every rank, with batch=None where a rank has nothing.
        Otherwise a rank's items end with its data, maybe earlier than another's. No more than the limit is read
        (workers of a stream may read ahead). Close it to end the workers of an epoch that is left early.

        Args:
            epoch: from 0.
            start: where this epoch is continued. What is used up is not given again, and the rest is dealt anew; where
                each rank has data of its own, or workers read a stream, as many as before have to go on. With dispatch
                rank 0's counts.
            limit: rounds at most, of those that are left.

        Raises:
            DataError: a length turned out to be wrong; an iterator is read twice; an epoch cannot be continued like
                this.
            RankError: rank 0 failed while it read for this rank.
        """
        start, limit = self._counted(start), None if limit is None else max(0, limit)
        if self._dispatch is None:
            return self._reader.open(epoch, start, limit)
        if self._dispatch.rank == 0:
            return self._deal(self._dispatch, epoch, start, limit)
        return _receive(self._dispatch)

    def _counted(self, start: Start) -> Start:
        """Count rounds as the reader does: where rank 0 reads for all, one of a stream is one batch."""
        if self._dispatch is None or isinstance(self._reader, MapReader):
            return start
        return start._replace(rounds=start.rounds * self._ranks)

    def close(self) -> None:
        """End persistent workers."""
        self._reader.close()

    def _deal(
        self, dispatch: Dispatcher, epoch: int, start: Start, limit: int | None
    ) -> Generator[Fetched, None, None]:
        ranks = dispatch.world_size
        batches = limit if limit is None or isinstance(self._reader, MapReader) else limit * ranks
        with _telling(dispatch):
            read = self._reader.open(epoch, start, batches)
        with closing(read):
            last = False
            while not last:
                with _telling(dispatch):
                    fetched = list(islice(read, ranks))
                mine: _Dealt = dispatch.scatter(self._round(fetched, ranks))
                if mine.fetched is not None:
                    # What tells where the data stands refers to the loader, and is not sent.
                    yield mine.fetched._replace(reached=fetched[-1].reached)
                last = mine.last

    def _round(self, fetched: list[Fetched], ranks: int) -> list[_Dealt]:
        """Make one round of what was read for it, which at the end of the data is less than one batch per rank."""
        sizes = [each.size for each in fetched]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        last = not fetched or (len(fetched) < ranks and not self.sized)
        dealt = [_Dealt(each._replace(total=total, reached=None), last) for each in fetched]
        none = None if last else nothing(total)
        return dealt + [_Dealt(none, last)] * (ranks - len(fetched))


@contextmanager
def _telling(dispatch: Dispatcher) -> Iterator[None]:
    """Tell the other ranks, which wait for what rank 0 reads, that it failed."""
    try:
        yield
    except Exception as error:
        dispatch.scatter([_Dealt(None, error=f"{type(error).__name__}: {error}")] * dispatch.world_size)
        raise


def _receive(dispatch: Dispatcher) -> Generator[Fetched, None, None]:
    while True:
        dealt: _Dealt = dispatch.scatter(None)
        if dealt.error is not None:
            raise RankError(f"Rank 0, which reads the data for all ranks, failed: {dealt.error}")
        if dealt.fetched is not None:
            yield dealt.fetched
        if dealt.last:
            return


def _source(loader: Any, name: str) -> Source | None:
    """Take a DataLoader apart; None for other iterables of batches."""
    accelerates: Any = sys.modules.get("accelerate.data_loader")
    prepared = accelerates is not None and issubclass(type(loader), accelerates.DataLoaderAdapter)
    if prepared:
        if getattr(loader, "split_batches", False) or getattr(loader, "skip_batches", 0):
            raise _not_undone(name)
        loader = loader.base_dataloader
    if not isinstance(loader, DataLoader):
        _check_iterable(loader, name)
        return None
    if not type(loader).__iter__.__module__.startswith(("torch.", "torchdata.")):
        return None  # what a loader's own __iter__ gives is not known from its parts
    source = Source(
        dataset=loader.dataset,
        batch_sampler=loader.batch_sampler,
        sampler=loader.sampler,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        collate=loader.collate_fn,
        worker_init=loader.worker_init_fn,
        options={option: getattr(loader, option) for option in _OPTIONS},
        name=name,
    )
    if accelerates is not None and isinstance(source.dataset, accelerates.IterableDatasetShard):
        shard: Any = source.dataset
        if shard.split_batches:
            raise _not_undone(name)
        return replace(source, dataset=shard.dataset, batch_size=shard.batch_size, drop_last=shard.drop_last)
    if isinstance(source.dataset, IterDataPipe) and loader.num_workers:
        raise NotSupportedError(
            f"The {name} loader reads an IterDataPipe (deprecated in torch) in workers. Give num_workers=0 or an "
            "IterableDataset."  # its sharding_filter would see one worker alone, and each sample come once per worker
        )
    if isinstance(source.dataset, IterableDataset):
        return source
    return replace(
        source,
        sampler=_whole(source.sampler, name, prepared),
        batch_sampler=_whole(source.batch_sampler, name, prepared),
    )


_OPTIONS = ("num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")


def _whole(sampler: Any, name: str, prepared: bool) -> Any:
    """Undo the sharding that accelerate or a DistributedSampler laid over a sampler of the whole data.

    A shuffle is rebuilt without its generator where the library seeds that by itself, anew on each rank: accelerate
    (`prepared`, also its SeedableRandomSampler) and torchdata.
    """
    accelerates: Any = sys.modules.get("accelerate.data_loader")
    if accelerates is not None and isinstance(sampler, accelerates.SkipBatchSampler):
        raise _not_undone(name)
    if accelerates is not None and isinstance(sampler, accelerates.BatchSamplerShard):
        if sampler.split_batches:
            raise _not_undone(name)
        return _whole(sampler.batch_sampler, name, prepared)
    torchdatas = type(sampler).__module__.startswith("torchdata.stateful_dataloader")
    if (prepared and isinstance(sampler, RandomSampler)) or (torchdatas and type(sampler).__name__ == "RandomSampler"):
        return RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples)
    if type(sampler) is DistributedSampler or (torchdatas and isinstance(sampler, DistributedSampler)):
        return DistributedSampler(sampler.dataset, 1, 0, sampler.shuffle, sampler.seed)
    if type(sampler) is BatchSampler or (torchdatas and isinstance(sampler, BatchSampler)):
        return BatchSampler(_whole(sampler.sampler, name, prepared), sampler.batch_size, sampler.drop_last)
    return sampler


def _unshuffled(sampler: Any, dataset: Any) -> Any:
    """The same samples in the order of the data set, where the sampler is one that shuffles."""
    if isinstance(sampler, RandomSampler) or (isinstance(sampler, DistributedSampler) and sampler.num_replicas == 1):
        return SequentialSampler(dataset)
    if isinstance(sampler, SubsetRandomSampler):
        return sampler.indices
    if type(sampler) is BatchSampler:
        return BatchSampler(_unshuffled(sampler.sampler, dataset), sampler.batch_size, sampler.drop_last)
    return sampler


def _check_costs(source: Source) -> None:
    """Samples without a cost would never be read, and nobody would know."""
    sampler, dataset = source.batch_sampler, source.dataset
    if not isinstance(sampler, BalancedBatchSampler) or not hasattr(dataset, "__len__"):
        return
    if len(dataset) != sampler.num_samples:
        raise DataError(
            f"The {source.name} loader's BalancedBatchSampler has costs of {sampler.num_samples} samples, and its data "
            f"set holds {len(dataset)}. Give one cost for each sample."
        )


def _sharding_samplers(source: Source) -> list[Any]:
    """The samplers that deal to several ranks themselves, in a way that `_whole` could not undo."""
    return [each for each in source.samplers() if isinstance(each, DistributedSampler) and each.num_replicas > 1]


def _not_undone(name: str) -> DataError:
    return DataError(
        f"The {name} loader was prepared by accelerate with split_batches=True or skip_first_batches, which cannot be "
        "undone. Give the DataLoader as it was before, with the batch size of one rank."
    )


def _check_iterable(loader: Any, name: str) -> None:
    if isinstance(loader, str | bytes | Mapping | torch.Tensor) or not isinstance(loader, Iterable):
        advice = " Wrap the data set: DataLoader(dataset, batch_size=...)." if isinstance(loader, Dataset) else ""
        kind = type(loader).__name__
        raise DataError(
            f"The {name} loader is a {kind}; expected a torch DataLoader or an iterable of batches.{advice}"
        )
