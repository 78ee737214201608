"""How progress is drawn: a `Bar` on a terminal, a `CellLine` in a notebook, whole `Lines` of stderr elsewhere.

All are told how far it is as often as one likes (`draw`), may leave time out (`pause`), and end with or without
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
from uuid import uuid4

from tqdm import tqdm

if TYPE_CHECKING:
    Tqdm = tqdm[Any]
else:
    Tqdm = tqdm

LONGEST_SILENCE = 60.0  # seconds without a line in a log file, after which a run looks dead
# The values before the times: a line that is too long for the terminal loses its end.
KNOWN_END = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}, {rate_fmt}]"
OPEN_END = "{desc}: {n_fmt} batches{postfix} [{elapsed}, {rate_fmt}]"
MOST_VALUES = 12  # in a line
MOST_LINES = 50  # of finished epochs in a notebook's cell; the whole of them is sent at each drawing


def on_terminal() -> bool:
    """Whether stderr is a terminal, where a line can be drawn again."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def notebook_shell() -> Any:
    """The IPython shell of the notebook that this process runs the cells of; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    kernel = getattr(shell, "kernel", None)
    # A process forked from a kernel (notebook_launcher) may print, but a kernel shows no displays of its children.
    return None if kernel is None or kernel.session.pid != os.getpid() else shell


class Bar(Tqdm):
    """One line of a terminal, drawn when it is told to.

    title: stands before the bar. total: batches, None when unknown. batches: done already when it is opened.
    began: time.perf_counter() from which its time counts.
    """

    monitor_interval = 0  # tqdm's thread would draw the epoch's bar over the evaluation's
    _instances: ClassVar[Iterable[Any]]  # all open bars of the process, as tqdm keeps them

    def __init__(self, title: str, total: int | None, batches: int, began: float) -> None:
        terminal = sys.stderr.behind if isinstance(sys.stderr, _Above) else sys.stderr
        columns, lines = os.get_terminal_size(terminal.fileno())
        where: dict[str, Any] = {"file": terminal, "dynamic_ncols": True}
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


class CellOutput:
    """One output of a notebook's cell, drawn again in place: lines that stay, and below them the running one.

    It is text, which needs no widgets and is still there when the notebook is saved or converted.
    """

    def __init__(self) -> None:
        self._display_id, self._shown = f"progress-{uuid4().hex}", False
        self._kept: list[str] = []

    def show(self, running: str) -> None:
        """Draws `running` in place of the line that was running."""
        text = "\n".join([*self._kept[-MOST_LINES:], running]).strip()
        place = {"display_id": self._display_id}
        notebook_shell().display_pub.publish({"text/plain": text}, transient=place, update=self._shown)
        self._shown = True

    def keep(self, line: str) -> None:
        """Lets a line stay; the next one runs below it."""
        self._kept.append(line)
        self.show("")


class CellLine:
    """The running line of a notebook's output. output: where it is drawn; the other arguments are a Bar's."""

    def __init__(self, title: str, total: int | None, batches: int, began: float, output: CellOutput) -> None:
        self._title, self._first, self._began, self._output = title, batches, began, output
        self._text = ""

    def draw(self, batches: int, total: int | None, values: Mapping[str, float | str], samples: int = 0) -> None:
        """batches: done; samples: done since it was opened, not shown here; values: shown behind the numbers."""
        self._text = tqdm.format_meter(
            batches,
            cast(int, total),  # None is fine, whatever the stubs say
            perf_counter() - self._began,
            initial=self._first,
            prefix=self._title,
            unit="batch",
            postfix=", ".join(_parts(values)),
            bar_format=OPEN_END if total is None else KNOWN_END,
        )
        self._output.show(self._text)

    def pause(self, seconds: float) -> None:
        """Leaves so many seconds out of its time."""
        self._began += seconds

    def close(self, keep: bool = False) -> None:
        """Lets the line stay, or takes it away."""
        if keep:
            self._output.keep(self._text)
        else:
            self._output.show("")


def keep_output_above(visible: Callable[[], Bar | None]) -> Callable[[], None]:
    """From now on all that is printed, warned or logged to the terminal stands above the bar.

    visible: gives the bar on the terminal's line, or None. Of several (a callback of a fit that predicts) the last one
        that was told here and shows a bar holds the line, and the others come back when it has ended.
    Returns a function that puts the streams back.
    """
    kept = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, _Above) and stream.is_mine():
            stream.cover(visible)  # one more stand-in before it would take the bars' own drawing for output
            kept.append(stream)
        elif stream is not None and stream.isatty():
            kept.append(_Above(stream, visible))
            _exchange(stream, cast(TextIO, kept[-1]))

    def put_back() -> None:
        for above in kept:
            if above.uncover(visible):
                _exchange(cast(TextIO, above), above.behind)

    return put_back


class _Above:
    """Stands in for a terminal's stream: what is written goes above the visible bar instead of into its line."""

    def __init__(self, stream: TextIO, visible: Callable[[], Bar | None]) -> None:
        self.behind, self._stack = stream, [visible]
        self._process = os.getpid()
        self._mid_line = False

    def is_mine(self) -> bool:
        """Whether it was made in this process: a forked loader worker knows a stale bar only."""
        return os.getpid() == self._process

    def cover(self, visible: Callable[[], Bar | None]) -> None:
        """Makes room for the bars of one more run."""
        if (bar := self._bar()) is not None:
            bar.clear()
        self._stack.append(visible)

    def uncover(self, visible: Callable[[], Bar | None]) -> bool:
        """Forgets the bars of a run; whether they were the last ones."""
        self._stack.remove(visible)
        return not self._stack

    def _bar(self) -> Bar | None:
        return next((bar for visible in reversed(self._stack) if (bar := visible()) is not None), None)

    def write(self, text: str) -> int:
        bar = self._bar()
        # Bars of others and ours know each other's lines by themselves.
        if bar is None or not self.is_mine() or not bar.is_alone():
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
