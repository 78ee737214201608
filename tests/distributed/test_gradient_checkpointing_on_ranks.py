"""Gradient checkpointing on several ranks: DDP sums the gradients of a run without it, whatever it looks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sanctuary_trainer import RankError, SettingsError
from sanctuary_trainer.callbacks import EMA, GradientCheckpointing
from tests.callbacks.test_gradient_checkpointing import (
    Block,
    Images,
    Stack,
    fit,
    images,
    same,
    samples,
    state,
    tiny_vit,
)
from tests.distributed.workers import Ranks
from tests.small_tasks import loader


class Skips(nn.Module):
    """Leaves its last block out, so that its parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def frozen() -> Stack:
    task = Stack(norm=True)
    task.body[0].requires_grad_(False)
    return task


def skipping() -> Stack:
    torch.manual_seed(0)
    return Stack(Skips())


def vit() -> Images:
    return Images(tiny_vit())


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "dropout and batch norm": (lambda: Stack(norm=True, dropout=0.3), {}),
    "frozen": (frozen, {}),
    "unused": (skipping, {"find_unused_parameters": True}),
    "accumulated": (lambda: Stack(dropout=0.3), {"gradient_accumulation_steps": 2}),
    "transformers": (vit, {}),
    "transformers, looking for unused": (vit, {"find_unused_parameters": True}),
}


def train_both(kind: str) -> list[dict[str, Tensor]]:
    make, settings = KINDS[kind]
    data = images(8) if kind.startswith("transformers") else samples(16)
    states, told = [], []
    for callbacks in ([], [GradientCheckpointing()]):
        task = make()
        fit(task, EMA(0.9), *callbacks, data=loader(data, 2), val=loader(data, 4), **settings)
        states.append(state(task))
        told.append((task.losses, [dict(gradients) for gradients in task.gradients]))
    (plain, gradients), (losses, checkpointed) = told
    assert plain == losses and len(gradients) == len(checkpointed) > 0
    assert all(map(same, gradients, checkpointed))
    return states


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_as_without_it(two_ranks: Ranks, kind: str) -> None:
    for plain, checkpointed in two_ranks(train_both, kind):
        assert same(plain, checkpointed)


def train(batch_size: int, on: bool) -> dict[str, Tensor]:
    task = Stack()
    fit(task, *([GradientCheckpointing()] if on else []), data=loader(samples(16), batch_size))
    return state(task)


def test_2_ranks_train_as_1_does(one_rank: Ranks, two_ranks: Ranks) -> None:
    [expected] = one_rank(train, 8, False)
    for found in two_ranks(train, 4, True):
        assert all(torch.allclose(found[name], expected[name], rtol=0, atol=1e-12) for name in expected)


def train_compiled() -> float:
    found = []
    for callbacks in ([], [GradientCheckpointing()]):
        torch.compiler.reset()
        task = Stack(norm=True)
        fit(task, *callbacks, data=loader(samples(16), 4), compile="aot_eager")
        found.append(state(task))
    return max((found[0][name] - found[1][name]).abs().max().item() for name in found[0])


@pytest.mark.slow
def test_compiled_on_2_ranks(two_ranks: Ranks) -> None:
    assert max(two_ranks(train_compiled, timeout=100.0)) < 1e-12


def fail_to_find() -> str:
    with pytest.raises((SettingsError, RankError)) as caught:
        fit(Stack(), GradientCheckpointing("no.such"))
    return str(caught.value)


def test_what_matches_nothing_is_an_error_on_every_rank(two_ranks: Ranks) -> None:
    for found in two_ranks(fail_to_find):
        assert "no.such" in found
