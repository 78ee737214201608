"""What a rank has learned of its memory: which batches fit in which pieces, and what happened; kept in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sanctuary_trainer.batch import map_tensors

LONGEST_SHAPE = 200  # characters: a batch of images of many sizes has as many shapes


class OOMEvent(NamedTuple):
    """A batch that did not fit into memory.

    Attributes:
        rank: where.
        step: the steps that were done before it.
        stage: "train", "sanity", "val", "test" or "predict".
        phase: "forward", "backward" or "optimizer".
        tried: samples of the first piece that did not fit; 0 for the optimizer, as in the next.
        piece_size: samples of the pieces that did.
        remedy: "pieces", "checkpointing", "checkpointing and pieces"; for the optimizer "a second try", without foreach
            where it has that.
        reason: the error's first line.
    """

    rank: int
    step: int
    stage: str
    phase: str
    tried: int
    piece_size: int
    remedy: str
    reason: str


class Learned:
    """What is known of one rank.

    Attributes:
        events: what has happened so far.
        piece_sizes: "STAGE SHAPE" -> samples of a piece, bytes of a sample.
        stages: those of which there are such sizes.
        remedies: what a policy has switched on for good; a continued run begins with it.
        draws: stage -> whether its steps draw random numbers; not there while it is not known.
        seen: stage -> draw -> samples of a piece and first dimension of what was drawn; see `SlicedDraws`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.events: list[OOMEvent] = []
        self.piece_sizes: dict[str, tuple[int, float]] = {}
        self.stages: set[str] = set()
        self.remedies: list[str] = []
        self.draws: dict[str, bool] = {}
        self.seen: dict[str, dict[str, set[tuple[int, int]]]] = {}

    def remember(self, stage: str, batch: Any, size: int, most: int) -> None:
        """Of such a batch of `size` samples, pieces of `most` fit."""
        shape, weight = _shape(batch, size)
        self.piece_sizes[f"{stage} {shape}"] = (most, weight)
        self.stages.add(stage)

    def fits(self, stage: str, batch: Any, size: int) -> int | None:
        """How many samples of this batch fit: as remembered of its shape, or of smaller samples."""
        shape, weight = _shape(batch, size)
        if (key := f"{stage} {shape}") in self.piece_sizes:
            return self.piece_sizes[key][0]
        known = [
            most for key, (most, less) in self.piece_sizes.items() if key.startswith(f"{stage} ") and less <= weight
        ]
        return min(known, default=None)

    def state_dict(self) -> dict[str, Any]:
        """What this rank has learned, as plain data."""
        return {
            "events": [tuple(event) for event in self.events],
            "piece_sizes": dict(self.piece_sizes),
            "remedies": list(self.remedies),
            "draws": dict(self.draws),
            "seen": {stage: {key: sorted(met) for key, met in draws.items()} for stage, draws in self.seen.items()},
            "memory": _memory(self._device),
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, events: bool) -> None:
        """Go on with what these ranks had learned; of several the most careful. events: also what happened there.

        On a device with more or less memory sizes are found anew.
        """
        for state in states:
            same_memory = state["memory"] == _memory(self._device)
            for key, (size, weight) in state["piece_sizes"].items() if same_memory else ():
                known = self.piece_sizes.get(key)
                self.piece_sizes[key] = (size if known is None else min(known[0], size), weight)
                self.stages.add(key.partition(" ")[0])
            self.remedies += [remedy for remedy in state["remedies"] if remedy not in self.remedies]
            self.draws.update(state["draws"])
            for stage, draws in state["seen"].items():
                for key, met in draws.items():
                    self.seen.setdefault(stage, {}).setdefault(key, set()).update(map(tuple, met))
            if events:
                self.events += [OOMEvent(*event) for event in state["events"]]


def _shape(batch: Any, size: int) -> tuple[str, float]:
    """What tells batches of different need for memory apart: the shapes of a sample's tensors; and its bytes."""
    shapes: dict[str, None] = {}
    bytes_ = 0

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal bytes_
        bytes_ += tensor.nbytes
        of_sample = tensor.shape[1:] if tensor.ndim and tensor.shape[0] == size else tensor.shape
        shapes[f"{'x'.join(map(str, of_sample))} {str(tensor.dtype).removeprefix('torch.')}"] = None
        return tensor

    map_tensors(look, batch)
    return ", ".join(shapes)[:LONGEST_SHAPE], bytes_ / size


def _memory(device: torch.device) -> int | None:
    """Bytes of a device; None where they say nothing of what a process gets."""
    if device.type in ("cpu", "mps"):
        return None
    return int(getattr(torch, device.type).get_device_properties(device).total_memory)
