"""Callbacks decide alike on every rank, and what they average and validate is one thing on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sanctuary_trainer import Callback, RankError, SettingsError
from sanctuary_trainer.callbacks import EMA, Checkpoint, EarlyStopping
from tests.callbacks.test_ema import ConvNet, Kept, copied, images, same
from tests.distributed.workers import Ranks
from tests.small_tasks import Line, Net, classes, floats, loader, quiet_trainer

# Early stopping


class Differs(Line):
    """Each rank logs its own value: on rank 0 `first` times the epoch, on rank 1 `second` times."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__(learning_rate=0.0)
        self.slopes = (first, second)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", self.slopes[self.run.rank] * self.run.state.epoch)


def stop_where_ranks_differ(first: float, second: float, monitor: str, **settings: Any) -> Any:
    task = Differs(first, second)
    early = EarlyStopping(monitor, "min", patience=2)
    trainer = quiet_trainer(**{"max_epochs": 6, "callbacks": [early], **settings})
    result = trainer.fit(task, loader(floats(range(8)), 1), loader(floats(range(4)), 1))
    return result.global_step, result.stop_reason, early.state_dict()


@pytest.mark.parametrize(
    ("first", "second", "steps"),
    [(0.0, -1.0, 6 * 4), (-1.0, 0.0, 6 * 4), (-1.0, 1.0, 3 * 4), (1.0, -1.0, 3 * 4), (0.0, 1.0, 3 * 4)],
)
def test_ranks_stop_by_their_common_value(two_ranks: Ranks, first: float, second: float, steps: int) -> None:
    found = two_ranks(stop_where_ranks_differ, first, second, "val/score")
    assert found[0] == found[1]
    assert found[0][0] == steps


@pytest.mark.parametrize(
    ("monitor", "settings", "steps"),
    [
        ("val/score", {"val_check_interval": 0.25}, 3),
        ("train/loss", {}, 3 * 4),
        ("val/score", {"min_epochs": 5}, 5 * 4),
        ("val/score", {"check_val_every_n_epoch": 2}, 6 * 4),
    ],
    ids=str,
)
def test_ranks_stop_together_wherever_the_value_comes(
    two_ranks: Ranks, monitor: str, settings: Any, steps: int
) -> None:
    found = two_ranks(stop_where_ranks_differ, 0.0, 0.0, monitor, **settings)
    assert found[0] == found[1]
    assert found[0][0] == steps and monitor in found[0][1]


def watch_what_is_not_there(**settings: Any) -> Any:
    with pytest.raises(SettingsError) as caught:
        stop_where_ranks_differ(0.0, 0.0, "val/skore", **settings)
    return str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"val_check_interval": 2}], ids=str)
def test_a_missing_monitor_is_the_same_error_on_every_rank(two_ranks: Ranks, settings: Any) -> None:
    first, second = two_ranks(watch_what_is_not_there, **settings)
    assert first == second and "Did you mean 'val/score'" in first


# The average


def train_with_average(batch_size: int) -> Any:
    task, ema, kept = Net(), EMA(0.9), Kept()
    result = quiet_trainer(max_epochs=2, callbacks=[ema, kept]).fit(
        task, loader(classes(21), batch_size), loader(classes(7, seed=2), batch_size)
    )
    assert same(copied(task), kept.states[-1])
    return ema.average, {name: value for name, value in result.metrics.items() if name.startswith("val/")}


def test_the_average_on_2_ranks_is_that_of_1(two_ranks: Ranks, one_rank: Ranks) -> None:
    (expected, metrics), *_ = one_rank(train_with_average, 8)
    found = two_ranks(train_with_average, 4)
    assert same(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert set(metrics) == {"val/loss", "val/loss_ema", "val/accuracy", "val/accuracy_ema"}
    for average, values in found:
        for name, tensor in expected.items():
            assert torch.allclose(average[name], tensor, rtol=0, atol=1e-12)
        assert values == pytest.approx(metrics, abs=1e-12)


def train_with_batch_norm() -> Any:
    """Rank 0's tensors after the fit, raw and averaged, and what the fit's last validation told."""
    task, ema, kept = ConvNet(), EMA(0.7), Kept()
    result = quiet_trainer(max_epochs=2, callbacks=[ema, kept]).fit(
        task, loader(images(40), 2), loader(images(7, seed=2), 2)
    )
    raw, last = copied(task), kept.states[-1]
    own = {name: last[name] for name in last if "running" not in name and "tracked" not in name}
    assert same({name: raw[name] for name in own}, own)
    metrics = {name: value for name, value in result.metrics.items() if name.startswith("val/")}
    return ema.state_dict(), raw, last, metrics


def test_batch_norm_is_validated_with_the_averaged_statistics_of_rank_0(two_ranks: Ranks) -> None:
    (state, raw, last, metrics), (other, raw_too, last_too, metrics_too) = two_ranks(train_with_batch_norm)
    # Each rank measures its own batches; the validation has given every rank those of rank 0.
    mean = "backbone.1.running_mean"
    assert not torch.equal(last[mean], last_too[mean])
    assert same(raw, last) and torch.equal(raw_too[mean], last[mean])
    weights = [name for name in state["average"] if "running" not in name]
    assert same({n: state["average"][n] for n in weights}, {n: other["average"][n] for n in weights})
    assert metrics == metrics_too
    task, ema = ConvNet(), EMA()
    task.load_state_dict(raw)
    ema.load_state_dict(state)
    alone = quiet_trainer().validate(task, loader(images(7, seed=2)))
    with ema.swapped(task):
        averaged = quiet_trainer().validate(task, loader(images(7, seed=2)))
    expected = {**alone, **{f"{name}_ema": value for name, value in averaged.items()}}
    assert metrics == pytest.approx(expected, abs=1e-12)


def train_in_parts() -> Any:
    def train(name: str, max_steps: int, resume: str | None = None) -> Any:
        task, ema, early = ConvNet(), EMA(0.9), EarlyStopping("val/loss_ema", "min", patience=50)
        trainer = quiet_trainer(
            callbacks=[ema, early, Checkpoint()], run_name=name, max_steps=max_steps, val_check_interval=4
        )
        result = trainer.fit(task, loader(images(40), 2), loader(images(7, seed=2)), resume=resume)
        values = {name: value for name, value in result.metrics.items() if name.startswith("val/")}
        return copied(task), ema.average, values, early.state_dict()

    straight = train("straight", 20)
    train("parts", 13)
    return straight, train("parts", 20, "last")


def test_a_resumed_run_has_the_average_and_the_count_of_the_uninterrupted_one(two_ranks: Ranks) -> None:
    for rank, (straight, resumed) in enumerate(two_ranks(train_in_parts)):
        assert same(straight[0], resumed[0]) and straight[2:] == resumed[2:]
        # Of the running statistics an evaluation uses rank 0's, and these are what is saved.
        names = [name for name in straight[1] if rank == 0 or "running" not in name]
        assert same({n: straight[1][n] for n in names}, {n: resumed[1][n] for n in names})


class FailsOnOne(ConvNet):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.run.variant and self.run.rank == 1:
            raise ValueError("rank 1 cannot do this with the average")
        super().validation_step(batch, batch_idx)


class VariantFailsOnOne(Callback):
    def on_fit_start(self, run: Any) -> None:
        @contextmanager
        def fails() -> Iterator[None]:
            if run.rank == 1:
                raise ValueError("rank 1 cannot do this at all")
            yield

        run.variants["other"] = fails


def fail_in_the_second_pass(kind: str) -> Any:
    task: Any = FailsOnOne() if kind == "step" else ConvNet()
    kept, callback = Kept(), EMA(0.5) if kind == "step" else VariantFailsOnOne()
    with pytest.raises((ValueError, RankError)) as caught:
        quiet_trainer(max_epochs=2, callbacks=[kept, callback]).fit(task, loader(images(8), 2), loader(images(4), 2))
    names = [name for name, _ in task.named_parameters()]
    assert same({n: copied(task)[n] for n in names}, {n: kept.states[-1][n] for n in names})
    assert all(module.training for module in task.modules())
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("kind", ["step", "context"])
def test_an_error_in_the_second_pass_of_one_rank_ends_all_with_their_own_weights(two_ranks: Ranks, kind: str) -> None:
    (first, text), (second, _) = two_ranks(fail_in_the_second_pass, kind)
    assert (first, second) == ("RankError", "ValueError")
    assert "rank 1: ValueError: rank 1 cannot do this" in text
