"""`SemanticSegmentation`: labelled pixels count alike wherever they are, with models of three kinds."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sanctuary_trainer import SettingsError, TaskError, Trainer
from sanctuary_trainer.callbacks import OOMFallback
from sanctuary_trainer.tasks import SemanticSegmentation
from tests.bombs import Bomb

CLASSES, SIDE, UNLABELLED = 3, 32, 255


def scenes(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Images whose level tells the class of each half; some columns have no label, in every fourth image none has."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        mask = torch.empty(SIDE, SIDE, dtype=torch.int64)
        mask[:, : SIDE // 2], mask[:, SIDE // 2 :] = number % CLASSES, (number + 1) % CLASSES
        image = mask - 1 + 0.3 * torch.randn(3, SIDE, SIDE, generator=generator)
        mask[:, : 8 * (number % 4) + 8 * (number % 4 == 3)] = UNLABELLED
        made.append((image.to(dtype), mask))
    return made


def plain_model(bomb: Bomb | None = None) -> nn.Module:
    """Logits at half the images' sides."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), bomb or nn.Identity(), nn.ReLU(), nn.Conv2d(8, CLASSES, 1))


def segformer() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 8],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 1],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
    )
    model: nn.Module = transformers.AutoModelForSemanticSegmentation.from_config(config)
    return model


class TwoHeads(nn.Module):
    """As torchvision's models are: a dict with "out", and "aux" in training."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out, self.aux = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, CLASSES, 1), nn.Conv2d(8, CLASSES, 1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = self.stem(images).relu()
        outputs = {"out": self.out(features)}
        return outputs | ({"aux": self.aux(features)} if self.training else {})


def trainer(folder: Path, **settings: Any) -> Trainer:
    return Trainer(**{"project_dir": folder, "default_callbacks": False, "cpu": True, "seed": 0, **settings})


@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize("make", [plain_model, segformer, TwoHeads])
def test_any_model_learns_and_predicts_maps_of_the_images_size(make: Any, as_mapping: bool, run_folder: Path) -> None:
    samples: list[Any] = scenes(12)
    if as_mapping:
        samples = [{"pixel_values": image, "labels": mask} for image, mask in samples]
    task, loader = SemanticSegmentation(make(), num_classes=CLASSES, lr=2e-2), DataLoader(samples, 4)
    result = trainer(run_folder, max_epochs=20).fit(task, loader, loader)
    assert result.metrics["val/accuracy"] > 0.85 and result.metrics["val/mean_iou"] > 0.6
    maps = trainer(run_folder).predict(task, loader)
    assert isinstance(maps, list) and len(maps) == 12
    assert maps[0].shape == (SIDE, SIDE) and maps[0].dtype == torch.uint8
    masks = torch.stack([mask for _, mask in scenes(12)])
    right = (torch.stack(maps) == masks)[masks != UNLABELLED].double().mean().item()
    assert right == pytest.approx(result.metrics["val/accuracy"])


def test_evaluation_is_over_labelled_pixels_of_uneven_batches(run_folder: Path) -> None:
    task, samples = SemanticSegmentation(plain_model(), num_classes=CLASSES), scenes(11)
    values = trainer(run_folder).test(task, DataLoader(samples, 3))
    images, masks = (torch.stack(part) for part in zip(*samples, strict=True))
    with torch.no_grad():
        logits = task.eval()(images)
    found, labelled = logits.argmax(1), masks != UNLABELLED
    overlaps = []
    for kind in range(CLASSES):
        a, b = (found == kind)[labelled], (masks == kind)[labelled]
        overlaps.append((a & b).sum().item() / (a | b).sum().item())
    assert values["test/mean_iou"] == pytest.approx(sum(overlaps) / CLASSES, rel=1e-5)
    assert values["test/accuracy"] == pytest.approx((found == masks)[labelled].double().mean().item())
    assert values["test/loss"] == pytest.approx(F.cross_entropy(logits, masks, ignore_index=255).item(), rel=1e-5)


def test_a_named_model_predicts_what_its_processor_makes_of_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    segformer().save_pretrained(tmp_path)  # type: ignore[operator]
    transformers.SegformerImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    task = SemanticSegmentation(f"transformers:{tmp_path}", class_names=["a", "b", "c"]).eval()
    assert task.model.config.label2id == {"a": 0, "b": 1, "c": 2}
    images = torch.randn(2, 3, 40, 24)
    with torch.no_grad():
        wanted = task.image_processor.post_process_semantic_segmentation(task.model(images), [(40, 24), (40, 24)])
        assert torch.equal(task.predict_step(images, 0).long(), torch.stack(wanted).long())


def test_a_model_of_torchvision_by_its_name() -> None:
    pytest.importorskip("torchvision")
    task = SemanticSegmentation("torchvision:lraspp_mobilenet_v3_large", num_classes=CLASSES, pretrained=False).eval()
    with torch.no_grad():
        assert task.predict_step(torch.randn(1, 3, 64, 48), 0).shape == (1, 64, 48)


def test_a_pretrained_model_of_torchvision_keeps_its_second_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """With outputs for the classes at hand; the weights are made up, since there is no network."""
    models = pytest.importorskip("torchvision").models
    name = "deeplabv3_mobilenet_v3_large"

    def made_up(weights: Any, *args: Any, **settings: Any) -> Any:
        model = models.get_model(name, weights=None, weights_backbone=None, aux_loss=True, num_classes=21)
        return {key: torch.full_like(value, 0.5) for key, value in model.state_dict().items()}

    monkeypatch.setattr("torchvision.models._api.WeightsEnum.get_state_dict", made_up)
    model: Any = SemanticSegmentation(f"torchvision:{name}", num_classes=CLASSES).model
    for head in (model.classifier, model.aux_classifier):
        *kept, last = [layer for layer in head.modules() if isinstance(layer, nn.Conv2d)]
        assert last.out_channels == CLASSES and not (last.weight == 0.5).all()
        assert all((layer.weight == 0.5).all() for layer in kept)
    assert model.train()(torch.randn(2, 3, 64, 64))["aux"].shape == (2, CLASSES, 64, 64)


def test_a_second_head_of_transformers_whose_maps_are_not_given_is_not_trained() -> None:
    """Ranks would wait for gradients that never come."""
    transformers = pytest.importorskip("transformers")
    backbone = transformers.ConvNextConfig(
        hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"]
    )
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=8, auxiliary_channels=8, auxiliary_in_channels=8, num_labels=CLASSES
    )
    task = SemanticSegmentation(transformers.UperNetForSemanticSegmentation(config))
    loss = task.training_step((torch.randn(2, 3, 64, 64), torch.randint(0, CLASSES, (2, 64, 64))), 0)["loss"]
    loss.backward()
    lacking = {name for name, p in task.named_parameters() if p.requires_grad and p.grad is None}
    assert not lacking and not any(p.requires_grad for p in task.model.auxiliary_head.parameters())


def weights_of(task: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in task.parameters()])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_batches_that_run_out_of_memory_give_the_same_update_in_pieces(where: Any, run_folder: Path) -> None:
    """Pieces of 1 and 2 scenes, some of them without a labelled pixel."""
    fitted, events = [], []
    for armed in (False, True):
        torch.manual_seed(0)
        bomb = Bomb()
        task = SemanticSegmentation(plain_model(bomb), num_classes=CLASSES, lr=1e-2).double()
        if armed:
            bomb.arm(where, above=2)
        result = trainer(run_folder, max_epochs=2, callbacks=[OOMFallback()]).fit(
            task, DataLoader(scenes(12, torch.float64), 5)
        )
        fitted.append(weights_of(task))
        events.append(len(result.oom_events))
    assert events[0] == 0 and events[1] > 0
    assert torch.allclose(fitted[0], fitted[1], rtol=0, atol=1e-12)


def test_accumulated_batches_count_pixel_for_pixel_as_one(run_folder: Path) -> None:
    fitted = []
    for batch_size, windows in ((12, 1), (3, 4)):
        torch.manual_seed(0)
        task = SemanticSegmentation(plain_model(), num_classes=CLASSES, lr=1e-2).double()
        settings: dict[str, Any] = {"max_epochs": 2, "gradient_accumulation_steps": windows}
        trainer(run_folder, **settings).fit(task, DataLoader(scenes(12, torch.float64), batch_size))
        fitted.append(weights_of(task))
    assert torch.allclose(fitted[0], fitted[1], rtol=0, atol=1e-12)


def test_what_does_not_fit_is_named() -> None:
    images = torch.randn(2, 3, SIDE, SIDE)
    with pytest.raises(SettingsError, match="How many classes"):
        SemanticSegmentation(plain_model())
    with pytest.raises(TaskError, match=r"logits of shape \(2, 3, 16, 16\); expected \(B, 5, h, w\)"):
        SemanticSegmentation(plain_model(), num_classes=5).predict_step(images, 0)
    with pytest.raises(TaskError, match="returned logits of shape"):
        SemanticSegmentation(nn.Flatten(), num_classes=3).predict_step(images, 0)
    with pytest.raises(SettingsError, match="timm has no models for segmentation"):
        SemanticSegmentation("timm:resnet18", num_classes=3)
