"""Folders of images, one per class, read with Pillow into one array of small square images."""

from __future__ import annotations

import statistics
import struct
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from sanctuary_trainer.errors import DataError

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
SPLITS = {"train", "val", "valid", "validation", "test"}
SMALLEST, LARGEST = 8, 64  # pixels a side: less shows a CNN nothing, more takes a CPU too long
# What Pillow raises for files that are no image, end too early or claim to be enormous.
BROKEN = (
    *(OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)


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
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__")))
    classes = {path.name: sorted(filter(_is_image, path.rglob("*"))) for path in inside if path.is_dir()}
    if classes and {name.lower() for name in classes} <= SPLITS:
        raise DataError(f"{folder} holds no classes but {', '.join(classes)}: give one of these folders.")
    if not any(classes.values()):
        found = "class folders without images" if classes else "nothing to read"
        found = "images, but no class folders" if any(map(_is_image, inside)) else found
        raise DataError(f"{folder} holds {found}; expected FOLDER/CLASS/IMAGE ({' '.join(sorted(SUFFIXES))}).")

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


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


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
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I"):  # 16 bits a pixel; Pillow's own conversion would cut them off at 255
            image = Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
        fitted = ImageOps.fit(image.convert("RGB"), (side, side))
        return np.asarray(fitted, np.uint8).transpose(2, 0, 1)
