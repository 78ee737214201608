"""What callbacks ask of a run and is done when all of them have run their hook: checkpoints, values of every rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sanctuary_trainer.devices import Devices
from sanctuary_trainer.errors import CallbackError


@dataclass
class Request:
    """A checkpoint that was asked for; see `Run.save_checkpoint`.

    Attributes:
        folder: where it is written; on rank 0, once it has begun, with a number where the name was not free.
        begun: whether rank 0 has begun to write it: the callbacks' states are taken then.
    """

    folder: Path
    weights_only: bool
    pretrained: bool
    last: bool
    keeps: Collection[Path]
    done: Callable[[Path | None, str | None], None] | None
    begun: bool = False


class Gathers:
    """Values that rank 0 is to get from every rank; see `Run.gather`."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, Callable[[list[Any]], None]]] = []
        self.closed = False  # the ranks meet no more
        self._settling = False

    def ask(self, value: Any, then: Callable[[list[Any]], None]) -> None:
        if self.closed:
            raise CallbackError("run.gather was called in on_fit_end or teardown: ask at the end's on_save_point.")
        if self._settling:
            raise CallbackError("run.gather was called in what another run.gather calls: that is for rank 0 alone.")
        # Here, where the hook that asks can fail alone; in the collective the other ranks would wait for it.
        self.asked.append((pickle.dumps(value), then))

    @contextmanager
    def settling(self, devices: Devices) -> Iterator[None]:
        """Around hooks: what they raise on one rank is raised on all of them, and what they ask for is settled."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - told to all ranks and raised below
            error = raised
        self.settle(devices, error)

    def settle(self, devices: Devices, error: Exception | None = None) -> None:
        """Bring over what was asked for, one collective for all of it; what a `then` raises is raised on all ranks.

        error: what this rank met in the hooks that ask; it is raised on all ranks, and nothing is brought over.
        """
        asked, self.asked = self.asked, []
        number, ranks = len(asked), devices.world_size
        failed, every, squares = devices.agree([float(error is not None), float(number), float(number**2)])
        if failed:
            devices.raise_together(error)
        if ranks * squares != every**2:  # not the same number on each
            calls = f"rank {devices.rank} called run.gather {number} x, all {ranks} ranks together {every:.0f} x"
            devices.raise_together(CallbackError(f"In a hook {calls}: every rank has to make the same calls."))
        if not asked:
            return
        rows = devices.gather_on_main([value for value, _ in asked])
        self._settling = True
        try:
            with devices.together():
                for i, (_, then) in enumerate(asked) if rows else ():
                    then([pickle.loads(row[i]) for row in rows])
        finally:
            self._settling = False
