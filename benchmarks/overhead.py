"""What the trainer costs beside the loop that you would have written: `python benchmarks/overhead.py` prints the table.

each row, in a process of its own (two for the row with ranks)
  for each round: one epoch of ours, one epoch of the plain loop, at once after each other
  ratio of each round -> median and quartiles

How a round is timed. Both loops run in the same process, on equal models, data and loaders, with one thread. Ours is
one fit of many epochs; the task's `on_train_epoch_end` runs the plain loop's epoch and times it. An epoch of ours lasts
from the end of that hook to its next call, so everything that a fit does again and again is in it (closing the epoch,
its values, opening the loader), and what it does once is not: building the run has rows of its own. Two neighbouring
epochs of a few milliseconds meet the same machine, so their ratio holds on a machine that others use too; times by
themselves mean little there. The wall clock includes waiting for the other processes of a busy machine, so the CPU time
of the process, all of its threads together, stands beside it.

The plain loops are what a careful person writes: gradients set to None, the loss detached, no `.item()` in the loop
unless its value is written.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every process that is started

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sanctuary_trainer import Run, Trainer, VisionTask  # noqa: E402
from sanctuary_trainer.callbacks import LoadBalance, OOMFallback  # noqa: E402

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
WARM = 3  # epochs at the start that are not counted
LOG_EVERY = 50  # steps between two points of the curves
CLOCKS = (time.perf_counter, time.process_time)  # CPU time: of all threads


@dataclass
class Pairs:
    """Seconds per batch of both loops, round by round, by the wall clock and in CPU time."""

    ours: list[tuple[float, float]] = field(default_factory=list)
    plain: list[tuple[float, float]] = field(default_factory=list)
    note: str = ""


class Stopwatch:
    """Time since it was made, by both clocks."""

    def __init__(self) -> None:
        self._start = [clock() for clock in CLOCKS]

    def per(self, batches: int) -> tuple[float, float]:
        """Seconds per batch until now."""
        wall, cpu = (clock() - start for clock, start in zip(CLOCKS, self._start, strict=True))
        return wall / batches, cpu / batches


# The work


def mlp() -> nn.Module:
    """The tiny network: with so little to compute, what a loop adds can be seen."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    """A small network for 28 x 28 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def vectors(batches: int, batch_size: int = 32) -> TensorDataset:
    """Random features (N, 64) and labels in 0..9."""
    generator = torch.Generator().manual_seed(0)
    count = batches * batch_size
    return TensorDataset(
        torch.randn(count, 64, generator=generator), torch.randint(0, 10, (count,), generator=generator)
    )


def fashion_mnist(count: int) -> tuple[TensorDataset, str]:
    """The first `count` training images (count, 1, 28, 28), mean 0 and deviation 1; random ones where they are missing.

    Returns:
        the data, and what it is.
    """
    images, labels = FASHION_MNIST / "train-images-idx3-ubyte.gz", FASHION_MNIST / "train-labels-idx1-ubyte.gz"
    if not images.is_file() or not labels.is_file():
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(count, 1, 28, 28, generator=generator)
        return TensorDataset(pixels, torch.randint(0, 10, (count,), generator=generator)), "random images"
    with gzip.open(images) as file:
        raw = bytearray(file.read(16 + count * 784)[16:])  # behind 16 bytes of sizes
    with gzip.open(labels) as file:
        targets = bytearray(file.read(8 + count)[8:])
    pixels = torch.frombuffer(raw, dtype=torch.uint8).reshape(count, 1, 28, 28).float()
    pixels = (pixels - pixels.mean()) / pixels.std()
    return TensorDataset(pixels, torch.frombuffer(targets, dtype=torch.uint8).long()), "Fashion-MNIST"


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Task(VisionTask):
    """The same work as the plain loop's; runs that loop's epoch in between."""

    def __init__(self, model: nn.Module, batches: int, plain_epoch: Callable[[], None], metric: Any = None) -> None:
        super().__init__()
        self.model, self.accuracy = model, metric
        self.batches, self.plain_epoch = batches, plain_epoch
        self.pairs = Pairs()
        self._watch: Stopwatch | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        return adamw(self.model)

    def on_train_epoch_end(self, run: Run) -> None:
        ours = None if self._watch is None else self._watch.per(self.batches)
        _together(run)
        watch = Stopwatch()
        self.plain_epoch()
        plain = watch.per(self.batches)
        if ours is not None and run.state.epoch >= WARM:
            self.pairs.ours.append(ours)
            self.pairs.plain.append(plain)
        _together(run)
        self._watch = Stopwatch()


class MetricTask(Task):
    """Counts the accuracy over the epoch, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        logits = self.model(images)
        self.accuracy.update(logits.detach(), labels)
        self.log("accuracy", self.accuracy)
        return F.cross_entropy(logits, labels)


def _together(run: Run) -> None:
    if run.world_size > 1:
        torch.distributed.barrier()


def fit(task: Task, loader: DataLoader[Any], rounds: int, **settings: Any) -> Pairs:
    """Train for `rounds` counted epochs."""
    bare: dict[str, Any] = {"log_with": None, "default_callbacks": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(max_epochs=rounds + WARM, cpu=True, project_dir=folder, **{**bare, **settings})
        trainer.fit(task, loader)
    return task.pairs


# The rows: each returns its rounds


def bare_row(rounds: int, batches: int = 200, accumulation: int = 1) -> Pairs:
    """Nothing but training."""
    loader = DataLoader(vectors(batches), batch_size=32, shuffle=True)
    model = mlp()
    optimizer = adamw(model)

    def plain_epoch() -> None:
        for features, labels in loader:
            loss = F.cross_entropy(model(features), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def plain_accumulation() -> None:
        for index, (features, labels) in enumerate(loader):
            loss = F.cross_entropy(model(features), labels) / accumulation
            loss.backward()
            if (index + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    task = Task(mlp(), batches, plain_epoch if accumulation == 1 else plain_accumulation)
    return fit(task, loader, rounds, gradient_accumulation_steps=accumulation)


def accumulation_row(rounds: int) -> Pairs:
    """One step for four batches; times are per batch."""
    return bare_row(rounds, accumulation=4)


def defaults_row(rounds: int, batches: int = 200) -> Pairs:
    """TensorBoard, bar and recorded loss, beside a plain loop that writes and shows as much, on a terminal."""
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm

    loader = DataLoader(vectors(batches), batch_size=32, shuffle=True)
    model = mlp()
    optimizer = adamw(model)
    shown, screen = pty.openpty()
    reader = subprocess.Popen(["cat"], stdin=shown, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder, os.fdopen(screen, "w") as terminal:
        former, sys.stderr = sys.stderr, terminal
        writer = SummaryWriter(folder)
        step = epoch = 0

        def plain_epoch() -> None:
            nonlocal step, epoch
            losses: list[torch.Tensor] = []
            epoch_losses: list[torch.Tensor] = []
            bar = tqdm(loader, desc=f"epoch {epoch}", ncols=79)
            since = time.perf_counter()
            for features, labels in bar:
                loss = F.cross_entropy(model(features), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.detach())
                step += 1
                if step % LOG_EVERY == 0:
                    mean = torch.stack(losses).mean()
                    epoch_losses.append(mean)
                    losses.clear()
                    now = time.perf_counter()
                    writer.add_scalar("train/loss", mean.item(), step)
                    writer.add_scalar("train/lr", optimizer.param_groups[0]["lr"], step)
                    writer.add_scalar("train/samples_per_second", 32 * LOG_EVERY / (now - since), step)
                    writer.add_scalar("epoch", epoch, step)
                    bar.set_postfix(loss=f"{mean.item():.4f}", refresh=False)
                    since = now
            writer.add_scalar("train/loss_epoch", torch.stack(epoch_losses).mean().item(), step)
            epoch += 1

        try:
            task = Task(mlp(), batches, plain_epoch)
            # Without the default checkpoint, which the plain loop does not write: benchmarks/checkpoint.py measures it.
            shows = ["progress_bar", "summary"]
            return fit(task, loader, rounds, log_with="tensorboard", default_callbacks=False, callbacks=shows)
        finally:
            writer.close()
            sys.stderr = former
            reader.terminate()
            reader.wait()
            os.close(shown)


class TurnTask(Task):
    """Trains in a thread of its own, one epoch each time that it is given its turn."""

    def __init__(self, model: nn.Module, batches: int) -> None:
        super().__init__(model, batches, lambda: None)
        self.turn, self.over = threading.Semaphore(0), threading.Semaphore(0)

    def on_train_epoch_start(self, run: Run) -> None:
        self.turn.acquire()

    def on_train_epoch_end(self, run: Run) -> None:
        self.over.release()

    def epoch(self) -> None:
        """Let it train for an epoch, and wait for its end."""
        self.turn.release()
        if not self.over.acquire(timeout=600):
            raise RuntimeError("the fit that was to train beside this one has ended")


def beside_row(make: Callable[[], Any], rounds: int, batches: int = 200) -> Pairs:
    """A callback, beside the same fit without it: both are ours, with TensorBoard.

    Without the bar, of which a process shows one: it would cost both the same.
    """
    return beside(make(), mlp, lambda: DataLoader(vectors(batches), batch_size=32, shuffle=True), rounds)


def beside_cnn_row(make: Callable[[], Any], rounds: int, batches: int = 16) -> Pairs:
    """The same with work of a size that somebody would do."""
    dataset, what = fashion_mnist(batches * 128)
    pairs = beside(make(), cnn, lambda: DataLoader(dataset, batch_size=128, shuffle=True), rounds)
    pairs.note = what
    return pairs


def beside(callback: Any, model: Callable[[], nn.Module], make_loader: Callable[[], Any], rounds: int) -> Pairs:
    """A fit with the callback as ours, a fit without as the plain loop, an epoch of each in turn."""

    def train(task: Task, callbacks: list[Any]) -> Pairs:
        return fit(task, make_loader(), rounds, log_with="tensorboard", callbacks=callbacks)

    batches = len(make_loader())
    without = TurnTask(model(), batches)
    thread = threading.Thread(target=train, args=(without, []), daemon=True)
    thread.start()
    pairs = train(Task(model(), batches, without.epoch), [callback])
    thread.join()
    return pairs


def metric_row(rounds: int, batches: int = 200) -> Pairs:
    """A torchmetrics accuracy over the epoch in both loops."""
    from torchmetrics.classification import MulticlassAccuracy

    loader = DataLoader(vectors(batches), batch_size=32, shuffle=True)
    model, accuracy = mlp(), MulticlassAccuracy(10)
    optimizer = adamw(model)

    def plain_epoch() -> None:
        for features, labels in loader:
            logits = model(features)
            accuracy.update(logits.detach(), labels)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        accuracy.compute()
        accuracy.reset()

    return fit(MetricTask(mlp(), batches, plain_epoch, MulticlassAccuracy(10)), loader, rounds)


def ranks_row(rounds: int, batches: int = 100) -> Pairs:
    """Two gloo ranks beside plain DDP in the same two processes."""
    dataset = vectors(batches * 2)

    def make_plain() -> Callable[[], None]:
        sampler: DistributedSampler[Any] = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        model = nn.parallel.DistributedDataParallel(mlp())
        optimizer = adamw(model)
        epoch = 0

        def plain_epoch() -> None:
            nonlocal epoch
            sampler.set_epoch(epoch)
            epoch += 1
            for features, labels in loader:
                loss = F.cross_entropy(model(features), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return plain_epoch

    class RanksTask(Task):
        def on_fit_start(self, run: Run) -> None:
            assert run.world_size == 2, f"{run.world_size} ranks"
            self.plain_epoch = make_plain()  # only here is there a process group

    task = RanksTask(mlp(), batches, lambda: None)
    return fit(task, DataLoader(dataset, batch_size=32, shuffle=True), rounds)


def cnn_row(rounds: int, batches: int = 8) -> Pairs:
    """A network of two convolutions, batch 128: work of a size that somebody would do."""
    dataset, what = fashion_mnist(batches * 128)
    loader = DataLoader(dataset, batch_size=128, shuffle=True)
    model = cnn()
    optimizer = adamw(model)

    def plain_epoch() -> None:
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    pairs = fit(Task(cnn(), batches, plain_epoch), loader, rounds)
    pairs.note = what
    return pairs


class PredictTask(Task):
    """Times a prediction from its first batch to the end of the verb: one call is one round."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            self._watch = Stopwatch()
        return self.model(batch[0])

    def teardown(self, run: Run) -> None:
        assert self._watch is not None
        self.pairs.ours.append(self._watch.per(self.batches))


def predict_row(rounds: int, batches: int = 200, to_disk: bool = False) -> Pairs:
    """Predictions in memory, in the order of the data."""
    loader = DataLoader(vectors(batches), batch_size=32)
    model = mlp()
    task = PredictTask(mlp(), batches, lambda: None)
    trainer = Trainer(cpu=True, log_with=None, default_callbacks=False)
    for _ in range(rounds + WARM):
        if to_disk:
            with tempfile.TemporaryDirectory() as folder:
                trainer.predict(task, loader, output_dir=folder)
        else:
            trainer.predict(task, loader)
        outputs = []
        with torch.inference_mode():
            model.eval()
            for index, (features, _) in enumerate(loader):
                if index == 0:
                    watch = Stopwatch()
                outputs.append(model(features))
            torch.cat(outputs)
        task.pairs.plain.append(watch.per(batches))
    return Pairs(task.pairs.ours[WARM:], task.pairs.plain[WARM:])


def predict_to_disk_row(rounds: int) -> Pairs:
    """Predictions written to files, beside a plain loop that keeps them in memory."""
    return predict_row(rounds, to_disk=True)


# Rows about whole processes

_SCRIPT_WORK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(6400, 64), torch.randint(0, 10, (6400,))), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
"""
_SCRIPT_END = """
def end():
    import json, os, time
    peak = next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    os.write(1, ("\\n" + json.dumps([time.time(), time.process_time(), peak])).encode())
    os._exit(0)
"""
_PLAIN_SCRIPT = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for features, labels in loader:
    loss = F.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    end()
"""
_PLAIN_DEFAULTS_SCRIPT = """
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
writer = SummaryWriter(FOLDER)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (features, labels) in enumerate(tqdm(loader)):
    loss = F.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    writer.add_scalar("train/loss", loss.item(), step)
    end()
"""
_OUR_SCRIPT = """
from sanctuary_trainer import Trainer, VisionTask
class Task(VisionTask):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1])
    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
    def on_train_step_end(self, run):
        end()
Trainer(max_epochs=1, cpu=True, project_dir=FOLDER, SETTINGS).fit(Task(), loader)
"""


def first_step(script: str, settings: str = "") -> tuple[float, float, float]:
    """Run a script up to its first step: seconds from the start of its process, CPU seconds, peak memory in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        text = script.replace("FOLDER", repr(folder)).replace("SETTINGS", settings)
        source = _SCRIPT_END + _SCRIPT_WORK + text
        began = time.time()
        output = subprocess.run([sys.executable, "-c", source], env=_environment(), capture_output=True, check=True)
    ended, cpu, peak = json.loads(output.stdout.splitlines()[-1])  # the summary stands above it
    return ended - began, cpu, peak


def first_step_row(rounds: int, defaults: bool = False) -> Pairs:
    """A whole process up to its first step."""
    pairs, peaks = Pairs(), ([], [])
    plain_script = _PLAIN_DEFAULTS_SCRIPT if defaults else _PLAIN_SCRIPT
    settings = "" if defaults else "log_with=None, default_callbacks=False"
    for turn in range(rounds + 1):
        ours, plain = first_step(_OUR_SCRIPT, settings), first_step(plain_script)
        if turn:  # the first pair writes byte code and fills the page cache
            pairs.ours.append(ours[:2])
            pairs.plain.append(plain[:2])
            peaks[0].append(ours[2])
            peaks[1].append(plain[2])
    pairs.note = f"peak memory {statistics.median(peaks[0]):.0f} MiB, plain {statistics.median(peaks[1]):.0f} MiB"
    return pairs


def first_step_defaults_row(rounds: int) -> Pairs:
    """The same with TensorBoard and a bar on both sides."""
    return first_step_row(rounds, defaults=True)


_IMPORT_SCRIPT = """
import json, time, torch
start = time.perf_counter(), time.process_time()
{}
print(json.dumps([time.perf_counter() - start[0], time.process_time() - start[1]]))
"""


def import_row(rounds: int) -> Pairs:
    """What a script imports by name, after torch; beside it what `import accelerate` takes."""
    pairs = Pairs(note="seconds; beside `import accelerate`")
    for turn in range(rounds + 1):
        ours, theirs = (
            json.loads(
                subprocess.run(
                    [sys.executable, "-c", _IMPORT_SCRIPT.format(line)],
                    env=_environment(),
                    capture_output=True,
                    check=True,
                ).stdout
            )
            for line in ("from sanctuary_trainer import Trainer, VisionTask", "import accelerate")
        )
        if turn:
            pairs.ours.append(tuple(ours))
            pairs.plain.append(tuple(theirs))
    return pairs


def predict_memory_row(rounds: int) -> Pairs:
    """How far memory grows while N and 2 N batches of (32, 1024) float32 are predicted (4 MiB per 32 batches)."""
    note = []
    for mode in ("memory", "output_dir", "output_dir and read back"):
        grown = [_in_process("--memory", mode, "--batches", str(batches)) for batches in (800, 1600)]
        note.append(f"{mode}: {grown[0]:.0f} MiB for 100 MiB, {grown[1]:.0f} MiB for 200 MiB")
    return Pairs(note="peak growth " + "; ".join(note))


def memory_growth(mode: str, batches: int) -> float:
    """Peak memory of one prediction above what the process had before, in MiB."""
    torch.manual_seed(0)
    task = Task(nn.Linear(64, 1024), batches, lambda: None)
    trainer = Trainer(cpu=True, log_with=None, default_callbacks=False)

    def predict(count: int) -> None:
        loader = DataLoader(vectors(count), batch_size=32)
        with tempfile.TemporaryDirectory() as folder:
            if mode == "memory":
                trainer.predict(task, loader)
                return
            predictions = trainer.predict(task, loader, output_dir=Path(folder) / "out")
            if mode == "output_dir and read back":
                assert predictions is not None
                sum(float(sample[0]) for sample in predictions)

    predict(20)
    dataset = vectors(batches)  # the allocator has its room before the peak is reset
    del dataset
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmHWM")
    predict(batches)
    return _status("VmHWM") - before


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


# The table


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        title: what is compared.
        measure: gives the rounds.
        limit, goal: of the median ratio; None for none. For the import: CPU seconds.
        weight: rounds of this row for one of the command line's.
        ranks: processes that measure together.
    """

    title: str
    measure: Callable[[int], Pairs]
    limit: float | None = None
    goal: float | None = None
    weight: float = 1.0
    ranks: int = 1


ROWS = {
    "bare": Row("bare fit", bare_row, 1.08, 1.03),
    "defaults": Row("TensorBoard, bar, loss recorded", defaults_row, 1.10, 1.05),
    "oom": Row("OOMFallback, beside a fit without", partial(beside_row, OOMFallback), 1.05, 1.02),
    "balance": Row("LoadBalance, CNN, beside without", partial(beside_cnn_row, LoadBalance), 1.01, None, 0.5),
    "metric": Row("with a torchmetrics accuracy", metric_row, 1.08, 1.03),
    "accumulation": Row("accumulation of 4 batches", accumulation_row, 1.08),
    "ranks": Row("two gloo ranks, beside DDP", ranks_row, 1.10, 1.04, 0.5, ranks=2),
    "predict": Row("prediction in memory", predict_row, 1.20),
    "predict_to_disk": Row("prediction to output_dir", predict_to_disk_row, None),
    "predict_memory": Row("memory of a prediction", predict_memory_row, weight=0.0),
    "cnn": Row("small CNN, 28 x 28, batch 128", cnn_row, None, 1.0, 0.5),
    "first_step": Row("process until its first step", first_step_row, 1.10, None, 0.05),
    "first_step_defaults": Row("the same with TensorBoard, bar", first_step_defaults_row, None, None, 0.05),
    "import": Row("import after torch", import_row, 0.3, None, 0.05),
}


@dataclass
class Result:
    """What came of a row: times in microseconds per batch (seconds where a whole process is timed)."""

    row: str
    ours: float
    plain: float
    ratio: float
    quartiles: tuple[float, float]
    cpu_ratio: float
    cpu_quartiles: tuple[float, float]
    ours_cpu: float
    plain_cpu: float
    rounds: int
    limit: float | None
    goal: float | None
    note: str


def summarize(name: str, pairs: Pairs) -> Result:
    """Medians of the rounds, and of the ratios within each round."""
    row = ROWS[name]
    unit = 1.0 if name.startswith(("first", "import")) else 1e6
    nan = float("nan")
    middles: list[tuple[float, float, float, tuple[float, float]]] = []
    for clock in (0, 1):
        ours, plain = [pair[clock] for pair in pairs.ours], [pair[clock] for pair in pairs.plain]
        ratios = [mine / theirs for mine, theirs in zip(ours, plain, strict=True)]
        if not ratios:
            middles.append((nan, nan, nan, (nan, nan)))
            continue
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        middles.append((statistics.median(ours) * unit, statistics.median(plain) * unit, middle, (low, high)))
    (ours_wall, plain_wall, ratio, spread), (ours_cpu, plain_cpu, cpu_ratio, cpu_spread) = middles
    return Result(
        name, ours_wall, plain_wall, ratio, spread, cpu_ratio, cpu_spread, ours_cpu, plain_cpu,
        len(pairs.ours), row.limit, row.goal, pairs.note,
    )  # fmt: skip


HEAD = (
    f"{'':34}{'ours':>9}{'plain':>9}{'ratio':>8}{'quartiles':>15}{'CPU ratio':>11}{'quartiles':>15}"
    f"{'limit':>7}{'goal':>6}{'rounds':>8}"
)


def line(result: Result) -> str:
    """One row as text."""
    title = f"{ROWS[result.row].title:34}"
    if not result.rounds:
        return f"{title}  {result.note}"

    def span(pair: tuple[float, float]) -> str:
        return f"{pair[0]:.3f} - {pair[1]:.3f}"

    number = "9.2f" if result.ours < 100 else "9.1f"
    limit = "" if result.limit is None else f"{result.limit:.2f}"
    goal = "" if result.goal is None else f"{result.goal:.2f}"
    text = (
        f"{title}{result.ours:{number}}{result.plain:{number}}{result.ratio:8.3f}{span(result.quartiles):>15}"
        f"{result.cpu_ratio:11.3f}{span(result.cpu_quartiles):>15}{limit:>7}{goal:>6}{result.rounds:8}"
    )
    if result.row == "import":
        text += f"  CPU seconds {result.ours_cpu:.2f}"
    return f"{text}  {result.note}"


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def _in_process(*arguments: str, ranks: int = 1) -> Any:
    """Run this file in fresh processes; what rank 0 wrote as its result."""
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, *launcher, str(Path(__file__).resolve()), *arguments, "--to", str(path)]
        ran = subprocess.run(command, env=_environment(), cwd=folder, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(f"{' '.join(arguments)} failed:\n{ran.stderr}")
        return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of the short rows (default: 100)")
    parser.add_argument("--repeats", type=int, default=2, help="processes that share a row's rounds (default: 2)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="only these")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row instead of the table")
    for hidden in ("--measure", "--memory", "--batches", "--to"):  # what this file tells the processes that it starts
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        Path(options.to).write_text(json.dumps(memory_growth(options.memory, int(options.batches))))
        return
    if options.measure:
        pairs = ROWS[options.measure].measure(options.rounds)
        if os.environ.get("RANK", "0") == "0":
            Path(options.to).write_text(json.dumps(asdict(pairs)))
        return
    if not options.json:
        print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, one thread, AdamW")
        print("us per batch (s for a whole process); ratio: median over rounds of ours / plain\n")
        print(HEAD, flush=True)
    failed: list[str] = []
    for name in options.rows:
        row = ROWS[name]
        rounds = max(3, round(options.rounds * row.weight / options.repeats))
        pairs = Pairs()
        try:
            for _ in range(options.repeats if row.weight >= 0.5 else 1):
                more = Pairs(**_in_process("--measure", name, "--rounds", str(rounds), ranks=row.ranks))
                pairs = Pairs(pairs.ours + more.ours, pairs.plain + more.plain, more.note)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            failed.append(name)
            continue
        result = summarize(name, pairs)
        print(json.dumps(asdict(result)) if options.json else line(result), flush=True)
    if failed:
        raise SystemExit(f"rows that failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
