"""Several ranks compute what one process computes: weights, counts, order, metrics, predictions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from sanctuary_trainer import Callback, RankError, load_predictions
from tests.distributed.workers import Ranks
from tests.small_tasks import Line, Net, NumberStream, classes, floats, loader, quiet_trainer, weights
from tests.test_fit import Pixels, Skips, ignoring


def train(kind: str, count: int, batch_size: int, accumulation: int, epochs: int = 2, **settings: Any) -> Any:
    task: Any = {"net": Net, "pixels": Pixels, "stream": Net}[kind]()
    samples: Any = ignoring(count, set(range(0, count, 3))) if kind == "pixels" else classes(count)
    data = loader(samples, batch_size)
    if kind == "stream":
        data = DataLoader(NumberStream(samples), batch_size=batch_size)
    result = quiet_trainer(max_epochs=epochs, gradient_accumulation_steps=accumulation, **settings).fit(task, data)
    return weights(task), result.global_step


@pytest.mark.parametrize("count", [8, 13, 16, 21])
@pytest.mark.parametrize("kind", ["net", "pixels", "stream"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_2_ranks_of_4_are_1_rank_of_8(
    two_ranks: Ranks, one_rank: Ranks, kind: str, count: int, accumulation: int
) -> None:
    (expected, steps), *_ = one_rank(train, kind, count, 8, accumulation)
    for found, global_step in two_ranks(train, kind, count, 4, accumulation):
        assert global_step == steps
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [5, 12, 25])
def test_3_ranks_of_4_are_1_rank_of_12(three_ranks: Ranks, one_rank: Ranks, count: int) -> None:
    (expected, steps), *_ = one_rank(train, "net", count, 12, 2)
    for found, global_step in three_ranks(train, "net", count, 4, 2):
        assert global_step == steps
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_2_ranks_with_gradients_clipped_are_1_rank(two_ranks: Ranks, one_rank: Ranks) -> None:
    (expected, _), *_ = one_rank(train, "net", 13, 8, 2, gradient_clip_val=0.01)
    for found, _ in two_ranks(train, "net", 13, 4, 2, gradient_clip_val=0.01):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


class SkipsSome(Net):
    """Leaves out the batches that begin with one of these samples."""

    def __init__(self, skipped: set[float]) -> None:
        super().__init__()
        self.skipped = skipped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[0][0, 0].item() in self.skipped:
            return None
        return super().training_step(batch, batch_idx)


def train_with_skips(starts: set[int], accumulation: int) -> Any:
    samples = classes(32)
    task = SkipsSome({samples[start][0][0].item() for start in starts})
    result = quiet_trainer(max_epochs=1, gradient_accumulation_steps=accumulation).fit(task, loader(samples, 4))
    return weights(task), result.global_step


@pytest.mark.parametrize(
    ("starts", "steps"),
    [({4}, 4), ({4, 16}, 4), ({8, 12}, 3), ({0, 4, 8, 12, 16, 20, 24, 28}, 0)],
)
def test_none_on_one_rank_leaves_its_batch_out(two_ranks: Ranks, one_rank: Ranks, starts: set[int], steps: int) -> None:
    (expected, _), *_ = one_rank(train_with_skips, starts, 2)
    for found, global_step in two_ranks(train_with_skips, starts, 1):
        assert global_step == steps
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


class UnevenStream(IterableDataset[Any]):
    """3 samples on rank 0 and 5 on rank 1."""

    def __iter__(self) -> Any:
        import os

        return iter(floats([1, 2, 3] if os.environ["RANK"] == "0" else [10, 20, 30, 40, 50]))


def train_on_uneven_streams(accumulation: int) -> Any:
    task = Line()
    data = DataLoader(UnevenStream(), batch_size=1)
    result = quiet_trainer(max_epochs=2, shard_data=False, gradient_accumulation_steps=accumulation).fit(
        task, data, data
    )
    return task.steps, result.global_step, result.metrics, task.batches


def test_a_rank_whose_stream_ended_joins_until_all_have_ended(two_ranks: Ranks) -> None:
    (first, steps, metrics, seen), (second, steps_too, metrics_too, seen_too) = two_ranks(train_on_uneven_streams, 1)
    assert steps == steps_too == 10
    assert first == second
    assert first[:5] == pytest.approx([-5.5, -16.5, -33.0, -73.0, -123.0], abs=1e-12)
    assert [b[0] for b in seen] == [1, 2, 3] * 2 and [b[0] for b in seen_too] == [10, 20, 30, 40, 50] * 2
    assert metrics == metrics_too
    assert metrics["val/loss"] == pytest.approx(first[-1] * 156 / 8, abs=1e-9)
    (first, steps, *_), (second, *_) = two_ranks(train_on_uneven_streams, 2)
    assert steps == 6 and first == second
    assert first[:3] == pytest.approx([-33 / 4, -33 / 4 - 73 / 3, -33 / 4 - 73 / 3 - 50], abs=1e-12)


class Ids(Line):
    """Keeps the ids that it saw, and logs whether sample 0 is among them as "accuracy"."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch.long().tolist()
        self.log("accuracy", (batch == 0).double().mean())
        self.log("count", len(batch), reduce="sum")
        self.log("loss", ((batch - 3) ** 2).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch.long().tolist()
        return [{"boxes": torch.zeros(int(i) % 3, 4), "name": f"{int(i)}.png", "id": i} for i in batch]


def evaluate_and_predict(counts: list[int]) -> Any:
    found = []
    for count in counts:
        task, trainer = Ids(), quiet_trainer()
        data = loader(floats(range(count)), 4)
        metrics = trainer.validate(task, data)
        validated, task.seen = task.seen, []
        tested = trainer.test(task, data)
        assert {name.replace("test/", "val/"): value for name, value in tested.items()} == metrics
        assert task.seen == validated
        task.seen = []
        predictions = trainer.predict(task, data)
        assert predictions is not None
        assert task.seen == validated
        shapes = [(p["name"], tuple(p["boxes"].shape), int(p["id"]), str(p["boxes"].dtype)) for p in predictions]
        found.append((metrics, validated, shapes))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_is_evaluated_and_predicted_once(
    one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks, ranks: int
) -> None:
    counts = list(range(1, 22))
    outcome = {1: one_rank, 2: two_ranks, 3: three_ranks}[ranks](evaluate_and_predict, counts)
    for place, count in enumerate(counts):
        ids: list[int] = []
        for rank in outcome:
            metrics, seen, shapes = rank[place]
            ids += seen
            assert metrics["val/count"] == count
            assert metrics["val/accuracy"] == pytest.approx(1 / count, abs=1e-15)
            assert metrics["val/loss"] == pytest.approx(sum((i - 3) ** 2 for i in range(count)) / count, rel=1e-14)
            assert shapes == [(f"{i}.png", (i % 3, 4), i, "torch.float32") for i in range(count)]
        assert sorted(ids) == list(range(count))


def predict_to(folder: str, count: int) -> Any:
    predictions = quiet_trainer().predict(Ids(), loader(floats(range(count)), 4), output_dir=folder)
    assert predictions is not None
    return len(predictions), [p["name"] for p in predictions]


def test_predictions_on_disk_are_in_order_on_every_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    for length, names in two_ranks(predict_to, str(tmp_path / "predictions"), 21):
        assert length == 21 and names == [f"{i}.png" for i in range(21)]
    assert [p["id"].item() for p in load_predictions(tmp_path / "predictions")] == list(range(21))


def shuffled_and_workers(workers: int) -> Any:
    data = loader(floats(range(19)), 4, shuffle=True, num_workers=workers)
    trainer = quiet_trainer(seed=5)
    return [int(x) // 2 for x in trainer.predict(Line(), data) or ()]


def test_a_shuffled_loader_predicts_in_the_order_one_process_would_read(two_ranks: Ranks, one_rank: Ranks) -> None:
    (expected,) = one_rank(shuffled_and_workers, 0)
    assert sorted(expected) == list(range(19)) and expected != list(range(19))
    for found in (*two_ranks(shuffled_and_workers, 0), *two_ranks(shuffled_and_workers, 2)):
        assert found == expected


class StopsOnOneRank(Callback):
    def __init__(self, rank: int, batch: int) -> None:
        self.rank, self.batch = rank, batch

    def on_train_batch_end(self, run: Any, batch: Any, batch_idx: int, loss: Any) -> None:
        if run.rank == self.rank and batch_idx == self.batch:
            run.stop(f"rank {run.rank} has enough")


def stop_on(rank: int, batch: int, accumulation: int) -> Any:
    task = Net()
    result = quiet_trainer(
        max_epochs=3, gradient_accumulation_steps=accumulation, callbacks=[StopsOnOneRank(rank, batch)]
    ).fit(task, loader(classes(80), 4), loader(classes(9), 4))
    return result.global_step, result.stop_reason, weights(task)


@pytest.mark.parametrize(("rank", "batch", "accumulation"), [(1, 3, 1), (0, 3, 1), (1, 2, 4), (1, 9, 1)])
def test_a_stop_on_one_rank_stops_all_at_the_same_step(
    two_ranks: Ranks, rank: int, batch: int, accumulation: int
) -> None:
    (step, reason, found), (step_too, reason_too, found_too) = two_ranks(stop_on, rank, batch, accumulation)
    assert step == step_too and torch.equal(found, found_too)
    assert reason == reason_too == f"rank {rank} has enough"
    assert step <= batch // accumulation + 2


class EarlyOnOneRank(Callback):
    """Asks for a stop from a value that only rank 0 sees as bad."""

    def on_evaluation_end(self, run: Any, stage: str, metrics: Any) -> None:
        if run.is_main:
            run.stop("no patience")


def stop_after_validation() -> Any:
    result = quiet_trainer(max_epochs=5, callbacks=[EarlyOnOneRank()]).fit(
        Net(), loader(classes(16), 4), loader(classes(9), 4)
    )
    return result.global_step, result.stop_reason


def test_a_stop_after_validation_is_obeyed_at_once(two_ranks: Ranks) -> None:
    assert two_ranks(stop_after_validation) == [(2, "no patience")] * 2


class Raises(Net):
    def __init__(self, where: str, rank: int) -> None:
        super().__init__()
        self.where, self.rank = where, rank

    def check(self, where: str, number: int) -> None:
        if where == self.where and self.run.rank == self.rank and number == 1:
            raise ValueError(f"broken on rank {self.rank} in {where}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.check("training", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.check("validation", batch_idx)
        return super().validation_step(batch, batch_idx)


class RaisesBatchNorm(Raises):
    """With buffers, which DDP sends in every forward."""

    def __init__(self, where: str, rank: int) -> None:
        super().__init__(where, rank)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()


def raise_in(kind: str, where: str, rank: int, accumulation: int) -> None:
    task: Any = {"plain": Raises, "batch norm": RaisesBatchNorm}[kind](where, rank)
    quiet_trainer(max_epochs=2, gradient_accumulation_steps=accumulation).fit(
        task, loader(classes(32), 4), loader(classes(32), 4)
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "where", "accumulation"),
    [
        ("plain", "training", 1),
        ("plain", "training", 4),
        ("batch norm", "training", 1),
        ("batch norm", "training", 3),
        ("plain", "validation", 1),
    ],
)
def test_an_exception_on_one_rank_ends_all_with_its_text(
    two_ranks: Ranks, kind: str, where: str, rank: int, accumulation: int
) -> None:
    begun = time.monotonic()
    outcomes = two_ranks.outcomes(raise_in, kind, where, rank, accumulation)
    text = f"broken on rank {rank} in {where}"
    assert "ValueError" in outcomes[rank].error and text in outcomes[rank].error
    other = outcomes[1 - rank].error
    assert RankError.__name__ in other and f"rank {rank}: ValueError: {text}" in other
    assert time.monotonic() - begun < 30


class LogsDifferently(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.run.rank == 0:
            self.log("a", 1.0, on_epoch=True)
            self.log("b", 10.0, on_epoch=True)
        else:
            self.log("b", 20.0, on_epoch=True)
            self.log("a", 3.0, on_epoch=True)
            if batch_idx == 1:
                self.log("rare_loss", 7.0, on_epoch=True)
        return super().training_step(batch, batch_idx)


def log_differently() -> Any:
    return quiet_trainer(max_epochs=2, log_every_n_steps=1).fit(LogsDifferently(), loader(classes(16), 4)).metrics


def test_ranks_may_log_different_keys(two_ranks: Ranks) -> None:
    first, second = two_ranks(log_differently)
    assert first["train/a_epoch"] == 2.0 and first["train/b_epoch"] == 15.0 and first["train/rare_loss_epoch"] == 7.0
    first.pop("train/samples_per_second"), second.pop("train/samples_per_second")  # each rank's own clock
    assert first == second


def count_collectives(steps: int) -> Any:
    """Collectives of `steps` steps between logs, by name, and how often DDP's own all-reduce of a bucket ran."""
    import torch.distributed as dist

    calls: list[str] = []
    names = [
        name
        for name in (
            "all_reduce",
            "all_gather",
            "broadcast",
            "barrier",
            "all_gather_object",
            "broadcast_object_list",
            "scatter_object_list",
            "gather",
            "reduce",
            "all_gather_into_tensor",
            "reduce_scatter",
        )
        if hasattr(dist, name)
    ]
    originals = {name: getattr(dist, name) for name in names}

    class Counts(Callback):
        def on_train_batch_start(self, run: Any, batch: Any, batch_idx: int) -> None:
            for name in names if batch_idx == 0 else ():
                setattr(dist, name, lambda *a, _name=name, **k: (calls.append(_name), originals[_name](*a, **k))[1])

        def on_train_step_end(self, run: Any) -> None:
            if run.state.global_step == steps:
                for name in names:
                    setattr(dist, name, originals[name])
                data = run.executor.module._get_ddp_logging_data()
                self.buckets = data.get("bucket_sizes"), data.get("iteration")

    counts = Counts()
    quiet_trainer(max_steps=steps, callbacks=[counts], log_every_n_steps=1000).fit(Net(), loader(classes(8 * steps), 4))
    return calls, counts.buckets


def test_a_step_has_no_collective_beyond_ddps_own(two_ranks: Ranks) -> None:
    for calls, (bucket_sizes, _) in two_ranks(count_collectives, 10):
        assert calls == []
        assert len(str(bucket_sizes).split(",")) == 1  # the ride is in the bucket of the gradients


class Unused(Net):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3).double().requires_grad_(not frozen)


def train_with_a_spare_layer(frozen: bool, find: bool) -> Any:
    return (
        quiet_trainer(max_epochs=2, find_unused_parameters=find).fit(Unused(frozen), loader(classes(32), 4)).global_step
    )


def test_a_frozen_spare_layer_works_and_an_unused_one_is_named(two_ranks: Ranks) -> None:
    assert two_ranks(train_with_a_spare_layer, True, False) == [8, 8]
    assert two_ranks(train_with_a_spare_layer, False, True) == [8, 8]
    for outcome in two_ranks.outcomes(train_with_a_spare_layer, False, False):
        assert "spare.weight" in outcome.error and "find_unused_parameters=True" in outcome.error


def schedule(accumulation: int) -> Any:
    class Decays(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
            self.estimate = self.run.estimated_stepping_batches
            return [optimizer], [{"scheduler": self.scheduler, "interval": "step"}]

    task = Decays()
    result = quiet_trainer(max_steps=5, max_epochs=9, gradient_accumulation_steps=accumulation).fit(
        task, loader(classes(160), 4)
    )
    return task.scheduler.last_epoch, task.scheduler.get_last_lr()[0], result.global_step, task.estimate


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_scheduler_steps_once_per_step_on_any_number_of_ranks(
    one_rank: Ranks, two_ranks: Ranks, accumulation: int
) -> None:
    for found in (*one_rank(schedule, accumulation), *two_ranks(schedule, accumulation)):
        assert found == (5, pytest.approx(1 / 6), 5, 5)


def estimates() -> Any:
    found = []
    for limit in (None, 3, 0.5):
        for accumulation in (1, 2, 4):
            for drop_last in (False, True):
                for max_steps in (None, 5):

                    class Estimates(Line):
                        def configure_optimizers(self) -> Any:
                            self.estimate = self.run.estimated_stepping_batches
                            return super().configure_optimizers()

                    task = Estimates()
                    result = quiet_trainer(
                        max_epochs=2,
                        max_steps=max_steps,
                        limit_train_batches=limit,
                        gradient_accumulation_steps=accumulation,
                    ).fit(task, loader(floats(range(13)), 2, drop_last=drop_last))
                    found.append((task.estimate, result.global_step))
    return found


def test_the_estimate_of_steps_is_right_on_2_ranks(two_ranks: Ranks) -> None:
    for found in two_ranks(estimates, timeout=120):
        assert all(estimate == steps for estimate, steps in found)


def dispatched(kind: str, count: int) -> Any:
    task = Net()
    samples: Any = classes(count)
    data: Any = loader(samples, 4) if kind == "map" else DataLoader(NumberStream(samples), batch_size=4)
    trainer = quiet_trainer(max_epochs=2, dispatch_batches=True)
    result = trainer.fit(task, data)
    predictions = trainer.predict(task, data)
    assert predictions is not None
    read = data.dataset.read if kind == "map" else None
    return weights(task), result.global_step, torch.stack(list(predictions)), read


@pytest.mark.parametrize("count", [8, 13, 21])
def test_rank_0_reads_and_deals(two_ranks: Ranks, one_rank: Ranks, count: int) -> None:
    (expected, steps), *_ = one_rank(train, "net", count, 8, 1)
    (found, global_step, predictions, read), (found_too, _, predictions_too, read_too) = two_ranks(
        dispatched, "map", count
    )
    assert global_step == steps and read_too == [] and len(read) == 3 * count
    assert torch.allclose(found, expected, rtol=0, atol=1e-12) and torch.equal(found, found_too)
    assert len(predictions) == count and torch.equal(predictions, predictions_too)
    (found, _, predictions, _), (found_too, _, predictions_too, _) = two_ranks(dispatched, "stream", count)
    assert torch.equal(found, found_too)
    assert len(predictions) == count and torch.equal(predictions, predictions_too)


def train_with_a_compressing_hook(skip: bool) -> Any:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import DDPCommunicationHookType

    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)]
    )
    samples = [(x.float(), y) for x, y in classes(21)]
    task: Any = (Skips() if skip else Net()).float()
    task.skipped = (1,)
    trainer = quiet_trainer(max_epochs=2, cpu=None, accelerator=accelerator)
    result = trainer.fit(task, loader(samples, 4))
    again = trainer.fit(task, loader(samples, 4))
    return weights(task), result.global_step, again.global_step, len(accelerator._models)


def test_a_hook_that_compresses_keeps_the_counts_exact(two_ranks: Ranks) -> None:
    for skip, steps in ((False, 6), (True, 4)):
        (found, step, again, held), (found_too, *_) = two_ranks(train_with_a_compressing_hook, skip)
        assert torch.equal(found, found_too) and step == again == steps and held == 0


def train_with_a_given_accelerator(**settings: Any) -> Any:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**settings)])
    return quiet_trainer(max_epochs=1, cpu=None, accelerator=accelerator).fit(Net(), loader(classes(8))).global_step


def test_a_given_accelerator_is_used_and_static_graph_is_refused(two_ranks: Ranks) -> None:
    assert two_ranks(train_with_a_given_accelerator) == [1, 1]
    for outcome in two_ranks.outcomes(train_with_a_given_accelerator, static_graph=True):
        assert outcome.error is not None and "static_graph=True" in outcome.error


class Sleeps(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.run.rank == 1 and batch_idx == 1:
            time.sleep(600)
        return super().training_step(batch, batch_idx)


def train_with_a_sleeper() -> None:
    quiet_trainer(max_epochs=1, timeout=3).fit(Sleeps(), loader(classes(32)))


def test_the_timeout_ends_a_rank_whose_peer_does_not_answer(two_ranks: Ranks) -> None:
    begun = time.monotonic()
    outcomes = two_ranks.outcomes(train_with_a_sleeper, timeout=14)
    assert outcomes[0].error is not None and "RuntimeError" in outcomes[0].error
    assert time.monotonic() - begun < 40


def evaluate_with_weights_of_their_own() -> Any:
    import os

    task = Net(seed=int(os.environ["RANK"]))
    metrics = quiet_trainer().validate(task, loader(classes(9), 4))
    return metrics, weights(task)


def test_ranks_evaluate_with_the_weights_of_rank_0(two_ranks: Ranks) -> None:
    (metrics, found), (metrics_too, found_too) = two_ranks(evaluate_with_weights_of_their_own)
    assert metrics == metrics_too and torch.equal(found, found_too) and torch.equal(found, weights(Net(seed=0)))


class Thaws(Net):
    """Trains the last layer for an epoch, then everything."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False).eval()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self, run: Any) -> None:
        if run.state.epoch == 1:
            self.net[0].requires_grad_(True)

    def on_train_epoch_end(self, run: Any) -> None:
        assert self.net[0].training == (run.state.epoch > 0)


def thaw(batch_size: int) -> Any:
    task = Thaws()
    quiet_trainer(max_epochs=3).fit(task, loader(classes(16), batch_size))
    return weights(task)


def test_layers_thawed_between_epochs_stay_alike_on_all_ranks(two_ranks: Ranks, one_rank: Ranks) -> None:
    (expected,) = one_rank(thaw, 8)
    for found in two_ranks(thaw, 4):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def train_on_unequal_lengths() -> None:
    import os

    quiet_trainer(max_epochs=1).fit(Net(), loader(classes(16 + int(os.environ["RANK"])), 4))


def test_data_of_unequal_length_is_refused_on_every_rank(two_ranks: Ranks) -> None:
    for outcome in two_ranks.outcomes(train_on_unequal_lengths):
        assert outcome.error is not None and "The training loader is not the same on all ranks" in outcome.error


def evaluate_whole_batches(count: int) -> Any:
    data = loader(floats(range(count)), 4, drop_last=True)
    trainer = quiet_trainer()
    return trainer.validate(Ids(), data).get("val/count", 0), len(trainer.predict(Line(), data) or ())


@pytest.mark.parametrize("count", [3, 10, 13])
def test_drop_last_drops_in_evaluation_what_one_process_drops(one_rank: Ranks, three_ranks: Ranks, count: int) -> None:
    whole = count // 4 * 4
    for found in (*one_rank(evaluate_whole_batches, count), *three_ranks(evaluate_whole_batches, count)):
        assert found == (whole, whole)


class Unreadable(torch.utils.data.Dataset[Any]):
    """Sample 13 cannot be read, on one rank or on all."""

    def __init__(self, ranks: set[int]) -> None:
        self.ranks = ranks

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        import os

        if index >= 13 and int(os.environ["RANK"]) in self.ranks:
            raise OSError(f"image {index} is broken")
        return classes(40)[index]


def read_what_is_broken(ranks: set[int], verb: str, dispatch: bool) -> None:
    trainer = quiet_trainer(max_epochs=1, timeout=15, dispatch_batches=dispatch, gradient_accumulation_steps=2)
    data = DataLoader(Unreadable(ranks), batch_size=4)
    getattr(trainer, verb)(Net(), data)


@pytest.mark.parametrize("verb", ["fit", "validate", "predict"])
@pytest.mark.parametrize(("ranks", "dispatch"), [({1}, False), ({0}, False), ({0, 1}, False), ({0}, True)])
def test_an_error_while_reading_on_one_rank_reaches_all(
    two_ranks: Ranks, ranks: set[int], verb: str, dispatch: bool
) -> None:
    for outcome in two_ranks.outcomes(read_what_is_broken, ranks, verb, dispatch, timeout=30):
        assert outcome.error is not None and "is broken" in outcome.error


class NoLength(torch.utils.data.Sampler[int]):
    """A sampler that does not tell how many it gives."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def train_without_a_length(kind: str, count: int, batch_size: int, accumulation: int) -> Any:
    task, samples = Net(), classes(count)
    data: Any = DataLoader(NumberStream(samples), batch_size=batch_size)
    if kind == "sampler":
        data = loader(samples, batch_size, sampler=NoLength(count))
    states: list[int] = []

    class Counts(Callback):
        def on_train_step_end(self, run: Any) -> None:
            states.append(run.state.samples)

    result = quiet_trainer(
        max_epochs=2,
        gradient_accumulation_steps=accumulation,
        dispatch_batches=kind == "dispatched",
        callbacks=[Counts()],
    ).fit(task, data)
    return weights(task), result.global_step, states


@pytest.mark.parametrize("kind", ["sampler", "dispatched", "stream"])
@pytest.mark.parametrize(("count", "accumulation"), [(9, 1), (12, 1), (17, 2), (20, 3)])
def test_ranks_stay_alike_on_data_without_a_length(two_ranks: Ranks, kind: str, count: int, accumulation: int) -> None:
    (found, steps, states), (found_too, steps_too, states_too) = two_ranks(
        train_without_a_length, kind, count, 4, accumulation
    )
    assert torch.equal(found, found_too) and steps == steps_too and states == states_too


class RaisesInAHook(Net):
    def __init__(self, hook: str, rank: int, at: int) -> None:
        super().__init__()
        self.hook, self.rank, self.at = hook, rank, at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.reach("training_step")
        return super().training_step(batch, batch_idx)

    def reach(self, hook: str) -> None:
        if hook == self.hook and self.run.rank == self.rank and self.run.state.global_step >= self.at:
            raise ValueError(f"broken in {hook}")

    def setup(self, stage: str) -> None:
        self.reach("setup")

    def configure_optimizers(self) -> Any:
        self.reach("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self, run: Any) -> None:
        self.reach("on_fit_start")

    def on_train_epoch_start(self, run: Any) -> None:
        self.reach("on_train_epoch_start")

    def on_train_batch_start(self, run: Any, batch: Any, batch_idx: int) -> None:
        self.reach("on_train_batch_start")

    def on_train_batch_end(self, run: Any, batch: Any, batch_idx: int, loss: Any) -> None:
        self.reach("on_train_batch_end")

    def on_before_optimizer_step(self, run: Any) -> None:
        self.reach("on_before_optimizer_step")

    def on_train_step_end(self, run: Any) -> None:
        self.reach("on_train_step_end")

    def on_log(self, run: Any, values: Any, step: int) -> None:
        self.reach("on_log")

    def on_save_point(self, run: Any) -> None:
        self.reach("on_save_point")

    def on_evaluation_start(self, run: Any, stage: str) -> None:
        self.reach("on_evaluation_start")

    def on_evaluation_end(self, run: Any, stage: str, metrics: Any) -> None:
        self.reach("on_evaluation_end")

    def on_train_epoch_end(self, run: Any) -> None:
        self.reach("on_train_epoch_end")


HOOKS_THAT_RAISE = [
    "setup", "configure_optimizers", "on_fit_start", "on_train_epoch_start", "on_train_batch_start",
    "on_train_batch_end", "training_step", "on_before_optimizer_step", "on_train_step_end", "on_log", "on_save_point",
    "on_evaluation_start",
    "on_evaluation_end", "on_train_epoch_end",
]  # fmt: skip


def raise_in_a_hook(hook: str, rank: int, at: int, late: bool, **settings: Any) -> None:
    if late:  # as on an accelerator, where the host does not wait for what the ranks tell each other
        from sanctuary_trainer import devices

        made = devices.Devices.__init__

        def reading_late(self: Any, **given: Any) -> None:
            made(self, **given)
            self.reads_late = True

        devices.Devices.__init__ = reading_late  # type: ignore[method-assign]
    settings.setdefault("max_epochs", 3)
    quiet_trainer(timeout=15, **settings).fit(
        RaisesInAHook(hook, rank, at), loader(classes(40), 4), loader(classes(9), 4)
    )


@pytest.mark.parametrize("hook", HOOKS_THAT_RAISE)
@pytest.mark.parametrize(
    ("rank", "at", "late", "settings"),
    [
        (1, 0, False, {}),
        (0, 2, False, {"log_every_n_steps": 3, "gradient_accumulation_steps": 2}),
        (1, 1, False, {"dispatch_batches": True, "gradient_accumulation_steps": 2}),
        (1, 2, True, {"log_every_n_steps": 4}),
        (1, 3, True, {"log_every_n_steps": 4}),
        (1, 5, False, {}),
    ],
)
def test_an_error_in_any_hook_on_one_rank_reaches_all(
    two_ranks: Ranks, hook: str, rank: int, at: int, late: bool, settings: dict[str, Any]
) -> None:
    if at and hook in ("setup", "configure_optimizers", "on_fit_start"):
        at = 0
    outcomes = two_ranks.outcomes(raise_in_a_hook, hook, rank, at, late, timeout=30, **settings)
    told = [outcome.error or "no error" for outcome in outcomes]
    assert f"ValueError: broken in {hook}" in told[rank]
    assert "RankError" in told[1 - rank] and f"rank {rank}: ValueError: broken in {hook}" in told[1 - rank]


@pytest.mark.parametrize("hook", ["on_train_step_end", "on_save_point"])
def test_an_error_in_the_last_step_of_a_run_that_ends_inside_an_epoch_reaches_all(two_ranks: Ranks, hook: str) -> None:
    first, second = two_ranks.outcomes(raise_in_a_hook, hook, 1, 7, False, timeout=30, max_steps=7)
    assert second.error is not None and f"ValueError: broken in {hook}" in second.error
    assert first.error is not None and f"rank 1: ValueError: broken in {hook}" in first.error


def train_late(stop_at: int) -> Any:
    from sanctuary_trainer import devices

    made = devices.Devices.__init__

    def reading_late(self: Any, **given: Any) -> None:
        made(self, **given)
        self.reads_late = stop_at >= 0

    devices.Devices.__init__ = reading_late  # type: ignore[method-assign]
    callbacks = [StopsOnOneRank(1, stop_at)] if stop_at > 0 else []
    task = SkipsSome({classes(40)[8][0][0].item()})
    result = quiet_trainer(max_epochs=2, log_every_n_steps=3, callbacks=callbacks).fit(task, loader(classes(40), 4))
    return weights(task), result.global_step, result.stop_reason


def test_reading_late_changes_nothing_but_when_a_stop_is_obeyed(two_ranks: Ranks) -> None:
    (at_once, steps, _), *_ = two_ranks(train_late, -1)
    for found, global_step, _ in two_ranks(train_late, 0):
        assert torch.equal(found, at_once) and global_step == steps == 10
    (found, step, reason), (found_too, step_too, reason_too) = two_ranks(train_late, 1)
    assert torch.equal(found, found_too) and (step, reason) == (step_too, reason_too) and step in (3, 4)


class ThawsInside(Net):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.net[0].requires_grad_(frozen)
        self.then = not frozen

    def on_train_step_end(self, run: Any) -> None:
        if run.state.global_step == 2:
            self.net[0].requires_grad_(self.then)


def thaw_inside(frozen: bool, batch_size: int) -> Any:
    task = ThawsInside(frozen)
    quiet_trainer(max_epochs=1).fit(task, loader(classes(40), batch_size))
    return weights(task)


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_thawed_or_frozen_inside_an_epoch_stay_alike(two_ranks: Ranks, one_rank: Ranks, frozen: bool) -> None:
    (expected,) = one_rank(thaw_inside, frozen, 8)
    for found in two_ranks(thaw_inside, frozen, 4):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


class UnusedLater(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(5, 3).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0]) + (self.spare(batch[0]) if batch_idx < 2 else 0)
        return nn.functional.cross_entropy(logits, batch[1])


def train_with_a_layer_unused_later() -> None:
    quiet_trainer(max_epochs=1, timeout=15).fit(UnusedLater(), loader(classes(40), 4))


def test_a_layer_that_is_unused_only_later_is_named_too(two_ranks: Ranks) -> None:
    for outcome in two_ranks.outcomes(train_with_a_layer_unused_later, timeout=30):
        assert outcome.error is not None and "spare.weight, spare.bias" in outcome.error


class WithOddBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("odd", torch.arange(3, dtype=torch.int16))


def evaluate_several_loaders(orders: dict[int, list[str]]) -> Any:
    import os

    loaders = {"a": loader(classes(8), 4), "b": loader(classes(3), 4)}
    names = orders[int(os.environ["RANK"])]
    return quiet_trainer().validate(WithOddBuffer(), {name: loaders[name] for name in names})


def test_evaluation_loaders_in_another_order_are_refused(two_ranks: Ranks) -> None:
    first, second = two_ranks(evaluate_several_loaders, {0: ["a", "b"], 1: ["a", "b"]})
    assert first == second and set(first) == {"val/a/loss", "val/a/accuracy", "val/b/loss", "val/b/accuracy"}
    for outcome in two_ranks.outcomes(evaluate_several_loaders, {0: ["a", "b"], 1: ["b", "a"]}):
        assert outcome.error is not None and "in one order on every rank" in outcome.error


def plan_with_own_lengths(interval: Any) -> Any:
    import os

    class Estimates(Net):
        def configure_optimizers(self) -> Any:
            self.estimate = self.run.estimated_stepping_batches
            return super().configure_optimizers()

    task = Estimates()
    data = loader(classes([32, 16][int(os.environ["RANK"])]), 4)
    result = quiet_trainer(max_epochs=2, shard_data=False, val_check_interval=interval).fit(task, data, data)
    return task.estimate, result.global_step, weights(task)


@pytest.mark.parametrize("interval", [None, 0.5, 3])
def test_data_of_each_ranks_own_length_gives_one_plan(two_ranks: Ranks, interval: Any) -> None:
    (estimate, steps, found), (estimate_too, steps_too, found_too) = two_ranks(plan_with_own_lengths, interval)
    assert estimate == estimate_too == steps == steps_too == 16 and torch.equal(found, found_too)
