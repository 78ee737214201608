"""Optimizers, schedulers and scaler after a checkpoint: what follows is what would have followed without it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

from sanctuary_trainer.checkpointing import decode, encode
from sanctuary_trainer.errors import CheckpointError, DataError
from sanctuary_trainer.optimization import Optimization

pytestmark = [
    # timm gives its plateau scheduler up; torch's schedulers tell of each other's deprecated arguments.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("error:Detected call of"),  # torch's word for schedulers stepped before optimizers
]

Configure = Callable[[nn.Module], Any]


class Net(nn.Module):
    """A convolution and a layer, the same at each start."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(2, 3, 2)
        self.head = nn.Linear(4, 3)
        self.to(dtype)


class Run:
    """A run of epochs of 3 steps, with made-up gradients and a made-up metric; `rates` has those of each step."""

    def __init__(self, configure: Configure, task: nn.Module | None = None, **settings: Any) -> None:
        self.task = Net() if task is None else task
        self.optimization = Optimization(configure(self.task), self.task, **settings)
        self.rates: list[list[Any]] = []

    def train(self, since: int, until: int) -> Run:
        for step in range(since, until):
            drawn = torch.Generator().manual_seed(step)
            torch.manual_seed(step)  # Kron draws
            for parameter in self.task.parameters():
                gradient = torch.randn(parameter.shape, generator=drawn)
                parameter.grad = torch.empty_like(parameter).copy_(gradient)  # in the parameter's memory format
            groups = [group for optimizer in self.optimization.optimizers for group in optimizer.param_groups]
            self.rates.append([value(group.get(key)) for group in groups for key in ("lr", "momentum", "betas")])
            self.optimization.average(None)
            self.optimization.step()
            if step % 3 == 2:
                self.optimization.end_epoch()
                self.optimization.new_values({"val/loss": math.sin(step)})
        return self

    def continued(self, configure: Configure, dtype: torch.dtype = torch.float32, **settings: Any) -> Run:
        """Another process that goes on from a checkpoint of this one."""
        task = Net(dtype)
        task.load_state_dict(self.task.state_dict())
        after = Run(configure, task, **settings)
        after.texts = after.optimization.load_state_dict(on_disk(self.optimization.state_dict()))
        return after

    texts: list[str]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.task.named_parameters()}


def value(setting: Any) -> Any:
    return setting.item() if isinstance(setting, torch.Tensor) else setting


def on_disk(state: Any) -> Any:
    """The state as it comes back from real JSON and a real safetensors file."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(state, tensors))
    stored = save({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()})
    return decode(json.loads(text), load(stored))


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in all bits, types and orders."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def assert_resumes(configure: Configure, steps: int = 12, at: tuple[int, ...] = (1, 5, 6, 9)) -> None:
    """Parts before and after a checkpoint, wherever it is, give the rates and weights of the straight run."""
    straight = Run(configure).train(0, steps)
    for place in at:
        first = Run(configure).train(0, place)
        second = first.continued(configure)
        assert second.texts == []
        assert same(second.optimization.state_dict(), first.optimization.state_dict())
        second.train(place, steps)
        assert first.rates + second.rates == straight.rates
        assert same(second.weights, straight.weights)
        for schedule, optimizer in zip(second.optimization.schedules, second.optimization.optimizers, strict=False):
            assert schedule.scheduler.optimizer is optimizer


# Schedulers


class Rule:
    """A callable object with a state: halves what it gives at every third call."""

    def __init__(self) -> None:
        self.calls, self.factor = 0, 1.0

    def __call__(self, _: int) -> float:
        self.calls += 1
        self.factor *= 0.5 if self.calls % 3 == 0 else 1.0
        return self.factor


class Warmup(lr_scheduler.LRScheduler):
    """As they are found in many repositories: holds the scheduler that comes after it, a function and a history."""

    def __init__(self, optimizer: Optimizer, after: Any) -> None:
        self.after, self.shape, self.total = after, lambda x: x * x, 4
        self.history: list[int] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate * self.shape((self.last_epoch + 1) / self.total) for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        self.history.append(self.last_epoch)
        if self.last_epoch + 1 < self.total:
            super().step()
        else:
            self.after.step()


def sequence(o: Optimizer) -> Any:
    first, second = lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 6)
    third = lr_scheduler.MultiStepLR(o, [1, 2, 2])
    return lr_scheduler.SequentialLR(o, [first, second, third], milestones=[3, 7])


def chain(o: Optimizer) -> Any:
    inner = lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.LambdaLR(o, Rule())], milestones=[4]
    )
    return lr_scheduler.ChainedScheduler([inner, lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o)


def plateau(o: Optimizer) -> Any:
    return {"scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, cooldown=1, factor=0.5), "monitor": "val/loss"}


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, Rule()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, Rule()),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3, 4, 8], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=7),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 7, 1.5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, mode="triangular2"),
    "CyclicLR of a function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.7**x),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=20, three_phase=True),
    "ReduceLROnPlateau": plateau,
    "SequentialLR": sequence,
    "ChainedScheduler": chain,
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, 4),
    "warm-up that holds the next": lambda o: Warmup(o, lr_scheduler.StepLR(o, 2, 0.5)),
}


def two_groups(task: Any, kind: Any = SGD, rate: Any = 0.1) -> Optimizer:
    optimizer: Optimizer = kind(
        [{"params": task.body.parameters()}, {"params": task.head.parameters(), "weight_decay": 0.1}],
        lr=rate() if callable(rate) else rate,
        **({"momentum": 0.9} if kind is SGD else {}),
    )
    return optimizer


def scheduled(task: Any, kind: Any, rate: Any, schedule: Callable[[Any], Any], interval: str) -> Any:
    optimizer = two_groups(task, kind, rate)
    built = schedule(optimizer)
    settings = built if isinstance(built, dict) else {"scheduler": built, "interval": interval}
    return {"optimizer": optimizer, "lr_scheduler": settings}


@pytest.mark.parametrize("rate", [0.1, partial(torch.tensor, 0.1)], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_and_weights_of_both_parts_are_those_of_the_straight_run(name: str, rate: Any) -> None:
    for kind, interval in ((SGD, "step"), (AdamW, "epoch")):
        assert_resumes(partial(scheduled, kind=kind, rate=rate, schedule=SCHEDULERS[name], interval=interval))


def test_a_scheduler_that_is_not_stepped_each_time_keeps_its_place_between() -> None:
    def configure(task: nn.Module) -> Any:
        optimizer = two_groups(task)
        schedulers = [
            {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step", "frequency": 4},
            {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.9), "frequency": 2},
        ]
        return [optimizer], schedulers

    assert_resumes(configure)


TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "cosine": ("CosineLRScheduler", {"t_initial": 9, "warmup_t": 2, "warmup_lr_init": 0.01, "cycle_limit": 2}),
    "cosine with noise": ("CosineLRScheduler", {"t_initial": 9, "noise_range_t": (2, 8), "noise_pct": 0.5}),
    "step": ("StepLRScheduler", {"decay_t": 2, "decay_rate": 0.5, "warmup_t": 1, "warmup_lr_init": 0.01}),
    "multistep": ("MultiStepLRScheduler", {"decay_t": [2, 3, 7], "decay_rate": 0.5}),
    "tanh": ("TanhLRScheduler", {"t_initial": 9}),
    "poly": ("PolyLRScheduler", {"t_initial": 9}),
}


@pytest.mark.parametrize("in_epochs", [True, False])
@pytest.mark.parametrize("name", TIMM)
def test_timms_schedulers_go_on(name: str, in_epochs: bool) -> None:
    module = pytest.importorskip("timm.scheduler")
    kind, settings = TIMM[name]
    build = partial(getattr(module, kind), t_in_epochs=in_epochs, **settings)
    interval = "epoch" if in_epochs else "step"
    assert_resumes(partial(scheduled, kind=AdamW, rate=0.1, schedule=build, interval=interval), steps=24, at=(4, 6, 17))


@pytest.mark.parametrize("settings", [{}, {"noise_range_t": 1, "noise_pct": 0.5}, {"warmup_t": 3}])
def test_timms_plateau_goes_on_although_its_own_state_is_not_all(settings: dict[str, Any]) -> None:
    kind = pytest.importorskip("timm.scheduler").PlateauLRScheduler

    def build(optimizer: Optimizer) -> Any:
        scheduler = kind(optimizer, patience_t=1, cooldown_t=1, decay_rate=0.5, mode="min", **settings)
        return {"scheduler": scheduler, "monitor": "val/loss"}

    configure = partial(scheduled, kind=AdamW, rate=0.1, schedule=build, interval="epoch")
    assert_resumes(configure, steps=36, at=tuple(range(3, 33, 3)))


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "constant": {},
    "constant_with_warmup": {},
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4},
    "reduce_lr_on_plateau": {"patience": 0, "factor": 0.5},
    "greedy": {"patience": 0, "factor": 0.5, "smooth": True, "window_size": 2},
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_schedules_go_on(name: str) -> None:
    module = pytest.importorskip("transformers.optimization")
    if name not in module.SchedulerType._value2member_map_:
        pytest.skip("of a later version")

    def build(optimizer: Optimizer) -> Any:
        settings = {"scheduler_specific_kwargs": TRANSFORMERS[name]}
        scheduler = module.get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=12, **settings)
        if name in ("reduce_lr_on_plateau", "greedy"):
            return {"scheduler": scheduler, "monitor": "val/loss"}
        return scheduler

    assert_resumes(partial(scheduled, kind=AdamW, rate=0.1, schedule=build, interval="step"), steps=24)


def test_after_a_resume_the_scheduler_sets_what_the_step_uses() -> None:
    def configure(task: nn.Module) -> Any:
        optimizer = SGD(task.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.0), "interval": "step"}]

    after = Run(configure).continued(configure).train(0, 1)
    before = after.weights
    assert same(after.train(1, 2).weights, before)
    assert after.rates[-1][0] == 0.0


class Silent:
    """Has no state_dict."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


def test_a_scheduler_that_has_no_state_is_told() -> None:
    configure = partial(scheduled, kind=SGD, rate=0.1, schedule=Silent, interval="step")
    after = Run(configure).train(0, 4).continued(configure)
    assert after.texts == ["tests.Silent has no state_dict() with a load_state_dict(): it begins anew"]


# Optimizers


def plain(kind: Any, **settings: Any) -> Configure:
    return lambda task: kind([p for p in task.parameters() if kind.__name__ != "Muon" or p.ndim == 2], **settings)


OPTIMIZERS: dict[str, Configure] = {
    **{
        name: plain(getattr(torch.optim, name), lr=0.01)
        for name in (
            "SGD",
            "Adagrad",
            "Adafactor",
            "Adadelta",
            "ASGD",
            "Adamax",
            "NAdam",
            "RAdam",
            "RMSprop",
            "Rprop",
            "Muon",
        )
        if hasattr(torch.optim, name)
    },
    "Adam with all": plain(Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam, foreach": plain(Adam, lr=0.01, foreach=True),
    "Adam, fused": plain(Adam, lr=0.01, fused=True),
    "AdamW, differentiable": plain(AdamW, lr=0.01, maximize=True),
    "SGD, fused": plain(SGD, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    "several": lambda task: [SGD(task.body.parameters(), lr=0.01, momentum=0.9), Adam(task.head.parameters())],
}


def assert_goes_on(configure: Configure, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    def task() -> nn.Module:
        return Net(dtype).to(memory_format=memory_format)  # type: ignore[call-overload,no-any-return]

    straight, first = Run(configure, task()).train(0, 8), Run(configure, task()).train(0, 4)
    second = Run(configure, task())
    second.task.load_state_dict(first.task.state_dict())
    assert second.optimization.load_state_dict(on_disk(first.optimization.state_dict())) == []
    assert same(second.optimization.state_dict(), first.optimization.state_dict())
    assert same(second.train(4, 8).weights, straight.weights)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_optimizers_go_on_bit_for_bit(name: str, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    assert_goes_on(OPTIMIZERS[name], dtype, memory_format)


# One of each way to load and to store; all of timm's were tried when this was written.
@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
@pytest.mark.parametrize(
    "name",
    ["adabelief", "adafactorbv", "adopt", "kron", "lamb", "laprop", "lion", "lookahead_adamp", "mars", "radabelief"],
)
def test_timms_optimizers_go_on_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm.optim")
    monkeypatch.setattr("timm.optim.kron.has_dynamo", False)  # it would compile for 15 s
    for dtype in (torch.float32, torch.bfloat16):
        assert_goes_on(lambda task: timm.create_optimizer_v2(task, name, lr=0.01), dtype, torch.channels_last)


def test_transformers_adafactor_goes_on_without_a_rate() -> None:
    adafactor = pytest.importorskip("transformers.optimization").Adafactor
    for dtype in (torch.float32, torch.bfloat16):
        assert_goes_on(lambda task: adafactor(task.parameters(), beta1=0.9), dtype, torch.contiguous_format)


@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
def test_a_function_among_the_settings_is_that_of_the_new_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    kron = pytest.importorskip("timm.optim.kron").Kron
    monkeypatch.setattr("timm.optim.kron.has_dynamo", False)
    rule = {"preconditioner_update_probability": lambda n: torch.tensor(0.5), "precond_dtype": torch.float32}
    assert_goes_on(lambda task: kron(task.parameters(), **rule), torch.bfloat16, torch.contiguous_format)
    configure: Configure = lambda task: kron(task.parameters(), **rule)  # noqa: E731
    (group,) = Run(configure).train(0, 2).continued(configure).optimization.optimizers[0].param_groups
    assert group["preconditioner_update_probability"] is rule["preconditioner_update_probability"]
    assert group["precond_dtype"] is torch.float32


class Odd(SGD):
    """States of all kinds, in dtypes that are not the parameter's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("count", torch.zeros((), dtype=torch.int64)).add_(1)
            state.setdefault("mask", parameter.detach() > 0)
            state.setdefault("precise", parameter.detach().double() / 3).mul_(1.1)
            state.setdefault("nested", {"low": [parameter.detach().half() / 3], "step": torch.tensor(2.5)})
            state.setdefault("mode", "fast")
            state.setdefault("pair", (1, torch.tensor(0.1, dtype=torch.float64)))


def test_every_state_keeps_its_dtype_on_parameters_of_bfloat16() -> None:
    assert_goes_on(lambda task: Odd(task.parameters(), lr=0.1), torch.bfloat16, torch.channels_last)


def test_float32_moments_of_bfloat16_parameters_are_not_rounded() -> None:
    class Master(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                precise = self.state[parameter].setdefault("precise", parameter.detach().float())
                precise.sub_(parameter.grad.float(), alpha=0.001)
                parameter.data.copy_(precise)

    assert_goes_on(lambda task: Master(task.parameters(), lr=0.1), torch.bfloat16, torch.contiguous_format)


class CopyingAdam(Adam):
    """Copies what it loads, as every optimizer does on another device."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for own in self.state.values():
            own.update({key: tensor.clone() for key, tensor in own.items()})


@pytest.mark.parametrize("kind", [Adam, CopyingAdam])
def test_moments_follow_their_parameter_into_another_memory_format(kind: Any) -> None:
    """Fused kernels would give wrong weights, without a word, where the two lie differently in memory."""
    configure = plain(kind, lr=0.1, fused=True)
    straight = Run(configure).train(0, 6)
    first = Run(configure).train(0, 3)
    second = Run(configure, Net().to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    second.task.load_state_dict(first.task.state_dict())
    second.optimization.load_state_dict(on_disk(first.optimization.state_dict()))
    second.train(3, 6)
    for name, weight in straight.weights.items():
        torch.testing.assert_close(second.weights[name], weight, rtol=1e-6, atol=1e-6)


def test_loading_leaves_the_state_that_it_was_given_as_it_was() -> None:
    warm_up = SCHEDULERS["warm-up that holds the next"]
    configure = partial(scheduled, kind=Adam, rate=partial(torch.tensor, 0.1), schedule=warm_up, interval="step")
    first = Run(configure).train(0, 5)
    state = first.optimization.state_dict()
    copy = on_disk(state)
    second = Run(configure)
    second.optimization.load_state_dict(state)
    second.train(5, 9)
    assert same(state, copy)


def test_hooks_of_optimizers_keep_working() -> None:
    """One stores the moments as halves and takes them back as doubles; one looks at what was loaded."""
    seen = []

    def narrow(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {k: {**v, "exp_avg": v["exp_avg"].half()} for k, v in state["state"].items()}}

    def widen(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {k: {**v, "exp_avg": v["exp_avg"].double()} for k, v in state["state"].items()}}

    def configure(task: nn.Module) -> Optimizer:
        optimizer = Adam(task.parameters(), lr=0.1)
        optimizer.register_state_dict_post_hook(narrow)
        optimizer.register_load_state_dict_pre_hook(widen)
        optimizer.register_load_state_dict_post_hook(
            lambda o: seen.extend(state["exp_avg"].dtype for state in o.state.values())
        )
        return optimizer

    first = Run(configure).train(0, 3)
    first.continued(configure)
    assert seen == [torch.float64] * 4


class Alone(SGD):
    """Loads without torch's help, and casts."""

    def load_state_dict(self, state_dict: Any) -> None:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                self.state[parameter] = {"precise": state_dict["state"][number]["precise"].to(parameter.dtype)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("precise", torch.full((3,), 1 / 3, dtype=torch.float64)).mul_(1.1)


def test_an_optimizer_that_loads_without_torch_gets_its_dtypes_back_too() -> None:
    assert_goes_on(lambda task: Alone(task.parameters(), lr=0.1), torch.bfloat16, torch.contiguous_format)


# Groups


def adam(task: Any, names: str = "body.weight body.bias head.weight head.bias", clip: Any = None) -> Optimizer:
    return Adam([task.get_parameter(name) for name in names.split()], lr=0.1)


def test_parameters_of_a_group_in_another_order_get_their_own_state() -> None:
    straight = Run(adam, clip=0.1).train(0, 6)
    first = Run(adam, clip=0.1).train(0, 3)
    turned = partial(adam, names="head.bias body.bias head.weight body.weight")
    second = first.continued(turned, clip=0.1)
    assert second.texts == []
    assert same(second.train(3, 6).weights, straight.weights)  # also the norm, a sum in the order that there was


def head_only(task: Any) -> Any:
    optimizer = Adam([{"params": task.head.parameters(), "name": "head"}], lr=0.1)
    return [optimizer], [{"scheduler": lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def thaw(run: Run) -> None:
    (optimizer,) = run.optimization.optimizers
    group = {"params": [*run.task.body.parameters()], "lr": 0.01, "betas": (0.8, 0.9), "name": "body"}  # type: ignore[operator,union-attr]
    optimizer.add_param_group(group)


def test_groups_that_were_added_during_the_run_are_there_again() -> None:
    straight, first = Run(head_only).train(0, 3), Run(head_only).train(0, 3)
    thaw(straight)
    thaw(first)
    first.train(3, 5)
    second = first.continued(head_only)
    assert second.texts == []
    (optimizer,) = second.optimization.optimizers
    assert [group["name"] for group in optimizer.param_groups] == ["head", "body"]
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)
    assert same(second.train(5, 9).weights, straight.train(3, 9).weights)
    third = second.continued(head_only)  # the run's configuration is still the first one
    assert third.texts == []
    assert same(third.train(9, 12).weights, straight.train(9, 12).weights)


def test_groups_that_are_configured_as_they_became_are_taken_as_well() -> None:
    def both(task: Any) -> Any:
        optimizer = Adam([{"params": task.head.parameters(), "name": "head"}], lr=0.1)
        schedulers = [{"scheduler": lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]
        optimizer.add_param_group(
            {"params": [*task.body.parameters()], "lr": 0.01, "betas": (0.8, 0.9), "name": "body"}
        )
        return [optimizer], schedulers

    first = Run(head_only).train(0, 3)
    thaw(first)
    first.train(3, 5)
    second = first.continued(both)
    assert second.texts == []
    assert same(second.train(5, 9).weights, first.train(5, 9).weights)


def test_a_parameter_that_left_the_task_is_named_when_the_state_is_taken() -> None:
    run = Run(adam)
    run.task.head = nn.Linear(4, 3)
    with pytest.raises(
        CheckpointError, match=r"torch\.Adam holds a parameter of shape \(3, 4\) that is not the task's"
    ):
        run.optimization.state_dict()


# What cannot be, and what differs


def refused(taken: Configure, configured: Configure, task: nn.Module | None = None) -> str:
    """The error's text; nothing may have changed by it."""
    state = on_disk(Run(taken).train(0, 4).optimization.state_dict())
    run = Run(configured, task).train(0, 2)
    before = on_disk(run.optimization.state_dict())
    with pytest.raises(CheckpointError) as error:
        run.optimization.load_state_dict(state)
    assert same(run.optimization.state_dict(), before)
    return str(error.value)


def stepped(schedule: Callable[[Any], Any]) -> Configure:
    return partial(scheduled, kind=SGD, rate=0.1, schedule=schedule, interval="step")


def test_other_optimizers_are_refused_by_name() -> None:
    text = refused(adam, lambda task: AdamW(task.parameters()))
    assert "returned are torch.AdamW; the checkpoint's are torch.Adam." in text
    several = OPTIMIZERS["several"]
    assert "returned are torch.Adam; the checkpoint's are torch.SGD, torch.Adam." in refused(several, adam)


def test_other_schedulers_are_refused_by_name_also_inside_others() -> None:
    constant = SCHEDULERS["ConstantLR"]
    text = refused(stepped(constant), stepped(SCHEDULERS["StepLR"]))
    assert (
        "schedulers that configure_optimizers returned are torch.StepLR; the checkpoint's are torch.ConstantLR" in text
    )
    assert "returned are none; the checkpoint's are torch.ConstantLR" in refused(stepped(constant), two_groups)

    def short(o: Optimizer) -> Any:
        return lr_scheduler.SequentialLR(o, [constant(o), SCHEDULERS["StepLR"](o)], milestones=[3])

    text = refused(stepped(sequence), stepped(short))
    assert (
        "returned are torch.SequentialLR of torch.ConstantLR and torch.StepLR; the checkpoint's are torch.Seq" in text
    )


def test_a_parameter_in_another_group_is_refused_by_name() -> None:
    def other(task: Any) -> Optimizer:
        return SGD([{"params": [task.body.weight]}, {"params": [task.body.bias, *task.head.parameters()]}], lr=0.1)

    text = refused(two_groups, other)
    assert text.startswith(
        "The parameter 'body.bias' is in group 1 of torch.SGD; when the checkpoint's run began it was in group 0."
    )
    text = refused(adam, partial(adam, names="body.weight body.bias head.weight"))
    assert "'head.bias' is in no group of torch.Adam; when the checkpoint's run began it was in group 0" in text
    text = refused(partial(adam, names="body.weight body.bias head.weight"), adam)
    assert "'head.bias' is in group 0 of torch.Adam; when the checkpoint's run began it was in no group" in text


def test_other_shapes_are_refused_by_name() -> None:
    task = Net()
    task.head = nn.Linear(4, 5)
    assert (
        refused(adam, adam, task) == "The parameter 'head.weight' of torch.Adam is [5, 4]; the checkpoint's is [3, 4]."
    )


def test_another_number_of_functions_is_refused_because_they_are_not_stored() -> None:
    run = Run(stepped(lambda o: lr_scheduler.LambdaLR(o, lambda _: 1.0))).train(0, 2)
    state = on_disk(run.optimization.state_dict())
    state["schedules"][0]["states"][""]["lr_lambdas"].append(None)
    before = on_disk(run.optimization.state_dict())
    with pytest.raises(CheckpointError, match="LambdaLR had 3 functions, one for each group"):
        run.optimization.load_state_dict(state)
    assert same(run.optimization.state_dict(), before)


def test_an_error_in_an_objects_own_loading_says_whose() -> None:
    class Refuses(SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            raise KeyError("momentum_buffer")

    def configure(task: nn.Module) -> Optimizer:
        return Refuses(task.parameters(), lr=0.1)

    with pytest.raises(CheckpointError, match=r"Refuses could not take back its state: KeyError: 'momentum_buffer'"):
        Run(configure).continued(configure)


def told(taken: Configure, configured: Configure, **settings: Any) -> list[str]:
    return Run(taken).train(0, 4).continued(configured, **settings).texts


def test_changed_settings_are_told_and_the_checkpoints_are_used() -> None:
    def configure(task: nn.Module, rate: Any, decay: float, epochs: int) -> Any:
        optimizer = SGD(task.parameters(), lr=rate, weight_decay=decay, momentum=0.9)
        return [optimizer], [{"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, epochs), "interval": "step"}]

    old, new = (partial(configure, rate=r, decay=d, epochs=e) for r, d, e in ((0.1, 0.0, 8), (0.01, 0.5, 9)))
    rule = "(the run goes on with the checkpoint's)"
    expected = [
        f"learning rate lr: 0.1 -> 0.01 {rule}",
        f"weight_decay: 0.0 -> 0.5 {rule}",
        f"CosineAnnealingLR.T_max: 8 -> 9 {rule}",
    ]
    first = Run(old).train(0, 4)
    second = first.continued(new)
    assert second.texts == expected
    assert same(second.train(4, 8).weights, first.train(4, 8).weights)
    assert second.continued(new).texts == expected  # against the configuration of the run, not that of its second part
    assert second.continued(old).texts == []


def test_a_changed_rate_is_told_as_it_was_given_also_under_a_warm_up() -> None:
    def configure(task: nn.Module, rate: float) -> Any:
        optimizer = SGD(task.parameters(), lr=rate)
        return [optimizer], [{"scheduler": lr_scheduler.LinearLR(optimizer, 0.01), "interval": "step"}]

    (text,) = told(partial(configure, rate=0.1), partial(configure, rate=0.2))
    assert text == "learning rate lr: 0.1 -> 0.2 (the run goes on with the checkpoint's)"


def test_settings_of_several_groups_schedulers_and_tensors_are_told_apart() -> None:
    def configure(task: Any, rate: Any, beta: float, gamma: float) -> Any:
        groups = [{"params": task.body.parameters(), "name": "body"}, {"params": task.head.parameters(), "lr": rate}]
        optimizer = Adam(groups, lr=0.5, betas=(beta, 0.999))
        steps = lr_scheduler.StepLR(optimizer, 3)
        inside = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ExponentialLR(optimizer, gamma)], [])
        return [optimizer], [steps, {"scheduler": inside, "interval": "step"}]

    texts = told(
        partial(configure, rate=torch.tensor(0.5), beta=0.9, gamma=0.5),
        partial(configure, rate=torch.tensor(0.25), beta=0.8, gamma=0.75),
    )
    assert [text.removesuffix(" (the run goes on with the checkpoint's)") for text in texts] == [
        "betas/body: (0.9, 0.999) -> (0.8, 0.999)",
        "learning rate lr/1: 0.5 -> 0.25",
        "betas/1: (0.9, 0.999) -> (0.8, 0.999)",
        "SequentialLR[1]._schedulers.0.gamma: 0.5 -> 0.75",
    ]


def test_when_a_scheduler_is_stepped_is_as_before_and_what_it_watches_is_as_configured() -> None:
    def configure(task: nn.Module, **settings: Any) -> Any:
        return scheduled(task, SGD, 0.1, lambda o: {**plateau(o), **settings}, "epoch")

    first = Run(configure).train(0, 6)
    second = first.continued(partial(configure, frequency=2, monitor="val/accuracy"))
    assert second.texts == [
        "ReduceLROnPlateau.frequency: 1 -> 2 (the run goes on with the checkpoint's)",
        "ReduceLROnPlateau.monitor: val/loss -> val/accuracy (the new name is watched)",
    ]
    assert second.optimization.schedules[0].frequency == 1
    assert second.optimization.monitors == {"val/accuracy"}


# The rest of the state


def scaler(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, **settings)


def scaled(run: Run, steps: range) -> Run:
    """Steps under fp16; every fourth overflows."""
    scaling = run.optimization.scaler
    assert scaling is not None
    for step in steps:
        loss = sum(parameter.sum() for parameter in run.task.parameters())
        scaling.scale(loss * (math.inf if step % 4 == 3 else 0.1 * step)).backward()  # type: ignore[union-attr]
        run.optimization.average(None)
        run.optimization.step()
    return run


def test_the_scale_of_fp16_and_the_skipped_updates_go_on() -> None:
    straight = scaled(Run(adam, scaler=scaler()), range(13))
    for at in range(13):
        first = scaled(Run(adam, scaler=scaler()), range(at))
        second = scaled(first.continued(adam, scaler=scaler()), range(at, 13))
        assert second.texts == []
        assert same(second.optimization.state_dict(), straight.optimization.state_dict())
        assert second.optimization.updates == 10
        assert same(second.weights, straight.weights)


def test_a_scaler_on_one_side_only_is_told() -> None:
    first = scaled(Run(adam, scaler=scaler()), range(4))
    assert first.continued(adam).texts == ["loss scale of fp16: 1024.0 -> none"]
    assert told(adam, adam, scaler=scaler()) == ["loss scale of fp16: none -> 1024.0"]
    assert told(adam, adam, scaler=scaler(enabled=False)) == []
    other = scaler(backoff_factor=0.25)
    (text,) = first.continued(adam, scaler=other).texts
    assert text == "GradScaler.backoff_factor: 0.5 -> 0.25 (the run goes on with the checkpoint's)"
    assert other.get_backoff_factor() == 0.5


def test_what_had_a_value_is_known_after_a_resume() -> None:
    configure = partial(scheduled, kind=SGD, rate=0.1, schedule=plateau, interval="epoch")
    first = Run(configure).train(0, 6)
    second = first.continued(configure)
    assert second.optimization.check_monitors([]) == []
    assert second.optimization.updates == 6


# Data that these states need


@pytest.mark.parametrize(
    "data",
    [
        Counter([4, 2, 2]),
        {"a", "b", 3, (1, 2)},
        frozenset({1.5, None}),
        set(),
        torch.bfloat16,
        {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}},
        {1: {"$x": [(1, {2}), Counter(a=1)]}},
        torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.arange(6).reshape(2, 3).T,
        torch.ones(3, 2, 1, 1).to(memory_format=torch.channels_last),
        torch.arange(6.0).reshape(2, 3).to(torch.complex64).T,
    ],
)
def test_data_comes_back_from_json_with_its_type_and_order(data: Any) -> None:
    assert same(on_disk(data), data)


def test_a_view_with_gaps_comes_back_with_its_values() -> None:
    view = torch.arange(24.0).reshape(4, 6)[:, ::2].T
    assert torch.equal(on_disk(view), view)
    wide = torch.ones(1, 3).expand(4, 3)
    assert torch.equal(on_disk(wide), wide)


def test_sets_are_written_in_the_order_of_their_members() -> None:
    names = [f"name{n}" for n in range(50)]
    assert json.loads(json.dumps(encode(set(names), {}))) == {"$set": sorted(names)}


def test_a_dtype_that_is_none_is_refused() -> None:
    for name in ("load", "float99"):
        with pytest.raises(DataError, match="unknown"):
            decode({"$dtype": name}, {})


@pytest.fixture(autouse=True)
def _own_seed() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
