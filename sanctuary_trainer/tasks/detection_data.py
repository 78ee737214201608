"""`DetectionData`: images with boxes, as the loaders that `ObjectDetection` is trained and tested with.

data = DetectionData("birds/", batch_size=4)
task = ObjectDetection("torchvision:retinanet_resnet50_fpn_v2", class_names=data.class_names)
trainer.fit(task, data=data)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sanctuary_trainer.errors import SettingsError
from sanctuary_trainer.tasks.box_sources import of_boxed_dataset
from sanctuary_trainer.tasks.boxed_batch import collate_boxes
from sanctuary_trainer.tasks.coco import of_coco
from sanctuary_trainer.tasks.detectors import Target
from sanctuary_trainer.tasks.held_out import Part, check_shares, hold_out
from sanctuary_trainer.tasks.named_models import library_of
from sanctuary_trainer.tasks.split_loaders import SplitLoaders


@final
class DetectionData(SplitLoaders):
    """Loaders of images with boxes: batches as `collate_boxes` makes them, of images (3, H, W) float in [0, 1].

    Images keep their size. Where the source has one split only, a tenth of the images is held out for the test and a
    tenth of the rest for validation, always the same. Where it has several, they are taken as they are, and only a
    missing validation is held out. Boxes are cut to their image, and those without an area left out.

    Args:
        root: a JSON file as COCO's are; or a folder with one for each split, its name or its folder ending in train,
            val or test (annotations/instances_train2017.json, train/_annotations.coco.json).
        images: the folder of the images; None: beside the file, in root, or in a folder `images` or of the split.
        dataset: "datasets:FOLDER_OR_HUB_NAME" or a data set of Hugging Face, whose objects have `bbox` (left, top,
            width, height in pixels) and `category`; or a mapping of these by split.
        predict_root: a folder of images without boxes, for `predict`; None: the images of the test, or of validation.
        batch_size: images of a batch, on each rank.
        num_workers: processes that read images, of each loader on each rank.
        augment: train on images of which half are flipped; False: as they are.
        transform: of (PIL image, target) in evaluation, and in training unless train_transform is given, called as
            torchvision's v2 transforms are; the boxes are `tv_tensors.BoundingBoxes`. None: a float image in [0, 1].
        train_transform: of the same in training.
        val_share: of the images, in [0, 1), that is held out for validation.
        test_share: of the images, in [0, 1), that is held out for the test.
        image_column: of a Hugging Face data set; None: found by type.
        objects_column: of a Hugging Face data set; None: "objects".

    Raises:
        SettingsError: the arguments name no source, or one is out of its range.
        DataError: the source cannot be used: a file that is not as COCO's, an image that does not exist, no boxes.
    """

    collate = staticmethod(collate_boxes)
    collate_unlabelled = staticmethod(list)

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        images: str | Path | None = None,
        dataset: Any = None,
        predict_root: str | Path | None = None,
        batch_size: int = 4,
        num_workers: int = 2,
        augment: bool = True,
        transform: Callable[..., Any] | None = None,
        train_transform: Callable[..., Any] | None = None,
        val_share: float = 0.1,
        test_share: float = 0.1,
        image_column: str | None = None,
        objects_column: str | None = None,
    ) -> None:
        super().__init__(predict_root, batch_size, num_workers)
        check_shares(val_share, test_share)
        if (root is None) == (dataset is None) and (root is not None or predict_root is None):
            raise SettingsError(
                "DetectionData needs root= or dataset=, one of them, or predict_root= to predict alone."
            )
        self.augment, self.transform, self.train_transform = augment, transform, train_transform
        if root is not None:
            source = of_coco(Path(root), None if images is None else Path(images))
        elif dataset is not None:
            source = of_boxed_dataset(dataset, image_column, objects_column)
        else:
            return
        self.class_names = source.class_names
        self._splits = hold_out(source.splits, val_share, test_share)

    def _samples(self, part: Part, is_training: bool) -> Dataset[Any]:
        transform = (self.train_transform if is_training else None) or self.transform
        return _Samples(part, transform or _to_float(is_training and self.augment))

    def _transform_alone(self) -> Callable[[Any], Any]:
        return _to_float(flip=False)


def _to_float(flip: bool) -> Callable[..., Any]:
    v2 = library_of("torchvision.transforms.v2", "DetectionData")
    made: Callable[..., Any] = v2.Compose(
        [v2.ToImage(), *([v2.RandomHorizontalFlip()] if flip else []), v2.ToDtype(torch.float32, scale=True)]
    )
    return made


class _Samples(Dataset[Any]):
    """(image, target) by number."""

    def __init__(self, part: Part, transform: Callable[..., tuple[Any, Target]]) -> None:
        self.images, self.rows = part
        self.transform = transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        from torchvision import tv_tensors

        image, target = self.images.read(self.rows[index])
        size = (image.height, image.width)
        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size)
        image, target = self.transform(image, {**target, "boxes": boxes})
        return plain(image), {key: plain(value) for key, value in target.items()}


def plain(tensor: Any) -> Tensor:
    """The tensor without torchvision's marks."""
    return torch.as_tensor(tensor).as_subclass(Tensor)
