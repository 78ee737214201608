"""Which modules of a task are its repeated blocks, or are meant by a class or a name pattern.

ResNet           layer1.0 ... layer4.1               children of its four Sequentials, all of one class
ViT              encoder.layers.0 ... 11
Swin, ConvNeXt   the blocks inside the stages        the stages repeat too, but nearly all they hold is blocks
MobileNet        features.1 ... 17                   and not the convolutions with norm and activation inside
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sanctuary_trainer import SettingsError

Named = tuple[str, nn.Module]
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated_blocks(task: nn.Module, closed: Callable[[nn.Module], bool], *, least: int = 1) -> list[Named]:
    """The repeated blocks of a task: children of a list, Sequential or dict of modules, two or more of one class, with
    two or more layers inside. Where there are none, attributes of one class will do, then those with a single layer.

    Args:
        task: what is looked through.
        closed: whether a module is to be left alone, with all that is in it.
        least: how many layers a block has at least.
    """
    for layers in range(2, least - 1, -1):
        for anywhere in (False, True):

            def fits(parent: nn.Module, child: nn.Module, anywhere: bool = anywhere, layers: int = layers) -> bool:
                # Anywhere, two plain Sequentials may be a whole network: nothing would be gained.
                place = type(child) not in CONTAINERS if anywhere else isinstance(parent, CONTAINERS)
                return place and any(True for _ in child.children()) and _layers(child) >= layers

            if found := _repeated([("", task)], closed, fits):
                return _each_once(found)
    return []


def matching(task: nn.Module, wanted: type[nn.Module] | str) -> list[Named]:
    """The topmost modules of a class, or whose name matches a pattern.

    Raises:
        SettingsError: there is none; or one is not called but holds others, or cannot be wrapped.
    """
    names: list[str] = []
    found: list[Named] = []
    everything = [(name, module) for name, module in task.named_modules(remove_duplicate=False) if name]
    for name, module in everything:
        matches = fnmatchcase(name, wanted) if isinstance(wanted, str) else isinstance(module, wanted)
        if not matches or (names and name.startswith(f"{names[-1]}.")):
            continue
        if not can_be_wrapped(module):
            raise SettingsError(
                f"Gradient checkpointing: {name} is a {type(module).__name__}, whose forward cannot be wrapped. Give "
                f"what is in it, e.g. {name + '.*'!r}."
            )
        names.append(name)
        found.append((name, module))
    if not found:
        raise SettingsError(_no_match(type(task).__name__, everything, wanted))
    return _each_once(found)


def can_be_wrapped(module: nn.Module) -> bool:
    """Whether a module has a `forward`, which a mere list of modules has not, and one of Python."""
    cls: Any = type(module)
    return cls.forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)


def size(modules: Iterable[nn.Module]) -> int:
    """The number of their parameters' elements; those that have no shape yet count nothing."""
    parameters: dict[int, Tensor] = {
        id(parameter): parameter for module in modules for parameter in module.parameters()
    }
    return sum(0 if is_lazy(parameter) else parameter.numel() for parameter in parameters.values())


def _repeated(
    roots: Sequence[Named], closed: Callable[[nn.Module], bool], fits: Callable[[nn.Module, nn.Module], bool]
) -> list[Named]:
    """The repeated blocks beneath `roots`, counted over all of them: of some stages, one may have a single block."""
    groups: dict[type, list[Named]] = {}
    while roots:
        for name, module in roots:
            for candidate in _candidates(name, module, closed, fits):
                groups.setdefault(type(candidate[1]), []).append(candidate)
        roots = [group.pop() for group in groups.values() if len(group) == 1]  # what is in it may repeat
    found: list[Named] = []
    for group in filter(None, groups.values()):
        modules = [module for _, module in group]
        inner = _repeated(group, closed, fits)
        whole = all(map(can_be_wrapped, modules)) and not any(closed(m) for module in modules for m in module.modules())
        # As many parts as blocks are a part of each, as squeeze-excitation is, and no blocks.
        stages = len(inner) > len(group) and 2 * size(module for _, module in inner) > size(modules)
        found += group if whole and not stages else inner
    return found


def _candidates(
    name: str,
    module: nn.Module,
    closed: Callable[[nn.Module], bool],
    fits: Callable[[nn.Module, nn.Module], bool],
) -> Iterator[Named]:
    """The nearest modules beneath one that may be blocks."""
    for key, child in _children(module):
        full = f"{name}.{key}" if name else key
        if closed(child) or isinstance(child, torch.jit.ScriptModule) or not any(True for _ in child.parameters()):
            continue
        if fits(module, child):
            yield full, child
        else:
            yield from _candidates(full, child, closed, fits)


def _layers(module: nn.Module) -> int:
    """How many modules hold weights: matrices or kernels, and not the scale and shift of a norm."""
    return sum(any(map(_is_weight, inner.parameters(recurse=False))) for inner in module.modules())


def _is_weight(parameter: Tensor) -> bool:
    return is_lazy(parameter) or parameter.ndim > 1


def _children(module: nn.Module) -> Iterator[Named]:
    """Its children, one that stands at several places at each of them."""
    for name, child in module.named_modules(remove_duplicate=False):
        if name and "." not in name:
            yield name, child


def _each_once(found: Iterable[Named]) -> list[Named]:
    return list({id(module): (name, module) for name, module in found}.values())


def _no_match(task: str, everything: Sequence[Named], wanted: type[nn.Module] | str) -> str:
    if isinstance(wanted, str):
        there = list(dict.fromkeys(name for name, module in everything if can_be_wrapped(module)))
        what, given = "module whose name matches", repr(wanted)
        near = get_close_matches(wanted, there, n=3)
    else:
        there = sorted({type(module).__name__ for _, module in everything})
        what, given = "module of the class", wanted.__qualname__
        near = get_close_matches(wanted.__name__, there, n=3)
    if near:
        hint = f"The nearest are {', '.join(near)}."
    else:
        more = f" and {len(there) - 8} more" if len(there) > 8 else ""
        hint = f"It has {', '.join(there[:8])}{more}."
    return f"Gradient checkpointing: {task} has no {what} {given}. {hint}"
