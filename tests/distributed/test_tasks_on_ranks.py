"""The ready-made tasks on two ranks: the metrics, the predictions and the update of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from sanctuary_trainer import Trainer
from sanctuary_trainer.tasks import ImageClassification, ObjectDetection, SemanticSegmentation, collate_boxes
from tests.distributed.workers import Ranks
from tests.tasks.test_semantic_segmentation import CLASSES, plain_model, scenes, weights_of

pytest.importorskip("pycocotools")


def trainer(folder: Path, **settings: Any) -> Trainer:
    return Trainer(project_dir=folder, default_callbacks=False, cpu=True, seed=0, **settings)


def segmented(folder: Path, batch_size: int) -> tuple[list[float], dict[str, float], list[Any]]:
    """Weights of a fit, metrics and predictions; 11 scenes, some without a labelled pixel."""
    torch.manual_seed(0)
    task = SemanticSegmentation(plain_model(), num_classes=CLASSES, lr=1e-2).double()
    samples = scenes(11, torch.float64)
    trainer(folder, max_epochs=2).fit(task, DataLoader(samples, batch_size))
    metrics = trainer(folder).test(task, DataLoader(samples, 3))
    predicted = trainer(folder).predict(task, DataLoader(samples, 3))
    return weights_of(task).tolist(), metrics, [of_image.tolist() for of_image in predicted or ()]


def detected(folder: Path) -> tuple[dict[str, float], list[list[list[float]]]]:
    """Metrics and boxes of a detector with random weights; every image has its own size and number of boxes."""
    from tests.tasks.test_object_detection import NAMES, retinanet, scene

    torch.manual_seed(0)
    task = ObjectDetection(retinanet(), class_names=NAMES, least_score=0.0)
    task.model.score_thresh = 0.0  # random weights are sure of nothing
    data: Any = DataLoader([scene(number) for number in range(7)], 2, collate_fn=collate_boxes)  # type: ignore[arg-type]
    metrics = trainer(folder).test(task, data)
    predicted = trainer(folder).predict(task, data)
    return metrics, [of_image["boxes"].tolist() for of_image in predicted or ()]


def detr_trains_with_a_batch_on_one_rank_alone(folder: Path) -> int:
    """Three batches of one image on two ranks: the loss of transformers would wait for the rank without a batch."""
    from tests.tasks.test_object_detection import NAMES, scene, tiny

    task = ObjectDetection(tiny("detr"), class_names=NAMES)
    data: Any = DataLoader([scene(number) for number in (1, 2, 3)], 1, collate_fn=collate_boxes)  # type: ignore[arg-type]
    return trainer(folder, max_epochs=1).fit(task, data).global_step


def classified(folder: Path) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 12))
    samples = [(torch.randn(3, 2, 2), number % 12) for number in range(23)]
    return trainer(folder).test(ImageClassification(model, num_classes=12), DataLoader(samples, 3))


def test_segmentation_on_two_ranks_is_that_of_one(one_rank: Ranks, two_ranks: Ranks, run_folder: Path) -> None:
    ((weights, metrics, maps),) = one_rank(segmented, run_folder, 4)
    for of_rank in two_ranks(segmented, run_folder, 2):
        assert of_rank[0] == pytest.approx(weights, rel=0, abs=1e-12)
        assert of_rank[1] == pytest.approx(metrics, rel=1e-12)
        assert of_rank[2] == maps


def test_detection_on_two_ranks_is_that_of_one(one_rank: Ranks, two_ranks: Ranks, run_folder: Path) -> None:
    ((metrics, boxes),) = one_rank(detected, run_folder)
    assert len(boxes) == 7 and any(boxes) and metrics["test/mar_100"] > 0
    for of_rank in two_ranks(detected, run_folder):
        assert of_rank == (metrics, boxes)


def test_a_rank_without_a_batch_does_not_keep_detr_waiting(two_ranks: Ranks, run_folder: Path) -> None:
    assert two_ranks(detr_trains_with_a_batch_on_one_rank_alone, run_folder) == [2, 2]


def test_accuracy_on_two_ranks_is_that_of_one(one_rank: Ranks, two_ranks: Ranks, run_folder: Path) -> None:
    (metrics,) = one_rank(classified, run_folder)
    assert metrics["test/accuracy_top5"] > metrics["test/accuracy"]
    for of_rank in two_ranks(classified, run_folder):
        assert of_rank == pytest.approx(metrics, rel=1e-12)
