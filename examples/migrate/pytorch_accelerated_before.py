"""A small network on handwritten digits, with pytorch-accelerated.

python examples/migrate/pytorch_accelerated_before.py
"""

from functools import partial

import torch
from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    LogMetricsCallback,
    PrintProgressCallback,
    SaveBestModelCallback,
    TrainerCallback,
)
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


def make_datasets():
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    return [TensorDataset(images[i], labels[i]) for i in order.split([1200, 300, 297])]


class SmallCNN(nn.Module):
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

    def forward(self, images):
        return self.head(self.features(images).flatten(1))


class AccuracyCallback(TrainerCallback):
    def __init__(self):
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def on_training_run_start(self, trainer, **kwargs):
        self.accuracy.to(trainer.device)

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        logits, labels = trainer.gather(batch_output["model_outputs"]), trainer.gather(batch[1])
        self.accuracy.update(logits, labels)

    def on_eval_epoch_end(self, trainer, **kwargs):
        trainer.run_history.update_metric("accuracy", self.accuracy.compute().item())
        self.accuracy.reset()


def main():
    torch.manual_seed(0)
    train, val, test = make_datasets()
    model = SmallCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4)
    schedule = partial(
        torch.optim.lr_scheduler.OneCycleLR,
        max_lr=1e-2,
        epochs=TrainerPlaceholderValues.NUM_EPOCHS,
        steps_per_epoch=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
    )
    trainer = Trainer(
        model=model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        callbacks=[
            AccuracyCallback(),
            PrintProgressCallback(),
            LogMetricsCallback(),
            EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.0),
            SaveBestModelCallback(),
        ],
    )
    trainer.train(
        train_dataset=train,
        eval_dataset=val,
        num_epochs=6,
        per_device_batch_size=64,
        gradient_clip_value=0.5,
        create_scheduler_fn=schedule,
        train_dataloader_kwargs={"shuffle": False, "drop_last": False, "num_workers": 0},
        eval_dataloader_kwargs={"batch_size": 128, "num_workers": 0},
    )
    trainer.evaluate(dataset=val, per_device_batch_size=128, dataloader_kwargs={"num_workers": 0})
    loss = trainer.run_history.get_latest_metric("evaluation_loss")
    accuracy = trainer.run_history.get_latest_metric("accuracy")

    model = trainer.get_model()
    model.eval()
    with torch.inference_mode():
        batches = [model(images.to(trainer.device)).argmax(-1).cpu() for images, _ in DataLoader(test, 128)]
    predicted = torch.cat(batches)
    print(f"val/acc {accuracy:.4f}, predicted {predicted[:10].tolist()}")
    return model.state_dict(), {"loss": loss, "acc": accuracy}, predicted


if __name__ == "__main__":
    main()
