"""What can keep ranks waiting, done on purpose on some of them: the fits of `benchmarks/load_balance.py`.

    Injection      one cause: where it sits, on which ranks, and what LoadBalance should say of it
    work(seconds)  decodes JPEG images until this thread has computed for so long
    train(...)     on a rank: one fit with an injection, and what LoadBalance said

The work is real: a thread that sleeps leaves its core to others, and so would hide what it costs. Only the hook that
stands for a slow network sleeps, because there is no other way to keep a message on its way.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from sanctuary_trainer import Callback, Run, Trainer, VisionTask
from sanctuary_trainer.callbacks import Checkpoint, LoadBalance

BATCH_SIZE, SIDE = 24, 24  # samples of a batch, pixels of an image's side
LOG_EVERY = SAVE_EVERY = 10  # steps between two logs, and two save points: what is done there is done for all of them
STATE_BYTES = 32_000_000  # what a checkpoint holds beside the model
WORKERS = 2


@dataclass(frozen=True)
class Injection:
    """One cause, put on purpose into a fit.

    Attributes:
        title: in the table.
        place: where; see `Extra`. "" for a fit that nothing is done to.
        cause: what LoadBalance should call it.
        on: the ranks it is put on.
        whom: the ranks that LoadBalance should name; () where all of them are concerned.
        ranks: processes of the fit.
        workers: processes that read for each rank.
        dealt: whether it could be dealt evenly, so that half of it would stay.
    """

    title: str
    place: str
    cause: str
    on: tuple[int, ...] = (0, 1)
    whom: tuple[int, ...] = ()
    ranks: int = 2
    workers: int = 0
    dealt: bool = False

    def share(self, strength: float) -> float:
        """What part of a step it costs, where it makes the step of the ranks that it is on `strength` times as long."""
        return (strength - 1) / strength / (2 if self.dealt else 1)


BALANCED = Injection("nothing", "", "balanced")
INJECTIONS = (
    Injection("data set of rank 1", "data", "slow_data_on_rank", (1,), (1,)),
    Injection("data set of rank 0", "data", "slow_data_on_rank", (0,), (0,)),
    Injection("data set of both", "data", "slow_data"),
    Injection("data set of rank 1, workers", "data", "slow_data_on_rank", (1,), (1,), workers=WORKERS),
    Injection("data set of both, workers", "data", "slow_data", workers=WORKERS),
    Injection("forward of rank 1", "forward", "slow_compute_on_rank", (1,), (1,)),
    Injection("forward of rank 0", "forward", "slow_compute_on_rank", (0,), (0,)),
    Injection("backward of rank 1", "backward", "slow_compute_on_rank", (1,), (1,)),
    Injection("busy core of rank 1", "core", "slow_compute_on_rank", (1,), (1,)),
    Injection("callback of rank 0", "callback", "slow_callbacks", (0,), (0,)),
    Injection("callback of both", "callback", "slow_callbacks"),
    Injection("on_log of rank 0", "log", "slow_logging", (0,), (0,)),
    Injection("tracker", "tracker", "slow_logging", (0,), (0,)),
    Injection("on_save_point of rank 0", "save", "slow_checkpoint", (0,), (0,)),
    Injection("on_save_point of both", "save", "slow_checkpoint"),
    Injection("checkpoints on the disk", "checkpoint", "slow_checkpoint"),
    Injection("larger images on rank 1", "pixels", "uneven_work", (1,), (1,), dealt=True),
    Injection("larger images in turn", "pixels in turn", "uneven_work", dealt=True),
    Injection("fewer samples on rank 1", "samples", "uneven_samples", (1,), (0,), dealt=True),
    Injection("hook that sleeps on rank 1", "hook", "slow_communication", (1,)),
    Injection("hook that sleeps on both", "hook", "slow_communication"),
    Injection("one process: nothing", "", "balanced", ranks=1),
    Injection("one process: data set", "data", "slow_data", (0,), ranks=1),
    Injection("one process: data set, workers", "data", "slow_data", (0,), ranks=1, workers=WORKERS),
    Injection("one process: callback", "callback", "slow_callbacks", (0,), ranks=1),
)


def _jpeg() -> bytes:
    buffer = io.BytesIO()
    pixels = torch.randint(0, 256, (48, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(pixels.numpy()).save(buffer, "jpeg")
    return buffer.getvalue()


JPEG = _jpeg()  # decoded in about 0.2 ms


def work(seconds: float) -> None:
    """Decode images until this thread has computed for so long; what other processes take of its core is no part."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        Image.open(io.BytesIO(JPEG)).load()


# What is trained


class Images(Dataset[Any]):
    """Square images, at hand; reading one takes `seconds` more.

    sides: pixels of the images of batch 0, 1, ..., over and over.
    """

    def __init__(self, count: int, batch_size: int, seconds: float, sides: Sequence[int] = (SIDE,)) -> None:
        self.count, self.batch_size, self.seconds, self.sides = count, batch_size, seconds, sides
        generator = torch.Generator().manual_seed(0)
        self.images = {side: torch.rand(3, side, side, generator=generator) for side in sides}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        work(self.seconds)
        return self.images[self.sides[index // self.batch_size % len(self.sides)]]


class Classifier(VisionTask):
    """A small convolutional network on images of any size; "forward" or "backward" takes `seconds` longer.

    Most of what it computes with stays in a core's cache: else ranks would differ by where their memory happens to lie.
    """

    def __init__(self, place: str, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
        self.place, self.seconds = place, seconds

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.net(batch)
        if self.place == "forward":
            work(self.seconds)
        if self.place == "backward":
            scores.register_hook(lambda gradient: work(self.seconds))
        return scores.square().mean()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Slow(Callback):
    """Takes `seconds` for each step at one place, also where it is called once in several; or has much to be saved."""

    def __init__(self, place: str, seconds: float) -> None:
        self.place, self.seconds = place, seconds

    def on_train_batch_end(self, run: Run, batch: Any, batch_idx: int, loss: Any) -> None:
        if self.place == "callback":
            work(self.seconds)

    def on_log(self, run: Run, values: dict[str, float], step: int) -> None:
        if self.place == "log":
            work(self.seconds * LOG_EVERY)

    def on_save_point(self, run: Run) -> None:
        if self.place == "save" and run.state.global_step % SAVE_EVERY == 0:
            work(self.seconds * SAVE_EVERY)

    def saves_at(self, step: int) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"much": torch.zeros(STATE_BYTES // 4)} if self.place == "checkpoint" else {}


class Hook(Callback):
    """A communication hook of DDP's that sleeps for `seconds` in each step before it sends."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_fit_start(self, run: Run) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def send(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and these would be texts
            if bucket.is_last():
                time.sleep(self.seconds)
            return allreduce_hook(state, bucket)

        assert run.executor is not None
        run.executor.module.register_comm_hook(None, send)  # type: ignore[operator]


def slow_tracker(seconds: float) -> Any:
    """A tracker that takes `seconds` for each step when it gets the values of a log."""
    from accelerate.tracking import GeneralTracker

    class Slowly(GeneralTracker):  # type: ignore[misc]
        name, requires_logging_directory, tracker = "slowly", False, None

        def start(self) -> None:
            pass

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        def log(self, values: dict[str, Any], step: int | None = None, **settings: Any) -> None:
            if "train/loss" in values:  # not for LoadBalance's own
                work(seconds * LOG_EVERY)

        def finish(self) -> None:
            pass

    return Slowly()


SPIN = """
import sys, time
share, began = float(sys.argv[1]), time.perf_counter()
while True:
    if time.process_time() > share * (time.perf_counter() - began):
        time.sleep(0.002)
"""


@contextmanager
def busy_core(strength: float) -> Iterator[None]:
    """Processes that take so much of this process's core that its work takes `strength` times as long."""
    needed = 1 - 1 / strength
    number = 1 if needed <= 1 / 2 else 2  # as many as can have their share where all take turns
    processes = [subprocess.Popen([sys.executable, "-S", "-c", SPIN, str(needed / number)]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# The fit


class Sizes(NamedTuple):
    """What takes so many times as long as a plain batch: more pixels, more samples."""

    large: int = SIDE  # pixels of a side
    small: int = BATCH_SIZE  # samples that the plain batch takes so many times as long as


def sizes(strengths: Sequence[float]) -> list[Sizes]:
    """On a rank: for each strength, by CPU seconds."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    task, most = Classifier("", 0.0), max(strengths)
    of_side = [(BATCH_SIZE, side) for side in range(SIDE, round(1.1 * SIDE * most**0.5) + 1)]
    of_samples = [(samples, SIDE) for samples in range(round(BATCH_SIZE / most / 1.2), BATCH_SIZE + 1)]
    seconds = dict.fromkeys([*of_side, *of_samples], float("inf"))
    for samples, side in [(BATCH_SIZE, SIDE), *seconds] * 5:
        images, begin = torch.rand(samples, 3, side, side), time.thread_time()
        task.training_step(images, 0).backward()
        seconds[samples, side] = min(seconds[samples, side], time.thread_time() - begin)
    plain = seconds[BATCH_SIZE, SIDE]
    return [
        Sizes(
            large=min(of_side, key=lambda each: abs(seconds[each] / plain - strength))[1],
            small=min(of_samples, key=lambda each: abs(seconds[each] * strength / plain - 1))[0],
        )
        for strength in strengths
    ]


def data(injection: Injection, seconds: float, steps: int, sizes: Sizes) -> DataLoader[Any]:
    """What this rank reads; where the ranks do not read alike, its own part of it."""
    here = _rank() in injection.on
    batch_size, shown, own = BATCH_SIZE, [SIDE], False
    if injection.place == "pixels in turn":
        shown, own = ([SIDE, sizes.large] if _rank() else [sizes.large, SIDE]), True
    if injection.place == "pixels":
        shown, own = [sizes.large if here else SIDE], True
    if injection.place == "samples":
        batch_size, own = sizes.small if here else BATCH_SIZE, True
    extra = seconds / BATCH_SIZE if injection.place == "data" and here else 0.0
    count = steps * batch_size * (1 if own else injection.ranks)
    return DataLoader(
        Images(count, batch_size, extra, shown),
        batch_size,
        num_workers=injection.workers,
        worker_init_fn=_step_back if injection.workers else None,
    )


def _step_back(worker: int) -> None:
    """Let a worker have the core only while its rank waits: on a machine with more cores it would not be in its way."""
    os.nice(19)


def train(
    injection: Injection,
    strength: float,
    base: float,
    steps: int,
    folder: str,
    *,
    save_every: int = 0,
    sizes: Sizes = Sizes(),  # noqa: B008 - a tuple
) -> Any:
    """On a rank: fit.

    Args:
        injection: what is done to the fit.
        strength: how many times as long the step of the ranks that it is on becomes.
        base: CPU seconds of a step without it.
        steps: of the fit.
        folder: for the run.
        save_every: with "checkpoint", steps between two.
        sizes: what makes batches take so many times as long.

    Returns:
        "balance": as plain data. "seconds": of the steps after the first. "cpu_step": CPU seconds of this process in a
        step. "saving": seconds of all checkpoints. "kept": the share of the time in which this rank was ready to run
        and had to wait for its core.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[_rank() % len(cores)]})
    here = _rank() in injection.on
    seconds = (strength - 1) * base
    place, extra = (injection.place, seconds) if here else ("", 0.0)
    callbacks: list[Callback] = [LoadBalance(), Slow(place, extra)]
    if injection.place == "hook":
        callbacks.append(Hook(extra))
    if injection.place == "checkpoint":
        callbacks.append(Checkpoint(every_n_steps=save_every))
    measured = Measured()
    trainer = Trainer(
        max_steps=steps,
        cpu=True,
        seed=0,
        log_with=slow_tracker(extra) if place == "tracker" else None,
        log_every_n_steps=LOG_EVERY,
        default_callbacks=False,
        num_sanity_val_steps=0,
        shard_data=not injection.place.startswith(("pixels", "samples")),
        project_dir=folder,
        callbacks=[*callbacks, measured],
    )
    with busy_core(strength) if place == "core" else nullcontext():
        result = trainer.fit(Classifier(place, extra), data(injection, seconds, steps, sizes))
    return {"balance": result.balance.as_dict(), **measured.values}


class Measured(Callback):
    """What a fit took from its second step on, seen from beside it."""

    def on_fit_start(self, run: Run) -> None:
        self.values: dict[str, float] = {}

    def on_train_step_end(self, run: Run) -> None:
        if run.state.global_step == 1:
            self.begin = self._now(run)

    def on_fit_end(self, run: Run) -> None:
        seconds, cpu, kept, saving = (now - then for now, then in zip(self._now(run), self.begin, strict=True))
        steps = run.state.global_step - 1
        self.values = {"seconds": seconds, "cpu_step": cpu / steps, "kept": kept / seconds, "saving": saving}

    def _now(self, run: Run) -> list[float]:
        kept = int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9  # of the main thread
        return [time.perf_counter(), time.process_time(), kept, run.clock.total("checkpoint")]


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
