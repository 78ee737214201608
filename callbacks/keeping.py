"""Which checkpoints are kept: the best by a value, or the latest, and the newest where it is kept for being that."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A checkpoint that is kept.

    Attributes:
        path: relative to the run's folder where it lies in it, so that the folder may be moved.
        step: the global_step at which it was written.
        value: what it is ranked by; None if it is kept for being the newest alone.
    """

    path: Path
    step: int
    value: float | None

    def at(self, path: Path) -> Entry:
        """The same one, elsewhere."""
        return Entry(path, self.step, self.value)


@dataclass(frozen=True)
class Kept:
    """What is kept, never changed: each new checkpoint gives another one.

    Attributes:
        most: how many are ranked; -1: all.
        mode: "min": the smallest values are the best; else the greatest.
        newest_too: whether the newest is kept though it may not be among the best.
        ranked: those that are, the best first, of equal ones the earlier.
        newest: the newest, where it is kept for being that.
    """

    most: int
    mode: str | None
    newest_too: bool
    ranked: tuple[Entry, ...] = ()
    newest: Entry | None = None

    @property
    def entries(self) -> list[Entry]:
        """All of them, the best first."""
        return [*self.ranked, *([self.newest] if self.newest is not None and self.newest not in self.ranked else [])]

    def enters(self, value: float, step: int) -> bool:
        """Whether a value is among the best; where there is room, any is. One of the same step gives way."""
        others = [entry for entry in self.ranked if entry.step != step]
        if self.most < 0 or len(others) < self.most:
            return True
        worst = others[self.most - 1].value if self.most else None
        return worst is not None and (value < worst if self.mode == "min" else value > worst)

    def after(self, new: Entry) -> Kept:
        """What is kept once a new checkpoint is complete."""
        ranked = [entry for entry in self.ranked if entry.path != new.path and entry.step != new.step]
        if new.value is not None:
            ranked = sorted([*ranked, new], key=lambda entry: entry.value or 0.0, reverse=self.mode != "min")
        ranked = ranked if self.most < 0 else ranked[: self.most]  # of a former attempt there may be more
        newest = new if new.value is None or self.newest_too else None
        return replace(self, ranked=tuple(ranked), newest=newest)

    def only(self, there: Collection[Entry]) -> Kept:
        """Those of them that are there."""
        newest = self.newest if self.newest in there else None
        return replace(self, ranked=tuple(entry for entry in self.ranked if entry in there), newest=newest)

    def state_dict(self) -> dict[str, Any]:
        """What is kept, as plain data."""
        return {"ranked": list(self.ranked), "newest": self.newest}

    def loaded(self, state: dict[str, Any]) -> Kept:
        """The same rule, with what `state_dict` gave of another time."""
        newest = None if state["newest"] is None else Entry(*state["newest"])
        return replace(self, ranked=tuple(Entry(*entry) for entry in state["ranked"]), newest=newest)
