"""Gradient checkpointing: the same numbers as without it, less kept for backward, and nothing of it left afterwards."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sanctuary_trainer import Callback, SettingsError, TaskError, VisionTask
from sanctuary_trainer.callbacks import EMA, Checkpoint, GradientCheckpointing
from tests.small_tasks import loader, quiet_trainer

Tensors = dict[str, Tensor]


class Block(nn.Module):
    """Two layers on 6 features, beside which the input passes; counts how often its forward is run."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 6)
        self.norm: nn.Module = nn.BatchNorm1d(12) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.runs = 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.runs += 1
        inner = self.dropout(torch.tanh(self.norm(self.first(x))))
        return x + self.second(inner) * (1.0 if scale is None else scale)


class Stack(VisionTask):
    """Blocks and a head, in float64; `body` is what holds the blocks."""

    def __init__(self, body: nn.Module | None = None, seed: int = 0, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(*(Block(**settings) for _ in range(3))) if body is None else body
        self.head = nn.Linear(6, 3)
        self.double()
        self.losses: list[float] = []
        self.gradients: list[Tensors] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def on_before_optimizer_step(self, run: Any) -> None:
        named = self.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})


class Images(Stack):
    """The same around a model that takes images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(body=nn.Identity())
        self.model = model
        self.head = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        return out if isinstance(out, Tensor) else out.logits


def samples(count: int = 8, seed: int = 1) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return list(zip(features, (torch.arange(count) % 3).tolist(), strict=True))


def images(count: int = 4, size: int = 32, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(count, 3, size, size, generator=generator, dtype=dtype)
    return list(zip(drawn, (torch.arange(count) % 3).tolist(), strict=True))


def state(task: nn.Module) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in task.state_dict().items()}


def same(first: Tensors, second: Tensors) -> bool:
    """Equal to the last bit, and in the set of names."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def attributes(task: nn.Module) -> dict[str, dict[str, Any]]:
    """Every module's own attributes."""
    return {name: dict(vars(module)) for name, module in task.named_modules()}


def fit(task: Any, *callbacks: Callback, data: Any = None, val: Any = None, **settings: Any) -> Any:
    torch.manual_seed(7)
    data = loader(samples(), 4) if data is None else data
    return quiet_trainer(**{"max_epochs": 2, "callbacks": list(callbacks), **settings}).fit(task, data, val)


def both(make: Callable[[], Any], *more: Callback, **settings: Any) -> tuple[Any, Any]:
    """Two tasks made and trained alike, without and with checkpointing, which changed nothing in what came out."""
    plain, checkpointed = make(), make()
    fit(plain, **settings)
    fit(checkpointed, GradientCheckpointing(), *more, **settings)
    assert plain.losses == checkpointed.losses and plain.losses
    assert len(plain.gradients) == len(checkpointed.gradients)
    assert all(map(same, plain.gradients, checkpointed.gradients))
    assert same(state(plain), state(checkpointed))
    return plain, checkpointed


@contextmanager
def counting_kept_bytes() -> Iterator[list[int]]:
    """The bytes that are kept for backward; inside a checkpointed block nothing is."""
    kept = [0]

    def pack(tensor: Tensor) -> Tensor:
        kept[0] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def kept_bytes(task: Any, batch: Tensor) -> int:
    with counting_kept_bytes() as kept:
        task(batch)
    return kept[0]


# The same numbers


@pytest.mark.parametrize("settings", [{}, {"dropout": 0.5}, {"norm": True}, {"norm": True, "dropout": 0.3}], ids=str)
def test_losses_gradients_and_buffers_are_those_of_a_plain_run(settings: dict[str, Any]) -> None:
    plain, checkpointed = both(lambda: Stack(**settings))
    assert [block.runs for block in plain.body] == [4, 4, 4]
    assert [block.runs for block in checkpointed.body] == [8, 8, 8]  # once more in each backward


def test_behind_frozen_blocks_all_gradients_arrive() -> None:
    def frozen() -> Stack:
        task = Stack()
        task.body[0].requires_grad_(False)
        return task

    _, checkpointed = both(frozen)
    trained = [name for name, p in checkpointed.named_parameters() if p.requires_grad]
    assert sorted(checkpointed.gradients[0]) == sorted(trained) and len(trained) == 10


@pytest.mark.filterwarnings("error")
def test_nothing_warns_and_validation_and_prediction_compute_nothing_twice() -> None:
    counted = []

    class Counts(Callback):
        def on_evaluation_start(self, run: Any, stage: str) -> None:
            self.before = [block.runs for block in run.task.body]

        def on_evaluation_end(self, run: Any, stage: str, metrics: Any) -> None:
            counted.extend(block.runs - before for block, before in zip(run.task.body, self.before, strict=True))

    task, callback = Stack(), GradientCheckpointing()
    fit(task, callback, Counts(), val=loader(samples(), 8), max_epochs=2)
    assert counted == [1] * 6
    runs = [block.runs for block in task.body]
    quiet_trainer(callbacks=[callback]).predict(task, loader(samples(), 8))
    assert [block.runs for block in task.body] == [each + 1 for each in runs]


def conv_task(norm: Callable[[], nn.Module]) -> Stack:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), norm(), nn.ReLU(), nn.Conv2d(3, 3, 1), norm())

    torch.manual_seed(0)
    blocks = nn.Sequential(block(), block())
    return Stack(nn.Sequential(blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 6)))


@pytest.mark.parametrize(
    ("norm", "counted"),
    [
        (lambda: nn.BatchNorm2d(3), 3),
        (lambda: nn.BatchNorm2d(3, momentum=None), 3),
        (lambda: nn.BatchNorm2d(3, track_running_stats=False), None),
        (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), 0),  # torch never counts there
    ],
    ids=["batch norm", "cumulative", "without statistics", "instance norm"],
)
def test_running_statistics_count_each_batch_once(norm: Callable[[], nn.Module], counted: int | None) -> None:
    data = loader(images(6, 8, torch.float64), 2)
    _, task = both(lambda: conv_task(norm), data=data, max_epochs=1)
    norms = [module for module in task.modules() if hasattr(module, "num_batches_tracked")]
    assert [module.num_batches_tracked for module in norms] == [counted] * 4
    if counted is not None:
        assert all(module.running_mean.abs().sum() > 0 for module in norms)


def test_a_frozen_batch_norm_in_eval_mode_keeps_its_statistics() -> None:
    class Frozen(Stack):
        def on_train_epoch_start(self, run: Any) -> None:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()

    _, task = both(lambda: Frozen(norm=True))
    assert all(block.norm.num_batches_tracked == 0 for block in task.body)


def test_a_power_iteration_is_done_once_and_from_the_same_vector() -> None:
    def normed() -> Stack:
        task = Stack()
        for block in task.body:
            torch.nn.utils.parametrizations.spectral_norm(block.first)
        return task

    both(normed)


def test_a_list_that_the_caller_goes_on_to_fill_is_as_it_was() -> None:
    class Joins(nn.Module):
        def __init__(self, features: int) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(features, 8), nn.Linear(8, 6)

        def forward(self, before: list[Tensor]) -> Tensor:
            return self.second(torch.tanh(self.first(torch.cat(before, 1))))

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Joins(6 * (1 + i)) for i in range(3))

        def forward(self, x: Tensor) -> Tensor:
            features = [x]
            for layer in self.layers:
                features.append(layer(features))
            return features[-1]

    def dense() -> Stack:
        torch.manual_seed(0)
        return Stack(Dense())

    both(dense)


def test_keywords_reach_the_block_whatever_their_name() -> None:
    class Named(Block):
        def forward(self, x: Tensor, *, debug: Tensor, use_reentrant: bool) -> Tensor:  # type: ignore[override]
            assert use_reentrant
            return super().forward(x, debug)

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.scale = nn.ModuleList(Named() for _ in range(2)), nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, debug=self.scale, use_reentrant=True)
            return x

    def calls() -> Stack:
        torch.manual_seed(0)
        return Stack(Calls())

    both(calls)


def test_an_input_that_is_changed_in_place_is_refused_and_not_computed_from() -> None:
    class InPlace(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(nn.functional.silu(x, inplace=True))

    class After(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x * 1.0
                y = block(x)
                x.mul_(0.5)
                x = y
            return x

    with pytest.raises(TaskError, match=r"body\.\w+ \(InPlace\).*changed in place"):
        fit(Stack(nn.Sequential(InPlace(), InPlace())), GradientCheckpointing())

    with pytest.raises(TaskError, match="changed in place"):
        fit(Stack(After()), GradientCheckpointing())


def test_accumulation_and_clipping_and_a_last_short_window() -> None:
    settings = {"gradient_accumulation_steps": 2, "gradient_clip_val": 0.1, "data": loader(samples(10), 4)}
    both(lambda: Stack(dropout=0.2, norm=True), **settings)


def test_in_bf16_too() -> None:
    data = loader([(x.float(), y) for x, y in samples()], 4)
    both(lambda: Stack(dropout=0.2).float(), data=data, mixed_precision="bf16")


def test_a_batch_may_be_differentiated_twice() -> None:
    class Twice(Stack):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            loss.backward(retain_graph=True)
            return loss

    both(lambda: Twice(norm=True, dropout=0.2))


# Compiled


@pytest.mark.parametrize("settings", [{}, {"norm": True}, {"dropout": 0.5}], ids=str)
def test_compiled_it_computes_the_same_and_keeps_less(settings: dict[str, Any]) -> None:
    torch.compiler.reset()
    plain, checkpointed = Stack(**settings), Stack(**settings)
    kept: dict[str, int] = {}

    class Keeps(Callback):
        def on_train_batch_start(self, run: Any, batch: Any, batch_idx: int) -> None:
            if run.state.batch == 1:
                with counting_kept_bytes() as counted, torch.random.fork_rng():
                    buffers = state(run.task)
                    run.task(batch[0])
                    run.task.load_state_dict(buffers)
                kept["checkpointed" if run.task is checkpointed else "plain"] = counted[0]

    fit(plain, Keeps(), compile="aot_eager")
    fit(checkpointed, GradientCheckpointing(), Keeps(), compile="aot_eager")
    for first, second in zip(plain.gradients, checkpointed.gradients, strict=True):
        assert all(torch.allclose(first[name], second[name], rtol=0, atol=1e-12) for name in first)
    assert all(
        torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*map(values, (plain, checkpointed)), strict=True)
    )
    assert kept["checkpointed"] < kept["plain"]
    # What was compiled for it is not used without it, and the other way round.
    again = Stack(**settings)
    fit(again, compile="aot_eager")
    assert same(state(again), state(plain))


def values(task: nn.Module) -> list[Tensor]:
    return list(state(task).values())


# Nothing is left


def test_keys_names_and_classes_stay_and_afterwards_every_attribute_is_as_it_was() -> None:
    class Looks(Callback):
        def on_train_step_end(self, run: Any) -> None:
            seen.append((list(run.task.state_dict()), [(n, type(m)) for n, m in run.task.named_modules()]))

    task, seen = Stack(norm=True), list[Any]()
    names = (list(task.state_dict()), [(n, type(m)) for n, m in task.named_modules()])
    before = {name: sorted(own) for name, own in attributes(task).items()}
    callback = GradientCheckpointing()
    fit(task, callback, Looks())
    assert seen == [names] * 4
    before[""] = sorted(attributes(task)[""])  # the task's own are the trainer's to fill
    assert {name: sorted(own) for name, own in attributes(task).items()} == before
    assert not callback.on and pickle.loads(pickle.dumps(task.body)) is not None
    runs = task.body[0].runs
    fit(task, max_epochs=1)
    assert task.body[0].runs == runs + 2


def test_a_forward_that_an_instance_had_is_used_and_given_back() -> None:
    task = Stack()
    doubled = nn.Module.__getattribute__(task.body[1], "forward")

    def own(x: Tensor) -> Tensor:
        return doubled(x) * 2

    task.body[1].forward = own
    expected = copy.deepcopy(samples())
    plain = task(torch.stack([x for x, _ in expected]))
    callback = GradientCheckpointing()
    callback.switch_on(task)
    assert torch.equal(task(torch.stack([x for x, _ in expected])), plain)
    callback.switch_off(task)
    assert vars(task.body[1])["forward"] is own and "forward" not in vars(task.body[0])


@pytest.mark.parametrize("when", ["setup", "on_fit_start", "on_train_batch_end"])
def test_after_an_error_nothing_is_left(when: str) -> None:
    task, callback = Stack(), GradientCheckpointing()
    failing = {"setup": FailsInSetup, "on_fit_start": FailsAtTheStart, "on_train_batch_end": FailsInABatch}[when]()
    with pytest.raises(ZeroDivisionError):
        fit(task, callback, failing)
    assert not callback.on and not any("forward" in own for own in attributes(task).values())


class FailsInSetup(Callback):
    def setup(self, run: Any) -> None:
        raise ZeroDivisionError


class FailsAtTheStart(Callback):
    def on_fit_start(self, run: Any) -> None:
        raise ZeroDivisionError


class FailsInABatch(Callback):
    def on_train_batch_end(self, run: Any, batch: Any, batch_idx: int, loss: Any) -> None:
        raise ZeroDivisionError


def test_what_was_begun_is_undone_when_a_switch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")

    def fails(*arguments: Any, **settings: Any) -> None:
        raise ValueError("this model cannot")

    task = Images(tiny_vit())
    task.body = nn.Sequential(Block(), Block())
    monkeypatch.setattr(transformers.ViTForImageClassification, "activation_checkpointing_enable", fails)
    before, callback = attributes(task), GradientCheckpointing()
    with pytest.raises(ValueError, match="this model cannot"):
        callback.switch_on(task)
    after = attributes(task)
    assert {name: sorted(own) for name, own in after.items()} == {name: sorted(own) for name, own in before.items()}
    assert not callback.on and not task.model.is_activation_checkpointing


def test_a_copy_that_is_made_in_the_middle_computes_with_its_own_weights() -> None:
    task, callback = Stack(norm=True), GradientCheckpointing()
    callback.switch_on(task)
    twin, stored = copy.deepcopy(task), pickle.loads(pickle.dumps(task.body))
    with torch.no_grad():
        for parameter in twin.body.parameters():
            parameter.zero_()
    x = torch.stack([x for x, _ in samples()])
    assert torch.equal(twin.body(x), x) and not torch.equal(task.body(x), x)
    callback.switch_off(task)
    assert torch.equal(stored(x), task.body(x))


def test_averages_checkpoints_and_a_resume_know_nothing_of_it(run_folder: Path) -> None:
    def run(name: str, steps: int, *callbacks: Callback, resume: Any = None) -> tuple[Tensors, Tensors]:
        task, ema = Stack(norm=True, dropout=0.2), EMA(0.9)
        trainer = quiet_trainer(
            max_steps=steps, project_dir=run_folder, run_name=name, callbacks=[ema, Checkpoint(), *callbacks], seed=3
        )
        trainer.fit(task, loader(samples(), 4, shuffle=True), resume=resume)
        return state(task), dict(ema.average)

    plain = run("plain", 7)
    run("parts", 3, GradientCheckpointing())
    resumed = run("parts", 7, GradientCheckpointing(), resume="last")
    assert all(map(same, plain, resumed))
    assert all(map(same, plain, run("without", 7)))
    run("without-then", 3)
    assert all(map(same, plain, run("without-then", 7, GradientCheckpointing(), resume="last")))


def test_only_a_fit_checkpoints() -> None:
    task, callback = Stack(), GradientCheckpointing()
    callback.switch_on(task)
    quiet_trainer(callbacks=[callback]).validate(task, loader(samples(), 4))
    assert callback.on  # what was done by hand is not undone by another verb
    callback.switch_off(task)
    quiet_trainer(callbacks=[callback]).test(task, loader(samples(), 4))
    assert not callback.on


def test_it_can_be_switched_on_between_two_steps_also_of_a_compiled_task() -> None:
    for settings in ({}, {"compile": "aot_eager"}):
        torch.compiler.reset()

        class InTheMiddle(Callback):
            def __init__(self) -> None:
                self.checkpointing, self.kept = GradientCheckpointing(), list[int]()

            def on_train_step_end(self, run: Any) -> None:
                if run.state.global_step == 2:
                    assert self.checkpointing.switch_on(run.task) == "3 blocks (Block) in body"
                with counting_kept_bytes() as kept, torch.random.fork_rng():
                    run.task(torch.ones(4, 6, dtype=torch.float64))
                self.kept.append(kept[0])

        plain, changed, callback = Stack(), Stack(), InTheMiddle()
        fit(plain, **settings)
        fit(changed, callback, **settings)
        assert torch.allclose(
            torch.cat([v.flatten() for v in values(plain)]),
            torch.cat([v.flatten() for v in values(changed)]),
            rtol=0,
            atol=1e-12,
        )
        assert callback.kept[1] < callback.kept[0] and callback.kept[2:] == callback.kept[1:3]
        callback.checkpointing.switch_off(changed)


# What is wrapped


def found(body: nn.Module, layers: Any = "auto") -> str:
    return GradientCheckpointing(layers).find(Stack(body))


class Attention(nn.Module):
    """Heads in a ModuleList: repeated, and no block."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2)) for _ in range(3))
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], -1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.attention(x)))


class Stage(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(depth)), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def pairs() -> nn.Module:
    return nn.ModuleList(nn.ModuleList([Block(), Layer()]) for _ in range(4))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Sequential(Block(), Block()), "2 blocks (Block) in body"),
        (lambda: nn.ModuleDict({"a": Block(), "b": Layer(), "c": Layer()}), "2 blocks (Layer) in body"),
        (lambda: nn.Sequential(Layer(), Layer(), Layer()), "3 blocks (Layer) in body"),
        (lambda: nn.Sequential(Stage(1), nn.Linear(6, 6), Stage(2), Stage(1)), "4 blocks (Block) in body"),
        (pairs, "4 blocks (Block) in body, 4 blocks (Layer) in body"),
        (lambda: nn.ModuleList([Block()] * 3), "1 block (Block) in body"),
        (Attributes, "2 blocks (Block) in body"),
        (
            lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4))),
            "4 blocks (Sequential) in body",
        ),
    ],
    ids=["sequential", "dict", "heads", "stages", "lists of lists", "one many times", "attributes", "single layers"],
)
def test_repeated_blocks_are_found(make: Callable[[], nn.Module], text: str) -> None:
    assert found(make()) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("resnet18", "8 blocks (BasicBlock)"),
        ("resnet50", "16 blocks (Bottleneck)"),
        ("vit_b_16", "12 blocks (EncoderBlock)"),
        ("swin_t", "12 blocks (SwinTransformerBlock)"),
        ("convnext_tiny", "18 blocks (CNBlock)"),
        ("efficientnet_b0", "16 blocks (MBConv)"),
        ("mobilenet_v3_small", "11 blocks (InvertedResidual)"),
        ("densenet121", "58 blocks (_DenseLayer)"),
        ("googlenet", "9 blocks (Inception), 2 blocks (InceptionAux)"),
    ],
)
def test_the_blocks_of_torchvisions_models_are_found(name: str, text: str) -> None:
    models = pytest.importorskip("torchvision.models")
    settings = {"init_weights": False} if name == "googlenet" else {}
    with torch.device("meta"):
        model = models.get_model(name, weights=None, **settings)
    assert found(model).replace(" in body", "") == text


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (Block, "6 blocks (Block) in body"),
        ([Block, Layer], "6 blocks (Block) in body, 2 blocks (Layer) in body"),
        (nn.Module, "1 block (Sequential) in body, 1 block (Linear) in head"),
        ("body.0.blocks.*", "2 blocks (Block) in body"),
        ("body.[01]", "2 blocks (Stage) in body"),
        (["body.?.blocks.1", "body.2"], "2 blocks (Block) in body, 1 block (Stage) in body"),
        (["body.0.blocks.1", Stage], "3 blocks (Stage) in body"),
        ("*", "1 block (Sequential) in body, 1 block (Linear) in head"),
    ],
    ids=str,
)
def test_the_topmost_modules_of_a_class_or_a_pattern_are_wrapped(layers: Any, text: str) -> None:
    body = nn.Sequential(Stage(2), Stage(2), Stage(2), Layer(), Layer())
    if layers == Block:
        text = "6 blocks (Block) in body"
    assert found(body, layers) == text


@pytest.mark.parametrize(
    ("layers", "error", "text"),
    [
        ("body.blok*", SettingsError, r"no module whose name matches 'body.blok\*'. The nearest are body.\d, body"),
        ("encoder.0", SettingsError, "no module whose name matches 'encoder.0'. It has body, body.0, "),
        (nn.Conv2d, SettingsError, "no module of the class Conv2d. It has Block, "),
        (Stage, SettingsError, "no module of the class Stage."),
        (["body.0", "body.7"], SettingsError, "'body.7'. The nearest are "),
    ],
    ids=str,
)
def test_what_matches_nothing_is_refused_before_the_run(layers: Any, error: Any, text: str) -> None:
    task = Stack()
    with pytest.raises(error, match=text):
        GradientCheckpointing(layers).find(task)
    with pytest.raises(error, match=text):
        fit(task, GradientCheckpointing(layers))
    assert task.losses == []


def test_a_list_that_is_not_called_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"body.blocks is a ModuleList.*'body.blocks.\*'"):
        found(Stage(3), "body.blocks")


def test_a_task_in_which_nothing_repeats_is_refused() -> None:
    with pytest.raises(
        TaskError, match=r"finds nothing in Stack that repeats.* the classes are Linear, ReLU, Sequential\."
    ):
        found(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU()))


@pytest.mark.parametrize("layers", [None, 3, "", [], (), [nn.Linear, 3], int, [""], nn.Linear(1, 1)], ids=repr)
def test_layers_that_are_none_are_refused(layers: Any) -> None:
    with pytest.raises(SettingsError, match="GradientCheckpointing got layers="):
        GradientCheckpointing(layers)


def test_it_says_what_it_wraps_and_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Stack(), callbacks=["gradient_checkpointing"])
    assert capsys.readouterr().out == "Gradient checkpointing: 3 blocks (Block) in body.\n"


def test_less_is_kept_for_backward() -> None:
    task, callback = Stack(), GradientCheckpointing()
    x = torch.rand(64, 6, dtype=torch.float64)
    plain = kept_bytes(task, x)
    callback.switch_on(task)
    assert kept_bytes(task, x) < plain / 4
    callback.switch_off(task)
    assert kept_bytes(task, x) == plain


def test_one_instance_serves_one_task_at_a_time_and_nothing_is_wrapped_twice() -> None:
    first, second, callback, other = Stack(), Stack(), GradientCheckpointing(), GradientCheckpointing()
    assert callback.switch_on(first) == callback.switch_on(first) == "3 blocks (Block) in body"
    with pytest.raises(SettingsError, match="on in another task"):
        callback.switch_on(second)
    callback.switch_off(second)
    assert callback.on
    assert other.switch_on(first) == "on already in body"
    other.switch_off(first)
    assert callback.on and "forward" in vars(first.body[0])
    callback.switch_off(first)
    assert "forward" not in vars(first.body[0])


def test_torchs_own_wrapper_is_left_alone() -> None:
    task = Stack(nn.Sequential(*(checkpoint_wrapper(Block()) for _ in range(2))))
    assert GradientCheckpointing().find(task) == "on already in body"
    fit(task, GradientCheckpointing(), max_epochs=1)
    assert [name for name, module in task.named_modules() if type(module).__name__ == "CheckpointWrapper"]


# transformers and timm


def tiny_vit(**settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**{**shape, "image_size": 32, "patch_size": 8, "num_labels": 3, **settings})
    return transformers.ViTForImageClassification(config)


class Text(Stack):
    """A tiny GPT-2 on 5 tokens, with a cache of keys and values as its config says."""

    def __init__(self) -> None:
        transformers = pytest.importorskip("transformers")
        super().__init__(body=nn.Identity())
        self.head = nn.Identity()
        config = transformers.GPT2Config(
            n_embd=16, n_layer=3, n_head=2, vocab_size=11, n_positions=8, num_labels=3, pad_token_id=0
        )
        self.gpt = transformers.GPT2ForSequenceClassification(config)
        self.cached: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.gpt(input_ids=x)
        self.cached.append(not {"cache", "past_key_values"}.isdisjoint(out.keys()))
        return out.logits


def tokens(count: int = 8) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(1, 11, (count, 5), generator=generator)
    return list(zip(drawn, (torch.arange(count) % 3).tolist(), strict=True))


@contextmanager
def transformers_log() -> Iterator[list[str]]:
    """What transformers' loggers say, each time."""
    logging_of = pytest.importorskip("transformers.utils.logging")
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging_of.get_logger("transformers").addHandler(listener)
    try:
        yield said
    finally:
        logging_of.get_logger("transformers").removeHandler(listener)


def test_a_vit_of_transformers_uses_its_own_switch() -> None:
    _, task = both(lambda: Images(tiny_vit(hidden_dropout_prob=0.3)), data=loader(images(), 2))
    assert GradientCheckpointing().find(task) == "3 blocks (ViTLayer) in model"
    callback = GradientCheckpointing()
    callback.switch_on(task)
    assert task.model.is_activation_checkpointing
    callback.switch_off(task)
    assert not task.model.is_activation_checkpointing


@pytest.mark.parametrize("layers", ["auto", "gpt.transformer.h.*"])
@pytest.mark.filterwarnings("error")
def test_a_cache_is_not_used_meanwhile_and_stays_in_the_saved_config(
    run_folder: Path, capsys: pytest.CaptureFixture[str], layers: str
) -> None:
    task = Text()
    task.gpt.config.use_cache = True
    before = attributes(task)
    with transformers_log() as said:
        result = fit(
            task, GradientCheckpointing(layers), Checkpoint(every_n_steps=1), data=loader(tokens(), 4),
            val=loader(tokens(), 4), max_epochs=1, project_dir=run_folder,
        )  # fmt: skip
    assert said == [] and capsys.readouterr().out == "Gradient checkpointing: 3 blocks (GPT2Block) in gpt.\n"
    assert task.cached == [False, False, True, True]  # two steps, then validation
    assert task.gpt.config.use_cache is True and not task.gpt.is_activation_checkpointing
    saved = json.loads((result.best_checkpoint / "gpt" / "config.json").read_text())
    assert saved["use_cache"] is True and "gradient_checkpointing" not in saved
    after = attributes(task)
    assert {name: sorted(own) for name, own in after.items() if name} == {n: sorted(o) for n, o in before.items() if n}
    assert all(not own["_forward_hooks"] and not own["_forward_pre_hooks"] for own in after.values())


def test_text_models_train_as_without() -> None:
    both(Text, data=loader(tokens(), 4))


def test_a_switch_that_is_on_stays_on() -> None:
    model = tiny_vit()
    model.activation_checkpointing_enable()
    task, callback = Images(model), GradientCheckpointing()
    before = attributes(model)
    assert callback.switch_on(task) == "on already in model"
    callback.switch_off(task)
    assert attributes(model) == before and model.is_activation_checkpointing


@pytest.fixture
def timm() -> Any:
    return pytest.importorskip("timm")


def timm_vit(timm: Any) -> Any:
    torch.manual_seed(0)
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 3}
    return timm.models.VisionTransformer(**settings, proj_drop_rate=0.2)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_vit_of_timm_uses_its_own_switch_without_reentrance(timm: Any) -> None:
    layers = timm.layers
    layers.set_reentrant_ckpt(True)
    try:
        _, task = both(lambda: Images(timm_vit(timm)), data=loader(images(), 2))
        assert layers.use_reentrant_ckpt()
        assert not task.model.grad_checkpointing
        callback = GradientCheckpointing()
        assert callback.switch_on(task) == "the switch of timm in model (VisionTransformer)"
        assert task.model.grad_checkpointing and not layers.use_reentrant_ckpt()
        callback.switch_off(task)
        task.model.set_grad_checkpointing(True)
        assert callback.find(task) == "on already in model"
    finally:
        layers.set_reentrant_ckpt(False)


def test_timms_models_with_batch_norm_count_each_batch_once(timm: Any) -> None:
    def resnet() -> Images:
        torch.manual_seed(0)
        return Images(
            timm.models.ResNet(timm.models.resnet.BasicBlock, (1, 1, 1, 1), channels=(8, 8, 8, 8), num_classes=3)
        )

    _, task = both(resnet, data=loader(images(), 2))
    assert GradientCheckpointing().find(task) == "4 blocks (BasicBlock) in model"
    assert task.model.layer1[0].bn1.num_batches_tracked == 4


def test_a_timm_model_whose_switch_refuses_is_searched_for_blocks(timm: Any) -> None:
    with torch.device("meta"):
        task = Images(timm.create_model("vgg11"))
    with pytest.raises(TaskError, match="nothing in Images that repeats"):
        GradientCheckpointing().find(task)


def test_models_of_different_kinds_in_one_task() -> None:
    timm = pytest.importorskip("timm")

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())
            self.models = nn.ModuleList([tiny_vit(), tiny_vit(), timm_vit(timm)])

    task = Images(All())
    assert GradientCheckpointing().find(task) == (
        "3 blocks (ViTLayer) in model.models.0, 3 blocks (ViTLayer) in model.models.1, "
        "the switch of timm in model.models.2 (VisionTransformer), 2 blocks (Block) in model"
    )


@pytest.mark.parametrize("kind", ["transformers", "timm"])
def test_their_switches_work_compiled(kind: str) -> None:
    torch.compiler.reset()

    def make() -> Images:
        return Images(tiny_vit() if kind == "transformers" else timm_vit(pytest.importorskip("timm")))

    plain, checkpointed = make(), make()
    fit(plain, data=loader(images(), 2), compile="aot_eager", max_epochs=1)
    fit(checkpointed, GradientCheckpointing(), data=loader(images(), 2), compile="aot_eager", max_epochs=1)
    assert checkpointed.losses == pytest.approx(plain.losses, abs=1e-6)
