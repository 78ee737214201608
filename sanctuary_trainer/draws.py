"""Random numbers of a batch that runs in pieces: each piece draws the rows that the whole batch would have drawn.

    before = torch.get_rng_state()
    for start, piece in ...:                          whole     dropout draws (8, 197, 768)
        torch.set_rng_state(before)                   piece     needs rows 2:4 of exactly that
        with SlicedDraws(8, start, size=2):
            step(piece).backward()

Row 2 of a draw of 8 rows is not the first row of a next draw: how a generator walks depends on the shape, the strides
and the device. So the draw of all 8 rows is made, by the same operator, and the piece's rows are kept. For a moment
that takes the memory of the whole batch's mask, and of its input for dropout on CUDA.

A dispatch mode, because it stands below autograd and autocast, sees dropout where C++ calls it (scaled dot-product
attention), and is carried by autograd into its threads (`at::ThreadLocalState`), where checkpointing computes again.

Drawn as the piece alone would: what has no samples in its first dimension (sequence-first layouts, permutations),
what is given a generator, what draws as many numbers as its values ask for (rrelu, gamma, Poisson, multinomial), and
dropout inside CUDA's fused attention and inside the kernels that torch.compile generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["SlicedDraws"]

_NAMES = (
    "bernoulli bernoulli_ native_dropout _fused_dropout rand rand_like randn randn_like randint randint_like random_ "
    "uniform_ normal normal_ exponential_ log_normal_ geometric_ cauchy_"
)


def _size_index(operator: Any) -> int | None:
    """Which argument is the size of what is drawn; None where it is as large as the tensors given."""
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("size") if "size" in names else None


_PACKETS = [getattr(torch.ops.aten, name) for name in _NAMES.split()]
_OPERATORS = [getattr(packet, overload) for packet in _PACKETS for overload in packet.overloads()]
# With `out` or dimension names: rare, and drawn as they are.
_DRAWS = {
    operator: _size_index(operator)
    for operator in _OPERATORS
    if not {"out", "out0", "names"} & {argument.name for argument in operator._schema.arguments}
}


class SlicedDraws(TorchDispatchMode):
    """Inside `with`, what samples `start` to `start + size` draw are their rows of what `total` samples would draw.

    A draw is one of samples where its first dimension is k x size; its whole is k x total (k > 1: windows or tokens
    are folded into it). Afterwards the generator is where the whole batch would have left it. The caller puts it back
    to the state before the batch at each piece's start.

    Args:
        total: samples of the batch.
        start: the piece's first sample.
        size: the piece's samples.
        seen: first dimensions met so far, kept by the caller over pieces, attempts and batches. In a piece of one
            sample `torch.rand(1)` may be one number for each sample or one for all; having met the same draw with
            another number of samples tells. Without it, one for each sample.
    """

    supports_higher_order_operators = True

    def __init__(self, total: int, start: int, size: int, seen: dict[str, set[tuple[int, int]]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if start < 0 or size < 1 or start + size > total:
            raise ValueError(f"Samples {start} to {start + size} are no piece of a batch of {total}.")
        self._total, self._start, self._size = total, start, size
        self._seen = {} if seen is None else seen

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run: uncompiled it would need more memory, and fullgraph=True would refuse."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func not in _DRAWS
            or types
            or any(isinstance(given, torch.Generator) for given in (*args, *kwargs.values()))
        ):
            return func(*args, **kwargs)
        size_index = _DRAWS[func]
        tensors = [given for given in args if isinstance(given, torch.Tensor)]
        if any(tensor.is_nested for tensor in tensors):
            return func(*args, **kwargs)
        if size_index is None:
            shape: Sequence[int] = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        else:
            shape = args[size_index]
        if not self._of_samples(func, shape) or self._size == self._total:
            return func(*args, **kwargs)
        k = shape[0] // self._size
        whole = list(args)
        for i, given in enumerate(args):
            if isinstance(given, torch.Tensor) and given.ndim == len(shape) and given.shape[0] == shape[0]:
                whole[i] = self._among_all(given, k)
        if size_index is not None:
            whole[size_index] = [k * self._total, *shape[1:]]
        # Cloned, so that the other rows' memory is free again.
        rows = tree_map_only(torch.Tensor, lambda drawn: self._rows(drawn, k).clone(), func(*whole, **kwargs))
        return args[0].copy_(rows) if func._schema.is_mutable else rows

    def _of_samples(self, func: Any, shape: Sequence[int]) -> bool:
        if not shape:
            return False
        first = shape[0]
        met = self._seen.setdefault(f"{func} {tuple(shape[1:])}", set())
        met.add((self._size, first))
        grows = any(first * size == other * self._size for size, other in met if size != self._size)
        stays = any(first == other for size, other in met if size != self._size)
        return first > 0 and first % self._size == 0 and (grows or not stays)

    def _rows(self, whole: torch.Tensor, k: int) -> torch.Tensor:
        return whole.narrow(0, k * self._start, k * self._size)

    def _among_all(self, piece: torch.Tensor, k: int) -> torch.Tensor:
        """The piece at its rows of the whole batch, the rest zeros; in the same order in memory, as draws follow it."""
        shape = [k * self._total, *piece.shape[1:]]
        # Without what is expanded, which cannot be written to.
        core = piece[tuple(slice(1) if stride == 0 else slice(None) for stride in piece.stride())]
        if piece.stride(0) == 0:
            return core.expand(shape)
        strides = [
            # A dimension outside the samples' steps over all of them. `size > 1`: else its stride says nothing.
            -(-stride * self._total // self._size) if size > 1 and i and stride >= core.stride(0) else stride
            for i, (size, stride) in enumerate(zip(core.shape, core.stride(), strict=True))
        ]
        whole = torch.empty_strided([shape[0], *core.shape[1:]], strides, dtype=piece.dtype, device=piece.device)
        self._rows(whole.zero_(), k).copy_(core)
        return whole.expand(shape)
