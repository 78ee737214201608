"""An optimizer's first step that runs out of memory is made once more, or all is as it was; a later one is an error."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from sanctuary_trainer import OutOfMemoryError, optimizer_memory
from sanctuary_trainer.optimization import Optimization
from sanctuary_trainer.optimizer_memory import step_within_memory

TEXT = "CUDA out of memory. Tried to allocate 1.00 GiB"
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, weight_decay=0.1),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, momentum=0.5),
    "Writing": lambda groups: Writing(groups),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda groups: torch.optim.Muon([p for g in groups for p in g["params"] if p.ndim == 2])


@pytest.fixture(autouse=True)
def _no_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It takes seconds here over hundreds of steps, and nothing may depend on it."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    gc.disable()
    yield
    gc.enable()


class Writing(torch.optim.Optimizer):
    """Keeps numbers, lists and dicts besides tensors, and a count in its groups."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, history=[], parts={"mean": torch.zeros_like(p)}, name="own")
                state["step"] += 1
                state["history"].append(float(p.grad.sum()))
                state["parts"]["mean"].lerp_(p.grad, 0.5)
                p.sub_(state["parts"]["mean"] * (group["lr"] / group["count"]))


class Running(torch.utils._python_dispatch.TorchDispatchMode):
    """Memory that runs out at the n-th allocations of what is run under it, counted from 1."""

    def __init__(self, *failing: int) -> None:
        super().__init__()
        self.failing, self.count = failing, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Operations in place allocate nothing, and what is kept on the host is not the device's.
        space, name = func._schema.name.split("::")
        if space == "aten" and not name.endswith("_") and name not in ("detach", "_to_copy", "alias", "view"):
            self.count += 1
            if self.count in self.failing:
                raise torch.OutOfMemoryError(TEXT)
        return func(*args, **(kwargs or {}))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = network()
    halves = list(net.parameters())
    return net, OPTIMIZERS[name]([{"params": halves[:3]}, {"params": halves[3:], "lr": 0.05}])


def gradients(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def plain(value: Any) -> Any:
    """State with its tensors as lists, so that it can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def everything(net: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    return plain([dict(net.named_parameters()), *(optimizer.state_dict() for optimizer in optimizers)])


def without_foreach(state: Any) -> Any:
    for group in state[1]["param_groups"]:
        group.pop("foreach", None)
    return state


def refuse(error: BaseException, *, retried: bool) -> None:
    raise AssertionError("nothing ran out")


class Events(list[tuple[str, bool]]):
    def __call__(self, error: BaseException, *, retried: bool) -> None:
        self.append((str(error), retried))


def close(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            close(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            close(one, other)
    elif isinstance(a, float):
        assert a == pytest.approx(b, abs=1e-12)
    else:
        assert a == b


def allocations(name: str, steps: int) -> int:
    """How many there are in that step, from 1."""
    net, optimizer = build(name)
    for step in range(steps):
        gradients(net, step)
        with Running() as running:
            optimizer.step()
    return running.count


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_where_memory_suffices_the_steps_are_the_optimizers_own(name: str) -> None:
    (net, optimizer), (other, straight) = build(name), build(name)
    for step in range(4):
        for module in (net, other):
            gradients(module, step)
        step_within_memory([optimizer], on_event=refuse)
        straight.step()
    assert everything(net, optimizer) == everything(other, straight)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_first_step_is_made_again_wherever_memory_ran_out(name: str) -> None:
    reference, straight = build(name)
    gradients(reference, 0)
    straight.step()
    count = allocations(name, 1)
    assert count > 0 or name in ("SGD", "AdamW fused")
    for failing in range(1, count + 1):
        (net, optimizer), events = build(name), Events()
        gradients(net, 0)
        with Running(failing):
            step_within_memory([optimizer], on_event=events)
        assert events == [(TEXT, True)]
        groups = [g for g in optimizer.param_groups if "foreach" in g and not g.get("fused")]
        assert all(group["foreach"] is False for group in groups)
        # Without foreach, sums are of another order.
        close(without_foreach(everything(net, optimizer)), without_foreach(everything(reference, straight)))
        if name != "AdamW foreach":
            assert [p.tolist() for p in net.parameters()] == [p.tolist() for p in reference.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_first_step_that_fails_twice_leaves_all_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on an accelerator, whose copies lie elsewhere.
    monkeypatch.setattr(optimizer_memory, "_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(optimizer_memory, "peak", lambda device: f"21.0 GiB of 24.0 GiB on {device}")
    for failing in range(1, allocations(name, 1) + 1):
        (net, optimizer), events = build(name), Events()
        gradients(net, 0)
        before = everything(net, optimizer)
        with Running(failing, failing + 1), pytest.raises(OutOfMemoryError) as caught:
            step_within_memory([optimizer], on_event=events)
        assert events == [(TEXT, False)]
        assert everything(net, optimizer) == before
        assert not optimizer.state
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert "Nothing moved" in str(caught.value)
        assert "The peak was 21.0 GiB of 24.0 GiB on cuda." in str(caught.value)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """Each that is made from here on."""
    made: list[weakref.ref[torch.Tensor]] = []
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = original(self, *args, **kwargs)
        made.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(torch.Tensor, "to", to)
    return made


def test_on_a_cpu_the_second_try_has_the_memory_of_the_copies(copies: list[weakref.ref[torch.Tensor]]) -> None:
    net, optimizer = build("AdamW")
    gradients(net, 0)
    left = []
    optimizer.register_step_pre_hook(lambda *_: left.append(sum(copy() is not None for copy in copies)))
    with Running(15, 30), pytest.raises(OutOfMemoryError, match=r"second try.* may be half updated.*in this process"):
        step_within_memory([optimizer], on_event=Events())
    assert left == [6, 0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_later_step_is_not_repeated_and_ends_with_an_error(name: str) -> None:
    tries: list[int] = []
    for failing in range(1, allocations(name, 3) + 1):
        (net, optimizer), events = build(name), Events()
        for step in range(2):
            gradients(net, step)
            step_within_memory([optimizer], on_event=refuse)
        gradients(net, 2)
        tries.clear()
        optimizer.register_step_pre_hook(lambda *_: tries.append(1))
        with Running(failing), pytest.raises(OutOfMemoryError, match="may be half updated") as caught:
            step_within_memory([optimizer], on_event=events)
        assert tries == [1]
        assert events == [(TEXT, False)]
        assert 'fit(resume="last")' in str(caught.value)
        assert "GiB in this process" in str(caught.value)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert not any(group.get("foreach") is False for group in optimizer.param_groups)


def test_optimizers_that_have_stepped_are_not_stepped_again() -> None:
    net = network()
    parameters = list(net.parameters())
    first = torch.optim.SGD(parameters[:3], lr=0.1)
    second = torch.optim.AdamW(parameters[3:], lr=0.1)
    reference = network()
    gradients(net, 0)
    gradients(reference, 0)
    torch.optim.SGD(list(reference.parameters())[:3], lr=0.1).step()
    torch.optim.AdamW(list(reference.parameters())[3:], lr=0.1).step()
    steps = []
    first.register_step_post_hook(lambda *_: steps.append(1))
    second.register_step_pre_hook(lambda *_: steps.append(2))
    events = Events()
    with Running(3):
        step_within_memory([first, second], on_event=events)
    assert steps == [1, 2, 2]
    assert events == [(TEXT, True)]
    assert [p.tolist() for p in net.parameters()] == [p.tolist() for p in reference.parameters()]


def test_the_first_step_after_parameters_were_added_is_made_again() -> None:
    (net, ours), (reference, straight) = (build_in_two() for _ in range(2))
    for step in range(2):
        for module, optimizer in ((net, ours), (reference, straight)):
            gradients(module, step)
            if step == 1:
                optimizer.add_param_group({"params": list(module.parameters())[3:], "lr": 0.05})
        with Running(*[14] * step):  # the first ones have moved by then
            step_within_memory([ours], on_event=Events() if step else refuse)
        straight.step()
    assert without_foreach(everything(net, ours)) == without_foreach(everything(reference, straight))


def build_in_two() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The second half of the parameters is added later."""
    net = network()
    return net, torch.optim.AdamW(list(net.parameters())[:3], lr=0.1)


def test_what_a_first_step_finds_loaded_is_put_back() -> None:
    (net, straight), (other, ours) = build("RMSprop"), build("RMSprop")
    for step in range(2):
        gradients(net, step)
        straight.step()
    other.load_state_dict(net.state_dict())
    ours.load_state_dict(deepcopy(straight.state_dict()))
    for module in (net, other):
        gradients(module, 2)
    with Running(allocations("RMSprop", 3)):
        step_within_memory([ours], on_event=Events())
    straight.step()
    assert without_foreach(everything(other, ours)) == without_foreach(everything(net, straight))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "SGD momentum", "Writing"])
def test_copies_are_made_for_the_first_step_alone(name: str, copies: list[weakref.ref[torch.Tensor]]) -> None:
    net, optimizer = build(name)
    counts = []
    for step in range(3):
        copies.clear()
        gradients(net, step)
        net[0].bias.grad = None  # type: ignore[union-attr]
        step_within_memory([optimizer], on_event=refuse)
        assert not any(copy() is not None for copy in copies)
        counts.append(len(copies))
    assert counts == [5, 0, 0]


def test_copies_that_do_not_fit_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes.")

    monkeypatch.setattr(torch.Tensor, "to", none)
    (net, optimizer), (other, straight) = build("AdamW"), build("AdamW")
    for module in (net, other):
        gradients(module, 0)
    step_within_memory([optimizer], on_event=refuse)
    straight.step()
    assert everything(net, optimizer) == everything(other, straight)
    (net, optimizer), events = build("AdamW"), Events()
    gradients(net, 0)
    with Running(2), pytest.raises(OutOfMemoryError, match=r"nor did copies.* may be half updated"):
        step_within_memory([optimizer], on_event=events)
    assert events == [(TEXT, False)]


def test_another_error_in_a_step_goes_through_at_once() -> None:
    net, optimizer = build("AdamW")
    gradients(net, 0)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("shape mismatch")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        step_within_memory([optimizer], on_event=refuse)
    assert calls == [1]


class Large(Writing):
    """Fails once while it holds a large tensor."""

    large: weakref.ref[torch.Tensor] | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.large is None:
            large = torch.ones(100_000)
            self.large = weakref.ref(large)
            raise torch.OutOfMemoryError(TEXT)
        assert self.large() is None
        super().step()


def test_what_the_first_try_held_is_free_before_the_second() -> None:
    net = network()
    optimizer = Large(net.parameters())
    gradients(net, 0)
    step_within_memory([optimizer], on_event=Events())
    assert len(optimizer.state) == 6


def test_timms_lookahead_is_put_back_with_the_optimizer_inside_it() -> None:
    lookahead = pytest.importorskip("timm.optim").Lookahead
    nets = [network(), network()]
    ours, straight = (lookahead(torch.optim.AdamW(net.parameters(), lr=0.1), k=2) for net in nets)
    for step in range(4):
        for net in nets:
            gradients(net, step)
        with Running(*[[14], [], [], []][step]):
            step_within_memory([ours], on_event=Events())
        straight.step()
    assert without_foreach(everything(nets[0], ours)) == without_foreach(everything(nets[1], straight))
    assert ours.param_groups[0]["lookahead_step"] == 4


@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimization_retries_where_somebody_is_told(scaled: bool) -> None:
    results = []
    for failing in ((), (9,)):
        net = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
        optimization = Optimization(torch.optim.AdamW(net.parameters(), lr=0.1), net, scaler=scaler)
        assert optimization.on_out_of_memory is None
        optimization.on_out_of_memory = events = Events()
        gradients(net, 0)
        if scaler is not None:
            scaler.scale(torch.zeros(()))
        with Running(*failing) if not scaled else FailingStep(optimization, bool(failing)):
            optimization.average(None)
            assert optimization.step()
        assert events == ([(TEXT, True)] if failing else [])
        assert optimization.updates == 1
        results.append([p.tolist() for p in net.parameters()])
    assert results[0] == results[1]


class FailingStep:
    """The first step fails at the end, after everything moved."""

    def __init__(self, optimization: Optimization, fails: bool) -> None:
        self.left = fails
        optimization.optimizers[0].register_step_post_hook(self.fail)

    def fail(self, *_: Any) -> None:
        if self.left:
            self.left = False
            raise torch.OutOfMemoryError(TEXT)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_without_anybody_the_error_of_the_step_comes_out_as_it_is() -> None:
    net = network()
    optimization = Optimization(torch.optim.AdamW(net.parameters(), lr=0.1), net)
    gradients(net, 0)
    with FailingStep(optimization, True), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        optimization.step()
