"""The moving average: equal to a loop written by hand, validated beside the weights, and never in their way."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sanctuary_trainer import Callback, CallbackError, SettingsError, TaskError, VisionTask
from sanctuary_trainer.callbacks import EMA, Checkpoint, EarlyStopping
from sanctuary_trainer.checkpointing import decode, encode
from tests.small_tasks import Line, Net, NumberStream, classes, floats, loader, quiet_trainer

Tensors = dict[str, Tensor]


class Kept(Callback):
    """Keeps the task's tensors of the start and after every step."""

    def __init__(self) -> None:
        self.states: list[Tensors] = []

    def on_fit_start(self, run: Any) -> None:
        self.states = [copied(run.task)]

    def on_train_step_end(self, run: Any) -> None:
        self.states.append(copied(run.task))


def copied(task: nn.Module) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in task.state_dict(keep_vars=True).items()}


def same(first: Tensors, second: Tensors) -> bool:
    """Equal to the last bit, in dtype and in the set of names."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def by_hand(states: list[Tensors], names: list[str], decay: float) -> Tensors:
    average = {name: states[0][name].clone() for name in names}
    for state in states[1:]:
        for name in names:
            average[name].lerp_(state[name], 1 - decay)
    return average


class ConvNet(VisionTask):
    """A convolution with batch norm and a linear head on images of 1 x 4 x 4."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU()).double()
        self.head = nn.Linear(12, 2).double()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images).flatten(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log("loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("correct", (logits.argmax(-1) == batch[1]).sum().double(), reduce="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3)


def images(count: int, seed: int = 1) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64) + 1
    return list(zip(pixels, torch.randint(0, 2, (count,), generator=generator).tolist(), strict=True))


def fit(task: Any, *callbacks: Callback, count: int = 40, val: Any = None, **settings: Any) -> Any:
    """Fits on `count` samples in batches of 4: 10 steps."""
    samples = images(count) if isinstance(task, ConvNet) else classes(count)
    trainer = quiet_trainer(callbacks=callbacks, **{"max_epochs": 1, **settings})
    return trainer.fit(task, loader(samples), val)


WEIGHTS = ["backbone.0.weight", "backbone.0.bias", "backbone.1.weight", "backbone.1.bias", "head.weight", "head.bias"]
STATISTICS = ["backbone.1.running_mean", "backbone.1.running_var"]


# The average itself


@pytest.mark.parametrize("decay", [0.999, 0.5, 0.3, 0.0, 0])
def test_the_average_is_that_of_a_loop_by_hand(decay: float) -> None:
    ema, kept = EMA(decay), Kept()
    fit(ConvNet(), ema, kept)
    assert len(kept.states) == 11 and ema.updates == 10
    assert same(ema.average, by_hand(kept.states, [*WEIGHTS, *STATISTICS], decay))
    assert not same({n: ema.average[n] for n in WEIGHTS}, {n: kept.states[0][n] for n in WEIGHTS})


def test_an_update_every_third_step_uses_the_weights_of_that_step() -> None:
    ema, kept = EMA(0.9, every_n_steps=3), Kept()
    fit(Net(), ema, kept)
    assert ema.updates == 3
    states = [kept.states[0], *kept.states[3::3]]
    assert same(ema.average, by_hand(states, list(states[0]), 0.9))


def test_up_to_start_step_the_average_is_a_copy() -> None:
    for last, updates in [(3, 0), (4, 0), (10, 3)]:
        ema, kept = EMA(0.9, start_step=4, every_n_steps=2), Kept()
        fit(Net(), ema, kept, max_steps=last)
        assert ema.updates == updates
        states = [kept.states[min(last, 4)], *kept.states[6::2]]
        assert same(ema.average, by_hand(states, list(states[0]), 0.9))


def test_warmup_forgets_the_first_weights_soon() -> None:
    ema, kept = EMA(0.5, warmup=True), Kept()
    fit(Net(), ema, kept, max_epochs=2)
    average = {name: tensor.clone() for name, tensor in kept.states[0].items()}
    for n, state in enumerate(kept.states[1:]):
        for name in average:
            average[name].lerp_(state[name], 1 - min(0.5, (1 + n) / (10 + n)))
    assert same(ema.average, average)


def test_only_steps_that_were_made_count() -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx < 4 else super().training_step(batch, batch_idx)

    ema, kept = EMA(0.9), Kept()
    fit(Skips(), ema, kept, gradient_accumulation_steps=2)
    assert ema.updates == len(kept.states) - 1 == 3
    assert same(ema.average, by_hand(kept.states, list(ema.average), 0.9))


def test_the_training_itself_is_as_without_an_average() -> None:
    results = []
    for callbacks in ([], [EMA(0.9)]):
        task = ConvNet()
        fit(task, *callbacks, val=loader(images(6, seed=2)), max_epochs=3, val_check_interval=4)
        results.append(copied(task))
    assert same(*results)


# Batch norm and other buffers


def test_statistics_follow_the_model_and_counters_equal_its_own() -> None:
    task, ema = ConvNet(), EMA(0.5)
    fit(task, ema)
    raw = copied(task)
    with ema.swapped(task):
        averaged = copied(task)
    for name in STATISTICS:
        assert not torch.allclose(averaged[name], torch.zeros(3, dtype=torch.float64))
        assert not torch.allclose(averaged[name], torch.ones(3, dtype=torch.float64))
        assert torch.allclose(averaged[name], raw[name], rtol=0.3)
    assert averaged["backbone.1.num_batches_tracked"].item() == 10
    assert averaged["backbone.1.num_batches_tracked"].dtype == torch.int64
    assert same(raw, copied(task))


class Buffers(Net):
    """With a mask of infinities, a queue that is written in turns, a counter, and a norm that replaces its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("taken", torch.zeros((), dtype=torch.int32))
        self.register_buffer("running_mean", torch.zeros(5, dtype=torch.float64), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.queue[batch_idx % 4] = batch_idx
        self.taken += 1
        self.running_mean = 0.9 * self.running_mean + 0.1 * batch[0].mean(0)
        return super().training_step(batch, batch_idx)


def test_what_is_no_statistic_is_the_tasks_own() -> None:
    task, ema = Buffers(), EMA(0.5)
    means: list[Tensor] = [torch.zeros(5, dtype=torch.float64)]

    class Means(Callback):
        def on_train_step_end(self, run: Any) -> None:
            means.append(run.task.running_mean.clone())

    fit(task, ema, Means())
    assert set(ema.average) == {*dict(task.named_parameters()), "running_mean"}
    expected = by_hand([{"m": mean} for mean in means], ["m"], 0.5)["m"]
    assert torch.equal(ema.average["running_mean"], expected)
    with ema.swapped(task):
        assert task.queue.tolist() == [8, 9, 6, 7] and task.taken == 10
        assert torch.equal(task.mask, torch.full((2, 2), -torch.inf).triu(1))
        assert torch.equal(task.running_mean, expected)
    assert torch.equal(task.running_mean, means[-1])


# Which parameters


def test_a_frozen_backbone_costs_no_copy_and_stays_itself() -> None:
    task = ConvNet()
    task.backbone.requires_grad_(False).eval()
    before, ema = copied(task), EMA(0.5)
    fit(task, ema)
    assert list(ema.average) == ["head.weight", "head.bias", *STATISTICS]
    with ema.swapped(task):
        swapped = copied(task)
    for name, value in before.items():
        assert name.startswith("head") or torch.equal(swapped[name], value)


class Tied(Line):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.decode.weight = self.encode.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.decode(self.encode(batch.expand(1, 3))).sum() * 0.01 + self.w


def test_tied_parameters_are_averaged_once_and_stay_tied() -> None:
    task, ema, kept = Tied(), EMA(0.5), Kept()
    quiet_trainer(max_epochs=1, callbacks=[ema, kept]).fit(task, loader(floats([1, 2, 3]), 1))
    assert [name for name in ema.average if "weight" in name] == ["encode.weight"]
    assert same(ema.average, by_hand(kept.states, list(ema.average), 0.5))
    with ema.swapped(task):
        assert task.decode.weight is task.encode.weight
        assert torch.equal(task.decode.weight, ema.average["encode.weight"])


@pytest.mark.parametrize(
    ("dtype", "kept_as"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_averages_keep_the_precision_that_they_need(dtype: torch.dtype, kept_as: torch.dtype) -> None:
    task, ema, kept = Net().to(dtype), EMA(0.999), Kept()
    samples = [(features.to(dtype), label) for features, label in classes(40)]
    quiet_trainer(max_epochs=5, callbacks=[ema, kept]).fit(task, loader(samples))
    wide = [{name: tensor.to(kept_as) for name, tensor in state.items()} for state in kept.states]
    assert same(ema.average, by_hand(wide, list(wide[0]), 0.999))
    raw = copied(task)
    with ema.swapped(task):
        assert same(copied(task), {name: tensor.to(dtype) for name, tensor in ema.average.items()})
    assert same(copied(task), raw)
    # In bfloat16 steps of a thousandth would be lost, and the average would still be the first weights.
    assert not any(torch.equal(ema.average[name], wide[0][name]) for name in wide[0])


def test_parameters_of_two_dtypes_stand_side_by_side() -> None:
    task, ema, kept = Line(), EMA(0.5), Kept()
    task.register_parameter("narrow", nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))
    task.register_parameter("single", nn.Parameter(torch.ones(2)))
    task.training_step = lambda batch, batch_idx: batch.mean() * (task.w + task.narrow.sum() + task.single.sum())
    quiet_trainer(max_epochs=1, callbacks=[ema, kept]).fit(task, loader(floats([0.1, 0.2, 0.3]), 1))
    wide = [{**state, "narrow": state["narrow"].float()} for state in kept.states]
    assert same(ema.average, by_hand(wide, ["w", "narrow", "single"], 0.5))


class Changes(Callback):
    """Changes the task when an epoch begins."""

    def __init__(self, change: Any, epoch: int = 1) -> None:
        self.change, self.epoch = change, epoch

    def on_train_epoch_start(self, run: Any) -> None:
        if run.state.epoch == self.epoch:
            self.change(run)


def thaw(run: Any) -> None:
    run.task.backbone.requires_grad_(True)
    run.optimizers[0].add_param_group({"params": list(run.task.backbone.parameters())})


def add(run: Any) -> None:
    run.task.scale = nn.Parameter(torch.ones((), dtype=torch.float64))


def exchange(run: Any) -> None:
    run.task.head = nn.Linear(12, 2).double()
    run.optimizers[0].param_groups[0]["params"] = list(run.task.head.parameters())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (thaw, "backbone.0.weight, backbone.0.bias, backbone.1.weight and 1 more came later"),
        (add, "scale came later"),
        (exchange, "head.weight, head.bias went or was exchanged since"),
    ],
)
def test_parameters_that_came_later_are_an_error(change: Any, told: str) -> None:
    task, kept = ConvNet(), Kept()
    task.backbone.requires_grad_(False)
    with pytest.raises(TaskError) as caught:
        fit(task, EMA(), kept, Changes(change), max_epochs=5)
    assert told in str(caught.value) and "before the fit" in str(caught.value)
    assert len(kept.states) == 1 + 10  # with the first step of the epoch that begins with it


def test_parameters_that_came_within_an_epoch_are_an_error_with_its_validation() -> None:
    class ThawsLater(Callback):
        def on_train_step_end(self, run: Any) -> None:
            if run.state.global_step == 3:
                thaw(run)

    task, kept = ConvNet(), Kept()
    task.backbone.requires_grad_(False)
    with pytest.raises(TaskError, match=r"backbone.* came later"):
        fit(task, EMA(), ThawsLater(), kept, val=loader(images(4)), val_check_interval=5)
    assert len(kept.states) == 1 + 5


def test_layers_that_are_frozen_later_stay_averaged() -> None:
    task, ema, kept = ConvNet(), EMA(0.5), Kept()
    fit(task, ema, kept, Changes(lambda run: run.task.backbone.requires_grad_(False)), max_epochs=2)
    assert same(ema.average, by_hand(kept.states, [*WEIGHTS, *STATISTICS], 0.5))


# Validation


class Heard(Callback):
    """Keeps what an evaluation told, and how often its batches did."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, dict[str, float]]] = []
        self.logged: list[dict[str, float]] = []
        self.batches = 0

    def on_evaluation_batch_end(self, run: Any, stage: str, batch: Any, outputs: Any, sample_indices: Any) -> None:
        self.batches += 1

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        self.ended.append((stage, dict(metrics)))

    def on_log(self, run: Any, values: dict[str, float], step: int) -> None:
        if run.stage == "val":
            self.logged.append(dict(values))


def test_every_value_of_a_validation_has_its_second() -> None:
    task, ema, heard = ConvNet(), EMA(0.9), Heard()
    val = loader(images(10, seed=2))
    result = fit(task, ema, heard, val=val)
    raw = quiet_trainer().validate(task, val)
    with ema.swapped(task):
        averaged = quiet_trainer().validate(task, val)
    expected = {**raw, **{f"{name}_ema": value for name, value in averaged.items()}}
    assert heard.ended == [("val", expected)] and heard.logged == [expected]
    assert set(expected) == {"val/loss", "val/loss_ema", "val/correct", "val/correct_ema"}
    assert expected["val/loss"] != expected["val/loss_ema"]
    assert {name: result.metrics[name] for name in expected} == expected
    assert heard.batches == 3


def test_sanity_validation_has_no_second_pass() -> None:
    ema, heard = EMA(0.9), Heard()
    fit(ConvNet(), ema, heard, val=loader(images(10)), num_sanity_val_steps=2)
    assert [(stage, len(metrics)) for stage, metrics in heard.ended] == [("sanity", 2), ("val", 4)]
    assert heard.batches == 2 + 3 and ema.updates == 10


def test_each_of_several_loaders_has_its_own() -> None:
    result = fit(ConvNet(), EMA(), val={"day": loader(images(4)), "night": loader(images(4, seed=5))})
    assert {name for name in result.metrics if name.startswith("val/")} == {
        f"val/{when}/{what}" for when in ("day", "night") for what in ("loss", "loss_ema", "correct", "correct_ema")
    }


def test_a_scheduler_and_early_stopping_can_watch_the_average() -> None:
    class Plateau(ConvNet):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss_ema"}}

    class Rates(Callback):
        def on_fit_end(self, run: Any) -> None:
            assert run.schedulers[0].num_bad_epochs == 0 and run.schedulers[0].last_epoch == 3

    task = Plateau()
    task.backbone.eval().requires_grad_(False)
    early = EarlyStopping("val/loss_ema", "min", patience=2)
    result = fit(task, EMA(), early, Rates(), val=loader(images(4)), max_epochs=9)
    assert result.global_step == 3 * 10 and "val/loss_ema" in result.stop_reason


class Fails(ConvNet):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.run.variant == "ema":
            raise ValueError("only the average cannot do this")


def test_raw_weights_come_back_when_the_second_pass_raises() -> None:
    task, kept, ema = Fails(), Kept(), EMA(0.5)
    task.head.eval()
    with pytest.raises(ValueError, match="only the average"):
        fit(task, ema, kept, val=loader(images(4)))
    assert same(copied(task), kept.states[-1])
    assert all(module.training for module in task.modules())
    assert same(ema.average, by_hand(kept.states, [*WEIGHTS, *STATISTICS], 0.5))


def test_raw_weights_come_back_when_the_user_interrupts() -> None:
    class Interrupts(ConvNet):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            if self.run.variant:
                raise KeyboardInterrupt

    task, kept = Interrupts(), Kept()
    with pytest.raises(KeyboardInterrupt):
        fit(task, EMA(0.5), kept, val=loader(images(4)))
    assert same(copied(task), kept.states[-1])


class Measures(ConvNet):
    """Metric objects in every manner: logged in the steps, logged at the end, and the task's own."""

    def __init__(self) -> None:
        import torchmetrics

        super().__init__()
        self.steps, self.late, self.own = (torchmetrics.MeanMetric() for _ in range(3))
        self.found: list[float] = []
        self.counted: list[tuple[int, int]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        losses = nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")
        for metric in (self.steps, self.late, self.own):
            metric.update(losses)
        self.log("steps", self.steps)
        self.log("loss", losses.mean())

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        self.log("late", self.late)
        self.found.append(self.own.compute().item())
        self.own.reset()


def test_metric_objects_begin_the_second_pass_empty_and_keep_what_the_first_left_in_them() -> None:
    task, seen = Measures(), []

    class Seen(Callback):
        def on_log(self, run: Any, values: dict[str, float], step: int) -> None:
            if run.stage == "val":
                seen.append(dict(values))

    fit(task, EMA(0.5), Seen(), val=loader(images(10, seed=3)), max_epochs=3)
    first, late = seen[::2], seen[1::2]
    assert len(first) == len(late) == 3
    for values, at_end, own in zip(first, late, task.found, strict=True):
        assert values["val/steps"] == pytest.approx(values["val/loss"], rel=1e-6)
        assert values["val/steps_ema"] == pytest.approx(values["val/loss_ema"], rel=1e-6)
        assert abs(values["val/loss"] - values["val/loss_ema"]) > 1e-4
        assert at_end == {"val/late": pytest.approx(values["val/loss"], rel=1e-6)}
        assert own == pytest.approx(values["val/loss"], rel=1e-6)
    assert task.late.update_count == task.own.update_count == task.steps.update_count == 0


def test_what_a_step_draws_is_the_same_in_both_passes() -> None:
    class Draws(ConvNet):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("noise", torch.rand(()))
            super().validation_step(batch, batch_idx)

    result = fit(Draws(), EMA(start_step=1000), val=loader(images(10)))
    for name in ("val/noise", "val/loss", "val/correct"):
        assert result.metrics[name] == result.metrics[f"{name}_ema"]


def test_images_of_the_second_pass_have_their_own_name() -> None:
    class Shows(ConvNet):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            super().validation_step(batch, batch_idx)
            self.log_image("sample", batch[0].clamp(0, 1))

    result = fit(Shows(), EMA(), val=loader(images(4)), log_with="tensorboard", project_dir=Path.cwd())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(result.run_dir))
    events.Reload()
    assert sorted(events.Tags()["images"]) == ["val/sample", "val/sample_ema"]
    assert {"val/loss", "val/loss_ema"} <= set(events.Tags()["scalars"])


def test_a_value_that_the_task_logs_under_that_name_is_an_error() -> None:
    class Own(ConvNet):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({"loss": 1.0, "loss_ema": 2.0})

    with pytest.raises(TaskError, match="'val/loss_ema' is logged by the task and is a value of 'ema'"):
        fit(Own(), EMA(), val=loader(images(4)))


def test_an_average_is_validated_without_a_length_too() -> None:
    task, heard = ConvNet(), Heard()
    val = DataLoader(NumberStream(images(10)), batch_size=4)
    fit(task, EMA(), heard, val=val, limit_val_batches=2)
    assert heard.batches == 2 and len(heard.ended[0][1]) == 4


def test_two_averages_have_two_names() -> None:
    task, kept, heard = ConvNet(), Kept(), Heard()
    fast, slow = EMA(0.5, name="fast"), EMA(0.99, name="slow")
    fit(task, fast, slow, kept, heard, val=loader(images(4)))
    assert [len(metrics) for _, metrics in heard.ended] == [6]
    for ema in (fast, slow):
        assert same(ema.average, by_hand(kept.states, [*WEIGHTS, *STATISTICS], ema.decay))
        with ema.swapped(task):
            alone = quiet_trainer().validate(task, loader(images(4)))
        assert heard.ended[0][1][f"val/loss_{ema.name}"] == alone["val/loss"]
    with pytest.raises(CallbackError, match="Two callbacks are EMA"):
        quiet_trainer(callbacks=[EMA(), EMA(0.5)])


def test_a_name_that_another_callback_has_taken_is_refused() -> None:
    class Other(Callback):
        def on_fit_start(self, run: Any) -> None:
            run.variants["ema"] = contextmanager(lambda: iter([None]))

    with pytest.raises(SettingsError, match="Another callback validates with 'ema' already"):
        fit(ConvNet(), Other(), EMA())


def test_any_callback_can_validate_with_other_weights() -> None:
    class Zeroed(Callback):
        def on_fit_start(self, run: Any) -> None:
            @contextmanager
            def zeroed() -> Iterator[None]:
                head = run.task.head.weight.detach().clone()
                with torch.no_grad():
                    run.task.head.weight.zero_()
                try:
                    yield
                finally:
                    with torch.no_grad():
                        run.task.head.weight.copy_(head)

            run.variants["zeroed"] = zeroed

    task, kept = ConvNet(), Kept()
    result = fit(task, Zeroed(), kept, val=loader(images(8)))
    bias = task.head.bias.detach().expand(8, 2)
    labels = torch.tensor([label for _, label in images(8)])
    expected = nn.functional.cross_entropy(bias, labels).item()
    assert result.metrics["val/loss_zeroed"] == pytest.approx(expected, abs=1e-12)
    assert same(copied(task), kept.states[-1])


# State, and after the fit


def stored(callback: Callback) -> dict[str, Any]:
    """The callback's state as it comes back from a file, whose keys may be in any order."""
    tensors: dict[str, Any] = {}
    skeleton = json.loads(json.dumps(encode(callback.state_dict(), tensors), sort_keys=True))
    state: dict[str, Any] = decode(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})
    return state


class Continued(EMA):
    """Is given this state where a continued run gives it: after setup, before on_fit_start."""

    def __init__(self, state: dict[str, Any], *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.state = state

    def setup(self, run: Any) -> None:
        super().setup(run)
        self.load_state_dict(self.state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_continued_average_is_that_of_the_uninterrupted_run(dtype: torch.dtype) -> None:
    def train(task: Any, ema: EMA, epochs: int) -> None:
        samples = [(pixels.to(dtype), label) for pixels, label in images(40)]
        quiet_trainer(max_epochs=epochs, callbacks=[ema]).fit(task, loader(samples))

    straight, task = EMA(0.9, warmup=True), ConvNet().to(dtype)
    train(task, straight, 2)
    first, other = EMA(0.9, warmup=True), ConvNet().to(dtype)
    train(other, first, 1)
    second = Continued(stored(first), 0.9, warmup=True)
    train(other, second, 1)
    assert same(copied(task), copied(other))
    assert second.updates == straight.updates == 20
    assert same(second.average, straight.average)
    assert list(second.average) == list(straight.average)


@pytest.mark.parametrize("stops_after", [7, 10, 13])
def test_a_resumed_run_has_the_average_and_the_values_of_the_uninterrupted_one(stops_after: int) -> None:
    def train(name: str, **settings: Any) -> Any:
        resume = settings.pop("resume", None)
        task, ema = ConvNet(), EMA(0.9, every_n_steps=2, start_step=3, warmup=True)
        trainer = quiet_trainer(callbacks=[ema, Checkpoint()], run_name=name, val_check_interval=4, **settings)
        result = trainer.fit(task, loader(images(40)), loader(images(6, seed=2)), resume=resume)
        values = {name: value for name, value in result.metrics.items() if name.startswith("val/")}
        return ema, values, copied(task)

    straight, values, weights = train("straight", max_steps=20)
    train("parts", max_steps=stops_after)
    resumed, values_too, weights_too = train("parts", max_steps=20, resume="last")
    assert same(weights, weights_too)
    assert straight.updates == resumed.updates == 8
    assert same(straight.average, resumed.average)
    assert list(straight.average) == list(resumed.average)
    assert values == values_too and len(values) == 4


class Interrupted(ConvNet):
    """Gets a SIGTERM in the second pass of the validation after this step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.run.variant and self.run.state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(("step", "settings"), [(4, {"val_check_interval": 4}), (10, {})], ids=["within", "at the end"])
def test_a_signal_in_the_second_pass_costs_nothing(step: int, settings: dict[str, Any]) -> None:
    def train(name: str, step: int = -1, resume: str | None = None) -> Any:
        task, ema, early = Interrupted(step), EMA(0.9), EarlyStopping("val/loss_ema", "min", patience=50)
        trainer = quiet_trainer(callbacks=[ema, early, Checkpoint()], run_name=name, max_epochs=2, **settings)
        result = trainer.fit(task, loader(images(40)), loader(images(6, seed=2)), resume=resume)
        values = {name: value for name, value in result.metrics.items() if "per_second" not in name}
        return copied(task), ema.average, values, early.state_dict()

    weights, average, values, early = train("straight")
    with pytest.raises(SystemExit):
        train("parts", step)
    weights_too, average_too, values_too, early_too = train("parts", resume="last")
    assert same(weights, weights_too) and same(average, average_too)
    assert values == values_too and early == early_too


def test_a_loaded_state_is_a_copy() -> None:
    ema, other = EMA(0.5), EMA(0.5)
    fit(Net(), ema)
    state = ema.state_dict()
    other.load_state_dict(state)
    before = {name: tensor.clone() for name, tensor in state["average"].items()}
    other.average["net.0.weight"].zero_()
    assert same(state["average"], before) and state["updates"] == 10


def test_a_state_of_other_parameters_is_refused() -> None:
    ema = EMA(0.5)
    fit(Net(), ema)
    state = stored(ema)
    with pytest.raises(TaskError, match=r"an average of net\.0\..* and 1 more, which ConvNet does not have"):
        fit(ConvNet(), Continued(state))
    wider = Net()
    wider.net[2] = nn.Linear(7, 4).double()
    with pytest.raises(TaskError, match=r"average of net\.2\.bias has shape \(3,\), and in Net it has \(4,\)"):
        fit(wider, Continued(state))
    del state["average"]["net.2.bias"]
    with pytest.raises(TaskError, match=r"net\.2\.bias came later"):
        fit(Net(), Continued(state))


def test_a_second_fit_begins_anew() -> None:
    ema, kept = EMA(0.5), Kept()
    trainer = quiet_trainer(max_epochs=1, callbacks=[ema, kept])
    for seed in (0, 1):
        task = ConvNet(seed)
        trainer.fit(task, loader(images(40)))
        assert ema.updates == 10
        assert same(ema.average, by_hand(kept.states, [*WEIGHTS, *STATISTICS], 0.5))
    before = {name: tensor.clone() for name, tensor in ema.average.items()}
    assert set(trainer.validate(task, loader(images(4)))) == {"val/loss", "val/correct"}
    assert len(trainer.predict(task, loader(images(4)))) == 4
    assert same(ema.average, before)


def test_the_average_can_be_put_into_a_task_for_good() -> None:
    task, ema = ConvNet(), EMA(0.5)
    fit(task, ema)
    with ema.swapped(task):
        expected = copied(task)
    ema.apply(task)
    assert same(copied(task), expected)
    assert all(parameter.requires_grad for parameter in task.parameters())
    other = ConvNet(seed=3)
    ema.apply(other)
    assert same({n: copied(other)[n] for n in ema.average}, {n: expected[n] for n in ema.average})
    fit(other, ema)  # the average is not the task's own tensors
    assert same(copied(task), expected)


def test_without_a_fit_there_is_no_average() -> None:
    for use in (lambda: EMA().apply(Net()), lambda: EMA().swapped(Net()).__enter__()):
        with pytest.raises(TaskError, match="EMA has no average yet"):
            use()


def test_the_task_is_let_go_after_the_fit() -> None:
    import gc
    import weakref

    ema, task = EMA(0.5), ConvNet()
    fit(task, ema)
    alive = weakref.ref(task)
    del task
    gc.collect()
    assert alive() is None


def test_parameters_without_a_shape_are_refused() -> None:
    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.LazyLinear(2)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    with pytest.raises(TaskError, match=r"lazy\.weight has no shape before a batch was seen"):
        fit(Lazy(), EMA())


def test_it_can_be_asked_for_by_name() -> None:
    heard = Heard()
    fit(ConvNet(), "ema", heard, val=loader(images(4)))
    assert "val/loss_ema" in heard.ended[0][1]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"decay": 1.0}, "decay=1.0; a number in [0, 1) was expected"),
        ({"decay": -0.1}, "decay=-0.1"),
        ({"decay": float("nan")}, "decay=nan"),
        ({"decay": "0.9"}, "decay='0.9'"),
        ({"every_n_steps": 0}, "every_n_steps=0; a whole number of at least 1"),
        ({"every_n_steps": 2.0}, "every_n_steps=2.0"),
        ({"start_step": -1}, "start_step=-1; a whole number of at least 0"),
        ({"warmup": 100}, "warmup=100; True or False"),
        ({"name": ""}, "name=''"),
        ({"name": "val/ema"}, "name='val/ema'; a name without '/'"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_when_it_is_made(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        EMA(**wrong)
    assert told in str(caught.value) and str(caught.value).startswith("EMA got ")
