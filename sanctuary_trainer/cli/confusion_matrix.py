"""The confusion matrix as a picture, drawn with Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

MARGIN = 16  # pixels, like all sizes here
PICTURE = 900  # the matrix's side, about
FONT_SIZES = 8, 18
LONGEST_NAME = 24  # characters
BLACK, GREY, PALE, WHITE = (0, 0, 0), (120, 120, 120), (225, 225, 225), (255, 255, 255)
RIGHT, WRONG = (20, 100, 180), (200, 50, 30)  # of a cell that holds its whole row


def count(labels: npt.NDArray[np.int64], predictions: npt.NDArray[np.int64], num_classes: int) -> npt.NDArray[np.int64]:
    """How often which class was taken for which: (classes, classes), true ones in rows, predicted ones in columns."""
    flat = np.bincount(labels * num_classes + predictions, minlength=num_classes**2)
    return flat.reshape(num_classes, num_classes)


def draw(counts: npt.NDArray[np.int64], names: list[str], path: Path) -> None:
    """Write the picture of a confusion matrix.

    A cell is the darker the larger its share of its row: blue on the diagonal, red beside it. Numbers are left out
    where they have no room.

    Args:
        counts: (K, K); the row is the true class, the column the predicted one.
        names: of the K classes.
        path: the PNG file to write.

    Raises:
        OSError: it cannot be written.
    """
    names = [name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..." for name in names]
    cell = max(PICTURE // len(names), FONT_SIZES[0] + 2) if len(names) > 12 else 64
    font = ImageFont.load_default(max(min(cell // 3, FONT_SIZES[1]), FONT_SIZES[0]))
    heading = ImageFont.load_default(FONT_SIZES[1])
    title = f"{counts.trace():,} of {counts.sum():,} right ({counts.trace() / max(counts.sum(), 1):.2%})"
    beside = int(max(font.getlength(name) for name in names)) + 2 * MARGIN  # room for names
    line = FONT_SIZES[1] + 6
    left, top = line + beside, 2 * line + MARGIN + beside
    side = cell * len(names)
    width = max(left + side + MARGIN, int(heading.getlength(title)) + 2 * MARGIN)
    image = Image.new("RGB", (width, top + side + MARGIN), WHITE)
    pen = ImageDraw.Draw(image)

    pen.text((MARGIN, MARGIN), title, BLACK, heading)
    pen.text((left + side / 2, MARGIN + 1.5 * line), "predicted", GREY, heading, anchor="mm")
    _sideways(image, "true", (MARGIN // 2, top + side // 2), GREY, heading, anchor="mm")
    for i, name in enumerate(names):
        middle = i * cell + cell // 2
        pen.text((left - MARGIN // 2, top + middle), name, BLACK, font, anchor="rm")
        _sideways(image, name, (left + middle, top - MARGIN // 2), BLACK, font, anchor="bottom")

    for i in range(len(names) + 1):
        pen.line((left + i * cell, top, left + i * cell, top + side), PALE)
        pen.line((left, top + i * cell, left + side, top + i * cell), PALE)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    for row, column in np.argwhere(counts):
        share = float(shares[row, column])
        x, y = int(left + column * cell), int(top + row * cell)
        full = RIGHT if row == column else WRONG
        # The root, so that a single mistake among hundreds is seen.
        tint = [round(white + (dark - white) * share**0.5) for white, dark in zip(WHITE, full, strict=True)]
        pen.rectangle((x + 1, y + 1, x + cell - 1, y + cell - 1), (tint[0], tint[1], tint[2]))
        text = str(counts[row, column])
        if font.getlength(text) <= cell - 4:
            pen.text((x + cell / 2, y + cell / 2), text, WHITE if share > 0.3 else BLACK, font, anchor="mm")
    image.save(path)


def _sideways(
    image: Image.Image, text: str, place: tuple[int, int], colour: tuple[int, int, int], font: Any, anchor: str
) -> None:
    """Write text from bottom to top: around a place, or with its first letter there."""
    width, height = int(font.getlength(text)) + 1, FONT_SIZES[1] + 6
    mask = Image.new("L", (width, height), 0)
    ImageDraw.Draw(mask).text((0, height / 2), text, 255, font, anchor="lm")
    mask = mask.rotate(90, expand=True)
    x, y = place
    corner = (x - height // 2, y - width) if anchor == "bottom" else (x, y - width // 2)
    image.paste(Image.new("RGB", mask.size, colour), corner, mask)
