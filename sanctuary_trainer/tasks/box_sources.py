"""Images with boxes, whatever holds them; COCO's JSON files are read in `coco.py`.

of_boxed_dataset(dataset)   of Hugging Face: a column of images, and one of objects with bbox and category
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sanctuary_trainer.errors import DataError
from sanctuary_trainer.image_files import BROKEN, as_rgb
from sanctuary_trainer.tasks.detectors import Target
from sanctuary_trainer.tasks.image_datasets import column_kinds, is_table, no_column, numbered, splits_of


class BoxedImages(NamedTuple):
    """Images of one split with their boxes.

    Attributes:
        read: the image and the target of a row; picklable, for workers.
        names: of each row: the image's path, or its place in the data set.
    """

    read: Callable[[int], tuple[Any, Target]]
    names: Sequence[str]


class BoxSource(NamedTuple):
    """The classes' names, and the images by split."""

    class_names: list[str]
    splits: dict[str, BoxedImages]


def of_boxed_dataset(dataset: Any, image_column: str | None = None, objects_column: str | None = None) -> BoxSource:
    """Take images and boxes from a data set of Hugging Face.

    Args:
        dataset: "datasets:FOLDER_OR_HUB_NAME", the data set, or a mapping of these by split.
        image_column: None: found by its type.
        objects_column: of objects with `bbox` (left, top, width, height in pixels) and `category`; None: "objects".

    Raises:
        SettingsError: a string names nothing.
        DataError: the data set cannot be read, lacks a column, or its categories have no names.
    """
    names: list[str] = []
    splits = {}
    for split, table in splits_of(dataset).items():
        if not is_table(table):
            raise DataError(
                f"A {type(table).__name__} is no data set of Hugging Face; make a DataLoader of it yourself."
            )
        kinds = column_kinds(table)
        image = image_column or next((name for name, kind in kinds.items() if kind == "Image"), None)
        objects = objects_column or "objects"
        for what, column in (("image", image), ("objects", objects)):
            if column not in kinds:
                raise no_column(what, column, kinds)
        names = names or _category_names(table.features[objects], objects)
        splits[split] = BoxedImages(BoxTable(table, str(image), objects), numbered(split, len(table)))
    return BoxSource(names, splits)


def _category_names(feature: Any, column: str) -> list[str]:
    """The names of `category` in a column of lists."""
    inner = getattr(feature, "feature", feature)
    category: Any = inner.get("category") if isinstance(inner, Mapping) else None
    category = getattr(category, "feature", category)
    if not hasattr(category, "names") or "bbox" not in inner:
        raise DataError(f"The column {column!r} is {feature}; expected objects with bbox and category, a ClassLabel.")
    return list(category.names)


class BoxTable:
    """Reads images and boxes of a Hugging Face data set."""

    def __init__(self, table: Any, image: str, objects: str) -> None:
        self.table, self.image_column, self.objects_column = table, image, objects

    def __call__(self, row: int) -> tuple[Any, Target]:
        try:
            record = self.table[row]
            image, objects = as_rgb(record[self.image_column]), record[self.objects_column]
            if isinstance(objects, list):  # a list of objects, not an object of lists
                objects = {key: [one[key] for one in objects] for key in ("bbox", "category")}
            boxes = torch.tensor(objects["bbox"], dtype=torch.float32).reshape(-1, 4)
            labels = torch.tensor(objects["category"], dtype=torch.int64)
        except BROKEN as error:
            raise DataError(f"Row {row} of the data set cannot be used: {error}.") from error
        boxes[:, 2:] += boxes[:, :2]
        boxes = boxes.clamp(min=torch.zeros(4), max=torch.tensor([*image.size, *image.size]))
        kept = (boxes[:, 2:] > boxes[:, :2]).all(1)
        return image, {"boxes": boxes[kept], "labels": labels[kept]}
