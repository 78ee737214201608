"""Batches of equal cost on all ranks, for samples that differ: pixels, boxes, lengths.

    BalancedBatchSampler
      draw a plain shuffle
      for each round:  the next R x B samples of it, and at the end the rest
        the most expensive first, equal ones mixed:  into the batch that costs least so far and is not full
        R batches, each in the order of the shuffle, and the one with the round's first sample first

A round takes the same samples as without balance; only who gets which is chosen. So which rank gets the most expensive
sample, or the batch that came out more expensive, stays a matter of the shuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from heapq import heappop, heapreplace
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.utils.data import Sampler

from sanctuary_trainer.errors import SettingsError

__all__ = ["BalancedBatchSampler"]


class BalancedBatchSampler(Sampler[list[int]]):
    """Gives rounds of batches, one for each rank, with equal numbers of samples and about equal cost.

        costs = [height * width for height, width in sizes]
        DataLoader(dataset, batch_sampler=BalancedBatchSampler(costs, batch_size=32))

    Every sample comes once an epoch. Batch k is for rank k % ranks; a Trainer deals so, and accelerate does with
    even_batches=False. The shuffle is drawn from torch's global generator, which a Trainer seeds by seed and epoch;
    elsewhere `torch.manual_seed` fixes it, and has to be called alike on all ranks. The order within a round depends
    on the number of ranks, with shuffle=False too.

    Args:
        costs: what each sample costs, in any unit (pixels, boxes, tokens): one number of 0 or more per sample, as a
            sequence, tensor or array; or a function of the data set's index, called once per sample here.
        batch_size: samples in a batch of one rank.
        ranks: batches in a round; None is the world size at the time when the sampler is iterated.
        shuffle: draw another order in each epoch; else rounds follow the order of the data set.
        drop_last: leave out the last round if it is not full. Else its samples are dealt in equal counts, and fewer
            samples than ranks give fewer batches.
        num_samples: the length of the data set: needed where `costs` is a function, else it is compared.

    Raises:
        SettingsError: the costs are not one finite number of 0 or more per sample, or another argument is wrong.
    """

    def __init__(
        self,
        costs: Sequence[float] | torch.Tensor | np.ndarray[Any, Any] | Callable[[int], float],
        batch_size: int,
        *,
        ranks: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        num_samples: int | None = None,
    ) -> None:
        self.batch_size = _whole("batch_size", batch_size, 1)
        self.ranks = None if ranks is None else _whole("ranks", ranks, 1)
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(value, bool):
                raise SettingsError(f"BalancedBatchSampler got {name}={value!r}; expected True or False.")
        self.shuffle, self.drop_last = shuffle, drop_last
        self._costs = _checked(costs, None if num_samples is None else _whole("num_samples", num_samples, 0))
        self.num_samples = len(self._costs)
        self._places = _most_expensive_first(self._costs)
        self._used = 0

    def after(self, samples: int) -> BalancedBatchSampler:
        """Sample the rest of an epoch of which so many samples, whole rounds, are used up.

        On as many ranks it is dealt as in the whole epoch, on others anew; drawn from the same state of the generator.
        """
        rest = copy(self)
        rest._used = min(samples, len(self._costs))
        return rest

    def __len__(self) -> int:
        """Batches of an epoch, over all ranks."""
        ranks = _world_size() if self.ranks is None else self.ranks
        rounds, rest = divmod(len(self._costs) - self._used, ranks * self.batch_size)
        return rounds * ranks + (0 if self.drop_last else min(rest, ranks))

    def __iter__(self) -> Iterator[list[int]]:
        ranks = _world_size() if self.ranks is None else self.ranks
        full, count = ranks * self.batch_size, len(self._costs)
        order = (torch.randperm(count).tolist() if self.shuffle else range(count))[self._used :]
        count -= self._used
        for begin in range(0, count - count % full if self.drop_last else count, full):
            samples = order[begin : begin + full]
            yield from _deal(samples, self._costs, self._places, [len(samples[rank::ranks]) for rank in range(ranks)])


def _deal(samples: Sequence[int], costs: list[float], places: list[int], sizes: list[int]) -> list[list[int]]:
    """Deal samples into batches of these sizes and about equal cost; where the size is 0, there is none.

    Longest processing time first (Graham, Bounds on Multiprocessing Timing Anomalies, 1969); a full batch takes no
    more. Who shares a batch with whom does not depend on the order of the samples, so that ordering the batches by it
    favours no rank.
    """
    batches: list[list[int]] = [[] for size in sizes if size]
    lightest = [(0.0, number) for number in range(len(batches))]  # a heap
    for sample in sorted(samples, key=places.__getitem__):
        cost, number = lightest[0]
        batches[number].append(sample)
        if len(batches[number]) < sizes[number]:
            heapreplace(lightest, (cost + costs[sample], number))
        else:
            heappop(lightest)
    place = {sample: place for place, sample in enumerate(samples)}
    return sorted((sorted(batch, key=place.__getitem__) for batch in batches), key=lambda batch: place[batch[0]])


def _most_expensive_first(costs: list[float]) -> list[int]:
    """The place of each sample, the most expensive first, and equal ones in a fixed random order."""
    # Not in the data set's: neighbours are often of one class, and where they cost nothing, they fill one batch.
    order = np.lexsort((np.random.RandomState(0).permutation(len(costs)), -np.asarray(costs)))
    return np.argsort(order).tolist()  # type: ignore[no-any-return]


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise SettingsError(f"BalancedBatchSampler got {name}={value!r}; expected a whole number from {least}.")
    return int(value)


def _checked(costs: Any, num_samples: int | None) -> list[float]:
    if callable(costs):
        if num_samples is None:
            raise SettingsError("BalancedBatchSampler got a function as costs. Give num_samples=len(dataset), too.")
        costs = [costs(sample) for sample in range(num_samples)]
    try:
        if isinstance(costs, torch.Tensor):
            costs = costs.detach().double().cpu()  # bfloat16 is no type of numpy's
        values = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise SettingsError(f"BalancedBatchSampler expected one number per sample as costs: {error}.") from error
    if values.ndim != 1:
        raise SettingsError(
            f"BalancedBatchSampler got costs of shape {values.shape}; expected one number per sample, such as "
            "height * width."
        )
    if num_samples is not None and len(values) != num_samples:
        raise SettingsError(
            f"BalancedBatchSampler got {len(values)} costs for num_samples={num_samples}; expected one per sample, in "
            "the order of the data set's indices."
        )
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        raise SettingsError(
            f"BalancedBatchSampler got costs[{wrong[0]}]={values[wrong[0]]:g}; expected a finite number of 0 or more. "
            f"{len(wrong)} of {len(values)} are wrong."
        )
    return values.tolist()  # type: ignore[no-any-return]


def _world_size() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
