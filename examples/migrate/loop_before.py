"""A small network on handwritten digits, in a loop of one's own.

python examples/migrate/loop_before.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from torchmetrics.classification import MulticlassAccuracy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


@torch.inference_mode()
def validate(model, loader):
    model.eval()
    accuracy = MulticlassAccuracy(10, average="micro").to(DEVICE)
    total, count = 0.0, 0
    for images, labels in loader:
        images, labels = images.to(DEVICE), labels.to(DEVICE)
        logits = model(images)
        accuracy.update(logits, labels)
        total += F.cross_entropy(logits, labels).item() * len(labels)
        count += len(labels)
    return {"val/loss": total / count, "val/acc": accuracy.compute().item()}


@torch.inference_mode()
def predict(model, loader):
    model.eval()
    return torch.cat([model(images.to(DEVICE)).argmax(-1).cpu() for images, _ in loader])


def main():
    torch.manual_seed(0)
    train, val, test = make_loaders()
    model = SmallCNN().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=EPOCHS * len(train))
    writer = SummaryWriter("runs")

    step, best, bad = 0, float("inf"), 0
    for epoch in range(EPOCHS):
        model.train()
        train.sampler.set_epoch(epoch)
        for images, labels in train:
            images, labels = images.to(DEVICE), labels.to(DEVICE)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                writer.add_scalar("train/loss", loss.item(), step)
                writer.add_scalar("train/lr", scheduler.get_last_lr()[0], step)
        metrics = validate(model, val)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        print(f"epoch {epoch}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        if metrics["val/loss"] < best:
            best, bad = metrics["val/loss"], 0
            torch.save(model.state_dict(), "runs/best.pt")
        else:
            bad += 1
            if bad >= PATIENCE:
                break
    writer.close()

    model.load_state_dict(torch.load("runs/best.pt"))
    metrics = validate(model, val)
    predicted = predict(model, test)
    print(f"val/acc {metrics['val/acc']:.4f}, predicted {predicted[:10].tolist()}")
    return model.state_dict(), metrics, predicted


if __name__ == "__main__":
    main()
