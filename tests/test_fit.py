"""The loop on one process: windows, steps, counts, schedulers, modes, stops."""

from __future__ import annotations

import copy
import itertools
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sanctuary_trainer import (
    Callback,
    CallbackError,
    DataError,
    NotSupportedError,
    SettingsError,
    TaskError,
    Trainer,
    VisionTask,
)
from tests.small_tasks import Line, Net, Numbers, NumberStream, classes, floats, loader, quiet_trainer, weights


class Recorder(Callback):
    """Keeps where the run stands at several hooks."""

    def __init__(self) -> None:
        self.epoch_steps: list[int] = []
        self.batch_steps: list[int] = []
        self.validated_at: list[int] = []
        self.saved_at: list[tuple[int, int, int]] = []

    def on_train_batch_end(self, run: Any, batch: Any, batch_idx: int, loss: Any) -> None:
        self.batch_steps.append(run.state.global_step)

    def on_train_epoch_end(self, run: Any) -> None:
        self.epoch_steps.append(run.state.global_step)

    def on_evaluation_end(self, run: Any, stage: str, metrics: Any) -> None:
        self.validated_at.append(run.state.global_step)

    def on_save_point(self, run: Any) -> None:
        self.saved_at.append((run.state.epoch, run.state.batch, run.state.global_step))


def deltas(task: Line) -> list[float]:
    return [b - a for a, b in itertools.pairwise([0.0, *task.steps])]


def test_short_last_window_gives_the_mean_gradient() -> None:
    task = Line()
    result = quiet_trainer(max_epochs=1, gradient_accumulation_steps=4).fit(task, loader(floats(range(1, 11)), 1))
    assert deltas(task) == [-2.5, -6.5, -9.5]
    assert task.w.item() == -18.5
    assert result.global_step == 3


def test_a_window_equals_the_big_batch_with_unequal_batches() -> None:
    task, whole = Net(), Net()
    quiet_trainer(max_epochs=2, gradient_accumulation_steps=2).fit(task, loader(classes(6), 4))
    quiet_trainer(max_epochs=2).fit(whole, loader(classes(6), 6))
    assert torch.allclose(weights(task), weights(whole), rtol=0, atol=1e-12)


class Pixels(Net):
    """Labels of -100 are ignored; the weight is the number of those that are not."""

    as_tensor = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        counted = (labels != -100).sum()
        loss = nn.functional.cross_entropy(self.net(features), labels, ignore_index=-100)
        return {"loss": loss, "weight": counted if self.as_tensor else int(counted)}


def ignoring(count: int, kept: set[int]) -> list[tuple[torch.Tensor, int]]:
    return [(x, y if i in kept else -100) for i, (x, y) in enumerate(classes(count))]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_window_weighs_by_what_the_step_counted(as_tensor: bool) -> None:
    samples = ignoring(12, {0, 4, 5, 6, 7, 8, 9})
    task, whole = Pixels(), Pixels()
    task.as_tensor = as_tensor
    quiet_trainer(max_epochs=1, gradient_accumulation_steps=3).fit(task, loader(samples, 4))
    quiet_trainer(max_epochs=1).fit(whole, loader(samples, 12))
    assert torch.allclose(weights(task), weights(whole), rtol=0, atol=1e-12)


def test_a_batch_of_weight_0_is_not_looked_at() -> None:
    samples = ignoring(8, {4, 5, 6, 7})  # the first batch's loss is a mean over nothing: NaN
    task, whole = Pixels(), Pixels()
    quiet_trainer(max_epochs=1, gradient_accumulation_steps=2).fit(task, loader(samples, 4))
    quiet_trainer(max_epochs=1).fit(whole, loader(samples[4:], 4))
    assert torch.equal(weights(task), weights(whole))


class Skips(Net):
    """Leaves out the batches with these numbers."""

    skipped: tuple[int, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.skipped else super().training_step(batch, batch_idx)


def test_none_leaves_a_batch_out_and_a_window_of_none_makes_no_step() -> None:
    task, whole = Skips(), Net()
    task.skipped = (1, 2, 3)
    result = quiet_trainer(max_epochs=1, gradient_accumulation_steps=2).fit(task, loader(classes(24), 4))
    seen = [sample for i, sample in enumerate(classes(24)) if i // 4 not in task.skipped]
    quiet_trainer(max_epochs=1).fit(whole, DataLoader(seen, batch_sampler=[[0, 1, 2, 3], list(range(4, 12))]))
    assert result.global_step == 2
    assert torch.allclose(weights(task), weights(whole), rtol=0, atol=1e-12)


def test_max_steps_is_reached_also_when_windows_make_no_step() -> None:
    task = Skips()
    task.skipped = (0, 1)
    result = quiet_trainer(max_steps=3).fit(task, loader(classes(20), 4))
    assert result.global_step == 3 and result.stop_reason == "max_steps"


def test_one_process_computes_bit_for_bit_what_a_plain_loop_would() -> None:
    samples = classes(32)
    for accumulation in (1, 3, 4):
        task, plain = Net().float(), Net().float()
        x = torch.stack([s[0] for s in samples]).float()
        y = torch.tensor([s[1] for s in samples])
        data = DataLoader(TensorDataset(x, y), batch_size=4)
        quiet_trainer(max_epochs=3, gradient_accumulation_steps=accumulation, gradient_clip_val=0.5).fit(task, data)
        optimizer = plain.configure_optimizers()
        for _ in range(3):
            batches = list(data)
            for start in range(0, len(batches), accumulation):
                window = batches[start : start + accumulation]
                for number, batch in enumerate(window):
                    loss = plain.training_step(batch, number)
                    (loss / len(window)).backward()
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(weights(task), weights(plain))


def test_an_epoch_shorter_than_the_window_is_one_step_everywhere() -> None:
    class Scheduled(Line):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0)
            self.estimate = self.run.estimated_stepping_batches
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"}}

    task = Scheduled()
    with pytest.warns(UserWarning, match="An epoch has 2 batches") as caught:
        result = quiet_trainer(max_epochs=4, gradient_accumulation_steps=4).fit(task, loader(floats([1, 3]), 1))
    assert len([w for w in caught if "An epoch has" in str(w.message)]) == 1
    assert result.global_step == task.estimate == task.scheduler.last_epoch == 4
    assert deltas(task) == [-2.0] * 4


def test_global_step_counts_updates_in_every_epoch() -> None:
    recorder = Recorder()
    quiet_trainer(max_epochs=3, gradient_accumulation_steps=2, callbacks=[recorder]).fit(
        Line(), loader(floats(range(8)), 1)
    )
    assert recorder.epoch_steps == [4, 8, 12]
    assert recorder.batch_steps == [step for step in range(12) for _ in range(2)]


def test_max_steps_draws_not_one_batch_more() -> None:
    task, data = Line(), loader(floats(range(10)), 1)
    result = quiet_trainer(max_steps=5, gradient_accumulation_steps=4).fit(task, data)
    assert result.global_step == 5 and result.stop_reason == "max_steps"
    assert len(task.batches) == 18
    assert len(data.dataset.read) == 18  # type: ignore[attr-defined]


class Plane(Line):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.w * batch).sum(-1).mean()

    def on_train_step_end(self, run: Any) -> None:
        pass


def test_clipping_is_done_once_on_the_finished_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a, **k: calls.append(a) or clip(*a, **k))
    task = Plane()
    data = loader([torch.tensor([10.0, 0.0]).double(), torch.tensor([0.0, 1.0]).double()], 1)
    quiet_trainer(max_epochs=1, gradient_accumulation_steps=2, gradient_clip_val=1.0).fit(task, data)
    assert torch.allclose(task.w, torch.tensor([-0.99504, -0.09950]).double(), atol=1e-5)
    assert len(calls) == 1
    task = Plane()
    settings: Any = {"gradient_clip_val": 0.4, "gradient_clip_algorithm": "value"}
    quiet_trainer(max_epochs=1, gradient_accumulation_steps=2, **settings).fit(task, data)
    assert task.w.tolist() == [-0.4, -0.4]


def test_validation_goes_by_steps_across_epochs() -> None:
    recorder = Recorder()
    quiet_trainer(max_epochs=2, gradient_accumulation_steps=4, val_check_interval=2, callbacks=[recorder]).fit(
        Line(), loader(floats(range(10)), 1), loader(floats(range(2)), 1)
    )
    assert recorder.validated_at == [2, 4, 6]


@pytest.mark.parametrize(
    ("fraction", "steps", "expected"),
    [(0.25, 10, [3, 5, 8, 10]), (0.5, 3, [2, 3]), (1.0, 4, [4]), (0.1, 30, list(range(3, 31, 3))), (0.25, 2, [1, 2])],
)
def test_a_fraction_validates_so_often_in_an_epoch(fraction: float, steps: int, expected: list[int]) -> None:
    recorder = Recorder()
    quiet_trainer(max_epochs=1, val_check_interval=fraction, callbacks=[recorder]).fit(
        Line(), loader(floats(range(steps)), 1), loader(floats([1.0]), 1)
    )
    assert recorder.validated_at == expected


def test_validation_in_every_second_epoch() -> None:
    recorder = Recorder()
    quiet_trainer(max_epochs=5, check_val_every_n_epoch=2, callbacks=[recorder]).fit(
        Line(), loader(floats(range(3)), 1), loader(floats([1.0]), 1)
    )
    assert recorder.validated_at == [6, 12]


def test_save_points_are_boundaries_and_come_once() -> None:
    recorder = Recorder()
    quiet_trainer(max_epochs=2, gradient_accumulation_steps=2, callbacks=[recorder]).fit(
        Line(), loader(floats(range(5)), 1)
    )
    assert recorder.saved_at == [(0, 2, 1), (0, 4, 2), (1, 0, 3), (1, 2, 4), (1, 4, 5), (2, 0, 6)]
    recorder = Recorder()
    quiet_trainer(max_steps=3, callbacks=[recorder]).fit(Line(), loader(floats(range(5)), 1))
    assert recorder.saved_at == [(0, 1, 1), (0, 2, 2), (0, 3, 3)] and recorder.epoch_steps == []


class Plateau(Line):
    monitor = "val/loss"

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor}}


def test_a_plateau_scheduler_steps_once_per_new_value() -> None:
    class Rates(Callback):
        def on_fit_end(self, run: Any) -> None:
            self.rate = run.optimizers[0].param_groups[0]["lr"]

    rates = Rates()
    quiet_trainer(max_epochs=6, check_val_every_n_epoch=2, callbacks=[rates]).fit(
        Plateau(), loader(floats(range(3)), 1), loader(floats([1.0]), 1)
    )
    assert rates.rate == pytest.approx(0.01)


def test_a_monitor_that_nothing_logs_is_an_error_with_the_nearest_name() -> None:
    task = Plateau()
    task.monitor = "val/los"
    with pytest.raises(SettingsError, match="Did you mean 'val/loss'"):
        quiet_trainer(max_epochs=2).fit(task, loader(floats([1.0]), 1), loader(floats([1.0]), 1))


GRID = list(itertools.product([None, 3, 0.5], [1, 2, 4], [False, True], [None, 5]))


@pytest.mark.parametrize(("limit", "accumulation", "drop_last", "max_steps"), GRID)
def test_the_estimate_of_steps_is_the_number_of_steps(
    limit: Any, accumulation: int, drop_last: bool, max_steps: int | None
) -> None:
    class Estimates(Line):
        def configure_optimizers(self) -> Any:
            self.estimate = self.run.estimated_stepping_batches
            return super().configure_optimizers()

    task = Estimates()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = quiet_trainer(
            max_epochs=2, max_steps=max_steps, limit_train_batches=limit, gradient_accumulation_steps=accumulation
        ).fit(task, loader(floats(range(13)), 2, drop_last=drop_last))
    assert task.estimate == result.global_step


def test_the_estimate_of_a_stream_is_unknown_or_the_limit() -> None:
    estimates: list[int | None] = []

    class Estimates(Line):
        def configure_optimizers(self) -> Any:
            estimates.append(self.run.estimated_stepping_batches)
            return super().configure_optimizers()

    data = DataLoader(NumberStream(floats(range(10))), batch_size=1)
    quiet_trainer(max_epochs=1).fit(Estimates(), data)
    quiet_trainer(max_steps=5).fit(Estimates(), data)
    assert estimates == [None, 5]


def test_a_stream_trains_like_a_data_set() -> None:
    task = Line()
    data = DataLoader(NumberStream(floats(range(1, 11))), batch_size=1)
    result = quiet_trainer(max_epochs=1, gradient_accumulation_steps=4).fit(task, data)
    assert result.global_step == 3
    assert deltas(task) == pytest.approx([-2.5, -6.5, -9.5], abs=1e-12)
    task = Line()
    quiet_trainer(max_epochs=2, limit_train_batches=3).fit(task, data)
    assert task.batches == [[1.0], [2.0], [3.0]] * 2


def test_an_empty_training_loader_is_an_error_and_an_empty_validation_is_not() -> None:
    with pytest.raises(DataError, match="gives no batch: 3 samples"):
        quiet_trainer(max_epochs=1).fit(Line(), loader(floats(range(3)), 4, drop_last=True))
    with pytest.raises(DataError, match="no batch"):
        quiet_trainer(max_epochs=1).fit(Line(), DataLoader(NumberStream([]), batch_size=4))
    trainer = quiet_trainer(max_epochs=1)
    assert trainer.validate(Line(), loader(floats(range(3)), 4, drop_last=True)) == {}
    assert trainer.predict(Line(), loader(floats(range(3)), 4, drop_last=True)) == []
    trainer.fit(Line(), loader(floats(range(3)), 1), loader(floats(range(3)), 4, drop_last=True))


class Stops(Callback):
    def __init__(self, hook_batch: int) -> None:
        self.hook_batch = hook_batch

    def on_train_batch_end(self, run: Any, batch: Any, batch_idx: int, loss: Any) -> None:
        if batch_idx == self.hook_batch:
            run.stop("enough")


def test_a_stop_ends_the_run_at_the_step_and_waits_for_min_steps() -> None:
    result = quiet_trainer(max_epochs=5, callbacks=[Stops(3)]).fit(Line(), loader(floats(range(10)), 1))
    assert (result.global_step, result.stop_reason) == (4, "enough")
    result = quiet_trainer(max_epochs=5, min_steps=7, callbacks=[Stops(3)]).fit(Line(), loader(floats(range(10)), 1))
    assert (result.global_step, result.stop_reason) == (7, "enough")
    result = quiet_trainer(max_epochs=5, min_epochs=2, callbacks=[Stops(3)]).fit(Line(), loader(floats(range(10)), 1))
    assert (result.global_step, result.stop_reason) == (20, "enough")


def test_max_time_stops() -> None:
    class Slow(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

    result = quiet_trainer(max_time=0.1).fit(Slow(), loader(floats(range(10)), 1))
    assert result.stop_reason == "max_time" and 1 <= result.global_step <= 6


def test_a_second_fit_starts_a_new_run_from_the_present_weights() -> None:
    task, trainer = Net(), quiet_trainer(max_epochs=2)
    first = trainer.fit(task, loader(classes(8), 4))
    between = copy.deepcopy(task)
    second = trainer.fit(task, loader(classes(8), 4))
    quiet_trainer(max_epochs=2).fit(between, loader(classes(8), 4))
    assert (first.global_step, second.global_step) == (4, 4)
    assert first.run_dir != second.run_dir
    assert torch.equal(weights(task), weights(between))


def test_trainers_of_different_settings_work_one_after_another() -> None:
    for precision, accumulation in (("bf16", 2), ("no", 1), ("bf16", 1)):
        task = Net().float()
        data = [(x.float(), y) for x, y in classes(8)]
        result = quiet_trainer(max_epochs=1, mixed_precision=precision, gradient_accumulation_steps=accumulation).fit(
            task, loader(data, 4)
        )
        assert result.global_step == 2 // accumulation


def test_the_dtype_in_a_step_is_the_same_in_all_stages_and_predictions_are_float32() -> None:
    seen: dict[str, torch.dtype] = {}

    class Dtypes(Net):
        def note(self, batch: Any) -> torch.Tensor:
            logits = self.net(batch[0])
            seen[self.run.stage] = logits.dtype
            seen[f"{self.run.stage} part"] = self.net[0](batch[0]).dtype
            return logits

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.note(batch), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.note(batch)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.note(batch)

    task = Dtypes().float()
    data = loader([(x.float(), y) for x, y in classes(8)], 4)
    trainer = quiet_trainer(max_epochs=1, mixed_precision="bf16")
    trainer.fit(task, data, data)
    trainer.test(task, data)
    predictions = trainer.predict(task, data)
    assert set(seen.values()) == {torch.bfloat16} and len(seen) == 8
    assert {p.dtype for p in task.parameters()} == {torch.float32}
    assert predictions is not None and {p.dtype for p in predictions} == {torch.float32}


def test_fp16_on_a_cpu_is_refused() -> None:
    with pytest.raises(SettingsError, match="fp16"):
        quiet_trainer(max_epochs=1, mixed_precision="fp16").fit(Net(), loader(classes(4)))


class Backbone(VisionTask):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)).double()
        self.head = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)).double()
        self.modes: list[tuple[bool, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.modes.append(
            (self.backbone.training, self.backbone[2].training, self.head.training, self.head[1].training)
        )
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        assert not any(module.training for module in self.modules())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        assert not any(module.training for module in self.modules())
        return self.head(self.backbone(batch[0]))


def test_a_frozen_backbone_in_eval_mode_stays_asleep() -> None:
    task = Backbone()
    task.backbone.requires_grad_(False).eval()
    mean = task.backbone[1].running_mean.clone()
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(task, loader(classes(8)), loader(classes(8)))
    trainer.predict(task, loader(classes(8)))
    trainer.fit(task, loader(classes(8)), loader(classes(8)))
    assert set(task.modes) == {(False, False, True, True)}
    assert torch.equal(mean, task.backbone[1].running_mean)


def test_a_model_that_comes_in_eval_mode_wakes_up_with_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    task = Backbone()
    task.eval()
    quiet_trainer(max_epochs=1).fit(task, loader(classes(8)))
    assert set(task.modes) == {(True, True, True, True)}
    assert capsys.readouterr().out.count("Switched to train mode") == 1


def test_modes_are_put_back_after_an_exception_in_evaluation() -> None:
    class Breaks(Backbone):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("broken")

    task = Breaks()
    task.head[1].eval()
    before = [module.training for module in task.modules()]
    with pytest.raises(ValueError, match="broken"):
        quiet_trainer().validate(task, loader(classes(8)))
    assert [module.training for module in task.modules()] == before


def test_validation_leaves_training_as_it_would_be_without() -> None:
    class Random(Backbone):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            torch.rand(3)

    runs = []
    for val, sanity in ((None, 0), (loader(classes(8)), 0), (loader(classes(8)), 2)):
        torch.manual_seed(3)
        task = Random()
        quiet_trainer(max_epochs=2, num_sanity_val_steps=sanity).fit(task, loader(classes(8)), val)
        runs.append(weights(task))
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_dropout_is_not_disturbed_by_the_data() -> None:
    torch.manual_seed(3)
    task, plain = Backbone(), Backbone()
    plain.load_state_dict(task.state_dict())
    data = loader(classes(8), 8)
    torch.manual_seed(5)
    quiet_trainer(max_epochs=2).fit(task, data)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    torch.manual_seed(5)
    batch = next(iter(DataLoader(Numbers(classes(8)), batch_size=8, generator=torch.Generator())))
    for _ in range(2):
        plain.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(weights(task), weights(plain))


def test_a_task_without_its_steps_cannot_be_instantiated() -> None:
    class NoPredict(VisionTask):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(TypeError, match="NoPredict cannot be instantiated: it does not define predict_step"):
        NoPredict()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (1.0, "returned float"),
        (torch.zeros(3, requires_grad=True), r"shape \(3,\)"),
        (torch.zeros(()), "without a graph"),
        ({"los": 1}, r"keys \['los'\]"),
        ({"loss": torch.zeros((), requires_grad=True), "weight": -1}, "weight=-1"),
    ],
)
def test_a_wrong_output_of_training_step_is_named(output: Any, message: str) -> None:
    class Wrong(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return output

    with pytest.raises(TaskError, match=message):
        quiet_trainer(max_epochs=1).fit(Wrong(), loader(floats([1.0]), 1))


def test_fit_without_a_limit_or_loader_is_refused() -> None:
    with pytest.raises(SettingsError, match="max_epochs"):
        quiet_trainer().fit(Line(), loader(floats([1.0])))
    with pytest.raises(DataError, match="no train loader"):
        quiet_trainer(max_epochs=1).fit(Line())


def test_fast_dev_run_does_everything_once() -> None:
    recorder = Recorder()
    trainer = Trainer(max_epochs=50, fast_dev_run=True, callbacks=[recorder], cpu=True)
    result = trainer.fit(Line(), loader(floats(range(10)), 1), loader(floats(range(10)), 1))
    assert result.global_step == 1 and recorder.validated_at == [1]
    assert "fast_dev_run" in str(result.run_dir) and list(result.run_dir.glob("events*"))


def test_overfit_reads_the_same_unshuffled_batches_in_every_epoch() -> None:
    task = Line()
    quiet_trainer(max_epochs=3, overfit_batches=2).fit(task, loader(floats(range(10)), 2, shuffle=True))
    assert task.batches == [[0.0, 1.0], [2.0, 3.0]] * 3


def test_steps_that_are_all_left_out_warn_and_max_steps_needs_no_position() -> None:
    task = Skips()
    task.skipped = (0, 1, 2)
    with pytest.warns(UserWarning, match="Epoch 0 made no step"):
        result = quiet_trainer(max_epochs=1).fit(task, loader(classes(12), 4))
    assert result.global_step == 0
    once = Skips()
    once.skipped = (0,)
    features, labels = torch.stack([x for x, _ in classes(4)]), torch.tensor([y for _, y in classes(4)])
    assert quiet_trainer(max_steps=3).fit(once, [(features, labels)] * 4).global_step == 3


def test_manual_optimization_and_hidden_methods_are_refused() -> None:
    task = Line()
    task.automatic_optimization = False  # type: ignore[assignment]
    with pytest.raises(NotSupportedError, match="come later"):
        quiet_trainer(max_epochs=1).fit(task, loader(floats([1.0]), 1))
    other = Line()
    other.batch_size = 32  # type: ignore[assignment, method-assign]
    with pytest.raises(TaskError, match="hides the method"):
        quiet_trainer(max_epochs=1).fit(other, loader(floats([1.0]), 1))


@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_a_launchers_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", value)
    with pytest.raises(SettingsError, match=r"accumulation|ACCUMULATION"):
        quiet_trainer(max_epochs=1).fit(Line(), loader(floats([1.0]), 1))


def test_a_plateau_on_validation_may_be_longer_than_an_epoch() -> None:
    trainer = quiet_trainer(max_epochs=4, val_check_interval=6)
    assert trainer.fit(Plateau(), loader(floats(range(4)), 1), loader(floats([1.0]), 1)).global_step == 16


def test_a_run_that_ends_inside_an_epoch_keeps_what_it_recorded() -> None:
    class Logs(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", float(batch_idx), on_epoch=True, on_step=False)
            return super().training_step(batch, batch_idx)

    result = quiet_trainer(max_steps=3).fit(Logs(), loader(floats(range(10)), 1))
    assert result.metrics["train/x"] == 1.0 and "train/loss" in result.metrics


def test_a_log_at_the_end_of_an_epoch_is_that_epochs() -> None:
    scores: list[tuple[int, float]] = []

    class Logs(Line):
        def on_train_epoch_end(self, run: Any) -> None:
            self.log("score", float(run.state.epoch))

    class Reads(Callback):
        def on_log(self, run: Any, values: Any, step: int) -> None:
            if "train/score" in values:
                scores.append((step, values["train/score"]))

    quiet_trainer(max_epochs=3, callbacks=[Reads()]).fit(Logs(), loader(floats(range(4)), 1))
    assert scores == [(4, 0.0), (8, 1.0), (12, 2.0)]


def test_a_given_accelerators_word_holds_and_its_state_survives_other_trainers() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    assert quiet_trainer(max_epochs=1).fit(Line(), loader(floats(range(4)), 1)).global_step == 4
    assert accelerator.mixed_precision == "bf16"
    task = Net().float()
    data = loader([(x.float(), y) for x, y in classes(16)], 4)
    assert quiet_trainer(max_epochs=1, cpu=None, accelerator=accelerator).fit(task, data).global_step == 2


def test_numpy_numbers_are_numbers_and_odd_settings_are_named() -> None:
    import numpy as np

    assert quiet_trainer(max_steps=np.int64(2)).fit(Line(), loader(floats(range(9)), 1)).global_step == 2
    wrong: list[dict[str, Any]] = [
        {"max_epochs": 0}, {"max_epochs": True}, {"limit_train_batches": 1.5}, {"limit_val_batches": -1},
        {"val_check_interval": 0}, {"val_check_interval": 5, "check_val_every_n_epoch": 2},
        {"mixed_precision": "fp8"},
        {"gradient_clip_val": 0.0}, {"gradient_clip_algorithm": "max"}, {"max_time": "1:2"}, {"timeout": 0},
        {"seed": -1},
        {"min_steps": 9, "max_steps": 3}, {"overfit_batches": 1, "limit_train_batches": 1}, {"run_name": "a/b"},
        {"project_dir": 5}, {"dispatch_batches": True, "shard_data": False}, {"accelerator": "gpu"},
        {"log_with": "nope"},
        {"callbacks": [1]}, {"callbacks": ["nope"]}, {"log_every_n_steps": 0}, {"deterministic": 1},
    ]  # fmt: skip
    for settings in wrong:
        with pytest.raises((SettingsError, TypeError), match="(?i)" + "|".join(settings) + "|callback"):
            quiet_trainer(**settings)


def test_counts_that_are_read_late_need_no_accelerator_to_be_right() -> None:
    """`Executor.finish` in a late window; see tests/distributed for the ranks."""
    from sanctuary_trainer.plan import Plan
    from sanctuary_trainer.state import RunState

    plan = Plan(rounds=10, accumulation=2, max_steps=9, log_every_n_steps=4)
    quiet = [not plan.falls_on_step(RunState(batch=2 * (s + 1), global_step=s), epoch_ends=s == 4) for s in range(5)]
    assert quiet == [True, True, True, False, False]


def test_a_plateau_watches_what_training_logs_by_steps() -> None:
    rates: list[float] = []

    class Watches(Plateau):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("score", 1.0)
            return super().training_step(batch, batch_idx)

        def on_fit_end(self, run: Any) -> None:
            rates.append(run.optimizers[0].param_groups[0]["lr"])

    for monitor in ("train/loss", "train/score"):
        task = Watches(0.0)
        task.monitor = monitor
        quiet_trainer(max_epochs=4).fit(task, loader(floats(range(4)), 1))
    task = Watches(1.0)
    task.monitor = "train/score"
    quiet_trainer(max_epochs=3).fit(task, loader(floats(range(4)), 1))
    assert rates[2] == pytest.approx(0.01)


def test_misspelt_steps_and_wrong_signatures_are_refused() -> None:
    with pytest.raises(CallbackError, match="Did you mean configure_optimizers"):

        class Misspelt(Line):
            def configure_optimizer(self) -> Any:
                return None

    class TakesIndex(Line):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return None

    class TakesTooLittle(Line):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return None

    with pytest.raises(TaskError, match=r"self\.run\.loader_name"):
        quiet_trainer(max_epochs=1).fit(TakesIndex(), loader(floats([1.0])))
    with pytest.raises(TaskError, match=r"training_step\(self, batch, batch_idx\)"):
        quiet_trainer(max_epochs=1).fit(TakesTooLittle(), loader(floats([1.0])))
    with pytest.raises(TaskError, match=r"give an instance, Line\(\)"):
        quiet_trainer(max_epochs=1).fit(Line, loader(floats([1.0])))  # type: ignore[arg-type]


def test_a_validation_that_never_comes_is_warned_of() -> None:
    for settings in ({"val_check_interval": 1000}, {"check_val_every_n_epoch": 5}):
        with pytest.warns(UserWarning, match="ends before the first validation"):
            quiet_trainer(max_epochs=1, **settings).fit(Line(), loader(floats([1.0])), loader(floats([1.0])))


def test_a_task_that_is_wholly_frozen_is_refused() -> None:
    task = Net().requires_grad_(False)
    with pytest.raises(TaskError, match="requires a gradient"):
        quiet_trainer(max_epochs=1).fit(task, loader(classes(4)))
