"""A small vision transformer on handwritten digits, with transformers.Trainer.

python examples/migrate/transformers_before.py
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, DistributedSampler
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)


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


def compute_metrics(prediction):
    return {"acc": (np.argmax(prediction.predictions, -1) == prediction.label_ids).mean()}


class OrderedTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return DistributedSampler(self.train_dataset, num_replicas=1, rank=0, seed=0)


def main():
    set_seed(0)
    train, val, test = make_datasets()
    model = make_model()
    args = TrainingArguments(
        output_dir="runs",
        num_train_epochs=6,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=128,
        learning_rate=5e-3,
        weight_decay=0.0,
        optim="adamw_torch",
        lr_scheduler_type="cosine",
        warmup_steps=20,
        max_grad_norm=1.0,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        report_to="tensorboard",
        use_cpu=True,
    )
    trainer = OrderedTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=val,
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    metrics = trainer.evaluate()
    predicted = torch.tensor(trainer.predict(test).predictions.argmax(-1))
    print(f"val/acc {metrics['eval_acc']:.4f}, predicted {predicted[:10].tolist()}")
    return model.state_dict(), {"loss": metrics["eval_loss"], "acc": metrics["eval_acc"]}, predicted


if __name__ == "__main__":
    main()
