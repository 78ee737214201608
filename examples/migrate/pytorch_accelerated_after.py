"""A small network on handwritten digits, moved from pytorch-accelerated.

python examples/migrate/pytorch_accelerated_after.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from sanctuary_trainer import Trainer, VisionTask
from sanctuary_trainer.callbacks import Checkpoint, EarlyStopping


def make_datasets():
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    return [TensorDataset(images[i], labels[i]) for i in order.split([1200, 300, 297])]


class SmallCNN(VisionTask):
    def __init__(self, width=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(2 * width, 10)
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images):
        return self.head(self.features(images).flatten(1))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.accuracy.update(logits, labels)
        self.log_dict({"loss": F.cross_entropy(logits, labels), "acc": self.accuracy})

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=1e-4)
        steps = self.run.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    torch.manual_seed(0)
    train, val, test = make_datasets()
    model = SmallCNN()
    trainer = Trainer(
        max_epochs=6,
        gradient_clip_val=0.5,
        gradient_clip_algorithm="value",
        seed=0,
        callbacks=[
            EarlyStopping("val/loss", "min", patience=2),
            Checkpoint(monitor="val/loss", mode="min"),
        ],
    )
    result = trainer.fit(model, DataLoader(train, 64), DataLoader(val, 128))
    metrics = trainer.validate(model, DataLoader(val, 128), checkpoint=result)
    predicted = torch.stack(trainer.predict(model, DataLoader(test, 128)))
    print(f"val/acc {metrics['val/acc']:.4f}, predicted {predicted[:10].tolist()}")
    return model.state_dict(), {"loss": metrics["val/loss"], "acc": metrics["val/acc"]}, predicted


if __name__ == "__main__":
    main()
