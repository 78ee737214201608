"""One batch: forward, backward, gradient sync. `run.execute(batch, sync)` is this, unless a callback wraps it.

    window = executor.begin(expected)            expected: samples of the window over all ranks, alike on all ranks
      execute(batch, sync) for each batch        sync on the window's last batch of this rank only
        training_step under autocast             -> loss, weight n
        backward of loss x n x ranks / expected  (DDP averages over the ranks, hence x ranks)
      or join()                                  when this rank has nothing that syncs: zeros, weight 0
    result = executor.finish()                   -> factor expected / actual, is there an update, what ranks asked

On several ranks the module that DDP wraps owns one parameter more, `ride`, of a few floats. Its gradient is filled with
this rank's weight and flags, so that DDP's own buckets carry their sums over the ranks: no collective is added. Only
where a communication hook compresses the gradients, the sums take an all-reduce of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from sanctuary_trainer.devices import Devices
from sanctuary_trainer.errors import TaskError
from sanctuary_trainer.recovery import zero_loss

if TYPE_CHECKING:
    from sanctuary_trainer.task import VisionTask

# What rides: the weight, samples and batches of this rank in the window, and how many ranks say each of these.
RIDE = ("weight", "samples", "batches", "more", "stop", "failed")
_NOTHING = [0.0] * len(RIDE)


class Window(NamedTuple):
    """What came out of a window, alike on all ranks.

    Attributes:
        updates: False when every rank's whole window was left out.
        factor: what the gradients are still to be multiplied with; None when that is 1.
        samples: samples of the window over all ranks.
        batches: batches of the window over all ranks.
        more: whether any rank has more batches.
        stop: whether any rank asked to stop.
        failed: whether any rank failed.
    """

    updates: bool
    factor: float | torch.Tensor | None
    samples: int
    batches: int
    more: bool
    stop: bool
    failed: bool


class Dispatch(nn.Module):
    """What DDP wraps: calls a step of the task and returns what backward starts from."""

    ride: nn.Parameter | None

    def __init__(self, task: nn.Module, *, joins: bool, rides: bool) -> None:
        super().__init__()
        self.task = task
        trainable = [parameter for parameter in task.parameters() if parameter.requires_grad]
        self.trainable = trainable
        self.joins = joins
        if rides:
            # In float32 beside half-precision weights: 2048 samples are the most that fp16 can count.
            kind = torch.float64 if trainable[0].dtype == torch.float64 else torch.float32
            self.ride = nn.Parameter(torch.zeros(len(RIDE), dtype=kind, device=trainable[0].device))
        else:
            self.ride = None

    def without_gradient(self) -> list[str]:
        """The names of the trainable parameters that have no gradient."""
        return [name for name, p in self.task.named_parameters() if p.requires_grad and p.grad is None]

    def forward(
        self, step: Callable[[], Any] | None, size: float, share: float, carried: list[float]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, float | torch.Tensor]:
        """Run `step` and weigh its loss.

        Args:
            step: the task's step with its batch bound; None to join with zeros.
            size: samples of the batch, the weight unless the step gives another.
            share: expected samples of the window / ranks: what a loss x weight is divided by.
            carried: what this rank tells the others with this batch, in the order of `RIDE`; its weight is put in here.

        Returns:
            scaled loss, the ride's term, the loss as the user returned it (detached), its weight. Without a step, or
            when the batch is left out, the losses are None and the weight is 0.
        """
        loss, weight = (None, 0.0) if step is None else read_output(step(), size)
        scaled: torch.Tensor | None = None
        if loss is not None:
            if isinstance(weight, torch.Tensor):
                # `where` and not a product: a mean over nothing is NaN, and NaN x 0 is NaN.
                scaled = torch.where(weight > 0, loss * (weight / share), 0.0)
            else:
                divisor = share / weight
                scaled = loss if divisor == 1.0 else loss / divisor
        if scaled is None and self.joins:
            scaled = zero_loss(self.trainable)
        if self.ride is None:
            return scaled, None, None if loss is None else loss.detach(), weight
        told = torch.tensor(carried, dtype=self.ride.dtype, device=self.ride.device)
        told[0] = weight
        return scaled, (self.ride * told).sum(), None if loss is None else loss.detach(), weight


def read_output(output: Any, size: float) -> tuple[torch.Tensor | None, float | torch.Tensor]:
    """The loss and the weight in what `training_step` returned; (None, 0.0) when the batch is left out.

    Raises:
        TaskError: it is neither a scalar tensor with a graph, nor a dict with "loss", nor None.
    """
    weight: float | torch.Tensor = size
    loss = output
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise TaskError(
                f'training_step returned a dict with the keys {sorted(map(str, output))}; the key "loss" is missing.'
            )
        loss = output["loss"]
        given = output.get("weight")
        if given is not None:
            weight = given.detach() if isinstance(given, torch.Tensor) else float(given)
    if loss is None:
        return None, 0.0
    if not isinstance(loss, torch.Tensor):
        raise TaskError(
            f"training_step returned {type(loss).__name__}; a scalar loss tensor, "
            '{"loss": loss, "weight": n} or None was expected.'
        )
    if loss.numel() != 1:
        raise TaskError(
            f"training_step returned a loss of shape {tuple(loss.shape)}; reduce it to one number, e.g. .mean()."
        )
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise TaskError(f"training_step returned a weight of shape {tuple(weight.shape)}; one number was expected.")
        weight = weight.reshape(())
        if weight.device.type == "cpu":
            weight = float(weight)  # costs nothing here, and tells a weight of 0 before the loss is looked at
        else:
            weight = weight.to(loss.device)
    if isinstance(weight, float):
        if not weight >= 0.0 or weight == float("inf"):
            raise TaskError(f"training_step returned weight={weight}; a finite number of at least 0 was expected.")
        if weight == 0.0:
            return None, 0.0
    if not loss.requires_grad:
        raise TaskError(
            "training_step returned a loss without a graph, so nothing can be learned from it. "
            "Do not detach it or compute it under torch.no_grad(), and check that some parameter requires a gradient."
        )
    return loss.reshape(()), weight


class Executor:
    """Runs the batches of a window and keeps what its end needs.

    Args:
        task: the task on its device; at least one parameter must require a gradient.
        devices: where it runs.
    """

    def __init__(self, task: VisionTask, devices: Devices) -> None:
        self.task = task
        self.devices = devices
        several = devices.world_size > 1
        self._dispatch = Dispatch(task, joins=several, rides=several and not devices.compresses)
        self.module = devices.wrap(self._dispatch)
        self._share = 1.0
        self._expected = 1.0
        self._weights: list[float | torch.Tensor] = []
        self._samples = 0
        self._batches = 0
        self._entered = False  # whether a forward of this window has begun
        self._carried = _NOTHING
        self._checked = devices.world_size == 1
        self._late: tuple[torch.Tensor, torch.Event] | None = None  # on an accelerator: what the window before told
        self._synced = True  # whether DDP has been given a gradient for every parameter of this window
        self.in_sync = False  # while True the collectives of a backward are under way and nobody can join with zeros

    def begin(self, expected: float) -> None:
        """Start a window of `expected` samples (over all ranks, and the same number on all ranks)."""
        self._expected = expected
        self._share = expected / self.devices.world_size
        self._weights = []
        self._samples = self._batches = 0
        self._entered = False
        self._synced = self.devices.world_size == 1

    def execute(
        self,
        batch: Any,
        batch_idx: int,
        size: int,
        sync: bool,
        *,
        join: bool = False,
        more: bool = False,
        stop: bool = False,
        failed: bool = False,
    ) -> tuple[torch.Tensor, float | torch.Tensor] | None:
        """Forward and backward of one batch.

        Args:
            batch: on the device.
            batch_idx: its number on this rank in the epoch.
            size: its samples.
            sync: whether this rank gives nothing more to the window.
            join: run no step and give zeros.
            more, stop, failed: what this rank tells the others with what it syncs.

        Returns:
            The loss as the user returned it (detached) and its weight; None when the step left the batch out.
        """
        step = None if join else partial(self.task.training_step, batch, batch_idx)
        if not join:
            self._samples += size
            self._batches += 1
        carried = [0.0, float(self._samples), float(self._batches), float(more), float(stop), float(failed)]
        self._carried = carried
        self._entered = True
        with nullcontext() if sync else self.devices.no_sync(self.module):
            scaled, ride, loss, weight = self.module(step, size, self._share, carried if sync else _NOTHING)
            self._weights.append(weight)
            if scaled is not None:
                if self.devices.scaler is not None:
                    scaled = self.devices.scaler.scale(scaled)
                if ride is not None:
                    scaled = scaled + ride  # after scaling: the counts must not overflow
                self.in_sync = sync
                scaled.backward()
                self.in_sync = False
        if sync and not self._synced:
            self._synced = True
            self._check_gradients()
        return None if loss is None else (loss, weight)

    def _check_gradients(self) -> None:
        """After the first sync: a parameter without a gradient would let the others wait in the next step."""
        if self._checked:
            return
        self._checked = True
        unused = [] if self.module.find_unused_parameters else self._dispatch.without_gradient()
        if unused:
            raise TaskError(
                f"These parameters got no gradient from training_step: {', '.join(unused[:5])}"
                f"{f' and {len(unused) - 5} more' if len(unused) > 5 else ''}. On several ranks freeze them "
                "(requires_grad_(False)), use them, or give the Trainer find_unused_parameters=True."
            )

    def join(self, *, more: bool = False, stop: bool = False, failed: bool = False) -> None:
        """Give zeros for this rank's part of the window, unless it has synced, so that the other ranks go on."""
        if not self._synced:
            self.execute(None, 0, 0, True, join=True, more=more, stop=stop, failed=failed)

    def fail(self, error: Exception) -> None:
        """Tell the other ranks, with the window they are in, that this rank failed; raises `error` together with them.

        Where the collectives of a backward are under way already, it returns at once: then only the end of this
        process, or the timeout, tells the others.
        """
        if self.devices.world_size == 1 or self.in_sync or self._synced:
            return
        if self._entered and isinstance(self.module, nn.parallel.DistributedDataParallel):
            # The forward that died has sent its buffers already; the others would not answer a second time.
            self.module.require_forward_param_sync = False
        self.join(failed=True)
        self.devices.raise_together(error)

    def finish(self, late: bool = False) -> Window:
        """What the window came to, over all ranks.

        Args:
            late: on an accelerator, do not wait for the counts and flags of this window: those of the one before are
                returned (None asked for anything, in the first).
        """
        ride = self._dispatch.ride
        if self.devices.world_size == 1:
            actual = float(sum(self._weights))
            factor = None if actual == self._expected or not actual else self._expected / actual
            return Window(actual > 0, factor, self._samples, self._batches, False, False, False)
        if ride is None:
            own = torch.tensor(self._carried, dtype=torch.float32, device=self.devices.device)
            own[0] = sum(self._weights)
            told = self.devices.sum_on_device(own)
        else:
            assert ride.grad is not None
            told, ride.grad = ride.grad * self.devices.world_size, None
        # Summing the ranks' weights rounds (8 / 3 + 8 / 3 + 8 / 3): a factor this near to 1 is taken for 1.
        rounding = 8 * torch.finfo(told.dtype).eps
        if late and self.devices.reads_late:
            return self._finish_late(told, rounding)
        weight, samples, batches, more, stop, failed = told.tolist()
        same = abs(weight - self._expected) <= rounding * self._expected
        factor = None if same or weight <= 0 else self._expected / weight
        return Window(weight > 0, factor, round(samples), round(batches), more > 0.5, stop > 0.5, failed > 0.5)

    def _finish_late(self, told: torch.Tensor, rounding: float) -> Window:
        ratio = self._expected / told[0]
        as_it_is = ((ratio - 1).abs() <= rounding) | (told[0] <= 0)
        factor = torch.where(as_it_is, 1.0, ratio)
        # This rank knows that there is an update when it gave a weight itself; only else it has to wait for the sum.
        gave = any(isinstance(weight, float | int) and weight > 0 for weight in self._weights)
        updates = gave or float(told[0]) > 0
        copied = torch.empty(told.shape, dtype=told.dtype, pin_memory=told.device.type == "cuda")
        copied.copy_(told, non_blocking=True)
        arrived = torch.Event(told.device.type)
        arrived.record()
        before, self._late = self._late, (copied, arrived)
        if before is None:
            return Window(updates, factor, 0, 0, False, False, False)
        before[1].synchronize()  # the step before's: it has long arrived
        _, samples, batches, more, stop, failed = before[0].tolist()
        return Window(updates, factor, round(samples), round(batches), more > 0.5, stop > 0.5, failed > 0.5)
