"""What BalancedBatchSampler saves where samples cost unequally: `python benchmarks/balanced.py` prints both tables.

The first is arithmetic. All ranks wait for the slowest in each round, so an epoch lasts as long as the sum over its
rounds of the most expensive batch. This is set in relation to the ideal, in which every round costs its mean.

The second is measured: two gloo processes train a small convolutional network on images of uneven sizes, one image
after the other, so that the time goes with the pixels. Epochs of a plain shuffle and of the balanced one take turns
within one fit, and each pair of neighbours meets the same machine: read the ratio, not the seconds. Where other
processes keep the cores busy, a rank that waits costs nothing, because another process has its core: the clock then
shows no gain. The CPU seconds of the rank that computes longest in each round, summed, are the epoch of a free machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every process that is started

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sanctuary_trainer import BalancedBatchSampler, Run, Trainer, VisionTask  # noqa: E402

WARM = 1  # pairs of epochs at the start that are not counted
DEVIATION = 0.7  # of the logarithm of pixels, in what is measured
MEDIAN = 96 * 96  # pixels


def log_normal(count: int, deviation: float) -> list[float]:
    """Relative costs, median 1."""
    draw = random.Random(0)
    return [draw.lognormvariate(0, deviation) for _ in range(count)]


def plain_shuffle(count: int, batch_size: int) -> list[list[int]]:
    return [batch.tolist() for batch in torch.randperm(count).split(batch_size)]


def slowest(batches: Sequence[Sequence[int]], costs: Sequence[float], ranks: int) -> float:
    """The cost of an epoch in which ranks wait for each other in each round."""
    totals = [sum(costs[sample] for sample in batch) for batch in batches]
    return sum(max(totals[begin : begin + ranks]) for begin in range(0, len(totals), ranks))


# Arithmetic


def arithmetic(count: int = 16384) -> None:
    print("an epoch's cost, ideal = 1.00; pixels log-normal, deviation of the logarithm below\n")
    print(f"{'ranks':>5} {'batch size':>10} {'deviation':>9} {'plain':>7} {'balanced':>9} {'balanced / plain':>17}")
    for ranks in (2, 8):
        for batch_size in (2, 8, 32):
            for deviation in (0.3, 0.7, 1.0):
                costs = log_normal(count, deviation)
                ideal = sum(costs) / ranks
                torch.manual_seed(0)
                plain = slowest(plain_shuffle(count, batch_size), costs, ranks) / ideal
                balanced = slowest(list(BalancedBatchSampler(costs, batch_size, ranks=ranks)), costs, ranks) / ideal
                print(
                    f"{ranks:5} {batch_size:10} {deviation:9} {plain:7.3f} {balanced:9.3f} {balanced / plain:17.3f}",
                    flush=True,
                )


# Measured


class Images(Dataset[Any]):
    """Square random images (3, S, S) with log-normal pixels, at hand before they are asked for."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        sides = [max(8, round((MEDIAN * cost) ** 0.5)) for cost in log_normal(count, DEVIATION)]
        self.images = [torch.rand(3, side, side, generator=generator) for side in sides]
        self.pixels = [side * side for side in sides]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index]


class InTurns(Sampler[list[int]]):
    """A plain shuffle in epochs 0, 2, ..., the balanced one in epochs 1, 3, ..."""

    def __init__(self, pixels: Sequence[int], batch_size: int) -> None:
        self.balanced = BalancedBatchSampler(pixels, batch_size)
        self.count, self.batch_size, self.epoch = len(pixels), batch_size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.balanced)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.balanced if self.epoch % 2 else plain_shuffle(self.count, self.batch_size))


class OneByOne(VisionTask):
    """A small convolutional network on images of any size; times its epochs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )
        self.seconds: list[float] = []  # of each epoch
        self.cpu_seconds: list[list[float]] = []  # of each epoch and round

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.stack([self.net(image[None]).square().mean() for image in batch]).mean()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.cat([self.net(image[None]) for image in batch])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_epoch_start(self, run: Run) -> None:
        self._begin = time.perf_counter()
        self.cpu_seconds.append([])

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        self._cpu_begin = time.process_time()

    def on_train_batch_end(self, run: Run, batch: Any, batch_idx: int, loss: Any) -> None:
        self.cpu_seconds[-1].append(time.process_time() - self._cpu_begin)  # waiting for the other rank takes none

    def on_train_epoch_end(self, run: Run) -> None:
        self.seconds.append(time.perf_counter() - self._begin)


def measure(pairs: int, images: Images, batch_size: int) -> tuple[list[float], list[list[float]]]:
    """On one rank: seconds of each epoch, and CPU seconds of each epoch and round."""
    sampler = InTurns(images.pixels, batch_size)
    trainer = Trainer(cpu=True, max_epochs=2 * (pairs + WARM), log_with=None, default_callbacks=False, seed=0)
    task = OneByOne()
    trainer.fit(task, DataLoader(images, batch_sampler=sampler, collate_fn=list))
    return task.seconds[2 * WARM :], task.cpu_seconds[2 * WARM :]


def expected(pixels: Sequence[int], batch_size: int) -> float:
    """Pixels that are waited for in balanced epochs, over those in plain ones, on two ranks."""
    torch.manual_seed(0)
    balanced = BalancedBatchSampler(pixels, batch_size, ranks=2)
    waited_for = [
        (slowest(list(balanced), pixels, 2), slowest(plain_shuffle(len(pixels), batch_size), pixels, 2))
        for _ in range(50)
    ]
    return sum(ours for ours, _ in waited_for) / sum(theirs for _, theirs in waited_for)


def measured(pairs: int, count: int, batch_size: int) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "CUDA_VISIBLE_DEVICES": "",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        command += ["--pairs", str(pairs), "--images", str(count), "--batch-size", str(batch_size), "--to", folder]
        ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(f"the two processes failed:\n{ran.stderr}")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    seconds = [max(epoch) for epoch in zip(*(seconds for seconds, _ in found), strict=True)]
    cpu = [sum(map(max, *epoch)) for epoch in zip(*(cpu_seconds for _, cpu_seconds in found), strict=True)]
    print(
        f"\ntwo gloo processes, {count} images, batch size {batch_size}, deviation {DEVIATION}, {pairs} pairs of epochs"
    )
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load average before {os.getloadavg()[1]:.1f}\n")
    print(f"{'':34} {'plain':>7} {'balanced':>9} {'balanced / plain':>17}")
    for name, epochs in (("seconds", seconds), ("CPU seconds of the slowest rank", cpu)):
        plain, balanced = epochs[::2], epochs[1::2]
        ratios = [ours / theirs for ours, theirs in zip(balanced, plain, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:34} {statistics.median(plain):7.2f} {statistics.median(balanced):9.2f} "
            f"{median:17.3f}  quartiles {low:.3f} {high:.3f}"
        )
    print(f"{'pixels, expected':34} {'':7} {'':9} {expected(Images(count).pixels, batch_size):17.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of epochs that are measured (default: 12)")
    parser.add_argument("--images", type=int, default=128, help="images of an epoch (default: 128)")
    parser.add_argument("--batch-size", type=int, default=4, help="images of a batch of one rank (default: 4)")
    parser.add_argument("--only-measured", action="store_true", help="leave out the first table")
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)  # what this file tells the processes that it starts
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.images % (2 * options.batch_size):
        parser.error("--images must fill all rounds: a multiple of twice the batch size")
    if options.to is None:
        if not options.only_measured:
            arithmetic()
        measured(options.pairs, options.images, options.batch_size)
        return
    found = measure(options.pairs, Images(options.images), options.batch_size)
    (options.to / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
