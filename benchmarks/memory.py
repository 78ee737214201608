"""What it costs to train a batch that does not fit: `python benchmarks/memory.py` prints three tables.

1. Pieces and checkpointing, where memory is plenty: seconds and peak memory of a step with the batch in 1, 2, 4 and 8
   pieces (OOMFallback(piece_size=...)), with and without GradientCheckpointing. Same update everywhere.
2. A batch that needs 8 times the memory given: from the third step on the process may take only an eighth of what a
   step took, so that torch's own allocator fails (tests/starved.py). OOMFallback against the fit that is not starved.
3. The same data, network and limit with accelerate's find_executable_batch_size, which begins the function again with a
   smaller batch: what was done is done again, from weights that have moved, with another effective batch.

Each row is a process of its own, with one thread and an allocator that gives back what is freed. "Peak" is how far the
memory of the process (VmHWM) rose at most above where it stood before the step; it is measured after two steps, by when
everything that is made once is there. Seconds are medians; "CPU" is the time of the process itself, which tells more on
a machine that others use too. With such an allocator every larger tensor costs page faults, in the plain loop too: that
is why smaller pieces may even be faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every process that is started

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from sanctuary_trainer import Callback, Run, Trainer, VisionTask  # noqa: E402
from sanctuary_trainer.callbacks import GradientCheckpointing, OOMFallback  # noqa: E402
from tests.small_tasks import weights  # noqa: E402
from tests.starved import Starve, fresh, starve  # noqa: E402

CHANNELS, BLOCKS, PIXELS, CLASSES = 16, 12, 32, 10
BATCH_SIZE = 64
WARM, STEPS = 2, 6  # steps that are not counted, and all of them
PIECES = (1, 2, 4, 8)
SHARE = 8  # of what a step needs, one part in so many is given


class Block(nn.Module):
    """A residual block of two convolutions, without batch norm: pieces then change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(4, CHANNELS),
            nn.GELU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
            nn.GroupNorm(4, CHANNELS),
            nn.GELU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images: (B, CHANNELS, PIXELS, PIXELS), returned in that shape."""
        result: torch.Tensor = images + self.body(images)
        return result


def network() -> nn.Module:
    """60 thousand parameters; activations of some megabytes a sample."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1),
        nn.Sequential(*(Block() for _ in range(BLOCKS))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(CHANNELS, CLASSES),
    )


def data() -> TensorDataset:
    """Random images (N, 3, PIXELS, PIXELS) and labels for `STEPS` batches."""
    generator = torch.Generator().manual_seed(0)
    count = STEPS * BATCH_SIZE
    images = torch.randn(count, 3, PIXELS, PIXELS, generator=generator)
    return TensorDataset(images, torch.randint(0, CLASSES, (count,), generator=generator))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


class Task(VisionTask):
    """Classifies noise."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        return sgd(self.model)


class Measure(Callback):
    """Seconds of each step, by both clocks, and the peak memory of those after the warm ones."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []
        self.before = 0.0

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        if run.state.global_step == WARM:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            self.before = resident_mb("VmRSS")
        self._began = clocks()

    def on_train_step_end(self, run: Run) -> None:
        self.seconds.append(since(self._began))

    @property
    def peak_mb(self) -> float:
        return resident_mb("VmHWM") - self.before


def clocks() -> tuple[float, float]:
    """Seconds by the wall clock, and of this process's CPU time."""
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    wall, cpu = (now - then for now, then in zip(clocks(), began, strict=True))
    return wall, cpu


def resident_mb(name: str) -> float:
    """VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(name))


# In a process of its own


def train(pieces: int = 1, checkpointing: bool = False, spare_mb: float = 0.0) -> dict[str, Any]:
    """One fit; with `spare_mb` it may take only so much from the third step on, and is not told how to do with it."""
    torch.set_num_threads(1)
    task, measure = Task(), Measure()
    fallback = OOMFallback(piece_size=None if spare_mb or pieces == 1 else BATCH_SIZE // pieces)
    callbacks: list[Callback] = [measure, fallback]
    callbacks += [GradientCheckpointing()] if checkpointing else []
    callbacks += [Starve(spare_mb, step=WARM)] if spare_mb else []
    with tempfile.TemporaryDirectory() as folder:
        bare: dict[str, Any] = {"log_with": None, "default_callbacks": False, "project_dir": folder}
        trainer = Trainer(max_steps=STEPS, cpu=True, callbacks=callbacks, **bare)
        result = trainer.fit(task, DataLoader(data(), batch_size=BATCH_SIZE))
    return {
        "seconds": measure.seconds,
        "peak_mb": measure.peak_mb,
        "weights": weights(task).tolist(),
        "events": [list(event) for event in result.oom_events],
    }


def plain() -> dict[str, Any]:
    """The loop that you would have written, not starved."""
    torch.set_num_threads(1)
    model = network()
    optimizer = sgd(model)
    seconds = []
    for index, (images, labels) in enumerate(DataLoader(data(), batch_size=BATCH_SIZE)):
        if index == WARM:
            Path("/proc/self/clear_refs").write_text("5")
            before = resident_mb("VmRSS")
        began = clocks()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(since(began))
    return {"seconds": seconds, "peak_mb": resident_mb("VmHWM") - before, "weights": weights(model).tolist()}


def begun_again(spare_mb: float, halve: bool) -> dict[str, Any]:
    """The same loop in accelerate's find_executable_batch_size, starved from the third step on.

    Model and optimizer are made outside, as in its documentation. halve: instead of the default's 0.9 times the size.
    """
    from accelerate.utils import find_executable_batch_size

    torch.set_num_threads(1)
    model, dataset = network(), data()
    optimizer = sgd(model)
    first = weights(model).clone()
    attempts: list[dict[str, Any]] = []
    sizes = iter([BATCH_SIZE >> shift for shift in range(1, BATCH_SIZE.bit_length())] + [0])
    steps = 0

    def loop(batch_size: int) -> None:
        nonlocal steps
        attempts.append({"batch_size": batch_size, "steps": 0, "moved": float((weights(model) - first).abs().max())})
        for images, labels in DataLoader(dataset, batch_size=batch_size):
            if steps == WARM and len(attempts) == 1:
                starve(spare_mb)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            steps += 1
            attempts[-1]["steps"] += 1

    smaller = {"reduce_batch_size_fn": lambda: next(sizes)} if halve else {}
    began, error = clocks(), ""
    try:
        find_executable_batch_size(loop, starting_batch_size=BATCH_SIZE, **smaller)()
    except RuntimeError as raised:  # one of the texts that it does not know
        error = str(raised)
    return {"seconds": since(began), "attempts": attempts, "weights": weights(model).tolist(), "error": error}


# The tables


def apart(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The largest difference of two runs' weights."""
    return max(abs(a - b) for a, b in zip(first["weights"], second["weights"], strict=True))


def middle(run: dict[str, Any], after: int = WARM) -> tuple[float, float]:
    """The median of the later steps, by both clocks."""
    wall, cpu = (statistics.median(times) for times in zip(*run["seconds"][after:], strict=True))
    return wall, cpu


def show_pieces(call: Callable[..., Any]) -> dict[str, Any]:
    """The first table; returns the fit that is neither split nor starved."""
    print(f"{'':34}{'s a step':>10}{'CPU':>7}{'ratio':>7}{'peak MB':>9}{'ratio':>7}{'weights differ':>16}")
    base = call(plain)
    rows = [("a plain loop", base)]
    for checkpointing in (False, True):
        for pieces in PIECES:
            title = f"{pieces} piece{'s' * (pieces > 1)}" + ", checkpointing" * checkpointing
            rows.append((title, call(train, pieces, checkpointing)))
    for title, run in rows:
        wall, cpu = middle(run)
        ratio, share = cpu / middle(base)[1], run["peak_mb"] / base["peak_mb"]
        print(
            f"{title:34}{wall:10.2f}{cpu:7.2f}{ratio:7.2f}{run['peak_mb']:9.0f}{share:7.2f}{apart(run, base):16.1e}",
            flush=True,
        )
    return base


def show_starved(call: Callable[..., Any], base: dict[str, Any]) -> tuple[float, bool]:
    """The second table; returns the megabytes that were given, and whether all is right."""
    spare = base["peak_mb"] / SHARE
    print(f"\nA step takes {base['peak_mb']:.0f} MB; from the third one on {spare:.0f} MB are given.")
    print(f"{'':34}{'s a step':>10}{'CPU':>7}{'the third':>11}{'updates':>9}{'batch':>7}{'pieces of':>11}", end="")
    print(f"{'weights differ':>16}")
    right = True
    for checkpointing in (False, True):
        run = call(train, 1, checkpointing, spare)
        title = "OOMFallback" + ", checkpointing" * checkpointing
        events, (_, third), (wall, cpu) = run["events"], run["seconds"][WARM], middle(run, WARM + 1)
        size = events[-1][5] if events else BATCH_SIZE
        difference = apart(run, base)
        right = right and len(events) == 1 and difference < 1e-5 and len(run["seconds"]) == STEPS
        print(
            f"{title:34}{wall:10.2f}{cpu:7.2f}{third:11.2f}{STEPS:9}{BATCH_SIZE:7}{size:11}{difference:16.1e}",
            flush=True,
        )
    print("The third: CPU seconds of the step in which the size was found.")
    return spare, right


def show_begun_again(call: Callable[..., Any], base: dict[str, Any], spare: float) -> None:
    """The third table."""
    print(f"\n{'find_executable_batch_size':34}{'s in all':>10}{'CPU':>7}{'begun':>7}{'redone':>8}{'moved':>9}", end="")
    print(f"{'updates':>9}{'batch':>7}{'weights differ':>16}")
    for halve in (False, True):
        run = call(begun_again, spare, halve)
        attempts = run["attempts"]
        done, last = sum(each["steps"] for each in attempts), attempts[-1]
        redone = sum(each["steps"] for each in attempts[:-1])
        title = "half each time" if halve else "0.9 times each time (the default)"
        wall, cpu = run["seconds"]
        print(
            f"{title:34}{wall:10.1f}{cpu:7.1f}{len(attempts):7}{redone:8}{last['moved']:9.1e}{done:9}"
            f"{last['batch_size']:7}{apart(run, base):16.1e}",
            flush=True,
        )
        if run["error"]:
            print(f"    ended by an error that it does not take for one of memory: {run['error']}", flush=True)
    print(
        "begun: how often; redone: updates made before the last time, on samples that are used again; moved: how far\n"
        f"the weights were from their start by then. An undisturbed run makes {STEPS} updates of {BATCH_SIZE} samples."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, one thread")
    print(f"{BLOCKS} residual blocks, {CHANNELS} channels, {PIXELS} x {PIXELS} pixels, batch {BATCH_SIZE}, float32\n")
    began = time.perf_counter()
    base = show_pieces(fresh)
    spare, right = show_starved(fresh, base)
    show_begun_again(fresh, base, spare)
    print(f"\n{time.perf_counter() - began:.0f} s")
    raise SystemExit(0 if right else "a starved fit is not the one that is not starved")


if __name__ == "__main__":
    # Under its real name: functions are sent to their processes by it.
    from benchmarks import memory

    memory.main()
