"""Less memory for more time: activations of repeated blocks are computed again in the backward pass, not kept.

    setup       switch_on(task)     in a fit, before the task is compiled and wrapped
    teardown    switch_off(task)    always; configs, switches and the blocks' forwards are as they were

What is switched on, model by model:

    checkpoints already                    nothing: it stays as it is, also afterwards
    transformers, with a switch            its own switch, non-reentrant, without a cache of keys and values
    timm, with a switch                    its own switch, non-reentrant
    any other; any with batch norm         its repeated blocks (blocks.py), each by `Recomputed` (recomputed.py)

Batch norm would count a batch twice behind the switches of transformers and timm; behind `Recomputed` it does not.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from sanctuary_trainer import Callback, SettingsError, TaskError
from sanctuary_trainer.callbacks.blocks import matching, repeated_blocks
from sanctuary_trainer.callbacks.recomputed import Recomputed

if TYPE_CHECKING:
    from sanctuary_trainer import Run

Layers = str | type[nn.Module] | Sequence[str | type[nn.Module]]

# What modules call the flag that says whether they checkpoint: transformers and diffusers, timm, older research code.
FLAGS = ("gradient_checkpointing", "grad_checkpointing")
# What the switches of transformers and timm set.
SET_BY_SWITCHES = (*FLAGS, "_gradient_checkpointing_func")


class _Part(NamedTuple):
    """Something that can be switched on."""

    kind: Literal["on already", "transformers", "timm", "block"]
    name: str
    module: nn.Module


class GradientCheckpointing(Callback):
    """Checkpoints activations in a fit: the blocks' inputs are kept, all else is computed again in the backward pass.

    Loss, gradients and running statistics are those of a fit without it, bit for bit: dropout draws the same numbers
    again, frozen layers cut nothing off, batch norm counts each batch once. Saved keys stay as they are. Validation
    computes nothing twice.

    Args:
        layers: "auto": what repeats in the task, or the switch of its transformers and timm models. Else a class of
            modules, a pattern of names in the task ("model.layer[1-3].*"; "*" matches dots, too), or several of
            these: the topmost modules that match are wrapped.

    Raises:
        SettingsError: `layers` is none of these; in `setup`: a class or pattern matches nothing.
        TaskError: in `setup`: nothing repeats in the task; in a step: a block's input is changed in place.

    `on` tells whether it is switched on. `find`, `switch_on` and `switch_off` do by hand, at any time between two
    batches, what a fit does at its start and end.
    """

    def __init__(self, layers: Layers = "auto") -> None:
        given: Any = [layers] if isinstance(layers, str | type) else layers
        fine = isinstance(given, Sequence) and all(
            (isinstance(one, str) and one) or (isinstance(one, type) and issubclass(one, nn.Module)) for one in given
        )
        if not fine or not given:
            raise SettingsError(
                f'GradientCheckpointing got layers={layers!r}; "auto", a class of modules, a pattern of names like '
                '"model.layers.*", or a sequence of these was expected.'
            )
        self.layers = layers if isinstance(layers, str | type) else tuple(layers)
        self.on = False
        self._task: nn.Module | None = None  # where it is on
        self._text = ""
        self._undo = ExitStack()

    def setup(self, run: Run) -> None:
        if run.verb == "fit":
            run.message(f"Gradient checkpointing: {self.switch_on(run.task)}.")

    def teardown(self, run: Run) -> None:
        if run.verb == "fit":
            self.switch_off(run.task)

    def find(self, task: nn.Module) -> str:
        """What `switch_on` would switch on, as a text. Changes nothing; raises what it would raise."""
        return _told(self._parts(task))

    def switch_on(self, task: nn.Module) -> str:
        """Checkpoint from the next forward on; does nothing where it is on.

        Returns:
            What was switched on, e.g. "12 blocks (ViTLayer) in model".

        Raises:
            SettingsError: a class or a pattern matches nothing; or it is on in another task.
            TaskError: nothing repeats in the task, so that there is nothing to checkpoint.
        """
        if self.on and task is not self._task:
            raise SettingsError("GradientCheckpointing is on in another task: each needs one of its own.")
        if not self.on:
            parts = self._parts(task)
            with ExitStack() as undo:  # where something is raised half-way, what was done is undone
                for part in parts:
                    _switch_on(part, undo)
                _refuse_caches(task, parts, undo)
                self._undo = undo.pop_all()
            self.on, self._task, self._text = True, task, _told(parts)
        return self._text

    def switch_off(self, task: nn.Module) -> None:
        """Put everything back as it was before `switch_on`; does nothing where it is off."""
        if task is self._task:
            self.on, self._task = False, None
            self._undo.close()

    def _parts(self, task: nn.Module) -> list[_Part]:
        return _automatic(task) if self.layers == "auto" else _chosen(task, self.layers)


def _automatic(task: nn.Module) -> list[_Part]:
    parts: list[_Part] = []
    for name, module in task.named_modules():
        kind = _kind(module)
        if kind is not None and not any(name.startswith(f"{part.name}.") for part in parts):
            parts.append(_Part(kind, name, module))
    inside = _ids(parts)
    for name, child in task.named_children():
        if any(_is_on(module) for module in child.modules() if id(module) not in inside):
            parts.append(_Part("on already", name, child))
    inside = _ids(parts)
    blocks = repeated_blocks(task, lambda module: id(module) in inside, least=2 if parts else 1)
    parts += [_Part("block", name, module) for name, module in blocks]
    if not parts:
        classes = sorted({type(module).__name__ for module in task.modules() if module is not task})
        more = f" and {len(classes) - 8} more" if len(classes) > 8 else ""
        raise TaskError(
            f"GradientCheckpointing finds nothing in {type(task).__name__} that repeats: two or more blocks of one "
            "class that are made of several layers were expected. Say with layers= what is to be computed again; "
            f"the classes are {', '.join(classes[:8])}{more}."
        )
    return parts


def _chosen(task: nn.Module, layers: Layers) -> list[_Part]:
    wanted = [layers] if isinstance(layers, str | type) else layers
    found = {id(module): (name, module) for one in wanted for name, module in matching(task, one)}
    within = {id(inner) for _, module in found.values() for inner in module.modules() if inner is not module}
    topmost = [named for key, named in found.items() if key not in within]
    return [_Part("on already" if any(map(_is_on, m.modules())) else "block", name, m) for name, m in topmost]


def _kind(module: nn.Module) -> Literal["on already", "transformers", "timm"] | None:
    """How a model of transformers or timm is switched on; None for all else, also where batch norm would be misled."""
    inner = list(module.modules())
    kind: Literal["transformers", "timm"]
    if _comes_from("transformers", module) and getattr(module, "supports_gradient_checkpointing", False):
        kind, flag = "transformers", "gradient_checkpointing"
    elif _comes_from("timm", module) and hasattr(type(module), "set_grad_checkpointing"):
        kind, flag = "timm", "grad_checkpointing"
    else:
        return None
    if any(map(_is_on, inner)):
        return "on already"
    counts = any(isinstance(each, _NormBase) and each.running_mean is not None for each in inner)
    switches = any(hasattr(each, flag) for each in inner)
    return kind if switches and not counts and (kind == "transformers" or _is_supported_by_timm(module)) else None


def _is_supported_by_timm(model: Any) -> bool:
    """Whether a model has more than the name of a switch; found by trying, and put back at once."""
    with ExitStack() as undo:
        _remember_switches(model, undo)
        try:
            model.set_grad_checkpointing(True)
        except AssertionError:
            return False
    return hasattr(sys.modules["timm.layers"], "set_reentrant_ckpt")  # an earlier timm has no word for how it does it


def _comes_from(package: str, module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == package for base in type(module).__mro__)


def _is_on(module: nn.Module) -> bool:
    """Whether a module checkpoints already: by a switch, in torch's wrapper, or because another of these was here."""
    wrapped = isinstance(vars(module).get("forward"), Recomputed) or type(module).__name__ == "CheckpointWrapper"
    return wrapped or any(getattr(module, flag, False) is True for flag in FLAGS)


def _switch_on(part: _Part, undo: ExitStack) -> None:
    model: Any = part.module
    if part.kind == "block":
        _remember(model, "forward", undo)
        model.forward = Recomputed(model, part.name)
    elif part.kind != "on already":
        _remember_switches(model, undo)
        if part.kind == "transformers":
            _switch_on_transformers(model)
        else:
            _switch_on_timm(model, undo)


def _switch_on_transformers(model: Any) -> None:
    with ExitStack() as meanwhile, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a model with a switch of its own calls what is renamed
        # Embeddings that require gradients are what reentrant checkpoints need, and their hooks would stay.
        _remember(model, "enable_input_require_grads", meanwhile)
        model.enable_input_require_grads = _nothing
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _switch_on_timm(model: Any, undo: ExitStack) -> None:
    layers = sys.modules["timm.layers"]
    undo.callback(layers.set_reentrant_ckpt, layers.use_reentrant_ckpt())  # one for all models
    layers.set_reentrant_ckpt(False)
    model.set_grad_checkpointing(True)


def _refuse_caches(task: nn.Module, parts: Sequence[_Part], undo: ExitStack) -> None:
    """Let transformers models keep no keys and values while they train: a block that is computed again would add its
    own a second time. The flag in the config, which is saved, stays as it is, and nobody warns of it."""
    touched = _ids(part for part in parts if part.kind != "on already")
    for module in task.modules():
        if not (_comes_from("transformers", module) and getattr(getattr(module, "config", None), "use_cache", False)):
            continue
        taken = list(inspect.signature(module.forward).parameters)
        if "use_cache" in taken and any(id(inner) in touched for inner in module.modules()):
            without_cache = partial(_without_cache, taken.index("use_cache"))
            undo.callback(module.register_forward_pre_hook(without_cache, with_kwargs=True).remove)


def _without_cache(position: int, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    if torch.is_grad_enabled() and len(args) <= position:
        return args, {**kwargs, "use_cache": False}
    return None


def _remember(owner: object, name: str, undo: ExitStack) -> None:
    """Let `undo` give an object back its own attribute, or take one away that it does not have now."""
    own = vars(owner)
    if name in own:
        undo.callback(own.__setitem__, name, own[name])
    else:
        undo.callback(own.pop, name, None)


def _remember_switches(model: nn.Module, undo: ExitStack) -> None:
    for module in model.modules():
        for name in SET_BY_SWITCHES:
            _remember(module, name, undo)


def _nothing() -> None:
    pass


def _ids(parts: Iterable[_Part]) -> set[int]:
    return {id(module) for part in parts for module in part.module.modules()}


def _told(parts: Sequence[_Part]) -> str:
    """What is switched on, in the order in which it is."""
    told: Counter[tuple[str, str]] = Counter()
    for part in parts:
        blocks = [part.module] if part.kind == "block" else _layers_of_transformers(part.module)
        if part.kind == "on already":
            told[f"on already in {part.name}", ""] += 1
        elif part.kind == "timm" or not blocks:
            told[f"the switch of {part.kind} in {part.name} ({type(part.module).__name__})", ""] += 1
        else:
            where = part.name.partition(".")[0] if part.kind == "block" else part.name
            told.update((type(block).__name__, where) for block in blocks)
    return ", ".join(
        f"{number} block{'s' if number > 1 else ''} ({what}) in {where}" if where else what
        for (what, where), number in told.items()
    )


def _layers_of_transformers(model: nn.Module) -> list[nn.Module]:
    """The layers that checkpoint by themselves; in older versions their encoder does it, and there are none."""
    layers = "GradientCheckpointingLayer"
    return [module for module in model.modules() if any(base.__name__ == layers for base in type(module).__mro__)]
