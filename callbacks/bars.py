"""How progress is drawn on stderr: a `Bar` where a line can be drawn again, whole `Lines` elsewhere.

Both are told how far it is as often as one likes (`draw`), may leave time out (`pause`), and end with or without
leaving a line (`close`). `keep_output_above` makes room for what others print while a bar is on the terminal's line.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, cast

from tqdm.auto import tqdm

if TYPE_CHECKING:
    Tqdm = tqdm[Any]
else:
    Tqdm = tqdm

IN_NOTEBOOK = any("notebook" in base.__module__ for base in tqdm.__mro__)
LONGEST_SILENCE = 60.0  # seconds without a line in a log file, after which a run looks dead
# The values before the times: a line that is too long for the terminal loses its end.
KNOWN_END = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}, {rate_fmt}]"
OPEN_END = "{desc}: {n_fmt} batches{postfix} [{elapsed}, {rate_fmt}]"
MOST_VALUES = 12  # in a line


def can_redraw() -> bool:
    """Whether stderr is a terminal or a notebook, where a line can be drawn again."""
    return IN_NOTEBOOK or (sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb")


class Bar(Tqdm):
    """One line of a terminal, or a widget of a notebook, drawn when it is told to.

    title: stands before the bar. total: batches, None when unknown. batches: done already when it is opened.
    began: time.perf_counter() from which its time counts.
    """

    monitor_interval = 0  # tqdm's thread would draw the epoch's bar over the evaluation's
    _instances: ClassVar[Iterable[Any]]  # all open bars of the process, as tqdm keeps them

    def __init__(self, title: str, total: int | None, batches: int, began: float) -> None:
        where: dict[str, Any] = {}
        if not IN_NOTEBOOK:
            terminal = sys.stderr.behind if isinstance(sys.stderr, _Above) else sys.stderr
            columns, lines = os.get_terminal_size(terminal.fileno())
            where = {"file": terminal, "dynamic_ncols": True}
            if columns == 0 or lines < 3:
                # Some pseudo-terminals have 0 columns and lines, and tqdm would find no room in them.
                where |= {"dynamic_ncols": False, "ncols": (columns or 80) - 1, "nrows": 20}
        # All bars stand on position 0: the evaluation's covers the epoch's until it is closed.
        super().__init__(
            desc=title,
            total=total,
            initial=batches,
            unit="batch",
            bar_format=OPEN_END if total is None else KNOWN_END,
            position=0,
            mininterval=0,
            miniters=0,
            **where,
        )
        self.pause(began - perf_counter())

    def __str__(self) -> str:
        return super().__str__()[: self.ncols]  # tqdm 4.67 does not cut a line without a total

    def draw(self, batches: int, total: int | None, values: Mapping[str, float | str], samples: int = 0) -> None:
        """batches: done; samples: done since it was opened, not shown here; values: shown behind the numbers."""
        self.total = total
        self.set_postfix_str(", ".join(_parts(values)), refresh=False)
        self.update(batches - self.n)

    def pause(self, seconds: float) -> None:
        """Leaves so many seconds out of its time."""
        if not self.disable:  # TQDM_DISABLE=1 leaves a bar without a start
            self.start_t += seconds
            self.last_print_t += seconds

    def close(self, keep: bool = False) -> None:
        """Ends the line, or clears it."""
        self.leave = keep
        if not keep:
            self.total = None  # a notebook leaves a bar that has not reached its total
        super().close()

    @classmethod
    def is_alone(cls) -> bool:
        """Whether no bar of somebody else is open."""
        return all(isinstance(bar, cls) for bar in cls._instances)


class Lines:
    """Whole lines for a log file, few of them: where a quarter of the batches is done, and at the end.

    line_seconds: time between two lines at least; the other arguments are a Bar's.
    """

    def __init__(self, title: str, total: int | None, batches: int, began: float, line_seconds: float) -> None:
        self._title, self._began, self._line_seconds = title, began, line_seconds
        self._first, self._written, self._quarter = batches, began, 4 * batches // total if total else 0
        self._text: Callable[[], str] = str

    def draw(self, batches: int, total: int | None, values: Mapping[str, float | str], samples: int = 0) -> None:
        """batches: done; samples: done since it was opened, 0 when unknown; values: shown behind the numbers."""
        now = perf_counter()
        self._text = partial(self._line, now, batches, total, values, samples)
        quarter = 4 * batches // total if total else 0
        due = self._line_seconds if quarter > self._quarter else LONGEST_SILENCE
        if batches != total and now - self._written >= due:  # the last line comes with close
            self._written, self._quarter = now, quarter
            self._write()

    def _line(
        self, now: float, batches: int, total: int | None, values: Mapping[str, float | str], samples: int
    ) -> str:
        seconds = max(now - self._began, 1e-9)
        rate = f"{samples / seconds:.4g} samples/s" if samples else f"{(batches - self._first) / seconds:.4g} batches/s"
        count = f"{batches} batches" if total is None else f"{100 * batches // total}%, {batches}/{total} batches"
        return f"{self._title}: {', '.join([count, tqdm.format_interval(seconds), rate, *_parts(values)])}"

    def pause(self, seconds: float) -> None:
        """Leaves so many seconds out of its time."""
        self._began += seconds

    def close(self, keep: bool = False) -> None:
        """Writes the last line, or none."""
        if keep:
            self._write()

    def _write(self) -> None:
        if sys.stderr is not None:
            sys.stderr.write(f"{self._text()}\n")
            sys.stderr.flush()


def keep_output_above(visible: Callable[[], Bar | None]) -> Callable[[], None]:
    """From now on all that is printed, warned or logged to the terminal stands above the bar.

    visible: gives the bar on the terminal's line, or None.
    Returns a function that puts the streams back.
    """
    exchanged = []
    for stream in (sys.stdout, sys.stderr):
        if not IN_NOTEBOOK and stream is not None and stream.isatty():
            above = cast(TextIO, _Above(stream, visible))
            _exchange(stream, above)
            exchanged.append((stream, above))

    def put_back() -> None:
        for stream, above in exchanged:
            _exchange(above, stream)

    return put_back


class _Above:
    """Stands in for a terminal's stream: what is written goes above the visible bar instead of into its line."""

    def __init__(self, stream: TextIO, visible: Callable[[], Bar | None]) -> None:
        self.behind, self._visible = stream, visible
        self._process = os.getpid()
        self._mid_line = False

    def write(self, text: str) -> int:
        bar = self._visible()
        # A forked loader worker knows a stale bar only. Bars of others and ours know each other's lines by themselves.
        if bar is None or os.getpid() != self._process or not bar.is_alone():
            return self.behind.write(text)
        with bar.get_lock():  # type: ignore[no-untyped-call]
            if not self._mid_line:
                bar.clear(nolock=True)
            written = self.behind.write(text)
            self._mid_line = not text.endswith("\n")
            if not self._mid_line:
                self.behind.flush()
                bar.refresh(nolock=True)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


def _exchange(old: TextIO, new: TextIO) -> None:
    """Puts `new` where `old` is what Python prints to or what a logger writes to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is old:
            setattr(sys, name, new)
    root = logging.getLogger()
    for logger in (root, *root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)


def _parts(values: Mapping[str, float | str]) -> list[str]:
    """`name=value` of each, MOST_VALUES at most, and how many were left out."""
    shown = [f"{name}={value}" if isinstance(value, str) else f"{name}={value:.4g}" for name, value in values.items()]
    return shown if len(shown) <= MOST_VALUES else [*shown[:MOST_VALUES], f"{len(shown) - MOST_VALUES} more"]
