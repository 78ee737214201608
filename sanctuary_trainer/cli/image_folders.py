"""Folders of images, one per class, read with Pillow into one array of small square images."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from sanctuary_trainer.errors import DataError
from sanctuary_trainer.image_files import BROKEN, SPLITS, as_rgb, class_folders, find_images, what_is_there

SMALLEST, LARGEST = 8, 64  # pixels a side: less shows a CNN nothing, more takes a CPU too long


class ClassFolders(NamedTuple):
    """Images (N, 3, side, side) uint8; labels (N,); the classes' names; N paths in the folder; what was left out."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    names: list[str]
    files: list[str]
    remarks: list[str]


def read_class_folders(folder: Path) -> ClassFolders:
    """Read FOLDER/CLASS/.../IMAGE; a class is called like its folder.

    A file that cannot be read as an image is left out, with a remark that names it.

    Raises:
        DataError: there is no class folder with an image, or no image can be read.
    """
    classes = {name: find_images(inside) for name, inside in class_folders(folder).items()}
    if classes and {name.lower() for name in classes} <= SPLITS.keys():
        raise DataError(f"{folder} holds no classes but {', '.join(classes)}: give one of these folders.")
    if not any(classes.values()):
        raise DataError(what_is_there(folder))

    paths = [path for files in classes.values() for path in files]
    images, broken = _load_all(paths)
    if len(broken) == len(paths):
        raise DataError(f"None of the {len(paths):,} images in {folder} can be read; the first is {paths[0]}.")
    remarks = []
    if broken:
        more = f" and {len(broken) - 5:,} more" if len(broken) > 5 else ""
        remarks.append(f"Left out, as they cannot be read as images: {', '.join(map(str, broken[:5]))}{more}.")
    unreadable = set(broken)
    files = [path.relative_to(folder) for path in paths if path not in unreadable]
    names = [name for name in classes if any(file.parts[0] == name for file in files)]
    remarks += [f"Left out, as it has no image: class {name!r}." for name in classes if name not in names]
    labels = np.array([names.index(file.parts[0]) for file in files], np.int64)
    return ClassFolders(images, labels, names, [str(file) for file in files], remarks)


def _load_all(paths: Sequence[Path]) -> tuple[npt.NDArray[np.uint8], list[Path]]:
    """Load what can be loaded: square, as large as half of the images are, but neither tiny nor large.

    Returns:
        The images (N, 3, side, side), and the paths that could not be read, in order.
    """
    images: list[npt.NDArray[np.uint8]] = []
    broken: list[Path] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's about odd but readable files
        sides = [side for path in paths if (side := _shorter_side(path))]
        side = min(max(int(statistics.median(sides or [SMALLEST])), SMALLEST), LARGEST)
        for path in paths:
            try:
                images.append(_load(path, side))
            except BROKEN:
                broken.append(path)
    return np.stack(images) if images else np.empty((0, 3, side, side), np.uint8), broken


def _shorter_side(path: Path) -> int | None:
    """Pixels, from the file's head alone; None when it cannot be read."""
    try:
        with Image.open(path) as image:
            return min(image.size)
    except BROKEN:
        return None


def _load(path: Path, side: int) -> npt.NDArray[np.uint8]:
    with Image.open(path) as opened:
        opened.draft("RGB", (2 * side, 2 * side))  # a JPEG is decoded no larger than needed
        fitted = ImageOps.fit(as_rgb(opened), (side, side))
        return np.asarray(fitted, np.uint8).transpose(2, 0, 1)
