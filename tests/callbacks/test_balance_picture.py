"""The picture of a load balance: bars as long as the times, colours that everybody can tell apart, in a fixed size."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sanctuary_trainer import LAPS, Balance
from sanctuary_trainer.callbacks.balance_picture import BAR, COLOURS, LEFT, PALE, RIGHT, SLOW, WHITE, balance_picture
from tests.callbacks.test_balance_page import balance, finding, rank_times

# What people without red, green or blue cones see, of linear RGB (Machado, Oliveira and Fernandes 2009), and all.
VISIONS = (
    np.eye(3),
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
)


def drawn(given: Balance) -> Any:
    """(H, W, 3)"""
    return balance_picture(given).transpose(1, 2, 0)


def is_of(pixels: Any, colour: tuple[int, int, int]) -> Any:
    return (pixels == np.array(colour)).all(-1)


def bars(pixels: Any) -> list[dict[str, int]]:
    """Of each bar that begins with "data", the pixels of each lap in its first line, which numbers leave free."""
    begins = is_of(pixels[:, LEFT], COLOURS["data"])
    first_lines = np.flatnonzero(begins & ~np.roll(begins, 1))
    line_colours = [pixels[y, LEFT:RIGHT] for y in first_lines]
    return [{lap: int(is_of(line, colour).sum()) for lap, colour in COLOURS.items()} for line in line_colours]


def legend(pixels: Any) -> list[str]:
    """The laps whose colour stands above the bars, from left to right."""
    top = int(np.flatnonzero(is_of(pixels[:, LEFT], COLOURS["data"]))[0])
    found = {lap: np.flatnonzero(is_of(pixels[:top], colour).sum(0) == 12) for lap, colour in COLOURS.items()}
    return sorted((lap for lap, columns in found.items() if len(columns)), key=lambda lap: found[lap][0])


def png(pixels: Any) -> bytes:
    """As it stands in the event file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def lab(colour: tuple[int, int, int], vision: Any) -> Any:
    """CIE Lab of sRGB in 0 to 255."""
    channels = np.array(colour) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(vision @ linear, 0, 1) / to_xyz.sum(1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_each_lap_is_as_long_as_its_time() -> None:
    times = [
        rank_times(0, **{lap: 10.0 + place for place, lap in enumerate(LAPS)}),
        rank_times(1, data=46.3, h2d=1.1, forward=21.2, backward=40.7, optimizer=3.4, wait=20, checkpoint=0.05),
        rank_times(2, data=3.0, wait=100.0),
    ]
    found = bars(drawn(balance(times)))
    per_ms = (RIGHT - LEFT) / 145  # the first rank's step is the longest
    assert len(found) == 3
    for bar, rank in zip(found, times, strict=True):
        for lap in LAPS:
            assert bar[lap] == pytest.approx(rank.seconds.get(lap, 0.0) * 1000 * per_ms, abs=1.01)
    assert sum(found[0].values()) == RIGHT - LEFT


def test_laps_follow_each_other_in_their_order() -> None:
    pixels = drawn(balance([rank_times(0, **dict.fromkeys(reversed(LAPS), 10.0))]))
    y = int(np.flatnonzero(is_of(pixels[:, LEFT], COLOURS["data"]))[0])
    begins = [int(np.flatnonzero(is_of(pixels[y, LEFT:], COLOURS[lap]))[0]) for lap in LAPS]
    assert begins == sorted(begins)
    assert list(COLOURS) == list(LAPS)


def test_the_legend_has_the_laps_that_are_there() -> None:
    times = [rank_times(0, data=2, forward=20, wait=44), rank_times(1, data=46, forward=20, validation=0.0001)]
    assert legend(drawn(balance(times))) == ["data", "forward", "wait"]
    assert legend(drawn(balance([rank_times(0, **dict.fromkeys(LAPS, 10.0))]))) == list(LAPS)


def test_times_by_class_are_parts_of_their_lap() -> None:
    parts = rank_times(0, **{"data": 10, "callbacks": 10, "callbacks:EMA": 9})
    assert np.array_equal(drawn(balance([parts])), drawn(balance([rank_times(0, data=10, callbacks=10)])))


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_every_rank_has_a_bar_of_its_own(ranks: int) -> None:
    times = [rank_times(rank, data=100.0 - rank, wait=rank) for rank in range(ranks)]
    widths = [bar["data"] for bar in bars(drawn(balance(times)))]
    assert widths == [round((100 - rank) / 100 * (RIGHT - LEFT)) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [17, 64, 2048])
def test_of_more_than_16_the_slowest_and_the_fastest_are_drawn(ranks: int) -> None:
    own = [100.0 + (rank * 7919) % ranks for rank in range(ranks)]
    times = [rank_times(rank, data=value, wait=100.0 + ranks - value) for rank, value in enumerate(own)]
    slowest_first = sorted(own, reverse=True)
    widths = [bar["data"] for bar in bars(drawn(balance(times)))]
    longest = 100 + ranks
    assert widths == [round(value / longest * (RIGHT - LEFT)) for value in [*slowest_first[:8], *slowest_first[-8:]]]


def test_slow_ranks_are_marked() -> None:
    times = [rank_times(rank) for rank in range(4)]
    found = is_of(drawn(balance(times, finding(ranks=(2,)))), SLOW)
    beside = np.flatnonzero(found[:, :LEFT].any(1))
    tops = np.flatnonzero(is_of(drawn(balance(times))[:, LEFT], COLOURS["data"])).reshape(4, BAR)
    # The verdict has two lines here, and one where the run is balanced.
    moved = drawn(balance(times, finding(ranks=(2,)))).shape[0] - drawn(balance(times)).shape[0]
    assert tops[2, 0] + moved <= beside[0] and beside[-1] <= tops[2, -1] + moved
    memory = finding("memory_nearly_full", ranks=(2,))
    assert not is_of(drawn(balance(times, memory)), SLOW).any()


def test_the_host_is_shown_where_there_are_several() -> None:
    def labels(*hosts: str) -> Any:
        return drawn(balance([rank_times(rank, host) for rank, host in enumerate(hosts)]))[:, :LEFT]

    assert np.array_equal(labels("a", "a"), labels("b", "b"))
    assert not np.array_equal(labels("a", "b"), labels("a", "c"))
    assert np.array_equal(labels("a.dc1.example", "b.dc1.example"), labels("a", "b"))


@pytest.mark.parametrize("ranks", [1, 2, 16, 17, 64])
@pytest.mark.parametrize("host", ["a", "W" * 300, "partition-gpu-node-{rank:04d}.dc1.example", "a\nb {rank}", ""])
def test_pictures_are_small(ranks: int, host: str) -> None:
    laps = {lap: 10.37 + place for place, lap in enumerate(LAPS)}
    times = [rank_times(rank, host.format(rank=rank), **laps | {"data": 30.0 + rank}) for rank in range(ranks)]
    evidence = f"rank 1 (host {host}) " + "waits for data 41 % of each step " * 20
    picture = balance_picture(balance(times, finding(evidence=evidence)))
    assert picture.dtype == np.uint8
    channels, height, width = picture.shape
    assert (channels, width) == (3, 900) and height <= 700
    assert len(png(picture.transpose(1, 2, 0))) < 60_000
    assert len(bars(picture.transpose(1, 2, 0))) == min(ranks, 16)
    edges = np.concatenate([picture[:, :, :2], picture[:, :, -2:]], axis=2)
    assert (edges == 255).all()  # nothing runs out of the picture


def test_the_tracker_takes_it(tmp_path: Any) -> None:
    from sanctuary_trainer.image_grid import image_grid

    picture = balance_picture(balance(2, finding()))
    assert np.array_equal(image_grid("balance/time_of_ranks", picture), picture.transpose(1, 2, 0))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0, 1e-30])
def test_times_that_are_no_times_have_no_bar(value: float) -> None:
    strange = rank_times(0, data=value, forward=value)
    alone = drawn(balance([strange]))
    assert bars(alone) == []
    assert drawn(balance([])).shape[1] == 900
    with_others = drawn(replace(balance([strange, rank_times(1, data=10)]), step_seconds=value))
    assert [bar["data"] for bar in bars(with_others)] == [RIGHT - LEFT]


def test_any_two_laps_differ_to_everybody() -> None:
    for vision in VISIONS:
        for one, other in combinations(COLOURS.values(), 2):
            assert np.linalg.norm(lab(one, vision) - lab(other, vision)) >= 25
    lightness = {lap: lab(colour, VISIONS[0])[0] for lap, colour in COLOURS.items()}
    assert max(lightness, key=lambda lap: lightness[lap]) == "wait"
    assert not {PALE, WHITE} & set(COLOURS.values())
