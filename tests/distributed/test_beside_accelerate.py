"""Weights are bit for bit those of accelerate's own loop, so nothing of `prepare` is given up for speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.workers import Ranks
from tests.small_tasks import Net, classes, quiet_trainer, weights


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def data(batch_size: int) -> DataLoader[Any]:
    samples = classes(64)
    features = torch.stack([features for features, _ in samples]).float()
    return DataLoader(TensorDataset(features, torch.tensor([label for _, label in samples])), batch_size=batch_size)


def ours(precision: str, accumulation: int) -> torch.Tensor:
    task = Scheduled().float()
    quiet_trainer(
        max_epochs=3, mixed_precision=precision, gradient_accumulation_steps=accumulation, gradient_clip_val=0.5
    ).fit(task, data(4))
    return weights(task)


def accelerates(precision: str, accumulation: int) -> torch.Tensor:
    from accelerate import Accelerator

    # Their loop divides a short last window by its full length; here each window divides by its own, as it should.
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    task = Net().float()
    model, optimizer = task.net, task.configure_optimizers()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    ranks, rank = accelerator.num_processes, accelerator.process_index
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        batches = list(data(4 * ranks))
        for start in range(0, len(batches), accumulation):
            window = batches[start : start + accumulation]
            for number, (features, labels) in enumerate(window):
                mine = slice(4 * rank, 4 * rank + 4)
                last = number == len(window) - 1
                with torch.enable_grad() if last else accelerator.no_sync(prepared):
                    loss = nn.functional.cross_entropy(prepared(features[mine]), labels[mine])
                    accelerator.backward(loss / len(window))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            prepared_optimizer.step()
            prepared_optimizer.zero_grad()
            scheduler.step()
    return weights(task)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_one_process_computes_what_accelerates_loop_does(one_rank: Ranks, precision: str, accumulation: int) -> None:
    assert torch.equal(one_rank(ours, precision, accumulation)[0], one_rank(accelerates, precision, accumulation)[0])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_ranks_compute_what_accelerates_loop_does(two_ranks: Ranks, accumulation: int) -> None:
    for found, expected in zip(
        two_ranks(ours, "no", accumulation), two_ranks(accelerates, "no", accumulation), strict=True
    ):
        assert torch.equal(found, expected)
