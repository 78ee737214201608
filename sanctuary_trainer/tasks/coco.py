"""COCO's JSON files: images with boxes.

of_coco("birds.json")       one file; images beside it, in `images`, or where images= says
of_coco("birds/")           annotations/instances_train2017.json with train2017/; train/_annotations.coco.json
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sanctuary_trainer.errors import DataError
from sanctuary_trainer.image_files import SPLITS
from sanctuary_trainer.tasks.box_sources import BoxedImages, BoxSource
from sanctuary_trainer.tasks.detectors import Target
from sanctuary_trainer.tasks.image_sources import ImageFiles

SPLIT_AT_THE_END = re.compile(rf"(?:^|[^a-z])({'|'.join(SPLITS)})\d*$")


@dataclass(frozen=True)
class Objects:
    """All objects of a split, those of an image one after another: small for the workers that share them.

    Attributes:
        first: (images + 1,), where those of each image begin.
        boxes: (objects, 4) float32, left, top, right, bottom in pixels.
        labels: (objects,) int64 from 0.
        crowds: (objects,) int64, 1 for a box around many, which no detector is to find.
    """

    first: npt.NDArray[np.int64]
    boxes: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    crowds: npt.NDArray[np.int64]

    def of(self, row: int) -> Target:
        inside = slice(self.first[row], self.first[row + 1])
        boxes = torch.from_numpy(self.boxes[inside].copy())
        return {
            "boxes": boxes,
            "labels": torch.from_numpy(self.labels[inside].copy()),
            "iscrowd": torch.from_numpy(self.crowds[inside].copy()),
        }


class CocoImages:
    """Reads images from files, of the size that the boxes are for."""

    def __init__(self, paths: Sequence[Path], sizes: Sequence[tuple[int, int] | None], objects: Objects) -> None:
        self.files, self.sizes, self.objects = ImageFiles(paths), sizes, objects

    def __call__(self, row: int) -> tuple[Any, Target]:
        return self.files(row, self.sizes[row]), self.objects.of(row)


def of_coco(root: Path, images: Path | None = None) -> BoxSource:
    """Read COCO's JSON, of one split or of several.

    Args:
        root: the file, or a folder that holds one for each split.
        images: the folder of the images; None: found by the first image.

    Raises:
        DataError: a file is missing or holds something else, or an image does not exist.
    """
    names: list[str] = []
    splits = {}
    for split, file in _json_files(root).items():
        content = _content(file)
        if split != "train" and "annotations" not in content:
            continue  # a test whose answers are kept secret
        try:
            own_names, found = _read(content, file, split, root if root.is_dir() else file.parent, images, names)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{file} is not as COCO's files are: {reason}.") from error
        names, splits[split] = names or own_names, found
    if not len(splits["train"].read.objects.labels):  # type: ignore[attr-defined]
        raise DataError(f"{root} holds no box to train on.")
    return BoxSource(names, splits)


def _json_files(root: Path) -> dict[str, Path]:
    """The file of each split, "train" first."""
    if root.is_file():
        return {"train": root}
    if not root.is_dir():
        raise DataError(f"root={root} does not exist; expected a JSON file of COCO's, or a folder that holds some.")
    found: dict[str, list[Path]] = {}
    files = sorted([*root.glob("*.json"), *root.glob("*/*.json")])
    for file in files:
        words = [SPLIT_AT_THE_END.search(name.lower()) for name in (file.stem, file.parent.name)]
        word = words[0] or (words[1] if file.parent != root else None)
        if word is not None or len(files) == 1:
            found.setdefault(SPLITS[word[1]] if word else "train", []).append(file)
    if "train" not in found:
        there = ", ".join(str(file.relative_to(root)) for file in files[:5]) or "no JSON files"
        raise DataError(f"{root} holds {there}; expected one to train on, such as annotations/instances_train.json.")
    chosen = {}
    for split in ("train", *sorted(found.keys() - {"train"})):
        named = [file for file in found[split] if file.name.startswith("instances")] or found[split]
        if len(named) > 1:
            raise DataError(f"{root} holds several files for the split {split!r}: {', '.join(map(str, named))}.")
        chosen[split] = named[0]
    return chosen


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file} is no JSON: {error}.") from error
    if not isinstance(content, dict) or "images" not in content:
        raise DataError(f"{file} is not as COCO's files are: it has no list of images.")
    return content


def _read(
    content: Mapping[str, Any], file: Path, split: str, root: Path, images: Path | None, class_names: Sequence[str]
) -> tuple[list[str], BoxedImages]:
    records = content["images"]
    rows = {record["id"]: row for row, record in enumerate(records)}
    if len(rows) < len(records) or not records:
        raise ValueError("its images have no ids of their own" if records else "it has no images")
    categories = sorted(content["categories"], key=lambda category: category["id"])
    own_names = [str(category["name"]) for category in categories]
    wanted = list(class_names) or own_names
    if len(set(own_names)) < len(own_names) or not set(own_names) <= set(wanted):
        odd = [name for name in own_names if name not in wanted] or own_names
        raise ValueError(f"its categories are named twice, or unknown to training: {', '.join(odd)}")
    numbers = {category["id"]: wanted.index(str(category["name"])) for category in categories}
    folder = _image_folder(file, split, root, images, records[0]["file_name"])
    paths = [folder / record["file_name"] for record in records]
    if lacking := [path for path in paths if not path.is_file()]:
        raise DataError(
            f"{len(lacking):,} of the {len(paths):,} images of {file} do not exist, the first {lacking[0]}."
        )
    sizes = [(record["width"], record["height"]) if "width" in record else None for record in records]
    objects = _objects(content["annotations"], rows, numbers, sizes, file)
    return wanted, BoxedImages(CocoImages(paths, sizes, objects), list(map(str, paths)))


def _image_folder(file: Path, split: str, root: Path, images: Path | None, first: str) -> Path:
    """Where the images lie: where the first one is."""
    own = file.stem.rpartition("_")[2]  # instances_train2017
    inside = [Path(), Path(own), Path(split)]
    bases = [images] if images is not None else [file.parent, root, file.parent / "images", root / "images"]
    if images is None:
        inside.append(Path("data"))
    looked = list(dict.fromkeys(base / place for base in bases for place in inside))
    found = next((folder for folder in looked if (folder / first).is_file()), None)
    if found is None:
        raise DataError(f"The image {first} of {file} is in none of {', '.join(map(str, looked))}: give images=.")
    return found


def _objects(
    annotations: Sequence[Mapping[str, Any]],
    rows: Mapping[Any, int],
    numbers: Mapping[Any, int],
    sizes: Sequence[tuple[int, int] | None],
    file: Path,
) -> Objects:
    """All objects in the order of their images, cut to their images, those without an area left out."""
    unknown = [one for one in annotations if one["image_id"] not in rows or one["category_id"] not in numbers]
    if unknown:
        raise ValueError(f"{len(unknown):,} annotations have an unknown image or category, the first {unknown[0]}")
    at = np.array([rows[one["image_id"]] for one in annotations], np.int64)
    boxes = np.array([one["bbox"] for one in annotations], np.float32).reshape(len(at), 4)
    if not np.isfinite(boxes).all():
        raise ValueError("some boxes are not of finite numbers")
    boxes[:, 2:] += boxes[:, :2]
    most = np.array([(np.inf, np.inf) if size is None else size for size in sizes], np.float32)[at]
    boxes = np.clip(boxes, 0, np.concatenate([most, most], 1))
    kept = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(1))
    if len(kept) < len(boxes):
        flat = len(boxes) - len(kept)
        warnings.warn(f"{file}: {flat:,} of {len(boxes):,} boxes have no area in their image; left out.", stacklevel=2)
    kept = kept[np.argsort(at[kept], kind="stable")]
    return Objects(
        first=np.searchsorted(at[kept], np.arange(len(rows) + 1)).astype(np.int64),
        boxes=boxes[kept],
        labels=np.array([numbers[one["category_id"]] for one in annotations], np.int64)[kept],
        crowds=np.array([int(one.get("iscrowd", 0)) for one in annotations], np.int64)[kept],
    )
