"""`ImageData`: folders, tables and data sets of other libraries become the same loaders; errors name the culprit."""

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sanctuary_trainer import DataError, SettingsError, Trainer
from sanctuary_trainer.tasks import ImageClassification, ImageData

COLOURS = {"blue": (20, 30, 220), "green": (30, 200, 40), "red": (220, 40, 20)}


def draw(path: Path, colour: str, number: int = 0, size: tuple[int, int] = (40, 30)) -> Path:
    """Save a rectangle of one colour, a little noisy; each number gives another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(number).integers(-20, 20, (size[1], size[0], 3))
    pixels = (np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def draw_folder(root: Path, each: int = 10) -> Path:
    for colour in COLOURS:
        for number in range(each):
            draw(root / colour / f"{number:02}.png", colour, number)
    return root


def write_csv(path: Path, rows: list[list[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def small(root: Any = None, **settings: Any) -> ImageData:
    return ImageData(root, **{"num_workers": 0, "image_size": 16, "batch_size": 8, **settings})


def labels_of(loader: Any) -> list[int]:
    return [] if loader is None else [int(label) for _, labels in loader for label in labels]


def test_a_folder_is_split_alike_each_time_and_each_class_by_itself(tmp_path: Path) -> None:
    data, again = small(draw_folder(tmp_path / "d")), small(tmp_path / "d")
    assert data.class_names == ["blue", "green", "red"]
    splits = {split: data.names(split) for split in ("train", "val", "test")}
    assert splits == {split: again.names(split) for split in splits}
    assert sorted(name for names in splits.values() for name in names) == sorted(
        str(path) for path in (tmp_path / "d").rglob("*.png")
    )
    assert Counter(labels_of(data.train_dataloader())) == {0: 8, 1: 8, 2: 8}
    assert labels_of(data.val_dataloader()) == labels_of(data.test_dataloader()) == [0, 1, 2]


def test_images_are_what_their_label_says_in_every_split(tmp_path: Path) -> None:
    data = small(draw_folder(tmp_path / "d"))
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for images, labels in loader or ():
            assert images.shape[1:] == (3, 16, 16) and images.dtype == torch.float32
            # Channels are red, green, blue; the labels are blue, green, red.
            assert torch.equal(images.mean((2, 3)).argmax(1), 2 - labels)


def test_folders_of_splits_are_taken_as_they_are(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        draw_folder(tmp_path / split, 3)
    data = small(tmp_path)
    assert [len(data.names(split)) for split in ("train", "val", "test")] == [9, 9, 9]
    assert all("validation" in name for name in data.names("val"))


def test_a_missing_validation_is_held_out_and_a_missing_test_is_not(tmp_path: Path) -> None:
    draw_folder(tmp_path / "train", 10)
    draw_folder(tmp_path / "test", 2)
    data = small(tmp_path)
    assert [len(data.names(split)) for split in ("train", "val", "test")] == [27, 3, 6]
    whole = small(tmp_path, val_share=0.0)
    assert len(whole.names("train")) == 30 and whole.val_dataloader() is None


def test_a_table_gives_the_paths_relative_to_it_and_the_splits(tmp_path: Path) -> None:
    rows = [["label", "path", "split"]]
    for number, (colour, split) in enumerate([(c, s) for c in COLOURS for s in ("train", "train", "valid", "test")]):
        draw(tmp_path / "t" / "images" / f"{number}.png", colour, number)
        rows.append([colour, f"images/{number}.png", split])
    data = small(write_csv(tmp_path / "t" / "all.csv", rows))
    assert data.class_names == ["blue", "green", "red"]
    assert labels_of(data.val_dataloader()) == labels_of(data.test_dataloader()) == [0, 1, 2]
    assert data.names("test") == [str(tmp_path / f"t/images/{n}.png") for n in (3, 7, 11)]


def test_a_data_set_of_hugging_face_is_read_from_memory_and_from_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    files = [str(draw(tmp_path / f"{n}.png", list(COLOURS)[n % 3], n)) for n in range(30)]
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=["b", "g", "r"]),
            "note": datasets.Value("string"),
        }
    )
    columns = {"picture": files, "kind": [n % 3 for n in range(30)], "note": ["x"] * 30}
    table = datasets.Dataset.from_dict(columns, features=features)
    both = datasets.DatasetDict({"train": table, "test": table.select(range(6))})
    both.save_to_disk(str(tmp_path / "saved"))
    for data in (
        small(dataset=both),
        small(tmp_path / "saved"),
        small(dataset=f"datasets:{tmp_path / 'saved'}"),
    ):
        assert data.class_names == ["b", "g", "r"]
        assert labels_of(data.test_dataloader()) == [0, 1, 2, 0, 1, 2]
        images, labels = next(iter(data.val_dataloader() or ()))
        assert torch.equal(images.mean((2, 3)).argmax(1), 2 - labels)
    assert len(small(dataset=table).names("test")) == 3
    with pytest.raises(DataError, match=r"no image column; it has: kind \(ClassLabel\), note \(Value\)"):
        small(dataset=table.remove_columns("picture"))
    with pytest.raises(DataError, match=r"no label column .lable.; it has: picture \(Image\)"):
        small(dataset=table, label_column="lable")
    with pytest.raises(DataError, match=r"cannot be read: .*check the name and the network"):
        small(dataset="datasets:no/such_set")


def test_a_data_set_of_torchvision_is_read_as_an_object_and_by_its_name(tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    fake = torchvision.datasets.FakeData(20, (3, 20, 20), num_classes=2)
    data = small(dataset={"train": fake, "val": fake})
    assert data.class_names == ["0", "1"] and len(data.names("val")) == 20
    assert labels_of(data.val_dataloader()) == [int(fake[row][1]) for row in range(20)]
    assert data.names("val")[3] == "val 3"
    with pytest.raises(DataError, match=r"CIFAR10 cannot be read from .*download=True"):
        small(tmp_path, dataset="torchvision:CIFAR10")
    with pytest.raises(SettingsError, match=r"no data set of torchvision 'CIFAR1'. Did you mean 'CIFAR10'"):
        small(dataset="torchvision:CIFAR1")


def test_images_to_predict_need_no_labels(tmp_path: Path) -> None:
    for number in range(3):
        draw(tmp_path / "new" / f"{number}.png", "red", number)
    (loader,) = [small(predict_root=tmp_path / "new").predict_dataloader()]
    assert [tuple(batch.shape) for batch in loader or ()] == [(3, 3, 16, 16)]
    with pytest.raises(DataError, match="nothing to train on"):
        small(predict_root=tmp_path / "new").train_dataloader()


def test_training_is_augmented_and_evaluation_is_not(tmp_path: Path) -> None:
    data = small(draw_folder(tmp_path / "d", 3), batch_size=100)
    first, second = (next(iter(data.val_dataloader() or ()))[0] for _ in range(2))
    assert torch.equal(first, second)
    sums = [sorted(next(iter(data.train_dataloader()))[0].sum((1, 2, 3)).tolist()) for _ in range(2)]
    assert sums[0] != sums[1]
    plain = small(tmp_path / "d", batch_size=100, augment=False)
    sums = [sorted(next(iter(plain.train_dataloader()))[0].sum((1, 2, 3)).tolist()) for _ in range(2)]
    assert sums[0] == sums[1]


def test_own_transforms_come_before_all(tmp_path: Path) -> None:
    data = small(draw_folder(tmp_path / "d", 3), transform=lambda image: torch.tensor(image.size))
    assert next(iter(data.train_dataloader()))[0][0].tolist() == [40, 30]
    data = small(tmp_path / "d", train_transform=lambda image: torch.zeros(2))
    assert next(iter(data.train_dataloader()))[0].shape[1:] == (2,)
    assert next(iter(data.val_dataloader() or ()))[0].shape[1:] == (3, 16, 16)


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path, run_folder: Path) -> None:
    draw_folder(tmp_path / "d", 3)
    (tmp_path / "d" / "red" / "01.png").write_bytes(b"no image")
    data = small(tmp_path / "d", val_share=0.0, test_share=0.0)
    with pytest.raises(DataError, match=r"red/01\.png cannot be read: .*Remove or replace it"):
        list(data.train_dataloader())
    with pytest.raises(DataError, match=r"red/01\.png cannot be read"):
        list(small(tmp_path / "d", val_share=0.0, test_share=0.0, num_workers=1).train_dataloader())


def test_folders_that_cannot_be_used_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"root=.*nowhere does not exist; expected a folder"):
        small(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds nothing to read; expected FOLDER/CLASS/IMAGE"):
        small(tmp_path / "empty")
    draw(tmp_path / "flat" / "a.png", "red")
    with pytest.raises(DataError, match=r"flat holds images, but no class folders"):
        small(tmp_path / "flat")
    (tmp_path / "hollow" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match=r"hollow holds class folders without images"):
        small(tmp_path / "hollow")
    draw(tmp_path / "one" / "red" / "a.png", "red")
    with pytest.raises(DataError, match=r"All 1 images are of one class, red; at least two"):
        small(tmp_path / "one")
    draw_folder(tmp_path / "more" / "train", 2)
    draw(tmp_path / "more" / "val" / "mauve" / "a.png", "red")
    with pytest.raises(DataError, match=r"split 'val' has images of classes that training lacks: mauve"):
        small(tmp_path / "more")


def test_tables_that_cannot_be_used_name_the_column_or_the_line(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", "red")
    table = write_csv(tmp_path / "t.csv", [["path", "kind"], ["a.png", "red"], ["b.png", "blue"]])
    with pytest.raises(
        DataError, match=r"t\.csv has no column label or class for the labels; its columns are: path, kind"
    ):
        small(table)
    with pytest.raises(DataError, match=r"t\.csv, line 3: there is no file .*b\.png"):
        small(table, label_column="kind")
    with pytest.raises(DataError, match=r"line 2: the column 'label' is empty"):
        small(write_csv(tmp_path / "u.csv", [["path", "label"], ["a.png", ""]]))
    with pytest.raises(DataError, match=r"line 2: the split 'dev' is none of train"):
        small(write_csv(tmp_path / "v.csv", [["path", "label", "split"], ["a.png", "red", "dev"]]))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "needs root="),
        ({"root": "x", "batch_size": 0}, "batch_size=0"),
        ({"root": "x", "val_share": 0.6, "test_share": 0.5}, "together < 1"),
        ({"dataset": "beans"}, "expected datasets:"),
    ],
)
def test_settings_that_name_nothing_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        ImageData(**settings)


def test_workers_change_nothing_of_what_is_learnt(tmp_path: Path, run_folder: Path) -> None:
    """Two fits of one seed see the same augmented images, with workers and without."""
    draw_folder(tmp_path / "d", 4)
    weights = []
    for workers in (0, 1):
        torch.manual_seed(0)
        task = ImageClassification(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 3)))
        trainer = Trainer(max_epochs=1, seed=3, project_dir=run_folder, default_callbacks=False, cpu=True)
        trainer.fit(task, small(tmp_path / "d", num_workers=workers).train_dataloader())
        weights.append([parameter.tolist() for parameter in task.parameters()])
    assert weights[0] == weights[1]


@pytest.mark.parametrize("names", [("train", "val", "extra"), ("val", "test"), ("train", "val", "validation")])
def test_folders_of_splits_that_do_not_fit_together_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        draw_folder(tmp_path / name, 2)
    with pytest.raises(DataError, match=f"holds {', '.join(sorted(names))}; expected the folders train and, perhaps"):
        small(tmp_path)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("bus", "car", "train"):
        draw(tmp_path / name / "a.png", "red")
        draw(tmp_path / name / "b.png", "red", 1)
    assert small(tmp_path).class_names == ["bus", "car", "train"]


def test_copies_in_hidden_folders_are_passed_over_and_empty_classes_told(tmp_path: Path) -> None:
    draw_folder(tmp_path, 2)
    draw(tmp_path / "red" / ".ipynb_checkpoints" / "00-checkpoint.png", "red")
    draw(tmp_path / "red" / "__MACOSX" / "x.png", "red")
    (tmp_path / "mauve").mkdir()
    with pytest.warns(UserWarning, match="no images, and so no class: mauve"):
        data = small(tmp_path, val_share=0.0, test_share=0.0)
    assert len(data.names("train")) == 6


def test_numbers_as_names_are_ordered_as_numbers(tmp_path: Path) -> None:
    rows = [[str(draw(tmp_path / f"{n}.png", "red", n)), str(n)] for n in range(12)]
    table = write_csv(tmp_path / "all.csv", [["path", "label"], *rows])
    data = small(table, val_share=0.0, test_share=0.0)
    assert data.class_names == [str(n) for n in range(12)]
    assert sorted(labels_of(data.train_dataloader())) == list(range(12))
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": [path for path, _ in rows], "label": list(range(12))}
    table = datasets.Dataset.from_dict(columns, features=features)
    assert small(dataset=table, val_share=0.0, test_share=0.0).class_names == [str(n) for n in range(12)]


class Pairs(torch.utils.data.Dataset[Any]):
    """Samples whose `targets` say something, and whose images know their number."""

    def __init__(self, labels: list[Any], targets: Any = None, classes: Any = None) -> None:
        self.pairs = [(Image.new("RGB", (20, 20), (number, 0, 0)), label) for number, label in enumerate(labels)]
        self.read = 0
        if targets is not None:
            self.targets = targets
        if classes is not None:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.pairs[index]


def test_labels_are_those_of_the_samples_whatever_targets_say() -> None:
    flipped = Pairs([1, 0, 1, 0], targets=[0, 1, 0, 1])
    assert sorted(labels_of(small(dataset={"train": flipped, "val": flipped}).val_dataloader())) == [0, 0, 1, 1]
    assert labels_of(small(dataset={"train": flipped, "val": flipped}).val_dataloader()) == [1, 0, 1, 0]
    plain = Pairs([0, 1] * 50, targets=[0, 1] * 50)
    small(dataset=plain)
    assert plain.read == 3  # looked at, and not all read


def test_a_part_of_a_data_set_keeps_its_labels_without_reading_it() -> None:
    whole = Pairs([0, 1, 2] * 10, targets=[0, 1, 2] * 10, classes=["a", "b", "c"])
    part = torch.utils.data.Subset(whole, [2, 5, 1, 4, 0, 3])
    data = small(dataset={"train": whole, "val": part})
    assert data.class_names == ["a", "b", "c"] and whole.read == 6
    assert labels_of(data.val_dataloader()) == [2, 2, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("labels", "classes", "told"),
    [
        ([0.2, 1.7], None, r"label of Pairs\[0\] is 0.2; expected the number of a class"),
        (["x", "y"], None, r"label of Pairs\[0\] is 'x'; expected the number of a class"),
        ([0, 1, 5], ["a", "b"], r"label of train 2 \(train\) is 5; expected 0 to 1"),
        ([0, -1], ["a", "b"], r"label of train 1 \(train\) is -1; expected 0 to 1"),
    ],
)
def test_labels_that_are_no_class_are_named(labels: list[Any], classes: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        small(dataset=Pairs(labels, classes=classes))


def test_data_sets_of_hugging_face_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    files = [str(draw(tmp_path / f"{n}.png", "red", n)) for n in range(4)]

    def table(labels: list[Any], kind: Any) -> Any:
        features = datasets.Features({"image": datasets.Image(), "label": kind})
        return datasets.Dataset.from_dict({"image": files, "label": labels}, features=features)

    good = table([0, 1, 0, 1], datasets.ClassLabel(names=["x", "y"]))
    with pytest.raises(DataError, match="is a stream"):
        small(dataset=good.to_iterable_dataset())
    with pytest.raises(DataError, match="classes of the split 'val' are named otherwise"):
        small(dataset={"train": good, "val": table([0, 1, 0, 1], datasets.ClassLabel(names=["y", "x"]))})
    with pytest.raises(DataError, match=r"label of train 0 \(train\) is 0.5; expected a class's name"):
        small(dataset=table([0.5, 1.5, 0.5, 1.5], datasets.Value("float32")))
    with pytest.raises(DataError, match=r"label of train 0 \(train\) is \[0\]"):
        small(dataset=table([[0], [1], [0], [1]], datasets.Sequence(datasets.Value("int64"))))
    splits = {datasets.Split.TRAIN: good, "test": good.remove_columns("label")}
    assert len(small(dataset=splits, val_share=0.0).names("train")) == 2  # a test without answers is held out


@pytest.mark.parametrize("content", ["path,label\na.png,caf\xe9\n".encode("latin-1"), b"\x00\xff\xfe\x89PNG"])
def test_a_table_in_another_encoding_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"t\.csv is no CSV file in UTF-8"):
        small(tmp_path / "t.csv")


@pytest.mark.parametrize(("mode", "suffix"), [("F", "tiff"), ("I", "tiff")])
def test_images_whose_white_nobody_knows_are_named(tmp_path: Path, mode: str, suffix: str) -> None:
    draw_folder(tmp_path, 2)
    Image.new(mode, (20, 20)).save(tmp_path / "red" / f"x.{suffix}")
    data = small(tmp_path, val_share=0.0, test_share=0.0)
    with pytest.raises(DataError, match=rf"x\.tiff cannot be read: it has 32 bits a pixel \(mode {mode}\)"):
        list(data.train_dataloader())


def test_images_of_16_bits_keep_their_brightness(tmp_path: Path) -> None:
    draw_folder(tmp_path, 2)
    Image.fromarray(np.full((20, 20), 200 * 256, np.uint16)).save(tmp_path / "red" / "x.png")
    data = small(predict_root=tmp_path / "red", transform=lambda image: torch.from_numpy(np.asarray(image).copy()))
    assert data.names("predict")[-1].endswith("x.png")
    assert (list((data.predict_dataloader() or ()).dataset)[-1] == 200).all()  # type: ignore[union-attr]


def test_a_split_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no split 'validation'; expected train, val, test or predict"):
        small(draw_folder(tmp_path, 2)).names("validation")


def test_a_data_set_of_torchvision_with_other_splits_says_which(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    with pytest.raises(DataError, match=r"EMNIST cannot be made by its name alone: Unknown value 'train'.*dataset="):
        small(tmp_path, dataset="torchvision:EMNIST")
