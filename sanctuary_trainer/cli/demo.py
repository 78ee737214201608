"""`sanctuary demo`: train a small network, test it, and leave something to look at.

run
  configured                 the flags of a `sanctuary fit`; the run's config.yaml does the same again
  train_and_test             here, or in N processes as torchrun starts them, all doing the same
    Trainer.fit, test, predict
  confusion_matrix.png, predictions.csv in the run's folder
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from sanctuary_trainer import Trainer
from sanctuary_trainer.cli import confusion_matrix, demo_data
from sanctuary_trainer.cli.configuration import gather
from sanctuary_trainer.cli.processes import run_in_processes
from sanctuary_trainer.cli.run_task import FILE, make
from sanctuary_trainer.cli.small_cnn import SmallCNN

Loader = DataLoader[tuple[Tensor, ...]]

BATCH = 64  # images of a step, over all processes
IMAGES_TO_SEE = 25_000  # in training, as far as 3 to 50 epochs allow


class Outcome(NamedTuple):
    """Of a training: its folder, the accuracy in the test, and (N, K) probabilities of the test's images."""

    run_dir: Path
    accuracy: float
    probabilities: npt.NDArray[np.float32]


class DemoData:
    """The loaders of the demo's images.

    Args:
        data: digits, fashion-mnist, or a folder; see `sanctuary demo --help`.
        batch_size: images of a batch, on each rank.

    Raises:
        SettingsError, DataError: see `demo_data.read`.
    """

    def __init__(self, data: str = "digits", batch_size: int = BATCH) -> None:
        self.pictures = _read.get(data) or demo_data.read(data)
        self.batch_size, self.class_names = batch_size, self.pictures.names

    def train_dataloader(self) -> Loader:
        return self._loader(self.pictures.train, shuffle=True)

    def val_dataloader(self) -> Loader | None:
        return self._loader(self.pictures.val) if len(self.pictures.val) else None

    def test_dataloader(self) -> Loader:
        return self._loader(self.pictures.test)

    def predict_dataloader(self) -> Loader:
        return self._loader(self.pictures.test)

    def _loader(self, rows: npt.NDArray[np.int64], shuffle: bool = False) -> Loader:
        images, labels = torch.from_numpy(self.pictures.images[rows]), torch.from_numpy(self.pictures.labels[rows])
        return DataLoader(TensorDataset(images, labels), self.batch_size, shuffle=shuffle)


_read: dict[str, demo_data.Pictures] = {}  # what was read already, to know whether it can be used


def run(
    data: str, pictures: demo_data.Pictures, epochs: int | None, processes: int, folder: Path, program: str
) -> None:
    """Train on pictures, write what came out, and say where it is.

    Args:
        data: where the images come from.
        pictures: these images.
        epochs: None for so many as suit the number of images.
        processes: how many train together on this machine.
        folder: the run's folder is made in it.
        program: how the user calls the command line.

    Raises:
        RankError: one of several processes failed.
        OSError: a file cannot be written.
    """
    is_main = os.environ.get("RANK", "0") == "0"  # the user may have started this under torchrun
    if is_main:
        for remark in pictures.remarks:
            print(f"{program} demo: warning: {remark}", file=sys.stderr)
        print(
            f"{len(pictures.images):,} images of {len(pictures.names)} classes: {len(pictures.train):,} to train on, "
            f"{len(pictures.val):,} to validate, {len(pictures.test):,} to test",
            flush=True,
        )
    flags = configured(data, pictures, epochs, processes, folder)
    _read[data] = pictures
    outcome = train_and_test(flags) if processes == 1 else run_in_processes(processes, train_and_test, flags)
    if is_main:
        _write(pictures, outcome, program)


def configured(data: str, pictures: demo_data.Pictures, epochs: int | None, processes: int, folder: Path) -> list[str]:
    """The demo as flags of `sanctuary fit`."""
    _, channels, height, width = pictures.images.shape
    size = {"channels": channels, "side": min(height, width), "num_classes": len(pictures.names)}
    model = {"class_path": f"{SmallCNN.__module__}.SmallCNN", "init_args": size}
    ranks = processes if processes > 1 else int(os.environ.get("WORLD_SIZE", "1"))
    values = {
        "task": "ImageClassification",
        "task.model": json.dumps(model),
        "task.lr": 5e-3,
        "task.label_smoothing": 0.1,
        "data": f"{__name__}.DemoData",
        "data.data": data,
        "data.batch_size": max(BATCH // ranks, 1),
        "trainer.max_epochs": epochs or min(max(round(IMAGES_TO_SEE / len(pictures.train)), 3), 50),
        "trainer.seed": 0,
        "trainer.project_dir": folder,
        "trainer.log_every_n_steps": 10,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def train_and_test(flags: list[str]) -> Outcome:
    """Train and test; alone, or as one of several processes."""
    told = gather("fit", flags)
    assert told.task is not None
    trainer, task, data = make("fit", told, told.task)
    result = trainer.fit(task, data=data)
    quiet = Trainer(seed=0, default_callbacks=False)
    accuracy = quiet.test(task, data=data)["test/accuracy"]
    probabilities = quiet.predict(task, data=data)
    assert isinstance(probabilities, list)
    return Outcome(result.run_dir, accuracy, torch.stack(probabilities).numpy())


def _write(pictures: demo_data.Pictures, outcome: Outcome, program: str) -> None:
    labels, predicted = pictures.labels[pictures.test], outcome.probabilities.argmax(1)
    picture = outcome.run_dir / "confusion_matrix.png"
    confusion_matrix.draw(confusion_matrix.count(labels, predicted, len(pictures.names)), pictures.names, picture)
    table = outcome.run_dir / "predictions.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label", "probability", "true_label"])
        for row, label, probabilities in zip(pictures.test, predicted, outcome.probabilities, strict=True):
            name, true_name = pictures.names[label], pictures.names[pictures.labels[row]]
            writer.writerow([pictures.sources[row], name, f"{probabilities[label]:.4f}", true_name])
    print(f"confusion matrix: {picture}")
    print(f"predictions: {table}")
    print(f"configuration: {outcome.run_dir / FILE}")
    print(f"curves: {program} dashboard {shlex.quote(str(outcome.run_dir))}")
    print(f"test accuracy: {outcome.accuracy:.4f}", flush=True)
