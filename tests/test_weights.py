"""Weights on disk: the module's own keys whatever is wrapped around it, tied weights tied, all of it or an error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sanctuary_trainer import CheckpointError, DataError, TaskError, VisionTask
from sanctuary_trainer.callbacks import Checkpoint
from sanctuary_trainer.checkpointing import read_tensors, write_tensors
from sanctuary_trainer.weights import load_weights, save_weights, unwrapped
from tests.small_tasks import Line, Net, classes, floats, loader, quiet_trainer


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def same(first: nn.Module, second: nn.Module) -> bool:
    one, other = first.state_dict(), second.state_dict()
    values = zip(one.values(), other.values(), strict=True)
    return list(one) == list(other) and all(torch.equal(a, b) for a, b in values)


def test_parameters_and_buffers_come_back_under_the_modules_own_keys(tmp_path: Path) -> None:
    first, second = network(), network()
    first(torch.randn(5, 3))
    save_weights(first, tmp_path / "w.safetensors")
    assert not same(first, second)
    assert load_weights(second, tmp_path / "w.safetensors") == []
    assert same(first, second)
    assert read_tensors(tmp_path / "w.safetensors")[0].keys() == first.state_dict().keys()


def test_equal_weights_give_equal_files(tmp_path: Path) -> None:
    for name in "ab":
        torch.manual_seed(0)
        save_weights(Tied(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# Tied weights


class Tied(nn.Module):
    """Three layers with one weight, registered in the given order; a fourth with its transpose, in the same memory."""

    def __init__(self, order: str = "encoder decoder also") -> None:
        super().__init__()
        for name in order.split():
            self.add_module(name, nn.Linear(4, 4))
        for name in ("decoder", "also"):
            getattr(self, name).weight = self.get_submodule("encoder").weight
        self.turned = nn.Linear(4, 4)
        self.turned.weight = nn.Parameter(self.get_submodule("encoder").weight.detach().t())


ORDERS = ["encoder decoder also", "decoder encoder also", "also encoder decoder", "decoder also encoder"]

IN_A_FRESH_PROCESS = """
import sys, torch
from pathlib import Path
from tests.test_weights import Tied
from sanctuary_trainer.weights import load_weights

module = Tied(sys.argv[2])
assert load_weights(module, Path(sys.argv[1])) == []
encoder, decoder, also = module.encoder.weight, module.decoder.weight, module.also.weight
assert encoder is decoder is also
with torch.no_grad():
    assert torch.equal(module.turned.weight, encoder.t())
    print(encoder.double().sum().item(), module.also.bias.double().sum().item())
    decoder[0, 0] += 1
    assert encoder[0, 0] == also[0, 0] == decoder[0, 0]
"""


@pytest.mark.parametrize("saved", ORDERS)
@pytest.mark.parametrize("loaded", ORDERS)
def test_tied_weights_stay_tied_in_any_order_of_keys(tmp_path: Path, saved: str, loaded: str) -> None:
    first, second = Tied(saved), Tied(loaded)
    save_weights(first, tmp_path / "w")
    stored = read_tensors(tmp_path / "w")[0]
    assert {f"{name}.weight" for name in ("encoder", "decoder", "also")} & stored.keys() == {"also.weight"}
    assert load_weights(second, tmp_path / "w") == []
    assert second.encoder.weight is second.decoder.weight is second.also.weight
    assert torch.equal(second.encoder.weight, first.encoder.weight)
    assert torch.equal(second.turned.weight, first.turned.weight), "a transposed view holds other values"
    assert torch.equal(second.also.bias, first.also.bias)


@pytest.mark.slow
def test_tied_weights_are_tied_in_a_fresh_process(tmp_path: Path) -> None:
    module = Tied()
    save_weights(module, tmp_path / "w")
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, str(tmp_path / "w"), "also decoder encoder"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = [module.encoder.weight.double().sum().item(), module.also.bias.double().sum().item()]
    assert [float(text) for text in done.stdout.split()] == expected


def test_tied_weights_of_a_file_load_into_a_module_that_has_them_apart_and_back(tmp_path: Path) -> None:
    first = Tied()
    save_weights(first, tmp_path / "tied")
    apart = Tied()
    for name in ("decoder", "also"):
        getattr(apart, name).weight = nn.Parameter(torch.zeros(4, 4))
    load_weights(apart, tmp_path / "tied")
    assert torch.equal(apart.decoder.weight, first.encoder.weight) and torch.equal(
        apart.also.weight, first.encoder.weight
    )
    save_weights(apart, tmp_path / "apart")
    assert {"also.weight", "decoder.weight"} <= read_tensors(tmp_path / "apart")[0].keys()
    second = Tied()
    load_weights(second, tmp_path / "apart")
    assert torch.equal(second.encoder.weight, first.encoder.weight)


@pytest.mark.parametrize("left", ["encoder", "decoder", "also"])
def test_others_files_may_hold_a_tied_weight_under_any_of_its_keys(tmp_path: Path, left: str) -> None:
    first = Tied()
    gone = {f"{name}.weight" for name in ("encoder", "decoder", "also")} - {f"{left}.weight"}
    write_tensors(tmp_path / "w", {name: value for name, value in first.state_dict().items() if name not in gone})
    second = Tied()
    assert load_weights(second, tmp_path / "w") == []
    assert torch.equal(second.encoder.weight, first.encoder.weight)


def test_a_module_in_two_places_is_stored_once(tmp_path: Path) -> None:
    inner = nn.Linear(3, 3)
    first = nn.ModuleDict({"b": inner, "a": inner})
    save_weights(first, tmp_path / "w")
    assert sorted(read_tensors(tmp_path / "w")[0]) == ["a.bias", "a.weight"]
    other = nn.Linear(3, 3)
    load_weights(nn.ModuleDict({"b": other, "a": other}), tmp_path / "w")
    assert same(inner, other)


# What is wrapped around a module


class Holds(nn.Module):
    """A network, perhaps wrapped, beside a layer whose real name is that of a wrapper's inside."""

    def __init__(self, wrap: Callable[[nn.Module], Any] = lambda module: module) -> None:
        super().__init__()
        self.net = wrap(network())
        self.module = nn.Linear(2, 2)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def parallel(module: nn.Module) -> Any:
    return nn.DataParallel(module)


def both(module: nn.Module) -> Any:
    return compiled(parallel(module))


WRAPPERS = [compiled, parallel, both]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("whole", [True, False])
def test_keys_carry_no_wrappers_name_and_fit_both_ways(tmp_path: Path, wrap: Any, whole: bool) -> None:
    plain = Holds()
    other = wrap(Holds()) if whole else Holds(wrap)
    save_weights(other, tmp_path / "wrapped")
    assert read_tensors(tmp_path / "wrapped")[0].keys() == plain.state_dict().keys()
    assert "module.weight" in plain.state_dict(), "a real name stays"
    assert load_weights(plain, tmp_path / "wrapped") == []
    assert all(map(torch.equal, plain.state_dict().values(), other.state_dict().values()))
    plain = Holds()
    save_weights(plain, tmp_path / "plain")
    assert load_weights(other, tmp_path / "plain") == []
    assert all(map(torch.equal, plain.state_dict().values(), other.state_dict().values()))


def test_a_wrapped_module_in_two_places_has_plain_keys_in_both(tmp_path: Path) -> None:
    inner = compiled(nn.Linear(2, 2))
    save_weights(nn.ModuleDict({"b": inner, "a": inner}), tmp_path / "w")
    assert sorted(read_tensors(tmp_path / "w")[0]) == ["a.bias", "a.weight"]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_others_files_with_prefixes_fit(tmp_path: Path, prefix: str) -> None:
    first, second = network(), network()
    write_tensors(tmp_path / "w", {f"{prefix}{name}": value for name, value in first.state_dict().items()})
    assert load_weights(second, tmp_path / "w") == []
    assert same(first, second)


def test_a_compiled_submodule_inside_a_key_of_others_fits(tmp_path: Path) -> None:
    first, second = Holds(), Holds()
    written = {name.replace("net.", "net._orig_mod."): value for name, value in first.state_dict().items()}
    write_tensors(tmp_path / "w", written)
    assert load_weights(second, tmp_path / "w") == []
    assert same(first, second)


def test_unwrapped_is_the_module_itself() -> None:
    module = network()
    assert unwrapped(both(module)) is module is unwrapped(module)


# Extra states


class Extra(nn.Module):
    """Gives a state of its own that is no tensor, or one whose shape changes."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [{"scale": torch.tensor([1.0, 2.0]), "names": ("a", None), 3: b"x"}, torch.arange(5), [1.5], "text", {}],
)
def test_extra_states_go_with_the_weights(tmp_path: Path, extra: Any) -> None:
    first = nn.ModuleDict({"a": Extra(extra), "b": Extra([torch.zeros(2)])})
    save_weights(first, tmp_path / "w")
    second = nn.ModuleDict({"a": Extra(torch.zeros(2)), "b": Extra(None)})
    assert load_weights(second, tmp_path / "w") == []
    back: Any = second["a"].get_extra_state()
    if isinstance(extra, torch.Tensor):
        assert torch.equal(back, extra)
    elif isinstance(extra, dict) and extra:
        assert torch.equal(back.pop("scale"), extra["scale"]) and back == {"names": ("a", None), 3: b"x"}
    else:
        assert back == extra
    assert torch.equal(second["b"].get_extra_state()[0], torch.zeros(2))  # type: ignore[operator]


def test_an_extra_state_that_cannot_be_written_is_told_before_the_run() -> None:
    task = Line()
    task.odd = Extra(object())
    with pytest.raises(DataError, match=r"odd\._extra_state is a builtins\.object"):
        quiet_trainer(max_epochs=1, callbacks=[Checkpoint()]).fit(task, loader(floats([1])))


# What does not fit


def test_not_one_common_key_is_an_error_strict_or_not(tmp_path: Path) -> None:
    save_weights(Line(), tmp_path / "w")
    for strict in (True, False):
        with pytest.raises(DataError, match=r"share no key with Sequential: the file has w, the task has 0\.weight"):
            load_weights(network(), tmp_path / "w", strict)


def test_no_common_shape_is_as_bad(tmp_path: Path) -> None:
    save_weights(nn.Linear(3, 3), tmp_path / "w")
    with pytest.raises(DataError, match=r"no key of the same shape with Linear: bias \(\(3,\) in the file"):
        load_weights(nn.Linear(4, 4), tmp_path / "w", strict=False)
    with pytest.raises(DataError, match=r"do not fit Linear: of another shape: bias"):
        load_weights(nn.Linear(4, 4), tmp_path / "w")


def test_keys_and_shapes_that_differ_are_told_and_left_out_if_asked(tmp_path: Path) -> None:
    first = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    second = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6), nn.Linear(1, 1))
    save_weights(nn.ModuleDict({**dict(first.named_children()), "odd": nn.Linear(1, 1)}), tmp_path / "w")
    before = second[1].weight.clone()
    with pytest.raises(DataError) as caught:
        load_weights(second, tmp_path / "w")
    for text in (
        "do not fit Sequential",
        "missing in the file: 2.weight, 2.bias",
        "not in the task: odd.bias, odd.weight",
        "1.weight ((5, 4) in the file, (6, 4) here)",
        "strict=False loads the rest",
    ):
        assert text in str(caught.value)
    assert not torch.equal(second[0].weight, first[0].weight), "nothing was loaded"
    skipped = load_weights(second, tmp_path / "w", strict=False)
    assert sorted(skipped) == ["1.bias", "1.weight", "2.bias", "2.weight", "odd.bias", "odd.weight"]
    assert torch.equal(second[0].weight, first[0].weight) and torch.equal(second[1].weight, before)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"0" * 100)
    for name in ("missing", "broken"):
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            load_weights(network(), tmp_path / name)


# A task's weights, and a task from a checkpoint


class Sized(VisionTask):
    """A task whose constructor takes settings and, perhaps, its model."""

    def __init__(self, width: int, model: nn.Module | None = None, note: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width = width
        self.net = model if model is not None else nn.Linear(5, width, dtype=torch.float64)
        self.note = note

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", self.training_step(batch, batch_idx))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def trained(task: Any, **settings: Any) -> Any:
    settings = {"callbacks": [Checkpoint(**settings)], "max_epochs": 1, "project_dir": "runs"}
    return quiet_trainer(**settings).fit(task, loader(classes(8)), loader(classes(4)))


def test_a_tasks_weights_go_to_a_file_and_back(tmp_path: Path) -> None:
    first, second = Net(seed=1), Net(seed=2)
    path = first.save_weights(tmp_path / "new" / "folder" / "w.safetensors")
    assert path == tmp_path / "new" / "folder" / "w.safetensors"
    assert second.load_weights(str(path)) == [] and same(first, second)


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_task_is_made_from_a_checkpoint_with_its_hyper_parameters(weights_only: bool) -> None:
    task = Sized(width=4, note=("a", Path("b")))
    result = trained(task, weights_only=weights_only)
    back = Sized.load_from_checkpoint(result.best_checkpoint)
    assert back.width == 4 and back.note == ("a", Path("b")) and same(task, back)
    again = Sized.load_from_checkpoint(str(result.best_checkpoint), note="other")
    assert again.note == "other" and same(task, again)
    with pytest.raises(DataError, match="of another shape"):
        Sized.load_from_checkpoint(result.best_checkpoint, width=5)
    with pytest.raises(TaskError, match=r"Sized cannot be made from .*: got an unexpected keyword argument 'depth'"):
        Sized.load_from_checkpoint(result.best_checkpoint, depth=5)


def test_a_model_that_was_an_argument_is_given_again() -> None:
    task = Sized(3, model=nn.Sequential(nn.Linear(5, 3, dtype=torch.float64)))
    result = trained(task)
    with pytest.raises(DataError, match="share no key"):
        Sized.load_from_checkpoint(result.best_checkpoint)
    model = nn.Sequential(nn.Linear(5, 3, dtype=torch.float64))
    back = Sized.load_from_checkpoint(result.best_checkpoint, model=model)
    assert back.net is model and same(task, back)


class Needs(Sized):
    """Does not keep all of what its constructor needs."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width)
        self._hparams = {"width": width}


def test_a_missing_argument_is_told_by_name() -> None:
    result = trained(Needs(3, 2))
    with pytest.raises(TaskError, match=r"a required argument: 'depth'.*load_from_checkpoint\(path, name=...\)"):
        Needs.load_from_checkpoint(result.best_checkpoint)
    assert Needs.load_from_checkpoint(result.best_checkpoint, depth=1).width == 3


def test_hyper_parameters_that_cannot_be_written_are_left_out_and_have_to_be_given() -> None:
    result = trained(Sized(3, note=object()))
    assert Sized.load_from_checkpoint(result.best_checkpoint).note is None
    assert Sized.load_from_checkpoint(result.best_checkpoint, note=4).note == 4


def test_a_broken_checkpoint_makes_no_task(tmp_path: Path) -> None:
    result = trained(Sized(3))
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        Sized.load_from_checkpoint(tmp_path)
    weights = result.best_checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        Sized.load_from_checkpoint(result.best_checkpoint)


# Through a run


@pytest.mark.parametrize("wrap", [compiled, parallel])
def test_a_run_with_a_wrapped_model_and_one_without_exchange_checkpoints(wrap: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 3, dtype=torch.float64))

    for first, second in ((wrap, nn.Identity()), (nn.Identity(), wrap)):
        task, other = Sized(3, model=first(model())), Sized(3, model=second(model()))
        result = trained(task)
        assert all("_orig_mod" not in key for key in read_tensors(result.best_checkpoint / "model.safetensors")[0])
        quiet_trainer().validate(other, loader(classes(4)), checkpoint=result)
        assert torch.equal(next(other.parameters()), next(task.parameters()))
        back = Sized.load_from_checkpoint(result.best_checkpoint, model=second(model()))
        assert torch.equal(next(back.parameters()), next(task.parameters()))
        trainer = quiet_trainer(max_epochs=2, callbacks=[Checkpoint()])
        assert trainer.fit(other, loader(classes(8)), resume=result.best_checkpoint).global_step == 4


def test_compile_true_leaves_no_trace_in_the_keys() -> None:
    task = Sized(3, model=nn.Sequential(nn.Linear(5, 3, dtype=torch.float64)))
    quiet_trainer(max_epochs=1, compile="eager", callbacks=[Checkpoint()]).fit(task, loader(classes(8)))
    (path,) = Path("runs/sized-1/checkpoints").iterdir()
    assert sorted(read_tensors(path / "model.safetensors")[0]) == ["net.0.bias", "net.0.weight"]


class Vit(VisionTask):
    """A tiny transformer of transformers' own, perhaps compiled."""

    def __init__(self, compiles: bool = False) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            image_size=8,
            patch_size=4,
            num_labels=3,
        )
        self.model: Any = ViTForImageClassification(config)
        if compiles:
            self.model = compiled(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch).logits.square().mean()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch).logits


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True])
def test_a_transformers_model_is_read_back_by_from_pretrained(compiles: bool) -> None:
    from transformers import ViTForImageClassification

    task = Vit(compiles)
    images = [torch.rand(3, 8, 8) for _ in range(4)]
    both = [Checkpoint(), Checkpoint(folder="bare", save_pretrained=False)]
    result = quiet_trainer(max_epochs=1, callbacks=both).fit(task, loader(images, 2))
    assert result.best_checkpoint is not None
    assert sorted(path.name for path in (result.best_checkpoint / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    (bare,) = (result.run_dir / "bare").iterdir()
    assert not (bare / "model").exists()
    back = ViTForImageClassification.from_pretrained(result.best_checkpoint / "model")
    batch = torch.stack(images)
    task.eval()
    assert torch.equal(back(batch).logits, task.model(batch).logits)
    assert same(back, unwrapped(task.model))
