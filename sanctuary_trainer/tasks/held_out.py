"""Images that are held out of training for validation and test: each class by itself, always the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sanctuary_trainer.tasks.image_sources import LabelledImages, Source


class Part(NamedTuple):
    """Some rows of labelled images."""

    images: LabelledImages
    rows: Sequence[int]


def hold_out(source: Source, val_share: float, test_share: float) -> dict[str, Part]:
    """The parts to train, validate and test with; a missing one is drawn from training, each class by itself.

    The test is held out only where the source has no split but one. Of each class at least one image is drawn, where a
    share is asked for, and one stays.
    """
    parts = {split: Part(images, range(len(images.labels))) for split, images in source.splits.items()}
    shares = {"test": test_share if len(parts) == 1 else 0.0, "val": 0.0 if "val" in parts else val_share}
    train, labels = parts["train"].images, np.asarray(parts["train"].images.labels)
    rest, generator = np.arange(len(labels)), np.random.default_rng(0)
    for split, share in shares.items():
        drawn = [_draw(rest[labels[rest] == label], share, generator) for label in np.unique(labels)]
        rows = np.sort(np.concatenate(drawn))
        if len(rows):
            parts[split] = Part(train, rows.tolist())
            rest = np.setdiff1d(rest, rows)
    return parts | {"train": Part(train, rest.tolist())}


def _draw(rows: Any, share: float, generator: np.random.Generator) -> Any:
    wanted = max(round(len(rows) * share), 1) if share else 0
    return generator.permutation(rows)[: min(wanted, len(rows) - 1)]
