"""Scenes of discs and rings, drawn by numpy: the data of `segmentation.py` and `detection.py`."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CLASSES = ("disc", "ring")


@dataclass
class Scene:
    """A picture and all that is known about it; k objects."""

    image: Tensor
    """(3, H, W) float32 in [0, 1]."""
    mask: Tensor
    """(H, W) int64: 0 is the ground, 1 + label a shape."""
    boxes: Tensor
    """(k, 4) float32: left, top, right, bottom in pixels."""
    labels: Tensor
    """(k,) int64: an index of CLASSES."""


def draw_scene(seed: int, index: int, size: int = 48, most_shapes: int = 4) -> Scene:
    """Draws scene `index`, the same at every call: `size` pixels square, at most `most_shapes` shapes, apart."""
    random = np.random.default_rng((seed, index))
    y, x = np.mgrid[:size, :size] + 0.5
    image = np.tile(random.uniform(0.2, 0.8, (3, 1, 1)), (1, size, size))
    mask = np.zeros((size, size), np.int64)
    boxes, labels = [], []
    for _ in range(random.integers(0, most_shapes + 1)):
        radius = random.uniform(4, 9)
        column, row = random.uniform(radius + 1, size - radius - 1, 2)
        label = int(random.integers(len(CLASSES)))
        distance = np.hypot(x - column, y - row)
        if mask[distance < radius + 3].any():
            continue  # it would touch another
        inside = (distance < radius) & (distance > label * radius / 2)
        # Colours tell nothing about the class, only that they differ from the ground.
        image[:, inside] = (image[:, :1, 0] + random.choice([-1, 1], (3, 1)) * random.uniform(0.15, 0.4, (3, 1))) % 1
        mask[inside] = 1 + label
        boxes.append([column - radius, row - radius, column + radius, row + radius])
        labels.append(label)
    image += random.normal(0, 0.04, image.shape)
    return Scene(
        image=torch.tensor(image.clip(0, 1), dtype=torch.float32),
        mask=torch.tensor(mask),
        boxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        labels=torch.tensor(labels, dtype=torch.int64),
    )
