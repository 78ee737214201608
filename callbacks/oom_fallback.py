"""When a batch does not fit into memory, go on with it in pieces, or with gradient checkpointing, and say so.

    setup               run.call_step and, in a fit, run.execute are wrapped; what cannot work is refused
    a batch fails       the next remedy of the ladder: run.recovery does it and remembers the size by shape
    afterwards          one message, memory/oom_events and memory/piece_size in the trackers

The mechanism is the core's (`run.recovery`); what is decided here is how far it goes. Each rank decides for itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from sanctuary_trainer import Callback, NotSupportedError, SettingsError
from sanctuary_trainer.callbacks.gradient_checkpointing import GradientCheckpointing

if TYPE_CHECKING:
    from sanctuary_trainer import OOMEvent, OOMFailure, Run

REMEDIES = ("checkpointing", "pieces")


class OOMFallback(Callback):
    """Runs a batch that does not fit into memory in pieces: same samples, same update, one optimizer step.

    A batch of 16 is tried in pieces of 8, 4, 2 and 1 samples. What fits is remembered by the shape of the samples and
    kept in checkpoints. Validation, test and prediction do the same, by themselves. On several ranks each rank splits
    what does not fit there, and the others see a slow rank. An optimizer whose step does not fit is stepped again with
    less memory.

    Args:
        piece_size: samples of a piece of training to begin with; None: the whole batch.
        ladder: what is tried, in order, the next when no more can be done by the one before. "pieces"; and
            "checkpointing", or a `GradientCheckpointing(layers)`, which switches gradient checkpointing on.

    Raises:
        SettingsError: an argument is wrong, or there is nothing to checkpoint.
        NotSupportedError: before the run, where a rank alone cannot repeat a batch.
        OutOfMemoryError: one sample does not fit.
        DataError: the batch cannot be split: `VisionTask.split_batch` may be overridden.
    """

    def __init__(
        self, piece_size: int | None = None, ladder: Sequence[str | GradientCheckpointing] = ("pieces",)
    ) -> None:
        wrong = isinstance(piece_size, bool) or not isinstance(piece_size, int | None)
        if wrong or (piece_size is not None and piece_size < 1):
            raise SettingsError(
                f"OOMFallback got piece_size={piece_size!r}; a whole number of at least 1 was expected."
            )
        given = [ladder] if isinstance(ladder, str | GradientCheckpointing) else list(ladder)
        steps = ["checkpointing" if isinstance(step, GradientCheckpointing) else step for step in given]
        if not steps or len(set(steps)) < len(steps) or any(step not in REMEDIES for step in steps):
            raise SettingsError(
                f"OOMFallback got ladder={ladder!r}; one or both of 'pieces' and 'checkpointing' (or an instance of "
                "GradientCheckpointing) were expected."
            )
        self.piece_size, self.ladder = piece_size, tuple(steps)
        own = [step for step in given if isinstance(step, GradientCheckpointing)]
        self._checkpointing = own[0] if own else GradientCheckpointing()
        self._checkpoints = False  # whether it is in the ladder and not on from the start

    def setup(self, run: Run) -> None:
        run.recovery.use(partial(self._smaller, run), piece_size=self.piece_size, on_event=partial(self._tell, run))
        run.call_step = partial(run.recovery.call_step, run.call_step)
        if run.verb == "fit":
            _refuse(run)
            from_start = any(isinstance(callback, GradientCheckpointing) for callback in run.callbacks)
            self._checkpoints = "checkpointing" in self.ladder and not from_start
            if self._checkpoints:
                self._check_ladder(run)

    def on_fit_start(self, run: Run) -> None:
        run.execute = partial(run.recovery.execute, run.execute)
        run.recovery.guard_optimizers()
        if self._checkpoints and "checkpointing" in run.recovery.learned.remedies:
            self._checkpointing.switch_on(run.task)  # as it was at the checkpoint

    def on_train_epoch_start(self, run: Run) -> None:
        run.recovery.look_up()

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        run.recovery.look_up()

    def teardown(self, run: Run) -> None:
        if self._checkpoints and self._checkpointing.on:
            self._checkpointing.switch_off(run.task)

    def _smaller(self, run: Run, failure: OOMFailure) -> int:
        """The next remedy: how many samples a piece has from now on."""
        may_checkpoint = self._checkpoints and failure.stage == "train" and not self._checkpointing.on
        for remedy in self.ladder:
            if remedy == "checkpointing" and may_checkpoint:
                what = self._checkpointing.switch_on(run.task)
                run.message(f"Out of memory: gradient checkpointing is on from now on: {what}.", every_rank=True)
                run.recovery.learned.remedies.append(remedy)
                return failure.tried
            if remedy == "pieces" and failure.tried > 1:
                return -(-failure.tried // 2)
        return run.recovery.too_large(failure)

    def _tell(self, run: Run, event: OOMEvent) -> None:
        where = f"Rank {event.rank} ran" if run.world_size > 1 else "Ran"
        if event.phase == "optimizer":
            text = "in the optimizer's step, which was made again with less memory."
        else:
            text = f"in {event.stage}, {event.phase} of {event.tried} samples."
            if event.remedy == "checkpointing":
                text += " With gradient checkpointing it fits."
            else:
                text += f" Such batches run in pieces of {event.piece_size} from now on."
        run.message(f"{where} out of memory after {event.step} steps {text} {event.reason}", every_rank=True)

    def _check_ladder(self, run: Run) -> None:
        if run.settings["compile"]:
            raise NotSupportedError(
                "OOMFallback(ladder=...) cannot switch checkpointing on in compiled modules. Use the callback "
                "GradientCheckpointing, which is on from the start, or leave out compile."
            )
        self._checkpointing.find(run.task)


def _refuse(run: Run) -> None:
    """What would hang or be wrong when one rank repeats a part of its batch."""
    for name, module in run.task.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and run.world_size > 1:
            raise NotSupportedError(
                f"OOMFallback does not work with SyncBatchNorm ({name}) on several ranks: its forward waits for all "
                "ranks, and one rank alone repeats its batch. Use batch norm or group norm."
            )
        if _is_reentrant(module):
            raise NotSupportedError(
                f"OOMFallback does not work with reentrant checkpointing ({name or 'the task'}): its gradients cannot "
                "be had of some parameters alone. Use GradientCheckpointing, or use_reentrant=False."
            )
    if run.world_size > 1 and "power_sgd" in run.devices.comm_hook.lower():
        raise NotSupportedError(
            "OOMFallback does not work with the PowerSGD hook, which keeps the error of each bucket for the next step. "
            "Use another communication hook, or none."
        )


def _is_reentrant(module: nn.Module) -> bool:
    """Whether a transformers or timm model checkpoints in torch's former way."""
    if getattr(module, "gradient_checkpointing", False) is True:
        keywords = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
        return bool(keywords.get("use_reentrant", False))
    if getattr(module, "grad_checkpointing", False) is True and type(module).__module__.startswith("timm."):
        return bool(sys.modules["timm.layers"].use_reentrant_ckpt())
    return False
