"""What BalancedBatchSampler saves where samples cost unequally: `python benchmarks/balanced.py` prints three tables.

All ranks wait for the slowest in each round, so an epoch lasts as long as the sum over its rounds of the most expensive
batch. Its imbalance is that sum over the one in which every round costs its mean: 1.00 where nobody waits.

1. Arithmetic: the imbalance in pixels, for ranks, batch sizes and spreads.
2. Computed: one process trains a small convolutional network on every batch of 8 ranks, one image after the other, so
   that the time goes with the pixels. A batch costs the least CPU seconds of its runs, which other processes disturb
   least. This is the step time that 8 ranks on machines of their own would have, but for what they communicate.
3. Measured: two gloo processes train the same network. Epochs of a plain shuffle and of the balanced one take turns
   within one fit, and each pair of neighbours meets the same machine: read the ratios, not the seconds. The clock shows
   the gain where each process has a core to itself; on busy cores a rank that waits costs nothing, because another
   process has its core. CPU seconds leave the waiting out, so that their imbalance shows it on busy cores, too.
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

RANKS, BATCH_SIZE = 8, 8  # of what is computed
WARM = 1  # pairs of epochs at the start that are not counted
DEVIATION = 0.7  # of the logarithm of pixels, in what is computed and measured
MEDIAN = 96 * 96  # pixels


def log_normal(count: int, deviation: float) -> list[float]:
    """Relative costs, median 1."""
    draw = random.Random(0)
    return [draw.lognormvariate(0, deviation) for _ in range(count)]


def plain_shuffle(count: int, batch_size: int) -> list[list[int]]:
    return [batch.tolist() for batch in torch.randperm(count).split(batch_size)]


def both(costs: Sequence[float], batch_size: int, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    """The batches of an epoch of a plain shuffle, and of the balanced one."""
    return plain_shuffle(len(costs), batch_size), list(BalancedBatchSampler(costs, batch_size, ranks=ranks))


def slowest(costs: Sequence[float], ranks: int) -> float:
    """What an epoch costs in which ranks wait for each other in each round; `costs` are those of its batches."""
    return sum(max(costs[begin : begin + ranks]) for begin in range(0, len(costs), ranks))


def imbalance(costs: Sequence[float], ranks: int) -> float:
    return slowest(costs, ranks) / (sum(costs) / ranks)


def totals(batches: Sequence[Sequence[int]], costs: Sequence[float]) -> list[float]:
    return [sum(costs[sample] for sample in batch) for batch in batches]


# Arithmetic


def arithmetic(count: int = 16384) -> None:
    print("imbalance in pixels, log-normal; deviation of the logarithm below\n")
    print(f"{'ranks':>5} {'batch size':>10} {'deviation':>9} {'plain':>7} {'balanced':>9} {'balanced / plain':>17}")
    for ranks in (2, 8):
        for batch_size in (2, 8, 32):
            for deviation in (0.3, 0.7, 1.0):
                costs = log_normal(count, deviation)
                torch.manual_seed(0)
                plain, balanced = (imbalance(totals(each, costs), ranks) for each in both(costs, batch_size, ranks))
                print(
                    f"{ranks:5} {batch_size:10} {deviation:9} {plain:7.3f} {balanced:9.3f} {balanced / plain:17.3f}",
                    flush=True,
                )


# Images and a network


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
        self._cpu_begin = time.thread_time()  # of this thread: gloo's threads work for the other rank, too

    def on_train_batch_end(self, run: Run, batch: Any, batch_idx: int, loss: Any) -> None:
        self.cpu_seconds[-1].append(time.thread_time() - self._cpu_begin)  # waiting for the other rank takes none

    def on_train_epoch_end(self, run: Run) -> None:
        self.seconds.append(time.perf_counter() - self._begin)


# Computed


def computed(images: Images, runs: int = 3) -> None:
    """Print what an epoch on 8 ranks would last, by what each of its batches costs alone in this process."""
    task = OneByOne()

    def cpu_seconds(batch: Sequence[int]) -> float:
        begin = time.thread_time()
        task.training_step([images[sample] for sample in batch], 0).backward()
        return time.thread_time() - begin

    cpu_seconds(range(BATCH_SIZE))  # the first one is slower
    print(
        f"\n{RANKS} ranks computed in one process: {len(images)} images, batch size {BATCH_SIZE}, "
        f"deviation {DEVIATION}, the least of {runs} runs\n"
    )
    print(f"{'':17} {'plain':>7} {'balanced':>9} {'balanced / plain':>17}")
    torch.manual_seed(0)
    dealt = both(images.pixels, BATCH_SIZE, RANKS)
    passes = [[[cpu_seconds(batch) for batch in batches] for batches in dealt] for _ in range(runs)]
    times = [list(map(min, *each)) for each in zip(*passes, strict=True)]
    row("seconds", *(slowest(each, RANKS) for each in times), width=17)
    row("imbalance", *(imbalance(each, RANKS) for each in times), width=17)
    row("imbalance, pixels", *(imbalance(totals(each, images.pixels), RANKS) for each in dealt), width=17)


def row(name: str, plain: float, balanced: float, width: int, ratio: float | None = None, more: str = "") -> None:
    ratio = balanced / plain if ratio is None else ratio
    print(f"{name:{width}} {plain:7.3f} {balanced:9.3f} {ratio:17.3f}{more}", flush=True)


# Measured


def measure(pairs: int, images: Images, batch_size: int) -> tuple[list[float], list[list[float]]]:
    """On one rank: seconds of each epoch, and CPU seconds of each epoch and round."""
    sampler = InTurns(images.pixels, batch_size)
    trainer = Trainer(cpu=True, max_epochs=2 * (pairs + WARM), log_with=None, default_callbacks=False, seed=0)
    task = OneByOne()
    trainer.fit(task, DataLoader(images, batch_sampler=sampler, collate_fn=list))
    return task.seconds[2 * WARM :], task.cpu_seconds[2 * WARM :]


def launch(pairs: int, count: int, batch_size: int) -> list[tuple[list[float], list[list[float]]]]:
    """What `measure` gives on two ranks."""
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
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def measured(pairs: int, images: Images, batch_size: int) -> None:
    print(
        f"\ntwo gloo processes: {len(images)} images, batch size {batch_size}, deviation {DEVIATION}, "
        f"median of {pairs} pairs of epochs"
    )
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load average before {os.getloadavg()[0]:.1f}\n")
    found = launch(pairs, len(images), batch_size)
    seconds = [max(epoch) for epoch in zip(*(seconds for seconds, _ in found), strict=True)]
    # Of each epoch the CPU seconds of its batches, those of a round side by side.
    batches = [
        [of_batch for of_round in zip(*epoch, strict=True) for of_batch in of_round]
        for epoch in zip(*(cpu_seconds for _, cpu_seconds in found), strict=True)
    ]
    print(f"{'':31} {'plain':>7} {'balanced':>9} {'balanced / plain':>17}")
    paired("seconds by the clock", seconds)
    paired("CPU seconds of the slowest rank", [slowest(each, 2) for each in batches])
    paired("imbalance of CPU seconds", [imbalance(each, 2) for each in batches])
    torch.manual_seed(0)
    dealt = [both(images.pixels, batch_size, 2) for _ in range(50)]
    of_pixels = [[imbalance(totals(each, images.pixels), 2) for each in epochs] for epochs in zip(*dealt, strict=True)]
    row("imbalance, pixels", *map(statistics.mean, of_pixels), width=31)


def paired(name: str, epochs: Sequence[float]) -> None:
    """Print the medians of plain and balanced epochs, which take turns, and of the ratios of neighbours."""
    plain, balanced = epochs[::2], epochs[1::2]
    ratios = [ours / theirs for ours, theirs in zip(balanced, plain, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    more = f"  quartiles {low:.3f} {high:.3f}"
    row(name, statistics.median(plain), statistics.median(balanced), 31, median, more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of epochs that are measured (default: 10)")
    parser.add_argument("--images", type=int, default=512, help="images of an epoch (default: 512)")
    parser.add_argument("--batch-size", type=int, default=4, help="images of a batch of one of the two (default: 4)")
    parser.add_argument("--only-measured", action="store_true", help="leave out the first two tables")
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)  # what this file tells the processes that it starts
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.images % (RANKS * BATCH_SIZE) or options.images % (2 * options.batch_size):
        parser.error(f"--images must fill all rounds: a multiple of {RANKS * BATCH_SIZE} and of twice the batch size")
    images = Images(options.images)
    if options.to is None:
        if not options.only_measured:
            arithmetic()
            computed(images)
        measured(options.pairs, images, options.batch_size)
        return
    found = measure(options.pairs, images, options.batch_size)
    (options.to / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
