"""Where values go: one TensorBoard event file and `metrics.jsonl` in the run folder, and accelerate's other trackers.

    Tracking(run_dir, ...)
      open()                 open the files, write the hyper-parameters          main process; nothing elsewhere
      log(values, step)      one event and one JSON line                         the line at once, events every 30 s
      log_images, log_text   one grid; one text
    reached()                bring all of it to the disk; how far the files have come, for a checkpoint
    close(status)            end the session, flush, close

A run that is continued cuts its files to what they were at the checkpoint: what was written after it comes again.

A tracker that cannot write (disk full) ends the run with its own error: a curve with a hole in it would be worse.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from sanctuary_trainer.checkpointing import to_disk
from sanctuary_trainer.errors import DataError, SettingsError
from sanctuary_trainer.event_file import EventFile, event_files
from sanctuary_trainer.hparams import flatten_hparams
from sanctuary_trainer.image_grid import image_grid

LINES = "metrics.jsonl"


class Tracking:
    """The trackers of one run. On a process that is not the main one every method does nothing of its own.

    Args:
        run_dir: the run's folder; made when it is missing.
        log_with: "tensorboard", None for `metrics.jsonl` alone, another of accelerate's tracker names, a
            `GeneralTracker` object, or a list of these; see `check_log_with`.
        is_main: whether this process writes. accelerate's trackers are told everything on every process and decide
            for themselves.
        hparams: shown beside the metrics; never changed. See `flatten_hparams`.
        reached: what `reached()` gave at the checkpoint from which the run goes on; None at a run's start, when files
            of a former attempt are emptied.
        step: the step from which on there are no values yet.

    Raises:
        SettingsError: for a `log_with` that is unknown or not installed.
        OSError: from any method, when a file cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        log_with: Any,
        is_main: bool,
        hparams: Mapping[str, Any],
        reached: Mapping[str, Any] | None = None,
        step: int = 0,
    ) -> None:
        self._names = check_log_with(log_with)
        self._hparams, self._is_main = flatten_hparams(hparams), is_main
        self._reached = {"last_step": None, "bytes": {}, "names": []} if reached is None else reached
        self._step = step
        self._opened = False
        self._lines: TextIO | None = None
        self._board: EventFile | None = None
        self._run_dir = run_dir
        self._last_step: int | None = self._reached["last_step"]
        self.trackers: list[Any] = []
        self._held: list[tuple[str, Any, int]] = []

    def open(self) -> None:
        """Open the files, cut to what they were at the checkpoint, and write the hyper-parameters.

        Not before nothing can refuse the run any more: what was cut is gone. What is logged earlier opens them, too.
        """
        if self._opened:
            return
        self._opened, run_dir, names = True, self._run_dir, self._names
        with ExitStack() as opened:
            opened.callback(self.close, "failure")
            if self._is_main:
                run_dir.mkdir(parents=True, exist_ok=True)
                cut_files(run_dir, self._reached["bytes"])
                self._lines = (run_dir / LINES).open("a", encoding="utf-8", buffering=1)
                if "tensorboard" in names:
                    self._board = EventFile(run_dir, self._hparams, self._step, self._reached.get("names", []))
            for tracker in (_accelerate_tracker(name, run_dir) for name in names if name != "tensorboard"):
                tracker.start()
                self.trackers.append(tracker)
                tracker.store_init_configuration(dict(self._hparams))
            opened.pop_all()  # nothing failed: all of it stays open

    def log(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        """Write values at x = step, with the epoch beside them.

        In `metrics.jsonl` a value that is not finite is the string "NaN", "Infinity" or "-Infinity": JSON has no such
        numbers, and `float(...)` reads them back.
        """
        self.open()
        if self._lines is not None:
            line: dict[str, Any] = {"step": step, "epoch": epoch, "time": time.time()}
            line.update((name, _for_json(value)) for name, value in values.items())
            self._lines.write(json.dumps(line, allow_nan=False) + "\n")
        if self._board is not None:
            # One point of `epoch` for a step, however many sets of values it has.
            self._board.add_scalars(values if step == self._last_step else {**values, "epoch": epoch}, step)
            self._last_step = step
        for tracker in self.trackers:
            tracker.log({**values, "epoch": epoch}, step=step)

    def log_images(self, name: str, images: Any, step: int, later: bool = False) -> None:
        """Show images as one grid, the first 64 of them, in TensorBoard and in those other trackers that take images.

        later: with `show_held`, for what may be left and done again.

        images: (N, C, H, W) or (C, H, W), C = 1 or 3, tensor or array; float in [0, 1] (clipped) or uint8.

        Raises:
            DataError: for another shape or type.
        """
        self.open()
        if self._board is None and not self.trackers:
            return
        self._held.append((name, image_grid(name, images), step))  # (H, W, 3) uint8
        if not later:
            self.show_held()

    def show_held(self) -> None:
        """Show the images that were held."""
        held, self._held = self._held, []
        for name, grid, step in held:
            if self._board is not None:
                self._board.add_image(name, grid, step)
            for tracker in self.trackers:
                if hasattr(tracker, "log_images"):
                    tracker.log_images({name: [grid]}, step=step)

    def log_text(self, name: str, markdown: str, step: int) -> None:
        """Show a text in TensorBoard, as Markdown. accelerate's other trackers have no common way to take one.

        Raises:
            DataError: it is no text.
        """
        if not isinstance(markdown, str):
            raise DataError(f"log_text({name!r}) got {type(markdown).__name__}; a str was expected.")
        self.open()
        if self._board is not None:
            self._board.add_text(name, markdown, step)

    def reached(self) -> dict[str, Any]:
        """Bring what was written to the disk, and tell how far the files have come."""
        if self._board is not None:
            self._board.flush()
        names = [] if self._board is None else list(self._board.names)
        sizes: dict[str, int] = {}
        for file in written_files(self._run_dir) if self._lines is not None else []:
            to_disk(file)
            sizes[file.name] = file.stat().st_size
        return {"last_step": self._last_step, "bytes": sizes, "names": names}

    def close(self, status: str = "success") -> None:
        """Write everything that is pending and close. status: "success", "failure" or "unknown"."""
        lines, board, trackers = self._lines, self._board, self.trackers
        self._lines, self._board, self.trackers = None, None, []
        with ExitStack() as stack:  # one that fails does not keep the others open
            for tracker in trackers:
                stack.callback(tracker.finish)
            if board is not None:
                stack.callback(board.close, status)
            if lines is not None:
                stack.callback(lines.close)


def written_files(run_dir: Path) -> list[Path]:
    """What this package's trackers have written into a run's folder."""
    return [path for path in (run_dir / LINES, *event_files(run_dir)) if path.is_file()]


def cut_files(run_dir: Path, sizes: Mapping[str, int]) -> None:
    """Cut the trackers' files to these sizes in bytes; those that have none are removed."""
    for file in written_files(run_dir):
        if file.name in sizes:
            os.truncate(file, min(sizes[file.name], file.stat().st_size))
        else:
            file.unlink()


def check_log_with(log_with: Any) -> list[Any]:
    """Check `log_with` before a run and give it as a list.

    Returns:
        Tracker names and objects, each name once; "all" becomes every tracker that is installed.

    Raises:
        SettingsError: for a name that is unknown or not installed, or an object that is no tracker.
    """
    asked = [] if log_with is None else list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    names: list[Any] = []
    for item in asked:
        name = item.value if isinstance(item, Enum) else item  # accelerate has its names as an enum, too
        for one in _installed() if name == "all" else [name]:
            if one != "tensorboard":
                _check_tracker(one)
            if one not in names:
                names.append(one)
    return names


def _for_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _installed() -> list[str]:
    """The trackers that can be used here. Importing accelerate's costs, so only for another tracker than ours."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    registered = set(LOGGER_TYPE_TO_CLASS) - set(LoggerType.list())
    return sorted({str(name) for name in get_available_trackers()} | registered)


def _check_tracker(tracker: Any) -> None:
    from accelerate.tracking import GeneralTracker

    if isinstance(tracker, GeneralTracker):
        return
    installed = _installed()
    if not isinstance(tracker, str):
        raise SettingsError(
            f"log_with got {tracker!r:.80} of type {type(tracker).__name__}; a tracker's name, one of accelerate's "
            f"GeneralTracker objects, a list of these or None was expected. Installed here: {', '.join(installed)}."
        )
    if tracker not in installed:
        raise SettingsError(
            f"log_with={tracker!r} is unknown or not installed. Installed here: {', '.join(installed)}."
        )


def _accelerate_tracker(tracker: Any, run_dir: Path) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    if not isinstance(tracker, str):
        return tracker
    make = LOGGER_TYPE_TO_CLASS[tracker]
    # The project is the folder of runs; who wants another name, an entity or tags gives a tracker object.
    project = run_dir.resolve().parent.name
    return make(project, str(run_dir)) if make.requires_logging_directory else make(project)
