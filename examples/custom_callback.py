"""Three ways to add behaviour to a run without touching the loop.

    python examples/custom_callback.py

A callback holds a policy of its own and is given to the Trainer, as an instance or by its registered name. A task may
define any hook too. Hooks have the same names in both; a misspelt one is refused when the class is defined.
"""

import os

import torch
import torch.nn.functional as F
from minimal import Digits, digits
from torch import Tensor
from torch.utils.data import DataLoader

from sanctuary_trainer import Callback, Run, Trainer, register_callback


@register_callback("stop_when_good")
class StopWhenGood(Callback):
    """Ends the run once a metric has been good enough in several validations in a row."""

    def __init__(self, monitor: str = "val/accuracy", at_least: float = 0.95, times: int = 2) -> None:
        self.monitor, self.at_least, self.times = monitor, at_least, times
        self.in_a_row = 0

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        if stage != "val":
            return
        self.in_a_row = self.in_a_row + 1 if metrics[self.monitor] >= self.at_least else 0
        if self.in_a_row == self.times:
            # The metrics are the same on all processes, and so is the decision.
            run.stop(f"{self.monitor} was at least {self.at_least:g} for {self.times} validations")

    # What a resumed run must know.
    def state_dict(self) -> dict[str, int]:
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.in_a_row = state["in_a_row"]


class HardestImages(Callback):
    """Shows, after each validation, the images with the largest loss. `validation_step` returns the losses, (B,)."""

    def __init__(self, count: int = 16) -> None:
        self.count = count
        self.hardest: list[tuple[float, Tensor]] = []

    def on_evaluation_batch_end(self, run: Run, stage: str, batch, outputs: Tensor, sample_indices) -> None:
        losses, places = outputs.topk(min(self.count, len(outputs)))
        self.hardest += zip(losses.tolist(), batch[0][places], strict=True)
        self.hardest = sorted(self.hardest, key=lambda pair: pair[0], reverse=True)[: self.count]

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        if self.hardest:
            run.log_image("hardest", torch.stack([image for _, image in self.hardest]))
        self.hardest = []


class DigitsWithLosses(Digits):
    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.model(images)
        self.log("accuracy", (logits.argmax(-1) == labels).float().mean(), prog_bar=True)
        return F.cross_entropy(logits, labels, reduction="none")

    def on_train_epoch_end(self, run: Run) -> None:
        self.log("weight_norm", torch.stack([p.detach().norm() for p in self.parameters()]).norm())


def main(max_epochs: int = 20) -> None:
    torch.manual_seed(0)
    train, test = digits()
    trainer = Trainer(max_epochs=max_epochs, seed=0, callbacks=["stop_when_good", HardestImages()])
    result = trainer.fit(DigitsWithLosses(), DataLoader(train, 32, shuffle=True), DataLoader(test, 128))
    if os.environ.get("RANK", "0") != "0":
        return  # every process has the results, one prints them
    print(f"stopped after {result.global_step} steps: {result.stop_reason}")


if __name__ == "__main__":
    main()
