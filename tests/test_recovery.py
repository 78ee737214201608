"""Out of memory in one process: a batch that does not fit runs in pieces and computes the same."""

from __future__ import annotations

import gc
import json
import random
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from sanctuary_trainer import (
    Callback,
    DataError,
    FitResult,
    NotSupportedError,
    OutOfMemoryError,
    Run,
    SettingsError,
    TaskError,
    VisionTask,
)
from sanctuary_trainer.callbacks import Checkpoint, OOMFallback
from tests.bombs import Bombed, bombed_loader
from tests.small_tasks import Net, classes, loader, quiet_trainer, weights

Arm = Callable[[Bombed], None]


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    """Every failure collects garbage: what earlier tests left behind would be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


MEMORY = ("memory/oom_events", "memory/piece_size")


def fit(
    tmp_path: Path,
    arm: Arm | None = None,
    *,
    samples: int = 48,
    batch_size: int = 16,
    fallback: OOMFallback | None = None,
    callbacks: list[Callback] | None = None,
    task: dict[str, Any] | None = None,
    val: Any = None,
    **settings: Any,
) -> tuple[Bombed, FitResult]:
    """A fit of one epoch, with the fallback where bombs are armed."""
    torch.manual_seed(0)
    bombed = Bombed(**(task or {}))
    given = list(callbacks or [])
    if arm is not None:
        arm(bombed)
        given.append(fallback or OOMFallback())
    defaults: dict[str, Any] = {"max_epochs": 1, "seed": 3, "log_every_n_steps": 1, "project_dir": tmp_path}
    trainer = quiet_trainer(**(defaults | settings), callbacks=given)
    return bombed, trainer.fit(bombed, bombed_loader(samples, batch_size), val)


def assert_same(one: tuple[Bombed, FitResult], other: tuple[Bombed, FitResult]) -> None:
    """Weights to 1e-12, and every logged value but those of memory and speed."""
    assert torch.allclose(weights(one[0]), weights(other[0]), rtol=0, atol=1e-12)
    assert one[1].global_step == other[1].global_step
    for name in other[1].metrics:
        if name not in MEMORY and "second" not in name:
            assert one[1].metrics[name] == pytest.approx(other[1].metrics[name], abs=1e-12), name


@pytest.mark.parametrize("above", [8, 2, 1])
@pytest.mark.parametrize("bomb", [0, 2, -1])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_batch_in_pieces_is_the_whole_batch(
    tmp_path: Path, where: Any, bomb: int, above: int, accumulation: int
) -> None:
    settings: dict[str, Any] = {"task": {"dropout": 0.3}, "gradient_accumulation_steps": accumulation}
    found = fit(tmp_path, lambda task: task.bombs[bomb].arm(where, above, batch_idxs=(1,)), **settings)
    assert_same(found, fit(tmp_path, **settings))
    [event] = found[1].oom_events
    assert (event.stage, event.phase, event.tried, event.piece_size) == ("train", where, 16, above)
    assert (event.rank, event.step, event.remedy) == (0, 1 if accumulation == 1 else 0, "pieces")
    assert event.reason.startswith("OutOfMemoryError: CUDA out of memory")


@pytest.mark.parametrize("kind", ["unused", "frozen", "tied", "shared", "weighted", "ln"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_all_kinds_of_parameters_and_losses_are_as_if_unsplit(tmp_path: Path, kind: str, where: Any) -> None:
    task: dict[str, Any] = {"norm": "ln"} if kind == "ln" else {kind: True}
    found = fit(tmp_path, lambda task: task.bombs[2].arm(where, 3, batch_idxs=(1, 2)), task=task)
    assert_same(found, fit(tmp_path, task=task))


@pytest.mark.parametrize(("batch_size", "sizes"), [(8, [2, 2, 2, 2]), (7, [2, 2, 2, 1])])
def test_pieces_are_weighed_by_their_samples(tmp_path: Path, batch_size: int, sizes: list[int]) -> None:
    found = fit(tmp_path, lambda task: task.bombs[3].arm("forward", 2), samples=batch_size, batch_size=batch_size)
    assert_same(found, fit(tmp_path, samples=batch_size, batch_size=batch_size))
    assert [a.size for a in found[0].bombs[3].attempts if a.where == "forward" and not a.fired] == sizes


class Sees(Callback):
    """Keeps what the hooks of a batch got."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.losses: list[float] = []
        self.starts = 0

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        self.starts += 1

    def on_train_batch_end(self, run: Run, batch: Any, batch_idx: int, loss: Any) -> None:
        self.batches.append(batch[0].tolist())
        self.losses.append(float(loss))
        assert run.batch_samples == len(batch[0])


def test_pieces_are_of_the_original_batch_and_hooks_see_that_batch_once(tmp_path: Path) -> None:
    sees, plain = Sees(), Sees()
    task, _ = fit(tmp_path, lambda task: task.bombs[1].arm("forward", 2), samples=16, callbacks=[sees])
    successes = [a for a in task.bombs[1].attempts if a.where == "forward" and not a.fired]
    assert [a.size for a in successes] == [2] * 8
    assert sorted(number for a in successes for number in a.ids) == list(range(16))
    assert [a.size for a in task.bombs[1].attempts if a.fired] == [16, 8, 4]
    fit(tmp_path, samples=16, callbacks=[plain])
    assert sees.batches == plain.batches and sees.starts == 1
    assert sees.losses == pytest.approx(plain.losses, abs=1e-12)


class Counts(Callback):
    """The samples that the metric of training has counted, before it is computed and reset."""

    def on_train_step_end(self, run: Run) -> None:
        metric: Any = run.task.accuracy
        self.samples = int((metric.tp + metric.fn).sum())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_metrics_and_records_count_each_sample_once(tmp_path: Path, where: Any) -> None:
    counts = Counts()
    found = fit(tmp_path, lambda task: task.bombs[-1].arm(where, 5, batch_idxs=(1,)), callbacks=[counts])
    assert counts.samples == 48
    plain = fit(tmp_path)
    assert found[1].metrics["train/accuracy"] == plain[1].metrics["train/accuracy"]
    assert found[1].metrics["train/first_feature_epoch"] == pytest.approx(
        plain[1].metrics["train/first_feature_epoch"], abs=1e-12
    )


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_sample_that_does_not_fit_ends_with_an_error_that_helps(tmp_path: Path, where: Any) -> None:
    armed: list[Bombed] = []

    def arm(task: Bombed) -> None:
        armed.append(task)
        task.bombs[0].arm(where, 0)

    with pytest.raises(OutOfMemoryError, match=r"piece of 1 sample.*Peak: .*GradientCheckpointing.*bf16.*smaller") as e:
        fit(tmp_path, arm)
    assert isinstance(e.value.__cause__, torch.OutOfMemoryError)
    assert "A bomb went off" in "".join(traceback.format_exception(e.value))
    tries = [a.size for a in armed[0].bombs[0].attempts if a.fired]
    assert tries == [16, 8, 4, 2, 1]


def test_what_is_known_of_a_shape_is_used_from_the_start(tmp_path: Path) -> None:
    task, result = fit(tmp_path, lambda task: task.bombs[2].arm("forward", 4), max_epochs=2)
    assert [a.size for a in task.bombs[2].attempts if a.fired] == [16, 8]
    assert len(result.oom_events) == 1
    assert result.metrics["memory/piece_size"] == 4


def test_piece_size_is_where_it_begins(tmp_path: Path) -> None:
    found = fit(tmp_path, lambda task: None, fallback=OOMFallback(piece_size=5))
    assert_same(found, fit(tmp_path))
    assert [a.size for a in found[0].bombs[0].attempts if a.where == "forward"] == [4, 4, 4, 4] * 3
    assert found[1].oom_events == ()


def test_events_and_sizes_come_to_the_trackers_once(tmp_path: Path) -> None:
    _, result = fit(tmp_path, lambda task: task.bombs[2].arm("forward", 4, steps=(1, 2)), log_with="tensorboard")
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    events = {line["step"]: line["memory/oom_events"] for line in lines if "memory/oom_events" in line}
    sizes = {line["step"]: line["memory/piece_size"] for line in lines if "memory/piece_size" in line}
    assert events == {2: 1.0}
    assert sizes == {2: 4.0, 3: 4.0}


class Draws(Net):
    """Draws from every generator, in each step as many numbers as there are samples or one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float, float]] = []
        self.fails = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((random.random(), float(np.random.normal()), random.gauss(0, 1)))
        rows = torch.rand(len(batch[0]), 1, dtype=torch.float64)
        if self.fails and len(batch[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return super().training_step([batch[0] * rows, batch[1]], batch_idx)


def test_generators_stand_as_if_the_batch_had_been_whole(tmp_path: Path) -> None:
    ends = []
    for fails, callbacks in ((False, []), (False, [OOMFallback()]), (True, [OOMFallback()])):
        torch.manual_seed(0)
        task = Draws()
        task.fails = fails
        np.random.seed(5)
        random.seed(5)
        quiet_trainer(max_epochs=1, seed=1, callbacks=callbacks).fit(task, loader(classes(24), 8))
        drawn = (random.random(), np.random.normal(), np.random.random(), torch.rand(1).item(), random.gauss(0, 1))
        ends.append((drawn, weights(task)))
        assert len(set(task.seen)) == 3  # the pieces of a batch drew what the batch drew
    assert ends[0][0] == ends[1][0] == ends[2][0]
    assert torch.equal(ends[0][1], ends[1][1])
    assert torch.allclose(ends[0][1], ends[2][1], rtol=0, atol=1e-12)


class Holds(Net):
    """Holds a large tensor in the frame that fails, and in its error's frame in a cycle."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.held: list[weakref.ref[Any]] = []
        self.alive: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.alive.append(any(ref() is not None for ref in self.held))
        large = torch.ones(1000, requires_grad=True)
        activation = large * 2
        self.held += [weakref.ref(large), weakref.ref(activation)]
        if self.where == "backward":
            loss = super().training_step(batch, batch_idx) + 0 * activation.sum()
            loss.register_hook(partial(self.fail, len(batch[0])))
            return loss
        try:
            self.fail(len(batch[0]), None)
        except torch.OutOfMemoryError as error:
            kept = error  # the frame holds the error, whose traceback holds the frame
            assert kept is not None
            raise
        return super().training_step(batch, batch_idx)

    def fail(self, samples: int, gradient: Any) -> None:
        if samples > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_failed_attempt_is_gone_before_the_next_begins(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.collect", lambda *_: 0)
    gc.disable()
    try:
        task = Holds(where)
        quiet_trainer(max_steps=1, callbacks=[OOMFallback()]).fit(task, loader(classes(8), 8))
    finally:
        gc.enable()
    assert task.alive == [False] * len(task.alive) and len(task.alive) > 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_batch_norm_keeps_no_trace_of_the_failed_attempt_and_is_warned_of(tmp_path: Path, where: Any) -> None:
    def arm(task: Bombed) -> None:
        task.bombs[-1].arm(where, 4)

    with pytest.warns(UserWarning, match=r"layers\.0\.1.*normalises by the piece") as warned:
        task, _ = fit(tmp_path, arm, task={"norm": "bn"}, samples=8, batch_size=8)
    assert len(warned) == 1
    norm = task.layers[0][1]  # type: ignore[index]
    assert norm.num_batches_tracked == 2  # of the two pieces of 4, and not of the attempt
    torch.manual_seed(0)
    by_hand = Bombed(norm="bn")
    for _, features, _ in bombed_loader(8, 4):
        by_hand(features)
    assert torch.equal(norm.running_mean, by_hand.layers[0][1].running_mean)  # type: ignore[index]


def test_an_asleep_backbone_stays_asleep_through_everything(tmp_path: Path) -> None:
    task = Bombed(norm="bn")
    for part in task.layers[:3]:
        part.requires_grad_(False).eval()
    before = {name: value.clone() for name, value in task.layers[:3].state_dict().items()}
    head_modes = []
    task.head.register_forward_hook(lambda module, *_: head_modes.append(module.training))
    task.bombs[-1].arm("backward", 4, batch_idxs=(1,))
    trainer = quiet_trainer(max_epochs=2, callbacks=[OOMFallback(), Checkpoint()], project_dir=tmp_path)
    with pytest.warns(UserWarning, match=r"layers\.3\.1"):
        trainer.fit(task, bombed_loader(16), bombed_loader(16))
    trainer.predict(task, bombed_loader(8))
    assert not any(module.training for part in task.layers[:3] for module in part.modules())
    assert all(torch.equal(before[name], value) for name, value in task.layers[:3].state_dict().items())
    assert head_modes.count(True) >= 4 and head_modes.count(False) >= 4


@pytest.mark.parametrize("stage", ["val", "test", "predict"])
def test_evaluation_and_prediction_split_by_themselves(tmp_path: Path, stage: str) -> None:
    def results(armed: bool) -> Any:
        torch.manual_seed(0)
        task = Bombed()
        if armed:
            task.bombs[2].arm("forward", 3, stages=(stage,))
        trainer = quiet_trainer(callbacks=[OOMFallback()] if armed else [])
        if stage == "predict":
            return torch.stack(trainer.predict(task, bombed_loader(21)))  # type: ignore[arg-type]
        verb = trainer.validate if stage == "val" else trainer.test
        return verb(task, bombed_loader(21))

    found, expected = results(True), results(False)
    if stage == "predict":
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    else:
        assert found == pytest.approx(expected, abs=1e-12)
        assert found[f"{stage}/accuracy"] == expected[f"{stage}/accuracy"]


def test_a_validation_that_runs_out_changes_nothing_of_training(tmp_path: Path) -> None:
    def arm(task: Bombed) -> None:
        task.bombs[2].arm("forward", 3, stages=("val",))

    val = bombed_loader(21)
    found, plain = fit(tmp_path, arm, val=val, max_epochs=2), fit(tmp_path, val=val, max_epochs=2)
    assert torch.equal(weights(found[0]), weights(plain[0]))
    assert found[1].metrics["val/accuracy"] == plain[1].metrics["val/accuracy"]
    assert found[1].metrics["val/loss"] == pytest.approx(plain[1].metrics["val/loss"], abs=1e-12)
    assert {a.size for a in found[0].bombs[2].attempts if a.stage == "train"} == {16}
    assert [(event.stage, event.tried, event.piece_size) for event in found[1].oom_events] == [("val", 8, 2)]


class Outputs(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, Any]] = []

    def on_evaluation_batch_end(self, run: Run, stage: str, batch: Any, outputs: Any, sample_indices: Any) -> None:
        self.seen.append((len(batch[0]), outputs))


class ReturnsOutputs(Bombed):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.arrive(batch[0], batch_idx)
        logits = self(batch[1])
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, batch[2]), "ids": batch[0].tolist()}


def test_hooks_of_evaluation_see_the_whole_batch_with_its_outputs() -> None:
    seen = []
    for above in (100, 3):
        torch.manual_seed(0)
        task, outputs = ReturnsOutputs(), Outputs()
        task.bombs[0].arm("forward", above, stages=("val",))
        quiet_trainer(callbacks=[OOMFallback(), outputs]).validate(task, bombed_loader(13))
        seen.append(outputs.seen)
    whole, pieces = seen
    assert [size for size, _ in pieces] == [size for size, _ in whole] == [8, 5]
    for (_, one), (_, other) in zip(pieces, whole, strict=True):
        assert one["ids"] == other["ids"]
        assert torch.allclose(one["logits"], other["logits"], rtol=0, atol=1e-12)
        assert torch.allclose(one["loss"], other["loss"], rtol=0, atol=1e-12)


def test_a_resumed_run_begins_with_what_was_known_and_ends_bit_for_bit_alike(tmp_path: Path) -> None:
    def arm(task: Bombed) -> None:
        task.bombs[2].arm("backward", 3, steps=(1,))  # once: what is known afterwards comes from memory alone

    def run(name: str, resume: Any = None, **settings: Any) -> tuple[Bombed, FitResult]:
        torch.manual_seed(0)
        task = Bombed(dropout=0.2)
        arm(task)
        callbacks = [OOMFallback(), Checkpoint(every_n_steps=1, save_top_k=-1)]
        trainer = quiet_trainer(
            **{
                "max_steps": 5,
                "seed": 3,
                "project_dir": tmp_path,
                "run_name": name,
                "log_every_n_steps": 1,
                **settings,
            },
            log_with="tensorboard",
            callbacks=callbacks,
        )
        return task, trainer.fit(task, bombed_loader(80, 16), resume=resume)

    straight = run("straight")
    run("cut", max_steps=3)
    cut = run("cut", resume="auto")
    assert torch.equal(weights(cut[0]), weights(straight[0]))
    assert {a.size for a in cut[0].bombs[2].attempts} == {2}
    assert cut[1].oom_events == straight[1].oom_events != ()
    lines = [(result.run_dir / "metrics.jsonl").read_text() for _, result in (straight, cut)]
    curves = [
        [{k: v for k, v in json.loads(x).items() if "second" not in k and k != "time"} for x in text.splitlines()]
        for text in lines
    ]
    assert curves[0] == curves[1]


class Unsplittable(Net):
    """Takes one tensor that holds no samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_batch_that_cannot_be_split_names_split_batch(tmp_path: Path) -> None:
    class Odd(Unsplittable):
        def batch_size(self, batch: Any) -> int | None:
            return 4

        def split_batch(self, batch: Any, sizes: Any) -> list[Any]:
            raise DataError("no.")

    class Few(Odd):
        def split_batch(self, batch: Any, sizes: Any) -> list[Any]:
            return [batch]

    class Unknown(Unsplittable):
        def batch_size(self, batch: Any) -> int | None:
            return None

    data = DataLoader([object()], batch_size=None)  # type: ignore[arg-type]
    for kind, text in ((Odd, "split_batch"), (Few, "split_batch returned 1"), (Unknown, "batch_size and split_batch")):
        with pytest.raises(DataError, match=text):
            quiet_trainer(max_steps=1, callbacks=[OOMFallback()]).fit(kind(), data)


def test_an_error_that_is_no_lack_of_memory_is_raised_at_once(tmp_path: Path) -> None:
    armed: list[Bombed] = []

    def arm(task: Bombed) -> None:
        armed.append(task)
        task.bombs[0].arm("forward", 2, error=lambda: RuntimeError("shape mismatch"))

    with pytest.raises(RuntimeError, match="shape mismatch"):
        fit(tmp_path, arm)
    assert len(armed[0].bombs[0].attempts) == 1


class Hooked(Bombed):
    """Clips each gradient of the first layer in a hook, which is no linear thing."""

    def setup(self, stage: str) -> None:
        self.calls: list[int] = []
        weight = self.layers[0][0].weight  # type: ignore[index]
        weight.register_hook(lambda gradient: self.calls.append(1) or gradient.clamp(-1e-3, 1e-3))


def test_a_hook_on_a_gradient_sees_the_batchs_once_after_a_backward_that_broke_off(tmp_path: Path) -> None:
    found = []
    for above in (100, 3):
        torch.manual_seed(0)
        task = Hooked()
        task.bombs[1].arm("backward", above)
        quiet_trainer(max_steps=1, callbacks=[OOMFallback()], seed=1).fit(task, bombed_loader(8))
        found.append(task)
    assert len(found[1].calls) == len(found[0].calls) == 1
    assert torch.allclose(weights(found[0]), weights(found[1]), rtol=0, atol=1e-12)


def test_sizes_are_kept_by_shape_and_larger_samples_begin_with_what_smaller_ones_could(tmp_path: Path) -> None:
    class Sizes(VisionTask):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
            self.tries: list[tuple[int, ...]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.tries.append(tuple(batch.shape))
            if batch.numel() > 64:
                raise MemoryError
            return (self.w * batch.double()).mean()

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    task = Sizes()
    batches = [torch.ones(8, 16), torch.ones(8, 4), torch.ones(8, 16), torch.ones(8, 32)]
    quiet_trainer(max_epochs=1, callbacks=[OOMFallback()]).fit(task, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert task.tries == [
        *[(8, 16), (4, 16), (4, 16)],
        (8, 4),
        *[(4, 16)] * 2,
        *[(4, 32), *[(2, 32)] * 4],
    ]


@pytest.mark.parametrize(
    "settings",
    [{"piece_size": 0}, {"piece_size": True}, {"piece_size": 1.5}, {"ladder": ()}, {"ladder": ("pieces", "pieces")}],
)
def test_wrong_settings_are_refused(settings: Any) -> None:
    with pytest.raises(SettingsError, match="OOMFallback got"):
        OOMFallback(**settings)


def test_wrong_remedies_are_refused_with_those_that_are_there() -> None:
    with pytest.raises(SettingsError, match="'pieces' and 'checkpointing'"):
        OOMFallback(ladder=("peaces",))


def test_reentrant_checkpointing_is_refused_before_the_run() -> None:
    class Model(nn.Linear):
        gradient_checkpointing = True

        class _gradient_checkpointing_func:
            keywords = {"use_reentrant": True}

    task = Net()
    task.add_module("model", Model(2, 2))
    with pytest.raises(NotSupportedError, match="reentrant checkpointing \\(model\\)"):
        quiet_trainer(max_steps=1, callbacks=[OOMFallback()]).fit(task, loader(classes(8), 4))


def test_the_ladder_switches_checkpointing_on_before_it_splits(tmp_path: Path) -> None:
    def arm(task: Bombed) -> None:
        task.bombs[2].arm("backward", 8, batch_idxs=(1,), times=1)

    settings: dict[str, Any] = {"task": {"dropout": 0.3}}
    ladder = OOMFallback(ladder=("checkpointing", "pieces"))
    task, result = found = fit(tmp_path, arm, fallback=ladder, **settings)
    assert_same(found, fit(tmp_path, **settings))
    [event] = result.oom_events
    assert (event.remedy, event.tried, event.piece_size) == ("checkpointing", 16, 16)
    assert not any("forward" in vars(module) for module in task.modules())  # undone at the end


def test_the_ladder_splits_where_checkpointing_is_not_enough(tmp_path: Path) -> None:
    found = fit(
        tmp_path,
        lambda task: task.bombs[2].arm("forward", 4, batch_idxs=(1,)),
        fallback=OOMFallback(ladder=("checkpointing", "pieces")),
    )
    assert_same(found, fit(tmp_path))
    [event] = found[1].oom_events
    assert (event.remedy, event.piece_size) == ("checkpointing and pieces", 4)


def test_a_ladder_with_nothing_to_checkpoint_is_refused_before_the_run() -> None:
    with pytest.raises(TaskError, match="finds nothing in Net"):
        quiet_trainer(max_steps=1, callbacks=[OOMFallback(ladder=("checkpointing",))]).fit(Net(), loader(classes(8), 4))


def test_a_ladder_cannot_change_compiled_modules() -> None:
    with pytest.raises(NotSupportedError, match="compile"):
        quiet_trainer(max_steps=1, compile=True, callbacks=[OOMFallback(ladder=("checkpointing",))]).fit(
            Bombed(), bombed_loader(8)
        )


class Shows(Bombed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_image("inputs", batch[1].reshape(1, 1, len(batch[0]), -1).sigmoid())
        return super().training_step(batch, batch_idx)


def test_images_of_a_batch_in_pieces_are_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sanctuary_trainer.tracking import Tracking

    shown: list[int] = []
    monkeypatch.setattr(Tracking, "log_images", lambda self, name, images, step, later=False: shown.append(step))
    task = Shows()
    task.bombs[2].arm("forward", 2)
    quiet_trainer(max_steps=3, callbacks=[OOMFallback()], project_dir=tmp_path).fit(task, bombed_loader(24))
    assert shown == [0, 1, 2]


class Schedules(Bombed):
    """Begins to drop late, as stochastic depth on a schedule does; or leaves batches out."""

    def __init__(self, kind: str) -> None:
        super().__init__(dropout=0.3)
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.kind == "late":
            for layer in self.layers:
                layer[3].p = 0.3 if batch_idx > 1 else 0.0  # type: ignore[index]
        if self.kind == "none" and batch_idx == 1:
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", ["late", "none"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_begins_to_be_drawn_late_is_the_whole_batchs_too(tmp_path: Path, kind: str, where: Any) -> None:
    found = []
    for above in (100, 3):
        torch.manual_seed(0)
        task = Schedules(kind)
        task.bombs[2].arm(where, above)
        quiet_trainer(max_epochs=1, seed=1, callbacks=[OOMFallback()]).fit(task, bombed_loader(40))
        found.append(weights(task))
    assert torch.allclose(*found, rtol=0, atol=1e-12)


class Masked(Bombed):
    """Half of the samples have no label: some pieces weigh nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, features, labels = batch
        self.arrive(ids, batch_idx)
        known = (ids % 8 >= 4).double()
        each = nn.functional.cross_entropy(self(features), labels, reduction="none")
        return {"loss": (each * known).sum() / known.sum(), "weight": known.sum()}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_pieces_that_weigh_nothing_are_left_out(where: Any) -> None:
    found = []
    for above in (100, 4, 1):
        torch.manual_seed(0)
        task = Masked()
        task.bombs[2].arm(where, above)
        quiet_trainer(max_epochs=1, callbacks=[OOMFallback()]).fit(task, bombed_loader(24))
        found.append(weights(task))
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-12)
    assert torch.allclose(found[0], found[2], rtol=0, atol=1e-12)


class AsksForInputs(Bombed):
    """Backward goes on to the inputs when every parameter has its gradient, and runs out there."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, features, labels = batch
        self.arrive(ids, batch_idx)
        return nn.functional.cross_entropy(self(self.bombs[-1](features.requires_grad_())), labels)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            features = layer(features)
        logits: torch.Tensor = self.head(features)
        return logits


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_backward_that_runs_out_behind_the_last_parameter_is_complete(accumulation: int) -> None:
    found = []
    for above in (100, 3):
        torch.manual_seed(0)
        task = AsksForInputs()
        task.bombs[-1].arm("backward", above)
        trainer = quiet_trainer(max_epochs=1, gradient_accumulation_steps=accumulation, callbacks=[OOMFallback()])
        trainer.fit(task, bombed_loader(24))
        found.append(weights(task))
    assert torch.allclose(*found, rtol=0, atol=1e-12)


def test_one_callback_serves_many_runs_also_after_one_that_failed(tmp_path: Path) -> None:
    fallback = OOMFallback(ladder=("checkpointing", "pieces"))
    with pytest.raises(OutOfMemoryError):
        fit(tmp_path, lambda task: task.bombs[1].arm("forward", 0), fallback=fallback)
    found = fit(tmp_path, lambda task: task.bombs[1].arm("forward", 4), fallback=fallback)
    assert_same(found, fit(tmp_path))
    assert len(found[1].oom_events) == 1
    task = found[0]
    assert quiet_trainer(callbacks=[fallback]).validate(task, bombed_loader(16)).keys() == {"val/accuracy", "val/loss"}
    assert_same(fit(tmp_path, lambda task: None, fallback=fallback), fit(tmp_path))


def test_an_error_before_its_setup_is_the_one_that_is_seen() -> None:
    class Fails(Callback):
        def setup(self, run: Run) -> None:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        quiet_trainer(max_steps=1, callbacks=[Fails(), OOMFallback()]).fit(Bombed(), bombed_loader(8))


def test_nothing_of_a_run_outlives_it() -> None:
    seen: list[weakref.ref[Any]] = []

    class Looks(Callback):
        def on_train_step_end(self, run: Run) -> None:
            gradients = [parameter.grad for parameter in run.task.parameters()]
            assert gradients == [None] * len(gradients)
            assert run.executor is not None
            seen.append(weakref.ref(run.executor))

    gc.collect()
    gc.disable()
    try:
        task = Bombed()
        task.bombs[2].arm("backward", 4)
        quiet_trainer(max_steps=2, callbacks=[OOMFallback(), Looks()]).fit(task, bombed_loader(16))
        assert seen[0]() is None
    finally:
        gc.enable()


class Large(torch.optim.SGD):
    """Runs out in its step, before or after it moved something, so many times."""

    def __init__(self, *args: Any, fails: list[int], moves: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.fails, self.moves, self.calls = fails, moves, 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls in self.fails:
            if self.moves:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(1)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().step(closure)


class WithLarge(Bombed):
    def __init__(self, fails: list[int], moves: bool = False) -> None:
        super().__init__()
        self.fails, self.moves = fails, moves

    def configure_optimizers(self) -> Any:
        return Large(self.parameters(), lr=0.1, momentum=0.9, fails=self.fails, moves=self.moves)


@pytest.mark.parametrize("moves", [False, True])
def test_an_optimizers_first_step_that_does_not_fit_is_made_again(moves: bool) -> None:
    found = []
    for fails in ([], [1]):
        torch.manual_seed(0)
        task = WithLarge(fails, moves)
        result = quiet_trainer(max_steps=3, callbacks=[OOMFallback()]).fit(task, bombed_loader(24))
        found.append(weights(task))
    assert torch.equal(*found)
    [event] = result.oom_events
    assert (event.phase, event.step, event.remedy) == ("optimizer", 0, "a second try")


def test_a_later_step_of_an_optimizer_that_does_not_fit_ends_the_run_with_its_last_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    callbacks = [OOMFallback(), Checkpoint(every_n_steps=1)]
    trainer = quiet_trainer(max_steps=3, callbacks=callbacks, project_dir=tmp_path, run_name="one", seed=2)
    with pytest.raises(OutOfMemoryError, match=r"half updated.*resume=") as caught:
        trainer.fit(WithLarge([2], moves=True), bombed_loader(24))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    task, whole = WithLarge([]), WithLarge([])
    trainer.fit(task, bombed_loader(24), resume="last")
    torch.manual_seed(0)
    whole = WithLarge([])
    quiet_trainer(max_steps=3, seed=2).fit(whole, bombed_loader(24))
    assert torch.equal(weights(task), weights(whole))


class ReturnsCounts(Bombed):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.arrive(batch[0], batch_idx)
        self(batch[1])
        return {"n": len(batch[0])}


def test_outputs_that_cannot_be_joined_are_none_and_warned_of_once() -> None:
    task, outputs = ReturnsCounts(), Outputs()
    task.bombs[0].arm("forward", 3, stages=("val",))
    with pytest.warns(UserWarning, match="get None for its outputs.*whole numbers") as warned:
        quiet_trainer(callbacks=[OOMFallback(), outputs]).validate(task, bombed_loader(16))
    assert len(warned) == 1
    assert outputs.seen == [(8, None), (8, None)]


class Reentrant(Bombed):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().forward, features.requires_grad_(), use_reentrant=True)  # type: ignore[no-any-return]


def test_reentrant_checkpointing_of_the_tasks_own_is_refused_when_it_matters() -> None:
    task = Reentrant()
    task.bombs[2].arm("backward", 4)
    with pytest.raises(NotSupportedError, match="use_reentrant=False"):
        quiet_trainer(max_steps=1, callbacks=[OOMFallback()]).fit(task, bombed_loader(8))


def test_pieces_are_as_equal_as_can_be() -> None:
    """So that no piece of one sample is left over, which batch norm could not bear."""
    task = Bombed(norm="bn")
    task.bombs[2].arm("forward", 4)
    with pytest.warns(UserWarning, match="normalises by the piece"):
        quiet_trainer(max_steps=1, callbacks=[OOMFallback()]).fit(task, bombed_loader(9, 9))
    assert [a.size for a in task.bombs[2].attempts if a.where == "forward" and not a.fired] == [3, 2, 2, 2]


def test_an_error_in_a_piece_says_that_it_was_one() -> None:
    task = Bombed(norm="bn")
    task.bombs[2].arm("forward", 2)
    several = pytest.raises(ValueError, match="more than 1 value per channel")
    with several as caught, pytest.warns(UserWarning, match="normalises by the piece"):
        quiet_trainer(max_steps=1, callbacks=[OOMFallback()]).fit(task, bombed_loader(7, 7))
    assert caught.value.__notes__[-1] == "In a piece of 1 of a batch of 7, cut by OOMFallback."


class Scales(Callback):
    """Wraps run.execute as the fallback does."""

    def on_fit_start(self, run: Run) -> None:
        inner = run.execute
        run.execute = lambda batch, *rest, **told: inner([batch[0], batch[1] * 3, batch[2]], *rest, **told)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("first", [True, False])
def test_other_callbacks_may_wrap_execute_too(where: Any, first: bool) -> None:
    found = []
    for above in (100, 3):
        torch.manual_seed(0)
        task = Bombed()
        task.bombs[2].arm(where, above)
        callbacks = [Scales(), OOMFallback()] if first else [OOMFallback(), Scales()]
        quiet_trainer(max_epochs=1, callbacks=callbacks).fit(task, bombed_loader(24))
        found.append(weights(task))
    assert torch.allclose(*found, rtol=0, atol=1e-12)


def test_buffers_of_every_kind_are_borne(tmp_path: Path) -> None:
    class Buffers(Bombed):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("expanded", torch.zeros(1).expand(6))
            self.register_buffer("none", None)
            self.register_buffer("moves", torch.zeros(2))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                self.scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(6, dtype=torch.float64)))
            self.lazy = nn.LazyBatchNorm1d(dtype=torch.float64)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.lazy(self.scripted(batch[1]))
            self.get_buffer("moves").data.add_(1)  # past its version
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.layers.parameters(), lr=0.1)

    task = Buffers()
    task.bombs[2].arm("forward", 4, times=1)
    with pytest.warns(UserWarning, match="each piece changes buffers"):
        quiet_trainer(max_steps=2, callbacks=[OOMFallback()]).fit(task, bombed_loader(16))
    assert task.get_buffer("moves").tolist() == [4.0, 4.0]  # two pieces in each of two steps
    assert task.scripted[0].num_batches_tracked == 4


class Draws1(Net):
    """Draws one number for the whole batch, and one for each sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = torch.rand(1, dtype=torch.float64)
        rows = torch.rand(len(batch[0]), 1, dtype=torch.float64)
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step([batch[0] * rows * scale, batch[1]], batch_idx)

    most = 100


def test_one_number_for_the_batch_is_told_from_one_for_each_sample_by_the_sizes_that_were_tried() -> None:
    found = []
    for most in (100, 1):
        torch.manual_seed(0)
        task = Draws1()
        task.most = most
        quiet_trainer(max_epochs=1, seed=1, callbacks=[OOMFallback()]).fit(task, loader(classes(24), 8))
        found.append(weights(task))
    assert torch.allclose(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["list", "padded"])
def test_predictions_of_every_shape_come_back_from_pieces(kind: str) -> None:
    class Predicts(Bombed):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            ids = batch[0]
            self.arrive(ids, batch_idx)
            self(batch[1])
            if kind == "list":  # one tensor of as many numbers as a piece has samples
                return [torch.full((2,), float(number)) for number in ids]
            return torch.full((len(ids), int(ids.max()) + 1), 1.0) * ids[:, None]  # as long as the longest

    found = []
    for above in (100, 2):
        task = Predicts()
        task.bombs[0].arm("forward", above, stages=("predict",))
        found.append(quiet_trainer(callbacks=[OOMFallback()]).predict(task, bombed_loader(8)))
    for one, other in zip(*found, strict=True):
        assert one[0] == other[0]


def test_an_event_after_the_last_point_of_the_curves_is_told_too(tmp_path: Path) -> None:
    _, result = fit(
        tmp_path, lambda task: task.bombs[2].arm("forward", 4, steps=(2,)), log_every_n_steps=2, log_with="tensorboard"
    )
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["memory/oom_events"]) for line in lines if "memory/oom_events" in line] == [(3, 1.0)]


@pytest.mark.parametrize(("piece_size", "forward"), [(None, 16), (9, 100), (6, 100)])
def test_a_piece_whose_backward_is_cut_twice_ends_where_it_ended(piece_size: int | None, forward: int) -> None:
    found = []
    for armed in (False, True):
        torch.manual_seed(0)
        task = Bombed()
        if armed:
            task.bombs[1].arm("forward", forward)
            task.bombs[4].arm("backward", 2)
        fallback = OOMFallback(piece_size if armed else None)
        quiet_trainer(max_steps=1, seed=1, callbacks=[fallback]).fit(task, bombed_loader(17, 17))
        found.append(weights(task))
    assert torch.allclose(*found, rtol=0, atol=1e-12)


class Twice(Callback):
    """Runs each batch twice, the second time changed."""

    def on_fit_start(self, run: Run) -> None:
        inner = run.execute

        def execute(batch: Any, batch_idx: int, size: int, sync: bool, **told: Any) -> Any:
            inner(batch, batch_idx, size, False)
            return inner([batch[0], batch[1] * 1.5, batch[2]], batch_idx, size, sync, **told)

        run.execute = execute


class Doubles(Callback):
    """Trains on each sample and a changed copy of it."""

    def on_fit_start(self, run: Run) -> None:
        inner = run.execute

        def execute(batch: Any, batch_idx: int, size: int, sync: bool, **told: Any) -> Any:
            both = [torch.cat([batch[0], batch[0]]), torch.cat([batch[1], -batch[1]]), torch.cat([batch[2], batch[2]])]
            return inner(both, batch_idx, 2 * size, sync, **told)

        run.execute = execute


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", [Twice, Doubles])
def test_callbacks_after_it_may_run_a_batch_twice_or_another_one(where: Any, kind: Any) -> None:
    found = []
    for above in (100, 3):
        torch.manual_seed(0)
        task = Bombed()
        task.bombs[2].arm(where, above)
        quiet_trainer(max_epochs=1, callbacks=[OOMFallback(), kind()]).fit(task, bombed_loader(24))
        found.append(weights(task))
    assert torch.allclose(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_callback_before_it_that_runs_a_batch_twice_is_refused_when_it_matters(where: Any) -> None:
    class FailsTheSecondTime(Twice):
        def on_fit_start(self, run: Run) -> None:
            execute = run.execute
            calls = []

            def counted(*arguments: Any, **told: Any) -> Any:
                calls.append(0)
                if len(calls) == 2:
                    run.task.bombs[2].arm(where, 3)  # type: ignore[index, operator, union-attr]
                return execute(*arguments, **told)

            run.execute = counted
            super().on_fit_start(run)

    with pytest.raises(NotSupportedError, match="List that callback after it"):
        quiet_trainer(max_epochs=1, callbacks=[FailsTheSecondTime(), OOMFallback()]).fit(Bombed(), bombed_loader(24))


def test_a_loader_that_counts_otherwise_than_its_batches_is_told_of() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    data = DataLoader([0], batch_size=1, collate_fn=lambda _: classes_batch())  # type: ignore[arg-type, var-annotated]
    with pytest.raises(DataError, match="by its loader it has 1 samples, and 16 were found in it"):
        quiet_trainer(max_steps=1, callbacks=[OOMFallback()]).fit(Fails(), data)


def classes_batch() -> Any:
    return next(iter(loader(classes(16), 16)))


def test_who_does_without_it_is_told_of_it() -> None:
    task = Bombed()
    task.bombs[2].arm("forward", 3)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet_trainer(max_steps=1).fit(task, bombed_loader(24))
    assert caught.value.__notes__ == ["callbacks=[OOMFallback()] lets a batch that does not fit go on in pieces."]


class Keeps(torch.optim.SGD):
    """Leaves its gradients as views of one tensor, as DDP's buckets are, whatever it is told."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        parameters = self.param_groups[0]["params"]
        bucket = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        for parameter, part in zip(parameters, bucket.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)


class WithViews(Bombed):
    def configure_optimizers(self) -> Any:
        return Keeps(self.parameters(), lr=0.1)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_that_are_views_of_one_tensor_are_told_apart_and_no_hook_stays(where: Any, dropout: float) -> None:
    found = []
    for above in (100, 3):
        torch.manual_seed(0)
        task = WithViews(dropout=dropout)
        task.bombs[2].arm(where, above)
        quiet_trainer(max_epochs=1, callbacks=[OOMFallback()]).fit(task, bombed_loader(24))
        assert not any(parameter._post_accumulate_grad_hooks for parameter in task.parameters())  # type: ignore[attr-defined]
        found.append(weights(task))
    assert torch.allclose(*found, rtol=0, atol=1e-12)
    task.bombs[2].arm(where, 0, error=lambda: ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        quiet_trainer(max_epochs=1, callbacks=[OOMFallback(piece_size=2)]).fit(task, bombed_loader(24))
    assert not any(parameter._post_accumulate_grad_hooks for parameter in task.parameters())  # type: ignore[attr-defined]
