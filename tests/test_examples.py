"""Every example runs, in a short form, and does what its text says."""

import gzip
import importlib
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def _as_scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As when one of them is run: its folder is the first place to import from; afterwards none stays imported."""
    monkeypatch.syspath_prepend(EXAMPLES)
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    yield
    for name in names:
        sys.modules.pop(name, None)


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_every_example_says_how_it_is_run_and_is_tested_here() -> None:
    tests = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        if "__main__" in text:
            assert f"python examples/{path.name}" in text.split('"""')[1]
            assert f'example("{path.stem}")' in tests


def test_minimal_learns_the_digits_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    example("minimal").main(max_epochs=3)
    accuracy = re.search(r"^accuracy: (0\.\d+)$", capsys.readouterr().out, re.MULTILINE)
    assert accuracy is not None and float(accuracy[1]) > 0.9
    assert len((EXAMPLES / "minimal.py").read_text().splitlines()) <= 70


def test_the_plain_loop_ends_at_the_trainer_s_weights_to_the_last_bit(capsys: pytest.CaptureFixture[str]) -> None:
    example("plain_loop").main(max_epochs=2)
    assert "largest difference of a weight: 0\n" in capsys.readouterr().out


def test_a_custom_callback_stops_the_run_and_shows_images(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    example("custom_callback").main(max_epochs=10)
    said = capsys.readouterr().out
    assert re.search(r"stopped after \d+ steps: val/accuracy was at least 0.95 for 2 validations", said)
    [events] = tmp_path.rglob("events.out.tfevents.*")
    written = events.read_bytes()
    assert b"val/hardest" in written and b"train/weight_norm" in written


def test_the_stopping_callback_s_count_survives_in_its_state() -> None:
    callbacks = example("custom_callback")
    first, second = callbacks.StopWhenGood(), callbacks.StopWhenGood()
    first.in_a_row = 1
    second.load_state_dict(first.state_dict())
    assert second.in_a_row == 1


def test_segmentation_learns_from_scenes_without_any_label_too(capsys: pytest.CaptureFixture[str]) -> None:
    segmentation = example("segmentation")
    scenes = segmentation.PartlyLabelled(0, 12)
    labelled = [(scenes[i][1] != segmentation.UNLABELLED).sum().item() for i in range(12)]
    assert labelled[0] == labelled[6] == 0 and labelled[5] == labelled[11] == 48 * 48
    segmentation.main(max_epochs=1, scenes=48)
    picture = capsys.readouterr().out.rpartition("in it:\n")[2].splitlines()
    assert [len(row) for row in picture] == [48] * 24


def test_segmentation_counts_labelled_pixels() -> None:
    segmentation = example("segmentation")
    images = torch.rand(2, 3, 48, 48)
    masks = torch.full((2, 48, 48), segmentation.UNLABELLED)
    task = segmentation.Segmentation()
    nothing = task.training_step((images, masks), 0)
    masks[0, :3, :5] = 1
    some = task.training_step((images, masks), 0)
    assert nothing["weight"] == 0 and nothing["loss"].isnan()
    assert some["weight"] == 15 and some["loss"].isfinite()


def test_detection_runs_and_its_pictures_have_different_numbers_of_boxes(capsys: pytest.CaptureFixture[str]) -> None:
    detection = example("detection")
    assert {len(detection.Scenes(0, 20)[i].boxes) for i in range(20)} >= {0, 1, 2, 3}
    detection.main(max_epochs=1, scenes=64)
    assert "scene 3:" in capsys.readouterr().out


def test_detection_decodes_what_it_encodes() -> None:
    detection = example("detection")
    found, targets = [], []
    for index in range(20):
        scene = detection.Scenes(0, 20)[index]
        heat, places, distances = detection.encode(scene.boxes, scene.labels, 12, 12)
        sides = torch.ones(4, 12, 12)
        sides[:, places[:, 1], places[:, 2]] = distances.T
        found += detection.decode(torch.logit(heat * 0.9)[None], sides[None], least_score=0.85)
        targets.append({"boxes": scene.boxes, "labels": scene.labels})
        order = found[-1]["boxes"].sum(1).argsort(), scene.boxes.sum(1).argsort()
        torch.testing.assert_close(found[-1]["boxes"][order[0]], scene.boxes[order[1]])
    metric = detection.AveragePrecision()
    metric.update(found, targets)
    assert metric.compute() == 1


def test_average_precision_equals_what_is_computed_by_hand() -> None:
    detection = example("detection")
    box, far, near = [0.0, 0.0, 10.0, 10.0], [30.0, 30.0, 40.0, 40.0], [1.0, 0.0, 11.0, 10.0]
    # Of the discs: a miss at 0.9, a hit at 0.8, the same object again at 0.7; of two objects one is found.
    found = {
        "boxes": torch.tensor([far, box, near, far]),
        "scores": torch.tensor([0.9, 0.8, 0.7, 0.6]),
        "labels": torch.tensor([0, 0, 0, 1]),
    }
    target = {"boxes": torch.tensor([box, [60.0, 60.0, 70.0, 70.0], far]), "labels": torch.tensor([0, 0, 1])}
    nothing = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    metric = detection.AveragePrecision()
    metric.update([found, nothing], [target, {"boxes": torch.zeros(0, 4), "labels": nothing["labels"]}])
    assert metric.compute().item() == pytest.approx((0.5 * 0.5 + 1.0) / 2)


def write_idx(path: Path, values: np.ndarray) -> None:
    head = bytes([0, 0, 8, values.ndim]) + b"".join(struct.pack(">i", size) for size in values.shape)
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))


def test_fashion_mnist_prints_its_accuracy_beside_the_published_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    for part, count in (("train", 300), ("t10k", 100)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", random.integers(0, 256, (count, 28, 28)))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", random.integers(0, 10, count))
    example("fashion_mnist").main(tmp_path, max_epochs=1)
    rows = re.findall(r"^(0\.\d{4})  (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 38
    assert [name for _, name in rows if "<---" in name] == ["this network after 1 epochs <---"]
    assert [value for value, _ in rows] == sorted((value for value, _ in rows), reverse=True)
    assert ("0.9340", "2 Conv+pooling+BN") in rows


def test_fashion_mnist_shifts_and_mirrors_whole_images() -> None:
    fashion_mnist = example("fashion_mnist")
    image = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    image[0, 0, 10, 12] = 200
    images = image.expand(500, 1, 28, 28)
    places = fashion_mnist.shift(images, most=2).flatten(1).argmax(1)
    assert set(places.tolist()) == {row * 28 + column for row in range(8, 13) for column in range(10, 15)}
    assert set(fashion_mnist.mirror(images).flatten(1).argmax(1).tolist()) == {10 * 28 + 12, 10 * 28 + 15}
