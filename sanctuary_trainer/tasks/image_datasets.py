"""Labelled images that another library holds: Hugging Face's `datasets`, torchvision's, or any map-style data set.

of_dataset("datasets:flowers/")                       saved by save_to_disk, or a hub's name
of_dataset("torchvision:CIFAR10", root="data/")
of_dataset(dataset), of_dataset({"train": ..., "val": ...})
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from sanctuary_trainer.errors import DataError, SettingsError
from sanctuary_trainer.image_files import as_rgb
from sanctuary_trainer.tasks.image_sources import SPLITS, LabelledImages, Source, as_classes
from sanctuary_trainer.tasks.named_models import check_known, library_of


def of_dataset(
    dataset: Any,
    root: Path | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    download: bool = False,
) -> Source:
    """Find images, labels and names in a data set.

    Args:
        dataset: "datasets:FOLDER_OR_HUB_NAME", "torchvision:NAME", a data set of either, another map-style one of pairs
            (image, number), or a mapping of these by split.
        root: where torchvision's files lie.
        image_column, label_column: of a Hugging Face data set; None: found by the columns' types.
        download: let torchvision fetch what is not there.

    Raises:
        SettingsError: a string names nothing, or its library is missing.
        DataError: the data set cannot be read, or has not what is needed.
    """
    if isinstance(dataset, str):
        library, _, name = dataset.partition(":")
        if library not in ("datasets", "torchvision") or not name:
            raise SettingsError(f"dataset={dataset!r}; expected datasets:FOLDER_OR_HUB_NAME or torchvision:NAME.")
        dataset = _load(name) if library == "datasets" else _torchvision_splits(name, root, download)
    splits = dict(dataset) if isinstance(dataset, Mapping) else {"train": dataset}
    known = {SPLITS[name.lower()]: split for name, split in splits.items() if name.lower() in SPLITS}
    if "train" not in known:
        raise DataError(f"The data set has no split 'train'; it has: {', '.join(map(str, splits)) or 'none'}.")
    if hasattr(known["train"], "features"):
        return _of_tables(known, image_column, label_column)
    return _of_pairs(known)


def _load(name: str) -> Any:
    datasets = library_of("datasets", f"dataset='datasets:{name}'", "datasets")
    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise DataError(
            f"The data set {name!r} cannot be read: {first_line} It is neither a folder of save_to_disk nor was it to "
            "be had from the hub: check the name and the network."
        ) from error


def _of_tables(splits: dict[str, Any], image_column: str | None, label_column: str | None) -> Source:
    """Data sets of Hugging Face."""
    features = splits["train"].features
    if features is None or not hasattr(splits["train"], "__getitem__"):
        raise DataError("The data set is a stream; images are drawn by their number: load it without streaming.")
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    image = image_column or next((name for name, kind in kinds.items() if kind == "Image"), None)
    label = label_column or next((name for name, kind in kinds.items() if kind == "ClassLabel"), None)
    label = label or next((name for name in ("label", "labels") if name in kinds), None)
    for what, column in (("image", image), ("label", label)):
        if column not in kinds:
            there = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
            raise DataError(f"The data set has no {what} column {column or ''}; its columns are: {there}.")
    names = list(features[label].names) if kinds[label] == "ClassLabel" else None
    found = {}
    for split, table in splits.items():
        labels = list(table.select_columns([label])[label])
        if split != "train" and set(labels) <= {-1, None}:
            continue  # a test split whose labels are kept secret
        if unlabelled := sum(each in (-1, None) for each in labels):
            raise DataError(f"{unlabelled:,} of the {len(labels):,} images of the split {split!r} have no label.")
        found[split] = LabelledImages(TableImages(table, str(image)), labels, _numbered(split, len(labels)))
    return as_classes(found, names)


def _of_pairs(splits: dict[str, Any]) -> Source:
    """torchvision's data sets, and others that give pairs (image, number)."""
    found = {}
    for split, pairs in splits.items():
        if not hasattr(pairs, "__getitem__") or not hasattr(pairs, "__len__"):
            raise DataError(f"A {type(pairs).__name__} has no numbered samples; expected dataset[i] and len(dataset).")
        labels = getattr(pairs, "targets", getattr(pairs, "labels", None))
        if labels is None or len(labels) != len(pairs):
            labels = [pairs[row][1] for row in range(len(pairs))]  # no other way to know them: reads every image once
        try:
            numbers = [int(label) for label in labels]
        except (TypeError, ValueError) as error:
            raise DataError(f"Labels of a {type(pairs).__name__} are no numbers of classes: {error}") from error
        found[split] = LabelledImages(PairImages(pairs), numbers, _numbered(split, len(pairs)))
    names = getattr(splits["train"], "classes", None)
    if not names:
        most = max((max(images.labels) for images in found.values() if images.labels), default=-1)
        names = [str(number) for number in range(most + 1)]
    return as_classes(found, [str(name) for name in names])


def _torchvision_splits(name: str, root: Path | None, download: bool) -> dict[str, Any]:
    datasets = library_of("torchvision", f"dataset='torchvision:{name}'").datasets
    check_known(name, datasets.__all__, "data set of torchvision")
    make = getattr(datasets, name)
    takes = inspect.signature(make.__init__).parameters
    settings: dict[str, Any] = {"root": str(root or "data")} if "root" in takes else {}
    if "download" in takes:
        settings["download"] = download
    try:
        if "train" in takes:
            return {"train": make(train=True, **settings), "test": make(train=False, **settings)}
        if "split" not in takes:
            return {"train": make(**settings)}
        splits = {"train": make(split="train", **settings)}
        for split in ("val", "test"):
            try:
                splits[split] = make(split=split, **settings)
            except ValueError:  # it has no such split
                continue
        return splits
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise DataError(
            f"torchvision:{name} cannot be read from {settings.get('root', 'nowhere')}: {error}. Give root= the folder "
            "that holds it, or download=True."
        ) from error


class TableImages:
    """Reads the images of a Hugging Face data set; only the row that is asked for is decoded."""

    def __init__(self, table: Any, column: str) -> None:
        self.table, self.column = table, column

    def __call__(self, row: int) -> Any:
        try:
            image = self.table[row][self.column]
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"The image of row {row} of the data set cannot be read: {error}") from error
        return as_rgb(image) if isinstance(image, Image.Image) else image


class PairImages:
    """Reads the images of a data set of pairs."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs

    def __call__(self, row: int) -> Any:
        image = self.pairs[row][0]
        return as_rgb(image) if isinstance(image, Image.Image) else image


def _numbered(split: str, length: int) -> list[str]:
    """Names of rows that have none: "train 17"."""
    return [f"{split} {row}" for row in range(length)]
