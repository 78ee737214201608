"""torchvision's data sets by name, each split that it has.

torchvision_splits("CIFAR10", Path("data"), download=True)   -> {"train": ..., "test": ...}
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from sanctuary_trainer.errors import DataError
from sanctuary_trainer.image_files import SPLITS
from sanctuary_trainer.tasks.named_models import check_known, library_of


def torchvision_splits(name: str, root: Path | None, download: bool) -> dict[str, Any]:
    """The splits that torchvision has of a data set.

    Args:
        name: of its class.
        root: where its files lie; None: the folder `data`.
        download: fetch what is not there.

    Raises:
        SettingsError: torchvision is missing, or has no such data set.
        DataError: it is not there, or needs more than its name to be made.
    """
    datasets = library_of("torchvision", f"dataset='torchvision:{name}'").datasets
    check_known(name, datasets.__all__, "data set of torchvision")
    make = getattr(datasets, name)
    takes = inspect.signature(make.__init__).parameters
    settings: dict[str, Any] = {"root": str(root or "data")} if "root" in takes else {}
    if "download" in takes or any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        settings["download"] = download
    place = Path(settings.get("root", "."))
    try:
        if not download:
            return _made_splits(make, takes, settings)
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / ".download.lock"):  # one rank fetches, the others find it
            return _made_splits(make, takes, settings)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"torchvision:{name} cannot be read from {place}: {error}. Give root= the folder that holds it, or "
            "download=True."
        ) from error
    except (ValueError, TypeError) as error:
        raise DataError(
            f"torchvision:{name} cannot be made by its name alone: {error}. Make it yourself, and give "
            'dataset={"train": ..., "test": ...}.'
        ) from error


def _made_splits(make: Any, takes: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    if "train" in takes:
        return {"train": make(train=True, **settings), "test": make(train=False, **settings)}
    if "split" not in takes:
        return {"train": make(**settings)}
    splits, refused = {}, []
    for word in ("train", "trainval", "val", "valid", "test"):
        if SPLITS.get(word, "train") not in splits:
            try:
                splits[SPLITS.get(word, "train")] = make(split=word, **settings)
            except ValueError as error:  # it has no such split
                refused.append(error)
    if "train" not in splits:
        raise refused[0]
    return splits
