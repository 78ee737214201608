"""All of it on one screen: train a network on handwritten digits, measure it, predict.

    python examples/minimal.py
    torchrun --standalone --nproc-per-node 2 examples/minimal.py

The second line runs the same script on two processes; `plain_loop.py` does the same work without the trainer.
"""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from sanctuary_trainer import Trainer, VisionTask


class Digits(VisionTask):
    def __init__(self, width: int = 32, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.model = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(width * 16, 10)),
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch  # (B, 1, 8, 8) float in [0, 1], (B,) int64
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        right = self.model(images).argmax(-1) == labels
        self.log("accuracy", right.float().mean(), prog_bar=True)  # weighted by samples, over all batches and processes

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0]).softmax(-1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def digits() -> list[Subset]:
    """1,438 digits to train on and 359 to test on; they come with scikit-learn."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    # A generator of its own: every process must split alike.
    return random_split(TensorDataset(images, torch.tensor(labels)), [0.8, 0.2], torch.Generator().manual_seed(0))


def main(max_epochs: int = 10, seed: int = 0) -> None:
    torch.manual_seed(seed)  # the first weights
    task = Digits()
    train, test = digits()
    trainer = Trainer(max_epochs=max_epochs, seed=seed)
    result = trainer.fit(task, DataLoader(train, 32, shuffle=True), DataLoader(test, 128))
    probabilities = trainer.predict(task, DataLoader(test, 128))  # one item per sample, in the data set's order
    if os.environ.get("RANK", "0") != "0":
        return  # every process has the results, one prints them
    print(f"accuracy: {result.metrics['val/accuracy']:.4f}")
    print(f"the first digits: {test[:10][1].tolist()}, predicted: {[int(p.argmax()) for p in probabilities[:10]]}")


if __name__ == "__main__":
    main()
