"""Images that are held out of training for validation and test: each class by itself, always the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sanctuary_trainer.image_files import draw_rows
from sanctuary_trainer.tasks.image_sources import LabelledImages, Source


class Part(NamedTuple):
    """Some rows of labelled images."""

    images: LabelledImages
    rows: Sequence[int]


def hold_out(source: Source, val_share: float, test_share: float) -> dict[str, Part]:
    """The parts to train, validate and test with; a missing one is drawn from training, each class by itself.

    The test is held out only where the source has no split but one, and validation from what it leaves. Of each class
    at least one image is drawn, where a share is asked for, as long as one stays.
    """
    parts = {split: Part(images, range(len(images.labels))) for split, images in source.splits.items()}
    shares = {"test": test_share if len(parts) == 1 else 0.0, "val": 0.0 if "val" in parts else val_share}
    train, labels = parts["train"].images, np.asarray(parts["train"].images.labels)
    rest, generator = np.arange(len(labels)), np.random.default_rng(0)
    for split, share in shares.items():
        rows = draw_rows(labels, rest, share, generator, at_least=1 if share else 0)
        if len(rows):
            parts[split] = Part(train, rows.tolist())
            rest = np.setdiff1d(rest, rows)
    return parts | {"train": Part(train, rest.tolist())}
