"""Prediction: one item per sample, in the order in which one process would read them, on any number of ranks.

for each round: one batch on each rank that has one
  predict_step, outputs to the CPU (16-bit floats as float32)
  kept, or written to this rank's files, or only shown to the callbacks
all ranks' outputs -> one item per sample, in reading order, the same on every rank
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from sanctuary_trainer.batch import map_tensors, to_samples
from sanctuary_trainer.checkpointing import decode, encode, read_tensors, write_tensors
from sanctuary_trainer.errors import DataError, RunFolderError
from sanctuary_trainer.loops.evaluate import evaluating, walk
from sanctuary_trainer.reading import Places

if TYPE_CHECKING:
    from sanctuary_trainer.data import Fetched, RankLoader
    from sanctuary_trainer.run import Run

# A shard is written when this many bytes of outputs wait: memory stays constant, files stay few.
SHARD_BYTES = 16 * 2**20


def predict(
    run: Run, loader: RankLoader, limit: int | None, *, keep: bool = True, output_dir: Path | None = None
) -> list[Any] | Predictions | None:
    """Predict every sample of the loader once.

    Args:
        run: the run.
        loader: the loader of this rank.
        limit: rounds at most.
        keep: return the predictions; without it they are only shown to `on_predict_batch_end`.
        output_dir: write them here instead of keeping them in memory.

    Returns:
        A list of one item per sample; with `output_dir` a `Predictions` that reads from there; None without `keep`.

    Raises:
        DataError: `predict_step` did not return one item per sample.
    """
    writer = None if output_dir is None else _Writer(output_dir, run.rank)
    samples: list[Any] = []
    kept: list[tuple[Places, int, Any]] = []
    shown = run.callbacks.has("on_predict_batch_end")

    def one(batch: Any, batch_idx: int, fetched: Fetched) -> None:
        outputs = run.call_step(run.task.predict_step, batch, batch_idx)
        if shown:
            run.callbacks.on_predict_batch_end(run, batch, outputs, fetched.indices)
        if not keep:
            return
        size = run.batch_samples
        if size is None:
            raise DataError(
                f"The number of samples of a {type(batch).__name__} batch cannot be told; "
                "override VisionTask.batch_size."
            )
        outputs = to_host(outputs)
        if writer is None and run.world_size == 1:
            samples.extend(to_samples(outputs, size))  # read in reading order
            return
        check_samples(outputs, size)
        if writer is not None:
            writer.add(fetched.places, size, outputs)
        else:
            kept.append((fetched.places, size, outputs))

    with evaluating(run, "predict"):
        walk(run, loader, limit, one)
    if writer is not None:
        error = None
        try:
            writer.write()
        except (OSError, DataError) as raised:
            error = raised
        run.devices.raise_together(error)  # nobody reads before all have written
        return load_predictions(writer.folder)
    if not keep:
        return None
    if run.world_size == 1:
        return samples
    # Whole batches travel: a sample is a view of its batch, and pickling each would send the batch each time.
    gathered = [batch for rank in run.devices.gather_objects(kept) for batch in rank]
    keyed = [
        pair
        for places, size, outputs in gathered
        for pair in zip(_keys(places, size), to_samples(outputs, size), strict=True)
    ]
    keyed.sort(key=itemgetter(0))
    return [sample for _, sample in keyed]


def check_samples(outputs: Any, size: int) -> None:
    """Raise the DataError of `to_samples` when the outputs are not one item per sample."""
    if not (isinstance(outputs, torch.Tensor) and outputs.ndim and outputs.shape[0] == size):
        to_samples(outputs, size)


def _keys(places: Places, size: int) -> list[tuple[int, ...]]:
    """Sort keys of the samples of a batch; one of unknown size has one place, and its samples follow each other."""
    keys = places.keys()
    return keys if len(keys) == size else [(*keys[0], number) for number in range(size)]


def to_host(outputs: Any) -> Any:
    """Outputs on the CPU, 16-bit floats as float32: one rule for what comes back, whatever the precision."""
    return map_tensors(_to_host, outputs)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).cpu()


class _Writer:
    """Writes one rank's predictions, whole batches, shard by shard."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._shard = 0
        self._bytes = 0
        self._batches: list[tuple[Places, int, Any]] = []

    def add(self, places: Places, size: int, outputs: Any) -> None:
        self._batches.append((places, size, outputs))
        self._bytes += _bytes(outputs)
        if self._bytes >= SHARD_BYTES:
            self.write()

    def write(self) -> None:
        """Write what waits, if anything does."""
        if not self._batches:
            return
        tensors: dict[str, torch.Tensor] = {}
        skeleton = [
            {"places": _as_json(places), "size": size, "outputs": encode(outputs, tensors, str(number))}
            for number, (places, size, outputs) in enumerate(self._batches)
        ]
        path = self.folder / f"predictions_{self.rank:05d}_{self._shard:06d}.safetensors"
        write_tensors(path, tensors, {"batches": json.dumps(skeleton)})
        self._shard += 1
        self._bytes = 0
        self._batches.clear()


def _bytes(outputs: Any) -> int:
    """About how much memory the outputs of a batch take."""
    if isinstance(outputs, torch.Tensor):
        return outputs.nbytes
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return sum(leaf.nbytes if isinstance(leaf, torch.Tensor) else 100 for leaf in leaves)


def _as_json(places: Places) -> list[Any]:
    positions, *rest = places
    return [positions.start, positions.stop, positions.step, *rest]


def _from_json(places: list[Any]) -> Places:
    start, stop, step, *rest = places
    return Places(range(start, stop, step), *rest)


class Predictions(Sequence[Any]):
    """Predictions in a folder, read when asked for: one item per sample, in reading order.

    Iterating reads shard after shard; at most one shard of each rank is in memory.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._paths = sorted(self.folder.glob("predictions_*.safetensors"))
        keys: list[tuple[int, ...]] = []
        shards, places = array("q"), array("q")
        for number, path in enumerate(self._paths):
            _, metadata = read_tensors(path, only_metadata=True)
            for batch in json.loads(metadata["batches"]):
                keys += _keys(_from_json(batch["places"]), batch["size"])
            shards.extend([number] * (len(keys) - len(shards)))
            places.extend(range(len(keys) - len(places)))
        order = sorted(range(len(keys)), key=keys.__getitem__)
        # 8 bytes a number: a list of tuples would take 30 times as much for a million samples.
        self._shards = array("q", (shards[number] for number in order))
        self._places = array("q", (places[number] for number in order))
        self._open: dict[str, tuple[int, list[Any]]] = {}  # rank -> the shard of it that is in memory

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self._samples(self._shards[index])[self._places[index]]

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            yield self[index]

    def _samples(self, shard: int) -> list[Any]:
        path = self._paths[shard]
        rank = path.name.split("_")[1]
        held = self._open.get(rank)
        if held is None or held[0] != shard:
            tensors, metadata = read_tensors(path)
            batches = json.loads(metadata["batches"])
            samples = [s for batch in batches for s in to_samples(decode(batch["outputs"], tensors), batch["size"])]
            held = (shard, samples)
            self._open[rank] = held
        return held[1]


def load_predictions(folder: str | Path) -> Predictions:
    """The predictions that `Trainer.predict(..., output_dir=folder)` wrote.

    Raises:
        RunFolderError: the folder does not exist.
    """
    if not Path(folder).is_dir():
        raise RunFolderError(f"There is no folder {folder} to read predictions from.")
    return Predictions(folder)
