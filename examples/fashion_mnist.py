"""Fashion-MNIST in minutes on two CPU cores, beside the results that others published.

    python examples/fashion_mnist.py [FOLDER]

FOLDER holds the data set's four files; without one those of Debian's package are read
(`apt install dataset-fashion-mnist`). All 60,000 training images are trained on, nothing is chosen by the test images,
and those are looked at once, at the end.
"""

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sanctuary_trainer import Trainer, VisionTask

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def read(folder: Path, part: str) -> TensorDataset:
    """Images (N, 1, 28, 28) uint8 and labels (N,) int64 of the "train" or the "t10k" part."""
    images, labels = (
        np.frombuffer(gzip.decompress((folder / f"{part}-{name}-ubyte.gz").read_bytes()), np.uint8, offset=offset)
        for name, offset in (("images-idx3", 16), ("labels-idx1", 8))
    )
    return TensorDataset(torch.tensor(images).reshape(-1, 1, 28, 28), torch.tensor(labels, dtype=torch.int64))


def convolution(channels_in: int, channels_out: int, pool: bool = False) -> nn.Sequential:
    # Pooling comes before batch norm and ReLU, which then have a quarter of the work: a fifth of the whole time.
    layers = [nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)]
    layers += [nn.MaxPool2d(2)] if pool else []
    return nn.Sequential(*layers, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(convolution(channels, channels), convolution(channels, channels))

    def forward(self, images: Tensor) -> Tensor:
        return images + self.layers(images)


class FashionMNIST(VisionTask):
    def __init__(self, width: int = 32, lr: float = 0.1, weight_decay: float = 5e-4, smoothing: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            convolution(1, width, pool=True),  # 14 x 14
            convolution(width, 2 * width, pool=True),  # 7 x 7
            Residual(2 * width),
            convolution(2 * width, 4 * width, pool=True),  # 3 x 3
            Residual(4 * width),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )

    def on_after_batch_to_device(self, batch, stage):
        images, labels = batch  # (B, 1, 28, 28) uint8, (B,) int64
        if stage == "train":
            images = mirror(shift(images, most=2))
        return (images / 255 - 0.286) / 0.353, labels

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.model(images)
        self.log("accuracy", (logits.argmax(-1) == labels).float().mean(), on_epoch=True, prog_bar=True)
        return F.cross_entropy(logits, labels, label_smoothing=self.hparams["smoothing"])

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(-1) == labels).float().mean())

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0]).softmax(-1)

    def configure_optimizers(self):
        lr, steps = self.hparams["lr"], self.run.estimated_stepping_batches
        # Weights of batch norm and biases are vectors, which weight decay would only hinder.
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.ndim == 1]
        groups = [{"params": matrices, "weight_decay": self.hparams["weight_decay"]}, {"params": vectors}]
        optimizer = torch.optim.SGD(groups, lr, momentum=0.9, nesterov=True)
        # Up for a fifth of the steps, then down to nothing: most of the accuracy comes in the last epochs.
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            lr,
            total_steps=steps,
            pct_start=0.2,
            anneal_strategy="linear",
            div_factor=10,
            cycle_momentum=False,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def shift(images: Tensor, most: int) -> Tensor:
    """Moves each image by up to `most` pixels to any side."""
    count, _, height, width = images.shape
    rows, columns = (
        torch.randint(2 * most + 1, (count, 1), device=images.device) + torch.arange(size, device=images.device)
        for size in (height, width)
    )
    each = torch.arange(count, device=images.device)[:, None, None]
    return F.pad(images, [most] * 4)[each, 0, rows[:, :, None], columns[:, None, :]][:, None]


def mirror(images: Tensor) -> Tensor:
    """Turns half of the images left to right."""
    half = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(half, images.flip(-1), images)


# Test accuracies as submitted by their authors and not tested by the data set's:
# the table in https://github.com/zalandoresearch/fashion-mnist, also in the Debian package's README.md.
PUBLISHED = """
0.9670 WRN40-4 8.9M params
0.9630 WRN-28-10 + Random Erasing
0.9590 WRN-28-10
0.9570 Dual path network with wide resnet 28-10
0.9540 DenseNet-BC 768K params
0.9530 DENSER
0.9500 MobileNet
0.9490 ResNet18
0.9470 CNN with optional shortcuts, dense-like connectivity
0.9390 2 Conv+2 FC
0.9390 Google AutoML
0.9370 GoogleNet with cross-entropy loss
0.9360 Capsule Network 8M parameters
0.9350 VGG16 26M parameters
0.9340 2 Conv+3 FC ~500K parameters
0.9340 2 Conv+pooling+BN
0.9320 2 Conv+3 FC ~1.8M parameters
0.9310 5 Conv+BN+pooling
0.9260 3 Conv+pooling+2 FC+dropout
0.9260 HOG+SVM
0.9250 2 Conv <100K parameters
0.9220 2 Conv ~113K parameters
0.9210 3 Conv+BN+pooling
0.9190 2 Conv
0.9160 2 Conv+pooling
0.9070 3 Conv+2 FC
0.9060 Dyra-Net
0.9030 2 Conv+pooling+ELU activation (PyTorch)
0.9030 3 Conv+pooling+BN
0.9000 SqueezeNet with cyclical learning rate 200 epochs
0.8990 AlexNet with Triplet loss
0.8980 XgBoost
0.8970 GRU+SVM with dropout
0.8880 GRU+SVM
0.8833 MLP 256-128-100
0.8760 2 Conv+pooling
0.8350 Human Performance
"""


def main(folder: Path = DEBIAN, max_epochs: int = 10, limit_train_batches: int | None = None) -> None:
    torch.manual_seed(0)
    task = FashionMNIST()
    trainer = Trainer(max_epochs=max_epochs, limit_train_batches=limit_train_batches, channels_last=True, seed=0)
    trainer.fit(task, DataLoader(read(folder, "train"), batch_size=128, shuffle=True))
    accuracy = trainer.test(task, DataLoader(read(folder, "t10k"), batch_size=500))["test/accuracy"]
    if os.environ.get("RANK", "0") != "0":
        return  # every process has the results, one prints them

    rows = [(float(line[:6]), line[7:]) for line in PUBLISHED.strip().splitlines()]
    rows.append((accuracy, f"this network after {max_epochs} epochs <---"))
    for value, name in sorted(rows, reverse=True):
        print(f"{value:.4f}  {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains on Fashion-MNIST.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEBIAN, help="holds the four .gz files")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    main(arguments.folder, arguments.epochs)
