"""`ImageData`: labelled images of any source, as the loaders that `ImageClassification` is trained and tested with.

data = ImageData("flowers/", batch_size=32)
task = ImageClassification("timm:resnet18", class_names=data.class_names)
data.adapt(task)                                     images as this model wants them
trainer.fit(task, data.train_dataloader(), data.val_dataloader())
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from torch.utils.data import Dataset

from sanctuary_trainer.errors import DataError, SettingsError
from sanctuary_trainer.tasks.held_out import Part, check_shares, hold_out
from sanctuary_trainer.tasks.image_datasets import of_dataset
from sanctuary_trainer.tasks.image_sources import Source, of_csv, of_folder
from sanctuary_trainer.tasks.model_inputs import ModelInputs, plain_inputs
from sanctuary_trainer.tasks.split_loaders import SplitLoaders, check_size


@final
class ImageData(SplitLoaders):
    """Loaders of labelled images: batches of images (B, 3, H, W) and labels (B,).

    Nothing is decoded before it is asked for. Where the source has one split only, a tenth of each class is held out
    for the test and a tenth of the rest for validation, always the same. Where it has several, they are taken as they
    are, and only a missing validation is held out.

    Args:
        root: a folder with one folder per class, or with train, val and test of these; or a CSV file with the columns
            path and label, perhaps split, whose paths are relative to it; or where torchvision's data set lies.
        dataset: "datasets:FOLDER_OR_HUB_NAME", "torchvision:NAME", or a data set of Hugging Face, of torchvision, or of
            pairs (image, number); or a mapping of these by split.
        predict_root: a folder of images without labels, for `predict`; None: the images of the test, or of validation.
        batch_size: images of a batch, on each rank.
        num_workers: processes that read images, of each loader on each rank.
        image_size: pixels a side, for a model that does not say what it wants.
        augment: train on random parts of the images, flipped in half of the cases; False: as in evaluation.
        transform: of a PIL image in evaluation, and in training unless train_transform is given; None: the model's.
        train_transform: of a PIL image in training.
        val_share: of each class, in [0, 1), that is held out for validation.
        test_share: of each class, in [0, 1), that is held out for the test.
        image_column: of a CSV file (the path) or a Hugging Face data set; None: found by name or type.
        label_column: of a CSV file or a Hugging Face data set; None: found by name or type.
        download: let torchvision fetch a data set that is not there.

    Attributes:
        class_names: what the classes are called, by their number.

    Raises:
        SettingsError: the arguments name no source, or a share or size is out of its range.
        DataError: the source cannot be used: no images, one class, a file or a column that is missing.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        dataset: Any = None,
        predict_root: str | Path | None = None,
        batch_size: int = 32,
        num_workers: int = 2,
        image_size: int = 224,
        augment: bool = True,
        transform: Callable[[Any], Any] | None = None,
        train_transform: Callable[[Any], Any] | None = None,
        val_share: float = 0.1,
        test_share: float = 0.1,
        image_column: str | None = None,
        label_column: str | None = None,
        download: bool = False,
    ) -> None:
        super().__init__(predict_root, batch_size, num_workers)
        check_size(image_size)
        check_shares(val_share, test_share)
        if root is None and dataset is None and predict_root is None:
            raise SettingsError("ImageData needs root=, dataset= or, to predict alone, predict_root=.")
        self.image_size, self.augment = image_size, augment
        self.transform, self.train_transform = transform, train_transform
        if root is not None or dataset is not None:
            source = _read(None if root is None else Path(root), dataset, image_column, label_column, download)
            self.class_names = source.class_names
            self._splits = hold_out(source.splits, val_share, test_share, source.splits["train"].labels)

    def _samples(self, part: Part, is_training: bool) -> Dataset[Any]:
        return _Samples(part, self._train_transform() if is_training else self._transform_alone())

    def _transform_alone(self) -> Callable[[Any], Any]:
        return self.transform or self._wanted.transform

    def _train_transform(self) -> Callable[[Any], Any]:
        given = self.train_transform or self.transform
        return given or (self._wanted.augment() if self.augment else self._wanted.transform)

    @property
    def _wanted(self) -> ModelInputs:
        return self._inputs or plain_inputs(self.image_size)


class _Samples(Dataset[Any]):
    """(image, label) by number."""

    def __init__(self, part: Part, transform: Callable[[Any], Any]) -> None:
        self.images, self.rows = part
        self.transform = transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = self.rows[index]
        return self.transform(self.images.read(row)), self.images.labels[row]


def _read(
    root: Path | None, dataset: Any, image_column: str | None, label_column: str | None, download: bool
) -> Source:
    if dataset is not None:
        return of_dataset(dataset, root, image_column, label_column, download)
    assert root is not None
    if root.is_dir():
        if (root / "dataset_dict.json").is_file() or (root / "dataset_info.json").is_file():
            return of_dataset(f"datasets:{root}", None, image_column, label_column)
        return of_folder(root)
    if root.suffix.lower() == ".csv" and root.is_file():
        return of_csv(root, image_column, label_column)
    found = "is a file, but no CSV" if root.exists() else "does not exist"
    raise DataError(f"root={root} {found}; expected a folder of images per class, or a CSV file with path and label.")
