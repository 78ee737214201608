"""The metrics that schedulers watch: which of them nothing logs, and what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from sanctuary_trainer.configured import Schedule
from sanctuary_trainer.errors import SettingsError


def unknown_monitors(schedules: Iterable[Schedule], known: Collection[str]) -> list[str]:
    """What to warn of after sanity validation: each watched name of validation that is not in `known`."""
    return [
        f"{_watching(schedule)}, which sanity validation did not log.{_nearest(schedule.monitor, known)}"
        for schedule in schedules
        if schedule.monitor is not None and schedule.monitor.startswith("val/") and schedule.monitor not in known
    ]


def check_monitors(schedules: Iterable[Schedule], valued: Collection[str], known: Collection[str]) -> list[str]:
    """Raise when a scheduler watches a name that had no value after a whole epoch and its validation.

    Args:
        schedules: all of them.
        valued: every name that had a value of an epoch or an evaluation.
        known: every name that was logged, on whatever axis.

    Returns:
        What to warn of: the same, of schedulers with `"strict": False`.

    Raises:
        SettingsError: naming the nearest that had one.
    """
    texts = []
    for schedule in schedules:
        monitor = schedule.monitor
        if monitor is None or monitor in valued or f"{monitor}_epoch" in valued:
            continue
        if monitor in known:
            text = f", which is a series of steps. Log it with on_epoch=True and watch '{monitor}_epoch'."
        else:
            there = ", ".join(sorted(valued)) or "no metrics"
            text = f", which nothing has logged; there are {there}.{_nearest(monitor, valued)}"
        if schedule.strict:
            raise SettingsError(_watching(schedule) + text)
        texts.append(_watching(schedule) + text)
    return texts


def _watching(schedule: Schedule) -> str:
    return f"{type(schedule.scheduler).__name__} watches {schedule.monitor!r}"


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.3)
    return f" Did you mean {near[0]!r}?" if near else ""
