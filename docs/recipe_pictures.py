"""Makes the pictures of docs/recipes from runs on handwritten digits. It needs the extras demo, plots and vision.

python docs/recipe_pictures.py

ema.png        the weights and their average, validated
onecycle.png   learning rate and loss over the steps
mixup.png      a batch as the workers give it, and as the model sees it
balance.png    two processes, of which one reads slowly on purpose
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

from sanctuary_trainer import Trainer, VisionTask
from sanctuary_trainer.callbacks import EMA, LoadBalance
from sanctuary_trainer.callbacks.balance_picture import balance_picture
from sanctuary_trainer.cli.processes import run_in_processes

IMAGES = Path(__file__).resolve().parent / "images"
INCHES, DPI = (7, 2.6), 100
SECONDS_PER_IMAGE = 1e-3  # more, on the slow rank
MIXED_IMAGES = 10
SEED_OF_MIXING = 6


def main() -> None:
    images, labels = digits()
    with TemporaryDirectory() as folder:
        average(images, labels, folder)
        cycle(images, labels, folder)
        mix(images, labels)
        balance = run_in_processes(2, unequal, images, labels, folder)
    few(Image.fromarray(balance_picture(balance).transpose(1, 2, 0)), "balance.png")  # from (3, H, W)


def digits() -> tuple[Tensor, Tensor]:
    """(1797, 1, 8, 8) float in [0, 1], (1797,) int64."""
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)


class Digits(VisionTask):
    """A small network; `cycled`: the learning rate follows OneCycle, else it stays."""

    def __init__(self, lr: float, cycled: bool = False) -> None:
        super().__init__()
        self.lr, self.cycled = lr, cycled
        self.model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if not self.cycled:
            return optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.lr, total_steps=self.run.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def average(images: Tensor, labels: Tensor, folder: str) -> None:
    """A learning rate that is too high, so that the weights move about and their average does not."""
    torch.manual_seed(0)
    trainer = Trainer(
        max_epochs=4,
        seed=0,
        val_check_interval=5,
        project_dir=folder,
        log_with=None,
        default_callbacks=False,
        callbacks=[EMA(decay=0.95, warmup=True)],
    )
    train, val = TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])
    result = trainer.fit(Digits(lr=0.2), DataLoader(train, 32, shuffle=True), DataLoader(val, 397))
    figure, axes = plt.subplots(figsize=INCHES, layout="constrained")
    for name in ("val/loss", "val/loss_ema"):
        axes.plot(*series(result.run_dir, name), label=name)
    axes.set(xlabel="step", ylim=(0, 1))
    axes.legend()
    save(figure, "ema.png")


def cycle(images: Tensor, labels: Tensor, folder: str) -> None:
    torch.manual_seed(0)
    trainer = Trainer(
        max_epochs=4, seed=0, log_every_n_steps=4, project_dir=folder, log_with=None, default_callbacks=False
    )
    task = Digits(lr=0.1, cycled=True)
    result = trainer.fit(task, DataLoader(TensorDataset(images, labels), 32, shuffle=True))
    figure, both = plt.subplots(1, 2, figsize=INCHES, layout="constrained")
    for axes, name in zip(both, ("train/lr", "train/loss"), strict=True):
        axes.plot(*series(result.run_dir, name))
        axes.set(xlabel="step", title=name)
    save(figure, "onecycle.png")


def mix(images: Tensor, labels: Tensor) -> None:
    torch.manual_seed(SEED_OF_MIXING)
    batch, classes = images[:MIXED_IMAGES], labels[:MIXED_IMAGES]
    rows = [("loaded", batch, F.one_hot(classes, 10).float())]
    for mixing in (v2.MixUp(num_classes=10, alpha=2.0), v2.CutMix(num_classes=10, alpha=2.0)):
        rows.append((type(mixing).__name__, *mixing(batch, classes)))
    figure, grid = plt.subplots(len(rows), MIXED_IMAGES, figsize=(7, 3), layout="constrained")
    for axes_of_row, (name, shown, targets) in zip(grid, rows, strict=True):
        axes_of_row[0].set_ylabel(name)
        for axes, image, target in zip(axes_of_row, shown, targets, strict=True):
            axes.imshow(image[0], cmap="gray_r", vmin=0, vmax=1)
            shares = [f"{digit}: {share:.0%}" for digit, share in enumerate(target.tolist()) if share]
            axes.set_title("\n".join(shares) if len(shares) > 1 else shares[0][0], fontsize=7, pad=2)
            axes.set(xticks=[], yticks=[])
    save(figure, "mixup.png")


class Slow(TensorDataset):
    """Images whose reading takes its time on rank 1."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if os.environ["RANK"] == "1":
            time.sleep(SECONDS_PER_IMAGE)
        return super().__getitem__(index)


def unequal(images: Tensor, labels: Tensor, folder: str) -> Any:
    platform.node = lambda: "node1"  # the picture need not tell where it was made
    torch.manual_seed(0)
    trainer = Trainer(
        max_epochs=2, seed=0, project_dir=folder, log_with=None, default_callbacks=False, callbacks=[LoadBalance()]
    )
    return trainer.fit(Digits(lr=0.05), DataLoader(Slow(images, labels), 16, shuffle=True)).balance


def series(run_dir: Path, name: str) -> tuple[list[int], list[float]]:
    """The steps and values of one curve."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    points = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in points], [value for _, value in points]


def save(figure: Any, name: str) -> None:
    figure.savefig(IMAGES / name, dpi=DPI)
    plt.close(figure)
    few(Image.open(IMAGES / name).convert("RGB"), name)


def few(picture: Image.Image, name: str) -> None:
    """Saves it with a palette, which makes a third of it."""
    picture.quantize(64, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


if __name__ == "__main__":
    main()
