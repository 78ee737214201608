"""Labelled images that another library holds: Hugging Face's `datasets`, torchvision's, or any map-style data set.

of_dataset("datasets:flowers/")                       saved by save_to_disk, or a hub's name
of_dataset("torchvision:CIFAR10", root="data/")
of_dataset(dataset), of_dataset({"train": ..., "val": ...})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import Subset

from sanctuary_trainer.errors import DataError, SettingsError
from sanctuary_trainer.image_files import BROKEN, SPLITS, as_rgb
from sanctuary_trainer.tasks.image_sources import LabelledImages, Source, as_classes
from sanctuary_trainer.tasks.named_models import library_of
from sanctuary_trainer.tasks.torchvision_sets import torchvision_splits


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
    if isinstance(dataset, str) and dataset.startswith("torchvision:"):
        dataset = torchvision_splits(dataset.partition(":")[2], root, download)
    elif isinstance(dataset, str) and not dataset.startswith("datasets:"):
        raise SettingsError(f"dataset={dataset!r}; expected datasets:FOLDER_OR_HUB_NAME or torchvision:NAME.")
    splits = splits_of(dataset)
    if is_table(splits["train"]):
        return _of_tables(splits, image_column, label_column)
    return _of_pairs(splits)


def splits_of(dataset: Any) -> dict[str, Any]:
    """The data sets by split, "train" among them.

    Args:
        dataset: "datasets:FOLDER_OR_HUB_NAME", one data set, or a mapping of them by split.

    Raises:
        SettingsError: a string names nothing, or `datasets` is missing.
        DataError: it cannot be read, or has no split to train on.
    """
    if isinstance(dataset, str):
        library, _, name = dataset.partition(":")
        if library != "datasets" or not name:
            raise SettingsError(f"dataset={dataset!r}; expected datasets:FOLDER_OR_HUB_NAME, or the data set itself.")
        dataset = _load(name)
    splits = dict(dataset) if isinstance(dataset, Mapping) else {"train": dataset}
    known = {SPLITS[str(name).lower()]: split for name, split in splits.items() if str(name).lower() in SPLITS}
    if "train" not in known:
        raise DataError(f"The data set has no split 'train'; it has: {', '.join(map(str, splits)) or 'none'}.")
    return known


def is_table(dataset: Any) -> bool:
    """Whether a data set is one of Hugging Face."""
    return hasattr(dataset, "features") and hasattr(dataset, "column_names")


def column_kinds(table: Any) -> dict[str, str]:
    """The columns of a Hugging Face data set, by name, with the name of their type.

    Raises:
        DataError: it is a stream.
    """
    if table.features is None or not hasattr(table, "__len__"):
        raise DataError("The data set is a stream; images are drawn by their number: load it without streaming.")
    return {name: type(feature).__name__ for name, feature in table.features.items()}


def no_column(what: str, column: str | None, kinds: Mapping[str, str]) -> DataError:
    """What to tell of a column that is not there."""
    there = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    return DataError(f"The data set has no {what} column{'' if column is None else f' {column!r}'}; it has: {there}.")


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
    kinds = column_kinds(splits["train"])
    image = image_column or next((name for name, kind in kinds.items() if kind == "Image"), None)
    label = label_column or next((name for name, kind in kinds.items() if kind == "ClassLabel"), None)
    label = label or next((name for name in ("label", "labels") if name in kinds), None)
    for what, column in (("image", image), ("label", label)):
        if column not in kinds:
            raise no_column(what, column, kinds)
    names = _class_names(splits["train"], str(label))
    found = {}
    for split, table in splits.items():
        if split != "train" and label not in table.column_names:
            continue  # a test split whose labels are kept secret
        if _class_names(table, str(label)) != names:
            raise DataError(f"The classes of the split {split!r} are named otherwise than those of training.")
        labels = list(table.select_columns([label])[label])
        unlabelled = sum(each in (-1, None) for each in labels)
        if split != "train" and unlabelled == len(labels):
            continue
        if unlabelled:
            raise DataError(f"{unlabelled:,} of the {len(labels):,} images of the split {split!r} have no label.")
        found[split] = LabelledImages(TableImages(table, str(image)), labels, numbered(split, len(labels)))
    return as_classes(found, names)


def _class_names(table: Any, label: str) -> list[str] | None:
    """What a column calls its classes; None where they have no names."""
    names = getattr(table.features[label], "names", None)
    return None if names is None else list(names)


def _of_pairs(splits: dict[str, Any]) -> Source:
    """torchvision's data sets, and others that give pairs (image, number)."""
    found = {}
    for split, pairs in splits.items():
        if not hasattr(pairs, "__getitem__") or not hasattr(pairs, "__len__"):
            raise DataError(f"A {type(pairs).__name__} has no numbered samples; expected dataset[i] and len(dataset).")
        labels = [_whole(label, f"{type(pairs).__name__}[{row}]") for row, label in enumerate(_labels(pairs))]
        found[split] = LabelledImages(PairImages(pairs), labels, numbered(split, len(pairs)))
    names = _attribute(splits["train"], "classes")
    if not names:
        most = max((max(images.labels) for images in found.values() if images.labels), default=-1)
        names = [str(number) for number in range(most + 1)]
    return as_classes(found, [str(name) for name in names])


def _labels(pairs: Any) -> Sequence[Any]:
    """The label of each sample; from `targets`, without reading the images, where those are what the samples have."""
    known = _attribute(pairs, "targets")
    known = _attribute(pairs, "labels") if known is None else known
    if isinstance(pairs, Subset) and known is not None:
        known = [known[row] for row in pairs.indices]
    if known is not None and len(known) == len(pairs) > 0:
        looked = {0, len(pairs) // 2, len(pairs) - 1}
        if all(bool(pairs[row][1] == known[row]) for row in looked):  # not where a transform makes them others
            return list(known)
    return [pairs[row][1] for row in range(len(pairs))]


def _attribute(pairs: Any, name: str) -> Any:
    return getattr(pairs.dataset if isinstance(pairs, Subset) else pairs, name, None)


def _whole(label: Any, where: str) -> int:
    try:
        if int(label) == label:
            return int(label)
    except (TypeError, ValueError):
        pass
    raise DataError(f"The label of {where} is {label!r}; expected the number of a class.")


class TableImages:
    """Reads the images of a Hugging Face data set; only the row that is asked for is decoded."""

    def __init__(self, table: Any, column: str) -> None:
        self.table, self.column = table, column

    def __call__(self, row: int) -> Any:
        try:
            image = self.table[row][self.column]
            return as_rgb(image) if isinstance(image, Image.Image) else image
        except BROKEN as error:
            raise DataError(f"The image of row {row} of the data set cannot be read: {error}") from error


class PairImages:
    """Reads the images of a data set of pairs."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs

    def __call__(self, row: int) -> Any:
        try:
            image = self.pairs[row][0]
            return as_rgb(image) if isinstance(image, Image.Image) else image
        except OSError as error:
            raise DataError(f"The image {row} of the data set cannot be read: {error}") from error


def numbered(split: str, length: int) -> list[str]:
    """Names of rows that have none: "train 17"."""
    return [f"{split} {row}" for row in range(length)]
