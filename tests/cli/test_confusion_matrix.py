"""The confusion matrix: counted right, and seen in the picture."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sanctuary_trainer.cli import confusion_matrix


def test_rows_are_true_classes_and_columns_predicted_ones() -> None:
    counts = confusion_matrix.count(np.array([0, 0, 2, 2, 2]), np.array([0, 1, 2, 2, 0]), 3)
    assert counts.tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 2]]


def test_the_picture_shows_hits_in_blue_and_mistakes_in_red(tmp_path: Path) -> None:
    path = tmp_path / "matrix.png"
    confusion_matrix.draw(np.array([[90, 10], [0, 100]]), ["cat", "dog"], path)
    pixels = np.asarray(Image.open(path).convert("RGB"), int)
    blue, red = pixels[..., 2] - pixels[..., 0] > 100, pixels[..., 0] - pixels[..., 2] > 40
    assert blue.any() and red.any()
    # The mistake, a cat taken for a dog, stands in the upper right.
    (rows, columns), (hit_rows, hit_columns) = np.nonzero(red), np.nonzero(blue)
    assert rows.max() < hit_rows.max() and columns.min() > hit_columns.min()
    assert columns.min() > (hit_columns.min() + hit_columns.max()) / 2 - 2


@pytest.mark.parametrize("num_classes", [2, 13, 200])
def test_any_number_of_classes_and_any_name_can_be_drawn(num_classes: int, tmp_path: Path) -> None:
    names = [f"{i} \N{SNOWMAN} " + "long " * (i % 20) for i in range(num_classes)]
    confusion_matrix.draw(np.eye(num_classes, dtype=np.int64) * 7, names, tmp_path / "matrix.png")
    assert min(Image.open(tmp_path / "matrix.png").size) > 100


def test_nothing_tested_is_drawn_without_a_warning(tmp_path: Path) -> None:
    confusion_matrix.draw(np.zeros((2, 2), np.int64), ["a", "b"], tmp_path / "matrix.png")
