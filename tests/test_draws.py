"""The random numbers of a batch in pieces are those of the whole batch, and so are outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sanctuary_trainer.draws import SlicedDraws

SIZES = ([2, 2, 2, 1], [1] * 7, [3, 4], [7])


@pytest.fixture(autouse=True)
def _generator_as_it_was() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def in_pieces(step: Callable[[slice], Any], sizes: Sequence[int], seen: Any = None) -> list[Any]:
    """What `step` gives for the samples of each piece, and that the generator ends where the whole batch leaves it."""
    torch.manual_seed(3)
    step(slice(0, sum(sizes)))
    end = torch.get_rng_state()
    results, start = [], 0
    for size in sizes:
        torch.manual_seed(3)
        with SlicedDraws(sum(sizes), start, size, seen):
            results.append(step(slice(start, start + size)))
        assert torch.equal(torch.get_rng_state(), end)
        start += size
    return results


def ones(n: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, *shape, dtype=dtype)


def channels_last(n: int) -> torch.Tensor:
    return ones(n, 5, 3, 3).to(memory_format=torch.channels_last)


def empty(n: int, *shape: int) -> torch.Tensor:
    return torch.empty(n, *shape)


DRAWS: dict[str, Callable[[int], torch.Tensor]] = {
    "dropout": lambda n: F.dropout(ones(n, 5, 3)),
    "dropout in place": lambda n: F.dropout(ones(n, 5, 3), inplace=True),
    "dropout in bfloat16": lambda n: F.dropout(ones(n, 40, dtype=torch.bfloat16)),
    "dropout in float64": lambda n: F.dropout(ones(n, 40, dtype=torch.float64)),
    "dropout, channels_last": lambda n: F.dropout(channels_last(n)),
    "dropout, samples not outermost in memory": lambda n: F.dropout(ones(6, n, 4).permute(1, 2, 0)),
    "dropout of a part": lambda n: F.dropout(ones(n, 9)[:, 2:7]),
    "dropout of windows": lambda n: F.dropout(ones(n * 4, 7, 7)),
    "dropout of channels": lambda n: F.dropout2d(ones(n, 5, 3, 3)),
    "alpha dropout": lambda n: F.alpha_dropout(ones(n, 5), training=True),
    "feature alpha dropout": lambda n: F.feature_alpha_dropout(ones(n, 5, 3), training=True),
    "native_dropout": lambda n: torch.native_dropout(ones(n, 5, 3), 0.5, True)[0],
    "the mask of native_dropout": lambda n: torch.native_dropout(channels_last(n), 0.5, True)[1],
    "rand, one number a sample": lambda n: torch.rand(n),
    "rand in float64": lambda n: torch.rand(n, 4, dtype=torch.float64),
    "rand_like": lambda n: torch.rand_like(ones(n, 4)),
    "randn": lambda n: torch.randn(n, 40),
    "randn of few": lambda n: torch.randn(n, 1),
    "randn_like, channels_last": lambda n: torch.randn_like(channels_last(n)),
    "randn_like, strided": lambda n: torch.randn_like(ones(7, n, 5).permute(1, 2, 0)),
    "randint": lambda n: torch.randint(9, (n, 3)),
    "randint from": lambda n: torch.randint(2, 9, (n, 3)),
    "randint_like": lambda n: torch.randint_like(ones(n, 4), 9),
    "random_": lambda n: torch.empty(n, 4, dtype=torch.int64).random_(),
    "uniform_": lambda n: empty(n, 4).uniform_(-1, 1),
    "normal_": lambda n: empty(n, 40).normal_(1, 2),
    "normal of numbers": lambda n: torch.normal(0.0, 1.0, (n, 4)),
    "normal of means": lambda n: torch.normal(ones(n, 4), 2.0),
    "normal of deviations": lambda n: torch.normal(1.0, ones(n, 4)),
    "normal of means and shared deviations": lambda n: torch.normal(ones(n, 4), torch.arange(4.0)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 4), 0.3)),
    "bernoulli of one probability": lambda n: torch.bernoulli(ones(n, 4), 0.3),
    "bernoulli_": lambda n: empty(n, 4, 1, 1).bernoulli_(0.3),
    "bernoulli_ of probabilities": lambda n: empty(n, 4).bernoulli_(torch.full((n, 1), 0.3)),
    "bernoulli of an expanded probability": lambda n: torch.bernoulli(torch.full((n, 1), 0.3).expand(n, 4)),
    "bernoulli of one for all samples": lambda n: torch.bernoulli(torch.full((4,), 0.3).expand(n, 4)),
    "rand_like, expanded": lambda n: torch.rand_like(ones(n, 1, 3).expand(n, 4, 3)),
    "native_dropout, expanded": lambda n: torch.native_dropout(ones(n, 1, 3).expand(n, 4, 3), 0.5, True)[0],
    "dropout under vmap": lambda n: torch.func.vmap(F.dropout, randomness="different")(ones(n, 3)),
    "exponential_": lambda n: empty(n, 4).exponential_(),
    "gumbel": lambda n: F.gumbel_softmax(ones(n, 5)),
    "log_normal_": lambda n: empty(n, 4).log_normal_(),
    "geometric_": lambda n: empty(n, 4).geometric_(0.5),
    "cauchy_": lambda n: empty(n, 4).cauchy_(),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_the_pieces_draw_the_rows_of_the_whole(kind: str) -> None:
    draw = DRAWS[kind]
    torch.manual_seed(3)
    whole = draw(7)
    assert len({row.numpy(force=True).tobytes() for row in whole.float()}) > 1  # else the claim is empty
    for sizes in SIZES:
        pieces = in_pieces(lambda at: draw(at.stop - at.start), sizes)
        assert torch.equal(torch.cat(pieces), whole)
        assert {piece.dtype for piece in pieces} == {whole.dtype}


@pytest.mark.parametrize("kind", ["dropout, channels_last", "randn_like, channels_last", "native_dropout"])
def test_a_piece_has_the_strides_it_would_have_alone(kind: str) -> None:
    piece, _ = in_pieces(lambda at: DRAWS[kind](at.stop - at.start), [3, 4])
    assert piece.stride() == DRAWS[kind](3).stride()
    assert piece.untyped_storage().nbytes() == piece.numel() * piece.element_size()


def test_what_is_not_drawn_by_sample_is_drawn_as_it_is() -> None:
    torch.manual_seed(3)
    whole = torch.rand(3, 5)
    number = torch.rand(())
    for piece in in_pieces(lambda at: (torch.rand(3, 5), torch.rand(())), [2, 2]):
        assert torch.equal(piece[0], whole) and torch.equal(piece[1], number)


def test_a_generator_of_ones_own_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    drawn = in_pieces(lambda at: torch.rand(at.stop - at.start, generator=generator), [2, 2])
    expected = torch.Generator().manual_seed(5)
    torch.rand(4, generator=expected)  # the whole one, that in_pieces runs first
    assert [piece.tolist() for piece in drawn] == [torch.rand(2, generator=expected).tolist() for _ in range(2)]


def test_one_number_for_all_is_told_from_one_a_sample_by_another_size() -> None:
    def step(at: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n = at.stop - at.start
        return torch.rand(1), torch.rand(n, 1), torch.randn(4, 3)

    seen: dict[Any, set[tuple[int, int]]] = {}
    torch.manual_seed(3)
    with SlicedDraws(4, 0, 4, seen):
        whole = step(slice(0, 4))
    for sizes in ([1] * 4, [2, 2]):
        pieces = in_pieces(step, sizes, seen)
        assert all(torch.equal(piece[0], whole[0]) for piece in pieces)
        assert torch.equal(torch.cat([piece[1] for piece in pieces]), whole[1])
        assert all(torch.equal(piece[2], whole[2]) for piece in pieces)


def test_the_whole_as_one_piece_is_what_it_is_without() -> None:
    torch.manual_seed(3)
    plain = F.dropout(ones(4, 5)), torch.rand(4)
    torch.manual_seed(3)
    with SlicedDraws(4, 0, 4):
        inside = F.dropout(ones(4, 5)), torch.rand(4)
    assert all(map(torch.equal, plain, inside))


def test_outside_nothing_changed() -> None:
    torch.manual_seed(3)
    plain = torch.rand(2, 3)
    torch.manual_seed(3)
    with SlicedDraws(4, 2, 2):
        assert not torch.equal(torch.rand(2, 3), plain)
    with pytest.raises(ZeroDivisionError), SlicedDraws(4, 2, 2):
        raise ZeroDivisionError
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2, 3), plain)


def test_other_operators_compute_what_they_compute() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3)
    images = torch.randn(2, 3, 8, 8)

    def outputs() -> list[torch.Tensor]:
        out = F.group_norm(layer(images), 2).relu()
        out.sum().backward()
        gradient, layer.weight.grad = layer.weight.grad, None
        assert gradient is not None
        return [out.detach(), gradient, torch.eye(2), torch.arange(3), torch.zeros(2, 2), images.sort(-1).values]

    plain = outputs()
    with SlicedDraws(4, 0, 2):
        inside = outputs()
    assert all(map(torch.equal, plain, inside))


@pytest.mark.parametrize(("start", "size"), [(-1, 2), (0, 0), (3, 2)])
def test_a_piece_outside_the_batch_is_refused(start: int, size: int) -> None:
    with pytest.raises(ValueError, match="no piece of a batch of 4"):
        SlicedDraws(4, start, size)


# --- models: outputs and gradients ---


class Attention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.attention(x, x, x, need_weights=self.need_weights)[0]
        return out


class ScaledDotProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)


class Checkpointed(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def path_dropped() -> nn.Module:
    drop = pytest.importorskip("timm.layers").DropPath(0.4)
    return nn.Sequential(nn.Linear(8, 8), drop, nn.Linear(8, 8))


def stochastic_depth(mode: str) -> nn.Module:
    drop = pytest.importorskip("torchvision.ops").StochasticDepth(0.4, mode)
    return nn.Sequential(nn.Linear(8, 8), drop, nn.Linear(8, 8), nn.Dropout())


def vit(attention: str, checkpointing: bool = False) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        attn_implementation=attention,
    )
    model = transformers.ViTForImageClassification(config)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def timm_swin() -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.models.swin_transformer.SwinTransformer(
        img_size=16,
        patch_size=2,
        window_size=4,
        embed_dim=8,
        depths=(1, 2),
        num_heads=(1, 2),
        num_classes=3,
        drop_rate=0.2,
        attn_drop_rate=0.2,
        proj_drop_rate=0.2,
        drop_path_rate=0.3,
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "nn.Dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.ReLU(), nn.Dropout(0.2)), (5, 8)),
    "nn.Dropout2d": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout2d(), nn.Conv2d(8, 4, 3)), (3, 8, 8)),
    "timm DropPath": (path_dropped, (5, 8)),
    "StochasticDepth by sample": (lambda: stochastic_depth("row"), (5, 8)),
    "StochasticDepth by batch": (lambda: stochastic_depth("batch"), (5, 8)),
    "MultiheadAttention": (lambda: Attention(need_weights=False), (5, 8)),
    "MultiheadAttention with weights": (lambda: Attention(need_weights=True), (5, 8)),
    "scaled dot-product attention": (ScaledDotProduct, (5, 8)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True), (5, 8)),
    "checkpointed": (lambda: Checkpointed(Attention(False), path_dropped(), nn.Dropout(0.3)), (5, 8)),
    "transformers ViT, eager": (lambda: vit("eager"), (3, 8, 8)),
    "transformers ViT, sdpa": (lambda: vit("sdpa"), (3, 8, 8)),
    "transformers ViT, checkpointed": (lambda: vit("sdpa", checkpointing=True), (3, 8, 8)),
    "timm Swin": (timm_swin, (3, 16, 16)),
}


def train(model: nn.Module, piece: torch.Tensor) -> torch.Tensor:
    out = model(piece)
    out = getattr(out, "logits", out)
    out.float().pow(2).sum().backward() if out.dtype != torch.float64 else out.pow(2).sum().backward()
    return out.detach()


def train_in_pieces(model: nn.Module, images: torch.Tensor, sizes: Sequence[int], *, sliced: bool = True) -> Any:
    """Outputs of all pieces and the parameters' gradients; a first attempt at the whole tells which draws grow."""
    seen: dict[Any, set[tuple[int, int]]] = {}
    with SlicedDraws(len(images), 0, len(images), seen):
        model(images)
    results, start = [], 0
    for size in sizes:
        torch.manual_seed(3)
        with SlicedDraws(len(images), start, size, seen) if sliced else nullcontext():
            results.append(train(model, images[start : start + size]))
        start += size
    return torch.cat(results), gradients(model)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    assert found
    return found


@pytest.mark.parametrize("sizes", [[2, 2, 2, 1], [3, 4]], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_the_pieces_of_a_model_compute_what_the_whole_computes(kind: str, sizes: list[int]) -> None:
    make, shape = MODELS[kind]
    torch.manual_seed(0)
    model = make().double().train()
    images = torch.randn(7, *shape, dtype=torch.float64)

    torch.manual_seed(3)
    whole = train(model, images), gradients(model)
    pieces = train_in_pieces(model, images, sizes)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)
    plain = train_in_pieces(model, images, sizes, sliced=False)  # else the claim is empty
    assert not torch.allclose(plain[0], whole[0])


@pytest.mark.parametrize("kind", ["transformers ViT, sdpa", "transformers ViT, checkpointed", "MultiheadAttention"])
def test_under_autocast_too(kind: str) -> None:
    make, shape = MODELS[kind]
    torch.manual_seed(0)
    model = make().train()
    images = torch.randn(7, *shape)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(3)
        whole = train(model, images), gradients(model)
        pieces = train_in_pieces(model, images, [2, 2, 2, 1])
        plain = train_in_pieces(model, images, [2, 2, 2, 1], sliced=False)
    assert pieces[0].dtype == torch.bfloat16
    torch.testing.assert_close(pieces, whole, rtol=0.05, atol=0.05)
    assert not torch.allclose(plain[0], whole[0], rtol=0.05, atol=0.05)


def test_what_is_compiled_runs_compiled() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).double()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    images = torch.randn(4, 8, dtype=torch.float64)
    torch.manual_seed(3)
    whole = model(images)
    pieces = in_pieces(lambda at: compiled(images[at]), [2, 2])
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-12, atol=1e-12)
