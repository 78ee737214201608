"""What a validation shows of a classifier, kept on the device in bounded memory: counts, and the samples it fails on.

    Evidence(...).add(...)    one batch; nobody waits for the device
    Evidence.share()          this rank's part on the host
    joined(shares)            of all ranks: sums, and the exact first k

Samples are ranked by score, and equal scores by the lower key in the data set, so that neither the order of the batches
nor the number of ranks changes who is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sanctuary_trainer import TaskError

TILE = 96  # pixels, the side of an image as it is shown
MOST_CELLS = 2048  # of a side of the confusion matrix: 32 MB; of more classes neighbours share a cell
UNKNOWN_KEY = 1 << 62  # keys from here on only count samples whose own is unknown, as those of streams


class Sample(NamedTuple):
    """A sample that is shown.

    Attributes:
        score: by which it is ranked: its log-probability or its loss.
        key: its key in the data set; from UNKNOWN_KEY on where none is known that is a whole number.
        image: (3, TILE, TILE) uint8.
    """

    score: float
    key: int
    label: int
    prediction: int
    image: NDArray[np.uint8]


@dataclass
class Found:
    """What a validation showed, over all ranks.

    Attributes:
        counts: (G, G) int64, true classes in rows, predicted ones in columns. G is the number K of classes; of more
            than 2048 classes a row and a column stand for `group` neighbours.
        right, total: (K,) int64, samples of each class that were classified rightly, and all.
        ignored: samples whose label is none of 0 to K - 1; they count nowhere else.
        confident_mistakes: wrong ones, the most confident first; `score` is the log of the prediction's probability.
        worst_losses: the highest cross-entropy first; `score` is the loss.
    """

    group: int
    counts: NDArray[np.int64]
    right: NDArray[np.int64]
    total: NDArray[np.int64]
    ignored: int
    confident_mistakes: list[Sample]
    worst_losses: list[Sample]


@dataclass
class Share:
    """One rank's part of it: of the counts those that are not 0, by their place."""

    num_classes: int
    cells: NDArray[np.int64]
    counts: NDArray[np.int64]
    right: NDArray[np.int64]
    total: NDArray[np.int64]
    confident_mistakes: list[Sample]
    worst_losses: list[Sample]


class Evidence:
    """What this rank has seen of one loader.

    Args:
        num_classes: K.
        num_images: how many samples are kept of each kind.
        mean, std: see `tiles`.
        probabilities: whether `add` is given probabilities as logits.
        rank, world_size: give samples without a key a number of their own.
    """

    def __init__(
        self,
        num_classes: int,
        num_images: int,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        *,
        device: torch.device,
        probabilities: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.num_classes, self._look, self._probabilities = num_classes, (mean, std), probabilities
        self.group = group_of(num_classes)
        self._side = -(-num_classes // self.group)
        # One place more in each, for labels that are no class: skipping them would have to wait for the device.
        self._counts = torch.zeros(self._side**2 + 1, dtype=torch.int64, device=device)
        self._right = torch.zeros(num_classes + 1, dtype=torch.int64, device=device)
        self._total = torch.zeros(num_classes + 1, dtype=torch.int64, device=device)
        self._mistakes, self._losses = First(num_images), First(num_images)
        self._seen, self._rank, self._world_size = 0, rank, world_size

    def add(self, images: Tensor, logits: Tensor, labels: Tensor, keys: Sequence[Any] | None) -> None:
        """Count one batch: images (B, C, H, W), logits (B, K), labels (B,), and keys of the samples where known."""
        device = self._counts.device
        known_keys = self._keys(keys, len(labels)).to(device, non_blocking=True)
        labels = labels.to(device, torch.int64, non_blocking=True)
        # Half precision would rank ties where there are none, and so would the softmax: it rounds logits that are near
        # each other to one value, of which the first would win.
        logits = logits.to(device, torch.promote_types(logits.dtype, torch.float32))
        predictions = logits.argmax(1)
        chances = (logits.log() if self._probabilities else logits).log_softmax(1)
        confidences = chances.gather(1, predictions.unsqueeze(1)).squeeze(1)
        is_class = (labels >= 0) & (labels < self.num_classes)
        losses = -chances.gather(1, labels.where(is_class, 0).unsqueeze(1)).squeeze(1)
        is_right = is_class & (predictions == labels)

        one = torch.ones_like(labels)
        cells = labels // self.group * self._side + predictions // self.group
        self._counts.index_add_(0, cells.where(is_class, self._side**2), one)
        self._total.index_add_(0, labels.where(is_class, self.num_classes), one)
        self._right.index_add_(0, labels.where(is_right, self.num_classes), one)

        facts = torch.stack([known_keys, labels, predictions], 1)
        self._mistakes.add(_ranked(confidences, is_class & ~is_right), facts, images, self._look)
        self._losses.add(_ranked(losses, is_class), facts, images, self._look)

    def share(self) -> Share:
        """What this rank gives to the others. Waits for the device."""
        counts = self._counts.cpu().numpy()
        cells = counts.nonzero()[0]
        return Share(
            self.num_classes,
            cells,
            counts[cells],
            self._right.cpu().numpy()[:-1],
            self._total.cpu().numpy()[:-1],
            self._mistakes.samples(),
            self._losses.samples(),
        )

    def _keys(self, keys: Sequence[Any] | None, count: int) -> Tensor:
        """(B,) int64: the keys where they are whole numbers, one of each sample; else numbers that no other sample has.

        A collate function may leave samples out, or make several of one: nobody knows whose keys are left then.
        """
        known: Sequence[Any] = keys if keys is not None and len(keys) == count else [None] * count
        if all(hasattr(key, "__index__") and -UNKNOWN_KEY < key < UNKNOWN_KEY for key in known):
            return torch.tensor([int(key) for key in known], dtype=torch.int64)
        numbers = torch.arange(self._seen, self._seen + count) * self._world_size + self._rank
        self._seen += count
        return UNKNOWN_KEY + numbers


class First:
    """The first k samples by score on the device, whatever the batches in which they come."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None  # scores (n,), facts (n, 3), images (n, 3, TILE, TILE)

    def add(self, scores: Tensor, facts: Tensor, images: Tensor, look: tuple[Any, Any]) -> None:
        """One batch: scores (B,), facts (B, 3) of key, label and prediction, images (B, C, H, W)."""
        if not self._k:
            return
        rows = self._order(scores, facts)
        shown = tiles(images.index_select(0, rows.to(images.device)), *look).to(scores.device)
        best = (scores[rows], facts[rows], shown)
        if self._kept is not None:
            both = [torch.cat([before, now]) for before, now in zip(self._kept, best, strict=True)]
            rows = self._order(both[0], both[1])
            best = (both[0][rows], both[1][rows], both[2].index_select(0, rows))
        self._kept = best

    def _order(self, scores: Tensor, facts: Tensor) -> Tensor:
        by_key = facts[:, 0].argsort(stable=True)
        return by_key[scores[by_key].argsort(descending=True, stable=True)[: self._k]]

    def samples(self) -> list[Sample]:
        """On the host, without those that only filled the places of others."""
        if self._kept is None:
            return []
        scores, facts, images = (tensor.cpu() for tensor in self._kept)
        rows = zip(scores.tolist(), facts.tolist(), images.numpy(), strict=True)
        return [
            Sample(score, key, label, prediction, image.copy())
            for score, (key, label, prediction), image in rows
            if score > -math.inf
        ]


def _ranked(scores: Tensor, takes_part: Tensor) -> Tensor:
    """NaN is worse than everything; what takes no part comes last."""
    return scores.where(~scores.isnan(), math.inf).where(takes_part, -math.inf)


def group_of(num_classes: int) -> int:
    """How many neighbouring classes share a row of the confusion matrix."""
    return -(-num_classes // MOST_CELLS)


def joined(shares: Sequence[Share], num_images: int) -> Found:
    """What all ranks have seen. Raises TaskError where they tell different numbers of classes apart."""
    num_classes = shares[0].num_classes
    for share in shares:
        if share.num_classes != num_classes:
            raise TaskError(
                f"ClassificationDashboard got logits of {num_classes} classes on one rank and of {share.num_classes} "
                "on another; expected as many on all of them."
            )
    side = -(-num_classes // group_of(num_classes))
    counts = np.zeros(side**2 + 1, dtype=np.int64)
    for share in shares:
        counts[share.cells] += share.counts
    return Found(
        group_of(num_classes),
        counts[:-1].reshape(side, side),
        np.sum([share.right for share in shares], 0),
        np.sum([share.total for share in shares], 0),
        int(counts[-1]),
        _first(num_images, [sample for share in shares for sample in share.confident_mistakes]),
        _first(num_images, [sample for share in shares for sample in share.worst_losses]),
    )


def _first(k: int, samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: (-sample.score, sample.key))[:k]


def tiles(images: Tensor, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> Tensor:
    """Images as they are shown, all of one size: (N, 3, TILE, TILE) uint8 on their device, the rest of it white.

    Larger ones are averaged down, smaller ones enlarged by a whole number, so that their pixels stay sharp.

    Args:
        images: (N, C, H, W), C = 1 or 3; uint8 is shown as it is, float as `images * std + mean`, clipped to [0, 1].
        mean, std: one value, or one for each channel; None where the images are not normalised.
    """
    pixels = images.float()
    longest = max(pixels.shape[2:])
    if longest > TILE:
        height, width = (max(1, round(side * TILE / longest)) for side in pixels.shape[2:])
        pixels = F.interpolate(pixels, size=(height, width), mode="area")
    if images.dtype == torch.uint8:
        pixels = pixels / 255
    elif mean is not None and std is not None:
        shift, scale = (torch.tensor(each).view(1, -1, 1, 1) for each in (mean, std))
        pixels = pixels * scale.to(images.device, non_blocking=True) + shift.to(images.device, non_blocking=True)
    small = (pixels.nan_to_num(0).clamp(0, 1) * 255).round().byte()
    count, channels, height, width = small.shape
    times = max(TILE // longest, 1)
    large = small[:, :, :, None, :, None].expand(-1, -1, -1, times, -1, times)
    large = large.reshape(count, channels, height * times, width * times)
    top, left = (TILE - large.shape[2]) // 2, (TILE - large.shape[3]) // 2
    shown = torch.full((count, 3, TILE, TILE), 255, dtype=torch.uint8, device=images.device)
    shown[:, :, top : top + large.shape[2], left : left + large.shape[3]] = large
    return shown
