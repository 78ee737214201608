"""Run a batch in pieces, and where memory runs out go on with smaller ones: the same samples, the same mathematics.

    recovery.use(smaller)                      the policy: a callback's
    recovery.execute(inner, batch, ...)        a batch of training; inner: the run.execute that was there before
      for each piece                           at first the whole batch, unless smaller ones are known to be needed
        note generators, buffers, metrics, what was logged, how the gradients stand
        inner(piece)                           gradients sync on the last one only
        out of memory:
          let go of the attempt; put back what was noted
          smaller(failure) -> piece size       or the policy gives up
          in forward                           cut what is left of the batch anew, and go on
          in backward                          only the gradients that are missing, in smaller pieces, aside; see replay
    recovery.call_step(inner, step, batch, ...)  a batch of evaluation or prediction: the same without gradients

Each piece is weighed by its samples, or by the weight that the step gives, and draws the rows that the whole batch
would have drawn (draws.py), so that the update is the unsplit batch's up to rounding. Two things cannot be: batch norm
normalises by the piece, and a loss that is no mean over samples (contrastive) sees the piece alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sanctuary_trainer.batch import join, map_tensors, to_samples
from sanctuary_trainer.draws import SlicedDraws
from sanctuary_trainer.errors import DataError, NotSupportedError, OutOfMemoryError
from sanctuary_trainer.learned import Learned, OOMEvent
from sanctuary_trainer.out_of_memory import is_out_of_memory, peak, release, release_backward
from sanctuary_trainer.pieces import OOMFailure, Pieces, Smaller
from sanctuary_trainer.replay import Replay
from sanctuary_trainer.rewind import Rewind

if TYPE_CHECKING:
    from sanctuary_trainer.run import Run

_CAUGHT = (RuntimeError, MemoryError, OSError)


class _Drawn(Exception):
    """A piece drew random numbers, and they are not the whole batch's."""


class Recovery:
    """Runs batches in pieces; remembers what did not fit, on this rank.

    `learned`: what this rank knows of what fits, and what has happened; a checkpoint keeps it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.use(self.too_large)
        self.learned = Learned(run.device)
        self._warned: set[str] = set()
        self._rewind: Rewind | None = None
        self._replay: Replay | None = None
        self._images: set[str] = set()
        self._steps = 0  # of the present attempt
        self._watches = False  # whether a piece that draws has to be made again
        self._repeats = False  # whether a part of the batch has been tried already

    def use(
        self, smaller: Smaller, *, piece_size: int | None = None, on_event: Callable[[OOMEvent], None] | None = None
    ) -> None:
        """Set the policy.

        Args:
            smaller: called with a `OOMFailure`; returns the samples of a piece from now on, or raises to give up.
            piece_size: samples of a piece of training to begin with, where no smaller number is known.
            on_event: called on this rank when a batch that did not fit is done.
        """
        self._smaller, self._piece_size, self._on_event = smaller, piece_size, on_event

    @property
    def in_use(self) -> bool:
        """Whether somebody has set a policy."""
        return self._on_event is not None or self._smaller != self.too_large

    def close(self) -> None:
        """The run is over: let go of the executor and of what was noted."""
        if self._replay is not None and self._run.executor is not None:
            self._run.executor.around_step(None)
        self._replay = self._rewind = None

    def look_up(self) -> None:
        """An epoch or an evaluation begins, to which other layers may have come."""
        self._rewind = None

    def execute(
        self,
        inner: Callable[..., Any],
        batch: Any,
        batch_idx: int,
        size: int,
        sync: bool,
        *,
        save: bool = False,
        **told: Any,
    ) -> tuple[torch.Tensor, float] | None:
        """Run one batch of training in pieces that fit.

        Args:
            inner: the `run.execute` that was there before; the other arguments are its own.

        Returns:
            What `inner` returns of the whole batch: the mean loss and its weight, or None when it is left out.

        Raises:
            DataError: the batch does not fit and cannot be split.
        """
        executor = self._run.executor
        assert executor is not None
        if self._replay is None:
            self._replay = Replay(executor)
            executor.around_step(self._step)
        replay, rewind = self._replay, self._rewinds()
        self._images.clear()
        failed: list[Exception] = []
        if self._begins_whole:  # how every batch goes while nothing happens
            rewind.taken, self._steps = False, 0
            replay.note()
            try:
                result: tuple[torch.Tensor, float] | None = inner(batch, batch_idx, size, sync, save=save, **told)
                replay.forget()
                return result
            except _CAUGHT as error:
                if not self._may_repeat(error):
                    replay.forget()
                    raise
                failed.append(error)
            self._let_go(failed[0])
        parts: list[tuple[torch.Tensor, float]] = []

        def attempt(pieces: Pieces) -> OOMFailure | None:
            piece, count, last = pieces.piece, pieces.count, pieces.at_last
            syncs = sync and last
            more = {**told, "save": save} if last else {}
            part, error = None, failed.pop() if failed else None
            if error is None:
                replay.note()
                part, error = self._tried(pieces, partial(inner, piece, batch_idx, count, syncs, **more))
            if error is None:
                replay.forget()
                parts.extend([] if part is None else [part])
                pieces.advance()
                return None
            in_backward = replay.broke_off()
            if isinstance(error, _Drawn):
                replay.unhook()
                return None
            failure = OOMFailure(self._run.stage, "backward" if in_backward else "forward", count, error)
            # Once DDP waits for gradients, it takes them from one backward alone.
            missing = replay.missing()
            replay.unhook()
            if self._steps > 1 or (not in_backward and len(missing) < len(replay.parameters)):
                raise NotSupportedError(
                    "A batch did not fit into memory while a callback that stands before OOMFallback ran it more than "
                    "once: what the first time gave cannot be told from the second. List that callback after it."
                ) from error
            if not in_backward or (len(missing) == len(replay.parameters) and not (syncs and replay.waits)):
                return failure
            parts.extend(self._complete(inner, pieces, batch_idx, missing, syncs, failure))
            return None

        try:
            self._walk(batch, size, attempt)
        finally:
            replay.forget()
        return _mean(parts)

    def _complete(
        self,
        inner: Callable[..., Any],
        pieces: Pieces,
        batch_idx: int,
        missing: Sequence[nn.Parameter],
        syncs: bool,
        failure: OOMFailure,
    ) -> list[tuple[torch.Tensor, float]]:
        """After a backward that broke off: this piece's missing gradients from smaller ones, handed over as one."""
        replay, executor = self._replay, self._run.executor
        assert replay is not None and executor is not None
        parts: list[tuple[torch.Tensor, float]] = []
        sums: list[torch.Tensor | None] = [None] * len(missing)
        end, complete = pieces.start + pieces.count, False
        try:
            pieces.cut(failure, until=end)
            executor.aside = partial(replay.gradients, missing, sums)
            while pieces.start < end:
                part, error = self._tried(pieces, partial(inner, pieces.piece, batch_idx, pieces.count, False))
                if error is None:
                    parts.extend([] if part is None else [part])
                    pieces.advance()
                elif not isinstance(error, _Drawn):
                    pieces.cut(OOMFailure(failure.stage, "backward", pieces.count, error), until=end)
            executor.aside = None
            assert pieces.start == end
            replay.hand_over(missing, sums, sum(weight for _, weight in parts), syncs)
            complete = True
        finally:
            executor.aside = None
            if not complete and syncs:
                replay.give_up()
        return parts

    def call_step(self, inner: Callable[..., Any], step: Callable[..., Any], batch: Any, batch_idx: int) -> Any:
        """Run one batch of an evaluation or a prediction in pieces that fit.

        Args:
            inner: the `run.call_step` that was there before; the other arguments are its own.

        Returns:
            The outputs of the whole batch; on the host where it ran in pieces, and None where nobody looks at them or
            where those of an evaluation cannot be joined.

        Raises:
            DataError: the batch does not fit and cannot be split, or a prediction's outputs cannot be joined.
        """
        run, rewind = self._run, self._rewinds()
        self._images.clear()
        failed: list[Exception] = []
        if self._begins_whole:
            rewind.taken = False
            try:
                rewind.take()
                return inner(step, batch, batch_idx)
            except _CAUGHT as error:
                if not self._may_repeat(error):
                    raise
                failed.append(error)
            self._let_go(failed[0])
        keeps = run.stage == "predict" or run.callbacks.has("on_evaluation_batch_end")
        outputs: list[Any] = []
        sizes: list[int] = []

        def call(piece: Any) -> Any:
            rewind.take()
            output = inner(step, piece, batch_idx)
            self._look_for_draws()
            return map_tensors(_on_host, output) if keeps else None

        def attempt(pieces: Pieces) -> OOMFailure | None:
            count = pieces.count
            output, error = None, failed.pop() if failed else None
            if error is None:
                output, error = self._tried(pieces, partial(call, pieces.piece))
            if isinstance(error, _Drawn):
                return None
            if error is not None:
                return OOMFailure(run.stage, "forward", count, error)
            outputs.append(output)
            sizes.append(count)
            pieces.advance()
            return None

        self._walk(batch, run.batch_samples or 1, attempt)
        if run.stage == "predict":
            return _predictions(outputs, sizes)
        try:
            return join(outputs, sizes)
        except DataError as error:
            self._warn_of_outputs(error)
            return None

    def _warn_of_outputs(self, error: DataError) -> None:
        if "outputs" not in self._warned:
            self._warned.add("outputs")
            warnings.warn(
                f"A batch of {self._run.stage} ran in pieces, and callbacks get None for its outputs: {error}",
                stacklevel=2,
            )

    def _walk(self, batch: Any, size: int, attempt: Callable[[Pieces], OOMFailure | None]) -> None:
        """Attempt piece after piece of the batch that is being worked on until all of it is done."""
        run = self._run
        samples = run.batch_samples
        pieces = Pieces(run, batch, size, self._smaller)
        pieces.samples = samples
        pieces.remedies = len(self.learned.remedies)
        if not self._begins_whole:
            first = self._piece_size if run.stage == "train" else None
            known = self.learned.fits(self._kind, batch, pieces.size)
            pieces.lay_out(min(size for size in (known, first, pieces.size) if size is not None))
        try:
            while not pieces.done:
                failure = attempt(pieces)
                if failure is not None:
                    pieces.cut(failure)
        finally:
            self._repeats, run.batch_samples = False, samples
        if pieces.is_whole and pieces.failure is None:
            return
        if pieces.failure is not None:
            self._remember(batch, pieces, pieces.failure)
        if run.stage == "train" and not pieces.is_whole:
            self._log("memory/piece_size", pieces.most, "min")

    def _tried(self, pieces: Pieces, call: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """What `call` returns for the present piece; or why it did not fit, with all as it was before."""
        run, rewind = self._run, self._rewinds()
        failed: Exception | None = None
        rewind.taken = False
        if not pieces.is_whole and pieces.samples is not None:
            # In another callback's batch there may be more samples than in the loader's, by which logs are weighed.
            run.batch_samples = pieces.count * pieces.samples / pieces.size  # type: ignore[assignment]
        self._steps = 0
        self._repeats = pieces.start > 0 or pieces.failure is not None
        with self._drawing(pieces), _told_of(pieces):
            try:
                result = call()
                if not pieces.is_whole:
                    self._warn_of_buffers()
                    if run.stage not in self.learned.draws:
                        self.learned.draws[run.stage] = rewind.generators.have_drawn()
                return result, None
            except _Drawn as error:
                self.learned.draws[run.stage] = True
                failed = error
            except _CAUGHT as error:
                if not self._may_repeat(error):
                    raise
                failed = error
        self._let_go(failed)
        return None, failed

    def _step(self, step: Callable[[], Any]) -> Any:
        """A training_step, so that it can be made again."""
        self._steps += 1
        self._rewinds().take()
        output = step()
        self._look_for_draws()
        return output

    def _look_for_draws(self) -> None:
        """A forward is over. If it drew what is not the whole batch's, it has to be made again: nothing is lost yet."""
        if self._watches and self._rewinds().generators.have_drawn():
            raise _Drawn

    @property
    def _begins_whole(self) -> bool:
        """Whether every batch of this stage begins whole, whatever its shape."""
        if self._piece_size is not None and self._run.stage == "train":
            return False
        return not self.learned.stages or self._kind not in self.learned.stages

    def _may_repeat(self, error: Exception) -> bool:
        return is_out_of_memory(error) and self._rewinds().taken

    def _warn_of_buffers(self) -> None:
        """Warn once of what each piece does and a whole batch does once."""
        if self._run.stage != "train" or "buffers" in self._warned:
            return
        self._warned.add("buffers")
        if names := self._rewinds().changed():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warnings.warn(
                f"Batches run in pieces, and each piece changes buffers ({names[0]}{more}) where a whole batch does so "
                "once. Batch norm also normalises by the piece: freeze it in eval mode, use group norm, or let "
                "GradientCheckpointing keep the batch whole.",
                stacklevel=2,
            )

    def _let_go(self, failed: Exception) -> None:
        """An attempt failed: let go of what it holds, and put back what it changed."""
        release(failed)
        release_backward()
        self._rewinds().put_back()

    @contextmanager
    def _drawing(self, pieces: Pieces) -> Iterator[None]:
        """Let a piece draw what its samples would have drawn in the whole batch."""
        if pieces.is_whole or self._run.compiled:  # in a compiled graph draws cannot be reached
            yield
            return
        if pieces.start:
            self._rewinds().generators.put_back()  # to where they stood before the batch
        draws = self.learned.draws.get(self._run.stage)
        if draws is not False:  # else spare some microseconds for each operator
            seen = self.learned.seen.setdefault(self._run.stage, {})
            with SlicedDraws(pieces.size, pieces.start, pieces.count, seen):
                yield
            return
        self._watches = True
        try:
            yield
        finally:
            self._watches = False

    def is_shown(self, name: str) -> bool:
        """Whether images of this name were shown already, of a batch that is run again or in pieces."""
        shown = self._repeats and name in self._images
        self._images.add(name)
        return shown

    def report(self, phase: str, tried: int, piece_size: int, remedy: str, error: Exception) -> None:
        """Note an event, for the trackers and the result."""
        run = self._run
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
        event = OOMEvent(run.rank, run.state.global_step, run.stage, phase, tried, piece_size, remedy, reason)
        self.learned.events.append(event)
        self._log("memory/oom_events", 1.0, "sum")
        if self._on_event is not None:
            self._on_event(event)

    def too_large(self, failure: OOMFailure) -> int:
        """The policy that gives up.

        Raises:
            OutOfMemoryError: chained from the failure's error.
        """
        run = self._run
        samples = "1 sample" if failure.tried == 1 else f"{failure.tried} samples"
        trains = failure.stage == "train" and "checkpointing" not in self.learned.remedies
        raise OutOfMemoryError(
            f"A batch does not fit into memory: {failure.phase} ran out with a piece of {samples}, the smallest that "
            f"was tried (stage {failure.stage}, step {run.state.global_step}). Peak: {peak(run.device)}. Use "
            f"{'the callback GradientCheckpointing' if trains else 'smaller inputs'}, half precision "
            f"(mixed_precision='bf16'), or {'smaller inputs or ' if trains else ''}a smaller model."
        ) from failure.error

    def guard_optimizers(self) -> None:
        """Let an optimizer's step that does not fit be made again with less memory."""
        optimization = self._run.optimization
        assert optimization is not None

        def on_event(error: Exception, retried: bool) -> None:
            if retried:
                self.report("optimizer", 0, 0, "a second try", error)

        optimization.on_out_of_memory = on_event

    def _remember(self, batch: Any, pieces: Pieces, failure: OOMFailure) -> None:
        if not pieces.is_whole:
            self.learned.remember(self._kind, batch, pieces.size, pieces.most)
        remedy = " and ".join([*self.learned.remedies[pieces.remedies :], *([] if pieces.is_whole else ["pieces"])])
        self.report(failure.phase, failure.tried, pieces.most, remedy, failure.error)

    @property
    def _kind(self) -> str:
        return "val" if self._run.stage == "sanity" else self._run.stage

    def _log(self, name: str, value: float, reduce: str) -> None:
        if self._run.verb == "fit":
            self._run.records.add("train", name, value, weight=1.0, on_step=True, reduce=reduce)

    def _rewinds(self) -> Rewind:
        if self._rewind is None:
            self._rewind = Rewind(self._run.task, self._run.device, self._run.records)
        return self._rewind


@contextmanager
def _told_of(pieces: Pieces) -> Iterator[None]:
    """An error in a piece says that it was one: with so few samples batch norm or a loss may fail."""
    try:
        yield
    except Exception as error:
        if not pieces.is_whole:
            error.add_note(f"In a piece of {pieces.count} of a batch of {pieces.size}, cut by OOMFallback.")
        raise


def _mean(parts: Sequence[tuple[torch.Tensor, float]]) -> tuple[torch.Tensor, float] | None:
    """The mean loss over pieces, and their weight."""
    if len(parts) < 2:
        return parts[0] if parts else None
    total = sum(weight for _, weight in parts)
    return torch.stack([loss * (weight / total) for loss, weight in parts]).sum(), total


def _predictions(outputs: list[Any], sizes: list[int]) -> Any:
    """The outputs of all pieces in one, or one for each sample where they cannot be joined (padded to each piece)."""
    try:
        return join(outputs, sizes, per_sample=True)
    except DataError:
        return [sample for output, size in zip(outputs, sizes, strict=True) for sample in to_samples(output, size)]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()
