"""MNIST's file format, IDX: http://yann.lecun.com/exdb/mnist/."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sanctuary_trainer.errors import DataError

NAMES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def holds_idx_files(folder: Path) -> bool:
    """Say whether a folder holds any of the four files, as they are or gzipped."""
    return any(_path(folder, name) for name in NAMES)


def read_idx_folder(folder: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int]:
    """Read images and labels of all four files.

    Returns:
        The images (N, 1, H, W), training first; their labels (N,); how many of them are for training.

    Raises:
        DataError: a file is missing, is none of IDX, is not whole, or does not fit the others.
    """
    paths = [path for name in NAMES if (path := _path(folder, name))]
    if len(paths) < len(NAMES):
        missing = [name for name in NAMES if not _path(folder, name)]
        raise DataError(f"{folder} lacks {', '.join(missing)} (as it is, or with .gz).")
    train, train_labels, test, test_labels = arrays = [read_idx(path) for path in paths]
    for i in (0, 2):
        if arrays[i].ndim != 3 or arrays[i].size == 0 or arrays[i + 1].shape != arrays[i].shape[:1]:
            raise DataError(
                f"{paths[i]} holds the shape {arrays[i].shape} and {paths[i + 1].name} {arrays[i + 1].shape}; "
                "expected images (N, H, W) and their labels (N,)."
            )
    if train.shape[1:] != test.shape[1:]:
        raise DataError(f"{paths[0]} has images of {train.shape[1:]} pixels, {paths[2].name} of {test.shape[1:]}.")
    labels = np.concatenate([train_labels, test_labels]).astype(np.int64)
    return np.concatenate([train, test])[:, None], labels, len(train)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read one file of bytes, gzipped or not, whatever its name says.

    Two zero bytes; 8 for unsigned bytes; the number of dimensions; each dimension as 4 bytes, high byte first; data.

    Raises:
        DataError: it is no such file, or not whole.
    """
    raw = path.read_bytes()
    try:
        raw = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is not whole: {error}. Fetch it again.") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or raw[3] == 0:
        begins = raw[:4].hex(" ") or "nothing"
        raise DataError(f"{path} is no IDX file of bytes: it begins with {begins}; expected 00 00 08.")
    start = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    expected = start + math.prod(shape)
    if len(raw) != expected:
        raise DataError(f"{path} is not whole: it has {len(raw):,} bytes, and its head promises {expected:,}.")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _path(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
