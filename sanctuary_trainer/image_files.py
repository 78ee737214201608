"""Files of images in folders, without torch: which there are, how one is read, and which of each class are held out."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

SUFFIXES: Final = {".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
# What Pillow raises for files that are no image, end too early or claim to be enormous.
BROKEN: Final = (
    *(OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)


def find_images(folder: Path) -> list[Path]:
    """The image files in a folder and below, in order; hidden ones are passed over."""
    paths = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    return sorted(path for path in paths if not path.name.startswith(".") and path.is_file())


def class_folders(folder: Path) -> dict[str, Path]:
    """The folders in a folder, by name and in order; hidden ones and `__MACOSX` and its like are passed over."""
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    return {path.name: path for path in inside}


def as_rgb(image: Image.Image) -> Image.Image:
    """The image upright, with three channels of 8 bits."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):  # 16 bits a pixel; Pillow's own conversion would cut them off at 255
        upright = Image.fromarray((np.asarray(upright) // 256).clip(0, 255).astype(np.uint8))
    return upright.convert("RGB")


def what_is_there(folder: Path) -> str:
    """What a folder without class folders of images holds, and what was expected."""
    inside = class_folders(folder)
    found = "class folders without images" if inside else "nothing to read"
    found = "images, but no class folders" if any(path.parent == folder for path in find_images(folder)) else found
    return f"{folder} holds {found}; expected FOLDER/CLASS/IMAGE ({' '.join(sorted(SUFFIXES))})."


def draw_rows(
    labels: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    share: float,
    generator: np.random.Generator,
    at_least: int = 0,
) -> npt.NDArray[np.int64]:
    """Draw this share of every class's rows, in order: at least so many, and never all."""
    drawn = [np.empty(0, np.int64)]
    for label in np.unique(labels[rows]):
        own = generator.permutation(rows[labels[rows] == label])
        drawn.append(own[: min(max(round(len(own) * share), at_least), len(own) - 1)])
    return np.sort(np.concatenate(drawn))
