"""`ImageClassification` with models of torch, timm and transformers, and what it says when something does not fit."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from sanctuary_trainer import SettingsError, TaskError, Trainer
from sanctuary_trainer.tasks import ImageClassification
from sanctuary_trainer.tasks.image_classification import warm_up_and_cosine

NUM_CLASSES, SIDE = 3, 32


class Shades(Dataset[Any]):
    """Noise around one of three shades; a label is the shade's number."""

    def __init__(self, n: int = 22, keys: tuple[str, str] | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.arange(n) % NUM_CLASSES
        self.images = self.labels[:, None, None, None] - 1 + 0.3 * torch.randn(n, 3, SIDE, SIDE, generator=generator)
        self.keys = keys

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> Any:
        sample = self.images[i], self.labels[i]
        return sample if self.keys is None else dict(zip(self.keys, sample, strict=True))


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def timm_model() -> nn.Module:
    timm = pytest.importorskip("timm")
    model: nn.Module = timm.create_model("test_resnet", num_classes=NUM_CLASSES)
    return model


def transformers_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=SIDE,
        patch_size=8,
        num_labels=NUM_CLASSES,
    )
    model: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
    return model


def trainer(folder: Path, **settings: Any) -> Trainer:
    return Trainer(**{"project_dir": folder, "default_callbacks": False, "cpu": True, "seed": 0, **settings})


@pytest.mark.parametrize("keys", [None, ("pixel_values", "labels"), ("image", "label")])
@pytest.mark.parametrize("make", [plain_model, timm_model, transformers_model])
def test_any_model_learns_from_pairs_and_from_mappings(
    make: Callable[[], nn.Module], keys: tuple[str, str] | None, run_folder: Path
) -> None:
    task = ImageClassification(make(), lr=5e-3)
    loader: DataLoader[Any] = DataLoader(Shades(keys=keys), 8)
    before = trainer(run_folder).test(task, loader)
    result = trainer(run_folder, max_epochs=20).fit(task, loader, loader)
    after = trainer(run_folder).test(task, loader)
    assert after["test/loss"] < 0.5 * before["test/loss"]
    assert result.metrics["val/accuracy"] == after["test/accuracy"] >= 0.9


def test_accuracy_and_loss_are_means_over_all_images_of_uneven_batches(run_folder: Path) -> None:
    task = ImageClassification(plain_model(), label_smoothing=0.2)
    data = Shades(22)
    values = trainer(run_folder).test(task, DataLoader(data, 5))
    with torch.no_grad():
        logits = task.eval()(data.images)
    assert values["test/accuracy"] == pytest.approx((logits.argmax(1) == data.labels).double().mean().item())
    assert values["test/loss"] == pytest.approx(F.cross_entropy(logits, data.labels).item(), rel=1e-5)


def test_training_smooths_the_labels() -> None:
    task = ImageClassification(plain_model(), label_smoothing=0.2)
    images, labels = torch.randn(4, 3, SIDE, SIDE), torch.tensor([0, 1, 2, 0])
    expected = F.cross_entropy(task(images), labels, label_smoothing=0.2)
    assert torch.equal(task.training_step((images, labels), 0), expected)


@pytest.mark.parametrize("collate", [None, lambda samples: torch.stack([image for image, _ in samples])])
def test_predictions_are_probabilities_also_of_images_without_labels(collate: Any, run_folder: Path) -> None:
    task = ImageClassification(plain_model(), class_names=["dark", "grey", "light"])
    predictions = trainer(run_folder).predict(task, DataLoader(Shades(7), 3, collate_fn=collate))
    assert isinstance(predictions, list) and len(predictions) == 7
    probabilities = torch.stack(predictions)
    with torch.no_grad():
        assert torch.allclose(probabilities, task.eval()(Shades(7).images).softmax(1), atol=1e-6)


def test_probabilities_are_full_precision_under_bf16(run_folder: Path) -> None:
    predictions = trainer(run_folder, mixed_precision="bf16").predict(
        ImageClassification(plain_model()), DataLoader(Shades(4), 4)
    )
    assert isinstance(predictions, list) and predictions[0].dtype == torch.float32
    assert float(predictions[0].sum()) == pytest.approx(1, abs=1e-6)


def test_the_learning_rate_rises_and_falls_to_almost_zero() -> None:
    factors = [warm_up_and_cosine(step, 100) for step in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(a > b > 0 for a, b in itertools.pairwise(factors[4:]))
    assert factors[-1] < 0.001 and warm_up_and_cosine(100, 100) == pytest.approx(0, abs=1e-12)
    assert [warm_up_and_cosine(step, 1) for step in range(2)] == [1.0, 0.0]


def test_the_schedule_spans_the_run(run_folder: Path) -> None:
    task = ImageClassification(plain_model(), lr=0.1)
    result = trainer(run_folder, max_epochs=2, log_every_n_steps=1).fit(task, DataLoader(Shades(20), 5))
    assert result.global_step == 8
    assert result.metrics["train/lr"] == pytest.approx(0.1 * 0.5 * (1 + math.cos(math.pi * 7 / 8)))


def test_where_the_end_is_not_known_the_learning_rate_stays(run_folder: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            data = Shades(10)
            return (data[i] for i in range(len(data)))

    task = ImageClassification(plain_model(), lr=0.1)
    result = trainer(run_folder, max_epochs=2, log_every_n_steps=1).fit(task, DataLoader(Stream(), 5))
    assert result.global_step == 4 and result.metrics["train/lr"] == 0.1


def test_hyperparameters_are_the_settings_without_the_model() -> None:
    task = ImageClassification(plain_model(), class_names=("a", "b", "c"), lr=0.01)
    assert task.class_names == ["a", "b", "c"]
    assert task.hparams.keys() == {"class_names", "lr", "weight_decay", "label_smoothing"}
    assert task.hparams["lr"] == 0.01


def test_frozen_parameters_are_left_alone(run_folder: Path) -> None:
    model = plain_model()
    model[0].requires_grad_(False)  # type: ignore[index, operator]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer(run_folder, max_epochs=1).fit(ImageClassification(model), DataLoader(Shades(10), 5))
    after = list(model.parameters())
    assert torch.equal(before[0], after[0]) and not torch.equal(before[-1], after[-1])


@pytest.mark.parametrize("settings", [{"lr": 0.0}, {"weight_decay": -1.0}, {"label_smoothing": 1.0}])
def test_settings_outside_their_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=r"expected lr > 0"):
        ImageClassification(plain_model(), **settings)  # type: ignore[arg-type]


def test_what_does_not_fit_is_named() -> None:
    images, labels = torch.randn(2, 3, SIDE, SIDE), torch.tensor([0, 1])
    task = ImageClassification(plain_model(), class_names=["a", "b"])
    with pytest.raises(TaskError, match=r"Sequential tells 3 classes apart, and 2 have names"):
        task.predict_step(images, 0)
    with pytest.raises(TaskError, match=r"logits of shape \(2, 8, 8, 8\); expected a tensor \(B, K\)"):
        ImageClassification(nn.Conv2d(3, 8, 4, 4)).predict_step(images, 0)
    with pytest.raises(TaskError, match=r"keys \['x', 'labels'\] holds no tensor of images; .*pixel_values"):
        task.training_step({"x": images, "labels": labels}, 0)
    with pytest.raises(TaskError, match=r"of type Tensor holds no tensor of labels"):
        task.training_step(images, 0)
