"""A batch that is run in consecutive pieces, and cut anew where one of them does not fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sanctuary_trainer.errors import DataError

if TYPE_CHECKING:
    from sanctuary_trainer.run import Run


class OOMFailure(NamedTuple):
    """A piece that did not fit.

    Attributes:
        stage: "train", "sanity", "val", "test" or "predict".
        phase: "forward" or "backward".
        tried: its samples.
        error: what was raised, without its frames.
    """

    stage: str
    phase: str
    tried: int
    error: Exception


Smaller = Callable[[OOMFailure], int]  # the policy: samples of a piece from now on; raises to give up


class Pieces:
    """A batch of `size` samples, cut into consecutive pieces that are run one after the other."""

    def __init__(self, run: Run, batch: Any, size: int, smaller: Smaller) -> None:
        self._run, self._batch, self._smaller = run, batch, smaller
        self.size = self.most = size
        self.failure: OOMFailure | None = None  # the first one
        self.start = 0
        self.samples: int | None = size  # of the batch as loaded; None where they cannot be told
        self.remedies = 0  # how many had been switched on for good before this batch
        self._sizes, self._index, self._parts = [size], 0, [batch]

    @property
    def is_whole(self) -> bool:
        """Whether the batch is run in one piece."""
        return len(self._sizes) == 1

    @property
    def done(self) -> bool:
        """Whether all have been run."""
        return self._index == len(self._sizes)

    @property
    def at_last(self) -> bool:
        """Whether the present piece is the last one."""
        return self._index == len(self._sizes) - 1

    @property
    def count(self) -> int:
        """Samples of the present piece."""
        return self._sizes[self._index]

    @property
    def piece(self) -> Any:
        """The present piece."""
        return self._parts[self._index]

    def advance(self) -> None:
        """The present piece is done."""
        self.start += self.count
        self._index += 1

    def cut(self, failure: OOMFailure, until: int | None = None) -> None:
        """The present piece did not fit: cut it, and what is left of the batch, as the policy says.

        until: a sample before which a piece has to end.
        """
        self.failure = self.failure or failure
        if self.samples is None:
            raise DataError(
                f"A {type(self._batch).__name__} batch does not fit into memory, and how many samples it has cannot be "
                "told. Override VisionTask.batch_size and split_batch."
            ) from failure.error
        found = self._run.task.batch_size(self._batch) if failure.tried == 1 else None
        if found not in (None, self.size):
            raise DataError(
                f"A batch does not fit into memory and cannot be cut: by its loader it has {self.size} samples, and "
                f"{found} were found in it. Override VisionTask.split_batch, or let the loader count them (batch_size)."
            ) from failure.error
        most = self._smaller(failure)
        end = self.start + self.count
        until = end if until is None else until
        ahead = [*_sizes(self.count, most), *_sizes(until - end, most), *_sizes(self.size - until, most)]
        self._lay_out([*self._sizes[: self._index], *ahead], most)

    def lay_out(self, most: int) -> None:
        """Begin with pieces of at most so many samples."""
        self._lay_out(_sizes(self.size, most), most)

    def _lay_out(self, sizes: list[int], most: int) -> None:
        if sizes != self._sizes:
            self._parts = self._split(sizes)
        self._sizes, self.most = sizes, most

    def _split(self, sizes: list[int]) -> list[Any]:
        try:
            parts = list(self._run.task.split_batch(self._batch, sizes))
        except DataError as error:
            raise DataError(
                f"A batch of {self.size} samples does not fit into memory and cannot be cut into pieces of {sizes[0]}. "
                f"Override VisionTask.split_batch. {error}"
            ) from error
        if len(parts) != len(sizes):
            raise DataError(f"split_batch returned {len(parts)} pieces where {len(sizes)} were asked for: {sizes}.")
        return parts


def _sizes(samples: int, most: int) -> list[int]:
    """So many samples in as few pieces of at most `most` as there can be, as equal as can be: the larger ones first.

    A last piece of one sample would be more than batch norm can bear.
    """
    pieces = -(-samples // most)
    size, larger = divmod(samples, pieces) if pieces else (0, 0)
    return [size + (number < larger) for number in range(pieces)]
