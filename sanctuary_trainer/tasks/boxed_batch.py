"""Batches of images with boxes: from samples to a batch, and what is in one.

(images, targets)       images a tensor (B, 3, H, W), or a list of (3, H, W) of any size; targets a list of dicts
{"pixel_values", "pixel_mask", "labels"}     as transformers' image processors make it
images                  to predict
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sanctuary_trainer.errors import TaskError
from sanctuary_trainer.tasks.detectors import Target, to_corners


def collate_boxes(samples: Sequence[tuple[Tensor, Target]]) -> tuple[list[Tensor], list[Target]]:
    """Make a batch of (image, target) that keeps each image's size and each target's number of boxes."""
    return [image for image, _ in samples], [target for _, target in samples]


def images_in(batch: Any) -> list[Tensor]:
    """The images of a batch, each (3, H, W), without padding.

    Raises:
        TaskError: there are none.
    """
    if isinstance(batch, Mapping):
        found: Any = batch.get("pixel_values")
        mask = batch.get("pixel_mask")
        if isinstance(found, Tensor) and mask is not None:
            extents = torch.stack([mask[:, :, 0].sum(1), mask[:, 0].sum(1)], 1).tolist()
            return [image[:, :height, :width] for image, (height, width) in zip(found, extents, strict=True)]
    else:
        found = batch[0] if _is_pair(batch) else batch
    images = list(found) if isinstance(found, Tensor | list | tuple) else []
    if not images or any(getattr(image, "ndim", None) != 3 for image in images):
        raise _wrong(batch, "images (3, H, W)")
    return images


def targets_in(batch: Any) -> list[Target]:
    """The targets of a batch: absolute boxes in pixels of its images, and labels.

    Raises:
        TaskError: there are none, or one has no boxes (n, 4) and labels (n,).
    """
    if isinstance(batch, Mapping):
        height, width = batch["pixel_values"].shape[-2:]  # the processor makes boxes relative to the padded image
        found = [_absolute(label, height, width) for label in batch.get("labels", ())]
    else:
        found = list(batch[1]) if _is_pair(batch) else []
    if not found:
        raise _wrong(batch, "targets")
    for target in found:
        boxes, labels = target.get("boxes"), target.get("labels")
        if boxes is None or labels is None or boxes.ndim != 2 or boxes.shape[1] != 4 or len(labels) != len(boxes):
            shapes = {key: tuple(value.shape) for key, value in target.items()}
            raise TaskError(f"A target holds {shapes}; expected boxes (n, 4) and labels (n,).")
    return found


def without_crowds(targets: Sequence[Target]) -> list[Target]:
    """Targets without the boxes around many, which no single box is to be learnt from."""
    kept = [None if "iscrowd" not in target else target["iscrowd"] == 0 for target in targets]
    return [
        target if rows is None else {"boxes": target["boxes"][rows], "labels": target["labels"][rows]}
        for target, rows in zip(targets, kept, strict=True)
    ]


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2 and not isinstance(batch[1], Tensor)


def _absolute(label: Mapping[str, Any], height: int, width: int) -> Target:
    boxes = to_corners(label["boxes"])
    return {"boxes": boxes * boxes.new_tensor([width, height] * 2), "labels": label["class_labels"]}


def _wrong(batch: Any, what: str) -> TaskError:
    has = f"with the keys {list(batch)}" if isinstance(batch, Mapping) else f"of type {type(batch).__name__}"
    return TaskError(
        f"The batch {has} holds no {what}; expected (images, targets), a target being a dict of boxes (n, 4) and "
        "labels (n,), or a mapping with pixel_values and labels. Pairs are made by collate_fn=collate_boxes."
    )
