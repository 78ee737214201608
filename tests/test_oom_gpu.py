"""On an accelerator whose memory is truly too small: a batch that does not fit is trained all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sanctuary_trainer import Callback, OutOfMemoryError, Run, VisionTask
from sanctuary_trainer.callbacks import OOMFallback
from tests.small_tasks import loader, quiet_trainer, weights
from tests.starved import Hungry, hungry_loader

pytestmark = [pytest.mark.gpu]


class Gauge(Callback):
    """Measures what the second step takes; with `spare_bytes` no more is given from then on."""

    def __init__(self, spare_bytes: int | None = None) -> None:
        self.spare_bytes = spare_bytes
        self.taken_bytes = 0

    def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
        if run.state.global_step != 1:
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        if self.spare_bytes is not None:
            _, total = torch.cuda.mem_get_info()
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + self.spare_bytes) / total)

    def on_train_step_end(self, run: Run) -> None:
        if run.state.global_step == 2:
            self.taken_bytes = torch.cuda.max_memory_allocated() - self._before

    def on_fit_end(self, run: Run) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0)


class ConvNet(VisionTask):
    """Eight convolutions on 32 x 32 pixels in float64: about 5 MB a sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
        for _ in range(8):
            layers += [nn.GroupNorm(4, 16), nn.GELU(), nn.Dropout(0.1), nn.Conv2d(16, 16, 3, padding=1)]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def images(count: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(count, 3, 32, 32, generator=generator, dtype=torch.float64)
    return loader(list(zip(pixels, torch.randint(0, 3, (count,), generator=generator).tolist(), strict=True)), 64)


def train(kind: str, spare_bytes: int | None = None) -> Any:
    task: Any = ConvNet() if kind == "conv" else Hungry(kind)  # type: ignore[arg-type]
    batches = images(3 * 64) if kind == "conv" else hungry_loader(3 * 64)
    gauge = Gauge(spare_bytes)
    torch.cuda.manual_seed_all(3)  # dropout's
    result = quiet_trainer(max_steps=3, cpu=None, callbacks=[gauge, OOMFallback()]).fit(task, batches)
    return weights(task).cpu(), result.oom_events, gauge.taken_bytes


@pytest.mark.parametrize(
    ("kind", "phase", "share"),
    # The forward of "backward" takes a third of what its backward does, and so fits into a half.
    [("conv", None, 3), ("forward", "forward", 3), ("backward", "backward", 2)],
)
def test_a_batch_that_does_not_fit_on_the_device_gives_the_update_of_one_that_does(
    kind: str, phase: str | None, share: int
) -> None:
    expected, none, taken = train(kind)
    found, events, taken_in_pieces = train(kind, spare_bytes=taken // share)
    assert none == () and len(events) == 1
    [event] = events
    assert (event.step, event.stage, event.tried, event.remedy) == (1, "train", 64, "pieces")
    assert phase in (None, event.phase) and 1 <= event.piece_size <= 32
    assert "out of memory" in event.reason
    assert taken_in_pieces < taken
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)


def test_what_not_even_one_sample_fits_into_is_an_error_and_the_device_is_usable_afterwards() -> None:
    class Vast(Hungry):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.run.state.global_step:
                torch.zeros(1 << 30, dtype=torch.uint8, device=self.device)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_steps=3, cpu=None, callbacks=[Gauge(1 << 29), OOMFallback()])
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.fit(Vast(), hungry_loader(3 * 8, 8))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert train("forward")[1] == ()
