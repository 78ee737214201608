"""A run that was cut off and continued ends as the one that was not: weights, samples, curves, learning rates."""

from __future__ import annotations

import json
import math
import random
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from sanctuary_trainer import Callback, CheckpointError, FitResult, Run, SettingsError, VisionTask
from sanctuary_trainer.callbacks import Checkpoint, EarlyStopping

from .small_tasks import Line, Net, Numbers, NumberStream, classes, floats, loader, quiet_trainer, weights


class Cut(RuntimeError):
    """What cuts a run off."""


class CutAt(Callback):
    """Raises at one moment of a run: ("on_train_batch_start", 3) is the first one at which 3 steps are made."""

    def __init__(self, hook: str, step: int, batches: int = 0) -> None:
        self.hook, self.step, self.batches = hook, step, batches

    def _at(self, hook: str, run: Run) -> None:
        if hook == self.hook and run.state.global_step == self.step:
            self.batches -= 1
            if self.batches < 0:
                raise Cut

    def on_train_epoch_start(self, run: Run) -> None:
        self._at("on_train_epoch_start", run)

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        self._at("on_train_batch_start", run)

    def on_train_batch_end(self, run: Run, batch: Any, batch_idx: int, loss: Any) -> None:
        self._at("on_train_batch_end", run)

    def on_before_optimizer_step(self, run: Run) -> None:
        self._at("on_before_optimizer_step", run)

    def on_train_step_end(self, run: Run) -> None:
        self._at("on_train_step_end", run)

    def on_evaluation_batch_end(self, run: Run, stage: str, batch: Any, outputs: Any, sample_indices: Any) -> None:
        self._at("on_evaluation_batch_end", run)

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        self._at("on_evaluation_end", run)

    def on_train_epoch_end(self, run: Run) -> None:
        self._at("on_train_epoch_end", run)

    def on_save_point(self, run: Run) -> None:
        self._at("on_save_point", run)


HOOKS = [name for name in vars(CutAt) if name.startswith("on_")]


class Noisy(Dataset[Any]):
    """Images with noise from Python, numpy and torch, drawn anew each time; keeps what was read."""

    def __init__(self, count: int = 22) -> None:
        self.samples = classes(count)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        features, label = self.samples[index]
        return index, features + random.random() + np.random.rand() + torch.randn(5, dtype=torch.float64) / 9, label


class Everything(VisionTask):
    """Dropout, batch norm, a metric in training, draws of all three generators in the step; notes what it is given."""

    def __init__(self) -> None:
        from torchmetrics.classification import MulticlassAccuracy

        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3)
        ).double()
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
        self.accuracy = MulticlassAccuracy(3)
        self.given: list[tuple[int, int, list[int]]] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        indices, features, labels = batch
        self.given.append((self.run.state.epoch, batch_idx, indices.tolist()))
        self.rates.append(self.run.optimizers[0].param_groups[0]["lr"])
        logits = self.net(features + random.random() / 50 + np.random.rand() / 50)
        self.accuracy.update(logits, labels)
        self.log("accuracy", self.accuracy)
        loss = nn.functional.cross_entropy(logits, labels)
        self.log("twice", 2 * loss, on_epoch=True)
        self.log("most", logits.max(), reduce="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        _, features, labels = batch
        logits = self.net(features)
        self.accuracy.update(logits, labels)
        self.log("accuracy", self.accuracy)
        self.log("loss", nn.functional.cross_entropy(logits, labels))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 + step) / 5))
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [
            {"scheduler": warm, "interval": "step"},
            {"scheduler": plateau, "monitor": "val/loss"},
        ]


def fit_everything(
    folder: Path, *callbacks: Callback, resume: str | Path | None = None, workers: int = 0, **settings: Any
) -> tuple[Everything, FitResult | None]:
    """Three epochs of 22 samples, batch 4, windows of 2: steps of 8, 8 and 6; a checkpoint after every step."""
    task = Everything()
    settings = {
        "max_epochs": 3,
        "seed": 5,
        "gradient_accumulation_steps": 2,
        "log_every_n_steps": 1,
        "gradient_clip_val": 1.0,
        "project_dir": folder,
        "run_name": "run",
        **settings,
    }
    trainer = quiet_trainer(callbacks=[Checkpoint(every_n_steps=1), *callbacks], **settings)
    train = DataLoader(Noisy(), 4, shuffle=True, num_workers=workers)
    try:
        return task, trainer.fit(task, train, DataLoader(Noisy(10), 4), resume=resume)
    except Cut:
        return task, None


def curves(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("time", "train/samples_per_second")} for line in lines]


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def joined(*given: list[tuple[int, int, list[int]]]) -> list[tuple[int, int, list[int]]]:
    """The batches of attempts one after the other; what a later one did again counts once."""
    last: dict[tuple[int, int], list[int]] = {}
    for batches in given:
        last.update({(epoch, batch): indices for epoch, batch, indices in batches})
    return sorted((*place, indices) for place, indices in last.items())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Everything, Path]:
    folder = tmp_path_factory.mktemp("straight")
    task, result = fit_everything(folder)
    assert result is not None
    return task, folder / "run"


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_run_cut_off_in_any_hook_ends_as_the_one_that_was_not(
    straight: tuple[Everything, Path], run_folder: Path, hook: str, step: int
) -> None:
    at = 3 if hook in ("on_train_epoch_start", "on_train_epoch_end") or "evaluation" in hook else step
    first, cut = fit_everything(run_folder, CutAt(hook, at))
    assert cut is None
    second, result = fit_everything(run_folder, resume="auto")
    task, run_dir = straight
    assert result is not None and result.stop_reason == "max_epochs"
    assert same_weights(second, task)
    assert curves(run_folder / "run") == curves(run_dir)
    assert joined(first.given, second.given) == sorted(task.given)


def test_many_cuts_in_windows_and_validations(straight: tuple[Everything, Path], run_folder: Path) -> None:
    cuts = [("on_train_batch_start", 0, 1), ("on_train_batch_end", 1, 0), ("on_evaluation_batch_end", 3, 1)]
    cuts += [("on_train_batch_end", 4, 1), ("on_train_batch_start", 6, 0), ("on_save_point", 7, 0)]
    tasks = [fit_everything(run_folder, CutAt(*cut), resume="auto")[0] for cut in cuts]
    last, result = fit_everything(run_folder, resume="auto")
    task, run_dir = straight
    assert result is not None
    assert same_weights(last, task)
    assert curves(run_folder / "run") == curves(run_dir)
    assert joined(*(each.given for each in tasks), last.given) == sorted(task.given)
    tail = len(last.rates)
    assert last.rates == task.rates[-tail:]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_may_change_and_skipped_samples_are_never_read(
    straight: tuple[Everything, Path], run_folder: Path, workers: int
) -> None:
    fit_everything(run_folder, CutAt("on_train_batch_start", 4), workers=2 - workers)
    data = Noisy()
    task = Everything()
    trainer = quiet_trainer(
        max_epochs=3,
        seed=5,
        gradient_accumulation_steps=2,
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        project_dir=run_folder,
        run_name="run",
        callbacks=[Checkpoint(every_n_steps=1)],
    )
    trainer.fit(task, DataLoader(data, 4, shuffle=True, num_workers=workers), DataLoader(Noisy(10), 4), resume="auto")
    assert same_weights(task, straight[0])
    used = [index for epoch, _, indices in straight[0].given if epoch == 1 for index in indices][:8]
    if not workers:
        assert not set(used) & set(data.read[: 22 - 8])


def test_after_max_epochs_nothing_is_done_and_more_epochs_go_on(
    straight: tuple[Everything, Path], run_folder: Path
) -> None:
    first, _ = fit_everything(run_folder, max_epochs=1)
    again, result = fit_everything(run_folder, resume="last", max_epochs=1)
    assert again.given == [] and result is not None
    assert (result.global_step, result.stop_reason) == (3, "max_epochs")
    second, _ = fit_everything(run_folder, resume="last", max_epochs=2)
    third, _ = fit_everything(run_folder, resume="last", max_epochs=3)
    assert [len(each.given) for each in (first, second, third)] == [6, 6, 6]
    assert same_weights(third, straight[0])
    assert curves(run_folder / "run") == curves(straight[1])


def test_max_steps_inside_an_epoch_goes_on_inside_it(straight: tuple[Everything, Path], run_folder: Path) -> None:
    fit_everything(run_folder, max_steps=4)
    second, _ = fit_everything(run_folder, resume="auto")
    assert same_weights(second, straight[0])
    assert curves(run_folder / "run") == curves(straight[1])


def test_steps_and_epochs_are_counted_on(run_folder: Path) -> None:
    """Case 18: 3 batches an epoch; 1, 2, then 3 epochs."""

    class Counting(Line):
        def __init__(self) -> None:
            super().__init__(0.1)
            self.seen: list[tuple[int, int, int]] = []

        def on_train_step_end(self, run: Run) -> None:
            self.seen.append((run.state.epoch, run.state.batch, run.state.global_step))

    seen, task = [], Counting()
    for epochs in (1, 2, 3):
        task = Counting()
        trainer = quiet_trainer(max_epochs=epochs, project_dir=run_folder, run_name="r", callbacks=["checkpoint"])
        trainer.fit(task, loader(floats(range(12))), resume="auto")
        seen.append(task.seen)
    assert seen == [[(e, b, 3 * e + b) for b in (1, 2, 3)] for e in (0, 1, 2)]
    straight = Counting()
    quiet_trainer(max_epochs=3, project_dir=run_folder).fit(straight, loader(floats(range(12))))
    assert torch.equal(task.w, straight.w)


def test_the_rest_of_an_epoch_is_read_and_no_more(run_folder: Path) -> None:
    """Case 19: 10 batches in order, cut after 4."""
    for cut in (CutAt("on_train_batch_start", 4), None):
        task = Line(0.1)
        trainer = quiet_trainer(
            max_epochs=2,
            project_dir=run_folder,
            run_name="r",
            callbacks=[Checkpoint(every_n_steps=1), *([cut] if cut else [])],
        )
        try:
            trainer.fit(task, loader(floats(range(10)), 1), resume="auto")
        except Cut:
            assert task.batches == [[float(i)] for i in range(4)]
    assert task.batches == [[float(i)] for i in (*range(4, 10), *range(10))]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_shuffled_epoch_goes_on_in_its_order(run_folder: Path, epoch: int) -> None:
    """Case 20: 64 samples in batches of 4, saved after batch 5."""
    orders = []
    for cut in (None, CutAt("on_train_batch_start", 16 * epoch + 5)):
        name = "straight" if cut is None else "cut"
        attempts: list[float] = []
        for callback in [cut, None] if cut else [None]:
            task = Line(0.01)
            trainer = quiet_trainer(
                max_epochs=2,
                seed=1,
                project_dir=run_folder,
                run_name=name,
                callbacks=[Checkpoint(every_n_steps=1), *([callback] if callback else [])],
            )
            with suppress(Cut):
                trainer.fit(task, loader(floats(range(64)), shuffle=True), resume="auto")
            attempts += [value for batch in task.batches for value in batch]
        orders.append(attempts)
    assert orders[0] == orders[1]
    assert sorted(orders[1][64 * epoch : 64 * (epoch + 1)]) == sorted(map(float, range(64)))


def test_validations_and_saves_fall_on_the_steps_of_the_straight_run(run_folder: Path) -> None:
    """Gradient accumulation, case 10: 3 steps an epoch, validated every 2; continued from step 4."""

    class Noting(Line):
        def __init__(self) -> None:
            super().__init__(0.1)
            self.validated: list[int] = []

        def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
            self.validated.append(run.state.global_step)

    def fit(*callbacks: Callback, resume: str | None = None) -> Noting:
        task = Noting()
        trainer = quiet_trainer(
            max_epochs=2,
            gradient_accumulation_steps=4,
            val_check_interval=2,
            project_dir=run_folder,
            run_name="r",
            callbacks=[Checkpoint(every_n_steps=2, save_top_k=-1), *callbacks],
        )
        with suppress(Cut):
            trainer.fit(task, loader(floats(range(10)), 1), loader(floats(range(2)), 1), resume=resume)
        return task

    assert fit(CutAt("on_train_batch_start", 4)).validated == [2, 4]
    before = {path.name: path.stat().st_mtime_ns for path in (run_folder / "r" / "checkpoints").iterdir()}
    assert sorted(before) == ["step_00000002", "step_00000004"]
    assert fit(resume="auto").validated == [6]
    after = {path.name: path.stat().st_mtime_ns for path in (run_folder / "r" / "checkpoints").iterdir()}
    assert sorted(after) == ["step_00000002", "step_00000004", "step_00000006"]
    assert all(after[name] == before[name] for name in before)


@pytest.mark.parametrize(("last", "kept"), [(10, 10), (15, 10)])
def test_tensorboard_has_every_point_once(run_folder: Path, last: int, kept: int) -> None:
    """Resume 23 and tensorboard 91: cut at 10, or at 15 with the last checkpoint at 10; then on to 20."""

    def fit(*callbacks: Callback, resume: str | None = None, steps: int = 20) -> None:
        trainer = quiet_trainer(
            max_steps=steps,
            log_every_n_steps=1,
            log_with="tensorboard",
            val_check_interval=5,
            project_dir=run_folder,
            run_name="r",
            callbacks=[Checkpoint(every_n_steps=10, on_exception=False), *callbacks],
        )
        with suppress(Cut):
            trainer.fit(Line(0.01), loader(floats(range(40)), 2), loader(floats(range(4))), resume=resume)

    fit(CutAt("on_train_batch_start", last))
    fit(resume="auto")
    events = EventAccumulator(str(run_folder / "r"))
    events.Reload()
    points = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert points["train/loss"] == list(range(1, 21))
    assert points["val/loss"] == [5, 10, 15, 20]
    assert points["epoch"] == list(range(1, 21))
    assert [line["step"] for line in curves(run_folder / "r") if "train/loss" in line] == list(range(1, 21))


def test_patience_and_the_best_survive(run_folder: Path) -> None:
    """Case 26: losses 0.9, 1.0, 1.0, cut after epoch 3; then 1.0: one more epoch."""

    class Scripted(Line):
        losses = (0.9, 1.0, 1.0, 1.0, 1.0, 1.0)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", self.losses[self.run.state.epoch])

    def fit(resume: str | None, *callbacks: Callback) -> FitResult | None:
        trainer = quiet_trainer(
            max_epochs=6,
            project_dir=run_folder,
            run_name="r",
            callbacks=[
                Checkpoint(),
                Checkpoint(monitor="val/loss", mode="min", name="best"),
                EarlyStopping("val/loss", mode="min", patience=3),
                *callbacks,
            ],
        )
        try:
            return trainer.fit(Scripted(0.1), loader(floats(range(4))), loader(floats([1])), resume=resume)
        except Cut:
            return None

    assert fit(None, CutAt("on_train_epoch_start", 3)) is None
    best = run_folder / "r" / "checkpoints" / "best"
    written = (best / "model.safetensors").read_bytes()
    result = fit("auto")
    assert result is not None
    assert result.global_step == 4
    assert result.best_checkpoint == best
    assert (best / "model.safetensors").read_bytes() == written
    again = fit("auto")
    assert again is not None and again.global_step == 4  # it has ended, and stays so


class Stateful(Callback):
    """Holds what a user's callback may hold; two of them are told apart by a name."""

    identifying = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_states_of_any_kind_come_back(run_folder: Path) -> None:
    """Case 29: a path, numpy's scalar and array, tuples, NaN, under the installed torch."""
    first = Stateful("a")
    first.state = {
        "path": Path("x/y"),
        "scalar": np.float32(0.1),
        "array": np.arange(6).reshape(2, 3),
        "tuple": (1, "two", None, 3.5),
        "nan": math.nan,
        "tensor": torch.arange(3, dtype=torch.bfloat16),
        1: {"key": b"bytes"},
    }
    settings: dict[str, Any] = {"max_epochs": 1, "project_dir": run_folder, "run_name": "r"}
    quiet_trainer(callbacks=[Checkpoint(), first], **settings).fit(Net(), loader(classes(8)))
    second = Stateful("a")
    quiet_trainer(callbacks=[Checkpoint(), second], **settings).fit(Net(), loader(classes(8)), resume="auto")
    assert second.state.keys() == first.state.keys()
    assert second.state["path"] == Path("x/y") and isinstance(second.state["path"], Path)
    assert type(second.state["scalar"]) is np.float32 and second.state["scalar"] == np.float32(0.1)
    assert (second.state["array"] == first.state["array"]).all()
    assert second.state["tuple"] == (1, "two", None, 3.5) and math.isnan(second.state["nan"])
    assert torch.equal(second.state["tensor"], first.state["tensor"]) and second.state[1] == {"key": b"bytes"}


def test_what_cannot_be_saved_is_told_before_the_run(run_folder: Path) -> None:
    from sanctuary_trainer import DataError

    broken = Stateful("a")
    broken.state = {"function": lambda: None}
    task = Net()
    with pytest.raises(DataError, match=r"Stateful\(name='a'\)\.function is a builtins\.function"):
        quiet_trainer(max_epochs=1, project_dir=run_folder, callbacks=[Checkpoint(), broken]).fit(
            task, loader(classes(8))
        )
    assert torch.equal(weights(task), weights(Net()))


def test_each_callback_gets_its_own_state_in_any_order(run_folder: Path) -> None:
    """Case 31, with a removed and a new one: one warning each."""
    settings: dict[str, Any] = {"max_epochs": 1, "project_dir": run_folder, "run_name": "r"}
    one, two = Stateful("one"), Stateful("two")
    one.state, two.state = {"is": 1}, {"is": 2}
    quiet_trainer(callbacks=[Checkpoint(), one, two], **settings).fit(Net(), loader(classes(8)))
    one, two = Stateful("one"), Stateful("two")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet_trainer(callbacks=[two, Checkpoint(), one], **settings).fit(Net(), loader(classes(8)), resume="auto")
    assert (one.state, two.state) == ({"is": 1}, {"is": 2})
    new = Stateful("new")
    new.state = {"is": 3}
    with pytest.warns(UserWarning, match="Stateful") as told:
        quiet_trainer(callbacks=[Checkpoint(), Stateful("two"), new], **settings).fit(
            Net(), loader(classes(8)), resume="auto"
        )
    texts = sorted(str(warning.message) for warning in told)
    assert len(texts) == 2
    assert "has a state of Stateful(name='one')" in texts[0] and "Stateful(name='new') has no state" in texts[1]


def test_changed_settings_are_told(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"project_dir": run_folder, "run_name": "r", "callbacks": ["checkpoint"]}
    quiet_trainer(max_epochs=1, seed=1, **settings).fit(Line(0.1), loader(floats(range(16)), 8))
    trainer = quiet_trainer(max_epochs=2, seed=2, gradient_accumulation_steps=2, **settings)
    with pytest.warns(UserWarning, match="Changed since the checkpoint") as told:
        trainer.fit(Line(0.2), loader(floats(range(12)), 4), resume="auto")
    text = str(told[0].message)
    for change in (
        "batch size 8 -> 4",
        "data set length 16 -> 12",
        "gradient_accumulation_steps 1 -> 2",
        "seed 1 -> 2 (the run goes on with 1)",
        "0.1 -> 0.2",
    ):
        assert change in text, text
    assert "samples of a step" not in text
    assert "max_epochs 1 -> 2" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "batches"), [(2, 7), (8, 2), (5, 3)])
def test_another_batch_size_uses_the_rest_of_the_epoch_once(run_folder: Path, size: int, batches: int) -> None:
    settings: dict[str, Any] = {"max_epochs": 1, "seed": 1, "project_dir": run_folder, "run_name": "r"}
    first = Line(0.01)
    with pytest.raises(Cut):
        quiet_trainer(callbacks=[Checkpoint(every_n_steps=1), CutAt("on_train_batch_start", 2)], **settings).fit(
            first, loader(floats(range(22)), shuffle=True)
        )
    second = Line(0.01)
    with pytest.warns(UserWarning, match=f"batch size 4 -> {size}"):
        result = quiet_trainer(callbacks=[Checkpoint(every_n_steps=1)], **settings).fit(
            second, loader(floats(range(22)), size, shuffle=True), resume="auto"
        )
    used = [value for task in (first, second) for batch in task.batches for value in batch]
    assert sorted(used) == sorted(map(float, range(22)))
    assert (len(second.batches), result.global_step) == (batches, 2 + batches)


def test_a_data_set_that_has_become_too_short_is_refused(run_folder: Path) -> None:
    settings: dict[str, Any] = {"max_epochs": 1, "project_dir": run_folder, "run_name": "r"}
    with pytest.raises(Cut):
        quiet_trainer(callbacks=[Checkpoint(every_n_steps=1), CutAt("on_train_batch_start", 4)], **settings).fit(
            Line(), loader(floats(range(20)))
        )
    with pytest.raises(CheckpointError, match="16 samples into an epoch, which now has 12"):
        quiet_trainer(callbacks=[Checkpoint()], **settings).fit(Line(), loader(floats(range(12))), resume="auto")


def test_another_task_is_refused(run_folder: Path) -> None:
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "project_dir": run_folder,
        "run_name": "r",
        "callbacks": ["checkpoint"],
    }
    result = quiet_trainer(**settings).fit(Line(), loader(floats(range(4))))
    with pytest.raises(CheckpointError, match="is a checkpoint of Line, and the task is a Net"):
        quiet_trainer(**settings).fit(Net(), loader(classes(4)), resume="auto")
    with pytest.raises(CheckpointError, match="share no key"):
        quiet_trainer().test(Net(), loader(classes(4)), checkpoint=result)


class Deeper(Net):
    """Net under its name, with one layer of another shape."""


Deeper.__qualname__ = "Net"


def test_other_shapes_are_refused_by_name(run_folder: Path) -> None:
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "project_dir": run_folder,
        "run_name": "r",
        "callbacks": ["checkpoint"],
    }
    quiet_trainer(**settings).fit(Net(), loader(classes(4)))
    task = Deeper()
    task.net[2] = nn.Linear(7, 4).double()
    with pytest.raises(CheckpointError, match=r"net\.2\.weight \(\(3, 7\) in the file, \(4, 7\) here\)"):
        quiet_trainer(**settings).fit(task, loader(classes(4)), resume="auto")


@pytest.mark.parametrize("wrong", [True, 3, b"auto"])
def test_what_resume_cannot_be(wrong: Any) -> None:
    with pytest.raises(SettingsError, match='"auto", "last" or a path was expected'):
        quiet_trainer(max_epochs=1).fit(Line(), loader(floats(range(4))), resume=wrong)


def test_without_a_name_the_newest_run_of_the_task_goes_on(run_folder: Path) -> None:
    def fit(task: VisionTask, epochs: int, resume: str | None = "auto") -> FitResult:
        trainer = quiet_trainer(max_epochs=epochs, project_dir=run_folder, callbacks=["checkpoint"])
        return trainer.fit(task, loader(classes(4) if isinstance(task, Net) else floats(range(4))), resume=resume)

    assert fit(Net(), 1).run_dir.name == "net-1"  # there was none
    assert fit(Net(), 1, resume=None).run_dir.name == "net-2"
    assert fit(Line(), 1).run_dir.name == "line-1"
    result = fit(Net(), 3)
    assert (result.run_dir.name, result.global_step) == ("net-2", 3)
    with pytest.raises(CheckpointError, match=r'resume="last" found no whole checkpoint in .*deeper-\*'):
        fit(type("Deeper", (Net,), {})(), 1, "last")


def test_a_path_under_another_name_begins_a_branch(run_folder: Path) -> None:
    settings: dict[str, Any] = {"project_dir": run_folder, "log_every_n_steps": 1, "callbacks": ["checkpoint"]}
    first = quiet_trainer(max_epochs=2, run_name="a", **settings).fit(Net(), loader(classes(8)))
    before = sorted(path.relative_to(first.run_dir) for path in first.run_dir.rglob("*"))
    assert first.best_checkpoint is not None
    branch = quiet_trainer(max_epochs=3, run_name="b", **settings).fit(
        Net(), loader(classes(8)), resume=first.best_checkpoint
    )
    assert (branch.run_dir, branch.global_step) == (run_folder / "b", 6)
    assert [line["step"] for line in curves(branch.run_dir) if "train/loss" in line] == [5, 6]
    assert sorted(path.relative_to(first.run_dir) for path in first.run_dir.rglob("*")) == before
    on = quiet_trainer(max_epochs=4, **settings).fit(Net(), loader(classes(8)), resume=branch.run_dir)
    assert (on.run_dir, on.global_step) == (run_folder / "b", 8)


def test_frozen_and_thawed_layers_come_back(run_folder: Path) -> None:
    class Thaw(Net):
        """The first layer sleeps for an epoch, then it is thawed and gets a group of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False).eval()

        def on_train_epoch_start(self, run: Run) -> None:
            if run.state.epoch == 1:
                self.net[0].requires_grad_(True).train()
                run.optimizers[0].add_param_group({"params": list(self.net[0].parameters()), "lr": 0.01})

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def fit(name: str, *callbacks: Callback, resume: str | None = None) -> Thaw:
        task = Thaw()
        trainer = quiet_trainer(
            max_epochs=3,
            seed=0,
            project_dir=run_folder,
            run_name=name,
            callbacks=[Checkpoint(every_n_steps=1), *callbacks],
        )
        with suppress(Cut):
            trainer.fit(task, loader(classes(12), shuffle=True), resume=resume)
        return task

    straight = fit("a")
    fit("b", CutAt("on_train_batch_start", 5))
    second = fit("b", resume="auto")
    assert torch.equal(weights(second), weights(straight))
    assert second.net[0].training


@pytest.mark.parametrize("kind", ["stream", "list", "keys"])
def test_data_without_sample_positions_goes_on(run_folder: Path, kind: str) -> None:
    values = floats(range(12))

    def data() -> Any:
        if kind == "stream":
            return DataLoader(NumberStream(values), 2)
        if kind == "list":
            return [torch.stack(values[i : i + 2]) for i in range(0, 12, 2)]
        return DataLoader(Numbers([torch.stack(values[i : i + 2]) for i in range(0, 12, 2)]), None, shuffle=False)

    def fit(name: str, *callbacks: Callback, resume: str | None = None) -> Line:
        task = Line(0.01)
        trainer = quiet_trainer(
            max_epochs=2,
            seed=0,
            project_dir=run_folder,
            run_name=name,
            callbacks=[Checkpoint(every_n_steps=1), *callbacks],
        )
        with suppress(Cut):
            trainer.fit(task, data(), resume=resume)
        return task

    straight = fit("a")
    first = fit("b", CutAt("on_train_batch_start", 8))
    if kind == "stream":
        with pytest.warns(UserWarning, match="state_dict"):
            second = fit("b", resume="auto")
    else:
        second = fit("b", resume="auto")
    assert first.batches[:8] + second.batches == straight.batches
    assert torch.equal(second.w, straight.w)


def test_time_that_was_used_counts(run_folder: Path) -> None:
    class Slow(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            import time

            time.sleep(0.1)
            return super().training_step(batch, batch_idx)

    settings: dict[str, Any] = {"max_time": 3.0, "project_dir": run_folder, "run_name": "r"}
    with pytest.raises(Cut):
        quiet_trainer(callbacks=[Checkpoint(every_n_steps=1), CutAt("on_train_batch_start", 8)], **settings).fit(
            Slow(), loader(floats(range(4)))
        )
    result = quiet_trainer(callbacks=[Checkpoint(every_n_steps=1)], **settings).fit(
        Slow(), loader(floats(range(4))), resume="auto"
    )
    assert result.stop_reason == "max_time"
    assert 8 < result.global_step < 30


def test_fast_dev_run_does_not_go_on(run_folder: Path) -> None:
    settings: dict[str, Any] = {"project_dir": run_folder, "run_name": "r", "callbacks": ["checkpoint"]}
    quiet_trainer(max_epochs=1, **settings).fit(Net(), loader(classes(8)))
    result = quiet_trainer(fast_dev_run=True, **settings).fit(Net(), loader(classes(8)), resume="auto")
    assert result.global_step == 1


def scripted(folder: Path, losses: list[float], *callbacks: Any, resume: str | None = "auto", **settings: Any) -> Any:
    """An epoch of two steps for each loss."""

    class Scripted(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", losses[self.run.state.epoch])

    settings = {"max_epochs": len(losses), "seed": 0, "log_every_n_steps": 1, **settings}
    trainer = quiet_trainer(project_dir=folder, run_name="r", callbacks=list(callbacks), **settings)
    return trainer.fit(Scripted(0.1), loader(floats(range(8))), loader(floats(range(2))), resume=resume)


def best(**settings: Any) -> Checkpoint:
    return Checkpoint(monitor="val/loss", mode="min", **{"name": "best", **settings})


def step_of(checkpoint: Path | None) -> int:
    assert checkpoint is not None
    return json.loads((checkpoint / "manifest.json").read_text())["global_step"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("dies", ["best", "step_00000004"])
def test_cut_off_between_two_checkpoints_of_one_boundary_the_other_is_written_too(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, dies: str, order: int
) -> None:
    from sanctuary_trainer import saving

    def dying(folder: Path, owner: str, about: Any, fill: Any) -> None:
        if folder.name == dies and about["epoch"] == 2:
            raise Cut
        write(folder, owner, about, fill)

    losses, write = [0.9, 0.1, 0.5, 0.6], saving.write_checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_checkpoint", dying)
        with pytest.raises(Cut):
            scripted(run_folder, losses, *[Checkpoint(), best()][:: 1 - 2 * order])
    result = scripted(run_folder, losses, *[Checkpoint(), best()][:: 1 - 2 * order])
    assert step_of(result.best_checkpoint) == 4
    assert result.global_step == 8


def test_another_schedule_keeps_the_best(run_folder: Path) -> None:
    scripted(run_folder, [0.1, 0.9], best())
    result = scripted(run_folder, [0.1, 0.9, 0.8, 0.7], best(every_n_steps=2))
    assert step_of(result.best_checkpoint) == 2


def test_a_value_that_comes_after_a_resume_is_ranked(run_folder: Path) -> None:
    def kill(hook: str, step: int) -> Any:
        from .test_signals import Kill

        return Kill(hook, step)

    with pytest.raises(SystemExit):
        scripted(run_folder, [0.9, 0.1, 0.5], best(every_n_steps=2), kill("val batch", 4), val_check_interval=2)
    result = scripted(run_folder, [0.9, 0.1, 0.5], best(every_n_steps=2), val_check_interval=2)
    assert step_of(result.best_checkpoint) == 4


@pytest.mark.parametrize("where", ["setup", "on_fit_start"])
def test_a_start_that_is_refused_changes_nothing_on_disk(run_folder: Path, where: str) -> None:
    def refuse(self: Any, run: Run) -> None:
        raise SettingsError("no")

    scripted(run_folder, [0.1, 0.2, 0.3], Checkpoint(save_top_k=-1))
    before = {path: path.read_bytes() for path in (run_folder / "r").rglob("*") if path.is_file()}
    with pytest.raises(SettingsError):
        scripted(
            run_folder,
            [0.1, 0.2, 0.3],
            Checkpoint(save_top_k=-1),
            type("Refuses", (Callback,), {where: refuse})(),
            resume=str(run_folder / "r" / "checkpoints" / "step_00000002"),
        )
    assert {path: path.read_bytes() for path in (run_folder / "r").rglob("*") if path.is_file()} == before


def test_what_an_epochs_first_hook_does_is_not_done_twice(run_folder: Path) -> None:
    """An error while the epoch's first batch is read, after its hook."""
    seen: list[tuple[int, bool]] = []

    class Adds(Net):
        def on_train_epoch_start(self, run: Run) -> None:
            seen.append((run.state.epoch, fails))
            if run.state.epoch == 1:
                group = {"params": [nn.Parameter(torch.zeros(1, dtype=torch.float64))]}
                self.register_parameter("extra", group["params"][0])
                run.optimizers[0].add_param_group(group)

    class Breaks(Numbers):
        def __getitem__(self, index: int) -> Any:
            if fails and len(self.read) >= 8:
                raise Cut
            return super().__getitem__(index)

    for fails in (True, False):
        trainer = quiet_trainer(
            max_epochs=2, seed=0, project_dir=run_folder, run_name="r", callbacks=[Checkpoint(every_n_steps=1)]
        )
        task, data = Adds(), DataLoader(Breaks(classes(8)), 4)
        if fails:
            with pytest.raises(Cut):
                trainer.fit(task, data, resume="auto")
        else:
            assert trainer.fit(task, data, resume="auto").global_step == 4
    assert seen == [(0, True), (1, True), (1, False)]


def test_what_an_interrupted_validation_saved_gives_way_to_its_epoch(run_folder: Path) -> None:
    """Weights that change after the validation; names that tell the epoch; and images, which are shown once."""
    from .test_signals import Kill

    class Halves(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 1.0)
            self.log_image("image", torch.zeros(1, 4, 4))

        def on_train_epoch_end(self, run: Run) -> None:
            with torch.no_grad():
                self.w.div_(2)

    def fit(name: str, *callbacks: Callback) -> Any:
        task = Halves(0.1)
        settings: dict[str, Any] = {"max_epochs": 2, "seed": 0, "log_with": "tensorboard"}
        trainer = quiet_trainer(
            project_dir=run_folder, run_name=name, callbacks=[Checkpoint(name="{epoch}-{step}"), *callbacks], **settings
        )
        return task, trainer.fit(task, loader(floats(range(8))), loader(floats(range(4)), 2), resume="auto")

    with pytest.raises(SystemExit):
        fit("a", Kill("val batch", 4))
    (continued, result), (straight, other) = fit("a"), fit("b")
    assert torch.equal(continued.w, straight.w)
    assert [path.name for path in (run_folder / "a" / "checkpoints").iterdir()] == ["2-4"]
    assert (result.best_checkpoint / "model.safetensors").read_bytes() == (
        other.best_checkpoint / "model.safetensors"
    ).read_bytes()
    events = EventAccumulator(str(run_folder / "a"))
    events.Reload()
    assert [event.step for event in events.Images("val/image")] == [2, 2, 4, 4]


def test_a_lost_run_json_does_not_lose_the_run(run_folder: Path) -> None:
    with pytest.raises(Cut):
        scripted(run_folder, [0.1] * 3, Checkpoint(), CutAt("on_train_batch_start", 2))
    (run_folder / "r" / "run.json").write_text("{")
    with pytest.raises(Cut):
        scripted(run_folder, [0.1] * 3, Checkpoint(), CutAt("on_train_batch_start", 3))
    assert [line["step"] for line in curves(run_folder / "r") if "train/loss" in line] == [1, 2, 3]
    assert scripted(run_folder, [0.1] * 3, Checkpoint()).global_step == 6
    assert [line["step"] for line in curves(run_folder / "r") if "train/loss" in line] == list(range(1, 7))


def test_a_schedule_that_cannot_go_on_so_long_is_refused(run_folder: Path) -> None:
    class OneCycle(Line):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = self.run.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def fit(epochs: int, size: int = 4) -> FitResult:
        trainer = quiet_trainer(max_epochs=epochs, project_dir=run_folder, run_name="r", callbacks=["checkpoint"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return trainer.fit(OneCycle(), loader(floats(range(16)), size), resume="auto")

    assert fit(2).global_step == 8
    with pytest.raises(CheckpointError, match="OneCycleLR was made for 8 steps, and the run would come to 12"):
        fit(3)
    with pytest.raises(CheckpointError, match="would come to 10"):
        fit(3, 8)
    assert fit(2).global_step == 8
