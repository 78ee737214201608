"""What the steps of all ranks took, brought together on rank 0: the history that `diagnosis` reads, and its report.

    each rank     Measured: for each of its last steps the seconds by lap, samples and cost; its memory, its machine
    rank 0        History.add(of_ranks) -> History.balance() -> Balance: what costs everybody time, and what to do

A step's row reaches from one sync of the gradients to the next: what delays a sync stands in the row that it ends.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import repeat
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sanctuary_trainer.clock import LAPS
from sanctuary_trainer.diagnosis import Finding, Times, diagnose

Floats = npt.NDArray[np.float64]

MOST_ROWS = 4096  # of the history: 8 ranks need 3 MB; beyond, each two neighbours become one


@dataclass(frozen=True)
class Measured:
    """What one rank measured since it was asked last.

    Attributes:
        names: laps, also "callbacks:EMA".
        seconds: (K, names), float32.
        samples, cost: of each step.
        processor_seconds: what all threads of this process computed in these steps; None where it tells nothing.
        memory_bytes, memory_share: peak on the device (of a CPU: resident now), and the share of what there is.
        host, device: where the rank runs.
        workers: processes that read for it; None where it is not known.
        cores: that this rank may use on its host.
    """

    names: tuple[str, ...]
    seconds: npt.NDArray[np.float32]
    samples: list[float]
    cost: list[float]
    processor_seconds: float | None
    memory_bytes: int
    memory_share: float
    host: str
    device: str
    workers: int | None
    cores: int

    @classmethod
    def of(cls, begins: list[dict[str, float]], ends: list[dict[str, float]], **about: Any) -> Self:
        """begins, ends: of each step, the clock's totals at its begin and its end."""
        names = tuple(ends[-1]) if ends else ()

        def of(totals: list[dict[str, float]]) -> Floats:
            rows = [list(map(each.get, names, repeat(0.0))) for each in totals]
            return np.array(rows).reshape(len(totals), len(names))

        return cls(names=names, seconds=(of(ends) - of(begins)).astype(np.float32), **about)


@dataclass(frozen=True)
class RankTimes:
    """One rank, by its means over the steps.

    Attributes:
        rank: its number.
        host: the name of its machine.
        device: "cpu", or with its name "cuda:0 NVIDIA H200".
        seconds: of a step, by lap (`LAPS`); callbacks and logging also by class: "callbacks:EMA".
        samples: of a step.
        cost: of a step, as `VisionTask.cost` counts it.
        memory_bytes: peak on the device; on a CPU what the process holds.
        memory_share: of what there is, in [0, 1].
    """

    rank: int
    host: str
    device: str
    seconds: dict[str, float]
    samples: float
    cost: float
    memory_bytes: int
    memory_share: float


@dataclass(frozen=True)
class Balance:
    """Whether all ranks work all the time, and what keeps them from it.

    Attributes:
        verdict: the cause that costs most, one of `CAUSES`, or "balanced".
        findings: what costs time, the most costly first.
        ranks: what each rank did.
        steps: how many steps were looked at.
        step_seconds: the mean time of a step, everything between two syncs included.
    """

    verdict: str
    findings: tuple[Finding, ...]
    ranks: tuple[RankTimes, ...]
    steps: int
    step_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return asdict(self)


@dataclass
class History:
    """The rows of all ranks so far, with the last report of each rank about itself."""

    rows: Floats = field(default_factory=lambda: np.zeros((0, 0, len(LAPS) + 2)))  # (K, R, laps, then samples, cost)
    classes: list[dict[str, float]] = field(default_factory=list)  # seconds of "callbacks:EMA" by rank
    processor: Floats = field(default_factory=lambda: np.zeros(0))  # (R,) seconds
    steps: int = 0
    latest: list[Measured] = field(default_factory=list)

    def add(self, of_ranks: list[Measured]) -> None:
        """Take in what each rank measured of the same steps, in rank order."""
        ranks = range(len(of_ranks))
        rows = np.stack([_rows(measured) for measured in of_ranks], axis=1)
        if not self.latest:
            self.rows, self.processor = rows[:0], np.zeros(len(of_ranks))
            self.classes = [{} for _ in ranks]
        self.latest, self.steps = of_ranks, self.steps + len(rows)
        for rank, measured in enumerate(of_ranks):
            self.processor[rank] += np.nan if measured.processor_seconds is None else measured.processor_seconds
            of_class = self.classes[rank]
            for name, seconds in zip(measured.names, measured.seconds.sum(0).tolist(), strict=True):
                if ":" in name:
                    of_class[name] = of_class.get(name, 0.0) + seconds
        self.rows = np.concatenate([self.rows, rows])
        if len(self.rows) > MOST_ROWS:
            even = len(self.rows) // 2 * 2
            self.rows = self.rows[:even].reshape(-1, 2, *self.rows.shape[1:]).mean(1)

    def balance(self, last: int | None = None) -> Balance:
        """What the last rows say; all of them with None. Something must have been added."""
        rows = self.rows if last is None else self.rows[-last:]
        laps = rows[:, :, : len(LAPS)]
        own = laps.sum((0, 2)) - laps[:, :, LAPS.index("wait")].sum(0)
        whole = last is None  # processor time and classes are known of the whole
        findings = diagnose(
            Times(
                laps=laps,
                samples=rows[:, :, -2],
                cost=rows[:, :, -1],
                processor=self.processor / np.maximum(own * self.steps / max(len(rows), 1), 1e-12) if whole else None,
                classes=self.classes,
                memory=[measured.memory_share for measured in self.latest],
                places=[(measured.host, measured.device) for measured in self.latest],
                workers=[measured.workers for measured in self.latest],
                cores=[measured.cores for measured in self.latest],
            )
        )
        return Balance(
            verdict=findings[0].cause if findings else "balanced",
            findings=tuple(findings),
            ranks=tuple(self._rank(rank, rows[:, rank]) for rank in range(rows.shape[1])),
            steps=self.steps if last is None else len(rows),
            step_seconds=float(laps.sum(2).mean()) if len(rows) else 0.0,
        )

    def _rank(self, rank: int, rows: Floats) -> RankTimes:
        means = rows.mean(0) if len(rows) else np.zeros(len(LAPS) + 2)
        seconds = dict(zip(LAPS, map(float, means), strict=False))
        seconds |= {name: total / max(self.steps, 1) for name, total in self.classes[rank].items()}
        measured = self.latest[rank]
        return RankTimes(
            rank=rank,
            host=measured.host,
            device=measured.device,
            seconds=seconds,
            samples=float(means[-2]),
            cost=float(means[-1]),
            memory_bytes=measured.memory_bytes,
            memory_share=measured.memory_share,
        )


def _rows(measured: Measured) -> Floats:
    """(K, laps + 2): the seconds by lap, those by class added to their lap; samples and cost."""
    rows = np.zeros((len(measured.samples), len(LAPS) + 2))
    for name, seconds in zip(measured.names, measured.seconds.T, strict=True):
        lap = name.partition(":")[0]
        if lap in LAPS:
            rows[:, LAPS.index(lap)] += seconds
    rows[:, -2], rows[:, -1] = measured.samples, measured.cost
    return rows
