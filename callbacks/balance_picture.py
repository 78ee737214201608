"""The load balance of a run as one picture, drawn with Pillow: a bar for each rank, cut into its laps."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from sanctuary_trainer.callbacks.balance_page import (
    MOST_RANKS,
    lap_text,
    laps_of,
    milliseconds,
    own_work,
    short_hosts,
    shortened,
    shown_ranks,
    slow_ranks,
    verdict_text,
    wrapped,
)

if TYPE_CHECKING:
    from sanctuary_trainer import Balance, RankTimes

    Colour = tuple[int, int, int]

# In pixels. Of 17 ranks or more, with a title of two lines, the picture is 900 x 686.
WIDTH = 900
LEFT, RIGHT = 140, 816  # of the bars
LINE, LEGEND, ROW, BAR, GAP, AXIS = 22, 44, 32, 20, 30, 44  # heights
# Colours are of multiples of 17, to which the shades at the edges of letters are rounded: that halves the file.
SHADES = [17 * round(value / 17) for value in range(256)] * 3
BLACK, GREY, PALE, WHITE = (0, 0, 0), (102, 102, 102), (238, 238, 238), (255, 255, 255)
SLOW = (187, 34, 17)
# Found by search: any two differ by 25 or more in CIE Lab, also to people who see no red, no green or no blue.
COLOURS = {
    "data": (221, 153, 0),
    "h2d": (238, 204, 119),
    "forward": (0, 68, 153),
    "backward": (68, 204, 255),
    "wait": (221, 221, 221),
    "optimizer": (51, 153, 85),
    "callbacks": (221, 85, 153),
    "logging": (85, 85, 0),
    "validation": (17, 17, 68),
    "checkpoint": (119, 51, 68),
}
OTHER = (153, 153, 153)  # a lap that has no colour of its own


def balance_picture(balance: Balance) -> NDArray[np.uint8]:
    """The time of a step on each rank, as the bars of one picture.

    Up to 16 ranks in their order; of more the 8 slowest above and the 8 fastest below, by own work (the step without
    waiting for others). The ranks that a finding names as slow are marked.

    Returns:
        (3, H, 900) uint8, H at most 686.
    """
    return np.array(_Drawing(balance).image.point(SHADES)).transpose(2, 0, 1)


class _Drawing:
    """The picture of a balance: title, legend, bars from `top` to `bottom`, axis."""

    def __init__(self, balance: Balance) -> None:
        self.balance = balance
        self.shown = shown_ranks(balance, MOST_RANKS)
        self.slow, self.hosts, self.is_alone = slow_ranks(balance), short_hosts(balance), len(balance.ranks) == 1
        self.longest = max((sum(laps_of(times).values()) for times in self.shown), default=0.0)  # seconds
        left_out = len(balance.ranks) - len(self.shown)
        title = _title(verdict_text(balance))
        self.top = 12 + len(title) * LINE + LEGEND
        self.bottom = self.top + max(len(self.shown), 1) * ROW + (GAP if left_out else 0)
        self.image = Image.new("RGB", (WIDTH, self.bottom + AXIS), WHITE)
        self.pen = ImageDraw.Draw(self.image)
        for place, line in enumerate(title):
            self.write(line, 12, 12 + place * LINE + LINE // 2, 16)
        if self.longest < 1e-9:
            self.write("no time was measured", 12, self.top + ROW // 2, 13, GREY)
            return
        self.draw_axis()
        self.draw_legend(self.top - LEGEND + 14)
        for place, times in enumerate(self.shown):
            below = GAP if left_out and place >= len(self.shown) // 2 else 0
            self.draw_rank(times, self.top + place * ROW + below + ROW // 2)
        if left_out:
            middle = self.top + len(self.shown) // 2 * ROW + GAP // 2
            self.pen.rectangle((LEFT, middle - 12, RIGHT, middle + 12), WHITE)
            text = f"{left_out:,} ranks left out between the slowest, above, and the fastest, below"
            self.write(text, LEFT, middle, 12, GREY)

    def write(self, text: str, x: int, middle: int, size: int, colour: Colour = BLACK, anchor: str = "lm") -> None:
        self.pen.text((x, middle), text, colour, _font(size), anchor=anchor)

    def draw_rank(self, times: RankTimes, middle: int) -> None:
        """One rank: number and host at the left, its bar, its own work at the right."""
        colour, name = SLOW if times.rank in self.slow else BLACK, middle - 7 if self.hosts else middle
        label = f"rank {times.rank}"
        self.write(label, LEFT - 10, name, 13, colour, anchor="rm")
        if times.rank in self.slow:
            self.draw_mark(LEFT - 22 - _width(label, 13), name)
        if self.hosts:
            self.write(_fitting(self.hosts[times.host]), LEFT - 10, middle + 8, 11, GREY, anchor="rm")
        laps = laps_of(times)
        for lap, begin, end in self.segments(times):
            fill = COLOURS.get(lap, OTHER)
            self.pen.rectangle((begin, middle - BAR // 2, end - 1, middle + BAR // 2 - 1), fill)
            value = 1000 * laps[lap]
            number = f"{value:,.{0 if value >= 9.95 else 1}f}"
            if end - begin > 20 and _width(number, 11) < end - begin - 6:
                self.write(number, (begin + end) // 2, middle, 11, WHITE if fill[1] < 100 else BLACK, anchor="mm")
        if not self.is_alone:
            self.write(milliseconds(own_work(times)), WIDTH - 14, middle, 13, colour, anchor="rm")

    def segments(self, times: RankTimes) -> list[tuple[str, int, int]]:
        """Lap, first pixel and the one after the last, of the laps that have a pixel."""
        segments, before = [], 0.0
        for lap, seconds in laps_of(times).items():
            begin, end = self.place(before), self.place(before + seconds)
            if end > begin:
                segments.append((lap, begin, end))
            before += seconds
        return segments

    def place(self, seconds: float) -> int:
        return LEFT + round(seconds / self.longest * (RIGHT - LEFT))

    def draw_legend(self, middle: int) -> None:
        """The laps that have a pixel somewhere, and what the mark and the column at the right mean."""
        drawn = {lap for times in self.shown for lap, _, _ in self.segments(times)}
        x = 12
        for lap in [lap for lap in dict.fromkeys([*COLOURS, *sorted(drawn)]) if lap in drawn]:
            self.pen.rectangle((x, middle - 6, x + 11, middle + 5), COLOURS.get(lap, OTHER))
            self.write(lap_text(lap), x + 17, middle, 12)
            x += 17 + _width(lap_text(lap), 12) + 14
        if self.slow:
            self.draw_mark(x, middle)
            self.write("slow rank", x + 13, middle, 12, SLOW)
        if not self.is_alone:
            self.write("own work", WIDTH - 14, middle + 20, 11, GREY, anchor="rm")

    def draw_mark(self, x: int, middle: int) -> None:
        self.pen.polygon([(x, middle - 5), (x, middle + 5), (x + 8, middle)], SLOW)

    def draw_axis(self) -> None:
        """Milliseconds from 0 to the longest step, in steps of 1, 2 or 5 times a power of ten."""
        rough = self.longest * 1000 / 7
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        for number in range(int(self.longest * 1000 / step) + 1):
            x = self.place(number * step / 1000)
            self.pen.line((x, self.top, x, self.bottom + 3), PALE)
            self.write(f"{number * step:,.10g}", x, self.bottom + 12, 12, GREY, anchor="mm")
        steps = f"{self.balance.steps:,} {'step' if self.balance.steps == 1 else 'steps'}"
        meaning = "" if self.is_alone else "; own work: without waiting for others"
        self.write(f"ms per step, mean over {steps}{meaning}", LEFT, self.bottom + 31, 12, GREY)


def _title(text: str) -> list[str]:
    """At most two lines that fit the picture."""
    lines: list[str] = []
    for columns in range(130, 40, -5):
        lines = [line.strip() for line in wrapped(text, columns)]
        if all(_width(line, 16) <= WIDTH - 24 for line in lines):
            break
    return lines


def _fitting(host: str) -> str:
    """A host's name, its middle left out where it is too wide."""
    return next((text for n in range(24, 6, -1) if _width(text := shortened(host, n), 11) < LEFT - 14), "")


def _width(text: str, size: int) -> int:
    return round(float(_font(size).getlength(text)))


@cache  # reading it takes longer than a word
def _font(size: int) -> Any:
    return ImageFont.load_default(size)
