"""A small network on handwritten digits, in a loop of one's own with accelerate.

accelerate launch examples/migrate/accelerate_before.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

EPOCHS, BATCH_SIZE, LR, PATIENCE = 6, 64, 1e-2, 2


def make_loaders():
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    train, val, test = (TensorDataset(images[i], labels[i]) for i in order.split([1200, 300, 297]))
    sampler = DistributedSampler(train, num_replicas=1, rank=0, seed=0)
    return DataLoader(train, BATCH_SIZE, sampler=sampler), DataLoader(val, 128), DataLoader(test, 128)


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


def validate(accelerator, model, loader):
    model.eval()
    accuracy = MulticlassAccuracy(10, average="micro").to(accelerator.device)
    total, count = 0.0, 0
    with torch.inference_mode():
        for images, labels in loader:
            logits, labels = accelerator.gather_for_metrics((model(images), labels))
            accuracy.update(logits, labels)
            total += F.cross_entropy(logits, labels).item() * len(labels)
            count += len(labels)
    return {"val/loss": total / count, "val/acc": accuracy.compute().item()}


def main():
    set_seed(0)
    accelerator = Accelerator(log_with="tensorboard", project_dir="runs")
    accelerator.init_trackers("digits")
    train, val, test = make_loaders()
    model = SmallCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=EPOCHS * len(train))
    model, optimizer, train, val, test, scheduler = accelerator.prepare(model, optimizer, train, val, test, scheduler)

    step, best, bad = 0, float("inf"), 0
    for epoch in range(EPOCHS):
        model.train()
        train.set_epoch(epoch)
        for images, labels in train:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                accelerator.log({"train/loss": loss.item(), "train/lr": scheduler.get_last_lr()[0]}, step=step)
        metrics = validate(accelerator, model, val)
        accelerator.log(metrics, step=step)
        accelerator.print(f"epoch {epoch}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        if metrics["val/loss"] < best:
            best, bad = metrics["val/loss"], 0
            accelerator.save_state("runs/best")
        else:
            bad += 1
            if bad >= PATIENCE:
                break

    accelerator.load_state("runs/best")
    metrics = validate(accelerator, model, val)
    model.eval()
    predicted = []
    with torch.inference_mode():
        for images, _ in test:
            predicted.append(accelerator.gather_for_metrics(model(images).argmax(-1)).cpu())
    predicted = torch.cat(predicted)
    accelerator.print(f"val/acc {metrics['val/acc']:.4f}, predicted {predicted[:10].tolist()}")
    accelerator.end_training()
    return accelerator.unwrap_model(model).state_dict(), metrics, predicted


if __name__ == "__main__":
    main()
