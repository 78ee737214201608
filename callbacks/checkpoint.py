"""Write checkpoints, keep the best or the latest of them, and remove the others.

    on_log              a fresh value of the monitor: of a validation, or of the epoch
    on_save_point       is one due? does it belong to the best? -> run.save_checkpoint
    done                the new one is complete: note it, and remove what is no longer kept
    on_exception        the same at the last boundary, where there is one

Every decision is made from counts, reduced values and what the ranks agree on, so that all ranks make the same.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from sanctuary_trainer import Callback, CheckpointError, Run, RunFolderError, SettingsError
from sanctuary_trainer.callbacks.keeping import Entry, Kept
from sanctuary_trainer.callbacks.naming import file_name, nearest


class Checkpoint(Callback):
    """Save what a run needs to go on, at the end of every epoch unless told otherwise, and at the run's end.

    Args:
        folder: where; a relative one lies in the run's folder. None: its `checkpoints`.
        name: of one checkpoint, with `{step}`, `{epoch}` and any logged value: `"{epoch}-{val/accuracy:.3f}"`.
            What does not belong into a file's name becomes "_"; the name of one that stays gets a number.
        monitor: the full name of a value of validation, or of the epoch: the best are kept, not the latest.
        mode: "min" or "max"; demanded with a monitor.
        save_top_k: how many are kept; -1: all; 0: none but the last (see `save_last`).
        save_last: a link `last` to the newest, which is kept though it may not be among the best.
        every_n_steps: one is due after every so many; with a monitor, here and below, only where it has a new value.
        every_n_epochs: and after every so many; with none of the three: every epoch.
        every: and after a `timedelta` or seconds, by rank 0's clock.
        on_exception: also when an error ends the run, where it can be continued exactly: between two steps.
        weights_only: nothing but weights, from which no run can go on.
        save_pretrained: also write the task's transformers models for `from_pretrained`, each to the attribute's name.

    Raises:
        SettingsError: a setting is wrong, two contradict each other, or nothing logs the monitor.
        RunFolderError: checkpoints cannot be written to the folder.

    A value that is not finite is never among the best; weights that are not finite are not written. The last save point
    of a run is always saved, by the callbacks without a monitor, or by those with one where there are no others.
    """

    # Not when one is due: a run that goes on with another schedule has still its best.
    identifying = ("monitor", "mode", "folder", "name", "weights_only")

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
        if (monitor is None) != (mode is None) or mode not in (None, "min", "max"):
            raise SettingsError(
                f'Checkpoint got monitor={monitor!r} and mode={mode!r}; with a monitor mode="min" or "max" says which '
                "values are better, without one there is none."
            )
        seconds = every.total_seconds() if isinstance(every, timedelta) else every
        _check("save_top_k", save_top_k, _is_whole(save_top_k, -1), "a whole number was expected: -1 (all), 0 or more")
        for option, count in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs)):
            _check(option, count, count is None or _is_whole(count, 1), "a whole number of at least 1 was expected")
        timed = isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0
        _check("every", every, every is None or timed, "a timedelta or seconds above 0 were expected")
        file_name(name, {"step": 0, "epoch": 0}, missing=0.0)  # a wrong format is told before the run
        self.folder = Path("checkpoints" if folder is None else folder)
        self.name, self.monitor, self.mode = name, monitor, mode
        self.save_top_k, self.save_last = save_top_k, save_last
        self.every_n_steps, self.every_n_epochs, self.every = every_n_steps, every_n_epochs, seconds
        self.saves_on_exception, self.weights_only, self.save_pretrained = on_exception, weights_only, save_pretrained
        self._begin()

    def _begin(self) -> None:
        self._kept = Kept(self.save_top_k, self.mode, self.save_last)
        self._asked: tuple[Any, Entry] | None = None  # what the run was asked for at this save point
        self._doomed: list[Path] = []  # what a former attempt was about to remove
        self._all: list[Checkpoint] = [self]  # those of the run
        self._fresh: tuple[float, int] | None = None  # a value of the monitor, and the step it belongs to
        self._seen = False  # whether the monitor had any
        self._timer, self._told_time = time.monotonic(), False

    @property
    def best(self) -> Path | None:
        """The best checkpoint, or without a monitor the latest; relative to the run's folder where it lies in it."""
        return self.kept[0].path if self.kept else None

    @property
    def kept(self) -> list[Entry]:
        """The checkpoints that are kept, the best or latest first."""
        return self._kept.entries

    @property
    def coming(self) -> Kept:
        """What is kept once the checkpoint that is being written is complete."""
        if self._asked is None or not self._asked[0].begun:
            return self._kept
        asked, new = self._asked
        return self._kept.after(new.at(self.folder / asked.folder.name))

    def setup(self, run: Run) -> None:
        """A new fit starts with nothing; after it, what it kept can be asked for."""
        if run.verb != "fit":
            return
        self._begin()
        if self.monitor is not None and self.monitor.startswith("val/") and not run.plan.validates:
            raise SettingsError(f"Checkpoint watches {self.monitor!r}, and this fit has nothing to validate with.")

    def on_fit_start(self, run: Run) -> None:
        """Make the folder, so that one that cannot be written to is told before the run; see what is still there."""
        assert run.run_dir is not None
        self._all = [callback for callback in run.callbacks if isinstance(callback, Checkpoint)]
        self._timer = time.monotonic()
        if self.monitor is not None:
            run.keep_epoch(self.monitor)
        # What a former attempt removed later on, or left in another folder, is not there.
        there = [entry for entry in self.kept if run.checkpoints.get(run.run_dir / entry.path) == entry.step]
        self._kept = self._kept.only(there)
        self._remove(run, self._doomed)
        self._announce(run)
        if run.is_main:
            folder = run.run_dir / self.folder
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunFolderError(f"The folder {folder} for checkpoints cannot be made: {error}") from error
            if not os.access(folder, os.W_OK):
                raise RunFolderError(f"The folder {folder} for checkpoints cannot be written to.")

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        """Warn early of a monitor that validation does not log."""
        if stage == "sanity" and self.monitor is not None and self.monitor.startswith("val/"):
            known = [*metrics, *(f"{name}_{variant}" for name in metrics for variant in run.variants)]
            if self.monitor not in known:
                text = f"Checkpoint watches {self.monitor!r}, which sanity validation did not log."
                run.warn(text + nearest(self.monitor, known))

    def on_log(self, run: Run, values: dict[str, float], step: int) -> None:
        """Take a fresh value of the monitor; of a series of steps its value over the epoch."""
        if self.monitor is not None and (run.ends_epoch or run.stage == "val"):
            value = values.get(self.monitor, values.get(f"{self.monitor}_epoch"))
            if value is not None:
                self._fresh, self._seen = (value, step), True

    def on_save_point(self, run: Run) -> None:
        """Ask for a checkpoint if one is due."""
        if self.every is not None and self.monitor is None and self._is_time(run) and not self._told_time:
            self._told_time = True
            run.save_soon()  # this clock is rank 0's alone: all hear of it with the next step
        self._check_monitor(run)
        if run.owes_saves and self._has_saved(run.state.global_step):
            return  # cut off between this one's checkpoint and another's
        due = self._is_due(run)
        the_end = run.state.stop_reason is not None and self._saves_the_end(run, self._all)
        if not (due or the_end):
            return
        value = self._value(run) if due or self.monitor is None else None
        if value is not None and self._kept.enters(value, run.state.global_step):
            self._ask(run, value)
        elif the_end or self.save_last:
            self._ask(run, None)

    def on_exception(self, run: Run, exception: BaseException) -> None:
        """Save the last boundary, where the error came at one; a second Ctrl-C ends the run at once."""
        saved = any(entry.step == run.state.global_step for entry in self.kept)
        if not run.at_boundary or self._asked is not None or saved:
            return
        able = [each for each in self._all if each.saves_on_exception]
        if not isinstance(exception, KeyboardInterrupt | CheckpointError) and self._saves_the_end(run, able):
            ranked = self.monitor is None and self.save_top_k != 0
            self._ask(run, float(run.state.global_step) if ranked else None)

    def state_dict(self) -> dict[str, Any]:
        """What is kept once the checkpoint that is being written is complete, and what is removed then."""
        stays = {entry.path for each in self._all for entry in each.coming.entries}
        return self.coming.state_dict() | {
            "doomed": [entry.path for entry in self.kept if entry.path not in stays],
            "fresh": self._fresh,
            "seen": self._seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was kept."""
        self._kept = self._kept.loaded(state)
        self._doomed, self._fresh, self._seen = state["doomed"], state["fresh"], state["seen"]

    def saves_at(self, step: int) -> bool:
        """Only what neither an end nor a validation nor `save_asked` goes with: a number of steps."""
        return self.every_n_steps is not None and step % self.every_n_steps == 0

    # When

    def _is_due(self, run: Run) -> bool:
        state = run.state
        if self.monitor is not None and (self._fresh is None or self._fresh[1] != state.global_step):
            return False  # a value of other weights does not tell how good these are
        epoch_ended = state.batch == 0 and state.epoch > 0
        if self.every_n_steps is None and self.every_n_epochs is None and self.every is None:
            return self.monitor is not None or epoch_ended
        steps = self.every_n_steps is not None and state.global_step > 0 and state.global_step % self.every_n_steps == 0
        if steps and not self._has_saved(state.global_step):  # a window that is left out makes no step
            return True
        if self.every_n_epochs is not None and epoch_ended and state.epoch % self.every_n_epochs == 0:
            return True
        if self.every is None or not (run.save_asked or self.monitor is not None):
            return False
        return run.devices.agree([float(self._is_time(run))])[0] > 0

    def _is_time(self, run: Run) -> bool:  # rank 0 alone knows
        return run.is_main and self.every is not None and time.monotonic() - self._timer >= self.every

    def _has_saved(self, step: int) -> bool:
        return any(each.step == step and (self.monitor is None or each.value is not None) for each in self.kept)

    def _value(self, run: Run) -> float | None:
        """What the checkpoint is ranked by: the monitor's value, else the order of saving; None if it is not finite."""
        value = float(run.state.global_step) if self._fresh is None else self._fresh[0]
        if math.isfinite(value):
            return value
        run.warn(f"{self.monitor} is {value} at step {run.state.global_step}: it is not taken for the best.")
        return None

    def _saves_the_end(self, run: Run, able: list[Checkpoint]) -> bool:
        """Whether it falls to this one of those that are able to, to save what no later save point will."""
        if run.state.global_step == 0 or (self.save_top_k == 0 and not self.save_last):
            return False
        full = [each for each in able if not each.weights_only and (each.save_top_k != 0 or each.save_last)]
        return self in ([each for each in full if each.monitor is None] or full or able)

    def _check_monitor(self, run: Run) -> None:
        """A name that a whole epoch and its validation did not log will not come."""
        if self.monitor is None or self._seen or (run.plan.validates and not run.validated):
            return
        if run.state.batch == 0 or self.monitor.startswith("val/"):
            known = ", ".join(sorted(run.metrics)[:20]) or "no metrics"
            text = f"Checkpoint watches {self.monitor!r}, which nothing has logged; there are {known}."
            raise SettingsError(text + nearest(self.monitor, run.metrics))

    # What

    def _ask(self, run: Run, value: float | None) -> None:
        new = Entry(Path(), run.state.global_step, value)
        staying = [*self._kept.after(new).entries, *(entry for o in self._all if o is not self for entry in o.kept)]
        name = file_name(self.name, {**run.metrics, "step": new.step, "epoch": run.state.epoch})

        def done(written: Path | None, failure: str | None) -> None:
            self._asked = None
            self._timer, self._told_time = time.monotonic(), False
            if written is not None:
                before, self._kept = self.kept, self._kept.after(new.at(self.folder / written.name))
                self._remove(run, [entry.path for entry in before])
                self._announce(run)

        asked = run.save_checkpoint(
            self.folder / name,
            weights_only=self.weights_only,
            pretrained=self.save_pretrained,
            last=self.save_last,
            keeps={entry.path for entry in staying if entry.step != new.step},
            done=done,
        )
        self._asked = asked, new

    def _remove(self, run: Run, paths: Iterable[Path]) -> None:
        """Remove those that no Checkpoint keeps."""
        assert run.run_dir is not None
        stays = {entry.path for each in self._all for entry in each.kept}
        for path in paths:
            if path not in stays:
                run.remove_checkpoint(run.run_dir / path)

    def _announce(self, run: Run) -> None:
        """Tell the run which checkpoint is the best: of the first that watches something, else the latest."""
        found = [each for each in self._all if each.best is not None]
        best = next((each.best for each in found if each.monitor is not None), found[0].best if found else None)
        run.best_checkpoint = None if best is None or run.run_dir is None else run.run_dir / best


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _check(name: str, value: object, fine: bool, expected: str) -> None:
    if not fine:
        raise SettingsError(f"Checkpoint got {name}={value!r}; {expected}.")
