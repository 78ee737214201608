"""Optimizers and schedulers by themselves, without a run: what may be returned, what is stepped and when."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from sanctuary_trainer.errors import NotSupportedError, SettingsError, TaskError
from sanctuary_trainer.optimization import Optimization

LR = torch.optim.lr_scheduler


@pytest.fixture(autouse=True)
def _no_warning() -> Iterator[None]:
    """PyTorch's warning about the order of optimizers and schedulers must not appear anywhere here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


class Two(nn.Module):
    """Two scalar weights, 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(()))
        self.b = nn.Parameter(torch.zeros(()))

    @property
    def values(self) -> list[float]:
        return [self.a.item(), self.b.item()]


def sgd(task: nn.Module, rate: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(task.parameters(), lr=rate)


def step(optimization: Optimization, task: Two, scaler: torch.amp.GradScaler | None = None) -> bool:
    """An update with the gradient 1 of each weight."""
    loss = task.a + task.b
    (loss if scaler is None else scaler.scale(loss)).backward()
    optimization.average(None)
    return optimization.step()


def rates_over_epochs(optimization: Optimization, task: Two, epochs: int, steps: int = 2) -> list[float]:
    """The rate before each step, and the one after the last."""
    rates = []
    for _ in range(epochs):
        for _ in range(steps):
            rates.append(optimization.optimizers[0].param_groups[0]["lr"])
            step(optimization, task)
        optimization.end_epoch()
    return [*rates, optimization.optimizers[0].param_groups[0]["lr"]]


# fp16


class CountingScaler(torch.amp.GradScaler):
    """Counts the readings of its scale, each of which waits for the device."""

    readings = 0

    def get_scale(self) -> float:
        self.readings += 1
        return super().get_scale()


def scaled(fused: bool = False) -> tuple[Two, CountingScaler, Optimization]:
    """One optimizer for each weight, and a scaler of scale 8."""
    task, scaler = Two(), CountingScaler("cpu", init_scale=8.0, growth_interval=100)
    optimizers = [
        torch.optim.SGD([task.a], lr=1.0, momentum=0.9, fused=fused),
        torch.optim.SGD([task.b], lr=1.0, momentum=0.9, fused=fused),
    ]
    schedulers = [{"scheduler": LambdaLR(optimizer, lambda _: 1.0), "interval": "step"} for optimizer in optimizers]
    return task, scaler, Optimization((optimizers, schedulers), task, scaler=scaler)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_one_optimizer_leaves_out_the_update_of_all(fused: bool) -> None:
    task, scaler, optimization = scaled(fused)
    scaler.scale(task.a + task.b * math.inf).backward()
    optimization.average(None)
    assert optimization.step() is False
    assert task.values == [0.0, 0.0]
    assert not any(optimizer.state for optimizer in optimization.optimizers)
    assert [scheduler.last_epoch for scheduler in optimization.schedulers] == [0, 0]
    assert torch.amp.GradScaler.get_scale(scaler) == 4.0

    assert step(optimization, task, scaler) is True
    assert task.values == [-1.0, -1.0]
    assert [scheduler.last_epoch for scheduler in optimization.schedulers] == [1, 1]
    assert optimization.updates == 1


def test_an_optimizer_without_gradients_does_not_hinder_the_others_under_fp16() -> None:
    task, scaler, optimization = scaled()
    for expected in (-1.0, -2.9):
        scaler.scale(task.a * 1.0).backward()
        optimization.average(None)
        assert optimization.step() is True
        assert task.values == pytest.approx([expected, 0.0])
    scaler.scale(task.a * math.inf).backward()
    optimization.average(None)
    assert optimization.step() is False
    assert task.values == pytest.approx([-2.9, 0.0])


def test_a_window_that_leaves_no_gradient_at_all_is_the_same_with_and_without_fp16() -> None:
    task, _, optimization = scaled()
    optimization.average(0.5)
    assert optimization.step() is True
    assert task.values == [0.0, 0.0]


def test_clipping_and_the_factor_see_unscaled_gradients() -> None:
    task, scaler, _ = scaled()
    optimization = Optimization(sgd(task), task, scaler=scaler, clip=1.0)
    scaler.scale(task.a * 6.0 + task.b * 8.0).backward()
    optimization.average(0.5)
    optimization.clip_gradients()
    assert optimization.step() is True
    assert float(optimization.gradient_norm) == pytest.approx(5.0)  # type: ignore[arg-type]
    assert task.values == pytest.approx([-0.6, -0.8])


def test_a_step_under_fp16_does_not_read_the_scale() -> None:
    task, scaler, optimization = scaled()
    before = scaler.readings
    step(optimization, task, scaler)
    assert scaler.readings == before


# Schedulers that watch a metric


def watched(monitor: str, **settings: Any) -> Optimization:
    """A plateau scheduler that divides the rate by 10 at each value that is not better, after a first update."""
    task = Two()
    optimizer = sgd(task)
    scheduler = {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": monitor, **settings}
    optimization = Optimization({"optimizer": optimizer, "lr_scheduler": scheduler}, task)
    step(optimization, task)
    return optimization


def rate(optimization: Optimization) -> float:
    return float(optimization.optimizers[0].param_groups[0]["lr"])


def test_a_watched_name_that_had_a_value_passes_the_check_and_steps_the_scheduler() -> None:
    optimization = watched("train/score")
    for _ in range(3):
        optimization.new_values({"train/score": 1.0, "train/other": 0.0})
    assert rate(optimization) == pytest.approx(0.01)
    assert optimization.check_monitors(["train/score"]) == []


def test_a_series_of_steps_is_watched_by_its_value_over_the_epoch() -> None:
    optimization = watched("train/loss")
    for _ in range(3):
        optimization.new_values({"train/loss_epoch": 1.0})
    assert rate(optimization) == pytest.approx(0.01)
    assert optimization.check_monitors(["train/loss"]) == []
    optimization = watched("train/accuracy")
    with pytest.raises(SettingsError, match="on_epoch=True and watch 'train/accuracy_epoch'"):
        optimization.check_monitors(["train/accuracy"])


def test_a_name_that_nothing_logged_is_refused_with_the_nearest_that_can_be_watched() -> None:
    optimization = watched("val_loss")
    optimization.new_values({"val/loss": 1.0})
    with pytest.raises(SettingsError, match=r"which nothing has logged; there are val/loss\. Did you mean 'val/loss'"):
        optimization.check_monitors(["val/loss", "val_los"])
    with pytest.raises(SettingsError, match="there are no metrics"):
        watched("val/loss").check_monitors([])


def test_a_scheduler_that_is_not_strict_gives_a_warning_instead() -> None:
    optimization = watched("val/los", strict=False)
    optimization.new_values({"val/loss": 1.0})
    (text,) = optimization.check_monitors(["val/loss"])
    assert text.startswith("ReduceLROnPlateau watches 'val/los'") and text.endswith("Did you mean 'val/loss'?")


def test_sanity_validation_warns_of_names_of_validation_alone() -> None:
    (text,) = watched("val/los").unknown_monitors(["val/loss"])
    assert "sanity validation did not log. Did you mean 'val/loss'?" in text
    assert watched("val/loss").unknown_monitors(["val/loss"]) == []
    assert watched("train/loss_epoch").unknown_monitors(["val/loss"]) == []


def test_a_metric_has_no_step() -> None:
    with pytest.raises(TaskError, match='interval "step"'):
        watched("val/loss", interval="step")
    task = Two()
    optimizer = sgd(task)
    left_beside = {"scheduler": StepLR(optimizer, 1), "interval": "step", "monitor": "val/loss"}
    assert Optimization(([optimizer], [left_beside]), task).schedules[0].monitor is None


class Worse(LR.LRScheduler):
    """Halves the rate where the metric grew."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.values: list[float] = []
        super().__init__(optimizer)

    def step(self, metric: float | None = None) -> None:  # type: ignore[override]
        if metric is not None:
            self.values.append(metric)
            for group in self.optimizer.param_groups:
                group["lr"] /= 2


def test_a_scheduler_of_another_class_watches_where_it_says_reduce_on_plateau() -> None:
    task = Two()
    optimizer = sgd(task)
    schedule = {"scheduler": Worse(optimizer), "monitor": "val/loss", "reduce_on_plateau": True}
    optimization = Optimization({"optimizer": optimizer, "lr_scheduler": schedule}, task)
    step(optimization, task)
    optimization.end_epoch()
    optimization.new_values({"val/loss": 3.0})
    assert optimization.schedulers[0].values == [3.0]
    assert rate(optimization) == 0.5
    with pytest.raises(TaskError, match="Worse needs to know what it watches"):
        Optimization(([optimizer], [{"scheduler": Worse(optimizer), "reduce_on_plateau": True}]), task)


def test_a_scheduler_whose_step_needs_a_metric_says_how_to_get_one() -> None:
    class Needs(Worse):
        def step(self, metric: float) -> None:  # type: ignore[override]
            """Nothing."""

        def _initial_step(self) -> None:
            """Nothing."""

    task = Two()
    optimizer = sgd(task)
    with pytest.raises(TaskError, match=r'Needs.step\(\) needs metric.*"reduce_on_plateau": True'):
        Optimization({"optimizer": optimizer, "lr_scheduler": Needs(optimizer), "monitor": "val/loss"}, task)


# When schedulers are stepped


def test_last_epoch_counts_the_epochs_or_the_updates() -> None:
    task = Two()
    optimizer = sgd(task)
    by_epoch, by_step = LambdaLR(optimizer, lambda _: 1.0), LambdaLR(optimizer, lambda _: 1.0)
    every_third = LambdaLR(optimizer, lambda _: 1.0)
    schedules = [
        by_epoch,
        {"scheduler": by_step, "interval": "step"},
        {"scheduler": every_third, "interval": "step", "frequency": 3},
    ]
    rates_over_epochs(Optimization(([optimizer], schedules), task), task, epochs=3, steps=4)
    assert (by_epoch.last_epoch, by_step.last_epoch, every_third.last_epoch) == (3, 12, 4)


def test_an_epoch_before_the_first_update_does_not_use_up_the_first_rate() -> None:
    task = Two()
    optimizer = sgd(task)
    optimization = Optimization(([optimizer], [StepLR(optimizer, 1)]), task)
    optimization.end_epoch()
    assert rates_over_epochs(optimization, task, epochs=2, steps=1) == pytest.approx([1.0, 0.1, 0.01])


@pytest.mark.parametrize("t_in_epochs", [True, False])
def test_timms_scheduler_is_told_the_epochs_or_the_updates_done(t_in_epochs: bool) -> None:
    scheduler = pytest.importorskip("timm.scheduler")
    task, settings = Two(), {"t_initial": 8, "warmup_t": 2, "warmup_lr_init": 0.1, "t_in_epochs": t_in_epochs}
    optimizer = sgd(task)
    optimization = Optimization(([optimizer], [scheduler.CosineLRScheduler(optimizer, **settings)]), task)

    warm_up = [0.1, 0.55]
    cosine = [0.5 * (1 + math.cos(math.pi * t / 8)) for t in range(2, 8)]
    expected = [*warm_up, *cosine, 0.0]
    if t_in_epochs:
        seen = rates_over_epochs(optimization, task, epochs=8, steps=1)
        assert optimization.schedules[0].interval == "epoch"
    else:
        seen = rates_over_epochs(optimization, task, epochs=4, steps=2)
        assert optimization.schedules[0].interval == "step"
    assert seen == pytest.approx(expected, abs=1e-12)


def test_timms_scheduler_refuses_an_interval_that_it_would_not_follow() -> None:
    scheduler = pytest.importorskip("timm.scheduler")
    task = Two()
    optimizer = sgd(task)
    schedule = {"scheduler": scheduler.CosineLRScheduler(optimizer, t_initial=8), "interval": "step"}
    with pytest.raises(TaskError, match="t_in_epochs=True but has the interval 'step'"):
        Optimization(([optimizer], [schedule]), task)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # timm gives it up
def test_timms_plateau_scheduler_gets_its_metric() -> None:
    scheduler = pytest.importorskip("timm.scheduler")
    task = Two()
    optimizer = sgd(task)
    plateau = scheduler.PlateauLRScheduler(optimizer, patience_t=0)
    with pytest.raises(TaskError, match="PlateauLRScheduler needs to know what it watches"):
        Optimization(([optimizer], [plateau]), task)
    optimization = Optimization({"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val/accuracy"}, task)
    step(optimization, task)
    for _ in range(3):
        optimization.end_epoch()
        optimization.new_values({"val/accuracy": 0.5})
    assert rate(optimization) == pytest.approx(0.01)


# What may be returned


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


class Sharpness(torch.optim.SGD):
    """As SAM's own implementation: a default that it then refuses."""

    def first_step(self) -> None:
        """Nothing."""

    def second_step(self) -> None:
        """Nothing."""

    def step(self, closure: Callable[[], float] | None = None) -> float:  # type: ignore[override]
        assert closure is not None
        return closure()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, NeedsClosure, Sharpness])
@pytest.mark.parametrize("with_scheduler", [False, True])
def test_an_optimizer_that_needs_a_closure_is_refused_by_name(kind: Any, with_scheduler: bool) -> None:
    task = Two()
    optimizer = kind(task.parameters(), lr=1.0)
    returned = ([optimizer], [StepLR(optimizer, 1)]) if with_scheduler else optimizer
    with pytest.raises(NotSupportedError, match=f"^{kind.__name__} calls"):
        Optimization(returned, task)


class WithoutRate(torch.optim.Optimizer):
    """Subtracts the gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= parameter.grad


def test_an_optimizer_without_a_rate_works_and_records_none() -> None:
    task = Two()
    optimization = Optimization([WithoutRate([task.a]), torch.optim.SGD([task.b], lr=0.5)], task)
    step(optimization, task)
    assert task.values == [-1.0, -0.5]
    assert optimization.learning_rates == {"lr/1": 0.5}
    assert Optimization(WithoutRate(task.parameters()), task).learning_rates == {}


def test_transformers_adafactor_chooses_its_own_rate() -> None:
    adafactor = pytest.importorskip("transformers.optimization").Adafactor
    task = Two()
    optimization = Optimization(adafactor(task.parameters(), lr=None, relative_step=True), task)
    assert step(optimization, task) is True
    assert task.values[0] < 0
    assert optimization.learning_rates == {}


def test_every_group_has_a_rate_of_its_own_whatever_its_name() -> None:
    task = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(5))
    names = ["head", "head", "head_2", "3", None]
    groups = [
        {"params": [p], "lr": index + 1.0} | ({"name": name} if name else {})
        for index, (p, name) in enumerate(zip(task, names, strict=True))
    ]
    assert Optimization(torch.optim.SGD(groups), task).learning_rates == {
        "lr/head": 1.0,
        "lr/head_2": 2.0,
        "lr/head_2_2": 3.0,
        "lr/3": 4.0,
        "lr/4": 5.0,
    }


@pytest.mark.parametrize(
    "form",
    [
        lambda o, s: ([o], {"scheduler": s, "interval": "step"}),
        lambda o, s: (o, {"scheduler": s, "interval": "step"}),
        lambda o, s: ([o], [{"scheduler": s, "interval": "step"}]),
        lambda o, s: [[o], [{"scheduler": s, "interval": "step"}]],
        lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}},
        lambda o, s: [{"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}}],
    ],
)
def test_the_forms_of_one_optimizer_and_a_scheduler_mean_the_same(form: Callable[[Any, Any], Any]) -> None:
    task = Two()
    optimizer = sgd(task)
    optimization = Optimization(form(optimizer, StepLR(optimizer, 1)), task)
    assert optimization.optimizers == [optimizer]
    assert rates_over_epochs(optimization, task, epochs=1, steps=2) == pytest.approx([1.0, 0.1, 0.01])


def test_wrong_forms_say_what_was_met_and_what_is_expected() -> None:
    task = Two()
    optimizer = sgd(task)
    with pytest.raises(TaskError, match="SGD stands where a scheduler was expected"):
        Optimization(([optimizer], [optimizer]), task)
    with pytest.raises(TaskError, match=r"A scheduler's dict has the keys \['lr_scheduler'\]"):
        Optimization(([optimizer], {"lr_scheduler": StepLR(optimizer, 1)}), task)
    with pytest.raises(TaskError, match='"optimizer" and, if wanted'):
        Optimization({"lr_scheduler": StepLR(optimizer, 1)}, task)
    with pytest.raises(TaskError, match="returned StepLR where an optimizer was expected"):
        Optimization([optimizer, StepLR(optimizer, 1)], task)
