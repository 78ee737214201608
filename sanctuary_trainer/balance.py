"""What one rank measured of its steps, and the report that comes of what all of them did: see `history`.

A step's row reaches from one sync of the gradients to the next: what delays a sync stands in the row that it ends.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sanctuary_trainer.diagnosis import Finding

Floats = npt.NDArray[np.float64]


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
