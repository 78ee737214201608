"""`ImageClassification` with models of torch, timm and transformers, and what it says when something does not fit."""

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from sanctuary_trainer import SettingsError, TaskError, Trainer
from sanctuary_trainer.callbacks import Checkpoint
from sanctuary_trainer.tasks import ImageClassification, ImageData
from sanctuary_trainer.tasks.fitting import warm_up_and_cosine
from sanctuary_trainer.tasks.model_inputs import inputs_of

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
    settings = {"class_names", "num_classes", "pretrained", "lr", "weight_decay", "label_smoothing"}
    assert task.hparams.keys() == settings
    assert task.hparams["lr"] == 0.01


def test_frozen_parameters_are_left_alone(run_folder: Path) -> None:
    model = plain_model()
    model[0].requires_grad_(False)  # type: ignore[index, operator]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer(run_folder, max_epochs=1).fit(ImageClassification(model), DataLoader(Shades(10), 5))
    after = list(model.parameters())
    assert torch.equal(before[0], after[0]) and not torch.equal(before[-1], after[-1])


@pytest.mark.parametrize(
    "settings", [{"lr": 0.0}, {"lr": float("nan")}, {"weight_decay": -1.0}, {"label_smoothing": 1.0}]
)
def test_settings_outside_their_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=r"=\S+; expected (a learning rate above 0|at least 0|a share)"):
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


def vit_folder(folder: Path) -> Path:
    """A model and its image processor, as `save_pretrained` leaves them."""
    transformers = pytest.importorskip("transformers")
    transformers_model().save_pretrained(folder)  # type: ignore[operator]
    size = {"height": SIDE, "width": SIDE}
    transformers.ViTImageProcessor(size=size, image_mean=[0.4, 0.5, 0.6]).save_pretrained(folder)
    return folder


def images_of_shades(root: Path, each: int = 4) -> Path:
    """FOLDER/SHADE/IMAGE: grey levels with some noise."""
    for shade, level in {"dark": 40, "grey": 120, "light": 210}.items():
        (root / shade).mkdir(parents=True)
        for number in range(each):
            noise = np.random.default_rng(number).integers(-30, 30, (44, 50, 3))
            Image.fromarray((level + noise).astype(np.uint8)).save(root / shade / f"{number}.png")
    return root


@pytest.mark.parametrize("best", [True, False])
def test_a_checkpoints_model_folder_is_a_pipeline_that_answers_as_predict_does(
    best: bool, tmp_path: Path, run_folder: Path
) -> None:
    """Also of `load_from_checkpoint`, which needs no arguments."""
    transformers = pytest.importorskip("transformers")
    data = ImageData(images_of_shades(tmp_path / "shades"), batch_size=3, num_workers=0, augment=False)
    task = ImageClassification(f"transformers:{vit_folder(tmp_path / 'vit')}", class_names=data.class_names, lr=1e-2)
    data.adapt(task)
    watch = Checkpoint(monitor="val/accuracy", mode="max") if best else Checkpoint()
    result = trainer(run_folder, max_epochs=2, callbacks=[watch]).fit(
        task, data.train_dataloader(), data.val_dataloader()
    )
    assert result.best_checkpoint is not None
    loaded = ImageClassification.load_from_checkpoint(result.best_checkpoint)
    predictions = torch.stack(list(trainer(run_folder).predict(loaded, data.test_dataloader()) or []))

    folder = result.best_checkpoint / "model"
    saved = transformers.AutoModelForImageClassification.from_pretrained(folder)
    assert saved.config.id2label == {0: "dark", 1: "grey", 2: "light"}
    assert saved.config.label2id == {"dark": 0, "grey": 1, "light": 2}
    pipeline = transformers.pipeline("image-classification", model=str(folder), device="cpu")
    answers = pipeline(data.names("test"), top_k=3)
    named = [{answer["label"]: answer["score"] for answer in of_image} for of_image in answers]
    piped = torch.tensor([[scores[name] for name in ("dark", "grey", "light")] for scores in named])
    assert len(predictions) == 3 and torch.allclose(piped, predictions, rtol=0, atol=1e-6)


def test_a_model_of_transformers_brings_its_size_and_normalisation(tmp_path: Path) -> None:
    task = ImageClassification(f"transformers:{vit_folder(tmp_path)}", pretrained=False)
    assert task.inputs is not None and task.inputs.size == (SIDE, SIDE)
    image = Image.new("RGB", (50, 44), (255, 255, 255))
    expected = (1 - torch.tensor([0.4, 0.5, 0.6])) / 0.5
    for transform in (task.inputs.transform, task.inputs.augment()):
        assert torch.allclose(transform(image), expected[:, None, None].expand(3, SIDE, SIDE), atol=1e-6)


def test_models_by_name_have_as_many_outputs_as_classes_and_bring_their_transforms() -> None:
    timm, torchvision = pytest.importorskip("timm"), pytest.importorskip("torchvision")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 120, 3)).astype(np.uint8))
    task = ImageClassification("timm:test_vit", class_names=["a", "b"], pretrained=False)
    config = timm.data.resolve_model_data_config(task.model)
    assert task.inputs is not None and task.inputs.size == config["input_size"][1:]
    prepared = task.inputs.transform(image)
    assert torch.equal(prepared, timm.data.create_transform(**config)(image))
    assert task.predict_step(prepared[None], 0).shape == (1, 2)

    task = ImageClassification("torchvision:squeezenet1_1", num_classes=5, pretrained=False)
    assert task.inputs is not None and task.inputs.size == (224, 224)
    prepared = task.inputs.transform(image)
    assert torch.equal(prepared, torchvision.models.SqueezeNet1_1_Weights.DEFAULT.transforms()(image))
    assert task.eval().predict_step(prepared[None], 0).shape == (1, 5)


def test_a_pretrained_model_of_torchvision_changes_its_last_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its weights ask for stays, too: GoogLeNet's were trained on images normalised otherwise. Weights are made
    up, since there is no network."""
    models = pytest.importorskip("torchvision").models

    def made_up(weights: Any, *args: Any, **settings: Any) -> Any:
        model = models.googlenet(weights=None, init_weights=False)
        return {key: torch.full_like(value, 0.5) for key, value in model.state_dict().items()}

    monkeypatch.setattr("torchvision.models._api.WeightsEnum.get_state_dict", made_up)
    monkeypatch.setattr(
        torch.nn.init, "trunc_normal_", lambda tensor, *args, **settings: tensor
    )  # slow, and for nothing
    model: Any = ImageClassification("torchvision:googlenet", num_classes=10).model
    assert model.transform_input and model.fc.out_features == 10 and model.aux1 is None
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("fc.")]
    assert all((parameter == 0.5).all() for parameter in others) and not (model.fc.weight == 0.5).all()


def test_a_vision_transformer_of_torchvision_gets_images_of_its_own_size() -> None:
    """Weights may be of a larger model than its builder makes without them: vit_h_14's are of 518 pixels a side."""
    torchvision = pytest.importorskip("torchvision")
    task = ImageClassification("torchvision:vit_b_16", num_classes=2, pretrained=False)
    assert task.inputs is not None and task.inputs.size == (224, 224)
    small = torchvision.models.VisionTransformer(64, 16, 1, 2, 16, 32, num_classes=2)
    inputs = inputs_of(small, "torchvision:vit_h_14", None)
    assert inputs is not None and inputs.size == (64, 64)


def test_a_processor_that_cannot_be_read_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    (vit_folder(tmp_path) / "preprocessor_config.json").write_text("{ broken")
    with pytest.raises(SettingsError, match=r"image processor .*preprocessor_config\.json cannot be read"):
        ImageClassification(f"transformers:{tmp_path}")
    (tmp_path / "preprocessor_config.json").unlink()
    assert ImageClassification(f"transformers:{tmp_path}").image_processor is None


def test_a_processor_that_keeps_the_ratio_of_the_sides_gives_images_of_one_size(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.ConvNextImageProcessor(size={"shortest_edge": 384})  # from 384 on it does not crop
    vit_folder(tmp_path)
    keeps = transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, do_center_crop=False)
    for each, side in ((processor, 384), (keeps, SIDE)):
        inputs = inputs_of(transformers_model(), None, each)
        assert inputs is not None
        assert {inputs.transform(Image.new("RGB", size)).shape for size in ((64, 64), (64, 90), (90, 64))} == {
            (3, side, side)
        }


def test_names_of_classes_with_gaps_or_twice_are_refused() -> None:
    model: Any = transformers_model()
    model.config.id2label = {0: "a", 1: "b", 3: "c"}
    with pytest.raises(SettingsError, match="id2label of the model's config has no name for class 2; expected 0 to 2"):
        ImageClassification(model)
    with pytest.raises(SettingsError, match="class_names has 'a' twice"):
        ImageClassification(plain_model(), class_names=["a", "b", "a"])


def test_a_module_of_transformers_takes_the_names_and_gives_its_own() -> None:
    model = transformers_model()
    assert ImageClassification(model).class_names is None
    ImageClassification(model, class_names=["x", "y", "z"])
    assert model.config.id2label == {0: "x", 1: "y", 2: "z"}  # type: ignore[union-attr]
    assert ImageClassification(model).class_names == ["x", "y", "z"]


def test_among_many_classes_the_five_best_count_too(run_folder: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 12))
    task = ImageClassification(model, num_classes=12)
    data = Shades(22)
    values = trainer(run_folder).test(task, DataLoader(data, 5))
    best = model(data.images).topk(5).indices
    hits = (best == data.labels[:, None]).any(1).double().mean().item()
    assert values["test/accuracy_top5"] == pytest.approx(hits) and hits > 0


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("resnet18", r"names no model: give LIBRARY:NAME"),
        ("keras:resnet18", r"names no model: give LIBRARY:NAME"),
        ("timm:resnet81", r"no model of timm 'resnet81'\. Did you mean 'resnet18'"),
        ("timm:resnet18.nonsense", r"cannot be made: RuntimeError: Invalid pretrained tag \(nonsense\)"),
        ("torchvision:resnet1", r"no classification model of torchvision 'resnet1'\. Did you mean 'resnet1"),
        ("transformers:nobody/nothing", r"cannot be read: .*\n.*check the name and the network"),
        ("transformers:bare", r"The folder bare holds no config\.json"),
        ("timm:resnet18", r"weights of model='timm:resnet18' cannot be had: .*pretrained=False"),
    ],
)
def test_a_name_that_leads_nowhere_is_told_with_the_nearest(model: str, told: str) -> None:
    Path("bare").mkdir()
    with pytest.raises(SettingsError, match=told):
        ImageClassification(model)


def test_a_library_that_is_missing_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        SettingsError, match=r"model='timm:resnet18' needs timm, .*pip install 'sanctuary_trainer\[vision"
    ):
        ImageClassification("timm:resnet18")


def test_names_and_a_number_that_differ_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"num_classes=3, and class_names has 2"):
        ImageClassification(plain_model(), class_names=["a", "b"], num_classes=3)
