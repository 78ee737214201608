"""Write checkpoints, keep the best or the latest of them, and remove the others.

    on_log              a fresh value of the monitor: of a validation, or of the epoch
    on_save_point       is one due? does it belong to the best? -> run.save_checkpoint
    done                the new one is complete: note it, let `last` point to it, remove what is no longer kept
    on_exception        the same at the last boundary, where there is one

Every decision is made from counts and reduced values, so that all ranks make the same.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shutil
import string
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from sanctuary_trainer import Callback, Run, RunFolderError, SettingsError


class Checkpoint(Callback):
    """Save what a run needs to go on, at the end of every epoch unless told otherwise, and at the run's end.

    Args:
        folder: where; a relative one lies in the run's folder. None: its `checkpoints`.
        name: of one checkpoint, with `{step}`, `{epoch}` and any logged value: `"{epoch}-{val/accuracy:.3f}"`.
            What does not belong into a file's name becomes "_".
        monitor: the full name of a value of validation, or of the epoch: the best are kept, not the latest.
        mode: "min" or "max"; demanded with a monitor.
        save_top_k: how many are kept; -1: all; 0: none but the last (see `save_last`).
        save_last: a link `last` to the newest, which is kept though it may not be among the best.
        every_n_steps, every_n_epochs, every: when one is due; several may be given. `every`: a `timedelta` or seconds,
            by rank 0's clock. With none of them: every epoch, or with a monitor at each of its values.
        on_exception: also when an error ends the run, where it can be continued exactly: between two steps.
        weights_only: nothing but weights, from which no run can go on.
        save_pretrained: also write the task's transformers models as `from_pretrained` reads them, each to a folder
            named as the task's attribute.

    Raises:
        SettingsError: a setting is wrong, or two contradict each other.

    A value that is not finite is never among the best; weights that are not finite are not written. The last save point
    of a run is always saved, by the callbacks without a monitor, or by those with one where there are no others.
    """

    identifying = ("monitor", "mode", "folder", "name", "every_n_steps", "every_n_epochs", "every", "weights_only")

    def __init__(
        self,
        folder: str | Path | None = None,
        name: str = "step_{step:08d}",
        monitor: str | None = None,
        mode: str | None = None,
        save_top_k: int = 1,
        save_last: bool = False,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        every: float | timedelta | None = None,
        on_exception: bool = True,
        weights_only: bool = False,
        save_pretrained: bool = True,
    ) -> None:
        _check(monitor, mode, save_top_k, every_n_steps, every_n_epochs, every)
        self.folder = Path("checkpoints" if folder is None else folder)
        self.name, self.monitor, self.mode = name, monitor, mode
        self.save_top_k, self.save_last = save_top_k, save_last
        self.every_n_steps, self.every_n_epochs = every_n_steps, every_n_epochs
        self.every = every.total_seconds() if isinstance(every, timedelta) else every
        self.saves_on_exception, self.weights_only, self.save_pretrained = on_exception, weights_only, save_pretrained
        self._begin()

    def _begin(self) -> None:
        self._kept: list[tuple[float, Path]] = []  # the best or the latest, the first to go last
        self._last: Path | None = None  # the newest, where it is kept for being that
        self._pending: tuple[float | None, Path] | None = None  # (value, or None to keep as the newest; where)
        self._fresh: float | None = None  # a value of the monitor that no save point has seen
        self._seen = False  # whether the monitor had any
        self._saved_step = -1
        self._timer = time.monotonic()

    @property
    def best(self) -> Path | None:
        """The best checkpoint, or without a monitor the latest."""
        return self._kept[0][1] if self._kept else self._last

    @property
    def kept(self) -> list[Path]:
        """The checkpoints that are kept, the best or latest first; one that is about to be written is among them."""
        kept, last = self._after(self._pending)
        return list(dict.fromkeys([*(path for _, path in kept), *([last] if last else [])]))

    def setup(self, run: Run) -> None:
        """A new run starts with nothing."""
        self._begin()

    def on_fit_start(self, run: Run) -> None:
        """Make the folder, so that one that cannot be written to is told before the run."""
        self._timer = time.monotonic()
        self._announce(run)
        if not run.is_main:
            return
        folder = self._folder(run)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"The folder {folder} for checkpoints cannot be made: {error}") from error
        if not os.access(folder, os.W_OK):
            raise RunFolderError(f"The folder {folder} for checkpoints cannot be written to.")

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        """Warn early of a monitor that validation does not log."""
        if stage == "sanity" and self.monitor is not None and self.monitor.startswith("val/"):
            if self.monitor not in metrics:
                near = _nearest(self.monitor, metrics)
                run.warn(f"Checkpoint watches {self.monitor!r}, which sanity validation did not log.{near}")

    def on_log(self, run: Run, values: dict[str, float], step: int) -> None:
        """Take a fresh value of the monitor; of a series of steps its value over the epoch."""
        if self.monitor is None or not (run.ends_epoch or run.stage == "val"):
            return
        value = values.get(self.monitor, values.get(f"{self.monitor}_epoch"))
        if value is not None:
            self._fresh, self._seen = value, True

    def on_save_point(self, run: Run) -> None:
        """Ask for a checkpoint if one is due."""
        if self.every is not None and run.is_main and time.monotonic() - self._timer >= self.every:
            run.save_soon()  # this clock is rank 0's alone: all hear of it with the next step
        ends = run.state.stop_reason is not None
        if not (ends or self._fresh is not None or run.save_asked or self._may_be_due(run)):
            return
        due, fresh = self._is_due(run), self._fresh
        self._check_monitor(run)
        if due:
            self._fresh = None
        the_end = ends and self._saves_the_end(run)
        value = self._value(run, fresh) if due or (the_end and self.monitor is None) else None
        if value is not None and self._enters(value):
            self._ask(run, value)
        elif (due and self.save_last) or the_end:
            self._ask(run, None)

    def on_exception(self, run: Run, exception: BaseException) -> None:
        """Save the last boundary, where the error came at one; a second Ctrl-C ends the run at once."""
        trained = run.state.global_step > 0 and run.state.global_step != self._saved_step
        if self.saves_on_exception and run.at_boundary and trained and not isinstance(exception, KeyboardInterrupt):
            if self._saves_the_end(run):
                ranked = self.monitor is None and self.save_top_k != 0
                self._ask(run, float(run.state.global_step) if ranked else None)

    def state_dict(self) -> dict[str, Any]:
        """What is kept, the checkpoint that is being written included."""
        kept, last = self._after(self._pending)
        return {"kept": kept, "last": last, "seen": self._seen, "fresh": self._fresh}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was kept."""
        self._kept = [(value, Path(path)) for value, path in state["kept"]]
        self._last, self._seen, self._fresh = state["last"], state["seen"], state["fresh"]

    # When

    def _may_be_due(self, run: Run) -> bool:
        state = run.state
        return state.batch == 0 or (self.every_n_steps is not None and state.global_step % self.every_n_steps == 0)

    def _is_due(self, run: Run) -> bool:
        state, epoch_ended = run.state, run.state.batch == 0
        if self.monitor is not None and self._fresh is None:
            return False
        if self.every_n_steps is None and self.every_n_epochs is None and self.every is None:
            return self.monitor is not None or epoch_ended
        by_steps = self.every_n_steps is not None and state.global_step % self.every_n_steps == 0
        by_epochs = self.every_n_epochs is not None and epoch_ended and state.epoch % self.every_n_epochs == 0
        by_time = self.every is not None and run.save_asked
        return (by_steps and self._saved_step != state.global_step) or by_epochs or by_time

    def _value(self, run: Run, fresh: float | None) -> float | None:
        """What the checkpoint is ranked by: the monitor's value, else the order of saving; None if it is not finite."""
        if self.monitor is None:
            return float(run.state.global_step)
        if fresh is None or math.isfinite(fresh):
            return fresh
        run.warn(f"{self.monitor} is {fresh} at step {run.state.global_step}: it is not taken for the best.")
        return None

    def _enters(self, value: float) -> bool:
        if self.save_top_k == 0:
            return False
        if self.monitor is None or self.save_top_k < 0 or len(self._kept) < self.save_top_k:
            return True
        worst = self._kept[-1][0]
        return value < worst if self.mode == "min" else value > worst

    def _saves_the_end(self, run: Run) -> bool:
        """Whether it falls to this callback to save the end of the run."""
        if run.state.global_step == 0 or (self.save_top_k == 0 and not self.save_last):
            return False
        full = [each for each in _checkpoints(run) if not each.weights_only and each.save_top_k != 0]
        chosen = [each for each in full if each.monitor is None] or full or [self]
        return self in chosen

    def _check_monitor(self, run: Run) -> None:
        """A name that a whole epoch and its validation did not log will not come."""
        if self.monitor is None or self._seen or not (run.validated or (run.state.batch == 0 and run.state.epoch)):
            return
        if self.monitor.startswith("val") and not run.validated:
            return
        if not self.monitor.startswith("val") and run.state.epoch == 0:
            return
        known = ", ".join(sorted(run.metrics)) or "nothing"
        raise SettingsError(
            f"Checkpoint watches {self.monitor!r}, which nothing has logged; there are {known}."
            f"{_nearest(self.monitor, run.metrics)}"
        )

    # What

    def _ask(self, run: Run, value: float | None) -> None:
        path = self.folder / self._name(run)
        self._pending = value, path

        def done(written: Path | None, failure: str | None) -> None:
            self._finish(run, written)

        run.save_checkpoint(path, weights_only=self.weights_only, pretrained=self.save_pretrained, done=done)

    def _finish(self, run: Run, written: Path | None) -> None:
        pending, self._pending = self._pending, None
        if written is None or pending is None:
            return
        before = self.kept
        self._kept, self._last = self._after((pending[0], _inside(written, run)))
        self._saved_step, self._timer = run.state.global_step, time.monotonic()
        if self.save_last and run.is_main:
            _point(written.parent / "last", written)
        elsewhere = [path for other in _checkpoints(run) if other is not self for path in other.kept]
        for path in before:
            if path not in self.kept and path not in elsewhere and run.run_dir is not None:
                run.remove_checkpoint(run.run_dir / path)
        self._announce(run)

    def _after(self, pending: tuple[float | None, Path] | None) -> tuple[list[tuple[float, Path]], Path | None]:
        """What is kept once the pending checkpoint is complete: the ranked ones, and the newest."""
        if pending is None:
            return self._kept, self._last
        value, path = pending
        kept = [entry for entry in self._kept if entry[1] != path]  # a name that is used again
        if value is not None:
            kept.append((value, path))
            kept.sort(key=lambda entry: entry[0], reverse=self.mode != "min")
            kept = kept if self.save_top_k < 0 else kept[: self.save_top_k]
        return kept, path if value is None or self.save_last else self._last

    def _announce(self, run: Run) -> None:
        """Tell the run which checkpoint is the best: of the first that watches something, else the latest."""
        found = [each for each in _checkpoints(run) if each.best is not None]
        watching = [each for each in found if each.monitor is not None]
        best = (watching or found)[0].best if found else None
        run.best_checkpoint = None if best is None or run.run_dir is None else run.run_dir / best

    def _folder(self, run: Run) -> Path:
        assert run.run_dir is not None
        return run.run_dir / self.folder

    def _name(self, run: Run) -> str:
        values = {**run.metrics, "step": run.state.global_step, "epoch": run.state.epoch}
        text = _Names().vformat(self.name, (), values)
        return re.sub(r"[^\w.=+,-]+", "_", text).strip("._") or "checkpoint"


class _Names(string.Formatter):
    """Fields are whole names: `{val/accuracy:.3f}` is the value "val/accuracy"; one that is not there is "none"."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        return kwargs.get(field_name, "none"), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return value if isinstance(value, str) else str(super().format_field(value, format_spec))


def _checkpoints(run: Run) -> list[Checkpoint]:
    return [callback for callback in run.callbacks if isinstance(callback, Checkpoint)]


def _inside(path: Path, run: Run) -> Path:
    """The path as it is stored: relative to the run's folder where it lies in it, so that the folder may be moved."""
    assert run.run_dir is not None
    return path.relative_to(run.run_dir) if path.is_relative_to(run.run_dir) else path


def _point(link: Path, target: Path) -> None:
    """Let a link point to a checkpoint beside it, or be a copy where the file system has no links."""
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        beside.unlink()
    try:
        beside.symlink_to(target.name)
    except OSError:
        shutil.copytree(target, beside)
        if link.exists():
            shutil.rmtree(link)
    os.replace(beside, link)


def _nearest(name: str, names: Mapping[str, float]) -> str:
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.3)
    return f" Did you mean {near[0]!r}?" if near else ""


def _check(
    monitor: str | None,
    mode: str | None,
    save_top_k: Any,
    every_n_steps: Any,
    every_n_epochs: Any,
    every: Any,
) -> None:
    if (monitor is None) != (mode is None) or mode not in (None, "min", "max"):
        raise SettingsError(
            f'Checkpoint got monitor={monitor!r} and mode={mode!r}; with a monitor mode="min" or "max" says which '
            "values are better, without one there is none."
        )
    if not isinstance(save_top_k, int) or isinstance(save_top_k, bool) or save_top_k < -1:
        raise SettingsError(f"save_top_k={save_top_k!r}; a whole number was expected: -1 (all), 0 (none) or more.")
    for name, value in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise SettingsError(f"{name}={value!r}; a whole number of at least 1 was expected.")
    seconds = every.total_seconds() if isinstance(every, timedelta) else every
    if seconds is not None and (not isinstance(seconds, int | float) or not seconds > 0):
        raise SettingsError(f"every={every!r}; a timedelta or seconds above 0 were expected.")
