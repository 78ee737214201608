"""Detection models of two conventions, called alike: images and absolute boxes in, losses or absolute boxes out.

    torchvision      model([image], [target]) gives losses in train mode and boxes in eval mode; class 0 is background
    transformers     model(pixel_values, pixel_mask, labels) of DETR's kind: boxes relative to the image, one per query

Here a target is {"boxes": (n, 4) float, left, top, right, bottom in pixels of its image; "labels": (n,) int64 from 0
on}, and images are a list of (3, H, W) float, each of a size of its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from sanctuary_trainer.errors import NotSupportedError, SettingsError

Target = dict[str, Tensor]
BLIND_TO_MASKS = ("rt_detr", "rt_detr_v2", "d_fine")  # models that take a mask of the padding, and drop it
MOST = 100  # boxes of an image, where every query has a score for every class; as COCO counts


class Detector(Protocol):
    """How a model is asked; `processor` is what transformers' images still have to go through, or None."""

    def losses(
        self, model: Any, images: Sequence[Tensor], targets: Sequence[Target], processor: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to train with, and its parts by name."""

    def detect(self, model: Any, images: Sequence[Tensor], processor: Any) -> list[Target]:
        """Boxes, "scores" in [0, 1] and labels of each image, the best first."""


def detector_of(model: nn.Module) -> Detector:
    """The way in which this model is asked.

    Raises:
        SettingsError: it needs more than boxes to be trained.
    """
    config = getattr(model, "config", None)
    if hasattr(config, "id2label"):
        takes_mask = "pixel_mask" in inspect.signature(model.forward).parameters
        return QueryDetector(takes_mask and getattr(config, "model_type", None) not in BLIND_TO_MASKS)
    heads: Any = getattr(model, "roi_heads", None)
    if heads is not None and any(getattr(heads, head, bool)() for head in ("has_mask", "has_keypoint")):
        raise SettingsError(
            f"{type(model).__name__} is trained with masks or keypoints, which ObjectDetection does not give it. Take "
            "a model for boxes, such as torchvision:fasterrcnn_resnet50_fpn_v2."
        )
    return ListDetector()


class ListDetector:
    """Models that are called as torchvision's are."""

    def losses(
        self, model: Any, images: Sequence[Tensor], targets: Sequence[Target], processor: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        shifted = [{"boxes": target["boxes"], "labels": target["labels"] + 1} for target in targets]
        parts: dict[str, Tensor] = model(list(images), shifted)
        return torch.stack(list(parts.values())).sum(), parts

    def detect(self, model: Any, images: Sequence[Tensor], processor: Any) -> list[Target]:
        return [{**found, "labels": found["labels"] - 1} for found in model(list(images))]


class QueryDetector:
    """Models of transformers.

    Args:
        takes_mask: they take a mask of the padding, and boxes refer to the image without it. Others see the padding as
            part of the image.
    """

    def __init__(self, takes_mask: bool) -> None:
        self.takes_mask = takes_mask

    def losses(
        self, model: Any, images: Sequence[Tensor], targets: Sequence[Target], processor: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, sides = self._inputs(images, processor)
        labels = [
            {"class_labels": target["labels"], "boxes": _to_centres(target["boxes"].float()) / whole}
            for target, whole in zip(targets, sides, strict=True)
        ]
        with _boxes_of_this_rank():
            outputs = model(**inputs, labels=labels)
        return outputs.loss, dict(outputs.loss_dict or {})

    def detect(self, model: Any, images: Sequence[Tensor], processor: Any) -> list[Target]:
        inputs, sides = self._inputs(images, processor)
        outputs = model(**inputs)
        return [
            _best(logits, to_corners(boxes * whole), model.config.num_labels)
            for logits, boxes, whole in zip(outputs.logits.float(), outputs.pred_boxes.float(), sides, strict=True)
        ]

    def _inputs(self, images: Sequence[Tensor], processor: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
        """What the model is called with; and by image (4,): width, height, width, height that a relative box is of."""
        device = images[0].device
        if processor is None:
            pixels, mask = _padded(images)
        else:  # one by one: some processors (YOLOS's) pad and do not say where
            settings = {"do_rescale": False, "do_pad": False, "return_tensors": "pt"}
            made = [processor(images=[image.float()], **settings)["pixel_values"][0].to(device) for image in images]
            pixels, mask = _padded(made)
        sides = [image.new_tensor([image.shape[2], image.shape[1]] * 2, dtype=torch.float32) for image in images]
        if self.takes_mask:
            return {"pixel_values": pixels, "pixel_mask": mask}, sides
        shares = torch.stack([mask[:, 0].float().mean(1), mask[:, :, 0].float().mean(1)] * 2, 1)
        return {"pixel_values": pixels}, [side / share for side, share in zip(sides, shares, strict=True)]


def _padded(images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Images (B, C, H, W) of the largest sides, with zeros at the right and below, and 1 where they are (B, H, W)."""
    height, width = (max(image.shape[side] for image in images) for side in (1, 2))
    pixels = images[0].new_zeros(len(images), images[0].shape[0], height, width)
    mask = images[0].new_zeros(len(images), height, width, dtype=torch.int64)
    for row, image in enumerate(images):
        pixels[row, :, : image.shape[1], : image.shape[2]] = image
        mask[row, : image.shape[1], : image.shape[2]] = 1
    return pixels, mask


def _best(logits: Tensor, boxes: Tensor, num_labels: int) -> Target:
    """What the queries of one image found, the best first.

    Args:
        logits: (Q, num_labels + 1), the last for "nothing": each query tells of one class (DETR, YOLOS). Or (Q,
            num_labels): each class has a chance of its own (Deformable DETR, RT-DETR).
        boxes: (Q, 4) in pixels.
        num_labels: how many classes there are.
    """
    if logits.shape[1] == num_labels + 1:
        scores, labels = logits.softmax(-1)[:, :-1].max(-1)
        scores, rows = scores.sort(descending=True)
        return {"boxes": boxes[rows], "scores": scores, "labels": labels[rows]}
    scores, places = logits.sigmoid().flatten().topk(min(MOST, logits.numel()))
    return {"boxes": boxes[places // num_labels], "scores": scores, "labels": places % num_labels}


def to_corners(boxes: Tensor) -> Tensor:
    """Boxes (n, 4) as left, top, right, bottom, of their centres and sizes."""
    centres, sizes = boxes.split(2, -1)
    return torch.cat([centres - sizes / 2, centres + sizes / 2], -1)


def _to_centres(boxes: Tensor) -> Tensor:
    left_top, right_bottom = boxes.split(2, -1)
    return torch.cat([(left_top + right_bottom) / 2, right_bottom - left_top], -1)


@contextmanager
def _boxes_of_this_rank() -> Iterator[None]:
    """Let transformers' loss divide by this rank's boxes.

    Otherwise it asks all ranks for theirs (ImageLoss.forward): two ranks would hang where one has no batch or runs it
    in pieces, and the mean that it gets is divided by the number of ranks once more.
    """
    module: Any = sys.modules.get("transformers.loss.loss_for_object_detection")
    if module is None or not hasattr(module, "is_accelerate_available"):
        if module is not None and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise NotSupportedError(
                f"This version of transformers ({sys.modules['transformers'].__version__}) counts boxes over ranks in "
                "a way that ObjectDetection does not know: train on one rank, or take transformers 5."
            )
        yield
        return
    kept, module.is_accelerate_available = module.is_accelerate_available, lambda: False
    try:
        yield
    finally:
        module.is_accelerate_available = kept
