"""`ObjectDetection`: models of both conventions see the same batches and answer in pixels of their images."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sanctuary_trainer import SettingsError, TaskError, Trainer
from sanctuary_trainer.callbacks import OOMFallback
from sanctuary_trainer.tasks import ObjectDetection, collate_boxes
from tests.bombs import Bomb

pytest.importorskip("pycocotools")
torchvision = pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers")

NAMES = ["square", "bar"]


def scene(number: int, size: tuple[int, int] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """An image of its own size with 0 to 2 bright shapes on grey."""
    generator = torch.Generator().manual_seed(number)
    height, width = size or (64 + 16 * (number % 2), 64 + 8 * (number % 3))
    image = 0.3 + 0.05 * torch.rand(3, height, width, generator=generator)
    boxes, labels = [], []
    for place in range(number % 3):
        label = (number + place) % 2
        left, top = 4 + 34 * place, 6 + int(torch.randint(0, 20, (1,), generator=generator))
        box = (left, top, left + (22 if label == 0 else 10), top + 22)
        image[label, box[1] : box[3], box[0] : box[2]] = 0.9
        boxes.append(box)
        labels.append(label)
    return image, {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
    }


def loader(count: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader([scene(number) for number in range(count)], batch_size, collate_fn=collate_boxes)  # type: ignore[arg-type]


class Small(nn.Module):
    """A backbone of one map at an eighth of the image."""

    def __init__(self, bomb: Bomb | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), bomb or nn.Identity(), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()),
        )
        self.out_channels = 16

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"0": self.layers(images)}


def retinanet(bomb: Bomb | None = None) -> nn.Module:
    detection = torchvision.models.detection
    anchors = detection.anchor_utils.AnchorGenerator(((16, 24),), ((0.5, 1.0, 2.0),))
    # With its norm, as version 2 has it: without, so small a head would hardly learn.
    head = detection.retinanet.RetinaNetHead(16, 6, len(NAMES) + 1, norm_layer=partial(nn.GroupNorm, 4))
    model: nn.Module = detection.RetinaNet(
        Small(bomb), len(NAMES) + 1, min_size=64, max_size=96, anchor_generator=anchors, head=head
    )
    return model


def tiny(kind: str) -> nn.Module:
    """DETR takes a mask of the padding, YOLOS does not; Conditional DETR gives each class a chance of its own."""
    if kind == "yolos":
        config = transformers.YolosConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=[64, 64],
            patch_size=16,
            num_detection_tokens=6,
            num_labels=len(NAMES),
        )
    else:
        backbone = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
        )
        make = transformers.DetrConfig if kind == "detr" else transformers.ConditionalDetrConfig
        config = make(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=backbone,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_queries=6,
            num_labels=len(NAMES),
        )
    model: nn.Module = transformers.AutoModelForObjectDetection.from_config(config)
    return model


def processor() -> Any:
    return transformers.DetrImageProcessor(size={"shortest_edge": 64, "longest_edge": 96})


def trainer(folder: Path, **settings: Any) -> Trainer:
    return Trainer(**{"project_dir": folder, "default_callbacks": False, "cpu": True, "seed": 0, **settings})


def test_a_model_of_torchvision_learns_to_find_the_shapes(run_folder: Path) -> None:
    task, data = ObjectDetection(retinanet(), class_names=NAMES, lr=1e-2, least_score=0.3), loader(12, 4)
    result = trainer(run_folder, max_epochs=50, check_val_every_n_epoch=50).fit(task, data, data)
    assert result.metrics["val/map_50"] > 0.5
    found = trainer(run_folder).predict(task, data)
    assert isinstance(found, list) and len(found) == 12
    labels: set[int] = set()
    for number, of_image in enumerate(found):
        boxes, scores = of_image["boxes"], of_image["scores"]
        assert boxes.shape == (len(scores), 4) and (scores >= 0.3).all()
        height, width = scene(number)[0].shape[1:]
        assert (boxes >= 0).all() and (boxes <= torch.tensor([width, height] * 2)).all()
        labels |= set(of_image["labels"].tolist())
    assert labels == {0, 1}


@pytest.mark.parametrize("kind", ["detr", "yolos", "conditional"])
@pytest.mark.parametrize("processed", [True, False])
def test_models_of_transformers_train_evaluate_and_predict(kind: str, processed: bool, run_folder: Path) -> None:
    task = ObjectDetection(
        tiny(kind), class_names=NAMES, image_processor=processor() if processed else None, least_score=0.0, lr=1e-3
    )
    data = loader(6, 4)
    result = trainer(run_folder, max_epochs=1).fit(task, data, data)
    assert {"val/map", "val/map_50", "val/mar_100"} <= result.metrics.keys()
    found = trainer(run_folder).predict(task, data)
    assert isinstance(found, list) and len(found) == 6
    assert all(of_image["boxes"].shape == (len(of_image["labels"]), 4) for of_image in found)


@pytest.mark.parametrize("kind", ["detr", "yolos", "conditional"])
def test_boxes_are_those_of_the_librarys_own_processing(kind: str) -> None:
    """Images of one size, so that nothing is padded."""
    task = ObjectDetection(tiny(kind), image_processor=processor(), least_score=0.0).eval()
    images = [scene(number)[0] for number in (0, 6)]
    made = processor()(images=images, do_rescale=False, return_tensors="pt")
    of = {"detr": "DetrImageProcessor", "yolos": "YolosImageProcessor", "conditional": "ConditionalDetrImageProcessor"}
    library = getattr(transformers, of[kind])()
    with torch.no_grad():
        inputs = {"pixel_values": made["pixel_values"]} | (
            {} if kind == "yolos" else {"pixel_mask": made["pixel_mask"]}
        )
        sizes = torch.tensor([image.shape[1:] for image in images])
        wanted = library.post_process_object_detection(task.model(**inputs), threshold=0.0, target_sizes=sizes)
        for found, expected in zip(task.predict_step(images, 0), wanted, strict=True):
            scores, rows = expected["scores"].sort(descending=True)
            assert torch.allclose(found["scores"], scores, atol=1e-6)
            assert torch.allclose(found["boxes"], expected["boxes"][rows], atol=1e-4)
            assert torch.equal(found["labels"], expected["labels"][rows])


@pytest.mark.parametrize("kind", ["detr", "yolos"])
def test_padding_does_not_move_the_boxes(kind: str) -> None:
    """What a model is told to find is what its perfect answer is read as, in an image beside a larger one."""
    from sanctuary_trainer.tasks.detectors import QueryDetector

    told: dict[str, Any] = {}
    small, large = torch.rand(3, 48, 64), torch.rand(3, 64, 96)
    targets = [{"boxes": torch.tensor([[8.0, 4.0, 40.0, 44.0]]), "labels": torch.tensor([1])} for _ in range(2)]

    def model(labels: Any = None, **inputs: Tensor) -> Any:
        told.setdefault("labels", labels)
        answers = torch.stack([label["boxes"] for label in told["labels"]])
        return transformers.utils.ModelOutput(
            loss=torch.zeros(()), loss_dict={}, logits=torch.tensor([[[0.0, 9.0, 0.0]]] * 2), pred_boxes=answers
        )

    model.config = tiny("yolos").config  # type: ignore[attr-defined]
    detector = QueryDetector(takes_mask=kind == "detr")
    detector.losses(model, [small, large], targets, None)
    for found in detector.detect(model, [small, large], None):
        assert torch.allclose(found["boxes"], targets[0]["boxes"], atol=1e-4) and found["labels"].tolist() == [1]


def test_a_batch_of_the_image_processor_is_the_batch_of_its_images() -> None:
    """As Hugging Face's examples collate it: relative boxes in `labels`, and a mask of the padding."""
    task = ObjectDetection(tiny("detr"), image_processor=processor()).eval()
    images, targets = collate_boxes([scene(number) for number in (1, 2, 3)])
    annotations = []
    for number, target in enumerate(targets):
        annotations.append({"image_id": number, "annotations": []})
        for (left, top, right, bottom), label in zip(target["boxes"].tolist(), target["labels"].tolist(), strict=True):
            box = [left, top, right - left, bottom - top]
            annotation = {"bbox": box, "category_id": label, "area": box[2] * box[3], "iscrowd": 0}
            annotations[-1]["annotations"].append(annotation)  # type: ignore[attr-defined]
    batch = processor()(images=images, annotations=annotations, do_rescale=False, return_tensors="pt")
    assert task.batch_size(batch) == 3
    assert [task.batch_size(piece) for piece in task.split_batch(batch, [2, 1])] == [2, 1]
    assert torch.allclose(task.training_step(batch, 0), task.training_step((images, targets), 0), rtol=1e-4)


def test_batches_that_run_out_of_memory_give_the_same_update_in_pieces(run_folder: Path) -> None:
    """RetinaNet's loss is a mean over images, so that pieces of it add up to the whole; some have no boxes."""
    fitted, events = [], []
    for armed in (False, True):
        torch.manual_seed(0)
        bomb = Bomb()
        task = ObjectDetection(retinanet(bomb), class_names=NAMES, lr=1e-3).double()
        if armed:
            bomb.arm("backward", above=2)
        data = [
            (image.double(), {"boxes": target["boxes"].double(), "labels": target["labels"]})
            for image, target in (scene(number, (64, 80)) for number in range(7))  # alike: padding has anchors too
        ]
        result = trainer(run_folder, max_epochs=2, callbacks=[OOMFallback()]).fit(
            task,
            DataLoader(data, 4, collate_fn=collate_boxes),  # type: ignore[arg-type]
        )
        fitted.append(torch.cat([parameter.detach().flatten() for parameter in task.parameters()]))
        events.append(len(result.oom_events))
    assert events[0] == 0 and events[1] > 0
    assert torch.allclose(fitted[0], fitted[1], rtol=0, atol=1e-9)


def test_the_cost_of_a_batch_is_that_of_its_padded_images() -> None:
    task = ObjectDetection(retinanet(), class_names=NAMES)
    assert task.cost(([torch.zeros(3, 10, 20), torch.zeros(3, 30, 5)], [{}, {}])) == 2 * 3 * 30 * 20


def test_named_models_count_the_background_by_themselves() -> None:
    task = ObjectDetection("torchvision:ssdlite320_mobilenet_v3_large", class_names=NAMES, pretrained=False).eval()
    with torch.no_grad():
        found = task.predict_step([torch.rand(3, 50, 60)], 0)
    assert task.model.head.classification_head.num_columns == 3
    assert found[0]["boxes"].shape[1:] == (4,) and set(found[0]["labels"].tolist()) <= {0, 1}


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ObjectDetection(retinanet(), class_names=NAMES)
    image, target = scene(1)
    with pytest.raises(TaskError, match=r"holds no targets; .*collate_fn=collate_boxes"):
        task.training_step([image], 0)
    with pytest.raises(TaskError, match=r"holds no images \(3, H, W\)"):
        task.predict_step({"x": image}, 0)
    with pytest.raises(TaskError, match=r"A target holds .*; expected boxes \(n, 4\) and labels \(n,\)"):
        task.training_step(([image], [{"boxes": target["boxes"]}]), 0)
    with pytest.raises(SettingsError, match="least_score=2"):
        ObjectDetection(retinanet(), least_score=2)
    monkeypatch.setitem(__import__("sys").modules, "pycocotools", None)
    with pytest.raises(SettingsError, match=r"needs pycocotools, .*pip install"):
        ObjectDetection(retinanet())


def test_a_mask_that_the_model_drops_is_not_relied_on() -> None:
    """RT-DETR takes `pixel_mask` and looks at the padding all the same: its boxes are of the padded image."""
    from sanctuary_trainer.tasks.detectors import QueryDetector, detector_of

    config = transformers.RTDetrConfig(
        backbone_config=transformers.RTDetrResNetConfig(
            embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1] * 4, layer_type="basic",
            out_features=["stage2", "stage3", "stage4"],
        ),
        encoder_hidden_dim=16, encoder_in_channels=[8, 8, 8], encoder_ffn_dim=16, d_model=16, num_queries=4,
        decoder_in_channels=[16, 16, 16], decoder_ffn_dim=16, decoder_layers=1, decoder_attention_heads=2,
        encoder_attention_heads=2, num_denoising=0, num_labels=len(NAMES),
    )  # fmt: skip
    model = transformers.RTDetrForObjectDetection(config).eval()
    images, mask = torch.rand(1, 3, 64, 64), torch.ones(1, 64, 64, dtype=torch.int64)
    half = mask.clone()
    half[:, :, 32:] = 0
    with torch.no_grad():
        assert torch.equal(model(images, pixel_mask=mask).pred_boxes, model(images, pixel_mask=half).pred_boxes)
    detector, drops = detector_of(model), detector_of(tiny("detr"))
    assert isinstance(detector, QueryDetector) and not detector.takes_mask
    assert isinstance(drops, QueryDetector) and drops.takes_mask


def test_a_processor_that_tells_of_no_padding_serves_too() -> None:
    yolos = transformers.YolosImageProcessor(size={"shortest_edge": 64, "longest_edge": 96})
    task = ObjectDetection(tiny("yolos"), image_processor=yolos, least_score=0.0).eval()
    found = task.predict_step([torch.rand(3, 48, 64), torch.rand(3, 64, 48)], 0)
    assert [len(of_image["boxes"]) for of_image in found] == [6, 6]


@pytest.mark.parametrize("labels", [[-1, 0], [1, len(NAMES)]])
def test_labels_that_are_no_class_are_refused(labels: list[int]) -> None:
    task = ObjectDetection(tiny("detr"), class_names=NAMES)
    target = {"boxes": torch.tensor([[1.0, 1.0, 9.0, 9.0]] * 2), "labels": torch.tensor(labels)}
    with pytest.raises(TaskError, match=rf"labels go from {labels[0]} to {labels[1]}; expected 0 to {len(NAMES)} - 1"):
        task.training_step(([torch.rand(3, 32, 32)], [target]), 0)


def test_a_model_that_needs_masks_is_refused() -> None:
    with pytest.raises(SettingsError, match="MaskRCNN is trained with masks or keypoints"):
        ObjectDetection("torchvision:maskrcnn_resnet50_fpn", class_names=NAMES, pretrained=False)


def test_a_pretrained_detector_with_other_classes_keeps_its_batch_norm_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchvision makes it for fine-tuning; the weights are made up, since there is no network."""
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"

    def made_up(weights: Any, *args: Any, **settings: Any) -> Any:
        whole = type(weights).__name__.startswith("FasterRCNN")
        models = torchvision.models
        model = models.get_model(name, weights=None, weights_backbone=None) if whole else models.mobilenet_v3_large()
        return {key: torch.full_like(value, 0.5) for key, value in model.state_dict().items()}

    monkeypatch.setattr("torchvision.models._api.WeightsEnum.get_state_dict", made_up)
    model = ObjectDetection(f"torchvision:{name}", class_names=NAMES).model
    kinds = {type(module).__name__ for module in model.modules() if type(module).__name__.endswith("Norm2d")}
    assert kinds == {"FrozenBatchNorm2d"}
    first = next(model.backbone.parameters())
    assert (first == 0.5).all() and not first.requires_grad
    assert model.roi_heads.box_predictor.cls_score.out_features == len(NAMES) + 1
