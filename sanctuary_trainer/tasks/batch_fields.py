"""Where a batch holds its images and its labels: a pair, or a mapping as Hugging Face's processors make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sanctuary_trainer.errors import TaskError

IMAGE_KEYS = ("pixel_values", "images", "image")
LABEL_KEYS = ("labels", "label", "masks", "mask", "targets")


def images_of(batch: Any) -> Tensor:
    """The images of a batch, which may also be nothing else.

    Raises:
        TaskError: there is no tensor of images.
    """
    return batch if isinstance(batch, Tensor) else _field(batch, 0, IMAGE_KEYS, "images")


def labels_of(batch: Any) -> Tensor:
    """The labels of a batch.

    Raises:
        TaskError: there is no tensor of labels.
    """
    return _field(batch, 1, LABEL_KEYS, "labels")


def _field(batch: Any, place: int, keys: Sequence[str], what: str) -> Tensor:
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in keys if key in batch), None)
    else:
        found = batch[place] if isinstance(batch, Sequence) and len(batch) > place else None
    if not isinstance(found, Tensor):
        has = f"with the keys {list(batch)}" if isinstance(batch, Mapping) else f"of type {type(batch).__name__}"
        raise TaskError(
            f"The batch {has} holds no tensor of {what}; expected (images, labels) or a mapping with one of "
            f"{', '.join(IMAGE_KEYS)} and one of {', '.join(LABEL_KEYS)}."
        )
    return found
