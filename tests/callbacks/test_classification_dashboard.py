"""The dashboard: every sample of a validation counted once, the worst ones found exactly, drawn in fixed sizes."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sanctuary_trainer import Callback, SettingsError, TaskError, Trainer, VisionTask
from sanctuary_trainer.callbacks import EMA, ClassificationDashboard, EarlyStopping
from sanctuary_trainer.callbacks.class_evidence import TILE, UNKNOWN_KEY, Evidence, Found, joined, tiles
from sanctuary_trainer.callbacks.class_pictures import (
    PICTURE,
    RIGHT,
    WRONG,
    bars_picture,
    confusion_picture,
    samples_picture,
)
from tests.small_tasks import NumberStream, loader, quiet_trainer

CLASSES = 3


class Classifier(VisionTask):
    """A linear layer in float64 on images of 1 x 4 x 4; returns its logits."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(16, CLASSES).double()

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def images(count: int, seed: int = 1) -> list[tuple[Tensor, int]]:
    """Images of 1 x 4 x 4 in float64 and labels that have nothing to do with them."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    return list(zip(pixels, torch.randint(0, CLASSES, (count,), generator=generator).tolist(), strict=True))


def by_hand(task: Classifier, samples: Sequence[tuple[Tensor, int]], k: int) -> tuple[Any, list[int], list[int]]:
    """The confusion matrix, the keys of the k most confident mistakes and of the k highest losses."""
    matrix, mistakes, losses = np.zeros((CLASSES, CLASSES), dtype=np.int64), [], []
    for key, (image, label) in enumerate(samples):
        chances = task(image[None])[0].log_softmax(0).tolist()
        prediction = chances.index(max(chances))
        matrix[label, prediction] += 1
        losses.append((chances[label], key))
        if prediction != label:
            mistakes.append((-chances[prediction], key))
    return matrix, [key for _, key in sorted(mistakes)[:k]], [key for _, key in sorted(losses)[:k]]


def keys(samples: Any) -> list[int]:
    return [sample.key for sample in samples]


def fit(folder: Path, *callbacks: Callback, task: Any = None, val: Any = None, **settings: Any) -> Any:
    """3 steps an epoch, with a validation of 11 samples at its end."""
    trainer = Trainer(
        **{
            "max_epochs": 1,
            "project_dir": folder,
            "default_callbacks": False,
            "callbacks": callbacks,
            "cpu": True,
            "seed": 0,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            **settings,
        }
    )
    return trainer.fit(task or Classifier(), loader(images(12)), loader(images(11, seed=2)) if val is None else val)


def shown(run_dir: Path) -> dict[str, list[tuple[int, np.ndarray]]]:
    """tag -> step and pixels of each picture in the event file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"images": 0})
    events.Reload()
    return {
        tag: [(event.step, pixels_of(event.encoded_image_string)) for event in events.Images(tag)]
        for tag in events.Tags()["images"]
    }


def pixels_of(encoded: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(encoded)))


def lines(result: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]


# What is found


@pytest.mark.parametrize("batch_size", [1, 4, 50])
def test_every_sample_is_counted_once_and_the_worst_are_found(run_folder: Path, batch_size: int) -> None:
    dashboard, task, samples = ClassificationDashboard(num_images=5), Classifier(), images(37, seed=2)
    result = fit(run_folder, dashboard, task=task, val=loader(samples, batch_size))
    found = dashboard.found[""]
    matrix, mistakes, losses = by_hand(task, samples, 5)
    assert np.array_equal(found.counts, matrix) and matrix.sum() == 37 and found.ignored == 0
    assert np.array_equal(found.right, matrix.diagonal()) and np.array_equal(found.total, matrix.sum(1))
    assert keys(found.confident_mistakes) == mistakes and keys(found.worst_losses) == losses
    for sample in [*found.confident_mistakes, *found.worst_losses]:
        image, label = samples[sample.key]
        logits = task(image[None])
        assert (sample.label, sample.prediction) == (label, int(logits.argmax()))
        assert np.array_equal(sample.image, tiles(image[None])[0].numpy())
    loss = nn.functional.cross_entropy(task(samples[losses[0]][0][None]), torch.tensor([samples[losses[0]][1]]))
    assert found.worst_losses[0].score == pytest.approx(loss.item(), abs=1e-12)
    expected = {f"val/accuracy_of/{i}": matrix[i, i] / matrix[i].sum() for i in range(CLASSES)}
    assert {name: value for name, value in result.metrics.items() if "accuracy" in name} == expected


def test_equal_scores_are_ranked_by_key_in_whatever_order_they_come() -> None:
    logits = torch.tensor([[5.0, 0.0], [5.0, 0.0], [7.0, 0.0], [0.0, 5.0]]).repeat(10, 1)
    labels, pictures = torch.ones(40, dtype=torch.int64), torch.rand(40, 1, 2, 2)
    for seed in range(5):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        evidence = Evidence(2, 13, None, None, device=torch.device("cpu"))
        for part in order.split([7, 1, 20, 12]):
            evidence.add(pictures[part], logits[part], labels[part], part.tolist())
        found = joined([evidence.share()], 13)
        assert keys(found.confident_mistakes) == keys(found.worst_losses) == [*range(2, 40, 4), 0, 1, 4]


def test_labels_that_are_no_class_are_left_out_and_the_heading_says_so() -> None:
    evidence = Evidence(2, 4, None, None, device=torch.device("cpu"))
    logits = torch.tensor([[2.0, 0.0], [9.0, 0.0], [9.0, 0.0], [0.0, 1.0]])
    evidence.add(torch.rand(4, 3, 2, 2), logits, torch.tensor([1, -100, 2, 1]), [0, 1, 2, 3])
    found = joined([evidence.share()], 4)
    assert found.counts.tolist() == [[0, 0], [1, 1]] and found.ignored == 2
    assert keys(found.confident_mistakes) == [0] and keys(found.worst_losses) == [0, 3]


@pytest.mark.parametrize("probabilities", [False, True])
def test_predictions_are_those_of_the_logits_where_the_softmax_would_round_them_to_a_tie(probabilities: bool) -> None:
    evidence = Evidence(3, 4, None, None, device=torch.device("cpu"), probabilities=probabilities)
    close = torch.tensor([[0.5, 0.49999997, 0.0], [0.49999997, 0.5, 0.0]]) if probabilities else 1e-9 * torch.eye(3)
    assert len(close.softmax(1).unique()) == 1 or probabilities
    labels = torch.arange(len(close))
    evidence.add(torch.rand(len(close), 1, 2, 2), close, labels, labels.tolist())
    assert joined([evidence.share()], 4).right.tolist() == [int(i < len(close)) for i in range(3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_in_half_precision_are_ranked_as_they_are(dtype: torch.dtype) -> None:
    """The logarithms of neighbours would be one number in their precision."""
    first = torch.tensor(0.01).to(dtype)
    chances = torch.stack([first.nextafter(torch.tensor(1.0).to(dtype)), first])
    assert chances[0] > chances[1] and chances.log().unique().numel() == 1
    evidence = Evidence(2, 2, None, None, device=torch.device("cpu"), probabilities=True)
    evidence.add(torch.rand(2, 1, 2, 2), torch.stack([1 - chances, chances], 1), torch.ones(2).long(), [0, 1])
    assert keys(joined([evidence.share()], 2).worst_losses) == [1, 0]


def without_class_0(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate([sample for sample in samples if sample[1] != 0])


def test_a_collate_function_may_leave_samples_out(run_folder: Path) -> None:
    dashboard, task, samples = ClassificationDashboard(num_images=5), Classifier(), images(37, seed=2)
    fit(run_folder, dashboard, task=task, val=loader(samples, 12, collate_fn=without_class_0))
    kept = [sample for sample in samples if sample[1] != 0]
    matrix, _, losses = by_hand(task, kept, 5)
    found = dashboard.found[""]
    assert np.array_equal(found.counts, matrix) and all(sample.key >= UNKNOWN_KEY for sample in found.worst_losses)
    for sample, number in zip(found.worst_losses, losses, strict=True):
        assert sample.label == kept[number][1]
        assert np.array_equal(sample.image, tiles(kept[number][0][None])[0].numpy())


def test_nan_comes_first_and_is_drawn() -> None:
    evidence = Evidence(2, 4, None, None, device=torch.device("cpu"))
    logits = torch.tensor([[9.0, 0.0], [torch.nan, 0.0]])
    evidence.add(torch.full((2, 3, 2, 2), torch.nan), logits, torch.tensor([1, 1]), [0, 1])
    found = joined([evidence.share()], 4)
    assert keys(found.confident_mistakes) == keys(found.worst_losses) == [1, 0]
    samples_picture(found.worst_losses, ["a", "b"], "", "loss", 4)


def test_samples_of_a_stream_are_counted_and_have_no_number(run_folder: Path) -> None:
    from torch.utils.data import DataLoader

    dashboard, task, samples = ClassificationDashboard(num_images=5), Classifier(), images(11, seed=2)
    fit(run_folder, dashboard, task=task, val=DataLoader(NumberStream(samples), 4))
    matrix, _, losses = by_hand(task, samples, 5)
    assert np.array_equal(dashboard.found[""].counts, matrix)
    assert keys(dashboard.found[""].worst_losses) == [UNKNOWN_KEY + place for place in losses]


def test_of_many_classes_neighbours_share_a_cell_and_each_class_is_still_exact() -> None:
    count = 5000
    evidence = Evidence(count, 0, None, None, device=torch.device("cpu"))
    labels = torch.arange(count)
    logits = nn.functional.one_hot(torch.where(labels < 3, labels + 1, labels), count).float()
    evidence.add(torch.zeros(count, 1, 1, 1), logits, labels, list(range(count)))
    found = joined([evidence.share()], 0)
    assert found.group == 3 and found.counts.shape == (1667, 1667) and found.counts.sum() == count
    assert found.counts[0, :2].tolist() == [2, 1]
    assert found.total.tolist() == [1] * count and found.right.tolist() == [0] * 3 + [1] * (count - 3)


def test_a_batch_never_waits_for_the_device_and_memory_does_not_grow() -> None:
    """Fake tensors have no values: whoever asks for one, as a wait does, raises."""
    with FakeTensorMode():
        evidence = Evidence(10, 16, [0.5], [0.2], device=torch.device("cpu"))
        for _ in range(3):
            evidence.add(torch.rand(32, 3, 200, 300), torch.rand(32, 10), torch.zeros(32).long(), list(range(32)))
        for kept in (evidence._mistakes._kept, evidence._losses._kept):
            assert kept is not None
            assert [tuple(tensor.shape) for tensor in kept] == [(16,), (16, 3), (16, 3, TILE, TILE)]
        with pytest.raises(Exception, match="_local_scalar_dense"):
            evidence._total[0].item()


# What a validation gives


class ReturnsNothing(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", self(batch[0]).sum())


@pytest.mark.parametrize("sanity", [0, 2])
def test_a_validation_step_that_returns_nothing_is_told_what_to_return(run_folder: Path, sanity: int) -> None:
    class Steps(Callback):
        made = 0

        def on_train_step_end(self, run: Any) -> None:
            self.made += 1

    steps = Steps()
    with pytest.raises(TaskError, match=r"ReturnsNothing.validation_step returned None. Return the logits \(B, K\)"):
        fit(run_folder, ClassificationDashboard(), steps, task=ReturnsNothing(), num_sanity_val_steps=sanity)
    assert steps.made == (0 if sanity else 3)


class ReturnsMore(Classifier):
    """Batches are dicts, labels are one-hot, and the step returns probabilities in a dict."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["image"], batch["label"].argmax(1)), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"chances": self(batch["image"]).softmax(1)}


def test_readers_find_images_probabilities_and_labels(run_folder: Path) -> None:
    def as_dicts(samples: Any) -> Any:
        return loader([{"image": x, "label": nn.functional.one_hot(torch.tensor(y), CLASSES)} for x, y in samples])

    plain = ClassificationDashboard(num_images=4)
    other = ClassificationDashboard(
        num_images=4,
        images=lambda batch, outputs: batch["image"],
        logits=lambda batch, outputs: outputs["chances"],
        labels=lambda batch, outputs: batch["label"].argmax(1),
        probabilities=True,
    )
    first = fit(run_folder, plain)
    trainer = quiet_trainer(max_epochs=1, callbacks=[other], seed=0, project_dir=run_folder, log_with="tensorboard")
    second = trainer.fit(ReturnsMore(), as_dicts(images(12)), as_dicts(images(11, seed=2)))
    assert np.array_equal(plain.found[""].counts, other.found[""].counts)
    for one, two in zip(plain.found[""].worst_losses, other.found[""].worst_losses, strict=True):
        assert one.key == two.key and one.score == pytest.approx(two.score, abs=1e-12)
    mine, theirs = shown(first.run_dir), shown(second.run_dir)
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[tag][0][1], theirs[tag][0][1]) for tag in mine)


@pytest.mark.parametrize(
    ("readers", "said"),
    [
        ({"logits": lambda batch, outputs: outputs.argmax(1)}, "expected a float tensor (B, K)"),
        ({"logits": lambda batch, outputs: outputs[:, :1]}, "at least 2 classes"),
        ({"labels": lambda batch, outputs: batch[1].double()}, "expected a tensor (4,) of whole numbers"),
        ({"labels": lambda batch, outputs: batch[1][:2]}, "labels that are a tensor (2,) of torch.int64"),
        ({"images": lambda batch, outputs: batch[0][:, 0]}, "a tensor (4, 4, 4) of torch.float64 of a validation"),
        ({"images": lambda batch, outputs: batch[0][:2]}, "2 images with logits of 4 samples"),
        ({"images": lambda batch, outputs: batch[0].long()}, "torch.int64 of a validation batch; expected a float or"),
        ({"class_names": ["a", "b"]}, "logits of 3 classes and 2 class names"),
        ({"mean": [0.5, 0.5], "std": 1}, "mean= of 2 channels and images of 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_shown_is_told_before_the_training(run_folder: Path, readers: Any, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        fit(run_folder, ClassificationDashboard(**readers), num_sanity_val_steps=1)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_images": -1}, "num_images=-1; a whole number of at least 0 and at most 64"),
        ({"num_train_images": 65}, "num_train_images=65"),
        ({"max_scalars": 2.0}, "max_scalars=2.0; a whole number of at least 0 was"),
        ({"class_names": "abc"}, "class_names='abc'; a list of different names"),
        ({"class_names": ["a", "a"]}, "a list of different names"),
        ({"class_names": {"b", "a"}}, "a list of different names"),
        ({"class_names": {"b": 1, "a": 0}}, "a list of different names"),
        ({"class_names": 2}, "class_names=2; a list of different names"),
        ({"images": "pixels"}, "images='pixels'; a function of (batch, outputs)"),
        ({"mean": 0.5}, "mean=0.5 and std=None; give both or neither"),
        ({"mean": ["a"], "std": [1]}, "mean=['a']; a number"),
        ({"mean": float("nan"), "std": 1}, "mean=nan; a number"),
        ({"mean": 0, "std": [1, 0, 1]}, "std=[1, 0, 1]; a number above 0, or one for each channel"),
        ({"probabilities": 1}, "probabilities=1; True or False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_are_checked(settings: Any, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ClassificationDashboard(**settings)
    assert said in str(caught.value)


def test_a_fit_without_validation_is_warned_of(run_folder: Path) -> None:
    trainer = quiet_trainer(max_epochs=1, callbacks=["classification_dashboard"], project_dir=run_folder)
    with pytest.warns(UserWarning, match="this fit has nothing to validate with"):
        trainer.fit(Classifier(), loader(images(12)))


# Where it goes


PICTURES = {"train/images", "val/confusion_matrix", "val/confident_mistakes", "val/worst_losses"}


def test_each_validation_gives_a_set_of_pictures_of_fixed_sizes(run_folder: Path) -> None:
    result = fit(run_folder, ClassificationDashboard(["one", "two", "three"]), max_epochs=2)
    pictures = shown(result.run_dir)
    assert pictures.keys() == PICTURES
    assert [step for step, _ in pictures["train/images"]] == [0, 3]
    for tag in PICTURES - {"train/images"}:
        assert [step for step, _ in pictures[tag]] == [3, 6]
        assert pictures[tag][0][1].shape == pictures[tag][1][1].shape
    assert {name for line in lines(result) for name in line if "accuracy" in name} == {
        "val/accuracy_of/one",
        "val/accuracy_of/two",
        "val/accuracy_of/three",
    }


def test_names_come_from_the_task_and_a_class_without_samples_has_no_accuracy(run_folder: Path) -> None:
    task = Classifier()
    task.class_names = ("cat", "dog", "eel")
    samples = [sample for sample in images(30, seed=2) if sample[1] != 1]
    result = fit(run_folder, ClassificationDashboard(), task=task, val=loader(samples))
    assert {name for name in result.metrics if "accuracy" in name} == {"val/accuracy_of/cat", "val/accuracy_of/eel"}


def test_of_more_classes_than_scalars_the_accuracy_is_a_picture(run_folder: Path) -> None:
    result = fit(run_folder, ClassificationDashboard(max_scalars=2))
    assert shown(result.run_dir).keys() == {*PICTURES, "val/accuracy_of_classes"}
    assert not [name for name in result.metrics if "accuracy" in name]


def test_none_of_the_images_are_shown_where_none_are_asked_for(run_folder: Path) -> None:
    result = fit(run_folder, ClassificationDashboard(num_images=0, num_train_images=0))
    assert shown(result.run_dir).keys() == {"val/confusion_matrix"}


def test_each_of_several_loaders_has_its_own(run_folder: Path) -> None:
    dashboard, task = ClassificationDashboard(num_images=3), Classifier()
    clean, noisy = images(11, seed=2), images(6, seed=3)
    result = fit(run_folder, dashboard, task=task, val={"clean": loader(clean), "noisy": loader(noisy)})
    for name, samples in (("clean", clean), ("noisy", noisy)):
        matrix, mistakes, losses = by_hand(task, samples, 3)
        assert np.array_equal(dashboard.found[name].counts, matrix)
        assert keys(dashboard.found[name].confident_mistakes) == mistakes
        assert keys(dashboard.found[name].worst_losses) == losses
    ours = {tag.replace("val/", f"val/{name}/") for name in ("clean", "noisy") for tag in PICTURES}
    assert shown(result.run_dir).keys() == ours
    assert "val/noisy/accuracy_of/0" in result.metrics


def test_sanity_validation_leaves_no_trace(run_folder: Path) -> None:
    runs = []
    for name, sanity in (("with", 2), ("without", 0)):
        dashboard = ClassificationDashboard()
        result = fit(run_folder, dashboard, run_name=name, num_sanity_val_steps=sanity)
        runs.append((result, dashboard.found[""]))
    (first, found), (second, other) = runs
    assert np.array_equal(found.counts, other.counts) and found.counts.sum() == 11
    assert same_pictures(shown(first.run_dir), shown(second.run_dir))
    assert without_time(lines(first)) == without_time(lines(second))


def test_the_average_of_the_weights_does_not_count_twice(run_folder: Path) -> None:
    dashboard, task, samples = ClassificationDashboard(num_images=3), Classifier(), images(11, seed=2)
    result = fit(run_folder, EMA(0.9), dashboard, task=task)
    matrix, mistakes, _ = by_hand(task, samples, 3)
    assert np.array_equal(dashboard.found[""].counts, matrix)
    assert keys(dashboard.found[""].confident_mistakes) == mistakes
    assert shown(result.run_dir).keys() == PICTURES


def test_validate_gives_the_accuracies_and_test_gives_nothing(run_folder: Path) -> None:
    dashboard, task, samples = ClassificationDashboard(), Classifier(), images(11, seed=2)
    trainer = quiet_trainer(callbacks=[dashboard])
    values = trainer.validate(task, loader(samples))
    matrix, _, _ = by_hand(task, samples, 3)
    assert values == {f"val/accuracy_of/{i}": matrix[i, i] / matrix[i].sum() for i in range(CLASSES)}
    assert np.array_equal(dashboard.found[""].counts, matrix)
    assert trainer.test(task, loader(samples)) == {}


def test_a_class_can_be_watched(run_folder: Path) -> None:
    early = EarlyStopping("val/accuracy_of/1", "max", patience=2, stopping_threshold=0.0)
    result = fit(run_folder, ClassificationDashboard(), early, max_epochs=4)
    assert result.stop_reason.startswith("EarlyStopping: val/accuracy_of/1 is ") and result.global_step == 3


# Training images


class Augments(Classifier):
    """Turns training images upside down; they come normalised by mean 0.5 and standard deviation 0.25."""

    def on_after_batch_to_device(self, batch: Any, stage: str) -> Any:
        return ((batch[0] - 0.5).flip(2) / 0.25 if stage == "train" else (batch[0] - 0.5) / 0.25), batch[1]


def test_training_images_are_those_that_the_model_sees(run_folder: Path) -> None:
    dashboard = ClassificationDashboard(num_train_images=3, mean=0.5, std=0.25)
    pictures = shown(fit(run_folder, dashboard, task=Augments()).run_dir)
    [(step, grid)] = pictures["train/images"]
    assert step == 0 and grid.shape == (TILE + 4, 3 * (TILE + 4), 3)
    for place, (image, _) in enumerate(images(3)):
        tile = grid[2:-2, place * (TILE + 4) + 2 :][:, :TILE, 0]
        expected = (image[0].flip(0) * 255).round().byte().numpy().repeat(TILE // 4, 0).repeat(TILE // 4, 1)
        assert np.abs(tile.astype(int) - expected).max() <= 1  # half a grey, normalised and back
    found = dashboard.found[""].worst_losses[0]
    upright = (images(11, seed=2)[found.key][0][0] * 255).round().byte().numpy()
    assert np.abs(found.image[0, :: TILE // 4, :: TILE // 4].astype(int) - upright).max() <= 1


# Resume


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, run: Any) -> None:
        if run.state.global_step == self.step:
            signal.raise_signal(signal.SIGTERM)


def without_time(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "time" and "samples_per_second" not in k} for line in values]


def same_pictures(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(
        [step for step, _ in first[tag]] == [step for step, _ in second[tag]]
        and all(np.array_equal(one, two) for (_, one), (_, two) in zip(first[tag], second[tag], strict=True))
        for tag in first
    )


@pytest.mark.parametrize("step", [3, 4])
def test_a_resumed_run_shows_what_the_uninterrupted_one_does(run_folder: Path, step: int) -> None:
    """Cut off at an epoch's end, before its validation, and within an epoch whose first batch was shown."""
    settings: dict[str, Any] = {"max_epochs": 3}
    straight = fit(run_folder, ClassificationDashboard(), "checkpoint", run_name="straight", **settings)
    with pytest.raises(SystemExit):
        fit(run_folder, ClassificationDashboard(), "checkpoint", StopsAt(step), run_name="parts", **settings)
    trainer = Trainer(
        **settings,
        project_dir=run_folder,
        run_name="parts",
        default_callbacks=False,
        callbacks=[ClassificationDashboard(), "checkpoint"],
        cpu=True,
        seed=0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    parts = trainer.fit(Classifier(), loader(images(12)), loader(images(11, seed=2)), resume="auto")
    assert without_time(lines(straight)) == without_time(lines(parts))
    assert same_pictures(shown(straight.run_dir), shown(parts.run_dir))
    assert [step for step, _ in shown(parts.run_dir)["train/images"]] == [0, 3, 6]


# Pictures


def found_of(counts: np.ndarray, samples: Any = ()) -> Found:
    return Found(1, counts, counts.diagonal(), counts.sum(1), 0, list(samples), list(samples))


def test_cells_are_shaded_by_their_share_of_the_row() -> None:
    counts = np.array([[3, 1], [0, 50]])
    picture = np.asarray(confusion_picture(found_of(counts), ["a", "b"]))
    top, left, cell = 34 + 150, 150, (PICTURE - 34 - 150 - 8) // 2

    def colour(row: int, column: int) -> list[int]:
        return picture[top + row * cell + 5, left + column * cell + 5].tolist()

    def blend(full: tuple[int, int, int], share: float) -> list[int]:
        return [round(255 + (value - 255) * share**0.5) for value in full]

    assert colour(0, 0) == blend(RIGHT, 0.75) and colour(0, 1) == blend(WRONG, 0.25)
    assert colour(1, 0) == [255, 255, 255] and colour(1, 1) == list(RIGHT)


@pytest.mark.parametrize("classes", [2, 50, 51, 1000, 2048])
def test_pictures_have_one_size_for_any_number_of_classes(classes: int) -> None:
    counts = np.eye(classes, dtype=np.int64) * 3
    counts[0, -1] = 1
    names = [f"a class with a long name and the number {i}" for i in range(classes)]
    assert confusion_picture(found_of(counts), names).size == (PICTURE, PICTURE)
    assert bars_picture(found_of(counts), names).size == (PICTURE, PICTURE)


def test_a_heat_map_of_many_classes_loses_no_mistake() -> None:
    counts = np.zeros((1000, 1000), dtype=np.int64)
    counts[7, 990] = 1
    picture = np.asarray(confusion_picture(found_of(counts), [str(i) for i in range(1000)]))
    assert (picture == np.array(WRONG)).all(-1).sum() == 1


@pytest.mark.parametrize("classes", [51, 100, 500, 830, 1000, 2048])
def test_a_heat_map_fills_its_page(classes: int) -> None:
    counts = np.zeros((classes, classes), dtype=np.int64)
    counts[0, 0] = counts[-1, -1] = 1
    picture = np.asarray(confusion_picture(found_of(counts), [str(i) for i in range(classes)]))
    rows, columns = (picture == np.array(RIGHT)).all(-1).nonzero()
    assert (rows.min(), columns.min()) == (94, 60) and (rows.max(), columns.max()) == (PICTURE - 9, PICTURE - 43)


def test_long_names_that_differ_at_their_ends_are_told_apart() -> None:
    def drawn(name: str) -> Any:
        counts = np.eye(2, dtype=np.int64)
        evidence = Evidence(2, 1, None, None, device=torch.device("cpu"))
        evidence.add(torch.ones(1, 1, 2, 2), torch.tensor([[1.0, 0.0]]), torch.ones(1).long(), [0])
        worst = joined([evidence.share()], 1).worst_losses
        found = found_of(counts)
        pictures = (
            confusion_picture(found, [name, "other"]),
            bars_picture(found, [name, "other"]),
            samples_picture(worst, [name, "other"], "", "loss", 1),
        )
        return [np.asarray(picture) for picture in pictures]

    long = "an animal of the deep sea that " * 20
    for one, other in zip(drawn(f"{long}glows"), drawn(f"{long}hides"), strict=True):
        assert not np.array_equal(one, other)
    for one, other in zip(drawn("two words"), drawn("two\n words\t"), strict=True):
        assert np.array_equal(one, other)


def test_the_samples_picture_holds_their_pixels_in_their_order() -> None:
    evidence = Evidence(2, 10, None, None, device=torch.device("cpu"))
    pixels = torch.rand(10, 3, 8, 8)
    evidence.add(pixels, torch.tensor([[float(i), 0.0] for i in range(1, 11)]), torch.ones(10).long(), range(10))
    found = joined([evidence.share()], 10)
    picture = np.asarray(samples_picture(found.worst_losses, ["a", "b"], "heading", "loss", 10))
    assert keys(found.worst_losses) == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert picture.shape == (34 + 2 * (TILE + 52), PICTURE, 3)
    for place, key in enumerate(keys(found.worst_losses)):
        top, left = 34 + place // 8 * (TILE + 52), 4 + place % 8 * 112
        tile = picture[top : top + TILE, left : left + TILE]
        expected = (pixels[key] * 255).round().byte().permute(1, 2, 0).numpy()
        assert np.array_equal(tile, expected.repeat(12, 0).repeat(12, 1))
        assert (picture[top + TILE + 2 : top + TILE + 46, left : left + 100] < 128).any()  # the words
    none = samples_picture([], ["a", "b"], "heading", "probability", 10)
    assert none.size == (PICTURE, 34 + 2 * (TILE + 52))


def test_tiles_keep_small_pixels_sharp_and_average_large_ones() -> None:
    small = torch.tensor([[[[0, 51], [102, 255]]]], dtype=torch.uint8)
    sharp = tiles(small, [0.5], [0.5])  # uint8 is shown as it is
    assert torch.equal(sharp, small.repeat_interleave(48, 2).repeat_interleave(48, 3).expand(-1, 3, -1, -1))
    large = torch.zeros(1, 3, 2 * TILE, TILE)
    large[:, 1, ::2] = 1.0
    shown = tiles(large)
    assert shown.shape == (1, 3, TILE, TILE)
    assert (shown[0, :, :, : TILE // 4] == 255).all() and (shown[0, :, :, -TILE // 4 :] == 255).all()  # nothing there
    middle = shown[0, :, :, TILE // 4 : -TILE // 4]
    assert (middle[0] == 0).all() and (middle[1] == 128).all() and (middle[2] == 0).all()
