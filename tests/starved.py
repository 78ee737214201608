"""Real failures on a CPU: a process that may take so many megabytes more, so that torch's own allocator fails.

    def work():                      called on a fresh process: by the fixture one_rank, on one of two_ranks, by `fresh`
        steady_allocator()           first of all
        ...                          build, warm up
        with starved(100):           from here on at most 100 MB more than now
            task's batch of 64       RuntimeError: [enforce fail at alloc_cpu.cpp] ... can't allocate memory
            task's batch of 16       fits

The limit is on the address space (RLIMIT_AS), which counts what is mapped and not what is used. So the allocator has to
map every larger block anew and give it back at once, and only one thread may work. On a GPU:
`torch.cuda.set_per_process_memory_fraction`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from sanctuary_trainer import Callback, Run, VisionTask
from tests.small_tasks import loader

ROOT = Path(__file__).resolve().parent.parent
MB = 1_000_000
MAPPED_FROM_BYTES = 131_072
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
HIDDEN_MB = 16  # what the allocator may keep for itself


class _Arena(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(f"field_{index}", ctypes.c_size_t) for index in range(8)]
    _fields_ += [("free", ctypes.c_size_t), ("topmost", ctypes.c_size_t)]


def steady_allocator() -> None:
    """Let this process map every larger block anew and give it back when it is freed, from now on.

    As MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=131072 MALLOC_TRIM_THRESHOLD_=131072 in the environment of a process
    that is still to be started. What was freed before stays hidden in the allocator: call it before anything large is
    made.
    """
    libc = ctypes.CDLL(None)
    for option, value in (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
        (_M_TRIM_THRESHOLD, MAPPED_FROM_BYTES),
    ):
        libc.mallopt(option, value)
    torch.set_num_threads(1)


def mapped_mb() -> float:
    """This process's address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize() / MB


def starve(megabytes: float) -> None:
    """Allow this process only so many megabytes more than it has mapped now, until `feed`.

    Raises:
        RuntimeError: the allocator has kept so much of what was freed that it could go on without asking.
    """
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Arena
    hidden = libc.mallinfo2().free / MB
    if hidden > HIDDEN_MB:
        raise RuntimeError(f"The allocator keeps {hidden:.0f} MB: call steady_allocator() before anything is trained.")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int((mapped_mb() + megabytes) * MB), hard))


def feed() -> None:
    """Take the limit back."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


@contextmanager
def starved(megabytes: float) -> Iterator[None]:
    """At most so many megabytes more than now, inside."""
    starve(megabytes)
    try:
        yield
    finally:
        feed()


class Starve(Callback):
    """Allows a run so many megabytes more than it has mapped, from the first batch of a step on to the end of the fit.

    Args:
        megabytes: for a step.
        rank: the only one that is starved; None: all.
        step: optimizer steps done before. By then what is made once has been made: optimizer states, DDP's buckets.
    """

    def __init__(self, megabytes: float, rank: int | None = None, step: int = 1) -> None:
        self.megabytes, self.rank, self.step = megabytes, rank, step
        self._starved = False

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        if run.state.global_step == self.step and self.rank in (None, run.rank) and not self._starved:
            self._starved = True
            starve(self.megabytes)

    def on_fit_end(self, run: Run) -> None:
        feed()


def fresh(function: Callable[..., Any], /, *args: Any, timeout: float = 120.0, **kwargs: Any) -> Any:
    """What `function` returns in a new process with one thread and a steady allocator.

    Args:
        function: at the top level of a module, whose name is sent.
        args, kwargs: and what it returns: as JSON can hold them.
        timeout: seconds, the start of a process included, which takes some.

    Raises:
        RuntimeError: it failed; with what it wrote.
    """
    sent = json.dumps([function.__module__, function.__qualname__, args, kwargs])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(MAPPED_FROM_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(MAPPED_FROM_BYTES),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "tests.starved", sent]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{function.__qualname__} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _called(sent: str) -> None:
    import importlib

    module, name, args, kwargs = json.loads(sent)
    print(json.dumps(getattr(importlib.import_module(module), name)(*args, **kwargs)), flush=True)


# What is trained

WIDTHS = {"forward": 20_480, "backward": 196_608}
# Megabytes into which 16 samples fit, and 32 or 64 do not. Measured, for forward and backward of 16, 32 and 64 samples:
# "forward" takes 50, 100 and 195 MB, "backward" 80, 155 and 305 MB, of which 100 MB in the forward of 64 samples.
SPARE_MB = {"forward": 75.0, "backward": 115.0}


class Hungry(VisionTask):
    """A network of few parameters and large activations.

    Args:
        where: where a large batch fails. "forward": 16 layers keep what they make, 3 MB a sample. "backward": forward
            makes 1.6 MB a sample and backward three times that, because each slice of it that was used gets a gradient
            of the size of the whole.
    """

    def __init__(self, where: Literal["forward", "backward"] = "forward") -> None:
        super().__init__()
        self.where = where
        torch.manual_seed(0)
        width = WIDTHS[where]
        self.spread = nn.Parameter(torch.randn(width, dtype=torch.float64))
        self.scales = nn.ParameterList(
            nn.Parameter(torch.randn((), dtype=torch.float64)) for _ in range(16 if where == "forward" else 8)
        )
        self.head = nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """features: (B, 1); returns logits (B, 3)."""
        wide = features * self.spread  # (B, width)
        if self.where == "forward":
            for scale in self.scales:
                wide = (wide * scale).tanh()
            few = wide.reshape(len(wide), 8, -1).mean(-1)
        else:
            few = torch.stack([wide[:, 7 * i] * scale for i, scale in enumerate(self.scales)], dim=1)
        logits: torch.Tensor = self.head(few)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        return nn.functional.cross_entropy(self(features), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        self.log("loss", nn.functional.cross_entropy(self(features), labels))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def hungry_loader(count: int, batch_size: int = 64, **settings: Any) -> DataLoader[Any]:
    """Batches of features (B, 1) float64 and labels (B,) in 0..2."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (count,), generator=generator).tolist()
    return loader(list(zip(features, labels, strict=True)), batch_size, **settings)


if __name__ == "__main__":
    _called(sys.argv[1])
