"""What a checkpoint costs beside `torch.save` and accelerate: `python benchmarks/checkpoint.py` prints the table.

one fit of a stack of convolutions with AdamW; in its save point after two steps, for each round
  each way of saving, in another order every time: ours, ours with parts left out, torch.save, accelerate
for each round
  each way of loading what was saved into a fresh model and optimizer, in another order every time

    python benchmarks/checkpoint.py --rounds 20 --size 90      90 MB of float32 weights, so 270 MB with AdamW's state
    python benchmarks/checkpoint.py --folder /mnt/shared       on that disk instead of the one with temporary files

Saving is `write_requested` with all that the trainer does there: the look for weights that are not finite, the ranks'
own parts, the manifest. Loading is what `fit(resume=...)` does to read, from the search for the checkpoint to the
generators: a clock runs in these functions, inside a fit that ends at once, and not while the run around them is built.
"Without checksums": no SHA-256. "Without fsync", and `torch.save` alone: it ends before the disk has anything.

One thread. Before every measurement all earlier writes are brought to the disk. A ratio of wall times is taken within a
round, to the first row of its block; then median and quartiles. "Peak" is how far the process's memory grew at most
(VmHWM; it counts the pages of a mapped file too); of what a load takes, the optimizer's state stays, twice the size of
the weights. Files lie in the page cache when they are loaded, except "from the disk".
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sanctuary_trainer import Run, Trainer, VisionTask
from sanctuary_trainer import trainer as building
from sanctuary_trainer.loops import fit as fitting
from sanctuary_trainer.saving import write_requested

WARM = 1  # rounds at the start that are not counted
STEPS = 2  # before the checkpoints: AdamW has its state then
WIDTH = 256  # channels
LOADING = [(building, name) for name in ("look_up", "restore_task", "restore_training", "restore_run")]
LOADING += [(fitting, "restore_generators")]


class Clock(ContextDecorator):
    """Wall and CPU seconds and peak memory of what runs in it, one after the other."""

    def __init__(self) -> None:
        self.seconds = self.cpu = self.peak = 0.0
        self._before: float | None = None

    def __enter__(self) -> None:
        if self._before is None:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps of an earlier row would hide what this one takes
            os.sync()
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            self._before = resident("VmRSS")
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start[0]
        self.cpu += time.process_time() - self._start[1]
        self.peak = resident("VmHWM") - (self._before or 0.0)


def resident(name: str) -> float:
    """VmRSS or VmHWM in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(name))


class Task(VisionTask):
    """The network and its optimizer; `measure` is called in the save point after the last step."""

    def __init__(self, megabytes: float, measure: Callable[[Run], None] | None = None) -> None:
        super().__init__()
        self.model, self.measure = stack(megabytes), measure

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0]).square().mean()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        self.optimizer = AdamW(self.model.parameters())
        return self.optimizer

    def on_save_point(self, run: Run) -> None:
        if self.measure is not None and run.state.global_step == STEPS:
            self.measure(run)


def stack(megabytes: float) -> nn.Module:
    """Convolutions with batch norm: for 90 MB 114 parameters; a ResNet-50 has 161."""
    blocks = max(1, round(megabytes * 1e6 / (4 * 9 * WIDTH**2)))
    pairs = [(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)) for _ in range(blocks)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def fit(task: Task, folder: Path, resume: Path | None = None) -> None:
    loader = DataLoader(TensorDataset(torch.randn(16, WIDTH, 4, 4)), batch_size=2)
    trainer = Trainer(max_steps=STEPS, cpu=True, project_dir=folder, log_with=None, default_callbacks=False, seed=0)
    trainer.fit(task, loader, resume=resume)


@contextmanager
def without(*functions: str) -> Iterator[None]:
    """Leave out of our checkpoints what these do: "hashlib.file_digest", "os.fsync"."""

    def nothing(file: Any, algorithm: str = "") -> Any:
        if algorithm:
            file.seek(0, os.SEEK_END)  # where hashing leaves a file
        return hashlib.sha256()

    with ExitStack() as patches:
        left_out = [patches.enter_context(patch(name, side_effect=nothing)) for name in functions]
        yield
    assert all(each.called for each in left_out), f"not all of {functions} was there to be left out"


def ways_to_save(run: Run) -> dict[str, Callable[[Path, Clock], None]]:
    task: Any = run.task
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(task.model, task.optimizer)

    def with_torch(path: Path, clock: Clock, fsync: bool) -> None:
        with clock:
            torch.save({"model": task.model.state_dict(), "optimizer": task.optimizer.state_dict()}, path)
            if fsync:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())

    def with_accelerate(path: Path, clock: Clock) -> None:
        with clock:
            accelerator.save_state(str(path))

    def ours(path: Path, clock: Clock, left_out: tuple[str, ...] = ()) -> None:
        with without(*left_out), clock:
            run.save_checkpoint(path)
            write_requested(run)

    return {
        "torch.save, then fsync": partial(with_torch, fsync=True),
        "torch.save": partial(with_torch, fsync=False),
        "accelerate's save_state": with_accelerate,
        "ours": ours,
        "ours without checksums": partial(ours, left_out=("hashlib.file_digest",)),
        "ours without fsync": partial(ours, left_out=("os.fsync",)),
        "ours without both": partial(ours, left_out=("hashlib.file_digest", "os.fsync")),
    }


def ways_to_load(saved: dict[str, Path], project: Path, megabytes: float) -> dict[str, Callable[[Clock], None]]:
    def with_torch(clock: Clock, cold: bool = False) -> None:
        model, path = stack(megabytes), saved["torch.save, then fsync"]
        optimizer = AdamW(model.parameters())
        forget(path, cold)
        with clock:
            state = torch.load(path)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

    def with_accelerate(clock: Clock) -> None:
        model, accelerator = stack(megabytes), Accelerator(cpu=True)
        accelerator.prepare(model, AdamW(model.parameters()))
        with clock:
            accelerator.load_state(str(saved["accelerate's save_state"]))

    def ours(clock: Clock, name: str = "ours", left_out: tuple[str, ...] = (), cold: bool = False) -> None:
        task = Task(megabytes)
        forget(saved[name], cold)
        with ExitStack() as clocks, without(*left_out), redirect_stdout(io.StringIO()):
            for module, function in LOADING:
                clocks.enter_context(patch.object(module, function, clock(getattr(module, function))))
            fit(task, project, resume=saved[name])

    return {
        "torch.load": with_torch,
        "accelerate's load_state": with_accelerate,
        "ours": ours,
        "ours without checksums": partial(ours, name="ours without checksums", left_out=("hashlib.file_digest",)),
        "torch.load, from the disk": partial(with_torch, cold=True),
        "ours, from the disk": partial(ours, cold=True),
    }


def files(path: Path) -> list[Path]:
    return [each for each in (path, *path.rglob("*")) if each.is_file()]


def forget(path: Path, cold: bool) -> None:
    """Take a checkpoint out of the page cache."""
    for name in files(path) if cold else ():
        with open(name, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def take_turns(ways: dict[str, Any], rounds: int, measure: Callable[[str, Clock], None]) -> dict[str, list[Clock]]:
    """Every way once a round; each round begins with the next."""
    clocks: dict[str, list[Clock]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds + WARM):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            clock = Clock()
            measure(name, clock)
            clocks[name] += [clock] if turn >= WARM else []
    return clocks


def measure_all(rounds: int, megabytes: float, folder: Path) -> None:
    saved: dict[str, Path] = {}

    def save_all(run: Run) -> None:
        ways = ways_to_save(run)

        def save(name: str, clock: Clock) -> None:
            path = saved[name] = folder / "checkpoints" / name.replace(" ", "-")
            path.parent.mkdir(exist_ok=True)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            ways[name](path, clock)

        show("save", take_turns(ways, rounds, save), saved)

    fit(Task(megabytes, save_all), folder)
    ways = ways_to_load(saved, folder, megabytes)
    clocks = take_turns(ways, rounds, lambda name, clock: ways[name](clock))
    for cold in (False, True):
        show("load", {name: own for name, own in clocks.items() if name.endswith("disk") == cold}, {})


def show(what: str, clocks: dict[str, list[Clock]], saved: dict[str, Path]) -> None:
    size = "MB on disk" if saved else ""
    print(f"\n{what:26}{'seconds':>9}{'CPU':>8}{'ratio':>8}{'quartiles':>15}{'peak MB':>9}{size:>12}")
    first = next(iter(clocks.values()))
    for name, own in clocks.items():
        ratios = [each.seconds / base.seconds for each, base in zip(own, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        seconds, cpu, peak = (statistics.median(getattr(each, of) for each in own) for of in ("seconds", "cpu", "peak"))
        size = f"{sum(file.stat().st_size for file in files(saved[name])) / 1e6:.1f}" if saved else ""
        spread = f"{low:.2f} - {high:.2f}"
        print(f"{name:26}{seconds:9.3f}{cpu:8.3f}{middle:8.2f}{spread:>15}{peak:9.0f}{size:>12}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="(default: 20)")
    parser.add_argument("--size", type=float, default=90, help="MB of weights, at least 2.4 (default: 90)")
    parser.add_argument("--folder", type=Path, help="where the checkpoints lie while this runs")
    options = parser.parse_args()
    machine = f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, one thread"
    print(f"{machine}; {options.size:g} MB of weights, {options.rounds} rounds")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure_all(options.rounds, options.size, Path(folder))


if __name__ == "__main__":
    main()
