"""A small network on handwritten digits, moved from a loop of one's own with accelerate.

accelerate launch examples/migrate/accelerate_after.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from sanctuary_trainer import Trainer, VisionTask
from sanctuary_trainer.callbacks import Checkpoint, EarlyStopping

EPOCHS, BATCH_SIZE, LR, PATIENCE = 6, 64, 1e-2, 2


def make_loaders():
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    train, val, test = (TensorDataset(images[i], labels[i]) for i in order.split([1200, 300, 297]))
    sampler = DistributedSampler(train, num_replicas=1, rank=0, seed=0)
    return DataLoader(train, BATCH_SIZE, sampler=sampler), DataLoader(val, 128), DataLoader(test, 128)


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
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=1e-4)
        steps = self.run.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    torch.manual_seed(0)
    train, val, test = make_loaders()
    model = SmallCNN()
    best = Checkpoint(monitor="val/loss", mode="min")
    stop = EarlyStopping("val/loss", "min", PATIENCE)
    trainer = Trainer(max_epochs=EPOCHS, gradient_clip_val=1.0, log_every_n_steps=10, seed=0, callbacks=[best, stop])
    result = trainer.fit(model, train, val)
    metrics = trainer.validate(model, val, checkpoint=result)
    predicted = torch.stack(trainer.predict(model, test))
    print(f"val/acc {metrics['val/acc']:.4f}, predicted {predicted[:10].tolist()}")
    return model.state_dict(), metrics, predicted


if __name__ == "__main__":
    main()
