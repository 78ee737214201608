"""`DetectionData`: COCO's files in the forms that people have them, every box on its object, and odd files refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sanctuary_trainer import DataError, SettingsError, Trainer
from sanctuary_trainer.tasks import DetectionData, ObjectDetection

Content = dict[str, Any]


def draw(images: Path, count: int = 10, first: int = 0) -> Content:
    """Images with a white square each, some of them with a grey one too; categories 3 and 7, in no order."""
    images.mkdir(parents=True, exist_ok=True)
    content: Content = {
        "images": [],
        "annotations": [],
        "categories": [{"id": 7, "name": "white"}, {"id": 3, "name": "grey"}],
    }
    for number in range(first, first + count):
        pixels = np.zeros((40, 50 + number, 3), np.uint8)
        for category, level, left in ((7, 255, 4 + number), (3, 128, 30))[: 1 + number % 2]:
            pixels[10:20, left : left + 8] = level
            content["annotations"].append(
                {
                    "id": len(content["annotations"]),
                    "image_id": number,
                    "category_id": category,
                    "bbox": [left, 10, 8, 10],
                }
            )
        Image.fromarray(pixels).save(images / f"{number:02}.png")
        content["images"].append({"id": number, "file_name": f"{number:02}.png", "width": 50 + number, "height": 40})
    return content


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def small(root: Any = None, **settings: Any) -> DetectionData:
    return DetectionData(root, **{"num_workers": 0, **settings})


def look(loader: Any) -> int:
    """How many boxes lie just on a rectangle of their class's level; all have to."""
    count = 0
    for images, targets in loader:
        for image, target in zip(images, targets, strict=True):
            for (left, top, right, bottom), label in zip(target["boxes"].int().tolist(), target["labels"], strict=True):
                level = [128 / 255, 1.0][int(label)]
                assert torch.allclose(image[:, top:bottom, left:right], torch.tensor(level))
                assert (bottom - top, right - left) == (10, 8)
                count += 1
    return count


def test_boxes_lie_on_their_objects_in_every_split(tmp_path: Path) -> None:
    data = small(write(tmp_path / "all.json", draw(tmp_path)))
    assert data.class_names == ["grey", "white"]  # in the order of their ids
    assert [len(data.names(split)) for split in ("train", "val", "test")] == [8, 1, 1]
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    assert sum(map(look, loaders)) == 15
    image = next(iter(data.val_dataloader() or ()))[0][0]
    assert image.dtype == torch.float32 and image.shape[1] == 40 and type(image) is torch.Tensor


def test_half_of_the_training_images_are_flipped_with_their_boxes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = small(write(tmp_path / "all.json", draw(tmp_path)), val_share=0.0, test_share=0.0)
    seen = set()
    for _ in range(4):
        assert look(data.train_dataloader()) == 15
        seen |= {tuple(t["boxes"].flatten().tolist()) for _, targets in data.train_dataloader() for t in targets}
    assert len(seen) > 15
    plain = small(tmp_path / "all.json", val_share=0.0, test_share=0.0, augment=False)
    boxes = [{tuple(t["boxes"].flatten().tolist()) for _, ts in plain.train_dataloader() for t in ts} for _ in range(2)]
    assert boxes[0] == boxes[1] and len(boxes[0]) == 10


def coco(root: Path, split: str, first: int) -> None:
    content = draw(root / f"{split}2017", 3, first)
    write(root / "annotations" / f"instances_{split}2017.json", content)
    write(root / "annotations" / f"captions_{split}2017.json", content)


def roboflow(root: Path, split: str, first: int) -> None:
    folder = {"val": "valid"}.get(split, split)
    write(root / folder / "_annotations.coco.json", draw(root / folder, 3, first))


def flat(root: Path, split: str, first: int) -> None:
    write(root / f"{split}.json", draw(root / "images", 3, first))


@pytest.mark.parametrize("layout", [coco, roboflow, flat])
def test_the_usual_layouts_of_splits_are_found(tmp_path: Path, layout: Any) -> None:
    for number, split in enumerate(("train", "val", "test")):
        layout(tmp_path, split, 3 * number)
    data = small(tmp_path)
    names = [[Path(name).name for name in data.names(split)] for split in ("train", "val", "test")]
    assert names == [[f"{3 * place + number:02}.png" for number in range(3)] for place in range(3)]
    assert look(data.val_dataloader()) == 5


def test_a_test_whose_answers_are_secret_is_replaced_by_a_part_of_training(tmp_path: Path) -> None:
    coco(tmp_path, "train", 0)
    write(tmp_path / "annotations" / "image_info_test2017.json", {"images": []})
    data = small(tmp_path)
    assert [Path(data.names(split)[0]).parent.name for split in ("train", "val", "test")] == ["train2017"] * 3


def test_images_may_lie_anywhere(tmp_path: Path) -> None:
    write(tmp_path / "a" / "all.json", draw(tmp_path / "pictures"))
    assert look(small(tmp_path / "a" / "all.json", images=tmp_path / "pictures").val_dataloader()) > 0
    with pytest.raises(DataError, match=r"The image 00\.png of .*all\.json is in none of .*: give images="):
        small(tmp_path / "a" / "all.json")


def test_boxes_are_cut_to_their_image_and_flat_ones_are_left_out_with_a_warning(tmp_path: Path) -> None:
    content = draw(tmp_path, 2)
    content["annotations"] = [
        {"image_id": 0, "category_id": 3, "bbox": [-5, 30, 20, 30]},
        {"image_id": 0, "category_id": 3, "bbox": [10, 10, 0, 5]},
        {"image_id": 0, "category_id": 3, "bbox": [60, 10, 9, 5]},
    ]
    file = write(tmp_path / "all.json", content)
    with pytest.warns(UserWarning, match=r"all\.json: 2 of 3 boxes have no area in their image; left out"):
        data = small(file, val_share=0.0, test_share=0.0, augment=False)
    targets = sorted((t["boxes"].tolist() for _, ts in data.train_dataloader() for t in ts), key=len)
    assert targets == [[], [[0.0, 30.0, 15.0, 40.0]]]


def test_crowds_are_no_aim_of_training_and_no_mistake_in_evaluation(tmp_path: Path, run_folder: Path) -> None:
    content = draw(tmp_path, 4)
    content["annotations"] = [
        {"image_id": number, "category_id": 3, "bbox": [left, 5, 10, 10], "iscrowd": crowd}
        for number in range(4)
        for left, crowd in ((2, 0), (25, 1))
    ]
    data = small(write(tmp_path / "all.json", content), val_share=0.0, test_share=0.0, augment=False)
    seen: list[int] = []

    class Finds(torch.nn.Module):
        """Finds both boxes, and keeps how many it is given to learn from."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, images: Any, targets: Any = None) -> Any:
            if targets is not None:
                seen.extend(len(target["boxes"]) for target in targets)
                return {"loss": self.weight.sum()}
            boxes = torch.tensor([[2.0, 5, 12, 15], [25, 5, 35, 15]])
            return [
                {"boxes": boxes, "scores": torch.tensor([0.5, 0.9]), "labels": torch.tensor([1, 1])} for _ in images
            ]

    task = ObjectDetection(Finds(), class_names=data.class_names)
    trainer = Trainer(max_epochs=1, project_dir=run_folder, log_with=None, default_callbacks=False, cpu=True)
    trainer.fit(task, data.train_dataloader())
    assert seen == [1] * 4
    assert trainer.validate(task, data.train_dataloader())["val/map"] == 1.0


def test_a_data_set_of_hugging_face_gives_the_same(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    content = draw(tmp_path)
    file = write(tmp_path / "all.json", content)
    of_image = [[a for a in content["annotations"] if a["image_id"] == number] for number in range(10)]
    objects = [
        {"bbox": [a["bbox"] for a in found], "category": [{3: 0, 7: 1}[a["category_id"]] for a in found]}
        for found in of_image
    ]
    kind = {
        "bbox": datasets.Sequence(datasets.Value("float32")),
        "category": datasets.ClassLabel(names=["grey", "white"]),
    }
    features = datasets.Features({"image": datasets.Image(), "objects": datasets.Sequence(kind)})
    images = [str(tmp_path / one["file_name"]) for one in content["images"]]
    table = datasets.Dataset.from_dict({"image": images, "objects": objects}, features=features)
    for ours, theirs in zip(
        small(file).val_dataloader() or (), small(dataset=table).val_dataloader() or (), strict=True
    ):
        assert torch.equal(ours[0][0], theirs[0][0])
        assert all(torch.equal(ours[1][0][key], theirs[1][0][key]) for key in ("boxes", "labels"))
    assert small(dataset=table).class_names == ["grey", "white"]
    with pytest.raises(DataError, match=r"no objects column 'boxes'; it has: image \(Image\), objects"):
        small(dataset=table, objects_column="boxes")


def test_a_detector_is_trained_and_tested_on_it(tmp_path: Path, run_folder: Path) -> None:
    data = small(write(tmp_path / "all.json", draw(tmp_path)), num_workers=1)
    task = ObjectDetection("torchvision:ssdlite320_mobilenet_v3_large", class_names=data.class_names, pretrained=False)
    trainer = Trainer(max_epochs=1, seed=0, project_dir=run_folder, log_with=None, default_callbacks=False, cpu=True)
    trainer.fit(task, data=data)
    assert set(trainer.test(task, data=data)) == {"test/map", "test/map_50", "test/map_75", "test/mar_100"}
    to_predict = small(predict_root=tmp_path)
    assert len(trainer.predict(task, data=to_predict)) == 10


def changed(content: Content, what: str) -> Any:
    if what == "no JSON":
        return "{"
    if what == "a list":
        return [1]
    if what == "no categories":
        del content["categories"]
    elif what == "unknown image":
        content["annotations"][2]["image_id"] = 99
    elif what == "short box":
        content["annotations"][0]["bbox"] = [1, 2, 3]
    elif what == "ids twice":
        content["images"][1]["id"] = 0
    elif what == "lost image":
        content["images"][4]["file_name"] = "lost.png"
    elif what == "no boxes":
        content["annotations"] = []
    elif what == "same names":
        content["categories"][0]["name"] = "grey"
    return content


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("no JSON", r"all\.json is no JSON: "),
        ("a list", r"all\.json is not as COCO's files are: it has no list of images"),
        ("no categories", r"all\.json is not as COCO's files are: has no 'categories'"),
        ("unknown image", r"1 annotations have an unknown image or category, the first \{'id': 2, 'image_id': 99"),
        ("short box", r"all\.json is not as COCO's files are: "),
        ("ids twice", r"its images have no ids of their own"),
        ("lost image", r"1 of the 10 images of .*all\.json do not exist, the first .*lost\.png"),
        ("no boxes", r"all\.json holds no box to train on"),
        ("same names", r"its categories are named twice, or unknown to training: white|grey"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_training(tmp_path: Path, what: str, told: str) -> None:
    file = write(tmp_path / "all.json", changed(draw(tmp_path), what))
    with pytest.raises(DataError, match=told):
        small(file)


def test_folders_that_cannot_be_used_say_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"root=.*nowhere does not exist; expected a JSON file"):
        small(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no JSON files; expected one to train on"):
        small(tmp_path / "empty")
    for name in ("a_train.json", "b_train.json"):
        write(tmp_path / "two" / name, draw(tmp_path / "two"))
    with pytest.raises(DataError, match=r"holds several files for the split 'train': "):
        small(tmp_path / "two")
    flat(tmp_path / "odd", "train", 0)
    odd = draw(tmp_path / "odd" / "images", 3, 3)
    odd["categories"][0]["name"] = "mauve"
    write(tmp_path / "odd" / "val.json", odd)
    with pytest.raises(DataError, match=r"val\.json .* unknown to training: mauve"):
        small(tmp_path / "odd")


def test_an_image_of_another_size_than_its_boxes_are_for_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "all.json", draw(tmp_path))
    Image.new("RGB", (10, 10)).save(tmp_path / "03.png")
    data = small(file, val_share=0.0, test_share=0.0)
    with pytest.raises(DataError, match=r"03\.png cannot be read: it is 10 x 10 pixels, its labels are for 53 x 40"):
        list(data.train_dataloader())


@pytest.mark.parametrize("settings", [{}, {"root": "x", "dataset": []}])
def test_settings_that_name_no_source_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="needs root= or dataset=, one of them"):
        small(**settings)
