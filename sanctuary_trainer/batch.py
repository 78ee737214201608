"""The algebra of batches of any nesting: how many samples, in pieces and whole again, on a device, one by one.

A batch is a tree. Its inner nodes are mappings, tuples, named tuples, lists and dataclasses; its leaves are tensors,
arrays and anything else. A list (or plain tuple) is read in one of two ways:

    fields    [images (B, C, H, W), labels (B,)]            each element is batched: what default_collate makes
    samples   [{"boxes": ...}, {"boxes": ...}], ["a", "b"]  one element per sample

It holds samples when its elements are mappings, strings, None, numbers, 0-d tensors or other single objects (in a list
also plain tuples: an uncollated batch); when all are images (C, H, W) with C of 1, 3 or 4; or when all are tensors of
one ndim whose first dimensions differ (ragged boxes). Otherwise it holds fields. Where that guesses wrongly, a task
overrides `batch_size` and `split_batch`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from sanctuary_trainer.errors import DataError

__all__ = ["batch_size", "join", "map_tensors", "move", "split", "to_samples"]

_IMAGE_CHANNELS = (1, 3, 4)


def batch_size(batch: Any) -> int | None:
    """Count the samples of a batch; None when nothing in it tells.

    Among the fields of one node, tensors and arrays tell first (their first dimension; 0-d ones are skipped), then
    lists of samples (their length), then what lies deeper, in order.
    """
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    if isinstance(batch, torch.Tensor | np.ndarray):
        return _first_dim(batch)
    if _holds_samples(batch):
        return len(batch)
    fields = _fields(batch)
    if fields is None:
        return None
    for field in fields:
        if isinstance(field, torch.Tensor | np.ndarray) and field.ndim:
            return _first_dim(field)
    for field in fields:
        if _holds_samples(field):
            return len(field)
    for field in fields:
        if (size := batch_size(field)) is not None:
            return size
    return None


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into consecutive pieces of the given numbers of samples. Tensors and arrays become views.

    What is not batched (0-d tensors, those of one row, None, strings, other objects) goes into every piece as it is.

    Raises:
        DataError: the sizes do not add up to the batch's samples; or a leaf cannot be cut, because it has more or fewer
            rows or elements than the batch has samples (boxes of all images in one tensor).
    """
    total = batch_size(batch)
    if total != sum(sizes):
        raise DataError(
            f"A batch of {total} samples cannot be split into pieces of {list(sizes)}, which add up to {sum(sizes)}. "
            "Where the size was guessed wrongly, override batch_size and split_batch in the task."
        )
    return _split(batch, list(sizes), total)


def _split(node: Any, sizes: list[int], total: int) -> list[Any]:
    if isinstance(node, PackedSequence) or (isinstance(node, torch.Tensor) and node.is_nested):
        raise DataError(f"A {type(node).__name__} cannot be split into pieces. Override split_batch in the task.")
    rows = _rows(node)
    if rows is not None and rows not in (1, total):
        what = f"of shape {tuple(node.shape)}" if hasattr(node, "shape") else f"of {rows}"
        raise DataError(
            f"A {type(node).__name__} {what} in a batch of {total} samples cannot be cut: which sample has which part "
            "of it is not known. Override split_batch in the task."
        )
    if isinstance(node, torch.Tensor):
        return list(torch.split(node, sizes)) if node.ndim and node.shape[0] == total else [node] * len(sizes)
    batched = isinstance(node, np.ndarray) and node.ndim and node.shape[0] == total
    if batched or (_holds_samples(node) and len(node) == total):
        ends = np.cumsum(sizes).tolist()
        return [node[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    fields = _fields(node)
    if fields is None:
        return [node] * len(sizes)
    pieces = [_split(field, sizes, total) for field in fields]
    return [_rebuild(node, [piece[i] for piece in pieces]) for i in range(len(sizes))]


def join(pieces: Sequence[Any], sizes: Sequence[int], *, per_sample: bool = False) -> Any:
    """Make what a step returned for consecutive pieces of a batch what it would have returned for the whole.

    What is batched is concatenated: tensors and arrays (size, ...), and lists and tuples of one element per sample. A
    mean over the samples (0-d floating tensors, floats) becomes the mean over all; whole numbers may be counts and are
    refused. Other leaves must be equal in all pieces. One piece is returned as it is, the same object.

    A list with as many elements as its piece has samples is fields only where it holds no samples (see the head) and
    every element has that many samples; a list of one element, from a piece of one sample, holds that sample. A tuple
    like that holds samples only where it cannot be fields.

    Args:
        pieces: what the step returned for each piece, all of one structure.
        sizes: samples of each piece.
        per_sample: there is one item per sample, so that a list as long as its piece holds samples.

    Raises:
        DataError: the pieces differ in what is neither batched nor a mean, or in more than their first dimension.
    """
    return pieces[0] if len(pieces) == 1 else _join(list(pieces), list(sizes), per_sample)


def _join(nodes: list[Any], sizes: list[int], per_sample: bool) -> Any:
    first = nodes[0]
    for node in nodes:
        if isinstance(node, PackedSequence) or (isinstance(node, torch.Tensor) and node.is_nested):
            raise _not_joined("sequences of several lengths in one", [type(node).__name__])
    if _are_batched(nodes, sizes):
        if len({node.shape[1:] for node in nodes}) > 1:
            raise _not_joined("tensors of several shapes", nodes)
        return torch.cat(nodes) if isinstance(first, torch.Tensor) else np.concatenate(nodes)
    if all(_is_number(node) for node in nodes) and any(_is_mean(node) for node in nodes):
        return first if all(node is first for node in nodes) else _mean(nodes, sizes)
    fields = _fields(first)
    if fields is None:
        if _is_number(first):
            raise _not_joined("whole numbers", nodes)
        if all(_equal(node, first) for node in nodes):
            return first
        raise _not_joined("values", nodes)
    if any(type(node) is not type(first) for node in nodes):
        raise _not_joined("several types", [type(node) for node in nodes])
    as_long = all(isinstance(n, list) and len(n) == size for n, size in zip(nodes, sizes, strict=True))
    if (per_sample and as_long) or _hold_samples_of(nodes, sizes):
        return _rebuild(first, [element for node in nodes for element in node])
    if isinstance(first, Mapping):
        if any(node.keys() != first.keys() for node in nodes):
            raise _not_joined("several sets of keys", [list(node) for node in nodes])
        columns: list[list[Any]] = [[node[key] for node in nodes] for key in first]
    else:
        rows = [_fields(node) or [] for node in nodes]
        if len({len(row) for row in rows}) > 1:
            raise _not_joined("several lengths", nodes)
        columns = [list(column) for column in zip(*rows, strict=True)]
    return _rebuild(first, [_join(column, sizes, per_sample) for column in columns])


def _are_batched(nodes: list[Any], sizes: list[int]) -> bool:
    if not any(all(isinstance(node, kind) for node in nodes) for kind in (torch.Tensor, np.ndarray)):
        return False
    return all(node.ndim and node.shape[0] == size for node, size in zip(nodes, sizes, strict=True))


def _hold_samples_of(nodes: list[Any], sizes: list[int]) -> bool:
    """Say whether lists or plain tuples, one of each piece, have one element per sample (the rule of `join`)."""
    if not isinstance(nodes[0], list | tuple) or hasattr(nodes[0], "_fields"):
        return False
    if any(len(node) != size for node, size in zip(nodes, sizes, strict=True)):
        return False
    if len(set(sizes)) > 1:
        return True  # fields are as many in every piece
    of_elements = {batch_size(element) for node in nodes for element in node}
    could_be_fields = of_elements - {None} == {sizes[0]}
    hold_samples = all(_holds_samples(node) for node in nodes)
    if isinstance(nodes[0], list):
        return hold_samples or not could_be_fields or sizes[0] == 1
    return hold_samples and not could_be_fields and not any(_is_number(element) for node in nodes for element in node)


def _is_number(node: Any) -> bool:
    """Say whether this is one number, plain or 0-d."""
    if isinstance(node, torch.Tensor | np.ndarray):
        return node.ndim == 0
    return isinstance(node, float | int | np.number | np.bool_)


def _is_mean(number: Any) -> bool:
    if isinstance(number, torch.Tensor):
        return number.is_floating_point()
    return isinstance(number, float) or np.issubdtype(np.asarray(number).dtype, np.floating)


def _mean(numbers: list[Any], sizes: list[int]) -> Any:
    """The mean weighted by sizes, in the numbers' own kind."""
    wide = [
        # In 16 bits the sum would lose digits, and soon be infinite.
        number.float() if isinstance(number, torch.Tensor) and number.dtype.itemsize < 4 else number
        for number in numbers
    ]
    mean: Any = sum(number * size for number, size in zip(wide, sizes, strict=True)) / sum(sizes)
    return mean.to(numbers[0].dtype) if isinstance(numbers[0], torch.Tensor) else mean


def _equal(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return np.array_equal(one, other)
    return (one == other) is True  # of two data frames it is a data frame


def _shown(node: Any) -> str:
    if isinstance(node, torch.Tensor | np.ndarray) and node.ndim:
        return f"{type(node).__name__} of shape {tuple(node.shape)}"
    return repr(node)[:60]


def _not_joined(what: str, nodes: Iterable[Any]) -> DataError:
    met = ", ".join(dict.fromkeys(map(_shown, nodes)))
    return DataError(
        f"The pieces of a batch returned {what} that cannot be joined to one: {met}. Expected of each piece one item "
        "per sample (a tensor of shape (samples, ...) or a list), a mean over its samples as a floating number, or the "
        "same in all pieces. Return one item per sample."
    )


def _rows(node: Any) -> int | None:
    """How many samples a leaf that is cut by samples has; None of another one."""
    if isinstance(node, torch.Tensor | np.ndarray):
        return _first_dim(node)
    return len(node) if _holds_samples(node) else None


def move(batch: Any, device: torch.device | str, non_blocking: bool = False, channels_last: bool = False) -> Any:
    """Copy every tensor of a batch to a device; other leaves stay as they are.

    Args:
        batch: any nesting; an object with a `to` method (PackedSequence, ...) is moved by it.
        device: where to.
        non_blocking: copy asynchronously from pinned memory.
        channels_last: give 4-d floating-point tensors (images) the memory format torch.channels_last.

    Returns:
        The same object where there was nothing to move, else a new one of the same types.
    """
    if isinstance(batch, torch.Tensor):
        if channels_last and batch.ndim == 4 and batch.is_floating_point():
            return batch.to(device, non_blocking=non_blocking, memory_format=torch.channels_last)
        return batch.to(device, non_blocking=non_blocking)
    if isinstance(batch, PackedSequence):
        to: Any = batch.to  # its stub knows `to(dtype)` alone
        moved = to(device, non_blocking=non_blocking)
        return batch if moved.data is batch.data else moved
    fields = _fields(batch)
    if fields is None:
        to = None if isinstance(batch, type) else getattr(batch, "to", None)
        return to(device) if callable(to) else batch
    values = [move(field, device, non_blocking, channels_last) for field in fields]
    if all(new is old for new, old in zip(values, fields, strict=True)):
        return batch
    return _rebuild(batch, values)


def count_values(batch: Any) -> int:
    """How many numbers the tensors and arrays of a batch hold: of images, channels times pixels."""
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    if isinstance(batch, np.ndarray):
        return batch.size
    return sum(map(count_values, batch if type(batch) in (list, tuple) else _fields(batch) or ()))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The same nesting with each tensor replaced by `function(tensor)`; the same object where nothing changed."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    fields = _fields(batch)
    if fields is None:
        return batch
    values = [map_tensors(function, field) for field in fields]
    if all(new is old for new, old in zip(values, fields, strict=True)):
        return batch
    return _rebuild(batch, values)


def to_samples(outputs: Any, n: int) -> list[Any]:
    """Turn what a step returned for n samples into n outputs, one per sample.

    A tensor or array (n, ...) gives its n rows (views); a list of n is taken as it is; the fields of a mapping, tuple,
    named tuple or dataclass are each split, and every sample gets a dict, tuple, named tuple or dataclass of its own;
    None gives n times None.

    Raises:
        DataError: something in the outputs has not one item per sample.
    """
    if outputs is None:
        return [None] * n
    if isinstance(outputs, torch.Tensor | np.ndarray):
        if outputs.ndim and outputs.shape[0] == n:
            return list(outputs.unbind(0) if isinstance(outputs, torch.Tensor) else outputs)
        raise _not_per_sample(f"a {type(outputs).__name__} of shape {tuple(outputs.shape)}", n)
    if isinstance(outputs, list):
        if len(outputs) == n:
            return list(outputs)
        raise _not_per_sample(f"a list of {len(outputs)}", n)
    fields = _fields(outputs)
    if fields is None:
        raise _not_per_sample(f"a {type(outputs).__name__}", n)
    if not fields:
        raise _not_per_sample(f"an empty {type(outputs).__name__}", n)
    rows = zip(*(to_samples(field, n) for field in fields), strict=True)
    if isinstance(outputs, Mapping):
        return [dict(zip(outputs, row, strict=True)) for row in rows]
    return [_rebuild(outputs, list(row)) for row in rows]


def _not_per_sample(what: str, n: int) -> DataError:
    return DataError(
        f"The step returned {what} for a batch of {n} samples; expected one item per sample: a tensor of shape "
        f"({n}, ...), a list of {n}, or a dict or tuple of these."
    )


def _first_dim(array: Any) -> int | None:
    return int(array.size(0) if isinstance(array, torch.Tensor) else array.shape[0]) if array.ndim else None


def _holds_samples(node: Any) -> bool:
    """Say whether a list or plain tuple has one element per sample (the rule at the head of this file)."""
    if not isinstance(node, list | tuple) or hasattr(node, "_fields") or isinstance(node, torch.Size) or not node:
        return False
    if all(isinstance(element, torch.Tensor | np.ndarray) for element in node):
        ndims = {element.ndim for element in node}
        firsts = {_first_dim(element) for element in node}
        if len(ndims) > 1:
            return False
        return ndims == {0} or len(firsts) > 1 or (ndims == {3} and firsts <= set(_IMAGE_CHANNELS))
    if not isinstance(node, list) and len({isinstance(element, Mapping) for element in node}) > 1:
        return False  # (inputs, "note"): fields of different kinds
    return all(_is_one_sample(element, type(node) is list) for element in node)


def _is_one_sample(element: Any, in_list: bool) -> bool:
    if isinstance(element, torch.Tensor | np.ndarray):
        return element.ndim == 0
    if isinstance(element, tuple) and not hasattr(element, "_fields"):
        return in_list
    return not isinstance(element, list | tuple)


def _fields(node: Any) -> list[Any] | None:
    """List the children of an inner node; None for a leaf."""
    if isinstance(node, Mapping):
        return list(node.values())
    if isinstance(node, list | tuple):
        return None if isinstance(node, torch.Size) else list(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [getattr(node, field.name) for field in dataclasses.fields(node)]
    return None


def _rebuild(node: Any, values: list[Any]) -> Any:
    """Make a node of the same type with other children."""
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, zip(node, values, strict=True))
    if isinstance(node, tuple):
        make: Callable[[list[Any]], Any] = getattr(node, "_make", type(node))
        return make(values)
    clone = copy.copy(node)
    if isinstance(node, list):
        clone[:] = values
        return clone
    for field, value in zip(dataclasses.fields(node), values, strict=True):
        object.__setattr__(clone, field.name, value)  # also where the dataclass is frozen
    return clone


def _rebuild_mapping(node: Mapping[Any, Any], items: Iterable[tuple[Any, Any]]) -> Any:
    if type(node) is dict or not hasattr(node, "__setitem__"):
        return dict(items)
    clone: Any = copy.copy(node)  # keeps a subclass's own attributes (BatchEncoding, defaultdict)
    for key, value in items:
        clone[key] = value
    return clone
