"""Signals that end a run: what they ask for is done at the next step, not in the handler.

SIGTERM, SIGINT or SIGUSR1 on any rank
  `received` is set; the step goes on                the weights are never caught half-way through an update
  all ranks finish the same step, or the same round of a validation, which is left
  on_save_point                                      `Checkpoint` saves
  the former handlers are back, hooks and trackers end
  SystemExit(128 + signal)
a second one: the former handlers are put back and it is sent again: the process ends as it would have without us
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_NAMES: Final = ("SIGTERM", "SIGINT", "SIGUSR1")


class Interrupted(BaseException):
    """A validation is left on all ranks, because one of them got a signal; never seen by users."""


class Signals:
    """Takes note of a signal while a run trains.

    Attributes:
        received: its name; None before.
        obeyed: the one that all ranks obey at the end of the fit, whichever of them got it.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.obeyed: str | None = None
        self._former: dict[int, Any] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Handle the signals inside; outside the main thread Python allows no handlers, and nothing is done."""
        if threading.current_thread() is threading.main_thread():
            for name in _NAMES:
                number = getattr(signal, name, None)  # Windows has no SIGUSR1
                # Ignored by whoever started this process (nohup), or handled outside Python: so it stays.
                if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._former[number] = signal.signal(number, self._take)
        try:
            yield
        finally:
            self._give_back()
            # It came when the ranks had agreed about the end already: as if it came after the fit.
            if self.received is not None and self.obeyed is None and sys.exc_info()[0] is None:
                os.kill(os.getpid(), signal.Signals[self.received])

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            return
        self._give_back()
        os.kill(os.getpid(), number)

    def _give_back(self) -> None:
        while self._former:
            number, handler = self._former.popitem()
            signal.signal(number, handler)


def exit_status(name: str) -> int:
    """The exit status of a process that a signal of this name ended, as shells give it."""
    return 128 + int(signal.Signals[name])
