"""`SegmentationData`: images with masks, as the loaders that `SemanticSegmentation` is trained and tested with.

data = SegmentationData("streets/", class_names=["ground", "road"], batch_size=8)
task = SemanticSegmentation("torchvision:deeplabv3_mobilenet_v3_large", class_names=data.class_names)
data.adapt(task)
trainer.fit(task, data=data)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sanctuary_trainer.errors import DataError, SettingsError
from sanctuary_trainer.tasks.held_out import Part, check_shares, hold_out
from sanctuary_trainer.tasks.mask_sources import Mask, MaskedImages, of_folders, of_masked_dataset
from sanctuary_trainer.tasks.model_inputs import ModelInputs, plain_inputs
from sanctuary_trainer.tasks.named_models import library_of
from sanctuary_trainer.tasks.split_loaders import SplitLoaders, check_size

UNLABELLED = 255  # of a pixel, in the masks that are read; in those that are given out it is the task's ignore_index
LOOKED_AT = 50  # masks that are read before training, to see whether they are what they should be


@final
class SegmentationData(SplitLoaders):
    """Loaders of images with masks: batches of images (B, 3, H, W) and masks (B, H, W) int64.

    Images and masks are brought to one size, masks without mixing classes; metrics are of that size. Where the source
    has one split only, a tenth of the images is held out for the test and a tenth of the rest for validation, always
    the same. Where it has several, they are taken as they are, and only a missing validation is held out.

    Args:
        root: a folder with the folders `images` and `masks` (or `annotations`, or `labels`): a mask is called like its
            image, with any suffix. Folders of splits (train, val, test) may lie above or below the two.
        class_names: what the classes are called, by their number.
        dataset: "datasets:FOLDER_OR_HUB_NAME", a data set of Hugging Face or of pairs (image, mask), as torchvision's
            are; or a mapping of these by split.
        predict_root: a folder of images without masks, for `predict`; None: the images of the test, or of validation.
        mask_values: of each class, the number that it has in the masks; any other is a pixel without a label. None: 0,
            1, 2, ... and 255 without a label, and any other is an error.
        batch_size: images of a batch, on each rank.
        num_workers: processes that read images, of each loader on each rank.
        image_size: pixels a side, for a model that does not say what it wants.
        augment: train on random parts of the images, flipped in half of the cases; False: as in evaluation.
        transform: of (PIL image, mask (H, W) uint8 as a `tv_tensors.Mask`) in evaluation, and in training unless
            train_transform is given; None: resized, and normalised for the model.
        train_transform: of the same in training.
        val_share: of the images, in [0, 1), that is held out for validation.
        test_share: of the images, in [0, 1), that is held out for the test.
        image_column: of a Hugging Face data set; None: found by type.
        mask_column: of a Hugging Face data set; None: found by name and type.

    Raises:
        SettingsError: the arguments name no source, or one is out of its range.
        DataError: the source cannot be used: an image without a mask, masks that are no numbers of classes.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        class_names: Sequence[str],
        dataset: Any = None,
        predict_root: str | Path | None = None,
        mask_values: Sequence[int] | None = None,
        batch_size: int = 8,
        num_workers: int = 2,
        image_size: int = 512,
        augment: bool = True,
        transform: Callable[..., Any] | None = None,
        train_transform: Callable[..., Any] | None = None,
        val_share: float = 0.1,
        test_share: float = 0.1,
        image_column: str | None = None,
        mask_column: str | None = None,
    ) -> None:
        super().__init__(predict_root, batch_size, num_workers)
        check_size(image_size)
        check_shares(val_share, test_share)
        if (root is None) == (dataset is None) and (root is not None or predict_root is None):
            raise SettingsError("SegmentationData needs root= or dataset=, one of them, or predict_root= to predict.")
        self.image_size, self.augment = image_size, augment
        self.transform, self.train_transform = transform, train_transform
        self.class_names = list(class_names)
        self._numbers = ClassNumbers(self.class_names, mask_values)
        self._ignore_index = UNLABELLED
        if root is not None or dataset is not None:
            splits = of_masked_dataset(dataset, image_column, mask_column) if root is None else of_folders(Path(root))
            self._numbers.look(splits["train"])
            self._splits = hold_out(splits, val_share, test_share)

    def adapt(self, task: Any) -> None:
        """Take from a ready-made task its model's size and normalisation, and what a pixel without a label has."""
        super().adapt(task)
        self._ignore_index = getattr(task, "ignore_index", UNLABELLED)

    def _samples(self, part: Part, is_training: bool) -> Dataset[Any]:
        transform = (self.train_transform if is_training else None) or self.transform
        if transform is None:
            transform = JointTransform(self._wanted, is_training and self.augment)
        return _Samples(part, self._numbers, transform, self._ignore_index)

    def _transform_alone(self) -> Callable[[Any], Any]:
        wanted = self._wanted
        v2 = library_of("torchvision.transforms.v2", "SegmentationData")
        alone: Callable[[Any], Any] = v2.Compose([v2.Resize(wanted.size, antialias=True), wanted.normalize])
        return alone

    @property
    def _wanted(self) -> ModelInputs:
        return self._inputs or plain_inputs(self.image_size)


class JointTransform:
    """An image and its mask resized alike, and the image normalised; augmented: a random part, perhaps flipped."""

    def __init__(self, inputs: ModelInputs, augment: bool) -> None:
        v2 = library_of("torchvision.transforms.v2", "SegmentationData")
        crop = v2.RandomResizedCrop(inputs.size, scale=(0.35, 1.0), antialias=True)
        resize = v2.Resize(inputs.size, antialias=True)
        self.geometry = v2.Compose([crop, v2.RandomHorizontalFlip()]) if augment else resize
        self.normalize = inputs.normalize

    def __call__(self, image: Any, mask: Any) -> tuple[Tensor, Tensor]:
        image, mask = self.geometry(image, mask)
        return self.normalize(image), mask


class ClassNumbers:
    """From what a mask holds to numbers of classes.

    Args:
        class_names: of the classes.
        values: of each class in the masks; None: its number, and UNLABELLED for none.
    """

    def __init__(self, class_names: Sequence[str], values: Sequence[int] | None) -> None:
        count = len(class_names)
        if not 2 <= count <= UNLABELLED:
            raise SettingsError(f"class_names has {count}; expected 2 to {UNLABELLED}.")
        if values is not None and (len(set(values)) != count or len(values) != count or min(values) < 0):
            raise SettingsError(f"mask_values={list(values)}; expected {count} numbers, one of its own for each class.")
        self.count, self.values = count, None if values is None else np.asarray(values)

    def __call__(self, mask: Mask, name: str) -> npt.NDArray[np.uint8]:
        """Numbers of classes (H, W), UNLABELLED where there is none.

        Raises:
            DataError: the mask, of the image of this name, holds something else.
        """
        if self.values is not None:
            found = np.full(mask.shape, UNLABELLED, np.uint8)
            for number, value in enumerate(self.values):
                found[mask == value] = number
            return found
        wrong = mask[(mask >= self.count) & (mask != UNLABELLED) | (mask < 0)]
        if wrong.size:
            shown = ", ".join(map(str, np.unique(wrong)[:5]))
            raise DataError(
                f"The mask of {name} holds {shown}; expected 0 to {self.count - 1}, or {UNLABELLED} for no label. "
                "Give mask_values=, what each class has in the masks."
            )
        return mask.astype(np.uint8)

    def look(self, images: MaskedImages) -> None:
        """Read some masks before training, from the first to the last.

        Raises:
            DataError: one cannot be used, or none has a pixel of any class but the first.
        """
        rows = np.unique(np.linspace(0, len(images.names) - 1, LOOKED_AT).astype(int)).tolist()
        found, stored = set[int](), set[int]()
        for row in rows:
            mask = images.read_mask(row)
            stored |= set(np.unique(mask).tolist())
            found |= set(np.unique(self(mask, images.names[row])).tolist())
        if not found - {0, UNLABELLED}:
            raise DataError(
                f"The {len(rows)} masks that were looked at hold only {', '.join(map(str, sorted(stored)))}: no pixel "
                "of any class but the first. Give mask_values=, what each class has in the masks, such as [0, 255]."
            )


class _Samples(Dataset[Any]):
    """(image, mask) by number."""

    def __init__(
        self, part: Part, numbers: ClassNumbers, transform: Callable[..., tuple[Any, Any]], ignore_index: int
    ) -> None:
        self.images, self.rows = part
        self.numbers, self.transform, self.ignore_index = numbers, transform, ignore_index

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        from torchvision import tv_tensors

        row = self.rows[index]
        image, stored = self.images.read(row)
        mask = torch.from_numpy(self.numbers(stored, self.images.names[row]))
        image, mask = self.transform(image, tv_tensors.Mask(mask))
        mask = torch.as_tensor(mask).as_subclass(Tensor).long()
        return image, mask.masked_fill(mask == UNLABELLED, self.ignore_index)
