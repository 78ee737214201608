"""Files of images in folders, without torch: which there are, how one is read, and which of each class are held out."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from sanctuary_trainer.errors import DataError

SUFFIXES: Final = {".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
SPLITS: Final = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
# What Pillow raises for files that are no image, end too early or claim to be enormous.
BROKEN: Final = (
    *(OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)


def find_images(folder: Path) -> list[Path]:
    """The image files in a folder and below, in order; hidden ones are passed over, and those in hidden folders."""
    paths = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    return sorted(path for path in paths if path.is_file() and not any(map(_is_hidden, path.relative_to(folder).parts)))


def class_folders(folder: Path) -> dict[str, Path]:
    """The folders in a folder, by name and in order; hidden ones are passed over."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and not _is_hidden(path.name)}


def split_folders(folder: Path) -> dict[str, Path]:
    """The folders of splits in a folder: "train", and "val" and "test" where they are; or itself, as "train".

    Raises:
        DataError: it holds splits without one to train on, one of them twice, or other folders beside them.
    """
    inside = class_folders(folder)
    splits = [name for name in inside if name.lower() in SPLITS]
    others = [name for name in inside if name not in splits]
    if not splits or (others and len(splits) == 1):  # a class may be called "train"
        return {"train": folder}
    found = {SPLITS[name.lower()]: inside[name] for name in splits}
    if others or len(found) < len(splits) or "train" not in found:
        raise DataError(
            f"{folder} holds {', '.join(inside)}; expected the folders train and, perhaps, val and test, each once and "
            "nothing beside them; or folders of classes alone."
        )
    return found


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX"))


def as_rgb(image: Image.Image, size: tuple[int, int] | None = None) -> Image.Image:
    """The image upright, with three channels of 8 bits.

    Args:
        image: of any mode.
        size: width and height that its labels were made for; an image that has them only as it is stored, and not
            upright, is left as it is stored.

    Raises:
        ValueError: it has another size, or 32 bits a pixel of which nobody knows what is white.
    """
    upright = ImageOps.exif_transpose(image)
    if size not in (None, upright.size):
        if image.size != size:
            raise ValueError("it is {} x {} pixels, its labels are for {} x {}".format(*upright.size, *size))
        upright = image
    if upright.mode == "F" or (upright.mode == "I" and image.format != "PNG"):
        raise ValueError(f"it has 32 bits a pixel (mode {upright.mode}); expected 8 or 16")
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
