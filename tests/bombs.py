"""Pretended failures: layers that run out of memory where a test says so, and a task that is made of them.

    task = Bombed()
    task.bombs[0].arm("backward", above=4, ranks=(1,), steps=(2,))   whenever more than 4 samples pass there
    trainer.fit(task, bombed_loader(32))
    task.bombs[0].attempts                                           every pass: where, how many samples, which, fired?

A bomb holds no memory and needs none: forward and backward go as far as they would, and end as an allocator ends them.
For failures of a real allocator see `starved.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from sanctuary_trainer import VisionTask
from tests.small_tasks import loader

Where = Literal["forward", "backward"]
FEATURES, CLASSES, WIDTH = 6, 3, 8
TEXT = "CUDA out of memory. Tried to allocate 20.00 MiB. A bomb went off."


def out_of_memory() -> BaseException:
    """What torch raises on a GPU."""
    return torch.OutOfMemoryError(TEXT)


@dataclass
class Place:
    """Where training is; whoever calls the bombs writes it before each forward.

    Attributes:
        rank: the process.
        stage: "train", "sanity", "val", "test" or "predict".
        step: optimizer steps done.
        batch_idx: number of the batch in its epoch.
        ids: the samples that pass.
    """

    rank: int = 0
    stage: str = "train"
    step: int = 0
    batch_idx: int = 0
    ids: tuple[int, ...] = ()


class Attempt(NamedTuple):
    """Samples that came by a bomb."""

    where: Where
    stage: str
    step: int
    batch_idx: int
    size: int
    ids: tuple[int, ...]
    fired: bool


@dataclass
class Charge:
    """When a bomb fires; see `Bomb.arm`."""

    where: Where
    above: int
    ranks: Sequence[int] | None
    steps: Sequence[int] | None
    batch_idxs: Sequence[int] | None
    stages: Sequence[str]
    times: int | None
    error: Callable[[], BaseException]

    def fires(self, where: Where, size: int, at: Place) -> bool:
        """Whether it is its turn; counts down."""
        fires = (
            where == self.where
            and size > self.above
            and self.times != 0
            and at.stage in self.stages
            and (self.ranks is None or at.rank in self.ranks)
            and (self.steps is None or at.step in self.steps)
            and (self.batch_idxs is None or at.batch_idx in self.batch_idxs)
        )
        if fires and self.times is not None:
            self.times -= 1
        return fires


class Bomb(nn.Module):
    """Lets everything pass, forward and backward, unless it is armed.

    Attributes:
        attempts: every pass since it was made, in order; one that is run without gradients has no backward.
    """

    def __init__(self, place: Place | None = None) -> None:
        super().__init__()
        self.place = Place() if place is None else place
        self.charges: list[Charge] = []
        self.attempts: list[Attempt] = []

    def arm(
        self,
        where: Where,
        above: int,
        ranks: Sequence[int] | None = None,
        steps: Sequence[int] | None = None,
        batch_idxs: Sequence[int] | None = None,
        stages: Sequence[str] = ("train",),
        times: int | None = None,
        error: Callable[[], BaseException] = out_of_memory,
    ) -> None:
        """Fire whenever more than `above` samples pass at such a place, at most `times`; None: anywhere, always."""
        self.charges.append(Charge(where, above, ranks, steps, batch_idxs, stages, times, error))

    def disarm(self) -> None:
        """Let everything pass from now on."""
        self.charges.clear()

    def forward(self, passing: torch.Tensor) -> torch.Tensor:
        """passing: (B, ...), returned as it is."""
        at = Place(**vars(self.place))
        self.pass_by("forward", len(passing), at)
        result: torch.Tensor = _Pass.apply(passing, self, at)
        return result

    def pass_by(self, where: Where, size: int, at: Place) -> None:
        charge = next((charge for charge in self.charges if charge.fires(where, size, at)), None)
        self.attempts.append(Attempt(where, at.stage, at.step, at.batch_idx, size, at.ids, charge is not None))
        if charge is not None:
            raise charge.error()


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passing: torch.Tensor, bomb: Bomb, at: Place) -> torch.Tensor:
        ctx.bomb, ctx.at, ctx.size = bomb, at, len(passing)
        return passing.view_as(passing)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.bomb.pass_by("backward", ctx.size, ctx.at)
        return gradients[0], None, None


class Bombed(VisionTask):
    """A network with a bomb behind every layer: `bombs[0]` behind the first, `bombs[-1]` behind the head.

    In backward `bombs[-1]` goes off before any parameter has its gradient, `bombs[i]` when those of the layers behind
    it have theirs, `bombs[0]` when only the first layer's are missing.

    Args:
        layers: hidden layers, each linear, norm, tanh, dropout.
        norm: "none", "ln" (layer norm) or "bn" (batch norm).
        dropout: probability.
        unused: a layer that no step uses.
        frozen: the first layer requires no gradient, so that backward does not come to `bombs[0]`.
        tied: the fourth layer's weight is the second's.
        shared: also parameters whose gradients autograd makes as one tensor (in a batch of one sample), or as one
            number seen many times: nothing may be added to them in place.
        weighted: the loss is a weighted mean and the step returns the sum of the weights; some samples weigh nothing.
        seed: of the weights.
        dtype: of parameters and features.
    """

    def __init__(
        self,
        layers: int = 5,
        norm: Literal["none", "ln", "bn"] = "none",
        dropout: float = 0.0,
        unused: bool = False,
        frozen: bool = False,
        tied: bool = False,
        shared: bool = False,
        weighted: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.weighted, self.dtype = weighted, dtype
        self.place = Place()
        self.layers = nn.ModuleList()
        for index in range(layers):
            norms = {"none": nn.Identity, "ln": lambda: nn.LayerNorm(WIDTH), "bn": lambda: nn.BatchNorm1d(WIDTH)}
            linear = nn.Linear(WIDTH if index else FEATURES, WIDTH)
            self.layers.append(nn.Sequential(linear, norms[norm](), nn.Tanh(), nn.Dropout(dropout)))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.unused = nn.Linear(3, 3) if unused else None
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(1, WIDTH)) for _ in range(3 if shared else 0))
        self.bombs = nn.ModuleList(Bomb(self.place) for _ in range(layers + 1))
        self.accuracy, self.val_accuracy = MulticlassAccuracy(CLASSES), MulticlassAccuracy(CLASSES)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.to(dtype)
        if tied:
            self.layers[3][0].weight = self.layers[1][0].weight  # type: ignore[index, union-attr]
        if frozen:
            self.layers[0].requires_grad_(False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """features: (B, FEATURES); returns logits (B, CLASSES)."""
        for index, (layer, bomb) in enumerate(zip(self.layers, self.bombs, strict=False)):
            features = bomb(layer(features))
            if index == 1 and len(self.shifts):
                features = features + self.shifts[0] + self.shifts[1]
        logits: torch.Tensor = self.bombs[-1](self.head(features))
        return logits

    def arrive(self, ids: torch.Tensor, batch_idx: int) -> None:
        """Tell the bombs where the run is; a plain loop writes to `place` itself."""
        self.place.rank, self.place.stage = self.run.rank, self.run.stage
        self.place.step = self.run.state.global_step
        self.place.batch_idx, self.place.ids = batch_idx, tuple(ids.tolist())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, features, labels = batch
        self.arrive(ids, batch_idx)
        logits = self(features)
        self.accuracy.update(logits.detach(), labels)
        self.log("accuracy", self.accuracy)
        self.log("first_feature", features[:, 0].mean(), on_step=True, on_epoch=True)
        if not self.weighted:
            loss = nn.functional.cross_entropy(logits, labels)
            return loss + 0.01 * self.shifts[2].sum() if len(self.shifts) else loss
        weights = ((3 * ids) % 5).to(self.dtype)  # of every five samples one weighs nothing
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        return {"loss": (each * weights).sum() / weights.sum(), "weight": weights.sum()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        ids, features, labels = batch
        self.arrive(ids, batch_idx)
        logits = self(features)
        self.val_accuracy.update(logits, labels)
        self.log("accuracy", self.val_accuracy)
        self.log("loss", nn.functional.cross_entropy(logits, labels))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.arrive(batch[0], batch_idx)
        return self(batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def bombed_samples(
    count: int, seed: int = 1, dtype: torch.dtype = torch.float64
) -> list[tuple[int, torch.Tensor, int]]:
    """`count` samples: id 0, 1, ..., features (FEATURES,), label in 0..CLASSES-1."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, CLASSES, (count,), generator=generator).tolist()
    return list(zip(range(count), features, labels, strict=True))


def bombed_loader(count: int, batch_size: int = 8, **settings: Any) -> DataLoader[Any]:
    """Batches of ids (B,) int64, features (B, FEATURES), labels (B,) int64."""
    dtype = settings.pop("dtype", torch.float64)
    return loader(bombed_samples(count, dtype=dtype), batch_size, **settings)
