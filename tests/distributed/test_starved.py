"""A batch that torch's own allocator has no memory for is trained all the same, on one rank or on one of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sanctuary_trainer import OutOfMemoryError
from sanctuary_trainer.callbacks import OOMFallback
from tests.distributed.workers import Ranks
from tests.small_tasks import quiet_trainer, weights
from tests.starved import SPARE_MB, Hungry, Starve, fresh, hungry_loader, starved, steady_allocator

KINDS = pytest.mark.parametrize("where", ["forward", "backward"])


def plain_loop(where: Any) -> Any:
    """Where batches of 64, 32 and 16 fail."""
    steady_allocator()
    task = Hungry(where)

    def step(size: int) -> str:
        features, labels = next(iter(hungry_loader(size, size)))
        # A backward that broke off leaves gradients on torch's queue, until the next one.
        torch.zeros((), requires_grad=True).square().backward()
        phase = "forward"
        try:
            with starved(SPARE_MB[where]):
                loss = nn.functional.cross_entropy(task(features), labels)
                phase = "backward"
                loss.backward()
        except RuntimeError as error:
            return phase if "DefaultCPUAllocator: can't allocate memory" in str(error) else str(error)
        return "fits"

    return [step(size) for size in (2, 64, 32, 16)]


@KINDS
def test_a_plain_loop_fails_with_64_and_32_samples_and_not_with_16(one_rank: Ranks, where: str) -> None:
    assert one_rank(plain_loop, where) == [["fits", where, where, "fits"]]


def test_a_fresh_process_is_as_steady_as_a_forked_one() -> None:
    assert fresh(plain_loop, "backward") == ["fits", "backward", "backward", "fits"]


def train(where: Any, rank: int | None = None) -> Any:
    """Weights, events and loss of three steps; the second and third starved on `rank`, if any."""
    steady_allocator()
    task = Hungry(where)
    callbacks: list[Any] = [OOMFallback()] + ([] if rank is None else [Starve(SPARE_MB[where], rank)])
    result = quiet_trainer(max_steps=3, callbacks=callbacks, timeout=60).fit(task, hungry_loader(6 * 64))
    events = [(event.rank, event.step, event.phase, event.tried, event.piece_size) for event in result.oom_events]
    return weights(task), events, result.metrics["train/loss_epoch"]


@KINDS
def test_a_starved_fit_ends_with_the_weights_of_one_that_is_not(one_rank: Ranks, where: str) -> None:
    [(expected, none, loss)] = one_rank(train, where)
    [(found, events, loss_too)] = one_rank(train, where, rank=0)
    assert none == [] and events == [(0, 1, where, 64, 16)]
    assert torch.allclose(found, expected, rtol=0, atol=1e-12) and loss_too == pytest.approx(loss, abs=1e-12)


@KINDS
def test_one_rank_alone_is_starved_and_no_rank_can_tell(two_ranks: Ranks, where: str) -> None:
    (expected, none, loss), _ = two_ranks(train, where)
    (found, events, loss_too), (found_too, events_too, _) = two_ranks(train, where, rank=1)
    assert none == [] and events == events_too == [(1, 1, where, 64, 16)]
    assert torch.equal(found, found_too)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12) and loss_too == pytest.approx(loss, abs=1e-12)


class Vast(Hungry):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.run.state.global_step:
            torch.zeros(500_000_000, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)


def train_what_never_fits() -> Any:
    steady_allocator()
    with pytest.raises(OutOfMemoryError) as caught:
        quiet_trainer(max_steps=3, callbacks=[OOMFallback(), Starve(200.0)]).fit(Vast(), hungry_loader(128, 8))
    cause = caught.value.__cause__
    return str(caught.value), type(cause).__name__, str(cause)


def test_what_not_even_one_sample_fits_into_is_an_error_with_the_allocators_own_as_its_cause(one_rank: Ranks) -> None:
    [(text, kind, cause)] = one_rank(train_what_never_fits)
    assert "1 sample" in text or "one sample" in text
    assert kind == "RuntimeError" and "500000000 bytes" in cause
