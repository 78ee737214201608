"""How many samples a batch of any nesting has, and that it survives being split, moved and taken sample by sample."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import default_collate

from sanctuary_trainer.batch import batch_size, join, move, split, to_samples
from sanctuary_trainer.errors import DataError

Pair = namedtuple("Pair", "images labels")


@dataclasses.dataclass(frozen=True)
class Frozen:
    images: Any
    scale: Any


@dataclasses.dataclass
class Slotted:
    __slots__ = ("images",)
    images: Any


class Record(UserDict):
    """As BatchEncoding and BatchFeature: a mapping that holds attributes of its own."""

    def __init__(self, data: Any, source: str) -> None:
        super().__init__(data)
        self.source = source


def images(n: int, *shape: int) -> torch.Tensor:
    return torch.arange(n * 3 * 4 * 4, dtype=torch.float32).reshape(n, 3, 4, 4)


def ragged(*heights: int, channels: int = 3) -> list[torch.Tensor]:
    return [torch.full((channels, height, 5), float(i)) for i, height in enumerate(heights)]


def boxes(*counts: int) -> list[dict[str, Any]]:
    return [{"boxes": torch.full((count, 4), float(i)), "name": f"{i}.png"} for i, count in enumerate(counts)]


SIZES = {
    "tensor": (images(5), 5),
    "array": (np.zeros((5, 2)), 5),
    "no samples": (torch.zeros(0, 3), 0),
    "tuple": ((images(5), torch.zeros(5)), 5),
    "list of fields": ([images(5), torch.zeros(5)], 5),
    "named tuple": (Pair(images(5), torch.zeros(5)), 5),
    "dict": ({"image": images(5), "label": torch.zeros(5)}, 5),
    "dataclass": (Frozen(images(5), 2.0), 5),
    "dataclass with slots": (Slotted(images(5)), 5),
    "mapping subclass": (Record({"image": images(5)}, "camera"), 5),
    "list of dicts": (boxes(2, 0, 1), 3),
    "list of names": (["a.png", "b.png"], 2),
    "list of numbers": ([3, 1, 2], 3),
    "list of nothing": ([None, None], 2),
    "list of 0-d tensors": ([torch.tensor(1.0), torch.tensor(2.0)], 2),
    "uncollated": ([(torch.zeros(3, 4, 4), 1), (torch.zeros(3, 4, 4), 2)], 2),
    "images of several heights": (ragged(4, 6), 2),
    "images of one height": (ragged(4, 4, 4, 4), 4),
    "detection, lists": ((ragged(4, 6), boxes(2, 0)), 2),
    "detection, list of lists": ([ragged(4, 6), boxes(2, 0)], 2),
    "detection, tuples": (tuple(zip(*zip(ragged(4, 4), boxes(2, 0), strict=True), strict=True)), 2),
    "detection, dict": ({"images": ragged(4, 6), "targets": boxes(2, 0)}, 2),
    "detection with two channels": ((ragged(4, 4, 4, channels=2), boxes(2, 0, 1)), 3),
    "ragged boxes alone": ([torch.zeros(2, 4), torch.zeros(0, 4), torch.zeros(7, 4)], 3),
    "nested": ({"inputs": {"views": (images(5), images(5))}, "meta": {"scale": torch.tensor(2.0)}}, 5),
    "fields of fields": (default_collate([((torch.zeros(2), torch.zeros(3)), 1.0)] * 5), 5),
    "0-d tensor first": ({"scale": torch.tensor(2.0), "image": images(5)}, 5),
    "weights of another length": ([images(5), torch.zeros(10)], 5),
    "class names beside images": ({"classes": ["cat", "dog"], "image": images(5)}, 5),
    "names in a collated tuple": (default_collate([(torch.zeros(3), "a.png")] * 5), 5),
    "two views": ([images(5), images(5)], 5),
    "packed": (pack_sequence([torch.zeros(4), torch.zeros(2)]), 2),
    "nothing tells": ({"scale": torch.tensor(2.0), "name": "a"}, None),
    "number": (3.0, None),
    "string": ("abc", None),
    "none": (None, None),
    "empty": ([], None),
}


@pytest.mark.parametrize("kind", SIZES)
def test_samples_are_counted_in_every_container(kind: str) -> None:
    batch, size = SIZES[kind]
    assert batch_size(batch) == size


def test_the_batches_of_case_83_weigh_what_they_should() -> None:
    """256, 256 and 10 samples in four containers: 393 / 522, not 0.8."""
    for make in (
        lambda n: {"x": torch.zeros(n, 2)},
        lambda n: (torch.zeros(n, 2), torch.zeros(n)),
        lambda n: [{"x": torch.zeros(2)}] * n,
        lambda n: {"deep": ([torch.zeros(n, 2)], {"y": torch.zeros(n)})},
    ):
        sizes = [batch_size(make(n)) for n in (256, 256, 10)]
        assert sizes == [256, 256, 10]
        mean = sum(value * size for value, size in zip((0.7, 0.8, 0.9), sizes, strict=True)) / sum(sizes)
        assert mean == pytest.approx(393 / 522, abs=1e-12)


# --- split ---


def leaves(batch: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(batch)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_the_pieces_together_are_the_batch(sizes: list[int]) -> None:
    n = sum(sizes)
    batch = {
        "fields": [images(n), torch.arange(n)],
        "array": np.arange(n * 2).reshape(n, 2),
        "targets": [{"index": i} for i in range(n)],
        "names": tuple(f"{i}.png" for i in range(n)),
        "pair": Pair(torch.arange(n), None),
        "scale": torch.tensor(2.0),
    }
    pieces = split(batch, sizes)
    assert [batch_size(piece) for piece in pieces] == sizes
    assert torch.equal(torch.cat([piece["fields"][0] for piece in pieces]), batch["fields"][0])
    assert torch.equal(torch.cat([piece["pair"].images for piece in pieces]), torch.arange(n))
    assert np.array_equal(np.concatenate([piece["array"] for piece in pieces]), batch["array"])
    assert [target["index"] for piece in pieces for target in piece["targets"]] == list(range(n))
    assert [name for piece in pieces for name in piece["names"]] == [f"{i}.png" for i in range(n)]
    for piece in pieces:
        assert type(piece["pair"]) is Pair and piece["pair"].labels is None
        assert piece["scale"] is batch["scale"]


def test_a_piece_is_a_view() -> None:
    batch = images(4)
    first, _ = split(batch, [1, 3])
    first.zero_()
    assert batch[0].abs().sum() == 0


def test_detection_batches_are_split_by_image() -> None:
    pieces = split((ragged(4, 6, 8), boxes(2, 0, 1)), [1, 2])
    assert [[image.shape[1] for image in piece[0]] for piece in pieces] == [[4], [6, 8]]
    assert [[target["name"] for target in piece[1]] for piece in pieces] == [["0.png"], ["1.png", "2.png"]]


def test_a_split_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(DataError, match=r"4 samples cannot be split into pieces of \[1, 2\], which add up to 3"):
        split(images(4), [1, 2])
    with pytest.raises(DataError, match="None samples"):
        split("abc", [1])


def test_a_packed_sequence_is_not_split_wrongly() -> None:
    with pytest.raises(DataError, match="PackedSequence cannot be split"):
        split(pack_sequence([torch.zeros(4), torch.zeros(2)]), [1, 1])


# --- join ---


def same(one: Any, other: Any) -> bool:
    """Equal in type, nesting, dtype and value."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict | UserDict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other)


def nestings(n: int) -> st.SearchStrategy[Any]:
    """Batches of n samples of any nesting, whose pieces still tell fields from samples."""
    batched = st.sampled_from(
        [
            torch.arange(n * 5.0).reshape(n, 5),
            torch.arange(n),
            torch.zeros(n, 2, 3, 0),
            np.arange(n * 2).reshape(n, 2),
            [{"i": i, "boxes": torch.full((i, 4), 1.0)} for i in range(n)],
            [f"{i}.png" for i in range(n)],
            tuple(f"{i}.png" for i in range(n)),
            [torch.full((i, 4), float(i)) for i in range(n)],
            [(torch.zeros(3, 4), i) for i in range(n)],
        ]
    )
    shared = st.sampled_from([None, "note", 0.1, torch.tensor(0.1), {}])
    first = torch.arange(n * 2.0).reshape(n, 2)  # the container's other fields are then fields too

    def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.dictionaries(st.sampled_from("abc"), children, max_size=3),
            st.lists(children, min_size=1, max_size=3).map(lambda fields: [first, *fields]),
            st.lists(children, max_size=3).map(lambda fields: (first, *fields)),
            st.builds(Pair, children, children),
            st.builds(Frozen, children, children),
            st.builds(Record, st.dictionaries(st.sampled_from("abc"), children, max_size=2), st.just("camera")),
        )

    tree = st.recursive(batched | shared, containers, max_leaves=6)
    return tree.map(lambda rest: {"first": first, "rest": rest, "table": torch.zeros(1, 2)})


@settings(max_examples=60)
@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_joining_undoes_splitting(data: st.DataObject, sizes: list[int]) -> None:
    batch = data.draw(nestings(sum(sizes)))
    assert same(join(split(batch, sizes), sizes), batch)


def test_one_piece_is_itself() -> None:
    outputs = {"packed": pack_sequence([torch.zeros(2)]), "count": 3}
    assert join([outputs], [4]) is outputs


def test_the_mean_of_pieces_is_weighted_by_their_samples() -> None:
    values = torch.arange(7, dtype=torch.float64) ** 2
    pieces = [values[:3], values[3:6], values[6:]]
    joined = join([{"loss": piece.mean(), "plain": piece.mean().item()} for piece in pieces], [3, 3, 1])
    assert joined["loss"].dtype == torch.float64
    assert joined["loss"].item() == pytest.approx(values.mean().item(), abs=1e-12)
    assert joined["plain"] == pytest.approx(values.mean().item(), abs=1e-12)
    assert join([0, 0.5], [1, 1]) == 0.25
    half = join(
        [torch.tensor(60000.0, dtype=torch.float16)] + [torch.tensor(30000.0, dtype=torch.float16)] * 2, [4, 4, 4]
    )
    assert half.dtype == torch.float16 and half.item() == 40000


def test_pieces_of_one_sample() -> None:
    joined = join([(torch.full((1, 2), float(i)), torch.tensor(float(i)), f"{i}"[:0]) for i in range(3)], [1] * 3)
    assert joined[0].tolist() == [[0, 0], [1, 1], [2, 2]] and joined[1].item() == 1 and joined[2] == ""
    boxes_of_each = [[torch.full((1, 4), float(i))] for i in range(3)]
    assert [box.shape for box in join(boxes_of_each, [1] * 3)] == [(1, 4)] * 3
    assert join([[{"n": 1}], [{"n": 2}]], [1, 1]) == [{"n": 1}, {"n": 2}]
    assert join([["a"], ["b"]], [1, 1]) == ["a", "b"]
    assert join([("a",), ("b",)], [1, 1]) == ("a", "b")
    assert join([(torch.zeros(1, 3, 5),)] * 2, [1, 1])[0].shape == (2, 3, 5)


def test_as_many_fields_as_samples_stay_fields() -> None:
    """Pieces of two samples that give two things each."""
    logits, features = torch.zeros(2, 10), torch.zeros(2, 5)
    for make in (list, tuple):
        joined = join([make([logits, features])] * 2, [2, 2])
        assert type(joined) is make and [field.shape for field in joined] == [(4, 10), (4, 5)]
    losses = join([(torch.tensor(1.0), torch.tensor(2.0)), (torch.tensor(3.0), torch.tensor(4.0))], [2, 2])
    assert [loss.item() for loss in losses] == [2, 3]
    samples = [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(2, 4)}]
    assert len(join([samples, samples], [2, 2])) == 4
    masks = [torch.zeros(8, 8), torch.zeros(8, 8)]
    assert len(join([masks, masks], [2, 2])) == 4


def test_a_model_output_is_joined_field_by_field() -> None:
    pytest.importorskip("transformers")
    from transformers.modeling_outputs import ImageClassifierOutput

    pieces = [
        ImageClassifierOutput(
            loss=torch.tensor(float(n)),
            logits=torch.zeros(n, 3),
            hidden_states=(torch.ones(n, 5, 2), torch.ones(n, 5, 2)),
        )
        for n in (2, 1)
    ]
    joined = join(pieces, [2, 1])
    assert type(joined) is ImageClassifierOutput and joined.loss.item() == pytest.approx(5 / 3)
    assert joined.logits.shape == (3, 3) and [state.shape for state in joined.hidden_states] == [(3, 5, 2)] * 2


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([4, 4], "whole numbers that cannot be joined to one: 4"),
        ([3, 4], "whole numbers that cannot be joined to one: 3, 4"),
        ([torch.tensor(3), torch.tensor(4)], r"whole numbers .*: tensor\(3\), tensor\(4\)"),
        ([True, False], "whole numbers .*: True, False"),
        (["a", "b"], "values .*: 'a', 'b'"),
        ([None, torch.zeros(1)], r"values .*: None, Tensor of shape \(1,\)"),
        (
            [torch.zeros(2, 5), torch.zeros(1, 7)],
            r"several shapes .*: Tensor of shape \(2, 5\), Tensor of shape \(1, 7\)",
        ),
        ([torch.zeros(9), torch.zeros(8)], r"values .*: Tensor of shape \(9,\), Tensor of shape \(8,\)"),
        ([{"a": 1}, {"b": 1}], r"several sets of keys .*: \['a'\], \['b'\]"),
        ([{"a": 1}, [1, 1]], "several types"),
        ([[1, 2, 3], [1, 2, 3, 4]], r"several lengths .*: \[1, 2, 3\], \[1, 2, 3, 4\]"),
        ([pack_sequence([torch.zeros(4)])] * 2, "sequences of several lengths in one .*PackedSequence"),
        (
            [torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged)] * 2,
            "sequences of several lengths in one",
        ),
    ],
    ids=range(13),
)
def test_what_cannot_be_joined_is_refused(pieces: list[Any], told: str) -> None:
    with pytest.raises(DataError, match=f"{told}.*Return one item per sample"):
        join(pieces, [2, 1])


# --- move ---

META = torch.device("meta")


def test_every_tensor_moves_and_every_container_keeps_its_type() -> None:
    batch = {
        "pair": Pair(images(2), "name"),
        "frozen": Frozen([torch.zeros(2)], 3.0),
        "slotted": Slotted((torch.zeros(2),)),
        "default": defaultdict(list, {"x": torch.zeros(2)}),
        "ordered": OrderedDict(x=torch.zeros(2)),
        "record": Record({"x": torch.zeros(2)}, "camera"),
        "array": np.zeros(2),
        "shape": torch.Size([2, 3]),
        "none": None,
    }
    moved = move(batch, META)
    assert {type(value) for value in moved.values()} == {type(value) for value in batch.values()}
    assert all(leaf.device == META for leaf in leaves(moved) if isinstance(leaf, torch.Tensor))
    assert moved["frozen"].images[0].device == META and moved["frozen"].scale == 3.0
    assert moved["slotted"].images[0].device == META
    assert moved["default"]["new"] == [] and moved["default"]["x"].device == META
    assert moved["record"].source == "camera" and moved["record"]["x"].device == META
    assert moved["array"] is batch["array"] and moved["shape"] is batch["shape"]
    # The batch that was given is as it was: whoever holds it (a retry after out of memory) still has it on the host.
    assert all(leaf.device.type == "cpu" for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
    assert batch["record"]["x"].device.type == "cpu"


def test_a_batch_that_is_there_already_is_the_same_object() -> None:
    batch = {"x": [images(2), (torch.zeros(2), None)], "packed": pack_sequence([torch.zeros(2)]), "y": Record({}, "a")}
    assert move(batch, "cpu") is batch


def test_an_object_with_a_to_method_is_moved_by_it() -> None:
    class Boxes:
        device = "cpu"

        def to(self, device: Any) -> "Boxes":
            moved = Boxes()
            moved.device = device
            return moved

    assert move([Boxes()], META)[0].device == META
    packed = move(pack_sequence([torch.zeros(2)]), META)
    assert packed.data.device == META
    assert move({"class": Boxes}, META) == {"class": Boxes}


def test_images_alone_become_channels_last() -> None:
    image, label, mask = images(2), torch.zeros(2), torch.zeros(2, 3, 4, 4, dtype=torch.int64)
    moved = move([image, label, mask], "cpu", channels_last=True)
    assert moved[0].is_contiguous(memory_format=torch.channels_last) and torch.equal(moved[0], image)
    assert moved[1] is label and moved[2] is mask


def test_transformers_batches_keep_their_class() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchFeature({"pixel_values": images(2)})
    assert batch_size(batch) == 2
    moved = move(batch, META)
    assert type(moved) is type(batch) and moved["pixel_values"].device == META
    assert batch["pixel_values"].device.type == "cpu"
    assert [piece["pixel_values"].shape[0] for piece in split(batch, [1, 1])] == [1, 1]


# --- to_samples ---


def test_outputs_become_one_item_per_sample() -> None:
    assert [row.tolist() for row in to_samples(torch.arange(4).reshape(2, 2), 2)] == [[0, 1], [2, 3]]
    assert [row.tolist() for row in to_samples(np.arange(2), 2)] == [0, 1]
    assert to_samples(None, 2) == [None, None]
    assert to_samples(["a", "b"], 2) == ["a", "b"]
    assert to_samples({"label": torch.tensor([1, 2]), "name": ["a", "b"]}, 2) == [
        {"label": torch.tensor(1), "name": "a"},
        {"label": torch.tensor(2), "name": "b"},
    ]
    assert to_samples((torch.tensor([1, 2]), None), 2) == [(torch.tensor(1), None), (torch.tensor(2), None)]
    assert to_samples(Pair([1, 2], ["a", "b"]), 2) == [Pair(1, "a"), Pair(2, "b")]
    assert to_samples(Frozen([1, 2], [3, 4]), 2) == [Frozen(1, 3), Frozen(2, 4)]
    assert to_samples(torch.zeros(0, 3), 0) == []


def test_ragged_outputs_survive() -> None:
    outputs = boxes(0, 1, 2)
    samples = to_samples(outputs, 3)
    assert [sample["boxes"].shape[0] for sample in samples] == [0, 1, 2]
    assert [sample["name"] for sample in samples] == ["0.png", "1.png", "2.png"]


def test_a_model_output_becomes_dicts() -> None:
    pytest.importorskip("transformers")
    from transformers.modeling_outputs import ImageClassifierOutput

    samples = to_samples(ImageClassifierOutput(logits=torch.eye(2)), 2)
    assert [sample["logits"].tolist() for sample in samples] == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        (torch.zeros(3, 2), r"Tensor of shape \(3, 2\)"),
        (torch.tensor(1.0), r"Tensor of shape \(\)"),
        ([1, 2, 3], "list of 3"),
        ({"a": torch.zeros(2), "b": 1.0}, "a float"),
        ("ab", "a str"),
        ({}, "an empty dict"),
    ],
)
def test_outputs_that_are_not_per_sample_are_refused(outputs: Any, told: str) -> None:
    with pytest.raises(DataError, match=told + r".* for a batch of 2 samples; expected one item per sample"):
        to_samples(outputs, 2)


def test_packed_sequences_come_back_whole() -> None:
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    padded, lengths = pad_packed_sequence(move(packed, "cpu"), batch_first=True)
    assert padded.tolist() == [[0, 1, 2], [0, 1, 0]] and lengths.tolist() == [3, 2]
