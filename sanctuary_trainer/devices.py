"""Everything that accelerate does for us: placement, precision, gradient sync, agreement between ranks, timeouts.

The loops hold no `if` about distribution, precision or device; they ask here.

    Devices(...)                 accelerate's shared states are reset, so that Trainers of different settings
                                 work one after another in one process
      .wrap(module)              DDP on several ranks, autocast around forward
      .no_sync(module)           gradients stay on this rank
      .autocast()                for steps that run outside the wrapped module (evaluation, prediction)
      .sum_on_device / .broadcast_tensors
                                 between ranks, on the device's own group
      .agree / .gather_... / .scatter / .broadcast_object / .together / .on_main
                                 between ranks on a gloo group kept beside NCCL: never waits for a device
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from sanctuary_trainer.clock import Clock
from sanctuary_trainer.errors import NotSupportedError, RankError, SettingsError

T = TypeVar("T")

_NO_CONTEXT = nullcontext()

# One group per process group of the world, made by all ranks together: a second Trainer finds it here.
_host_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
_timeout_changed = False

_CLUSTER_SWITCHES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def launcher_int(name: str, default: int) -> int:
    """The whole number that `accelerate launch` or its YAML put into environment variable `name`.

    Raises:
        SettingsError: the variable holds something else.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"The environment variable {name} is {text!r}; a whole number was expected.") from None


def launcher_compile() -> str | None:
    """The torch.compile backend that `accelerate launch --dynamo_backend` asked for, None for "no"."""
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    return None if backend in ("", "no") else backend


class _Waiting:
    """Around a collective: its time is the lap "wait", whatever lap is running."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._began = self._clock.enter()

    def __exit__(self, *error: object) -> None:
        self._clock.leave("wait", self._began)


class Devices:
    """This process's device and its place among the ranks.

    Args:
        mixed_precision: "no", "fp16", "bf16", or None for what the launcher says.
        cpu: True to stay on the CPU, None for what the launcher says.
        accelerator: a ready `accelerate.Accelerator` to use instead of making one.
        timeout: seconds that a collective may wait for a rank; None for torch's default (30 minutes).
        find_unused_parameters: let DDP look for parameters without a gradient in every step.

    Raises:
        SettingsError: the precision does not work on this device, or contradicts the given accelerator.
        NotSupportedError: FSDP, DeepSpeed or Megatron-LM was asked for.
    """

    def __init__(
        self,
        *,
        mixed_precision: str | None = None,
        cpu: bool | None = None,
        accelerator: Any = None,
        timeout: float | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        for variable, name in _CLUSTER_SWITCHES.items():
            if os.environ.get(variable, "false").lower() in ("1", "true", "yes"):
                raise NotSupportedError(
                    f"The launcher asks for {name} ({variable}), which this version does not support. "
                    "Launch with plain data parallelism (DDP)."
                )
        self._shared = _shared_states()
        made = accelerator is None
        if made:
            # Left to itself, accelerate runs one unconnected process per rank where there is no accelerator.
            launched = launcher_int("WORLD_SIZE", 1)
            cpu = bool(cpu) or (launched > 1 and not torch.accelerator.is_available())
            accelerator = _new_accelerator(mixed_precision, cpu, timeout, find_unused_parameters)
            if launched > 1 and accelerator.num_processes != launched:
                raise SettingsError(
                    f"The launcher started {launched} processes (WORLD_SIZE), but accelerate connected "
                    f"{accelerator.num_processes}. Launch with torchrun, or with `accelerate launch --multi_gpu`."
                )
        else:
            _check_given(accelerator, mixed_precision)
        # What holds where the Trainer says nothing: the given accelerator's word, else the launcher's.
        self.accumulation: int = accelerator.gradient_accumulation_steps
        if made:
            self.accumulation = launcher_int("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1)
        if self.accumulation < 1:
            raise SettingsError(
                f"The launcher's gradient_accumulation_steps is {self.accumulation}; at least 1 was expected."
            )
        if accelerator.mixed_precision not in ("no", "bf16", "fp16"):
            raise SettingsError(
                f"The launcher's mixed_precision is {accelerator.mixed_precision!r}; no, bf16 or fp16 was expected."
            )
        handler = accelerator.ddp_handler
        if handler is not None and handler.static_graph:
            raise NotSupportedError(
                "The given accelerator sets static_graph=True: DDP then fails in a first window of several batches, "
                "and a rank that has nothing to give could not join. Leave it out."
            )
        # A hook that sends gradients in 16 bits cannot carry counts beside them: 2048 is the most that fp16 counts to.
        self.comm_hook: str = "no" if handler is None else handler.comm_hook.value
        self.compresses = self.comm_hook != "no"
        kind = accelerator.distributed_type.value
        if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA"):
            raise NotSupportedError(f"accelerate runs as {kind}, which this version does not support; use DDP.")
        self.accelerator = accelerator
        device: torch.device = accelerator.device
        self.device = torch.device("cpu") if device.type == "cpu" else device  # not cpu:0
        self.rank: int = accelerator.process_index
        self.local_rank: int = accelerator.local_process_index
        self.world_size: int = accelerator.num_processes
        self.mixed_precision: str = accelerator.mixed_precision
        self.scaler = None if accelerator.scaler is None else _new_scaler(accelerator)
        # On an accelerator the host need not wait for what the ranks agreed in a step: where nothing falls on the step
        # it is read one step later.
        self.reads_late = self.device.type != "cpu"
        if self.mixed_precision == "fp16" and self.device.type == "cpu":
            raise SettingsError(
                "mixed_precision='fp16' does not work on a CPU (accelerate would run float32 without a word). "
                "Use 'bf16' or 'no'."
            )
        self.clock = Clock()
        self._waiting = _Waiting(self.clock)
        self.told: Exception | None = None  # the error that `raise_together` has brought to all ranks
        self._group = _host_group() if self.world_size > 1 else None
        if self.world_size > 1:
            _set_timeouts(timeout)

    def close(self) -> None:
        """Give accelerate the state back in which it was, so that an Accelerator made before goes on working."""
        for shared, former in self._shared:
            shared.clear()
            shared.update(former)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_rank in (0, -1)

    def wrap(self, module: nn.Module) -> nn.Module:
        """`module` as accelerate prepares it: in DDP on several ranks, its forward under autocast."""
        wrapped: nn.Module = self.accelerator.prepare_model(module)
        self.accelerator._models.pop()  # accelerate would keep every run's module alive
        return wrapped

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Keep the gradients of what runs inside on this rank."""
        return _NO_CONTEXT if self.world_size == 1 else module.no_sync()  # type: ignore[operator]

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision for a step that does not run inside the wrapped module."""
        if self.mixed_precision == "no":
            return _NO_CONTEXT
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    # Between ranks. Each of these is called by all ranks, or by none.

    def agree(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over all ranks."""
        if self.world_size == 1:
            return list(values)
        packed = torch.tensor(values, dtype=torch.float64)
        with self._waiting:
            dist.all_reduce(packed, group=self._group)
        sums: list[float] = packed.tolist()
        return sums

    def sum_on_device(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, a tensor on this rank's device, summed over all ranks in place."""
        with self._waiting:
            dist.all_reduce(values)
        return values

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's `values` (equally many on each), in rank order: float64, one collective."""
        if self.world_size == 1:
            return [list(values)]
        packed = torch.tensor(values, dtype=torch.float64)
        parts = [torch.empty_like(packed) for _ in range(self.world_size)]
        with self._waiting:
            dist.all_gather(parts, packed, group=self._group)
        return [part.tolist() for part in parts]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order; tensors should be on the CPU."""
        if self.world_size == 1:
            return [value]
        parts: list[Any] = [None] * self.world_size
        with self._waiting:
            dist.all_gather_object(parts, value, group=self._group)
        return parts

    def gather_on_main(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on rank 0; an empty list on the others."""
        if self.world_size == 1:
            return [value]
        parts: list[Any] = [None] * self.world_size if self.is_main else []
        with self._waiting:
            dist.gather_object(value, parts or None, dst=0, group=self._group)
        return parts

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        with self._waiting:
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Of the values that rank 0 gives (one for each rank), the one for this rank; the others give None."""
        if self.world_size == 1:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        with self._waiting:
            dist.scatter_object_list(box, list(values) if values is not None else None, src=0, group=self._group)
        return box[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is raised inside on one rank is raised on all of them at the end of the block: a RankError elsewhere.

        No collective may stand inside.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - told to all ranks and raised below
            error = raised
        self.raise_together(error)

    def on_main(self, make: Callable[[], T]) -> T:
        """What `make()` returns on rank 0, on every rank; its error there reaches all of them."""
        made: Any = None
        with self.together():
            if self.is_main:
                made = make()
        value: T = self.broadcast_object(made)
        return value

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank when any rank has an `error`: its own where it happened, a RankError elsewhere."""
        if self.world_size == 1:
            if error is not None:
                raise error
            return
        if not self.agree([float(error is not None)])[0]:
            return
        texts = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        self.told = error or RankError(
            f"Another rank failed and this one (rank {self.rank}) ends with it. {'; '.join(failed)}"
        )
        raise self.told

    def broadcast_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every rank rank 0's values of these tensors, in place, in one collective for each dtype."""
        if self.world_size == 1:
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        with torch.no_grad():
            for same in by_dtype.values():
                packed = torch.cat([tensor.detach().reshape(-1) for tensor in same])
                with self._waiting:
                    dist.broadcast(packed.view(torch.uint8), src=0)  # as bytes: gloo does not know every dtype
                for tensor, part in zip(same, packed.split([t.numel() for t in same]), strict=True):
                    tensor.copy_(part.view_as(tensor))


def _shared_states() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What accelerate keeps in the process, and a copy of it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    return [(c._shared_state, dict(c._shared_state)) for c in (AcceleratorState, GradientState, PartialState)]


def _check_given(accelerator: Any, mixed_precision: str | None) -> None:
    if mixed_precision is not None and mixed_precision != accelerator.mixed_precision:
        raise SettingsError(
            f"mixed_precision={mixed_precision!r} contradicts the given accelerator, which was made with "
            f"{accelerator.mixed_precision!r}. Give one of the two."
        )
    plugin = accelerator.state.dynamo_plugin
    if plugin is not None and plugin.backend.value.lower() != "no":
        raise NotSupportedError(
            "The given accelerator compiles what it prepares, logging included. Give the Trainer compile= instead."
        )


def _new_scaler(accelerator: Any) -> torch.amp.GradScaler:
    """A scaler of this run alone, with the settings of the accelerator's."""
    handler = accelerator.scaler_handler
    return torch.amp.GradScaler(accelerator.device.type, **({} if handler is None else handler.to_kwargs()))


def _new_accelerator(mixed_precision: str | None, cpu: bool, timeout: float | None, find_unused: bool) -> Any:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

    # accelerate keeps its settings in the process: a second Accelerator of another precision would raise, one of
    # another accumulation would be ignored. The process group itself stays.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    handlers: list[Any] = [DistributedDataParallelKwargs(find_unused_parameters=find_unused)]
    if timeout is not None:
        handlers.append(InitProcessGroupKwargs(timeout=timedelta(seconds=timeout)))
    had_group = dist.is_initialized()
    # Its functions have the world as a default argument. Imported later, as DDP does, it would hold the group for ever,
    # and the group's threads, which release tensors, would abort the process at its end.
    import torch.distributed.nn.functional

    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        cpu=cpu,
        # A plain gradient_accumulation_steps=1 is overridden by the launcher's environment variable; a plugin is not.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_backend="no",
        kwargs_handlers=handlers,
    )
    # In a rank that notebook_launcher forked, OpenMP would wait for ever for the notebook's threads: they do not
    # survive a fork. After accelerate, which sets a number of its own; 1 is what torchrun sets.
    if isinstance(multiprocessing.current_process(), getattr(multiprocessing.context, "ForkProcess", ())):
        torch.set_num_threads(1)
    if dist.is_initialized() and not had_group:
        atexit.register(_leave)
    return accelerator


def _leave() -> None:
    """End the process group that was made here: its threads abort a process that leaves them to the interpreter's end.

    Not after an uncaught exception, where the others may be in the middle of a collective and nobody should wait.
    """
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        _host_groups.clear()
        gc.collect()  # wrapped modules in reference cycles hold the group too
        dist.destroy_process_group()


def _host_group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    if world not in _host_groups:
        group: Any = world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        _host_groups[world] = group
    return _host_groups[world]


def _set_timeouts(seconds: float | None) -> None:
    """Set how long a collective waits in this run: the groups outlive it. None: torch's default, if it was changed."""
    from torch.distributed import distributed_c10d

    global _timeout_changed
    if seconds is None and not _timeout_changed:
        return
    _timeout_changed = seconds is not None
    wait = distributed_c10d.default_pg_timeout if seconds is None else timedelta(seconds=seconds)
    # torch has a public name for it since 2.14 only.
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    world = dist.group.WORLD
    assert world is not None
    for group in {world, _host_groups[world]}:
        set_timeout(wait, group)
