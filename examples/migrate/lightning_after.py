"""A small network on handwritten digits, moved from PyTorch Lightning.

python examples/migrate/lightning_after.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from sanctuary_trainer import Trainer, VisionTask
from sanctuary_trainer.callbacks import Checkpoint, EarlyStopping


class DigitsData:
    def __init__(self, batch_size: int = 64, num_workers: int = 0):
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def setup(self, stage):
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8)
        labels = torch.tensor(labels)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
        first, second, third = order[:1200], order[1200:1500], order[1500:]
        self.train = TensorDataset(images[first], labels[first])
        self.val = TensorDataset(images[second], labels[second])
        self.test = TensorDataset(images[third], labels[third])

    def train_dataloader(self):
        sampler = DistributedSampler(self.train, num_replicas=1, rank=0, seed=0)
        return DataLoader(self.train, batch_size=self.batch_size, sampler=sampler, num_workers=self.num_workers)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=128, num_workers=self.num_workers)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=128, num_workers=self.num_workers)

    def predict_dataloader(self):
        return DataLoader(self.test, batch_size=128, num_workers=self.num_workers)


class DigitsModule(VisionTask):
    def __init__(self, width: int = 16, lr: float = 1e-2, weight_decay: float = 1e-4):
        super().__init__()
        self.save_hyperparameters()
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
        self.val_acc = MulticlassAccuracy(10, average="micro")
        self.test_acc = MulticlassAccuracy(10, average="micro")
        self.test_f1 = MulticlassF1Score(10)

    def forward(self, images):
        return self.head(self.features(images).flatten(1))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.val_acc.update(logits, labels)
        self.log("val/loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val/acc", self.val_acc, prog_bar=True)

    def on_evaluation_end(self, run, stage, metrics):
        if stage == "val":
            print(f"epoch {run.state.epoch}: {metrics['val/acc']:.4f}")

    def test_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.test_acc.update(logits, labels)
        self.test_f1.update(logits, labels)
        self.log_dict({"test/acc": self.test_acc, "test/f1": self.test_f1})

    def predict_step(self, batch, batch_idx):
        images, _ = batch
        return self(images).argmax(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr, weight_decay=self.hparams.weight_decay)
        steps = self.run.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    torch.manual_seed(0)
    data, module = DigitsData(), DigitsModule()
    best = Checkpoint(monitor="val/acc", mode="max", name="best")
    trainer = Trainer(
        max_epochs=6,
        cpu=True,
        seed=0,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        callbacks=[best, EarlyStopping(monitor="val/loss", mode="min", patience=2)],
    )
    result = trainer.fit(module, data=data)
    last = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    validated = trainer.validate(module, data=data, checkpoint=result)
    tested = trainer.test(module, data=data, checkpoint=result)
    module = DigitsModule.load_from_checkpoint(result.best_checkpoint)
    predicted = torch.stack(trainer.predict(module, data=data))
    print(f"val/acc {validated['val/acc']:.4f}, test/acc {tested['test/acc']:.4f}, predicted {predicted[:10].tolist()}")
    return last, {**validated, **tested}, predicted


if __name__ == "__main__":
    main()
