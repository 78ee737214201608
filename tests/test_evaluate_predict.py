"""Evaluation and prediction on one process, the run folder, and what a verb leaves behind."""

from __future__ import annotations

import copy
import json
import weakref
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from sanctuary_trainer import Callback, DataError, RunFolderError, TaskError, Trainer, load_predictions
from tests.small_tasks import Line, Net, NumberStream, classes, floats, loader, quiet_trainer, weights


class Half(Line):
    """Whether a number is below 5, as a metric and as a plain value."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics.classification import BinaryAccuracy

        self.accuracy = BinaryAccuracy()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.accuracy.update((batch < 5).int(), torch.ones(len(batch), dtype=torch.int))
        self.log("accuracy", self.accuracy)
        self.log("mean", batch.mean())


def test_several_loaders_get_prefixes_of_their_own() -> None:
    low, high = loader(floats(range(5))), loader(floats(range(3, 9)))
    metrics = quiet_trainer().validate(Half(), {"low": low, "high": high})
    assert metrics == {
        "val/low/accuracy": 1.0,
        "val/low/mean": 2.0,
        "val/high/accuracy": pytest.approx(1 / 3),
        "val/high/mean": 5.5,
    }
    assert set(quiet_trainer().test(Half(), [low, high])) == {
        "test/0/accuracy",
        "test/0/mean",
        "test/1/accuracy",
        "test/1/mean",
    }
    result = quiet_trainer(max_epochs=1).fit(Half(), low, {"low": low, "high": high})
    assert result.metrics["val/high/mean"] == 5.5


def test_the_limit_of_a_loader_counts_batches_or_a_fraction() -> None:
    for limit, mean in ((1, 1.5), (0.5, 3.5), (0, None), (1.0, 7.5)):
        metrics = quiet_trainer(limit_val_batches=limit).validate(Half(), loader(floats(range(16))))
        assert metrics.get("val/mean") == mean


def test_metric_states_of_training_and_validation_do_not_mix() -> None:
    class Both(Half):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            right = int(self.run.state.epoch == 0)
            self.accuracy.update(torch.full((len(batch),), right), torch.ones(len(batch), dtype=torch.int))
            self.log("accuracy", self.accuracy)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.accuracy.update(torch.ones(len(batch)), torch.ones(len(batch), dtype=torch.int))
            self.log("accuracy", self.accuracy)

    seen: list[tuple[float, float]] = []

    class Keeps(Callback):
        def on_train_epoch_end(self, run: Any) -> None:
            seen.append((run.metrics["train/accuracy"], run.metrics["val/accuracy"]))

    quiet_trainer(max_epochs=2, val_check_interval=2, callbacks=[Keeps()]).fit(
        Both(), loader(floats(range(16))), loader(floats(range(4)))
    )
    assert seen == [(1.0, 1.0), (0.0, 1.0)]


def test_an_epoch_mean_weighs_by_samples_for_every_kind_of_batch() -> None:
    Pair = namedtuple("Pair", "x y")
    sizes = (256, 256, 10)
    makers = {
        "dict": lambda n: {"x": torch.zeros(n, 2), "y": torch.zeros(n)},
        "tuple": lambda n: (torch.zeros(n, 2), torch.zeros(n)),
        "list of dicts": lambda n: [{"x": torch.zeros(3), "boxes": torch.zeros(2, 4)} for _ in range(n)],
        "nested": lambda n: {"a": ({"b": [torch.zeros(n, 1)]}, "text")},
        "named": lambda n: Pair(torch.zeros(n), torch.zeros(n)),
    }

    class Logs(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", (0.7, 0.8, 0.9)[batch_idx])

    for make in makers.values():
        assert quiet_trainer().validate(Logs(), [make(n) for n in sizes]) == {"val/value": pytest.approx(393 / 522)}


def test_a_list_of_batches_and_a_stream_are_loaders_too() -> None:
    batches = [torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0]).double()]
    assert quiet_trainer().validate(Half(), batches)["val/mean"] == 2.0
    stream = DataLoader(NumberStream(floats(range(10))), batch_size=4)
    assert quiet_trainer().validate(Half(), stream)["val/mean"] == 4.5
    assert quiet_trainer(limit_test_batches=1).test(Half(), stream)["test/mean"] == 1.5
    assert len(quiet_trainer(limit_predict_batches=2).predict(Line(), stream) or ()) == 8


def test_validating_a_task_without_a_step_is_an_error() -> None:
    class Without(Line):
        validation_step = __import__("sanctuary_trainer").VisionTask.validation_step

    with pytest.raises(TaskError, match="Without has no validation_step"):
        quiet_trainer().validate(Without(), loader(floats([1.0])))
    with pytest.raises(TaskError, match="no validation_step"):
        quiet_trainer(max_epochs=1).fit(Without(), loader(floats([1.0])), loader(floats([1.0])))
    with pytest.raises(DataError, match="no test loader"):
        quiet_trainer().test(Line())


@dataclass
class Boxes:
    boxes: torch.Tensor
    label: str


OUTPUTS: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda n: torch.arange(n * 2).view(n, 2), [0, 1]),
    "dict": (lambda n: {"a": torch.arange(n), "b": [f"{i}" for i in range(n)]}, {"a": 0, "b": "0"}),
    "tuple": (lambda n: (torch.arange(n), list(range(n))), (0, 0)),
    "ragged": (lambda n: [torch.zeros(i, 4) for i in range(n)], []),
    "strings": (lambda n: [f"{i}.png" for i in range(n)], "0.png"),
    "none": (lambda n: None, None),
    "half": (lambda n: torch.zeros(n, 1, dtype=torch.bfloat16), [0.0]),
}


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("on_disk", [False, True])
def test_outputs_of_every_kind_come_back_one_per_sample(kind: str, on_disk: bool, tmp_path: Path) -> None:
    make, first = OUTPUTS[kind]

    class Gives(Line):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return make(len(batch))

    predictions = quiet_trainer().predict(
        Gives(), loader(floats(range(7)), 3), output_dir=tmp_path / "out" if on_disk else None
    )
    assert predictions is not None and len(predictions) == 7
    found = predictions[0]
    if isinstance(found, torch.Tensor):
        assert found.dtype != torch.bfloat16
        found = found.tolist()
    assert found == first


def test_one_item_per_sample_is_demanded() -> None:
    class Wrong(Line):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.zeros(len(batch) + 1)

    with pytest.raises(DataError, match="per sample"):
        quiet_trainer().predict(Wrong(), loader(floats(range(4))))


def test_predictions_are_not_kept_when_not_asked_for() -> None:
    alive: list[Any] = []
    order: list[int] = []

    class Big(Line):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            assert all(reference() is None for reference in alive[:-1])
            output = torch.zeros(len(batch), 1000)
            alive.append(weakref.ref(output))
            return output

    class Writer(Callback):
        def on_predict_batch_end(self, run: Any, batch: Any, outputs: Any, sample_indices: Any) -> None:
            order.extend(sample_indices)

    found = quiet_trainer(callbacks=[Writer()]).predict(Big(), loader(floats(range(12)), 3), return_predictions=False)
    assert found is None and order == list(range(12))
    assert all(reference() is None for reference in alive)


def test_predictions_on_disk_use_constant_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sanctuary_trainer.loops import predict

    monkeypatch.setattr(predict, "SHARD_BYTES", 1000)
    lazily = quiet_trainer().predict(Net(), loader(classes(100), 3), output_dir=tmp_path / "out")
    at_once = quiet_trainer().predict(Net(), loader(classes(100), 3))
    assert lazily is not None and at_once is not None
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert torch.equal(torch.stack(list(lazily)), torch.stack(list(at_once)))
    assert torch.equal(load_predictions(tmp_path / "out")[-1], at_once[-1])
    with pytest.raises(RunFolderError, match="not empty"):
        quiet_trainer().predict(Net(), loader(classes(9), 3), output_dir=tmp_path / "out")
    with pytest.raises(RunFolderError, match="no folder"):
        load_predictions(tmp_path / "elsewhere")


def test_the_run_folder_holds_curves_and_is_not_shared(run_folder: Path) -> None:
    settings: Any = {"project_dir": run_folder, "cpu": True, "default_callbacks": False, "max_epochs": 2}
    trainer = Trainer(**settings, log_every_n_steps=2)
    first, second = trainer.fit(Net(), loader(classes(16))), trainer.fit(Net(), loader(classes(16)), loader(classes(5)))
    assert (first.run_dir.name, second.run_dir.name) == ("net-1", "net-2")
    assert len(list(second.run_dir.glob("events*"))) == 1
    lines = [json.loads(line) for line in (second.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [2, 4, 6, 8]
    assert [line["step"] for line in lines if "val/loss" in line] == [4, 8]
    assert all("train/lr" in line and "train/samples_per_second" in line for line in lines if "train/loss" in line)
    named = Trainer(**settings, run_name="mine")
    named.fit(Net(), loader(classes(16)))
    with pytest.raises(RunFolderError, match="mine is not empty"):
        named.fit(Net(), loader(classes(16)))


def test_the_logged_loss_is_what_the_user_returned(run_folder: Path) -> None:
    task, expected = Line(0.0), [1.5, 3.5, 5.0]
    task.w.data.fill_(1.0)
    result = quiet_trainer(
        max_epochs=1, gradient_accumulation_steps=2, log_every_n_steps=1, project_dir=run_folder
    ).fit(task, loader(floats(range(1, 6)), 1))
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/loss"] for line in lines if "train/loss" in line] == expected
    assert result.metrics["train/loss_epoch"] == 3.0


class DataModule:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)

    def train_dataloader(self) -> Any:
        return loader(classes(8))

    def val_dataloader(self) -> Any:
        return [loader(classes(5)), loader(classes(3))]

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")


def test_a_data_module_works_as_it_is() -> None:
    data = DataModule()
    result = quiet_trainer(max_epochs=1).fit(Net(), data=data)
    assert data.calls == ["prepare_data", "fit", "teardown fit"]
    assert {"val/0/loss", "val/1/loss"} <= set(result.metrics)
    with pytest.raises(DataError, match="data="):
        quiet_trainer(max_epochs=1).fit(Net(), data)
    with pytest.raises(DataError, match="Both data= and a train loader"):
        quiet_trainer(max_epochs=1).fit(Net(), loader(classes(8)), data=data)
    with pytest.raises(DataError, match="has none of"):
        quiet_trainer(max_epochs=1).fit(Net(), data=object())


def test_a_task_brings_its_own_loaders_and_hooks() -> None:
    class Own(Net):
        def setup(self, stage: str) -> None:
            self.stage_of_setup = stage

        def train_dataloader(self) -> Any:
            return loader(classes(8))

        def on_after_batch_to_device(self, batch: Any, stage: str) -> Any:
            return batch[0] * 0, batch[1]

        def on_fit_end(self, run: Any) -> None:
            self.ended = run.state.global_step

    task = Own()
    before = task.net[0].weight.detach().clone()
    quiet_trainer(max_epochs=1).fit(task)
    assert task.stage_of_setup == "fit" and task.ended == 2
    assert torch.equal(before, task.net[0].weight)  # inputs were zeros


def test_teardown_and_exception_hooks_run_once_and_the_task_is_free_again() -> None:
    events: list[str] = []

    class Watches(Callback):
        def on_exception(self, run: Any, exception: BaseException) -> None:
            events.append(type(exception).__name__)

        def on_fit_end(self, run: Any) -> None:
            events.append("end")

        def teardown(self, run: Any) -> None:
            events.append("teardown")

    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyboardInterrupt

    task = Breaks()
    with pytest.raises(KeyboardInterrupt):
        quiet_trainer(max_epochs=1, callbacks=[Watches()]).fit(task, loader(classes(8)))
    assert events == ["KeyboardInterrupt", "end", "teardown"]
    with pytest.raises(TaskError, match="in no run"):
        _ = task.run


def test_weights_round_trip_with_ties_and_mismatches_are_named(tmp_path: Path) -> None:
    class Tied(Net):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.again = nn.Linear(5, 7).double()
            self.again.weight = self.net[0].weight

    task, other = Tied(), Tied(1)
    path = task.save_weights(tmp_path / "weights.safetensors")
    assert other.load_weights(path) == []
    assert torch.equal(weights(task), weights(other)) and other.again.weight is other.net[0].weight
    with pytest.raises(DataError, match=r"not in the task: again\.bias"):
        Net().load_weights(path)
    skipped = Net().load_weights(path, strict=False)
    assert "again.bias" in skipped
    with pytest.raises(DataError, match="share no key"):
        Line().load_weights(path, strict=False)
    (tmp_path / "cut").write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        task.load_weights(tmp_path / "cut")


def test_hyperparameters_are_found_without_effort() -> None:
    class Many(Net):
        def __init__(self, a: int, *rest: int, b: Any = (1, [2]), model: Any = None, **others: Any) -> None:
            super().__init__()
            b = "changed"  # noqa: F841 - what was given counts, not what became of it
            self.save_hyperparameters()

    class Less(Net):
        def __init__(self, a: int, b: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="a")

    assert Many(1, 5, model=nn.ReLU(), c=Path("x")).hparams == {"a": 1, "rest": (5,), "b": (1, [2]), "c": Path("x")}
    task = Less(1)
    assert task.hparams == {"b": 2} and task.hparams.b == 2 and copy.deepcopy(task).hparams.b == 2
    with pytest.raises(AttributeError, match="no hyper-parameter 'lr'; there are b"):
        print(task.hparams.lr)

    class Child(Less):
        def __init__(self) -> None:
            super().__init__(3)

    assert Child().hparams == {}


def test_a_compiled_task_keeps_its_keys_and_learns_the_same() -> None:
    task, plain = Net(), Net()
    quiet_trainer(max_epochs=1, compile="eager").fit(task, loader(classes(8)))
    quiet_trainer(max_epochs=1).fit(plain, loader(classes(8)))
    assert list(task.state_dict()) == list(plain.state_dict())
    assert torch.equal(weights(task), weights(plain))


def test_channels_last_reaches_the_images() -> None:
    class Looks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert batch[0].is_contiguous(memory_format=torch.channels_last)
            return self.net(batch[0].flatten(1)[:, :5].double()).sum()

    images = [(torch.randn(3, 4, 4), 0) for _ in range(8)]
    quiet_trainer(max_epochs=1, channels_last=True).fit(Looks(), loader(images))


def test_the_launchers_word_holds_where_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")

    class Looks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.precision = self.run.devices.mixed_precision
            return super().training_step(batch, batch_idx)

    task = Looks()
    assert quiet_trainer(max_epochs=1).fit(task, loader(classes(16))).global_step == 2
    assert task.precision == "bf16"
    assert (
        quiet_trainer(max_epochs=1, gradient_accumulation_steps=1, mixed_precision="no")
        .fit(task, loader(classes(16)))
        .global_step
        == 4
    )
    assert task.precision == "no"
