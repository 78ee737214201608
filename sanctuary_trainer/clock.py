"""Where the time of this rank goes, as named laps.

    clock.start()
    batch = next(batches)
    clock.lap("data")              the time since start() was spent on data
    loss = forward(batch)
    clock.lap("forward")           the time since the lap before was spent on the forward
    began = clock.enter()
    all_reduce(loss)
    clock.leave("wait", began)     this time is left out of whatever lap is running

The clock reads the host's time and never waits for a device. One lap costs about 0.2 us, so it may stand in the loop.
Where the host runs ahead of an accelerator its time says little: there a `Trail` notes the laps of some steps on the
device's own timeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

# What the time of a fit's loop is spent on; "wait" is for other ranks and for communication, in whatever lap.
LAPS = (
    "data",
    "h2d",
    "forward",
    "backward",
    "wait",
    "optimizer",
    "callbacks",
    "logging",
    "validation",
    "checkpoint",
)


class Clock:
    """Adds up the seconds of named laps on this rank.

    Attributes:
        trail: notes the same laps on the device's timeline while it is set.
        sampling: whether the running step may cost more, for what only hooks on its gradients tell; set by who reports
            the times.
    """

    __slots__ = ("_inner", "_mark", "_seconds", "_whole", "sampling", "trail")

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._mark = perf_counter()
        self._inner = 0.0  # seconds of all laps inside others
        self._whole = False
        self.trail: Trail | None = None
        self.sampling = False

    def start(self) -> None:
        """Sets the mark: time before it belongs to no lap (what comes before the first epoch, say)."""
        self._mark = perf_counter()

    def lap(self, name: str) -> None:
        """Adds the time since the mark to `name` and sets the mark."""
        now = perf_counter()
        self._seconds[name] += now - self._mark
        self._mark = now
        if self.trail is not None:
            self.trail.mark(name)

    def enter(self) -> float:
        """Begins a lap inside another one, which may hold more of them; to be given to `leave`."""
        if self.trail is not None and not self._whole:
            self.trail.mark(None)
        return perf_counter() - self._inner

    def leave(self, name: str, began: float) -> None:
        """Adds the time since `enter` to `name` and leaves it out of the lap that is running."""
        if self._whole:
            return
        spent = perf_counter() - self._inner - began
        self._seconds[name] += spent
        self._inner += spent
        self._mark += spent
        if self.trail is not None:
            self.trail.mark(name, inner=True)

    @contextmanager
    def whole(self, name: str) -> Iterator[None]:
        """What runs inside belongs to `name`, waits included: it holds every rank up, whoever works in it."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            self.lap(name)

    def total(self, name: str) -> float:
        """Seconds under `name` since the clock was made; 0.0 for a name without a lap."""
        return self._seconds.get(name, 0.0)

    def totals(self) -> dict[str, float]:
        """Seconds under every name since the clock was made."""
        return dict(self._seconds)


class Trail:
    """Laps on an accelerator's own timeline: an event in its queue at each, read when the device has passed them all.

    record: puts an event into the queue and gives it, with `synchronize()` and `elapsed_time(later)` in milliseconds;
        by default torch's events of that device, in the queue that is current now.
    """

    def __init__(self, device: torch.device, record: Callable[[], torch.Event] | None = None) -> None:
        self._record = record or _recorder(device)
        self._marks: list[tuple[str | None, torch.Event]] = []
        self._inner: set[int] = set()  # places of the marks that end a lap inside another one
        self.mark(None)

    def mark(self, name: str | None, inner: bool = False) -> None:
        """What is queued since the mark before belongs to `name`; of None the next lap says what it was."""
        if inner:
            self._inner.add(len(self._marks))
        self._marks.append((name, self._record()))

    def seconds(self) -> dict[str, float]:
        """Seconds on the device's timeline by name, to the last lap; waits where the device has not come there."""
        self._marks[-1][1].synchronize()
        seconds: defaultdict[str, float] = defaultdict(float)
        lap: str | None = None
        for i in range(len(self._marks) - 1, 0, -1):
            name, event = self._marks[i]
            if name is not None and i not in self._inner:
                lap = name
            if name := name or lap:
                seconds[name] += self._marks[i - 1][1].elapsed_time(event) / 1000
        return dict(seconds)


def _recorder(device: torch.device) -> Callable[[], torch.Event]:
    """Events in the queue that is current now: batches are copied in one of their own, whose time is another."""
    queue = torch.accelerator.current_stream(device)

    def record() -> torch.Event:
        event = torch.Event(device.type, enable_timing=True)
        event.record(queue)
        return event

    return record
