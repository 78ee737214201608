"""Whether a run that is killed again and again ends as if nothing had happened: `python benchmarks/chaos.py`.

for each configuration
  an undisturbed run
  while there are kills left                     a run of its own, equal to the undisturbed one in the end
    an attempt: fit(resume="auto")               a process group: the ranks, their loaders' workers, the store
      SIGKILL to all of it (or to one rank) at a time that was drawn before
    the last attempt is left to finish
    compare both folders

What must be equal: every file of weights, optimizers, generators and callbacks in every checkpoint that is kept, byte
for byte; every line of `metrics.jsonl` but for times; every point of every curve in the event files; what fit returns;
and the samples. Each rank notes the samples of each batch beside the step that they lead to. An attempt that begins at
step s takes back what former attempts did after s, so of each former attempt only the steps up to the lowest later
beginning count: these, put together, must be the undisturbed run's, and every sample of every epoch among them once.

When it kills. Some of the kills fall at a time drawn evenly over a share of a run's life, its start included. Others
wait for a moment first: until the hidden folder of an unfinished checkpoint appears, or the one after the next
validation; until a validation begins; or fall into the start. Some come before the n-th file of the run's folder is
opened, renamed or removed, which finds the short moments between two of these. With two ranks some hit one rank alone,
and the other is killed a moment later, as launchers do.

An import of torch and its friends costs many seconds, so this process does it once and forks the ranks of each attempt.
Until then it starts no thread and runs no backward pass, which a forked process would not survive.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import numpy as np
import torch
import torch.distributed.algorithms.join
import torch.nn.parallel
import torch.utils.tensorboard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate
from torchmetrics.classification import MulticlassAccuracy

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sanctuary_trainer import Callback, Run, Trainer, VisionTask  # noqa: E402
from sanctuary_trainer.callbacks import EMA, Checkpoint, EarlyStopping, ProgressBar, Summary  # noqa: E402

SAMPLES, VAL_SAMPLES, BATCH_SIZE, CLASSES = 75, 21, 4, 3  # neither a multiple of the batch size: short last windows
LIMIT_SECONDS = 90.0  # of one attempt
POLL_SECONDS = 0.001
UNFINISHED = (".partial", ".former", ".removed")  # what is written, replaced or removed has a hidden name meanwhile
Used = tuple[int, int, int, int, tuple[int, ...]]  # epoch, step, rank, batch_idx, indices of the samples
TIMES = ("time", "train/samples_per_second")  # what no two runs have in common

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate")  # Python's names

Moment = Literal["any", "write", "best write", "file", "validation", "start", "one rank"]


@dataclass(frozen=True)
class Configuration:
    """How a run is started.

    Attributes:
        ranks, workers: processes that train, and those that read for each of them.
        every: steps between two checkpoints.
        interval: steps between two validations; None: at the end of each epoch.
        named: whether the run has a name; else "auto" has to find its folder.
        apart: whether the best checkpoints have a folder of their own: two are written at one save point.
    """

    ranks: int
    workers: int
    every: int
    interval: int | None = None
    named: bool = True
    apart: bool = False

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.workers} workers, saved every {self.every}"
        validated = "" if self.interval is None else f", validated every {self.interval}"
        return ranks + validated + ", unnamed" * (not self.named) + ", best apart" * self.apart


CONFIGURATIONS = {
    "1-0": Configuration(ranks=1, workers=0, every=1),
    "1-2": Configuration(ranks=1, workers=2, every=3),
    "1-0-interval": Configuration(ranks=1, workers=0, every=2, interval=4, named=False),
    "1-0-apart": Configuration(ranks=1, workers=0, every=2, apart=True),
    "2-0": Configuration(ranks=2, workers=0, every=1),
    "2-2": Configuration(ranks=2, workers=2, every=2),
}


# What is trained


class Images(Dataset[Any]):
    """Noise in which the class can be seen: image i is always the same, and its augmentation draws from all three."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, CLASSES, (count,), generator=generator)
        self.images = torch.randn(count, 1, 8, 8, generator=generator) + self.labels.reshape(-1, 1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        image = self.images[index]
        if random.random() < 0.5:
            image = image.flip(-1)
        image = image * float(np.random.uniform(0.8, 1.2)) + 0.1 * torch.randn(1, 8, 8)
        return index, image, self.labels[index]


def augmenting_collate(samples: list[Any]) -> Any:
    """Batches of which a row is erased, and all of which are a bit lighter or darker."""
    indices, images, labels = default_collate(samples)
    images[:, :, random.randrange(8)] = float(np.random.normal())
    return indices, images + 0.1 * torch.randn(()), labels


class Chaos(VisionTask):
    """A small network with everything that has a state of its own: batch norm, dropout, a metric, a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, CLASSES)
        )
        self.accuracy, self.val_accuracy = MulticlassAccuracy(CLASSES), MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _, images, labels = batch
        logits = self.model(images)
        self.accuracy.update(logits.detach(), labels)
        self.log("accuracy", self.accuracy)
        return F.cross_entropy(logits, labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, images, labels = batch
        logits = self.model(images)
        self.val_accuracy.update(logits, labels)
        self.log("accuracy", self.val_accuracy)
        self.log("loss", F.cross_entropy(logits, labels))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=self.run.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Notes(Callback):
    """Tells from outside where the run is, and which samples went into which step.

    Args:
        folder: takes `ATTEMPT.RANK.stage`, one word that is written over, and `ATTEMPT.RANK.samples`, whose lines are
            "step epoch batch_idx index,index,...".
        attempt: how many attempts there were before.
        die: [rank, step]: that rank kills itself with SIGKILL in that step, in the first attempt that comes to it.
    """

    def __init__(self, folder: Path, attempt: int, die: list[int] | None = None) -> None:
        self.folder, self.attempt, self.die = folder, attempt, die
        self._stage: int | None = None

    def on_fit_start(self, run: Run) -> None:
        name = f"{self.attempt:04d}.{run.rank}"
        self._stage = os.open(self.folder / f"{name}.stage", os.O_WRONLY | os.O_CREAT)
        self._samples = os.open(self.folder / f"{name}.samples", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._samples, f"begins {run.state.global_step}\n".encode())
        self._tell("train")

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        step = run.state.global_step + 1
        indices = ",".join(str(index) for index in batch[0].tolist())
        # One call for one line: a line is there or not.
        os.write(self._samples, f"{step} {run.state.epoch} {batch_idx} {indices}\n".encode())
        if self.die == [run.rank, step]:
            with suppress(FileExistsError):
                os.close(os.open(self.folder / "died", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        self._tell("val")

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        self._tell("train")

    def on_fit_end(self, run: Run) -> None:
        self._tell("end")

    def _tell(self, stage: str) -> None:
        if self._stage is not None:  # where the run could not be built, hooks of the end come without the start
            os.pwrite(self._stage, f"{stage:8}".encode(), 0)


def train(configuration: Configuration, folder: Path, attempt: int, die: list[int] | None = None) -> None:
    """One attempt: start the run in this folder or go on with it; rank 0 writes what came of it to `result.json`."""

    def loader(count: int, seed: int, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            Images(count, seed),
            batch_size=BATCH_SIZE,
            shuffle=shuffle,
            num_workers=configuration.workers,
            collate_fn=augmenting_collate,
        )

    notes = folder / "notes"
    notes.mkdir(exist_ok=True)
    trainer = Trainer(
        max_epochs=6,
        gradient_accumulation_steps=2,
        gradient_clip_val=1.0,
        val_check_interval=configuration.interval,
        log_every_n_steps=2,
        seed=11,
        cpu=True,
        timeout=60.0,
        project_dir=folder / "runs",
        run_name="killed" if configuration.named else None,
        callbacks=[
            ProgressBar(),
            Summary(),
            Checkpoint(every_n_steps=configuration.every, save_last=True),
            Checkpoint("best" if configuration.apart else None, monitor="val/accuracy", mode="max", save_top_k=2),
            EMA(decay=0.9, warmup=True),
            # No value is ever an improvement but the first, so that the fourth one ends the run.
            EarlyStopping("val/loss_ema", "min", patience=3 if configuration.interval is None else 9, min_delta=1e6),
            Notes(notes, attempt, die),
        ],
        default_callbacks=False,
    )
    result = trainer.fit(Chaos(), loader(SAMPLES, 1, True), loader(VAL_SAMPLES, 2, False), resume="auto")
    if os.environ.get("RANK", "0") == "0":
        best = None if result.best_checkpoint is None else result.best_checkpoint.name
        told = {"stop_reason": result.stop_reason, "global_step": result.global_step, "best": best}
        (folder / "result.json").write_text(json.dumps(told | {"metrics": _without_times(result.metrics)}))


# One attempt: processes


def start(configuration: Configuration, folder: Path, attempt: int, operation: int = 0) -> int:
    """Fork the session of one attempt.

    operation: before so many operations on files of the run rank 0 kills all of it; 0: never.

    Returns:
        The number of its leader, whose exit status is 0 if all ranks came to the end.
    """
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            output = os.open(folder / f"output-{attempt:04d}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            status = _lead(configuration, folder, attempt, operation, parent)
        except BaseException:  # noqa: BLE001 - whatever it is, no line of the parent runs twice
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def _lead(configuration: Configuration, folder: Path, attempt: int, operation: int, parent: int) -> int:
    """Fork the ranks and what they meet at, and wait for them."""
    gate, gatekeeper = os.pipe()  # a rank that left early would reset its peers' connections

    def fork(work: Callable[[], object]) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.close(gatekeeper)
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - whatever it is, no line of the parent runs twice
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if configuration.ranks > 1:
        ear, mouth = os.pipe()
        fork(lambda: _host_store(mouth, gate))
        os.environ |= {
            "WORLD_SIZE": str(configuration.ranks),
            "LOCAL_WORLD_SIZE": str(configuration.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": os.read(ear, 16).decode(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "ACCELERATE_USE_CPU": "true",
        }
    done, report = os.pipe()
    os.set_blocking(done, False)
    ranks = {
        fork(partial(_work, configuration, folder, attempt, operation, rank, report, gate))
        for rank in range(configuration.ranks)
    }
    finished = 0
    while finished < configuration.ranks:
        if os.getppid() != parent:  # nobody waits for the outcome any more
            os.killpg(0, signal.SIGKILL)
        with suppress(BlockingIOError):
            finished += len(os.read(done, configuration.ranks))
        if os.waitpid(-1, os.WNOHANG)[0] in ranks:
            time.sleep(1.0)  # what the other ranks say to it
            return 1
        time.sleep(POLL_SECONDS)
    os.close(gatekeeper)
    for pid in ranks:
        os.waitpid(pid, 0)
    return 0


def _host_store(mouth: int, gate: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(mouth, str(store.port).encode())
    os.read(gate, 1)


def _work(
    configuration: Configuration, folder: Path, attempt: int, operation: int, rank: int, report: int, gate: int
) -> None:
    if configuration.ranks > 1:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    torch.set_num_threads(1)
    # As in a new process: these two draw differently in each, and torch's starts alike.
    random.seed()
    np.random.seed()
    (folder / "notes").mkdir(exist_ok=True)
    (folder / "notes" / f"{attempt:04d}.{rank}.pid").write_text(str(os.getpid()))
    os.chdir(folder)
    count = _count_operations(f"{folder}/runs/", operation) if rank == 0 else None
    train(configuration, folder, attempt)
    if count is not None:
        (folder / "operations.txt").write_text(str(count()))
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(report, b".")
    os.read(gate, 1)


def _count_operations(inside: str, last: int) -> Callable[[], int]:
    """Count operations on files below a folder; before the `last`, unless that is 0, kill the process group."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in FILE_EVENTS and str(arguments[0]).startswith(inside):
            count += 1
            if count == last:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(hook)
    return lambda: count


def _in_session(leader: int) -> list[int]:
    """The living processes of a session; loaders' workers have left its process group."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                state, _, _, session = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state not in "ZX":
                    found.append(int(entry.name))
    return found


def kill(leader: int) -> None:
    """SIGKILL to every process of a session, at once for its main group; returns when none is left."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    while left := _in_session(leader):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    with suppress(ChildProcessError):
        os.waitpid(leader, 0)


# One attempt: when it is killed


WAITS_FOR: dict[Moment, tuple[str, ...]] = {"write": ("write",), "best write": ("val", "write"), "validation": ("val",)}


@dataclass(frozen=True)
class Aim:
    """When to kill: after so many seconds; then, if a moment is waited for, so many seconds into it.

    `operation`: see `start`. `rank`: the one that is killed alone.
    """

    moment: Moment
    after: float = 0.0
    into: float = 0.0
    operation: int = 0
    rank: int = 0


@dataclass
class Paces:
    """How long things take, in seconds, as the undisturbed run shows; and how many operations on files it made."""

    start: float
    life: float
    write: float
    validation: float
    operations: int

    def aim(self, draw: random.Random, ranks: int) -> Aim:
        """The next kill."""
        moments: list[Moment] = ["any", "write", "best write", "file", "validation", "start", "one rank"]
        [moment] = draw.choices(moments, weights=(7, 4, 1, 6, 2, 1, 3 if ranks > 1 else 0))
        if moment == "file":  # those of the start are few among all, so that low numbers come more often
            return Aim(moment, operation=1 + int(self.operations / 3 * draw.random() ** 2))
        if moment == "start":
            return Aim(moment, draw.uniform(0.0, self.start))
        # A third of the life, so that runs live through several kills before they come to their end.
        after = draw.uniform(0.0 if moment == "any" else self.start / 2, self.start + (self.life - self.start) / 3)
        if moment == "write":  # a bit longer than the write: what follows on it is not without danger
            return Aim(moment, after, draw.uniform(0.0, 1.3 * self.write))
        if moment == "best write":  # there may be two
            return Aim(moment, after, draw.uniform(0.0, 2.6 * self.write))
        if moment == "validation":
            return Aim(moment, after, draw.uniform(0.0, self.validation))
        return Aim(moment, after, rank=draw.randrange(ranks))


@dataclass
class Outcome:
    """What became of an attempt: "finished", "killed", "failed" or "hung"; and where it was then."""

    what: str
    stage: str
    seconds: float
    spans: dict[str, list[float]] = field(default_factory=dict)
    """How long each was in what it did: writes and validations, in seconds; "start": one."""


class _Watch:
    """What can be seen of an attempt from outside."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self.folder, self.name = folder, folder / "notes" / f"{attempt:04d}"
        self.before = self._unfinished()
        self._since: dict[str, float] = {"start": time.monotonic()}
        self.spans: dict[str, list[float]] = {}

    def stage(self) -> str:
        with suppress(OSError):
            return Path(f"{self.name}.0.stage").read_text().strip() or "start"
        return "start"

    def writes(self) -> bool:
        """Whether there is an unfinished folder that this attempt has made."""
        return bool(self._unfinished() - self.before)

    def look(self) -> set[str]:
        """What is going on; notes how long."""
        going = {self.stage()} & {"start", "val"} | ({"write"} if self.writes() else set())
        now = time.monotonic()
        for name in self._since.keys() - going:
            self.spans.setdefault(name, []).append(now - self._since.pop(name))
        for name in going:
            self._since.setdefault(name, now)
        return going

    def pid(self, rank: int) -> int | None:
        with suppress(OSError, ValueError):
            return int(Path(f"{self.name}.{rank}.pid").read_text())
        return None

    def _unfinished(self) -> set[tuple[str, int, int]]:
        found = set()
        for checkpoints in self.folder.glob("runs/*/*/"):
            with suppress(OSError):
                for entry in os.scandir(checkpoints):
                    if entry.name.endswith(UNFINISHED):
                        about = entry.stat()
                        found.add((entry.name, about.st_ino, about.st_ctime_ns))
        return found


def attempt_once(configuration: Configuration, folder: Path, attempt: int, aim: Aim | None) -> Outcome:
    """Start an attempt and kill it as the aim says; None: leave it alone."""
    watch = _Watch(folder, attempt)
    leader, began = start(configuration, folder, attempt, 0 if aim is None else aim.operation), time.monotonic()

    def outcome(what: str) -> Outcome:
        stage = "write" if watch.writes() else watch.stage()
        return Outcome(what, stage, time.monotonic() - began, watch.spans)

    try:
        waits_for = list(WAITS_FOR.get(aim.moment, ())) if aim is not None else []
        met: float | None = None
        while True:
            going, now = watch.look(), time.monotonic()
            pid, status = os.waitpid(leader, os.WNOHANG)
            if pid:
                itself = aim is not None and aim.operation > 0 and os.WIFSIGNALED(status)
                return outcome("finished" if status == 0 else "killed" if itself else "failed")
            if now - began > LIMIT_SECONDS:
                for rank in range(configuration.ranks):
                    if process := watch.pid(rank):
                        os.kill(process, signal.SIGUSR2)  # the stacks of its threads go to its output
                time.sleep(0.5)
                kill(leader)
                return outcome("hung")
            if aim is not None and aim.moment != "file" and now - began >= aim.after:
                while waits_for and waits_for[0] in going:
                    del waits_for[0]
                if met is None and not waits_for:
                    met = now
                if met is not None and now - met >= aim.into and _killed(leader, aim, watch):
                    return outcome("killed")
            time.sleep(POLL_SECONDS)
    finally:
        kill(leader)


def _killed(leader: int, aim: Aim, watch: _Watch) -> bool:
    """Kill; False: not yet, the rank is not there."""
    if aim.moment == "one rank":
        process = watch.pid(aim.rank)
        if process is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        time.sleep(0.3)  # until its launcher has ended the others: what they do meanwhile must do no harm
    kill(leader)
    return True


# What must be equal


def compare(one: Path, other: Path) -> list[str]:
    """In what two folders of runs differ; empty if in nothing."""
    runs = [[path.parent for path in folder.glob("runs/*/run.json")] for folder in (one, other)]
    if [len(found) for found in runs] != [1, 1]:
        return [f"runs: {runs}"]
    [first], [second] = runs
    found = [f"left behind: {path.relative_to(second)}" for path in sorted(second.rglob(".*"))]
    if json.loads((one / "result.json").read_text()) != json.loads((other / "result.json").read_text()):
        found.append("what fit returns")
    found += _differences("metrics.jsonl line", _lines(first), _lines(second))
    for purge in (True, False):
        curves, others = _curves(first, purge), _curves(second, purge)
        found += [f"curve {tag}" for tag in sorted(curves.keys() | others.keys()) if curves.get(tag) != others.get(tag)]
        found += [f"curve {tag} does not rise" for tag, points in others.items() if not _rises(points)]
    found += _differences("samples", samples(one), samples(other))
    found += [f"samples of the undisturbed run: {text}" for text in uneven(samples(one))]
    found += [f"samples: {text}" for text in uneven(samples(other))]
    return list(dict.fromkeys(found + _compare_checkpoints(first, second)))


def _differences(what: str, one: list[Any], other: list[Any]) -> list[str]:
    if one == other:
        return []
    place = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return [f"{what}: {len(other)} instead of {len(one)}"]
    return [f"{what} {place}: {other[place]} instead of {one[place]}"]


def _without_times(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in TIMES}


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    return [_without_times(json.loads(line)) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _curves(run_dir: Path, purge: bool) -> dict[str, list[tuple[int, float]]]:
    """Points by tag.

    purge: as TensorBoard shows them, which drops what a later attempt takes back; else all that are in the files.
    """
    accumulator = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}, purge_orphaned_data=purge)
    accumulator.Reload()
    tags = [tag for tag in accumulator.Tags()["scalars"] if tag not in TIMES]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


def _rises(points: list[tuple[int, float]]) -> bool:
    steps = [step for step, _ in points]
    return all(one < other for one, other in pairwise(steps))


def samples(folder: Path) -> list[Used]:
    """What was not taken back, in order."""
    begins: dict[int, int] = {}  # the step with which each attempt began
    noted: list[tuple[int, Used]] = []
    for path in sorted((folder / "notes").glob("*.samples")):
        attempt, rank = (int(text) for text in path.name.split(".")[:2])
        for line in path.read_text().splitlines():
            first, *words = line.split()
            if first == "begins":
                begins[attempt] = int(words[0])
                continue
            indices = tuple(int(index) for index in words[2].split(","))
            noted.append((attempt, (int(words[0]), int(first), rank, int(words[1]), indices)))
    last = {one: min((begins[later] for later in begins if later > one), default=sys.maxsize) for one in begins}
    return sorted(line for attempt, line in noted if line[1] <= last[attempt])


def uneven(noted: list[Used]) -> Iterator[str]:
    """The epochs of which a sample was used twice or not at all; the last one may have been left early."""
    epochs: dict[int, Counter[int]] = {}
    for epoch, _, _, _, indices in noted:
        epochs.setdefault(epoch, Counter()).update(indices)
    for epoch, counts in epochs.items():
        missing, twice = set(range(SAMPLES)) - counts.keys(), [index for index, count in counts.items() if count > 1]
        if twice or missing:
            yield f"epoch {epoch}: missing {sorted(missing)}, more than once {sorted(twice)}"


def _compare_checkpoints(one: Path, other: Path) -> list[str]:
    names, others = (
        sorted(str(path.relative_to(run_dir)) for path in run_dir.glob("*/[!.]*")) for run_dir in (one, other)
    )
    found = [] if names == others else [f"checkpoints: {', '.join(others)} instead of {', '.join(names)}"]
    for name in sorted(set(names) & set(others)):
        first, second = one / name, other / name
        files, its = (sorted(path.relative_to(top) for path in top.rglob("*")) for top in (first, second))
        if files != its:
            found.append(f"{name}: {', '.join(map(str, its))} instead of {', '.join(map(str, files))}")
            continue
        for file in files:
            if file.suffix == ".safetensors" and (first / file).read_bytes() != (second / file).read_bytes():
                found.append(f"{name}/{file}")
        state, its_own = _state(first), _state(second)
        found += [f"{name}/state.json: {part}" for part in state if state[part] != its_own.get(part)]
    return found


def _state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint tells of a run but for times, and the bytes of files that hold times."""
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    state["metrics"] = _without_times(state["metrics"])
    state["rest"]["tracking"].pop("bytes")
    for name in ("elapsed", "id"):
        state["run"].pop(name)
    state["settings"].pop("project_dir")
    return state


# A configuration


@dataclass
class Row:
    """What came of a configuration: kills by where they fell, and in what a run differed from the undisturbed one."""

    name: str
    runs: int = 0
    kills: int = 0
    one_rank: int = 0
    fell: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0


def storm(name: str, kills: int, seed: int, folder: Path) -> Row:
    """Runs of one configuration that are killed so many times, all together.

    folder: new; one folder for each run, those of runs that were equal are removed.
    """
    configuration, draw, row = CONFIGURATIONS[name], random.Random(f"{seed} {name}"), Row(name)
    began = time.monotonic()
    calm = folder / "undisturbed"
    calm.mkdir(parents=True)
    outcome = attempt_once(configuration, calm, 0, None)
    if outcome.what != "finished":
        row.differences.append(f"the undisturbed run {outcome.what}:\n{_output(calm)}")
        return row
    spans = outcome.spans
    paces = Paces(
        start=sum(spans["start"]),
        life=outcome.seconds,
        write=statistics.median(spans.get("write", [0.0])),
        validation=statistics.median(spans.get("val", [0.0])),
        operations=int((calm / "operations.txt").read_text()),
    )
    while row.kills < kills:
        row.runs += 1
        run = folder / f"run-{row.runs}"
        run.mkdir()
        differences = _one_run(configuration, run, kills, paces, draw, row) or compare(calm, run)
        row.differences += [f"{run.name}: {text}" for text in differences]
        if not differences:
            shutil.rmtree(run)
    if not row.differences:
        shutil.rmtree(folder)
    row.seconds = time.monotonic() - began
    return row


def _one_run(
    configuration: Configuration, run: Path, kills: int, paces: Paces, draw: random.Random, row: Row
) -> list[str]:
    """Attempts until one comes to the end; what went wrong."""
    attempt = 0
    while True:
        aim = paces.aim(draw, configuration.ranks) if row.kills < kills else None
        outcome = attempt_once(configuration, run, attempt, aim)
        attempt += 1
        with (run / "attempts.jsonl").open("a") as file:
            file.write(json.dumps({**asdict(outcome), "aim": None if aim is None else asdict(aim)}) + "\n")
        if outcome.what == "finished":
            return []
        if outcome.what != "killed":
            return [f"attempt {attempt - 1} {outcome.what} in {outcome.stage}:\n{_output(run)}"]
        row.kills += 1
        row.one_rank += aim is not None and aim.moment == "one rank"
        row.fell[outcome.stage] += 1


def _output(folder: Path) -> str:
    """The end of what the last attempt wrote."""
    return sorted(folder.glob("output-*.txt"))[-1].read_text(errors="replace")[-6000:]


# The table

STAGES = ("start", "train", "write", "val", "end")
HEAD = f"{'':62}{'runs':>5}{'kills':>6}{''.join(f'{stage:>7}' for stage in STAGES)}{'one rank':>10}{'equal':>7}{'s':>6}"


def line(row: Row) -> str:
    """One row as text."""
    fell = "".join(f"{row.fell[stage]:7}" for stage in STAGES)
    equal = "no" if row.differences else "yes"
    title = str(CONFIGURATIONS[row.name])
    return f"{title:62}{row.runs:5}{row.kills:6}{fell}{row.one_rank:10}{equal:>7}{row.seconds:6.0f}"


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=96, help="over all configurations (default: 96)")
    parser.add_argument("--seed", type=int, default=0, help="of when to kill; times vary with the machine (default: 0)")
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--folder", type=Path, help="for the runs; those that differ stay (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row instead of the table")
    parser.add_argument(
        "--train", choices=CONFIGURATIONS, help=argparse.SUPPRESS
    )  # one rank of an attempt, as launched
    parser.add_argument("--die", nargs=2, type=int, help=argparse.SUPPRESS)  # see `Notes`
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.train is not None:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        train(CONFIGURATIONS[options.train], options.folder, restarts, options.die)
        raise SystemExit(0)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    share, rest = divmod(options.kills, len(options.configurations))
    if not options.json:
        print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, one thread, gloo\n")
        print(HEAD, flush=True)
    failed = False
    for place, name in enumerate(options.configurations):
        row = storm(name, share + (place < rest), options.seed, folder.resolve() / name)
        print(json.dumps(asdict(row)) if options.json else line(row), flush=True)
        for text in row.differences:
            print(f"    {text}", file=sys.stderr, flush=True)
        failed = failed or bool(row.differences)
    if failed:
        raise SystemExit(f"not equal; what is left lies in {folder}")
    with suppress(OSError):
        folder.rmdir()
    raise SystemExit(0)


if __name__ == "__main__":
    main()
