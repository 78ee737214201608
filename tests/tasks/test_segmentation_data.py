"""`SegmentationData`: every image meets its own mask, the two stay on top of each other, and odd masks are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sanctuary_trainer import DataError, SettingsError, Trainer
from sanctuary_trainer.tasks import SegmentationData, SemanticSegmentation

NAMES = ["ground", "square", "bar"]


def draw(root: Path, number: int, inside: str = "", values: tuple[int, ...] = (0, 1, 2), suffix: str = "png") -> None:
    """An image whose red channel tells the class: 20, 120 or 220; and its mask, with the first rows unlabelled."""
    generator = np.random.default_rng(number)
    classes = np.zeros((48, 64), np.uint8)
    left, top = generator.integers(8, 40), generator.integers(8, 30)
    classes[top : top + 12, left : left + 12] = 1
    classes[:, :6] = 2
    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[..., 0] = 20 + 100 * classes
    mask = np.asarray(values, np.uint8)[classes]
    for folder, picture in (("images", pixels), ("masks", mask)):
        path = root / folder / inside / f"{number:02}.{suffix if folder == 'images' else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)


def draw_all(root: Path, count: int = 10, **settings: Any) -> Path:
    for number in range(count):
        draw(root, number, **settings)
    return root


def small(root: Any = None, **settings: Any) -> SegmentationData:
    return SegmentationData(root, **{"class_names": NAMES, "num_workers": 0, "image_size": 32, **settings})


def agree(images: torch.Tensor, masks: torch.Tensor) -> float:
    """The share of pixels whose colour is that of their class in the mask."""
    red = images[:, 0] * 0.229 + 0.485
    return float(((red * 255 - 20) / 100).round().eq(masks).float().mean())


def test_images_and_masks_stay_on_top_of_each_other_in_every_split(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = small(draw_all(tmp_path))
    assert [len(data.names(split)) for split in ("train", "val", "test")] == [8, 1, 1]
    names = {name for split in ("train", "val", "test") for name in data.names(split)}
    assert names == {str(path) for path in (tmp_path / "images").iterdir()}
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for images, masks in loader or ():
            assert images.shape[1:] == (3, 32, 32) and masks.shape[1:] == (32, 32) and masks.dtype == torch.int64
            assert agree(images, masks) > 0.9  # but for the edges, which the images' interpolation mixes


def test_training_is_augmented_as_one_and_evaluation_is_not(tmp_path: Path) -> None:
    data = small(draw_all(tmp_path), batch_size=100)
    sums = [sorted(next(iter(data.train_dataloader()))[1].sum((1, 2)).tolist()) for _ in range(2)]
    assert sums[0] != sums[1]
    first, second = (next(iter(data.val_dataloader() or ())) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("above", [True, False])
def test_splits_may_lie_above_or_below_the_two_folders(tmp_path: Path, above: bool) -> None:
    for split, count in (("training", 4), ("validation", 3), ("test", 2)):
        draw_all(*([tmp_path / split, count] if above else [tmp_path, count]), inside="" if above else split)
    data = small(tmp_path)
    assert [len(data.names(split)) for split in ("train", "val", "test")] == [4, 3, 2]
    images, masks = next(iter(data.test_dataloader() or ()))
    assert agree(images, masks) > 0.9


def test_values_of_masks_become_numbers_and_others_count_as_unlabelled(tmp_path: Path) -> None:
    draw_all(tmp_path, values=(0, 255, 7))
    data = small(tmp_path, class_names=["ground", "square"], mask_values=[0, 255])
    data.adapt(type("Task", (), {"ignore_index": -100}))
    _, masks = next(iter(data.val_dataloader() or ()))
    assert masks.unique().tolist() == [-100, 0, 1]
    assert (masks == -100).sum() == 32 * 3  # the bar: 6 of 64 columns


def test_a_palette_is_read_as_the_places_in_it(tmp_path: Path) -> None:
    draw_all(tmp_path)
    for path in (tmp_path / "masks").iterdir():
        mask = Image.open(path)
        palette = Image.fromarray(np.asarray(mask), "P")
        palette.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200])
        palette.save(path)
    _, masks = next(iter(small(tmp_path).val_dataloader() or ()))
    assert masks.unique().tolist() == [0, 1, 2]


def test_a_photograph_that_is_stored_lying_meets_the_mask_that_fits_it(tmp_path: Path) -> None:
    """Cameras store a picture lying, with a note how to turn it; a mask is of the one or of the other."""
    draw_all(tmp_path, 2, suffix="jpg")
    path = tmp_path / "images" / "01.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter
    pixels = Image.open(path).copy()
    pixels.save(path, exif=exif, quality=95)  # the mask is of the picture as it is stored
    data = small(tmp_path, val_share=0.0, test_share=0.0, augment=False)
    images, masks = next(iter(data.train_dataloader()))
    assert agree(images, masks) > 0.85
    Image.open(tmp_path / "masks" / "01.png").transpose(Image.Transpose.ROTATE_270).save(tmp_path / "masks" / "01.png")
    images, masks = next(iter(data.train_dataloader()))  # and now of the upright one
    assert agree(images, masks) > 0.85


def test_a_data_set_of_pairs_and_one_of_hugging_face_give_the_same(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    draw_all(tmp_path)
    files = [[str(p) for p in sorted((tmp_path / kind).iterdir())] for kind in ("images", "masks")]
    features = datasets.Features({"image": datasets.Image(), "mask": datasets.Image()})
    table = datasets.Dataset.from_dict({"image": files[0], "mask": files[1]}, features=features)
    pairs = [(Image.open(image).copy(), Image.open(mask).copy()) for image, mask in zip(*files, strict=True)]
    of_folder, of_table, of_pairs = (
        next(iter(data.val_dataloader() or ()))
        for data in (small(tmp_path), small(dataset=table), small(dataset=pairs))
    )
    for other in (of_table, of_pairs):
        assert all(torch.equal(a, b) for a, b in zip(of_folder, other, strict=True))
    with pytest.raises(DataError, match=r"no mask column 'msk'; it has: image \(Image\), mask \(Image\)"):
        small(dataset=table, mask_column="msk")


def test_images_to_predict_need_no_masks(tmp_path: Path, run_folder: Path) -> None:
    data = small(predict_root=draw_all(tmp_path, 3) / "images", batch_size=2)
    task = SemanticSegmentation(torch.nn.Conv2d(3, 3, 1), class_names=NAMES)
    trainer = Trainer(project_dir=run_folder, log_with=None, default_callbacks=False, cpu=True)
    assert [tuple(found.shape) for found in trainer.predict(task, data=data)] == [(32, 32)] * 3
    assert [Path(name).name for name in data.names("predict")] == ["00.png", "01.png", "02.png"]


def test_a_model_learns_to_tell_the_colours_apart(tmp_path: Path, run_folder: Path) -> None:
    data = small(draw_all(tmp_path, 12), batch_size=4)
    torch.manual_seed(0)
    task = SemanticSegmentation(
        torch.nn.Sequential(torch.nn.Conv2d(3, 16, 1), torch.nn.ReLU(), torch.nn.Conv2d(16, 3, 1)),
        class_names=NAMES,
        lr=0.1,
    )
    data.adapt(task)
    trainer = Trainer(max_epochs=25, seed=0, project_dir=run_folder, log_with=None, default_callbacks=False, cpu=True)
    trainer.fit(task, data=data)
    assert trainer.test(task, data=data)["test/mean_iou"] > 0.8


def broken(root: Path, what: str) -> None:
    if what == "no mask":
        (root / "masks" / "03.png").unlink()
    elif what == "another size":
        Image.open(root / "masks" / "00.png").resize((32, 48)).save(root / "masks" / "00.png")
    elif what == "a picture":
        Image.open(root / "masks" / "00.png").convert("RGB").save(root / "masks" / "00.png")
    elif what == "no image":
        (root / "masks" / "00.png").write_bytes(b"no image")
    elif what == "no folder":
        (root / "masks").rename(root / "answers")


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("no mask", r"1 of the 10 images in .*images have no mask in .*masks, the first 03; a mask is called like"),
        ("a picture", r"masks/00\.png cannot be used: it is a picture \(mode RGB, shape \(48, 64, 3\), uint8\)"),
        ("no image", r"masks/00\.png cannot be used: cannot identify"),
        ("no folder", r"holds answers, images; expected images and masks"),
    ],
)
def test_folders_that_cannot_be_used_are_refused_before_training(tmp_path: Path, what: str, told: str) -> None:
    broken(draw_all(tmp_path), what)
    with pytest.raises(DataError, match=told):
        small(tmp_path)


def test_a_mask_of_another_size_is_named_when_it_is_met(tmp_path: Path) -> None:
    broken(draw_all(tmp_path), "another size")
    data = small(tmp_path, val_share=0.0, test_share=0.0)
    with pytest.raises(
        DataError, match=r"images/00\.png cannot be read: it is 64 x 48 pixels, its labels are for 32 x 48"
    ):
        list(data.train_dataloader())


def test_masks_of_black_and_white_are_not_taken_for_unlabelled(tmp_path: Path) -> None:
    """255 means "no label" to most: such a run would learn nothing, and say nothing."""
    draw_all(tmp_path, values=(0, 255, 0))
    with pytest.raises(DataError, match=r"hold only 0, 255: no pixel of any class but the first. Give mask_values="):
        small(tmp_path, class_names=["ground", "square"])


def test_a_value_that_is_no_class_is_named_with_its_image(tmp_path: Path) -> None:
    draw_all(tmp_path, values=(0, 1, 9))
    with pytest.raises(DataError, match=r"The mask of .*00\.png holds 9; expected 0 to 2, or 255 for no label"):
        small(tmp_path)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "needs root= or dataset=, one of them"),
        ({"root": "x", "dataset": []}, "needs root= or dataset=, one of them"),
        ({"root": "x", "class_names": ["a"]}, "class_names has 1; expected 2 to 255"),
        ({"root": "x", "mask_values": [0, 1]}, r"mask_values=\[0, 1\]; expected 3 numbers"),
        ({"root": "x", "image_size": 0}, "image_size=0"),
        ({"root": "x", "batch_size": 0}, "batch_size=0"),
    ],
)
def test_settings_outside_their_range_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        small(**settings)
