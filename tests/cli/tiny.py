"""Tasks and data that the tests of the command line name."""

from abc import abstractmethod
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sanctuary_trainer import Callback, DataError, VisionTask


class Typed(VisionTask):
    """A line through three numbers.

    Args:
        lr: how far an update goes.
        class_names: what the outputs are called.
    """

    def __init__(self, lr: float = 0.1, width: int = 2, class_names: list[str] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.class_names = lr, class_names
        self.model = nn.Linear(3, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.model(batch[0]).square().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Untyped(Typed):
    def __init__(self, lr=0.1, width=2, flag=False, name=None):  # type: ignore[no-untyped-def]  # as many people write
        super().__init__(lr, width)


class Broken(Typed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ZeroDivisionError("the user's own mistake")


class Half(Typed):
    @abstractmethod
    def loss(self) -> None: ...


class Data:
    class_names = ("a", "b")

    def __init__(self, batch_size: int = 4) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        images = torch.arange(24.0).reshape(8, 3) / 24
        return DataLoader(TensorDataset(images), self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Torn:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> Any:
        raise DataError(f"image {row + 3} cannot be read")


class Unreadable(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(Torn(), self.batch_size, num_workers=1)  # type: ignore[arg-type]


class Needing(Callback):
    def __init__(self, how):  # type: ignore[no-untyped-def]  # as many people write
        self.how = how


class Chosen(Callback):
    def __init__(self, kind: Literal["a", "b"] = "a") -> None:
        self.kind = kind


class Every(Callback):
    def __init__(self, every: int = 3) -> None:
        self.every = every
