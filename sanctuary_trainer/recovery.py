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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from sanctuary_trainer.batch import join, map_tensors
from sanctuary_trainer.draws import SlicedDraws
from sanctuary_trainer.errors import OutOfMemoryError
from sanctuary_trainer.out_of_memory import is_out_of_memory, peak, release
from sanctuary_trainer.pieces import OOMFailure, Pieces, Smaller
from sanctuary_trainer.replay import Replay
from sanctuary_trainer.rewind import Rewind

if TYPE_CHECKING:
    from sanctuary_trainer.run import Run

_CAUGHT = (RuntimeError, MemoryError, OSError)
LONGEST_SHAPE = 200  # characters: a batch of images of many sizes has as many shapes


class OOMEvent(NamedTuple):
    """A batch that did not fit into memory.

    Attributes:
        rank: where.
        step: the steps that were done before it.
        stage: "train", "sanity", "val", "test" or "predict".
        phase: "forward", "backward" or "optimizer".
        tried: samples of the first piece that did not fit.
        piece_size: samples of the pieces that did.
        remedy: "pieces", "checkpointing", or for the optimizer "foreach=False".
        reason: the error's first line.
    """

    rank: int
    step: int
    stage: str
    phase: str
    tried: int
    piece_size: int
    remedy: str
    reason: str


class Recovery:
    """Runs batches in pieces; remembers what did not fit, on this rank.

    Attributes:
        events: what has happened so far.
        piece_sizes: stage and shape of a sample -> samples of a piece, bytes of a sample.
        remedies: what a policy has switched on for good; a continued run begins with it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.use(self.too_large)
        self.events: list[OOMEvent] = []
        self.piece_sizes: dict[str, tuple[int, float]] = {}
        self.remedies: list[str] = []
        self._draws: dict[str, bool] = {}  # stage -> whether its steps draw
        self._rewind: Rewind | None = None
        self._replay: Replay | None = None
        self._images: set[str] = set()
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

    def look_up(self) -> None:
        """An epoch or an evaluation begins, to which other layers may have come."""
        if self._rewind is not None:
            self._rewind.look_up()

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
            executor.before_step(self._rewinds().take)
        replay, rewind = self._replay, self._rewinds()
        self._images.clear()
        failed: list[Exception] = []
        if self._is_new:  # how every batch goes while nothing happens
            rewind.taken = False
            replay.note()
            try:
                result: tuple[torch.Tensor, float] | None = inner(batch, batch_idx, size, sync, save=save, **told)
                replay.over()
                return result
            except _CAUGHT as error:
                if not (is_out_of_memory(error) and rewind.taken):
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
            replay.over()
            if error is None:
                parts.extend([] if part is None else [part])
                pieces.advance()
                return None
            in_backward = replay.broke_off()
            failure = OOMFailure(self._run.stage, "backward" if in_backward else "forward", count, error)
            # Once DDP waits for gradients, it takes them from one backward alone.
            missing = replay.missing()
            if not in_backward or (len(missing) == len(replay.parameters) and not (syncs and replay.waits)):
                return failure
            parts.extend(self._complete(pieces, batch_idx, missing, syncs, failure))
            return None

        self._walk(batch, attempt)
        return _mean(parts)

    def _complete(
        self, pieces: Pieces, batch_idx: int, missing: Sequence[nn.Parameter], syncs: bool, failure: OOMFailure
    ) -> list[tuple[torch.Tensor, float]]:
        """After a backward that broke off: this piece's missing gradients from smaller ones, handed over as one."""
        replay, task = self._replay, self._run.task
        assert replay is not None
        parts: list[tuple[torch.Tensor, float]] = []
        sums: list[torch.Tensor | None] = [None] * len(missing)
        end, complete = pieces.start + pieces.count, False
        try:
            pieces.cut(failure)
            while pieces.start < end:
                step = partial(task.training_step, pieces.piece, batch_idx)
                part, error = self._tried(pieces, partial(replay.gradients, step, pieces.count, missing, sums))
                if error is not None:
                    pieces.cut(OOMFailure(failure.stage, "backward", pieces.count, error))
                    continue
                parts.extend([] if part is None else [part])
                pieces.advance()
            replay.hand_over(missing, sums, sum(weight for _, weight in parts), syncs)
            complete = True
        finally:
            if not complete and syncs:
                replay.give_up()
        return parts

    def call_step(self, inner: Callable[..., Any], step: Callable[..., Any], batch: Any, batch_idx: int) -> Any:
        """Run one batch of an evaluation or a prediction in pieces that fit.

        Args:
            inner: the `run.call_step` that was there before; the other arguments are its own.

        Returns:
            The outputs of the whole batch, where somebody looks at them; a prediction's in pieces lie on the host.

        Raises:
            DataError: the batch does not fit and cannot be split, or its outputs cannot be joined.
        """
        run, rewind = self._run, self._rewinds()
        keeps = run.stage == "predict" or run.callbacks.has("on_evaluation_batch_end")
        self._images.clear()
        outputs: list[Any] = []
        sizes: list[int] = []

        def call(pieces: Pieces) -> Any:
            rewind.take()
            output = inner(step, pieces.piece, batch_idx)
            return map_tensors(_on_host, output) if run.stage == "predict" and not pieces.is_whole else output

        def attempt(pieces: Pieces) -> OOMFailure | None:
            count = pieces.count
            output, error = self._tried(pieces, partial(call, pieces))
            if error is not None:
                return OOMFailure(run.stage, "forward", count, error)
            outputs.append(output if keeps else None)
            sizes.append(count)
            pieces.advance()
            return None

        self._walk(batch, attempt)
        return join(outputs, sizes)

    def _walk(self, batch: Any, attempt: Callable[[Pieces], OOMFailure | None]) -> None:
        """Attempt piece after piece of the batch that is being worked on until all of it is done."""
        run = self._run
        samples = run.batch_samples
        pieces = Pieces(run, batch, samples or 1, self._smaller)
        if not self._is_new:
            first = self._piece_size if run.stage == "train" else None
            known = self._known(batch, pieces.size)
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
        if not pieces.is_whole:
            run.batch_samples = pieces.count
        self._repeats = pieces.start > 0 or pieces.failure is not None
        with self._drawing(pieces):
            try:
                result = call()
                if not pieces.is_whole:
                    self._draws[run.stage] = rewind.generators.have_drawn()
                return result, None
            except _CAUGHT as error:
                if not (is_out_of_memory(error) and rewind.taken):
                    raise
                failed = error
        self._let_go(failed)
        return None, failed

    @property
    def _is_new(self) -> bool:
        """Whether a batch of this stage begins whole, whatever its shape."""
        return not self.piece_sizes and (self._piece_size is None or self._run.stage != "train")

    def _let_go(self, failed: Exception) -> None:
        """An attempt failed: let go of what it holds, and put back what it changed."""
        release(failed)
        self._rewinds().put_back()

    @contextmanager
    def _drawing(self, pieces: Pieces) -> Iterator[None]:
        """Let a piece draw what its samples would have drawn in the whole batch."""
        if pieces.is_whole or self._run.compiled:  # in a compiled graph draws cannot be reached
            yield
            return
        generators, stage = self._rewinds().generators, self._run.stage
        if pieces.start:
            generators.put_back()  # to where they stood before the batch
        if not self._draws.get(stage, True):
            yield
        else:
            with SlicedDraws(total=pieces.size, start=pieces.start, size=pieces.count):
                yield

    def is_shown(self, name: str) -> bool:
        """Whether images of this name were shown already, of a batch that is run again or in pieces."""
        shown = self._repeats and name in self._images
        self._images.add(name)
        return shown

    def state_dict(self) -> dict[str, Any]:
        """What this rank has learned, as plain data."""
        return {
            "events": [tuple(event) for event in self.events],
            "piece_sizes": dict(self.piece_sizes),
            "remedies": list(self.remedies),
            "draws": dict(self._draws),
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, events: bool) -> None:
        """Go on with what these ranks had learned; of several the most careful. events: also what happened there."""
        for state in states:
            for key, (size, weight) in state["piece_sizes"].items():
                known = self.piece_sizes.get(key)
                self.piece_sizes[key] = (size if known is None else min(known[0], size), weight)
            self.remedies += [remedy for remedy in state["remedies"] if remedy not in self.remedies]
            self._draws.update(state["draws"])
            if events:
                self.events += [OOMEvent(*event) for event in state["events"]]

    def report(self, phase: str, tried: int, piece_size: int, remedy: str, error: Exception) -> None:
        """Note an event, for the trackers and the result."""
        run = self._run
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
        self.events.append(
            OOMEvent(run.rank, run.state.global_step, run.stage, phase, tried, piece_size, remedy, reason)
        )
        self._log("memory/oom_events", 1.0, "sum")
        if self._on_event is not None:
            self._on_event(self.events[-1])

    def too_large(self, failure: OOMFailure) -> int:
        """The policy that gives up.

        Raises:
            OutOfMemoryError: chained from the failure's error.
        """
        run = self._run
        samples = "1 sample" if failure.tried == 1 else f"{failure.tried} samples"
        raise OutOfMemoryError(
            f"A batch does not fit into memory: {failure.phase} ran out with a piece of {samples}, the smallest that "
            f"was tried (stage {failure.stage}, step {run.state.global_step}). Peak: {peak(run.device)}. Use gradient "
            "checkpointing (GradientCheckpointing, or OOMFallback(ladder=('checkpointing', 'pieces'))), half precision "
            "(mixed_precision='bf16'), or smaller inputs or a smaller model."
        ) from failure.error

    def guard_optimizers(self) -> None:
        """Let an optimizer's step that does not fit be made again with less memory."""
        optimization = self._run.optimization
        assert optimization is not None

        def on_event(error: Exception, retried: bool) -> None:
            if retried:
                self.report("optimizer", 0, 0, "foreach=False", error)

        optimization.on_out_of_memory = on_event

    def _remember(self, batch: Any, pieces: Pieces, failure: OOMFailure) -> None:
        if not pieces.is_whole:
            shape, weight = _shape(batch, pieces.size)
            self.piece_sizes[f"{self._kind} {shape}"] = (pieces.most, weight)
        remedy = "checkpointing" if pieces.is_whole else "pieces"
        self.report(failure.phase, failure.tried, pieces.most, remedy, failure.error)

    def _known(self, batch: Any, size: int) -> int | None:
        """How many samples of this batch fit: as remembered of its shape, or of smaller samples."""
        kind = f"{self._kind} "
        shape, weight = _shape(batch, size)
        if kind + shape in self.piece_sizes:
            return self.piece_sizes[kind + shape][0]
        known = [most for key, (most, less) in self.piece_sizes.items() if key.startswith(kind) and less <= weight]
        return min(known, default=None)

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


def _mean(parts: Sequence[tuple[torch.Tensor, float]]) -> tuple[torch.Tensor, float] | None:
    """The mean loss over pieces, and their weight."""
    if len(parts) < 2:
        return parts[0] if parts else None
    total = sum(weight for _, weight in parts)
    return torch.stack([loss * (weight / total) for loss, weight in parts]).sum(), total


def _shape(batch: Any, size: int) -> tuple[str, float]:
    """What tells batches of different need for memory apart: the shapes of a sample's tensors; and its bytes."""
    shapes: dict[str, None] = {}
    bytes_ = 0

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal bytes_
        bytes_ += tensor.nbytes
        of_sample = tensor.shape[1:] if tensor.ndim and tensor.shape[0] == size else tensor.shape
        shapes[f"{'x'.join(map(str, of_sample))} {str(tensor.dtype).removeprefix('torch.')}"] = None
        return tensor

    map_tensors(look, batch)
    return ", ".join(shapes)[:LONGEST_SHAPE], bytes_ / size


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()
