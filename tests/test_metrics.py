"""Metric objects on several ranks equal one process's; evaluations leave training's states as they were."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sanctuary_trainer.errors import SettingsError, TaskError
from sanctuary_trainer.metrics import metrics_aside, reset_metrics
from sanctuary_trainer.records import Records
from tests.test_records import Alone, ThreadRank, on_ranks

torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics import (  # noqa: E402
    BootStrapper,
    ClasswiseWrapper,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MinMaxMetric,
    MultioutputWrapper,
    PearsonCorrCoef,
)
from torchmetrics.classification import (  # noqa: E402
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import Running  # noqa: E402

Batches = list[tuple[Tensor, Tensor]]


class Boxes(Metric):  # type: ignore[misc]
    """Like MeanAveragePrecision: ragged list states without a reduction, tuples among them, a dict of odd results."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("boxes", [], dist_reduce_fx=None)
        self.add_state("masks", [], dist_reduce_fx=None)

    def update(self, boxes: Sequence[Tensor], _: Any = None) -> None:
        for box in boxes:
            self.boxes.append(box)
            self.masks.append((tuple(box.shape), (box.sum(),), "text"))

    def compute(self) -> dict[str, Any]:
        for box, (shape, _, text) in zip(self.boxes, self.masks, strict=True):
            assert (shape, text) == (tuple(box.shape), "text")
        return {
            "map": torch.cat(self.boxes).mean(),
            "count": torch.tensor([len(self.boxes)]),
            "masks": sum(mask[1][0] for mask in self.masks),
            "per_class": torch.tensor([0.25, math.nan]),
        }


class OwnStates(Metric):  # type: ignore[misc]
    """One state for every reduction that a state may have."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("least", torch.tensor(math.inf), dist_reduce_fx="min")
        self.add_state("most", torch.tensor(-math.inf), dist_reduce_fx="max")
        self.add_state("seen", torch.zeros(0), dist_reduce_fx="cat")
        self.add_state("values", [], dist_reduce_fx="cat")
        self.add_state("product", torch.tensor(1.0), dist_reduce_fx=lambda stacked: stacked.prod(0))
        self.add_state("longest", [], dist_reduce_fx=lambda items: [max(items, key=len)])

    def update(self, values: Tensor, _: Any = None) -> None:
        self.total += values.sum()
        self.least = torch.minimum(self.least, values.min())
        self.most = torch.maximum(self.most, values.max())
        self.seen = torch.cat([self.seen, values])
        self.values.append(values)
        self.product = self.product * values.prod()
        self.longest = [max([*self.longest, values], key=len)]

    def compute(self) -> dict[str, Tensor]:
        return {
            "total": self.total,
            "least": self.least,
            "most": self.most,
            "seen": self.seen.sort().values,
            "values": torch.cat(self.values).sort().values,
            "product": self.product,
            "longest": torch.tensor(len(self.longest[0])),
        }


class MeanOfMeans(Metric):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="mean")

    def update(self, values: Tensor, _: Any = None) -> None:
        self.mean = (self.mean * (self._update_count - 1) + values.mean()) / self._update_count

    def compute(self) -> Tensor:
        return self.mean


class Task(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.metric = make()


def classes(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, generator=generator), torch.randint(3, (samples,), generator=generator)


def scores(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(samples, generator=generator), torch.randint(2, (samples,), generator=generator)


def regression(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, generator=generator)
    return x, x + torch.randn(samples, generator=generator)


def columns(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    return regression(seed, 2 * samples)[0].reshape(-1, 2), regression(seed + 1, 2 * samples)[1].reshape(-1, 2)


def boxes(seed: int, samples: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(i % 3, 4, generator=generator) for i in range(samples)], None


def collection() -> MetricCollection:
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(3, average="micro"),
            "precision": MulticlassPrecision(3),
            "f1": MulticlassF1Score(3),
            "per_class": ClasswiseWrapper(MulticlassAccuracy(3, average=None), labels=["a", "b", "c"]),
        },
        prefix="m_",
    )


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any]]] = {
    "accuracy": (lambda: MulticlassAccuracy(3), classes),
    "accuracy of each class": (lambda: MulticlassAccuracy(3, average=None), classes),
    "auroc with list states": (BinaryAUROC, scores),
    "auroc with lists on the host": (lambda: BinaryAUROC(compute_on_cpu=True), scores),
    "auroc with bins": (lambda: BinaryAUROC(thresholds=11), scores),
    "pearson, whose states are stacked": (PearsonCorrCoef, regression),
    "boxes": (Boxes, boxes),
    "own states": (OwnStates, regression),
    "collection with compute groups": (collection, classes),
    "collection without": (
        lambda: MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)], compute_groups=False),
        classes,
    ),
    "classwise": (lambda: ClasswiseWrapper(MulticlassAccuracy(3, average=None)), classes),
    "minmax": (lambda: MinMaxMetric(MulticlassAccuracy(3)), classes),
    "outputs": (lambda: MultioutputWrapper(MeanSquaredError(), 2), columns),
    "composition": (lambda: MulticlassAccuracy(3) + 2 * MulticlassF1Score(3), classes),
}


def values_of(make: Callable[[], nn.Module], batches: Batches, ranks: Any, epochs: int = 1) -> dict[str, float]:
    task = Task(make)
    log = Records(ranks, task)
    for _ in range(epochs):
        with torch.inference_mode():
            for batch in batches:
                task.metric.update(*batch)  # type: ignore[operator]
                log.add("val", "score", task.metric)
        values = log.epoch_values("val")
    return values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deal", [((5, 3), (4, 1)), ((6, 7), ()), ((), (9,), (3, 2))], ids=str)
def test_several_ranks_equal_one_process(kind: str, deal: tuple[tuple[int, ...], ...]) -> None:
    make, data = KINDS[kind]
    rows = [[data(10 * rank + i, samples) for i, samples in enumerate(row)] for rank, row in enumerate(deal)]
    expected = values_of(make, [batch for row in rows for batch in row], Alone())
    # The second epoch shows that the first left nothing behind.
    found = on_ranks(len(deal), lambda rank: values_of(make, rows[rank.rank], rank, epochs=2))
    assert expected, "the test must compare something"
    for values in found:
        assert list(values) == list(expected)
        assert list(values.values()) == pytest.approx(list(expected.values()), rel=1e-5, nan_ok=True)
    assert repr(found) == repr([found[0]] * len(deal)), "decisions are taken on these: not one bit may differ"


def test_a_mean_state_is_averaged_by_its_updates() -> None:
    rows = [[regression(1, 4), regression(2, 4)], [regression(3, 4)]]
    expected = values_of(MeanOfMeans, [batch for row in rows for batch in row], Alone())
    found = on_ranks(2, lambda rank: values_of(MeanOfMeans, rows[rank.rank], rank))
    assert found[0] == found[1] == {"val/score": pytest.approx(expected["val/score"], abs=1e-15)}


def test_a_running_window_joins_the_windows_of_the_ranks() -> None:
    def make() -> nn.Module:
        return Running(MeanMetric(), window=2)

    def log(rank: ThreadRank) -> Any:
        return values_of(make, [(torch.tensor(float(10 * rank.rank + i)),) for i in range(3)], rank)  # type: ignore[misc]

    assert on_ranks(2, log) == [{"val/score": (1 + 2 + 11 + 12) / 4}] * 2


def test_random_computes_give_one_value() -> None:
    class Drawing(MeanMetric):  # type: ignore[misc]
        def compute(self) -> Tensor:
            return super().compute() + torch.rand(())

    values = on_ranks(2, lambda rank: values_of(Drawing, [(torch.tensor(1.0),)], rank))  # type: ignore[list-item]
    assert values[0] == values[1]


def test_bootstraps_of_the_ranks_are_joined_replica_by_replica() -> None:
    values = on_ranks(
        2,
        lambda rank: values_of(
            lambda: BootStrapper(MeanMetric(), num_bootstraps=4),
            [(torch.full((8,), float(rank.rank)),)],  # type: ignore[list-item]
            rank,
        ),
    )
    assert values[0] == values[1]
    assert 0 < values[0]["val/score/mean"] < 1 and values[0]["val/score/std"] > 0


def test_a_metric_that_one_rank_alone_logs_counts_everybody_s_samples() -> None:
    def log(rank: ThreadRank) -> Any:
        task = Task(lambda: MulticlassAccuracy(3, average="micro"))
        mine = Records(rank, task)
        task.metric.update(torch.tensor([0, 1]), torch.tensor([0, rank.rank]))  # type: ignore[operator]
        if rank.rank == 1:
            mine.add("val", "accuracy", task.metric)
        mine.add("val", "loss", 1.0, weight=1)
        first, gathers = mine.epoch_values("val"), list(rank.gathers)
        return first, gathers, mine.epoch_values("val")

    both = ["floats", "objects", "floats", "objects", "objects"]
    assert on_ranks(2, log) == [({"val/accuracy": 0.75, "val/loss": 1.0}, both, {})] * 2


def test_a_metric_that_nobody_updated_gives_no_value() -> None:
    for kind in KINDS:
        assert values_of(KINDS[kind][0], [], Alone()) == {}
        task = Task(KINDS[kind][0])
        log = Records(Alone(), task)
        log.add("val", "score", task.metric)
        assert log.epoch_values("val") == {}, kind


def test_states_are_cleared_between_epochs_and_kept_apart_from_validation() -> None:
    task = Task(lambda: MulticlassAccuracy(2, average="micro"))
    log = Records(Alone(), task)
    metric: Any = task.metric
    right, wrong = (torch.tensor([0, 1]), torch.tensor([0, 1])), (torch.tensor([0, 1]), torch.tensor([1, 0]))
    found = []
    for batch in (right, wrong):
        metric.update(*batch)
        log.add("train", "accuracy", metric)
        with log.aside():
            metric.update(*right)
            log.add("val", "accuracy", metric)
            validation = log.epoch_values("val")
        metric.update(*batch)
        found.append((log.epoch_values("train"), validation))
    assert found == [
        ({"train/accuracy": 1.0}, {"val/accuracy": 1.0}),
        ({"train/accuracy": 0.0}, {"val/accuracy": 1.0}),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_that_fails_leaves_training_s_metrics_as_they_were(kind: str) -> None:
    make, data = KINDS[kind]
    rows = [data(1, 6), data(2, 3)]
    expected = values_of(make, rows, Alone())
    task = Task(make)
    metric: Any = task.metric
    metric.update(*rows[0])

    def validate() -> None:
        with metrics_aside(task, [metric]), torch.inference_mode():
            metric.update(*data(3, 4))
            raise ValueError("in validation")

    with pytest.raises(ValueError, match="in validation"):
        validate()
    metric.update(*rows[1])
    log = Records(Alone(), task)
    log.add("val", "score", metric)
    assert repr(log.epoch_values("val")) == repr(expected)


def test_inside_every_metric_starts_empty_and_an_untouched_one_ends_empty() -> None:
    task = Task(OwnStates)
    metric: Any = task.metric
    metric.update(torch.tensor([1.0, 2.0]))
    states = {name: getattr(metric, name) for name in metric._defaults}
    numbers = repr(states)
    with metrics_aside(task, [metric]):
        assert metric.update_count == 0 and metric.total == 0 and metric.values == []
        metric.update(torch.tensor([5.0]))
        assert metric.total == 5
    assert all(getattr(metric, name) is state for name, state in states.items())
    assert metric.update_count == 1 and repr(states) == numbers

    metric.reset()
    with metrics_aside(task, [metric]):
        metric.update(torch.tensor([5.0]))
    assert metric.update_count == 0 and metric.total == 0 and metric.values == []


def test_what_outlives_a_reset_outlives_validation_but_not_sanity_validation() -> None:
    def validate(task: Task, **settings: Any) -> dict[str, float]:
        log = Records(Alone(), task)
        with log.aside(**settings):
            for value in task.values:  # type: ignore[union-attr]
                task.metric.update(value)  # type: ignore[operator]
            log.add("val", "score", task.metric)
            return log.epoch_values("val")

    task = Task(lambda: MinMaxMetric(MeanMetric()))
    task.values = [torch.tensor(9.0)]  # type: ignore[assignment]
    validate(task, leave_no_trace=True)
    task.values = [torch.tensor(3.0)]  # type: ignore[assignment]
    assert validate(task)["val/score/max"] == 3.0
    task.values = [torch.tensor(2.0)]  # type: ignore[assignment]
    assert validate(task) == {"val/score/raw": 2.0, "val/score/max": 3.0, "val/score/min": 2.0}


def test_after_an_evaluation_in_inference_mode_training_may_add_in_place() -> None:
    task = Task(OwnStates)
    metric: Any = task.metric
    log = Records(Alone(), task)
    with torch.inference_mode(), log.aside():
        metric.update(torch.tensor([5.0]))
        log.add("val", "score", metric)
        log.epoch_values("val")
    metric.update(torch.tensor([1.0]))
    assert metric.total == 1 and not metric.total.is_inference()


def test_reset_metrics() -> None:
    task = Task(collection)
    task.metric.update(*classes(1, 4))  # type: ignore[operator]
    reset_metrics(task)
    log = Records(Alone(), task)
    log.add("val", "score", task.metric)
    assert log.epoch_values("val") == {}


def test_metrics_that_nobody_logs_are_left_to_the_task() -> None:
    task = Task(MaxMetric)
    task.confusion = MulticlassConfusionMatrix(2)
    metric: Any = task.metric
    log = Records(Alone(), task)
    right = torch.tensor([0, 1]), torch.tensor([0, 1])
    with log.aside(leave_no_trace=True):
        metric.update(5.0)
        task.confusion.update(*right)
    assert metric.update_count == 0 and task.confusion.confmat.sum() == 0, "sanity validation leaves no trace"
    best = []
    for accuracy in (0.9, 0.5, 0.7):
        with log.aside():
            task.confusion.update(*right)
            log.epoch_values("val")
            metric.update(accuracy)
            log.add("val", "best", metric.compute(), weight=1)
            best.append(log.epoch_values("val")["val/best"])
    assert best == pytest.approx([0.9, 0.9, 0.9])
    assert task.confusion.compute().tolist() == [[3, 0], [0, 3]]


def test_sanity_validation_gives_back_what_the_task_filled_before() -> None:
    task = Task(MaxMetric)
    metric: Any = task.metric
    metric.update(5.0)
    log = Records(Alone(), task)
    with log.aside(leave_no_trace=True):
        metric.update(9.0)
    assert (metric.compute(), metric.update_count) == (5.0, 1)


def test_an_interrupted_run_leaves_no_samples_in_logged_metrics() -> None:
    task = Task(MeanMetric)
    task.mine = MeanMetric()
    metric: Any = task.metric
    log = Records(Alone(), task)
    for one in (metric, task.mine):
        one.update(1.0)
    log.add("train", "mean", metric)
    log.close()
    assert (metric.update_count, task.mine.update_count) == (0, 1)


def test_samples_from_before_an_evaluation_that_count_in_it_are_told_of() -> None:
    task = Task(MeanMetric)
    metric: Any = task.metric
    log = Records(Alone(), task)
    metric.update(1.0)
    with log.aside():
        metric.update(2.0)
        with pytest.warns(UserWarning, match=r"'val/mean'\): MeanMetric held samples from before this evaluation"):
            log.add("val", "mean", metric)
        assert log.epoch_values("val") == {"val/mean": 1.5}
    metric.update(1.0)
    with warnings.catch_warnings(), log.aside():
        warnings.simplefilter("error")
        metric.update(2.0)
        log.add("val", "mean", metric)
        assert log.epoch_values("val") == {"val/mean": 2.0}, "a metric that was logged begins empty"
    assert metric.compute() == 1.0


def test_several_collections_without_a_name_have_their_own_keys() -> None:
    task = Task(lambda: MetricCollection([MulticlassAccuracy(3)], prefix="val/"))
    task.means = MetricCollection([MeanMetric()])
    task.again = MetricCollection([MeanMetric()])
    log = Records(Alone(), task)
    for _ in range(2):
        task.metric.update(*classes(1, 4))  # type: ignore[operator]
        task.means.update(3.0)
        log.add("val", "", task.metric)
        log.add("val", "", task.means, prog_bar=True)
    assert log.epoch_values("val").keys() == {"val/MulticlassAccuracy", "val/MeanMetric"}
    assert "val/MeanMetric" in log.prog_bar_names and "val/MulticlassAccuracy" not in log.prog_bar_names
    for metrics in (task.means, task.again):
        metrics.update(3.0)
        log.add("val/NAME", "", metrics)
    with pytest.raises(TaskError, match="'val/NAME/MeanMetric' is an entry of two metrics"):
        log.epoch_values("val/NAME")


def test_entries_share_no_name_with_a_number_and_have_one() -> None:
    task = Task(lambda: MulticlassAccuracy(3, average=None))
    log = Records(Alone(), task)
    task.metric.update(*classes(1, 8))  # type: ignore[operator]
    log.add("val", "accuracy", task.metric)
    log.add("val", "accuracy_0", 0.5, weight=1)
    with pytest.raises(TaskError, match="'val/accuracy_0' is logged as a number and is an entry of a metric"):
        log.epoch_values("val")
    task.metric.update(*classes(1, 8))  # type: ignore[operator]
    log.add("test", "", task.metric)
    with pytest.raises(TaskError, match="computes Tensor, no dict, so that its value has no name"):
        log.epoch_values("test")


def test_results_become_names() -> None:
    task = Task(collection)
    task.other = MulticlassAccuracy(3, average=None)
    task.boxes = Boxes()
    log = Records(Alone(), task)
    task.metric.update(*classes(1, 8))  # type: ignore[operator]
    task.other.update(*classes(1, 8))
    task.boxes.update([torch.ones(2, 4)])
    log.add("val", "", task.metric, prog_bar=True)
    log.add("val", "score", task.metric)
    log.add("val", "other", task.other)
    log.add("val", "x/boxes", task.boxes)
    keys = {"m_accuracy", "m_precision", "m_f1", "m_a", "m_b", "m_c"}
    assert set(log.epoch_values("val")) == {
        *(f"val/{key}" for key in _collection_keys()),
        *(f"val/score/{key}" for key in _collection_keys()),
        *(f"val/other_{i}" for i in range(3)),
        *(f"x/boxes/{key}" for key in ("map", "count", "masks", "per_class_0", "per_class_1")),
    }
    assert keys, "named by torchmetrics"
    assert "val/m_accuracy" in log.prog_bar_names and "val/score/m_accuracy" not in log.prog_bar_names


def _collection_keys() -> list[str]:
    metric = collection()
    metric.update(*classes(1, 8))
    return list(metric.compute())


def test_a_table_is_no_curve() -> None:
    task = Task(lambda: MulticlassConfusionMatrix(3))
    log = Records(Alone(), task)
    task.metric.update(*classes(1, 8))  # type: ignore[operator]
    log.add("val", "confusion", task.metric)
    with pytest.raises(TaskError, match=r"'val/confusion' computed a tensor of shape \(3, 3\)"):
        log.epoch_values("val")


def test_metrics_that_ranks_could_not_find_or_tell_apart_are_refused() -> None:
    task = Task(lambda: MulticlassAccuracy(3))
    log = Records(Alone(), task)
    with pytest.raises(TaskError, match=r"MulticlassAccuracy that is no submodule of the task.*self.accuracy = "):
        log.add("val", "elsewhere", MulticlassAccuracy(3))
    with pytest.raises(SettingsError, match="on_step=True, but a metric is computed at the end of the epoch"):
        log.add("train", "accuracy", task.metric, on_step=True)
    log.add("val", "accuracy", task.metric)
    with pytest.raises(TaskError, match="got float, but before it got another MulticlassAccuracy"):
        log.add("val", "accuracy", 0.5, weight=1)
    log.add("val", "number", 0.5, weight=1)
    with pytest.raises(TaskError, match="got MulticlassAccuracy, but before it got numbers"):
        log.add("val", "number", task.metric)


def test_a_metric_made_in_setup_is_found() -> None:
    task = Task(lambda: MulticlassAccuracy(3))
    log = Records(Alone(), task)
    log.add("val", "first", task.metric)
    task.late = MulticlassAccuracy(3, average="micro")
    task.late.update(torch.tensor([1]), torch.tensor([1]))
    log.add("val", "late", task.late)
    assert log.epoch_values("val") == {"val/late": 1.0}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_states_return_to_their_device(kind: str) -> None:
    make, data = KINDS[kind]
    rows = [[data(1, 6), data(2, 3)], [data(3, 2)], []]
    expected = values_of(make, [batch for row in rows for batch in row], Alone())

    def on_device(part: Any) -> Any:
        if isinstance(part, list):
            return [on_device(item) for item in part]
        return part.cuda() if isinstance(part, Tensor) else part

    def log(rank: ThreadRank) -> dict[str, float]:
        batches = [tuple(on_device(part) for part in batch) for batch in rows[rank.rank]]
        return values_of(lambda: make().cuda(), batches, rank, epochs=2)

    found = on_ranks(3, log)
    assert found[0] == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert repr(found) == repr([found[0]] * 3)
