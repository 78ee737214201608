"""Images that are held out of training for validation and test: each class by itself, always the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sanctuary_trainer.errors import SettingsError
from sanctuary_trainer.image_files import draw_rows


class Part(NamedTuple):
    """Some rows of a split, which has `names`, one of each row."""

    images: Any
    rows: Sequence[int]


def check_shares(val_share: float, test_share: float) -> None:
    """Raise a SettingsError for shares that leave nothing to train on."""
    if not (0 <= val_share < 1 and 0 <= test_share < 1 and val_share + test_share < 1):
        raise SettingsError(f"val_share={val_share}, test_share={test_share}; expected shares in [0, 1), together < 1.")


def hold_out(
    splits: Mapping[str, Any], val_share: float, test_share: float, classes: Sequence[int] | None = None
) -> dict[str, Part]:
    """The parts to train, validate and test with; a missing one is drawn from training.

    The test is held out only where there is no split but one, and validation from what it leaves. Of each class at
    least one image is drawn, where a share is asked for, as long as one stays.

    Args:
        splits: "train", perhaps "val" and "test".
        val_share, test_share: in [0, 1), together below 1.
        classes: of each row of training, from which each class gives its share; None: all rows are alike.
    """
    parts = {split: Part(images, range(len(images.names))) for split, images in splits.items()}
    shares = {"test": test_share if len(parts) == 1 else 0.0, "val": 0.0 if "val" in parts else val_share}
    train = splits["train"]
    labels = np.zeros(len(train.names), np.int64) if classes is None else np.asarray(classes)
    rest, generator = np.arange(len(labels)), np.random.default_rng(0)
    for split, share in shares.items():
        rows = draw_rows(labels, rest, share, generator, at_least=1 if share else 0)
        if len(rows):
            parts[split] = Part(train, rows.tolist())
            rest = np.setdiff1d(rest, rows)
    return parts | {"train": Part(train, rest.tolist())}
