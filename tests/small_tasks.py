"""Small tasks that more than one test trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from sanctuary_trainer import Trainer, VisionTask


def quiet_trainer(**settings: Any) -> Trainer:
    """A Trainer that shows nothing and tracks nothing."""
    defaults: dict[str, Any] = {"log_with": None, "default_callbacks": False, "num_sanity_val_steps": 0, "cpu": True}
    return Trainer(**{**defaults, **settings})


class Numbers(Dataset[Any]):
    """Sample i is the i-th value; keeps what was read."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.values[index]


class NumberStream(IterableDataset[Any]):
    """The same, without a length."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)

    def __iter__(self) -> Any:
        return iter(self.values)


def floats(values: Iterable[float]) -> list[torch.Tensor]:
    return [torch.tensor(float(value), dtype=torch.float64) for value in values]


class Line(VisionTask):
    """One weight w, loss = mean(w * x), so that the gradient is mean(x); SGD with learning rate 1."""

    def __init__(self, learning_rate: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.learning_rate = learning_rate
        self.steps: list[float] = []
        self.batches: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch.tolist())
        return (self.w * batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", (self.w * batch).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch * 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)

    def on_train_step_end(self, run: Any) -> None:
        self.steps.append(self.w.item())


class Net(VisionTask):
    """A float64 network of two layers on 5 features; SGD with momentum."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        return nn.functional.cross_entropy(self.net(features), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        logits = self.net(features)
        self.log("loss", nn.functional.cross_entropy(logits, labels))
        self.log("accuracy", (logits.argmax(-1) == labels).double().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def classes(count: int, seed: int = 1) -> list[tuple[torch.Tensor, int]]:
    """`count` samples of 5 float64 features and a label in 0..2."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (count,), generator=generator).tolist()
    return list(zip(features, labels, strict=True))


def loader(samples: Sequence[Any], batch_size: int | None = 4, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(samples), batch_size=batch_size, **settings)


def weights(task: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in task.parameters()])
