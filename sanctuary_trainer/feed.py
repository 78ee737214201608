"""The batches of one epoch on their device, one ahead of use where that helps.

    Feed.more          whether this rank has another round: known where the rounds are, else by reading one ahead
    Feed.take()        the next round of this rank, on the device
    Feed.read_ahead()  called when the step's work is in the device's queue: copy the next batch beside it

On CUDA the copy runs on a stream of its own while the present batch computes. On the CPU nothing is copied, so nothing
is read ahead unless the end of a stream has to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from sanctuary_trainer.batch import move
from sanctuary_trainer.clock import Clock
from sanctuary_trainer.data import BEGINNING, Fetched, RankLoader, Start


class Feed:
    """One epoch of a loader.

    Args:
        loader: the loader of this rank.
        device: where batches go.
        epoch: number of the epoch, for order and seeds.
        start: where the epoch is continued.
        limit: rounds at most; None for all.
        non_blocking: let copies run while the host goes on.
        channels_last: bring image batches (4 dimensions) into that memory format.
        first_batch: number of the first round that is read, for `batch_idx`.
        dealt: rank 0 reads for all ranks, so that each round is taken together.
        clock: gets the laps "data" and "h2d".
    """

    def __init__(
        self,
        loader: RankLoader,
        device: torch.device,
        *,
        epoch: int = 0,
        start: Start = BEGINNING,
        limit: int | None = None,
        non_blocking: bool = True,
        channels_last: bool = False,
        first_batch: int = 0,
        dealt: bool = False,
        clock: Clock | None = None,
    ) -> None:
        # What the loader tells of itself, asked once an epoch and not in every step.
        self.sized, self.batch_size, self.num_samples = loader.sized, loader.batch_size, loader.num_samples
        self.rounds = limited(loader.rounds_left(epoch, start), limit) if self.sized else None
        self.taken = 0
        self.window, self.owed = 0, 0  # rounds of a window, and those that the others will still take in this one
        self.dealt, self._first_batch = dealt, first_batch
        self._clock = Clock() if clock is None else clock
        self._fetched: Iterator[Fetched] = loader.epoch(epoch, start=start, limit=limit)
        self._reached: Callable[[], Any] | None = None if start.reached is None else lambda: start.reached
        self._device, self._non_blocking, self._channels_last = device, non_blocking, channels_last
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._used: torch.cuda.Event | None = None  # when the batches before the present one are done with
        self._in_place = device.type == "cpu" and not channels_last
        # Most epochs on a CPU: nothing is copied and nothing read ahead.
        self._simple = self._in_place and self.rounds is not None and not dealt
        self._next: Fetched | None = None
        self.more = self.rounds is None or self.rounds > 0
        if self.rounds is None:
            self._read()

    def take(self) -> Fetched:
        """The next round; its batch is None when this rank has nothing in it."""
        if self._simple:
            fetched = next(self._fetched)
            self._reached = fetched.reached
            self.taken += 1
            self.owed -= 1
            self.more = self.taken < self.rounds  # type: ignore[operator]
            return fetched
        if self._next is None:
            self._read()
        ahead, self._next = self._next, None
        assert ahead is not None
        if self._copies is not None:
            compute = torch.cuda.current_stream(self._device)
            began = self._clock.enter()
            compute.wait_stream(self._copies)
            self._clock.leave("h2d", began)
            self._used = compute.record_event()
        self._reached = ahead.reached
        self.taken += 1
        self.owed -= 1
        if self.rounds is None:
            self._read()
        else:
            self.more = self.taken < self.rounds
        return ahead

    @property
    def batch_idx(self) -> int:
        """The number, in this rank's epoch, of the batch that was taken last."""
        return self._first_batch + self.taken - 1

    @property
    def reached(self) -> Any:
        """Where the data stands after the round that was taken last, as plain data: `Start.reached` of what follows.

        None where the samples used say it all.
        """
        return None if self._reached is None else self._reached()

    def begin_window(self, rounds: int) -> None:
        """All ranks will take so many rounds, or as many as there are."""
        self.window = self.owed = rounds

    def read_ahead(self) -> None:
        """Copy the next batch to the device beside the work that is queued there; nothing where no copy is needed."""
        if self._copies is not None and self._next is None and self.more:
            self._read()
            self._clock.lap("data")

    def close(self) -> None:
        """Stop reading; workers that are not persistent end."""
        close = getattr(self._fetched, "close", None)
        if close is not None:
            close()

    def _read(self) -> None:
        try:
            self._next = fetched = next(self._fetched, None)
        except Exception:
            self.more = False  # nothing comes after an error
            raise
        if self.rounds is None:
            self.more = fetched is not None
        if fetched is None:
            return
        if self._copies is None:
            self._next = self._placed(fetched)
            return
        # The copies' memory comes back when Python lets a batch go, though the device may still compute with it: so a
        # copy waits until the batches before the present one, which is held by the loop, are done with.
        if self._used is not None:
            self._copies.wait_event(self._used)
        with torch.cuda.stream(self._copies):
            self._next = self._placed(fetched)

    def _placed(self, fetched: Fetched) -> Fetched:
        if self._in_place or fetched.batch is None:
            return fetched
        began = self._clock.enter()
        batch = move(fetched.batch, self._device, self._non_blocking, self._channels_last)
        self._clock.leave("h2d", began)
        return fetched._replace(batch=batch)


def limited(rounds: int | None, limit: int | None) -> int | None:
    """The smaller of two numbers of rounds, None meaning unknown or unlimited."""
    if rounds is None or limit is None:
        return limit if rounds is None else rounds
    return min(rounds, limit)
