"""One batch: forward, backward, gradient sync: `run.execute(batch, batch_idx, size, sync)`, which a callback may wrap.

    executor.begin(), executor.expect(samples)   the samples of the window over all ranks, alike on all ranks
      count(size) for each batch of this rank
      execute(batch, sync) for each batch        sync on the window's last batch of this rank only
        training_step under autocast             -> loss, weight n
        backward of loss x n x ranks / expected  (DDP averages over the ranks, hence x ranks)
      or join()                                  when this rank has nothing that syncs: zeros, weight 0
    window = executor.finish()                   -> factor expected / actual, is there an update, what ranks asked

On several ranks the module that DDP wraps owns one parameter more, `ride`, of a few floats. Its gradient is filled with
this rank's weight and flags, so that DDP's own buckets carry their sums over the ranks: no collective is added. Only
where a communication hook compresses the gradients, the sums take an all-reduce of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sanctuary_trainer.arrivals import needs_hooks, waits_told
from sanctuary_trainer.devices import Devices
from sanctuary_trainer.dispatch import NOTHING, Dispatch, unused_error

if TYPE_CHECKING:
    from sanctuary_trainer.task import VisionTask


_NO_CONTEXT = nullcontext()


class Window(NamedTuple):
    """What came out of a window, alike on all ranks.

    Attributes:
        updates: False when every rank's whole window was left out.
        factor: what the gradients are still to be multiplied with; None when that is 1 (a tensor in a late window).
        samples: samples of the window over all ranks.
        batches: batches of the window over all ranks.
        more: whether any rank has more batches.
        stop: whether any rank asked to stop.
        failed: whether any rank failed.
        save: whether any rank asked for a checkpoint.
    """

    updates: bool
    factor: float | torch.Tensor | None
    samples: int
    batches: int
    more: bool
    stop: bool
    failed: bool
    save: bool


class Executor:
    """Runs the batches of a window and keeps what its end needs.

    Args:
        task: the task on its device; at least one parameter must require a gradient.
        devices: where it runs.

    Raises:
        TaskError: no parameter requires a gradient.
    """

    def __init__(self, task: VisionTask, devices: Devices) -> None:
        self.task = task
        self.devices, self.clock = devices, devices.clock
        self._several = devices.world_size > 1
        self._expected = self.share = 1.0
        self._weight = 0.0
        self._samples = self._batches = 0
        self._save = False
        self.carried = NOTHING
        self._entered = 0.0  # when the clock saw the last forward begin
        self.late = False  # whether what is told in this window is read in the next one
        self._before: tuple[torch.Tensor, torch.Event | None] | None = None  # what the window before told, if late
        self.entered = False  # whether a forward of this window has begun
        self.has_synced = True  # whether DDP has been given a gradient for every parameter of this window
        self.in_backward = False  # also after an error in it
        self.aside: Callable[[Callable[[], Any], int], Any] | None = None  # makes the gradients of a batch elsewhere
        self._around_step: Callable[[Callable[[], Any]], Any] | None = None
        self.in_sync = False  # while True the collectives of a backward are under way and nobody can join with zeros
        self._wrap()

    def _wrap(self) -> None:
        several = self._several
        self.dispatch = Dispatch(self.task, joins=several, rides=several and not self.devices.compresses)
        self.dispatch.around_step = self._around_step
        self.dispatch.sent = self._buffers_came if several else None
        self.module = self.devices.wrap(self.dispatch)
        # Dispatch has no hooks to run: the call around forward is left out where DDP is not there.
        self._forward = self.module if several else self.module.forward
        self._checked = not several
        self._parameters = list(self.task.parameters())
        self._trains = [parameter.requires_grad for parameter in self._parameters]
        # The order in which parameters got their first gradients; from 3 ranks on it decides how sums are rounded.
        self.order: list[str] = []
        self._notes_order = self.devices.world_size > 2 and not self.module.find_unused_parameters

    def rehearse(self, order: Sequence[str]) -> None:
        """Bring DDP to where it was: after its first backward it lays its buckets out anew, in the order of gradients.

        Else the first step of a continued run would be summed over the ranks in another order than before. Gradients of
        zeros are given in that order; nothing else changes. All ranks call it, with the `order` of the run's executor.
        """
        parameters = {name: p for name, p in self.dispatch.named_parameters() if p.requires_grad}
        if sorted(order) != sorted(parameters):
            return  # fewer ranks than 3, or another task
        self.dispatch.in_order = [parameters[name] for name in order if name != "ride"]
        self.begin()
        self.join()
        self.finish()
        self.dispatch.in_order, self._checked = None, False
        for parameter in parameters.values():
            parameter.grad = None

    def follow_frozen(self) -> None:
        """Wrap anew, and wake up, when other parameters require a gradient than before: layers frozen or thawed.

        DDP keeps to the parameters it was made with: those thawed later would drift apart on the ranks, without a word.
        """
        parameters = list(self.task.parameters())
        if len(parameters) != len(self._parameters) or not all(map(operator.is_, parameters, self._parameters)):
            self._trains = []  # layers were exchanged
        self._follow_frozen()

    def _follow_frozen(self) -> None:
        if [parameter.requires_grad for parameter in self._parameters] != self._trains:
            self._wrap()
            self.task.train_mode()

    def begin(self, late: bool = False) -> None:
        """Start a window; until it has synced, this rank can tell the others of an error in it.

        Args:
            late: on an accelerator, do not wait for what the ranks tell each other in this window: it is read in the
                next one. Only where every rank's next act is a window.
        """
        self._follow_frozen()
        self.late = late
        self._weight = 0.0
        self._samples = self._batches = 0
        self._save = self.entered = False
        self.has_synced = not self._several

    def expect(self, samples: float) -> None:
        """How many samples the window will have over all ranks, the same number on all ranks."""
        self._expected = samples
        self.share = samples / self.devices.world_size

    def count(self, size: int) -> None:
        """A batch of this rank, of `size` samples, belongs to the window, in whatever pieces it is run."""
        self._samples += size
        self._batches += 1

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
        save: bool = False,
    ) -> tuple[torch.Tensor, float] | None:
        """Forward and backward of one batch.

        Args:
            batch: on the device.
            batch_idx: its number on this rank in the epoch.
            size: its samples.
            sync: whether this rank gives nothing more to the window.
            join: run no step and give zeros.
            more, stop, failed, save: what this rank tells the others with what it syncs.

        Returns:
            The loss as the user returned it (detached) and its weight; None when the step left the batch out.
        """
        step = None if join else partial(self.task.training_step, batch, batch_idx)
        if self.aside is not None and step is not None:
            aside: tuple[torch.Tensor, float] | None = self.aside(step, size)
            return aside
        carried = NOTHING
        self._save = save
        if sync and self._several:
            flags = (float(more), float(stop), float(failed), float(save))
            self.carried = carried = [0.0, float(self._samples), float(self._batches), *flags]
        self.entered = True
        with _NO_CONTEXT if sync or not self._several else self.devices.no_sync(self.module):
            try:
                self._entered = self.clock.enter()
                scaled, ride, loss, weight = self._forward(step, size, self.share, carried)
            except RuntimeError as error:
                named = self.dispatch.named(error)
                if named is error:
                    raise
                raise named from error
            if scaled is not None:
                scaled = self.scaled_up(scaled)
                self.clock.lap("forward")
                self.in_backward, self.in_sync = True, sync
                # Beside the loss, since counts must not overflow; after it, since DDP ends with its last gradient: an
                # error at the other end of the graph would leave it unfinished for ever.
                apart = ride is not None and self._rides_apart
                with self.noting_order(sync):
                    with self._telling_waits(sync) if self.clock.sampling else _NO_CONTEXT:
                        torch.autograd.backward((scaled,) if ride is None or apart else (scaled, ride))
                    if apart:
                        self.clock.lap("backward")
                        ride.backward()
                        self.clock.lap("wait")  # DDP's, for what it has sent
                self.in_backward = self.in_sync = False
        self.settle(weight, sync)
        return None if loss is None else (loss, weight)

    def scaled_up(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as fp16 wants it: so large that small gradients are not lost."""
        return loss if self.devices.scaler is None else self.devices.scaler.scale(loss)

    def settle(self, weight: float, sync: bool) -> None:
        """A batch, or a piece of one, has given its gradients. sync: to the other ranks, too."""
        self._weight += weight
        if sync and not self.has_synced:
            self.has_synced = True
            self._check_gradients()

    def around_step(self, call: Callable[[Callable[[], Any]], Any] | None) -> None:
        """Let `call(step)` run each training_step, when DDP has sent what it sends before a forward."""
        self._around_step = self.dispatch.around_step = call

    def _buffers_came(self) -> None:
        """DDP has brought rank 0's buffers over before a forward, which waits for the last rank."""
        self.clock.leave("wait", self._entered)

    @property
    def needs_sampling(self) -> bool:
        """Whether the clock tells DDP's waiting from computing on those steps alone on which it is `sampling`."""
        return self._several and needs_hooks(self.module, self._rides_apart)

    @property
    def _rides_apart(self) -> bool:
        """Whether `ride` has a backward of its own; else one node of DDP's has both, or nothing rides."""
        return self.dispatch.ride is not None and not self.module.find_unused_parameters

    def _telling_waits(self, sync: bool) -> AbstractContextManager[None]:
        """Around a backward: on a sampled step, tell apart what it computes and what it waits for where it must be."""
        return waits_told(self.module, self.clock) if sync and self.needs_sampling else _NO_CONTEXT

    def noting_order(self, sync: bool) -> AbstractContextManager[None]:
        """Around the backward of a first sync: note in which order the parameters get their gradients."""
        return self._noting_order() if sync and self._notes_order else _NO_CONTEXT

    @contextmanager
    def _noting_order(self) -> Iterator[None]:
        def note(name: str, parameter: torch.Tensor) -> None:
            self.order.append(name)

        named = [(name, p) for name, p in self.dispatch.named_parameters() if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(partial(note, name)) for name, p in named]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._notes_order = False  # after an error what is missing comes in a second backward

    def _check_gradients(self) -> None:
        """After the first sync: a parameter without a gradient would let the others wait in the next step."""
        if self._checked:
            return
        self._checked = True
        unused = [] if self.module.find_unused_parameters else self.dispatch.without_gradient()
        if unused:
            raise unused_error(unused)

    def join(self, *, more: bool = False, stop: bool = False, failed: bool = False, save: bool = False) -> None:
        """Give zeros for this rank's part of the window, unless it has synced, so that the other ranks go on."""
        if not self.has_synced:
            self.execute(None, 0, 0, True, join=True, more=more, stop=stop, failed=failed, save=save)

    def finish(self) -> Window:
        """What the window came to, over all ranks; in a late one the last three flags are the window before's."""
        if not self._several:
            actual = self._weight
            factor = None if actual == self._expected or not actual else self._expected / actual
            return Window(actual > 0, factor, self._samples, self._batches, False, False, False, self._save)
        told = self._told()
        # Summing the ranks' weights rounds (8 / 3 + 8 / 3 + 8 / 3): a factor this near to 1 is taken for 1.
        rounding = 8 * torch.finfo(told.dtype).eps
        before, self._before = _read(self._before), None
        if self.late:
            ratio = self._expected / told[0]
            close = ((ratio - 1).abs() <= rounding) | (told[0] <= 0)
            self._before = _copied(told)
            # Where this rank gave a weight itself, there is an update; only else the sum has to be waited for.
            updates = self._weight > 0 or float(told[0]) > 0
            flags = [flag > 0.5 for flag in before[4:]]
            return Window(updates, torch.where(close, 1.0, ratio), self._samples, self._batches, True, *flags)
        weight, samples, batches, more, *flags = told.tolist()
        # What was told in a late window before this one counts too.
        asked = [flag + late > 0.5 for flag, late in zip(flags, before[4:], strict=True)]
        same = abs(weight - self._expected) <= rounding * self._expected
        factor = None if same or weight <= 0 else self._expected / weight
        return Window(weight > 0, factor, round(samples), round(batches), more > 0.5, *asked)

    def _told(self) -> torch.Tensor:
        """What all ranks told in this window, summed, on the device."""
        ride = self.dispatch.ride
        if ride is None:
            own = torch.tensor([self._weight, *self.carried[1:]], dtype=torch.float32)
            return self.devices.sum_on_device(own.to(self.devices.device, non_blocking=True))
        assert ride.grad is not None
        told, ride.grad = ride.grad, None
        return told.mul_(self.devices.world_size)  # DDP has averaged


def _copied(told: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
    """Start a copy to the host; whoever reads it later need not wait."""
    if told.device.type == "cpu":
        return told, None
    copied = torch.empty(told.shape, dtype=told.dtype, pin_memory=told.device.type == "cuda")
    copied.copy_(told, non_blocking=True)
    arrived = torch.Event(told.device.type)
    arrived.record()
    return copied, arrived


def _read(copy: tuple[torch.Tensor, torch.Event | None] | None) -> list[float]:
    """What was copied: nothing for the first window, else what has long arrived."""
    if copy is None:
        return NOTHING
    if copy[1] is not None:
        copy[1].synchronize()
    values: list[float] = copy[0].tolist()
    return values
