"""A small vision transformer on handwritten digits, moved from transformers.Trainer.

python examples/migrate/transformers_after.py
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics.classification import MulticlassAccuracy
from transformers import ViTConfig, ViTForImageClassification, get_cosine_schedule_with_warmup

from sanctuary_trainer import Trainer, VisionTask
from sanctuary_trainer.callbacks import Checkpoint, EarlyStopping


class Digits(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def make_datasets():
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    return [Digits(images[i], labels[i]) for i in order.split([1200, 300, 297])]


def make_model():
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=10,
    )
    return ViTForImageClassification(config)


class Classifier(VisionTask):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def validation_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        self.accuracy.update(outputs.logits, batch["labels"])
        self.log_dict({"loss": outputs.loss, "acc": self.accuracy})

    def predict_step(self, batch, batch_idx):
        return self.model(batch["pixel_values"]).logits.argmax(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=0.0)
        scheduler = get_cosine_schedule_with_warmup(optimizer, 20, self.run.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    torch.manual_seed(0)
    train, val, test = make_datasets()
    model = make_model()
    task = Classifier(model)
    trainer = Trainer(
        max_epochs=6,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        seed=0,
        cpu=True,
        callbacks=[Checkpoint(monitor="val/loss", mode="min"), EarlyStopping("val/loss", "min", patience=2)],
    )
    sampler = DistributedSampler(train, num_replicas=1, rank=0, seed=0)
    val_loader = DataLoader(val, batch_size=128)
    result = trainer.fit(task, DataLoader(train, batch_size=64, sampler=sampler), val_loader)
    metrics = trainer.validate(task, val_loader, checkpoint=result)
    predicted = torch.stack(trainer.predict(task, DataLoader(test, batch_size=128)))
    print(f"val/acc {metrics['val/acc']:.4f}, predicted {predicted[:10].tolist()}")
    return model.state_dict(), {"loss": metrics["val/loss"], "acc": metrics["val/acc"]}, predicted


if __name__ == "__main__":
    main()
