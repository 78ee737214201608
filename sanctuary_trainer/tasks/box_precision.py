"""COCO's mean average precision, as the few numbers that are watched. Importing this takes seconds."""

from __future__ import annotations

from typing import Any

from torchmetrics.detection import MeanAveragePrecision

SHOWN = ("map", "map_50", "map_75", "mar_100")


class BoxPrecision(MeanAveragePrecision):
    """`map` over overlaps of 0.5 to 0.95, at 0.5 and at 0.75, and recall; -1 where there is no object at all."""

    def __init__(self) -> None:
        super().__init__(backend="pycocotools")
        self.warn_on_many_detections = False  # COCO counts the 100 best of an image

    def compute(self) -> dict[str, Any]:
        """The numbers by name."""
        values = super().compute()
        return {name: values[name] for name in SHOWN}
