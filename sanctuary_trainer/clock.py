"""Where the time of this rank goes, as named laps.

    clock.start()
    batch = next(batches)
    clock.lap("data")              the time since start() was spent on data
    loss = forward_and_backward(batch)
    clock.lap("compute")           the time since the lap before was spent on computing

The clock reads the host's time and never waits for a device: what an accelerator still has in its queue is counted in
the lap in which somebody waits for it. One lap costs about 0.2 us, so it may stand in the loop.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter


class Clock:
    """Adds up the seconds of named laps on this rank."""

    __slots__ = ("_mark", "_seconds", "_taken")

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._taken: defaultdict[str, float] = defaultdict(float)
        self._mark = perf_counter()

    def start(self) -> None:
        """Sets the mark: time before it belongs to no lap (an evaluation between two batches, say)."""
        self._mark = perf_counter()

    def lap(self, name: str) -> None:
        """Adds the time since the mark to `name` and sets the mark."""
        now = perf_counter()
        self._seconds[name] += now - self._mark
        self._mark = now

    def take(self) -> dict[str, float]:
        """Seconds per name since the last take, which start again at nothing; the mark stays where it is.

        For the one who reports the times; anybody else compares two values of `total`, which a take leaves as it is.
        """
        seconds = dict(self._seconds)
        for name, value in seconds.items():
            self._taken[name] += value
        self._seconds.clear()
        return seconds

    def total(self, name: str) -> float:
        """Seconds under `name` since the clock was made; 0.0 for a name without a lap."""
        return self._taken.get(name, 0.0) + self._seconds.get(name, 0.0)
