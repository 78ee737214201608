"""Metric objects half way through an epoch, saved and taken over: exactly the results of a run that is not stopped."""

import collections
import warnings
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sanctuary_trainer.errors import CheckpointError
from sanctuary_trainer.records import Records
from tests.test_metrics import KINDS, MeanOfMeans, OwnStates, Task, classes, regression, scores
from tests.test_pending import after_a_change, through_a_file
from tests.test_records import Alone

torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics import (  # noqa: E402
    BootStrapper,
    ClasswiseWrapper,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MetricTracker,
    MinMaxMetric,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.classification import (  # noqa: E402
    BinaryAUROC,
    BinaryAveragePrecision,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.segmentation import MeanIoU  # noqa: E402
from torchmetrics.wrappers import MultitaskWrapper, Running  # noqa: E402


def one_number(seed: int, samples: int) -> tuple[Tensor]:
    return (regression(seed, samples)[0].mean(),)


def masks(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, (samples, 3, 4, 4), generator=generator) for _ in range(2))  # type: ignore[return-value]


def two_tasks(seed: int, samples: int) -> tuple[Any, Any]:
    both = {"a": classes(seed, samples), "b": regression(seed, samples)}
    return {name: pair[0] for name, pair in both.items()}, {name: pair[1] for name, pair in both.items()}


class Best(Metric):
    """Keeps in plain attributes what no reset is to touch, one of them named as the setting it begins with."""

    def __init__(self, best: float = 0.0) -> None:
        super().__init__()
        self.best = best
        self.kind: torch.dtype | None = None
        self.seen: dict[int, list[Tensor]] = {}

    def update(self, value: Tensor) -> None:
        self.best = max(self.best, float(value))
        self.kind = value.dtype
        self.seen.setdefault(len(self.seen), []).append(value)

    def compute(self) -> dict[str, Tensor]:
        return {
            "best": torch.tensor(self.best, dtype=self.kind),
            "seen": torch.stack([v[0] for v in self.seen.values()]).sum(),
        }


def grouped(**settings: Any) -> MetricCollection:
    accuracy, per_class = MulticlassAccuracy(3, average="micro"), MulticlassAccuracy(3, average=None)
    return MetricCollection(
        {
            "accuracy": MinMaxMetric(accuracy),
            "per_class": ClasswiseWrapper(per_class),
            "f1": MulticlassF1Score(3),
            "precision": MulticlassPrecision(3),
            "table": MetricCollection(
                {"accuracy": MulticlassAccuracy(3), "macro": MulticlassPrecision(3)}, prefix="t_"
            ),
        },
        **settings,
    )


ALL: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any]]] = {
    **KINDS,
    "mean": (MeanMetric, one_number),
    "mean of means": (MeanOfMeans, regression),
    "nested collections": (grouped, classes),
    "groups given": (lambda: grouped(compute_groups=[["f1", "precision"]]), classes),
    "groups of lists": (lambda: MetricCollection([BinaryAUROC(), BinaryAveragePrecision()]), scores),
    "bootstraps": (lambda: BootStrapper(MeanSquaredError(), num_bootstraps=3), regression),
    "running": (lambda: Running(SumMetric(), window=3), one_number),
    "running accuracy": (lambda: Running(MulticlassAccuracy(3), window=2), classes),
    "minmax of a window": (lambda: MinMaxMetric(Running(MeanMetric(), window=2)), one_number),
    "classes found out": (lambda: MeanIoU(per_class=True), masks),
    "several tasks": (
        lambda: MultitaskWrapper({"a": grouped(), "b": MeanSquaredError()}),
        two_tasks,
    ),
    "plain attributes": (Best, one_number),
}


def filled(make: Callable[[], nn.Module], data: Callable[[int, int], Any], count: int = 3) -> Task:
    task = Task(make)
    for seed in range(count):
        task.metric.update(*data(seed, 5))  # type: ignore[operator]
    return task


def continued(log: Records, task: nn.Module) -> Records:
    """The records of a fresh process, which has that task."""
    state = through_a_file(log.state_dict())
    fresh = Records(Alone(), task)
    fresh.load_state_dict([state])
    return fresh


def results(kind: str, stops: Collection[int] = (), forward: bool = False, dirty: bool = False) -> str:
    """The values of three epochs of four batches, as text, stopped after some of the batches."""
    make, data = ALL[kind]
    task, read = Task(make), []
    log = Records(Alone(), task)
    for done in range(1, 13):
        torch.manual_seed(done)
        metric: Any = task.metric
        batch = data(done, 4 + done % 3)
        if forward:
            metric(*batch)
        else:
            metric.update(*batch)
        if done % 4 == 1:  # once an epoch says it: the others may come after a stop
            log.add("train", "score", metric)
        if done % 4 == 0:
            read.append(log.epoch_values("train"))
        if done in stops:
            task = Task(make)
            if dirty:
                former = Records(Alone(), task)
                for seed in range(3):
                    task.metric.update(*data(seed, 5))  # type: ignore[operator]
                former.add("train", "score", task.metric)
                former.epoch_values("train")
                task.metric.update(*data(seed, 5))  # type: ignore[operator]
            log = continued(log, task)
    read.append(log.epoch_values("train"))
    return repr(read)


@pytest.mark.parametrize("kind", ALL)
def test_a_run_that_was_stopped_computes_what_one_computes_that_was_not(kind: str) -> None:
    whole = results(kind)
    assert whole.count("score") >= 3, "the test must compare something"
    assert results(kind, stops=[6]) == whole
    assert results(kind, stops=[1, 4, 7, 8]) == whole
    assert results(kind, stops=range(1, 13)) == whole


@pytest.mark.parametrize("kind", ALL)
def test_it_is_the_same_for_forward(kind: str) -> None:
    assert results(kind, stops=[3, 8], forward=True) == results(kind, forward=True)


@pytest.mark.parametrize("kind", ALL)
def test_what_a_metric_held_before_is_forgotten(kind: str) -> None:
    """A run goes on in the process that it failed in: its metrics hold what came after the checkpoint."""
    assert results(kind, stops=[2, 4, 6], dirty=True) == results(kind)


def test_a_metric_that_was_logged_after_the_checkpoint_is_nobody_s_again() -> None:
    task = Task(MeanMetric)
    log = Records(Alone(), task)
    state = through_a_file(log.state_dict())
    log.add("train", "score", task.metric)
    log.load_state_dict([state])
    task.metric.update(1.0)  # type: ignore[operator]
    assert log.epoch_values("train") == {}
    assert task.metric.update_count == 1


def test_a_metric_that_nobody_logs_comes_back_too() -> None:
    def make() -> Any:
        task = Task(lambda: MulticlassConfusionMatrix(3))
        task.best = MaxMetric()
        task.extremes = MinMaxMetric(MeanMetric())
        return task

    def step(task: Any, done: int) -> None:
        task.metric.update(*classes(done, 5))
        task.best.update(done % 5)
        task.extremes.update(one_number(done, 3)[0])
        if done % 3 == 0:
            task.extremes.compute()
            task.extremes.reset()

    whole, parted = make(), make()
    log = Records(Alone(), parted)
    for done in range(11):
        step(whole, done)
        step(parted, done)
        if done in (2, 5, 7):
            parted = make()
            log = continued(log, parted)
    found = [
        repr((task.metric.compute(), task.best.compute(), task.extremes.compute(), task.best.update_count))
        for task in (whole, parted)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("of_collection", [False, True])
def test_a_tracker_gets_its_steps_back(of_collection: bool) -> None:
    def make() -> Any:
        return Task(lambda: MetricTracker(grouped() if of_collection else MulticlassAccuracy(3), maximize=True))

    def epoch(tracker: Any, seed: int) -> None:
        tracker.increment()
        for batch in range(3):
            tracker.update(*classes(10 * seed + batch, 6))

    whole, parted = make(), make()
    log = Records(Alone(), parted)
    for seed in range(4):
        epoch(whole.metric, seed)
        epoch(parted.metric, seed)
        if seed % 2:
            parted = make()
            if seed > 2:  # as in the process that failed, which has gone further
                for _ in range(7):
                    parted.metric.increment()
            log = continued(log, parted)
        for task in (whole, parted):
            task.metric.update(*classes(seed, 3))
    assert len(parted.metric) == len(whole.metric)
    assert repr(parted.metric.compute_all()) == repr(whole.metric.compute_all())
    assert list(dict(parted.named_modules())) == list(dict(whole.named_modules()))


def test_compute_groups_stay_what_they_were() -> None:
    """torchmetrics groups by the first batch, and whoever has equal states there shares them ever after."""

    class Total(Metric):
        def __init__(self, sign: int) -> None:
            super().__init__()
            self.sign = sign
            self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, value: float) -> None:
            self.total += value if value > 0 else self.sign * value

        def compute(self) -> Tensor:
            return self.total

    def make() -> Any:
        return Task(lambda: MetricCollection({"a": Total(1), "b": Total(-1)}))

    task, fresh = make(), make()
    log = Records(Alone(), task)
    task.metric.update(2.0)
    continued(log, fresh)
    for metric in (task.metric, fresh.metric):
        metric.update(-3.0)
        assert metric.compute() == {"a": -1.0, "b": -1.0}


@pytest.mark.parametrize("between_epochs", [True, False])
def test_a_collection_may_get_a_new_member_and_loses_only_what_holds_nothing(between_epochs: bool) -> None:
    def make(**more: nn.Module) -> Any:
        return Task(lambda: MetricCollection({"a": MulticlassAccuracy(3), "b": MulticlassPrecision(3), **more}))

    task, fresh = make(), make(c=MulticlassF1Score(3))
    log = Records(Alone(), task)
    task.metric.update(*classes(1, 5))
    log.add("train", "score", task.metric)
    if between_epochs:
        log.epoch_values("train")
        assert continued(log, nn.Linear(1, 1)).state_dict()["metrics"] == {}
    log = continued(log, fresh)
    fresh.metric.update(*classes(2, 5))
    assert [metric.update_count for metric in fresh.metric.values()] == ([1, 1, 1] if between_epochs else [2, 2, 1])


def test_only_what_a_metric_was_not_made_with_is_saved() -> None:
    task = Task(grouped)
    log = Records(Alone(), task)
    assert log.state_dict()["metrics"] == {}
    task.metric.update(*classes(1, 5))  # type: ignore[operator]
    log.add("train", "score", task.metric)
    log.epoch_values("train")
    left = log.state_dict()["metrics"]
    assert {path: entry["attributes"].keys() for path, entry in left.items()} == {
        "metric": {"_groups", "_groups_checked"},
        "metric.accuracy": {"min_val", "max_val"},
    }


def test_a_setting_that_changed_between_epochs_is_the_code_s() -> None:
    task = Task(lambda: MulticlassAccuracy(3, top_k=1, average="micro"))
    log = Records(Alone(), task)
    task.metric.update(*classes(1, 5))  # type: ignore[operator]
    log.add("train", "score", task.metric)
    log.epoch_values("train")
    fresh = Task(lambda: MulticlassAccuracy(3, top_k=2, average="micro"))
    continued(log, fresh)
    assert fresh.metric.top_k == 2


def test_a_metric_made_in_setup_comes_back() -> None:
    def make() -> tuple[Any, Records]:
        task = Task(nn.Identity)
        log = Records(Alone(), task)
        task.metric = MinMaxMetric(MeanMetric())
        return task, log

    (task, log), (fresh, after) = make(), make()
    for value in (1.0, 5.0):
        task.metric.update(value)
        task.metric.compute()
    after.load_state_dict([through_a_file(log.state_dict())])
    assert fresh.metric.compute() == task.metric.compute() == {"raw": 3.0, "min": 1.0, "max": 3.0}


def test_training_may_add_in_place_to_what_came_back() -> None:
    task, fresh = Task(OwnStates), Task(OwnStates)
    log = Records(Alone(), task)
    with torch.inference_mode():
        task.metric.update(torch.tensor([1.0]))  # type: ignore[operator]
    state = log.state_dict()
    Records(Alone(), fresh).load_state_dict([state])
    fresh.metric.update(torch.tensor([1.0]))  # type: ignore[operator]
    assert (task.metric.total, fresh.metric.total) == (1.0, 2.0), "each has memory of its own"


def test_what_no_checkpoint_can_hold_is_told() -> None:
    class Recent(MeanMetric):
        def __init__(self) -> None:
            super().__init__()
            self.functions = [len]
            self.recent: collections.deque[float] = collections.deque(maxlen=3)

        def update(self, value: float) -> None:
            self.recent.append(value)
            super().update(value)

    task = Task(Recent)
    log = Records(Alone(), task)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.state_dict()
    task.metric.update(1.0)  # type: ignore[operator]
    with pytest.warns(UserWarning, match=r"self\.metric\.recent, a deque, is no plain data.*add_state"):
        assert log.state_dict()["metrics"]["metric"]["updates"] == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            nn.Identity,
            r"data of self\.metric, a MulticlassConfusionMatrix, which the task has not\. Resume with the task",
        ),
        (
            lambda: MulticlassAccuracy(3),
            r"self\.metric as a MulticlassConfusionMatrix, and now it is a MulticlassAccuracy",
        ),
        (
            lambda: MulticlassConfusionMatrix(4),
            r"state confmat of self\.metric.* the shape \[3, 3\], and now it has \[4, 4\]",
        ),
    ],
)
def test_a_metric_that_is_another_one_is_told(other: Callable[[], nn.Module], message: str) -> None:
    log = Records(Alone(), filled(lambda: MulticlassConfusionMatrix(3), classes))
    with pytest.raises(CheckpointError, match=message):
        continued(log, Task(other))


def test_other_states_and_a_logged_metric_that_is_gone_are_told() -> None:
    log = Records(Alone(), filled(BinaryAUROC, scores))
    with pytest.raises(
        CheckpointError, match=r"states preds, target of self\.metric, a BinaryAUROC, and now it has confmat"
    ):
        continued(log, Task(lambda: BinaryAUROC(thresholds=5)))
    task = Task(BinaryAUROC)
    log = Records(Alone(), task)
    log.add("train", "score", task.metric)
    bare = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"'train/score' as the metric self\.metric, which the task has not"):
        continued(log, bare)


CANNOT_BE_JOINED = ("pearson, whose states are stacked",)
# Their windows, replicas and plain attributes are each rank's own, or are joined otherwise than samples.
OWN_OF_A_RANK = ("running", "running accuracy", "minmax of a window", "bootstraps", "plain attributes")


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind not in (*CANNOT_BE_JOINED, *OWN_OF_A_RANK)])
@pytest.mark.parametrize(("former", "now"), [(2, 1), (1, 2), (3, 2)])
def test_on_another_number_of_ranks_every_sample_counts_once(kind: str, former: int, now: int) -> None:
    make, data = ALL[kind]

    def step(log: Records, rank: int, done: int) -> None:
        metric: Any = log._task.metric
        metric.update(*data(100 * rank + done, 1 + (rank + done) % 3))
        log.add("train", "score", metric)

    alone = Records(Alone(), Task(make))
    rows = [(rank, done) for rank in range(former) for done in range(5)]
    for rank, done in [*rows, *((rank, done) for rank in range(now) for done in range(200, 207))]:
        step(alone, rank, done)
    expected = alone.epoch_values("train")
    assert expected
    found = after_a_change(former, now, step, lambda: Task(make), fold=False)
    for values in found:
        assert values.pop("rest") == {}
        assert values == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert repr(found) == repr([found[0]] * now)


def test_a_metric_that_ranks_cannot_join_is_told() -> None:
    states = [through_a_file(Records(Alone(), filled(PearsonCorrCoef, regression)).state_dict()) for _ in range(2)]
    log = Records(Alone(), Task(PearsonCorrCoef))
    with pytest.raises(CheckpointError, match=r"self\.metric, a PearsonCorrCoef, has no reduction, .* go on from 2"):
        log.load_state_dict(states)
    log.load_state_dict([states[0], Records(Alone(), Task(PearsonCorrCoef)).state_dict()])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ALL)
def test_states_return_to_their_device_and_lists_on_the_host_to_the_host(kind: str) -> None:
    make, data = ALL[kind]

    def results_on(device: str, stops: Collection[int]) -> str:
        task, read = Task(lambda: make().cuda()), []
        log = Records(Alone(), task)
        for done in range(1, 9):
            torch.manual_seed(done)
            batch = data(done, 5)
            on_device = batch if kind == "boxes" else torch.utils._pytree.tree_map(lambda leaf: leaf.to(device), batch)
            task.metric.update(*on_device)  # type: ignore[operator]
            log.add("train", "score", task.metric)
            if done % 4 == 0:
                read.append(log.epoch_values("train"))
            if done in stops:
                task = Task(lambda: make().cuda())
                log = continued(log, task)
        return repr(read)

    assert results_on("cuda", [2, 4, 7]) == results_on("cuda", [])
