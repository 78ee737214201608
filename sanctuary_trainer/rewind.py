"""What a step changes besides gradients, so that a step that failed half-way can be made again as if anew.

    rewind.take()        before the step: generators, buffers, metrics, what was logged
    rewind.put_back()    after it failed: all of it as it was

What the task changes in plain attributes of its own (`self.seen += 1`) is not known here and stays changed.

Tensors are copied in every step: their version does not tell whether they changed (batch norm writes its statistics
past it, as do who write to `buffer.data`). Of a list the length is enough, since metrics append to theirs.
"""

from __future__ import annotations

import ctypes
import random
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from sanctuary_trainer.metrics import metrics_in, own_states
from sanctuary_trainer.seeding import waiting_normal

if TYPE_CHECKING:
    from sanctuary_trainer.records import Records

_WORDS = 624  # of the state of a Mersenne twister, beside its position
_python_random: Any = random
_numpy_random: Any = np.random


class Generators:
    """The states of the global generators: Python's, numpy's, torch's on the CPU and on one device."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        # random.getstate() makes 625 integers in 12 us; their bytes are read in 1.
        self._peeks = _as_state(_peek(), None) == (*random.getstate()[:2], None)
        self._numpy: tuple[Any, Any, float | None] = (None, None, None)
        self.take()

    def take(self) -> None:
        """Note how they stand."""
        inst = _python_random._inst
        self._python = (_peek(), inst.gauss_next) if self._peeks else random.getstate()
        bits = _numpy_random.get_bit_generator()
        if isinstance(bits, np.random.MT19937):
            words = ctypes.string_at(bits.ctypes.state_address, 4 * (_WORDS + 1))
            if self._numpy != (bits, words, None):  # else none is waiting: one that waits comes by a draw
                normal = waiting_normal(bits)
                self._numpy = (bits, words, normal)
                _numpy_random.set_bit_generator(bits)  # drops the second of the pair that was drawn to see it
                if normal is not None:
                    _give_normal(normal)
        else:
            self._numpy = (bits, np.random.get_state(legacy=False), None)
        self._torch = torch.default_generator.get_state()
        self._on_device: Any = None if self._module is None else self._module.get_rng_state(self._device)

    def put_back(self) -> None:
        """Let them draw again what they have drawn since."""
        random.setstate(_as_state(*self._python) if self._peeks else self._python)
        bits, state, normal = self._numpy
        if isinstance(bits, np.random.MT19937):
            ctypes.memmove(bits.ctypes.state_address, state, len(state))
            _numpy_random.set_bit_generator(bits)  # also drops a second normal of a pair
            if normal is not None:
                _give_normal(normal)
        else:
            _numpy_random.set_bit_generator(bits)
            np.random.set_state(state)
        torch.default_generator.set_state(self._torch)
        if self._module is not None:
            self._module.set_rng_state(self._on_device, self._device)

    def have_drawn(self) -> bool:
        """Whether torch has drawn since, on the CPU or on the device."""
        if not torch.equal(self._torch, torch.default_generator.get_state()):
            return True
        return self._module is not None and not torch.equal(self._on_device, self._module.get_rng_state(self._device))


def _peek() -> bytes:
    """Position and words of Python's generator, as they lie in it."""
    return ctypes.string_at(id(_python_random._inst) + object.__basicsize__, 4 * (_WORDS + 1))


def _as_state(words: bytes, gauss: float | None) -> tuple[Any, ...]:
    """What was peeked, as random.setstate takes it."""
    position, *key = struct.unpack(f"{_WORDS + 1}I", words)
    return random.getstate()[0], (*key, position), gauss


def _give_normal(normal: float) -> None:
    """Let numpy hand out this one next: the second of a pair."""
    state: Any = np.random.get_state(legacy=False)
    np.random.set_state({**state, "has_gauss": 1, "gauss": normal})


class Rewind:
    """Takes note of what a step may change, and puts it back.

    Args:
        task: whose buffers and metrics are kept.
        device: whose generator is kept beside those of the host.
        records: where steps log.
    """

    def __init__(self, task: torch.nn.Module, device: torch.device, records: Records) -> None:
        self._task, self._records = task, records
        self.generators = Generators(device)
        self.taken = False  # whether `take` was called since this was set to False
        self.look_up()

    def look_up(self) -> None:
        """Find the buffers and metrics of the task: when layers may have been exchanged."""
        metrics = metrics_in(self._task)
        self._slots: list[tuple[dict[str, Any], str]] = []
        for module in self._task.modules():
            # Of TorchScript's modules, whose buffers are in no dict, the tensors are held.
            scripted = isinstance(module, torch.jit.ScriptModule)
            holder: Any = dict(module.named_buffers(recurse=False)) if scripted else module._buffers
            self._slots += [(holder, name) for name in holder]
        self._slots += [(vars(metric), name) for metric in metrics for name in own_states(metric)]
        self._kept: list[tuple[Any, Any]] = [(None, None)] * len(self._slots)
        self._attributes = [(vars(metric), dict[str, Any]()) for metric in metrics]
        self._mark = self._records.mark()

    def take(self) -> None:
        """Note how everything stands."""
        self.generators.take()
        self._mark = self._records.mark()
        for number, (own, _) in enumerate(self._attributes):
            self._attributes[number] = (own, dict(own))
        sources: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for number, ((holder, name), (_, copy)) in enumerate(zip(self._slots, self._kept, strict=True)):
            value = holder.get(name)
            if isinstance(value, list):
                copy = len(value)
            elif not isinstance(value, torch.Tensor) or not _can_be_put_back(value):
                copy = None
            elif isinstance(copy, torch.Tensor) and _alike(value, copy):
                sources.append(value)
                copies.append(copy)
            else:
                copy = value.detach().clone()
            self._kept[number] = (value, copy)
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(copies, sources)
        self.taken = True

    def changed(self) -> list[str]:
        """The names of the buffers that were changed since they were noted; waits for the device."""
        modules = {id(module._buffers): name for name, module in self._task.named_modules()}
        return [
            f"{modules[id(holder)]}.{name}"
            for (holder, name), (_, copy) in zip(self._slots, self._kept, strict=True)
            if id(holder) in modules and isinstance(copy, torch.Tensor) and not torch.equal(holder[name], copy)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Put everything back as it was noted last."""
        self.generators.put_back()
        self._records.rewind(self._mark)
        for own, before in self._attributes:
            own.clear()
            own.update(before)
        for (holder, name), (value, copy) in zip(self._slots, self._kept, strict=True):
            holder[name] = value
            if isinstance(copy, torch.Tensor):
                with torch.inference_mode(value.is_inference()):
                    value.copy_(copy)
            elif isinstance(value, list):
                del value[copy:]


def _can_be_put_back(value: torch.Tensor) -> bool:
    """Whether it could have been written to: it has a shape, and its elements lie apart."""
    if is_lazy(value):
        return False
    strided = value.layout == torch.strided
    return not strided or all(stride or size < 2 for stride, size in zip(value.stride(), value.shape, strict=True))


def _alike(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    return (tensor.shape, tensor.dtype, tensor.device) == (copy.shape, copy.dtype, copy.device)
