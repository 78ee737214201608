"""Which curves share a chart on TensorBoard's page "Custom Scalars", from the names of the values.

    train/loss  train/loss_epoch  val/loss  val/loss_ema     chart "loss" of the section "metrics"
    val/night/loss                                           there, too: one of several validation loaders
    val/accuracy_of/cat  val/accuracy_of/dog                 chart "accuracy_of" there: the entries of one metric
    train/lr  train/lr/head                                  chart "lr" of the section "optimization"
    balance/wait/rank0  balance/wait/rank1                   chart "wait" of the section "balance"
    speed/step_ms_median  speed/step_ms_p95                  chart "step_ms" of the section "speed"

A chart takes its curves by a regular expression that depends on its own name alone: what comes later (an average of the
weights, another rank) is in it, and TensorBoard, which puts the layouts of all runs together, shows equal charts once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

SECTIONS: Final = ("metrics", "optimization", "speed", "balance", "memory")  # these come first
MOST_SECTIONS: Final = 12
MOST_CHARTS: Final = 50  # in a section
MOST_CURVES: Final = 256  # in a chart: more make a browser wait and show nothing

_SECTION_OF: Final = {"lr": "optimization", "grad_norm": "optimization", "samples_per_second": "speed"}
_STAGES: Final = "(train|val(/[^/]+)?)"  # with the name of one of several loaders
_ENDINGS: Final = r"(_\d+|_mean|_median|_min|_max|_p\d+)?(_epoch|_ema)?"  # of curves that belong together
_CHART: Final = re.compile(f"(.+?){_ENDINGS}", re.DOTALL)


class _Place(NamedTuple):
    section: str
    chart: str
    curves: str  # a regular expression


def board_layout(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Sections of charts: title of the section -> title of the chart -> regular expression of its curves.

    Args:
        names: of all values so far. Charts come in the order of their first names, the loss before; of too many the
            last are left out.
    """
    places = Counter(_places(names))
    layout: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for (section, chart, curves), count in places.items():
        charts = layout.setdefault(section, {}) if len(layout) < MOST_SECTIONS else layout.get(section, {})
        if count <= MOST_CURVES and len(charts) < MOST_CHARTS:
            charts.setdefault(chart, curves)
    return {
        section: dict(sorted(charts.items(), key=lambda item: item[0] != "loss"))
        for section, charts in layout.items()
        if charts
    }


def _places(names: Collection[str]) -> Iterator[_Place]:
    has_loaders = _has_loaders(names)
    for name in names:
        stage, *parts = name.split("/")
        if not (stage and parts and all(parts)):
            continue
        if stage == "val" and has_loaders:
            parts = parts[1:] or parts
        match = _CHART.fullmatch(parts[0])
        assert match is not None  # a part is not empty
        chart = match[1]
        section, before = ("metrics", _STAGES) if stage in ("train", "val") else (stage, re.escape(stage))
        elsewhere = _SECTION_OF.get(chart)
        if elsewhere is not None and section in ("metrics", elsewhere):
            section, before = elsewhere, f"({_STAGES}|{elsewhere})"
        yield _Place(section, chart, f"{before}/{re.escape(chart)}{_ENDINGS}(/.+)?$")


def _has_loaders(names: Collection[str]) -> bool:
    """Whether validation has several loaders: then each of its values has a loader's name between."""
    of_validation = [name.split("/")[1:] for name in names if name.startswith("val/")]
    return all(len(parts) > 1 for parts in of_validation) and len({parts[0] for parts in of_validation}) > 1
