"""Labelled images, whatever holds them, as one thing: how many, which class, and how each is read when it is asked for.

    of_folder("flowers")      FOLDER/CLASS/.../IMAGE, or the same under FOLDER/train, FOLDER/val, FOLDER/test
    of_csv("flowers.csv")     columns path and label, perhaps split; paths are relative to the file

Data sets of other libraries: `image_datasets.py`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from sanctuary_trainer.errors import DataError
from sanctuary_trainer.image_files import BROKEN, as_rgb, class_folders, find_images, what_is_there

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
PATH_COLUMNS, LABEL_COLUMNS, SPLIT_COLUMN = (
    ("path", "file", "file_name", "filename", "image"),
    ("label", "class"),
    "split",
)


@dataclass(frozen=True)
class LabelledImages:
    """Images of one split.

    Attributes:
        read: the image of a row, as Pillow's or as something that a transform takes; picklable, for workers.
        labels: of each row, a class's name before `as_classes` and its number after it.
        names: of each row, what to call it: its path, or its place in the data set.
    """

    read: Callable[[int], Any]
    labels: Sequence[Any]
    names: Sequence[str]


@dataclass(frozen=True)
class Source:
    """The classes' names, and the images by split: "train", and "val" and "test" where they are given."""

    class_names: list[str]
    splits: dict[str, LabelledImages]


class ImageFiles:
    """Reads images from files, upright and in RGB."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __call__(self, row: int) -> Image.Image:
        try:
            with Image.open(self.paths[row]) as opened:
                return as_rgb(opened)
        except BROKEN as error:
            raise DataError(f"The image {self.paths[row]} cannot be read: {error}. Remove or replace it.") from error


def of_folder(folder: Path) -> Source:
    """Read which images there are; a class is called like its folder.

    Raises:
        DataError: there is no class folder with an image.
    """
    inside = class_folders(folder)
    if "train" in map(str.lower, inside) and {name.lower() for name in inside} <= SPLITS.keys():
        return as_classes({SPLITS[name.lower()]: _class_folders(path) for name, path in inside.items()}, None)
    return as_classes({"train": _class_folders(folder)}, None)


def _class_folders(folder: Path) -> LabelledImages:
    found = [(path, name) for name, inside in class_folders(folder).items() for path in find_images(inside)]
    if not found:
        raise DataError(what_is_there(folder))
    paths = [path for path, _ in found]
    return LabelledImages(ImageFiles(paths), [name for _, name in found], list(map(str, paths)))


def of_csv(file: Path, path_column: str | None = None, label_column: str | None = None) -> Source:
    """Read a table of images.

    Args:
        file: its first row names the columns.
        path_column: of the images' paths, absolute or relative to the file; None: path, file, file_name, ...
        label_column: of the classes' names; None: label or class.

    Raises:
        DataError: a column is missing, or a row has no label, no known split, or a file that does not exist.
    """
    splits: dict[str, list[tuple[Path, str]]] = {}
    with file.open(newline="", encoding="utf-8-sig") as opened:
        reader = csv.DictReader(opened)
        columns = list(reader.fieldnames or [])
        at_path = _column(file, columns, path_column, PATH_COLUMNS, "the images' paths")
        at_label = _column(file, columns, label_column, LABEL_COLUMNS, "the labels")
        for row in reader:
            where = f"{file}, line {reader.line_num}"
            path, label = file.parent / (row[at_path] or ""), (row[at_label] or "").strip()
            split = (row.get(SPLIT_COLUMN) or "train").strip().lower()
            if not path.is_file():
                raise DataError(f"{where}: there is no file {path}.")
            if not label:
                raise DataError(f"{where}: the column {at_label!r} is empty.")
            if split not in SPLITS:
                raise DataError(f"{where}: the split {split!r} is none of {', '.join(SPLITS)}.")
            splits.setdefault(SPLITS[split], []).append((path, label))
    found = {
        split: LabelledImages(ImageFiles([p for p, _ in rows]), [label for _, label in rows], [str(p) for p, _ in rows])
        for split, rows in splits.items()
    }
    return as_classes(found, None)


def _column(file: Path, columns: list[str], given: str | None, known: Sequence[str], what: str) -> str:
    found = next((name for name in ([given] if given else known) if name in columns), None)
    if found is None:
        wanted = repr(given) if given else " or ".join(known)
        there = ", ".join(columns) or "none"
        raise DataError(f"{file} has no column {wanted} for {what}; its columns are: {there}.")
    return found


def as_classes(splits: Mapping[str, LabelledImages], class_names: Sequence[str] | None) -> Source:
    """Number the classes: by the names that are given, or in the order of those that training has.

    Args:
        splits: with names of classes as labels; with numbers where class_names says what they are called.
        class_names: of the data set.

    Raises:
        DataError: nothing to train on, one class only, or a class outside training that training lacks.
    """
    if "train" not in splits or not len(splits["train"].labels):
        raise DataError(f"There are no images to train on; the splits found are: {', '.join(splits) or 'none'}.")
    kinds = set(splits["train"].labels)
    names = sorted(map(str, kinds)) if class_names is None else list(class_names)
    if len(kinds) < 2:
        only = ", ".join(str(names[kind]) if class_names is not None else str(kind) for kind in kinds)
        raise DataError(
            f"All {len(splits['train'].labels):,} images are of one class, {only}; at least two are needed."
        )
    for split, images in splits.items():
        if lacking := set(images.labels) - kinds:
            shown = ", ".join(sorted(str(names[k]) if class_names is not None else str(k) for k in lacking)[:5])
            raise DataError(f"The split {split!r} has images of classes that training lacks: {shown}.")
    if class_names is None:
        numbers = {name: number for number, name in enumerate(names)}
        splits = {
            split: replace(images, labels=[numbers[str(label)] for label in images.labels])
            for split, images in splits.items()
        }
    return Source(names, dict(splits))
