"""What all ready-made data have in common: loaders of a source's parts, and of images to predict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, Dataset

from sanctuary_trainer.errors import DataError, SettingsError
from sanctuary_trainer.image_files import find_images
from sanctuary_trainer.tasks.held_out import Part
from sanctuary_trainer.tasks.image_sources import ImageFiles
from sanctuary_trainer.tasks.model_inputs import ModelInputs


class SplitLoaders(ABC):
    """Loaders of "train", "val" and "test"; nothing is decoded before it is asked for.

    Attributes:
        class_names: what the classes are called, by their number; None where there are only images to predict.
    """

    collate: ClassVar[Any] = None  # of samples, and of images to predict; None: torch's own
    collate_unlabelled: ClassVar[Any] = None
    class_names: list[str] | None = None

    def __init__(self, predict_root: str | Path | None, batch_size: int, num_workers: int) -> None:
        if batch_size < 1 or num_workers < 0:
            raise SettingsError(
                f"batch_size={batch_size}, num_workers={num_workers}; expected batch_size >= 1 and num_workers >= 0."
            )
        self.predict_root = None if predict_root is None else Path(predict_root)
        self.batch_size, self.num_workers = batch_size, num_workers
        self._inputs: ModelInputs | None = None
        self._splits: dict[str, Part] = {}

    def adapt(self, task: Any) -> None:
        """Take the size and the normalisation that belong to a ready-made task's model, where none were given."""
        self._inputs = getattr(task, "inputs", None)

    def names(self, split: str) -> list[str]:
        """What the images of a split are called, in order: their paths, or their places.

        Args:
            split: "train", "val", "test", or "predict", the images of `predict_dataloader`.

        Raises:
            SettingsError: it is none of these.
        """
        if split not in ("train", "val", "test", "predict"):
            raise SettingsError(f"There is no split {split!r}; expected train, val, test or predict.")
        if split == "predict":
            if self.predict_root is not None:
                return list(map(str, self._to_predict()))
            split = "test" if "test" in self._splits else "val"
        part = self._splits.get(split)
        return [] if part is None else [part.images.names[row] for row in part.rows]

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches, augmented.

        Raises:
            DataError: there are only images to predict.
        """
        if "train" not in self._splits:
            raise DataError("There is nothing to train on: give root= or dataset=, with labels.")
        return self._loader(self._samples(self._splits["train"], is_training=True), self.collate, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any] | None:
        """The validation's batches, in order; None where there are none."""
        return self._evaluated("val")

    def test_dataloader(self) -> DataLoader[Any] | None:
        """The test's batches, in order; None where there are none."""
        return self._evaluated("test")

    def predict_dataloader(self) -> DataLoader[Any] | None:
        """Images alone, of `predict_root`, in the order of their paths; else the test's or the validation's batches.

        Raises:
            DataError: predict_root is no folder with images.
        """
        if self.predict_root is None:
            return self.test_dataloader() or self.val_dataloader()
        files = ImageFiles(self._to_predict())
        return self._loader(Unlabelled(files, self._transform_alone()), self.collate_unlabelled)

    def _to_predict(self) -> list[Path]:
        assert self.predict_root is not None
        if not self.predict_root.is_dir():
            raise DataError(f"predict_root={self.predict_root} is no folder.")
        paths = find_images(self.predict_root)
        if not paths:
            raise DataError(f"The folder {self.predict_root} holds no images to predict.")
        return paths

    @abstractmethod
    def _samples(self, part: Part, is_training: bool) -> Dataset[Any]:
        """The samples of a part, transformed."""

    @abstractmethod
    def _transform_alone(self) -> Callable[[Any], Any]:
        """What an image to predict goes through."""

    def _evaluated(self, split: str) -> DataLoader[Any] | None:
        if split not in self._splits:
            return None
        return self._loader(self._samples(self._splits[split], is_training=False), self.collate)

    def _loader(self, samples: Dataset[Any], collate: Any, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            samples,
            self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.accelerator.is_available(),
        )


class Unlabelled(Dataset[Any]):
    """Images by number."""

    def __init__(self, files: ImageFiles, transform: Callable[[Any], Any]) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files.paths)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.files(index))


def check_size(image_size: int) -> None:
    """Raise a SettingsError for a side that no image has."""
    if image_size < 1:
        raise SettingsError(f"image_size={image_size}; expected at least 1 pixel.")
