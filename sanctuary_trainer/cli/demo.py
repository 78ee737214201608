"""`sanctuary demo`: train a small network, test it, and leave something to look at.

run
  train_and_test             here, or in N processes as torchrun starts them, all doing the same
    Trainer.fit, test, predict
  confusion_matrix.png, predictions.csv in the run's folder
"""

from __future__ import annotations

import csv
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
from sanctuary_trainer.cli import confusion_matrix
from sanctuary_trainer.cli.demo_data import Pictures
from sanctuary_trainer.cli.processes import run_in_processes
from sanctuary_trainer.cli.small_cnn import SmallCNN
from sanctuary_trainer.tasks import ImageClassification

BATCH = 64  # images of a step, over all processes
IMAGES_TO_SEE = 25_000  # in training, as far as 3 to 50 epochs allow


class Outcome(NamedTuple):
    """Of a training: its folder, the accuracy in the test, and (N, K) probabilities of the test's images."""

    run_dir: Path
    accuracy: float
    probabilities: npt.NDArray[np.float32]


def run(pictures: Pictures, epochs: int | None, processes: int, project_dir: Path, program: str) -> None:
    """Train on pictures, write what came out, and say where it is.

    Args:
        pictures: the images.
        epochs: None for so many as suit the number of images.
        processes: how many train together on this machine.
        project_dir: the run's folder is made in it.
        program: how the user calls the command line.

    Raises:
        RankError: one of several processes failed.
        OSError: a file cannot be written.
    """
    is_main = os.environ.get("RANK", "0") == "0"  # the user may have started this under torchrun
    epochs = epochs or min(max(round(IMAGES_TO_SEE / len(pictures.train)), 3), 50)
    if is_main:
        for remark in pictures.remarks:
            print(f"{program} demo: warning: {remark}", file=sys.stderr)
        print(
            f"{len(pictures.images):,} images of {len(pictures.names)} classes: {len(pictures.train):,} to train on, "
            f"{len(pictures.val):,} to validate, {len(pictures.test):,} to test",
            flush=True,
        )
    if processes == 1:
        outcome = train_and_test(pictures, epochs, project_dir)
    else:
        outcome = run_in_processes(processes, train_and_test, pictures, epochs, project_dir)
    if is_main:
        _write(pictures, outcome, program)


def train_and_test(pictures: Pictures, epochs: int, project_dir: Path) -> Outcome:
    """Train and test; alone, or as one of several processes."""
    torch.manual_seed(0)
    _, channels, height, width = pictures.images.shape
    model = SmallCNN(channels, min(height, width), len(pictures.names))
    task = ImageClassification(model, class_names=pictures.names, lr=5e-3, label_smoothing=0.1)
    batch_size = max(BATCH // int(os.environ.get("WORLD_SIZE", "1")), 1)
    images, labels = torch.from_numpy(pictures.images), torch.from_numpy(pictures.labels)

    def loader(rows: npt.NDArray[np.int64], shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(images[rows], labels[rows]), batch_size, shuffle=shuffle)

    trainer = Trainer(max_epochs=epochs, seed=0, project_dir=project_dir, log_every_n_steps=10)
    result = trainer.fit(
        task, loader(pictures.train, shuffle=True), loader(pictures.val) if len(pictures.val) else None
    )
    quiet = Trainer(seed=0, default_callbacks=False)
    accuracy = quiet.test(task, loader(pictures.test))["test/accuracy"]
    probabilities = quiet.predict(task, loader(pictures.test))
    assert isinstance(probabilities, list)
    return Outcome(result.run_dir, accuracy, torch.stack(probabilities).numpy())


def _write(pictures: Pictures, outcome: Outcome, program: str) -> None:
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
    print(f"curves: {program} dashboard {shlex.quote(str(outcome.run_dir))}")
    print(f"test accuracy: {outcome.accuracy:.4f}", flush=True)
