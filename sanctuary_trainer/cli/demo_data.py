"""Images for `sanctuary demo`, without torch: what is wrong with them is said before its import takes seconds.

read("digits")         scikit-learn's 1,797 digits of 8 x 8 pixels
read("fashion-mnist")  70,000 pictures of clothes, 28 x 28 pixels, from Debian's package
read(FOLDER)           the four IDX files of MNIST or Fashion-MNIST, or one folder of images per class
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sanctuary_trainer.cli.idx_files import holds_idx_files, read_idx_folder
from sanctuary_trainer.cli.image_folders import read_class_folders
from sanctuary_trainer.errors import DataError, SettingsError
from sanctuary_trainer.image_files import draw_rows

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist lies
CLOTHES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
TEST_SHARE, VAL_SHARE = 0.2, 0.1  # of the images, and of what the test leaves

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pictures:
    """Labelled images, and which of them are for what.

    images: (N, C, H, W) uint8.
    labels: (N,) numbers of classes.
    names: what the classes are called.
    sources: where each image comes from: its index in the data set, or its path in the folder.
    train, val, test: rows of images; val may be empty.
    remarks: what was left out or cannot be tested, one sentence each.
    """

    images: npt.NDArray[np.uint8]
    labels: Rows
    names: list[str]
    sources: list[str]
    train: Rows
    val: Rows
    test: Rows
    remarks: list[str]


def read(data: str) -> Pictures:
    """Read the images that `--data` names.

    Where the data set has no test images of its own, a fifth of every class is held out for the test, always the same.

    Raises:
        SettingsError: there is no such data.
        DataError: it cannot be read, has fewer than two classes, or leaves nothing to test.
    """
    if data == "digits":
        return _read_digits()
    folder = FASHION_MNIST if data == "fashion-mnist" else Path(data)
    if not folder.is_dir():
        if data == "fashion-mnist":
            raise SettingsError(
                f"Fashion-MNIST is not at {folder}. Install it (Debian, Ubuntu: apt install dataset-fashion-mnist), "
                "or give the folder that holds its four IDX files: --data FOLDER."
            )
        found = "is a file" if folder.exists() else "does not exist"
        raise SettingsError(f"--data {data}: it {found}. Give digits, fashion-mnist or a folder of images.")
    if holds_idx_files(folder):
        return _read_idx(folder)
    return divide(*read_class_folders(folder))


def _read_digits() -> Pictures:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SettingsError(
            "The digits come with scikit-learn, which is not installed. Run: pip install 'sanctuary_trainer[demo]'"
        ) from error
    digits: Any = load_digits()
    images = (digits.images[:, None] * (255 / 16)).round().astype(np.uint8)  # they go from 0 to 16
    return divide(images, digits.target.astype(np.int64), _numbers(10), _numbers(len(images)))


def _read_idx(folder: Path) -> Pictures:
    images, labels, num_train = read_idx_folder(folder)
    num_classes = int(labels.max()) + 1
    # The files hold no names. MNIST's classes are called by their numbers.
    is_fashion = num_classes == len(CLOTHES) and "fashion" in str(folder.resolve()).lower()
    num_test = len(images) - num_train
    return divide(
        images,
        labels,
        CLOTHES if is_fashion else _numbers(num_classes),
        [*_numbers(num_train), *_numbers(num_test)],
        test=np.arange(num_train, len(images)),
    )


def _numbers(n: int) -> list[str]:
    return [str(i) for i in range(n)]


def divide(
    images: npt.NDArray[np.uint8],
    labels: Rows,
    names: list[str],
    sources: list[str],
    remarks: Sequence[str] = (),
    test: Rows | None = None,
) -> Pictures:
    """Deal the images out to training, validation and test, each class by itself.

    Raises:
        DataError: there are fewer than two classes, or no class has two images.
    """
    counts = np.bincount(labels, minlength=len(names))
    if np.count_nonzero(counts) < 2:
        raise DataError(f"All {len(labels):,} images are of one class, {names[labels[0]]!r}; at least two are needed.")
    rows = np.arange(len(labels))
    generator = np.random.default_rng(0)
    if test is None:
        test = draw_rows(labels, rows, TEST_SHARE, generator, at_least=1)
        if len(test) == 0:
            raise DataError(f"Each of the {len(names):,} classes has a single image; the test needs another.")
        alone = [(names[label], sources[np.argmax(labels == label)]) for label in np.flatnonzero(counts == 1)]
        single = "Class {!r} has a single image, {}: it is trained on and not tested."
        remarks = [*remarks, *(single.format(*pair) for pair in alone)]
    rest = np.setdiff1d(rows, test)
    val = draw_rows(labels, rest, VAL_SHARE, generator)
    return Pictures(images, labels, names, sources, np.setdiff1d(rest, val), val, test, list(remarks))
