"""Labelled images, whatever holds them, as one thing: how many, which class, and how each is read when it is asked for.

    of_folder("flowers")      FOLDER/CLASS/.../IMAGE, or the same under FOLDER/train, FOLDER/val, FOLDER/test
    of_csv("flowers.csv")     columns path and label, perhaps split; paths are relative to the file

Data sets of other libraries: `image_datasets.py`.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from sanctuary_trainer.errors import DataError
from sanctuary_trainer.image_files import (
    BROKEN,
    SPLITS,
    as_rgb,
    class_folders,
    find_images,
    split_folders,
    what_is_there,
)

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
    """Reads images from files, upright and in RGB; of the width and height that labels were made for, where given."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __call__(self, row: int, size: tuple[int, int] | None = None) -> Image.Image:
        try:
            with Image.open(self.paths[row]) as opened:
                return as_rgb(opened, size)
        except BROKEN as error:
            raise DataError(f"The image {self.paths[row]} cannot be read: {error}. Remove or replace it.") from error


def of_folder(folder: Path) -> Source:
    """Read which images there are; a class is called like its folder.

    Raises:
        DataError: there is no class folder with an image.
    """
    return as_classes({split: _class_folders(inside) for split, inside in split_folders(folder).items()}, None)


def _class_folders(folder: Path) -> LabelledImages:
    by_class = {name: find_images(inside) for name, inside in class_folders(folder).items()}
    found = [(path, name) for name, paths in by_class.items() for path in paths]
    if not found:
        raise DataError(what_is_there(folder))
    if empty := [name for name, paths in by_class.items() if not paths]:
        warnings.warn(f"{folder}: no images, and so no class: {', '.join(empty)}.", stacklevel=2)
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
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            splits = _csv_rows(file, csv.DictReader(opened), path_column, label_column)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} is no CSV file in UTF-8: {error}.") from error
    found = {
        split: LabelledImages(ImageFiles([p for p, _ in rows]), [label for _, label in rows], [str(p) for p, _ in rows])
        for split, rows in splits.items()
    }
    return as_classes(found, None)


def _csv_rows(
    file: Path, reader: csv.DictReader[str], path_column: str | None, label_column: str | None
) -> dict[str, list[tuple[Path, str]]]:
    """The path and the label of each row, by split."""
    columns = list(reader.fieldnames or [])
    at_path = _column(file, columns, path_column, PATH_COLUMNS, "the images' paths")
    at_label = _column(file, columns, label_column, LABEL_COLUMNS, "the labels")
    splits: dict[str, list[tuple[Path, str]]] = {}
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
    return splits


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
        splits: with numbers as labels where class_names says what they are called; else with names, of which whole
            numbers are ordered as numbers.
        class_names: of the data set.

    Raises:
        DataError: nothing to train on, one class only, a class outside training that training lacks, or a label that
            is neither a class's name nor its number.
    """
    if "train" not in splits or not len(splits["train"].labels):
        raise DataError(f"There are no images to train on; the splits found are: {', '.join(splits) or 'none'}.")
    for split, images in splits.items():
        _check_labels(split, images, class_names)
    kinds = set(splits["train"].labels)
    shown = str if class_names is None else class_names.__getitem__
    if len(kinds) < 2:
        only = shown(*kinds)
        raise DataError(
            f"All {len(splits['train'].labels):,} images are of one class, {only}; at least two are needed."
        )
    for split, images in splits.items():
        if lacking := set(images.labels) - kinds:
            names = ", ".join(sorted(map(shown, lacking))[:5])
            raise DataError(f"The split {split!r} has images of classes that training lacks: {names}.")
    if class_names is not None:
        return Source(list(class_names), dict(splits))
    ordered = sorted(kinds, key=int) if all(str(kind).isdecimal() for kind in kinds) else sorted(kinds)
    numbers = {kind: number for number, kind in enumerate(ordered)}
    numbered = {
        split: replace(images, labels=[numbers[label] for label in images.labels]) for split, images in splits.items()
    }
    return Source(list(map(str, ordered)), numbered)


def _check_labels(split: str, images: LabelledImages, class_names: Sequence[str] | None) -> None:
    for row, label in enumerate(images.labels):
        if class_names is None:
            is_right, wanted = isinstance(label, str | int), "a class's name, or a whole number"
        else:
            is_right, wanted = isinstance(label, int) and 0 <= label < len(class_names), f"0 to {len(class_names) - 1}"
        if not is_right:
            raise DataError(f"The label of {images.names[row]} ({split}) is {label!r}; expected {wanted}.")
