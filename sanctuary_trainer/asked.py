"""What callbacks ask of a run and is done when all of them have run their hook: checkpoints, values of every rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection
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
        self._settling = False

    def ask(self, value: Any, then: Callable[[list[Any]], None]) -> None:
        if self._settling:
            raise CallbackError("run.gather was called in what another run.gather calls: that is for rank 0 alone.")
        # Here, where the hook that asks can fail alone; in the collective the other ranks would wait for it.
        self.asked.append((pickle.dumps(value), then))

    def settle(self, devices: Devices) -> None:
        """Bring over what was asked for, one collective for all of it; what a `then` raises is raised on all ranks."""
        asked, self.asked = self.asked, []
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
