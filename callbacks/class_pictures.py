"""The pictures of a classifier's dashboard, drawn with Pillow. Sizes are in pixels and do not depend on the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from sanctuary_trainer.callbacks.class_evidence import TILE, UNKNOWN_KEY, Found, Sample

PICTURE = 900
HEADING = 34
NAMES, NUMBERS = 150, 60  # beside and above the matrix
MOST_NAMED = 50  # classes; more are a heat map with numbers
MOST_BARS = 40
COLUMNS = 8
CAPTION = 44  # three lines
BLACK, GREY, PALE, WHITE = (0, 0, 0), (110, 110, 110), (225, 225, 225), (255, 255, 255)
RIGHT, WRONG = (20, 100, 180), (200, 50, 30)  # of a cell that holds its whole row


def confusion_picture(found: Found, names: Sequence[str]) -> Image.Image:
    """The confusion matrix: a cell is the darker the larger its share of its row, blue on the diagonal, red beside it.

    Counts are written where they have room, names for at most 50 classes, else some of the classes' numbers; cells of
    many classes are summed until each is at least a pixel.
    """
    right, total = int(found.right.sum()), int(found.total.sum())
    image, pen = _page(f"{right:,} of {total:,} right ({right / max(total, 1):.2%}){_left_out(found)}", PICTURE)
    named = len(names) <= MOST_NAMED
    left, top = NAMES if named else NUMBERS, HEADING + (NAMES if named else NUMBERS)
    room = PICTURE - top - 8
    counts = _summed(found.counts, room)
    side = room // len(names) * len(names) if named else room  # in cells of one size for text
    image.paste(Image.fromarray(shades(counts)).resize((side, side), Image.Resampling.NEAREST), (left, top))
    pen.rectangle((left - 1, top - 1, left + side, top + side), outline=PALE)
    pen.text((left + side / 2, HEADING + 6), "predicted", GREY, _font(14), anchor="mm")
    _sideways(image, "true", (12, top + side // 2), GREY, _font(14), anchor="middle")
    if named:
        _name_cells(image, pen, counts, names, (left, top), side // len(names))
    else:
        _number_cells(pen, len(names), (left, top), side)
    return image


def shades(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The colours (G, G, 3) of a matrix (G, G), each row by its own sum."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    full = np.where(np.eye(len(counts), dtype=bool)[..., None], np.array(RIGHT), np.array(WRONG))
    # The root, so that a single mistake among hundreds is seen.
    tints: NDArray[np.uint8] = (255 + (full - 255) * np.sqrt(shares)[..., None]).round().astype(np.uint8)
    return tints


def bars_picture(found: Found, names: Sequence[str]) -> Image.Image:
    """The accuracy of each class as a bar, the 40 lowest; classes without samples have none."""
    seen = [i for i in range(len(names)) if found.total[i]]
    accuracies = {i: float(found.right[i] / found.total[i]) for i in seen}
    mean = sum(accuracies.values()) / max(len(seen), 1)
    lowest = sorted(seen, key=lambda i: (accuracies[i], i))[:MOST_BARS]
    of = f"the lowest {len(lowest)} of {len(seen):,}" if len(lowest) < len(seen) else f"all {len(seen)}"
    image, pen = _page(f"Accuracy of classes: mean {mean:.2%}; {of}", PICTURE)
    line = (PICTURE - HEADING - 8) // MOST_BARS
    begin, end = 230, PICTURE - 150
    for place, i in enumerate(lowest):
        top = HEADING + 4 + place * line
        pen.text((begin - 8, top + line / 2), _fitting(names[i], _font(13), begin - 20), BLACK, _font(13), anchor="rm")
        pen.rectangle((begin, top + 3, end, top + line - 3), PALE)
        if accuracies[i]:
            pen.rectangle((begin, top + 3, begin + accuracies[i] * (end - begin), top + line - 3), RIGHT)
        text = f"{accuracies[i]:.1%}  {found.right[i]:,}/{found.total[i]:,}"
        pen.text((end + 8, top + line / 2), text, BLACK, _font(13), anchor="lm")
    return image


def samples_picture(
    samples: Sequence[Sample], names: Sequence[str], heading: str, measure: str, num_images: int
) -> Image.Image:
    """Samples side by side, with label, prediction, and probability or loss beneath.

    Args:
        samples: in their order.
        heading: above all.
        measure: "probability" or "loss": what their scores are.
        num_images: room for so many.
    """
    rows = -(-num_images // COLUMNS)
    cell, line = (PICTURE - 4) // COLUMNS, CAPTION // 3
    image, pen = _page(heading, HEADING + rows * (TILE + CAPTION + 8))
    for place, sample in enumerate(samples):
        left = 4 + place % COLUMNS * cell
        top = HEADING + place // COLUMNS * (TILE + CAPTION + 8)
        image.paste(Image.fromarray(np.ascontiguousarray(sample.image.transpose(1, 2, 0))), (left, top))
        number = "" if sample.key >= UNKNOWN_KEY else f"  #{sample.key}"
        texts = [f"true {names[sample.label]}", f"pred {names[sample.prediction]}", _score(sample, measure) + number]
        colours = [BLACK, BLACK if sample.label == sample.prediction else WRONG, GREY]
        for i, (text, colour) in enumerate(zip(texts, colours, strict=True)):
            pen.text((left, top + TILE + 2 + i * line), _fitting(text, _font(10), cell - 6), colour, _font(10))
    if not samples:
        pen.text((12, HEADING + 8), "none", GREY, _font(14))
    return image


def _score(sample: Sample, measure: str) -> str:
    if not math.isfinite(sample.score):
        return f"{measure[:4]} not finite"
    return f"p {math.exp(sample.score):.4f}" if measure == "probability" else f"loss {sample.score:.3g}"


def _left_out(found: Found) -> str:
    return f"; {found.ignored:,} left out, whose label is no class" if found.ignored else ""


def _page(heading: str, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (PICTURE, height), WHITE)
    pen = ImageDraw.Draw(image)
    pen.text((12, HEADING / 2), heading, BLACK, _font(16), anchor="lm")
    return image, pen


def _summed(counts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """The matrix with neighbours summed until it has at most so many rows."""
    rows = min(len(counts), most)
    starts = np.arange(rows) * len(counts) // rows
    return np.add.reduceat(np.add.reduceat(counts, starts, 0), starts, 1)


def _name_cells(
    image: Image.Image,
    pen: ImageDraw.ImageDraw,
    counts: NDArray[np.int64],
    names: Sequence[str],
    corner: tuple[int, int],
    cell: int,
) -> None:
    """Write the classes' names beside and above the matrix, and the counts into cells that have room for them."""
    left, top = corner
    font = _font(min(max(cell * 2 // 3, 9), 15))
    for i, name in enumerate(names):
        text, middle = _fitting(name, font, NAMES - 30), i * cell + cell // 2
        pen.text((left - 6, top + middle), text, BLACK, font, anchor="rm")
        _sideways(image, text, (left + middle, top - 6), BLACK, font, anchor="bottom")
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    for row, column in np.argwhere(counts):
        text = str(counts[row, column])
        if font.getlength(text) <= cell - 2:
            place = (left + (column + 0.5) * cell, top + (row + 0.5) * cell)
            pen.text(place, text, WHITE if shares[row, column] > 0.3 else BLACK, font, anchor="mm")


def _number_cells(pen: ImageDraw.ImageDraw, count: int, corner: tuple[int, int], side: int) -> None:
    """Write at most 10 of the classes' numbers beside and above the matrix."""
    left, top = corner
    step = next(step for power in range(9) for step in (10**power, 2 * 10**power, 5 * 10**power) if count <= 10 * step)
    for i in range(0, count, step):
        middle = (i + 0.5) * side / count
        pen.text((left - 6, top + middle), str(i), GREY, _font(11), anchor="rm")
        pen.text((left + middle, top - 6), str(i), GREY, _font(11), anchor="mb")


def _sideways(
    image: Image.Image, text: str, place: tuple[int, int], colour: tuple[int, int, int], font: Any, anchor: str
) -> None:
    """Write text from bottom to top: around a place ("middle"), or beginning there ("bottom")."""
    width, height = int(font.getlength(text)) + 1, 20
    mask = Image.new("L", (width, height), 0)
    ImageDraw.Draw(mask).text((0, height / 2), text, 255, font, anchor="lm")
    mask = mask.rotate(90, expand=True)
    x, y = place
    corner = (x - height // 2, y - width) if anchor == "bottom" else (x - height // 2, y - width // 2)
    image.paste(Image.new("RGB", mask.size, colour), corner, mask)


def _fitting(text: str, font: Any, width: int) -> str:
    """Text in one line, without its middle where it is wider than this: long names often differ at their ends."""
    text = fitting = " ".join(text.split())
    kept = min(len(text), width)  # no letter is narrower than a pixel
    while kept and font.getlength(fitting) > width:
        kept -= 1
        fitting = text[: kept - kept // 2] + "…" + text[len(text) - kept // 2 :]
    return fitting


@cache  # reading it takes longer than a word
def _font(size: int) -> Any:
    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)  # has European letters, where the machine has it
    except OSError:
        return ImageFont.load_default(size)  # ASCII
