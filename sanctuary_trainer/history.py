"""What the steps of all ranks took, brought together on rank 0, in bounded memory; `diagnosis` reads it.

each rank     Measured: for each of its last steps the seconds by lap, samples and cost; its memory, its machine
rank 0        History.add(of_ranks) -> History.balance() -> Balance: what costs everybody time, and what to do
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sanctuary_trainer.balance import Balance, Measured, RankTimes
from sanctuary_trainer.clock import LAPS
from sanctuary_trainer.diagnosis import RARE, Times, diagnose

Floats = npt.NDArray[np.float64]

# Of the history: 8 ranks need 3 MB, 64 ranks 25 MB; of more ranks fewer rows are kept, but enough for a diagnosis.
MOST_ROWS, LEAST_ROWS = 4096, 256
MOST_RANK_ROWS = 64 * MOST_ROWS
RECENT_STEPS = 200  # what "now" is; a look at them costs about 1 ms


@dataclass
class History:
    """The rows of all ranks so far, with the last report of each rank about itself.

    In a long run a row stands for `stride` steps: for one of them, drawn, since in a mean of steps the ranks that are
    slow in turn would look alike; but what falls on some steps only is their mean, so that no validation is lost.
    """

    rows: Floats = field(default_factory=lambda: np.zeros((0, 0, len(LAPS) + 2)))  # (K, R, laps, then samples, cost)
    stride: int = 1  # a power of 2
    recent: Floats = field(default_factory=lambda: np.zeros((0, 0, len(LAPS) + 2)))  # the last steps, a row each
    classes: list[dict[str, float]] = field(default_factory=list)  # seconds of "callbacks:EMA" by rank
    processor: Floats = field(default_factory=lambda: np.zeros(0))  # (R,) seconds
    steps: int = 0
    latest: list[Measured] = field(default_factory=list)
    _waiting: Floats = field(default_factory=lambda: np.zeros((0, 0, len(LAPS) + 2)))  # steps, fewer than `stride`
    _draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def add(self, of_ranks: list[Measured]) -> None:
        """Take in what each rank measured of the same steps, in rank order."""
        ranks = range(len(of_ranks))
        rows = np.stack([_rows(measured) for measured in of_ranks], axis=1)
        if not self.latest:
            self.rows = self.recent = self._waiting = rows[:0]
            self.processor = np.zeros(len(of_ranks))
            self.classes = [{} for _ in ranks]
        self.latest, self.steps = of_ranks, self.steps + len(rows)
        for rank, measured in enumerate(of_ranks):
            self.processor[rank] += np.nan if measured.processor_seconds is None else measured.processor_seconds
            of_class = self.classes[rank]
            for name, seconds in zip(measured.names, measured.seconds.sum(0).tolist(), strict=True):
                if ":" in name:
                    of_class[name] = of_class.get(name, 0.0) + seconds
        self.recent = np.concatenate([self.recent, rows])[-max(RECENT_STEPS, len(rows)) :]
        self._keep(rows)

    def _keep(self, rows: Floats) -> None:
        """Add rows of a step each to those that stand for `stride` steps."""
        steps = np.concatenate([self._waiting, rows])
        full = len(steps) // self.stride * self.stride
        self._waiting, rows = steps[full:], steps[:full]
        for _ in range(self.stride.bit_length() - 1):
            rows = self._halved(rows)
        self.rows = np.concatenate([self.rows, rows])
        while len(self.rows) > max(min(MOST_ROWS, MOST_RANK_ROWS // rows.shape[1]), LEAST_ROWS):
            self.rows, self.stride = self._halved(self.rows), 2 * self.stride

    def _halved(self, rows: Floats) -> Floats:
        """Of each two neighbours one, drawn; of what falls on some steps only the mean of both."""
        pairs = rows[: len(rows) // 2 * 2].reshape(-1, 2, *rows.shape[1:])
        halved: Floats = pairs[np.arange(len(pairs)), self._draw.integers(2, size=len(pairs))]
        rare = [LAPS.index(lap) for lap in RARE]
        halved[..., rare] = pairs[..., rare].mean(1)
        return halved

    def balance(self, recent: bool = False) -> Balance:
        """What the rows say, or the recent ones alone. Something must have been added."""
        rows = self.recent if recent else self.rows
        laps = rows[:, :, : len(LAPS)]
        own = laps.sum((0, 2)) - laps[:, :, LAPS.index("wait")].sum(0)
        findings = diagnose(
            Times(
                laps=laps,
                samples=rows[:, :, -2],
                cost=rows[:, :, -1],
                processor=None if recent else self.processor / np.maximum(own * self.steps / max(len(rows), 1), 1e-12),
                classes=[self._of_classes(rank) for rank in range(rows.shape[1])],
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
            steps=len(rows) if recent else self.steps,
            step_seconds=float(laps.sum(2).mean()) if len(rows) else 0.0,
        )

    def _rank(self, rank: int, rows: Floats) -> RankTimes:
        means = rows.mean(0) if len(rows) else np.zeros(len(LAPS) + 2)
        seconds = dict(zip(LAPS, map(float, means), strict=False))
        seconds |= self._of_classes(rank)
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

    def _of_classes(self, rank: int) -> dict[str, float]:
        """Seconds of a step, over the whole run."""
        return {name: total / max(self.steps, 1) for name, total in self.classes[rank].items()}


def _rows(measured: Measured) -> Floats:
    """(K, laps + 2): the seconds by lap, those by class added to their lap; samples and cost."""
    rows = np.zeros((len(measured.samples), len(LAPS) + 2))
    for name, seconds in zip(measured.names, measured.seconds.T, strict=True):
        lap = name.partition(":")[0]
        if lap in LAPS:
            rows[:, LAPS.index(lap)] += seconds
    rows[:, -2], rows[:, -1] = measured.samples, measured.cost
    return rows
