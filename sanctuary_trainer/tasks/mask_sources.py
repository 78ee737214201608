"""Images with a mask each, whatever holds them: the class of every pixel, as a number.

of_folders("streets")         streets/images/A.jpg with streets/masks/A.png; splits above or below these two
of_masked_dataset(dataset)    Hugging Face's, or any map-style data set of pairs (image, mask)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sanctuary_trainer.errors import DataError
from sanctuary_trainer.image_files import BROKEN, as_rgb, class_folders, find_images, split_folders
from sanctuary_trainer.tasks.image_datasets import column_kinds, is_table, no_column, numbered, splits_of
from sanctuary_trainer.tasks.image_sources import ImageFiles

IMAGES, MASKS = ("images", "image", "imgs"), ("masks", "mask", "annotations", "labels")
MASK_COLUMNS = ("mask", "masks", "annotation", "label", "labels", "segmentation_mask")

Mask = npt.NDArray[Any]  # (H, W) of integers, as it is stored


@dataclass(frozen=True)
class MaskedImages:
    """Images of one split with their masks.

    Attributes:
        read: the image and the mask of a row; picklable, for workers.
        read_mask: the mask alone.
        names: of each row: the image's path, or its place in the data set.
    """

    read: Callable[[int], tuple[Any, Mask]]
    read_mask: Callable[[int], Mask]
    names: Sequence[str]


def of_folders(root: Path) -> dict[str, MaskedImages]:
    """Find images and their masks, by split: an image's mask has its name, with any suffix.

    Raises:
        DataError: the folders are not there, or an image has no mask.
    """
    found = {}
    for split, folder in split_folders(root).items():
        inside = class_folders(folder)
        images, masks = (next((inside[n] for n in names if n in inside), None) for names in (IMAGES, MASKS))
        if images is None or masks is None:
            there = ", ".join(inside) or "no folders"
            raise DataError(f"{folder} holds {there}; expected images and masks (or annotations, or labels).")
        by_split = split_folders(images)
        if by_split == {"train": images}:
            found[split] = _of_files(images, masks)
            continue
        for below, path in by_split.items():
            found[below] = _of_files(path, masks / path.name)
    return found


def _of_files(images: Path, masks: Path) -> MaskedImages:
    paths = find_images(images)
    if not paths:
        raise DataError(f"The folder {images} holds no images.")
    known = {path.relative_to(masks).with_suffix(""): path for path in find_images(masks)} if masks.is_dir() else {}
    wanted = [path.relative_to(images).with_suffix("") for path in paths]
    lacking = [place for place in wanted if place not in known]
    if lacking:
        raise DataError(
            f"{len(lacking):,} of the {len(paths):,} images in {images} have no mask in {masks}, the first "
            f"{lacking[0]}; a mask is called like its image, with any suffix."
        )
    files = MaskFiles(paths, [known[place] for place in wanted])
    return MaskedImages(files, files.mask, list(map(str, paths)))


class MaskFiles:
    """Reads images and masks from files."""

    def __init__(self, images: Sequence[Path], masks: Sequence[Path]) -> None:
        self.images, self.masks = ImageFiles(images), masks

    def __call__(self, row: int) -> tuple[Any, Mask]:
        mask = self.mask(row)
        height, width = mask.shape
        return self.images(row, (width, height)), mask

    def mask(self, row: int) -> Mask:
        try:
            with Image.open(self.masks[row]) as opened:
                return as_mask(opened)
        except BROKEN as error:
            raise DataError(f"The mask {self.masks[row]} cannot be used: {error}.") from error


def of_masked_dataset(
    dataset: Any, image_column: str | None = None, mask_column: str | None = None
) -> dict[str, MaskedImages]:
    """Take images and masks from a data set, by split.

    Args:
        dataset: "datasets:FOLDER_OR_HUB_NAME", a data set of Hugging Face, a map-style one of pairs (image, mask), or a
            mapping of these by split.
        image_column, mask_column: of a Hugging Face data set; None: found by name and type.

    Raises:
        SettingsError: a string names nothing.
        DataError: the data set cannot be read, or lacks a column.
    """
    found = {}
    for split, samples in splits_of(dataset).items():
        if is_table(samples):
            rows: MaskTable | MaskPairs = MaskTable(samples, *_columns(samples, image_column, mask_column))
        elif hasattr(samples, "__getitem__") and hasattr(samples, "__len__"):
            rows = MaskPairs(samples)
        else:
            raise DataError(
                f"A {type(samples).__name__} has no numbered samples; expected dataset[i] and len(dataset)."
            )
        found[split] = MaskedImages(rows, rows.mask, numbered(split, len(samples)))
    return found


def _columns(table: Any, image: str | None, mask: str | None) -> tuple[str, str]:
    kinds = column_kinds(table)
    pictures = [name for name, kind in kinds.items() if kind == "Image"]
    mask = mask or next((name for name in MASK_COLUMNS if name in pictures), None)
    image = image or next((name for name in pictures if name != mask), None)
    for what, column in (("image", image), ("mask", mask)):
        if column not in pictures:
            raise no_column(what, column, kinds)
    return str(image), str(mask)


class MaskTable:
    """Reads images and masks of a Hugging Face data set."""

    def __init__(self, table: Any, image: str, mask: str) -> None:
        self.table, self.masks, self.image_column, self.mask_column = table, table.select_columns([mask]), image, mask

    def __call__(self, row: int) -> tuple[Any, Mask]:
        try:
            record = self.table[row]
            mask = as_mask(record[self.mask_column])
            return as_rgb(record[self.image_column], (mask.shape[1], mask.shape[0])), mask
        except BROKEN as error:
            raise DataError(f"Row {row} of the data set cannot be used: {error}.") from error

    def mask(self, row: int) -> Mask:
        try:
            return as_mask(self.masks[row][self.mask_column])
        except BROKEN as error:
            raise DataError(f"The mask of row {row} of the data set cannot be used: {error}.") from error


class MaskPairs:
    """Reads images and masks of a data set of pairs."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs

    def __call__(self, row: int) -> tuple[Any, Mask]:
        try:
            image, stored = self.pairs[row]
            mask = as_mask(stored)
            return as_rgb(image, (mask.shape[1], mask.shape[0])) if isinstance(image, Image.Image) else image, mask
        except BROKEN as error:
            raise DataError(f"Sample {row} of the data set cannot be used: {error}.") from error

    def mask(self, row: int) -> Mask:
        return self(row)[1]


def as_mask(stored: Any) -> Mask:
    """A mask as whole numbers (H, W), as it is stored: those of a palette are places in it.

    Args:
        stored: Pillow's image, an array or a tensor; (H, W) or (1, H, W).

    Raises:
        ValueError: it has several channels, or fractions.
    """
    mask = np.asarray(stored)
    if mask.ndim == 3 and mask.shape[0] == 1:
        mask = mask[0]
    if mask.ndim != 2 or mask.dtype.kind not in "bui":
        mode = f"mode {stored.mode}, " if isinstance(stored, Image.Image) else ""
        raise ValueError(
            f"it is a picture ({mode}shape {mask.shape}, {mask.dtype}); expected one whole number for each pixel, that "
            "of its class"
        )
    return mask.astype(np.uint8) if mask.dtype.kind == "b" else mask
