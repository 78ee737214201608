"""Reading images for the demo: what is right becomes arrays, what is wrong a sentence that names the file."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sanctuary_trainer.cli import demo_data
from sanctuary_trainer.cli.idx_files import NAMES, read_idx
from sanctuary_trainer.errors import DataError, SettingsError


def draw(path: Path, shade: int = 128, size: tuple[int, int] = (20, 20), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, shade if len(mode) == 1 else (shade,) * len(mode)).save(path)
    return path


def class_folders(root: Path, classes: dict[str, int]) -> Path:
    """So many images of each class; each class has its shade of grey."""
    for place, (name, count) in enumerate(classes.items()):
        for i in range(count):
            draw(root / name / f"{i:03}.png", shade=20 + 40 * place)
    return root


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return head + array.astype(np.uint8).tobytes()


def idx_folder(root: Path, num_train: int = 30, num_test: int = 10) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for part, n in (("train", num_train), ("t10k", num_test)):
        images = np.arange(n)[:, None, None] + np.zeros((1, 5, 4))
        (root / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (root / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.arange(n) % 3)))
    return root


def test_digits_are_split_alike_by_class_and_every_time() -> None:
    pytest.importorskip("sklearn")
    digits, again = demo_data.read("digits"), demo_data.read("digits")
    assert digits.images.shape == (1797, 1, 8, 8) and digits.images.dtype == np.uint8 and digits.images.max() == 255
    everything = np.concatenate([digits.train, digits.val, digits.test])
    assert sorted(everything) == list(range(1797))
    assert all(np.array_equal(getattr(digits, part), getattr(again, part)) for part in ("train", "val", "test"))
    per_class = np.bincount(digits.labels)
    assert np.abs(np.bincount(digits.labels[digits.test]) - per_class / 5).max() <= 0.5
    assert digits.sources[17] == "17" and digits.names[3] == "3" and digits.remarks == []


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SettingsError, match=r"pip install 'sanctuary_trainer\[demo\]'"):
        demo_data.read("digits")


def test_idx_files_are_read_gzipped_or_not_and_keep_their_own_test_images(tmp_path: Path) -> None:
    pictures = demo_data.read(str(idx_folder(tmp_path)))
    assert pictures.images.shape == (40, 1, 5, 4)
    assert pictures.images[:, 0, 0, 0].tolist() == [*range(30), *range(10)]
    assert pictures.labels.tolist() == [i % 3 for i in [*range(30), *range(10)]]
    assert pictures.test.tolist() == list(range(30, 40)) and len(pictures.train) + len(pictures.val) == 30
    assert pictures.names == ["0", "1", "2"]
    assert [pictures.sources[row] for row in pictures.test] == [str(i) for i in range(10)]


def test_fashion_mnist_of_the_package_has_its_names() -> None:
    if not demo_data.FASHION_MNIST.is_dir():
        pytest.skip("dataset-fashion-mnist is not installed")
    pictures = demo_data.read("fashion-mnist")
    assert pictures.images.shape == (70_000, 1, 28, 28) and pictures.names[9] == "Ankle boot"
    assert np.bincount(pictures.labels[pictures.test]).tolist() == [1000] * 10
    assert pictures.names[pictures.labels[60_000]] == "Ankle boot"


def test_a_missing_fashion_mnist_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_data, "FASHION_MNIST", tmp_path / "nowhere")
    with pytest.raises(SettingsError, match=r"nowhere.*apt install dataset-fashion-mnist.*--data FOLDER"):
        demo_data.read("fashion-mnist")


WHOLE = idx_bytes(np.arange(8).reshape(2, 2, 2))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "begins with nothing"),
        (b"hello world", "is no IDX file of bytes: it begins with 68 65 6c 6c"),
        (bytes([0, 0, 13, 1]) + bytes(8), "is no IDX file of bytes"),
        (WHOLE[:-3], "is not whole: it has 21 bytes, and its head promises 24"),
        (WHOLE[:9], "is not whole"),
        (WHOLE + b"x", "is not whole: it has 25 bytes"),
        (gzip.compress(WHOLE)[:-10], "is not whole"),
        (gzip.compress(WHOLE)[:12] + b"\xff" * 20, "is not whole"),
    ],
)
def test_a_file_that_is_no_whole_idx_file_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_idx_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    folder = idx_folder(tmp_path)
    (folder / NAMES[2]).write_bytes(idx_bytes(np.zeros((10, 6, 4))))
    with pytest.raises(DataError, match=r"train-images.*\(5, 4\).*t10k-images.*\(6, 4\)"):
        demo_data.read(str(folder))
    (folder / NAMES[2]).write_bytes(idx_bytes(np.zeros((9, 5, 4))))
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte holds the shape \(9, 5, 4\) and .* \(10,\)"):
        demo_data.read(str(folder))
    (folder / NAMES[2]).unlink()
    with pytest.raises(DataError, match="lacks t10k-images-idx3-ubyte"):
        demo_data.read(str(folder))


def test_class_folders_become_square_images_as_large_as_half_of_them_are(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 10, "dog": 15})
    draw(tmp_path / "dog" / "deeper" / "large.jpg", shade=60, size=(300, 200))
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    pictures = demo_data.read(str(tmp_path))
    assert pictures.images.shape == (26, 3, 20, 20) and pictures.names == ["cat", "dog"]
    assert pictures.sources[0] == str(Path("cat/000.png")) and pictures.sources[-1] == str(Path("dog/deeper/large.jpg"))
    assert [int(image.mean()) for image in pictures.images] == [20] * 10 + [60] * 16
    assert np.bincount(pictures.labels[pictures.test]).tolist() == [2, 3]
    assert pictures.remarks == []


@pytest.mark.parametrize(("size", "side"), [((3, 3), 8), ((500, 80), 64)])
def test_images_of_folders_are_neither_tiny_nor_large(tmp_path: Path, size: tuple[int, int], side: int) -> None:
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        draw(tmp_path / name, size=size)
    assert demo_data.read(str(tmp_path)).images.shape == (4, 3, side, side)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_images_of_any_mode_keep_their_brightness(tmp_path: Path, mode: str) -> None:
    class_folders(tmp_path, {"a": 3, "b": 3})
    grey = np.full((20, 20), 255 if mode == "1" else 100, np.uint8)
    made = Image.fromarray(grey.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(grey).convert(mode)
    path = tmp_path / "b" / ("odd.tif" if mode == "CMYK" else "odd.png")
    made.save(path)
    image = demo_data.read(str(tmp_path)).images[-1]
    assert np.abs(image.astype(int) - grey[0, 0]).max() <= 1


def test_broken_images_are_left_out_and_named(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 5, "dog": 5})
    (tmp_path / "cat" / "text.png").write_text("no image at all")
    whole = draw(tmp_path / "dog" / "cut.png", size=(90, 90))
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 90, 3), np.uint8)).save(whole)
    whole.write_bytes(whole.read_bytes()[:2000])
    (tmp_path / "dog" / "nothing.jpg").touch()
    pictures = demo_data.read(str(tmp_path))
    assert len(pictures.images) == len(pictures.sources) == len(pictures.labels) == 10
    (remark,) = pictures.remarks
    assert all(str(tmp_path / name) in remark for name in ("cat/text.png", "dog/cut.png", "dog/nothing.jpg"))


def test_bytes_changed_anywhere_in_a_file_never_end_the_reading(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 3, "dog": 3})
    generator = np.random.default_rng(1)
    pixels = Image.fromarray(generator.integers(0, 255, (24, 24, 3), np.uint8))
    for suffix in ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm"):
        path = tmp_path / "dog" / f"x.{suffix}"
        pixels.save(path)
        whole = path.read_bytes()
        for i in range(40):
            damaged = bytearray(whole)
            for place in generator.integers(0, min(len(whole), 400), 4):
                damaged[place] = generator.integers(256)
            (tmp_path / "dog" / f"x{i}.{suffix}").write_bytes(damaged[: generator.integers(1, len(whole))])
    assert len(demo_data.read(str(tmp_path)).images) >= 6 + 7


def test_a_class_with_one_image_is_trained_on_and_named(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 6, "dog": 6, "emu": 1})
    pictures = demo_data.read(str(tmp_path))
    assert pictures.names == ["cat", "dog", "emu"] and 12 in pictures.train
    (remark,) = pictures.remarks
    assert "'emu'" in remark and str(Path("emu/000.png")) in remark and "not tested" in remark


def test_a_class_without_a_readable_image_is_left_out(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 6, "dog": 6})
    (tmp_path / "ant").mkdir()
    (tmp_path / "bee").mkdir()
    (tmp_path / "bee" / "x.png").write_text("no")
    pictures = demo_data.read(str(tmp_path))
    assert pictures.names == ["cat", "dog"] and pictures.labels.max() == 1
    assert any("'ant'" in remark for remark in pictures.remarks)
    assert any("'bee'" in remark for remark in pictures.remarks)


def test_folders_that_cannot_be_learned_from_are_refused_in_a_sentence(tmp_path: Path) -> None:
    def refusal(name: str) -> str:
        with pytest.raises((DataError, SettingsError)) as caught:
            demo_data.read(str(tmp_path / name))
        return str(caught.value)

    assert "does not exist" in refusal("nowhere")
    (tmp_path / "file").touch()
    assert "is a file" in refusal("file")
    (tmp_path / "empty").mkdir()
    assert "nothing to read; expected FOLDER/CLASS/IMAGE" in refusal("empty")
    draw(tmp_path / "flat" / "a.png")
    assert "images, but no class folders" in refusal("flat")
    (tmp_path / "hollow" / "cat").mkdir(parents=True)
    assert "class folders without images" in refusal("hollow")
    class_folders(tmp_path / "one", {"cat": 5})
    assert "one class, 'cat'; at least two" in refusal("one")
    class_folders(tmp_path / "singles", {"cat": 1, "dog": 1})
    assert "Each of the 2 classes has a single image" in refusal("singles")
    class_folders(tmp_path / "parted" / "train", {"cat": 2, "dog": 2})
    class_folders(tmp_path / "parted" / "test", {"cat": 2, "dog": 2})
    assert "no classes but test, train: give one of these folders" in refusal("parted")
    (tmp_path / "broken" / "cat").mkdir(parents=True)
    (tmp_path / "broken" / "cat" / "x.png").write_text("no")
    assert "None of the 1 images" in refusal("broken") and "x.png" in refusal("broken")
