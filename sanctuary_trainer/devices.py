"""Everything that accelerate does for us: placement, precision, gradient sync, agreement between ranks, timeouts.

The loops hold no `if` about distribution, precision or device; they ask here.

    Devices(...)                 accelerate's shared states are reset, so that Trainers of different settings
                                 work one after another in one process
      .wrap(module)              DDP on several ranks, autocast around forward
      .no_sync(module)           gradients stay on this rank
      .autocast()                for steps that run outside the wrapped module (evaluation, prediction)
      .agree / .gather_... / .scatter / .broadcast_object / .barrier
                                 between ranks on a gloo group kept beside NCCL: never waits for a device
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from sanctuary_trainer.errors import NotSupportedError, RankError, SettingsError

T = TypeVar("T")

# One group per process group of the world, made by all ranks together: a second Trainer finds it here.
_host_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

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
        if accelerator is None:
            # Left to itself, accelerate runs one unconnected process per rank where there is no accelerator.
            launched = launcher_int("WORLD_SIZE", 1)
            cpu = bool(cpu) or (launched > 1 and not torch.accelerator.is_available())
            accelerator = _new_accelerator(mixed_precision, cpu, timeout, find_unused_parameters)
            if launched > 1 and accelerator.num_processes != launched:
                raise SettingsError(
                    f"The launcher started {launched} processes (WORLD_SIZE), but accelerate connected "
                    f"{accelerator.num_processes}. Launch with torchrun, or with `accelerate launch --multi_gpu`."
                )
        elif mixed_precision is not None and mixed_precision != accelerator.mixed_precision:
            raise SettingsError(
                f"mixed_precision={mixed_precision!r} contradicts the given accelerator, which was made with "
                f"{accelerator.mixed_precision!r}. Give one of the two."
            )
        handler = accelerator.ddp_handler
        if handler is not None and handler.static_graph:
            raise NotSupportedError(
                "The given accelerator sets static_graph=True: DDP then fails in a first window of several batches, "
                "and a rank that has nothing to give could not join. Leave it out."
            )
        # A hook that sends gradients in 16 bits cannot carry counts beside them: 2048 is the most that fp16 counts to.
        self.compresses = handler is not None and handler.comm_hook.value != "no"
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
        self.scaler: torch.amp.GradScaler | None = accelerator.scaler
        # On an accelerator the host does not wait for what the ranks agreed in a step: it reads it one step later.
        self.reads_late = self.device.type != "cpu"
        if self.mixed_precision == "fp16" and self.device.type == "cpu":
            raise SettingsError(
                "mixed_precision='fp16' does not work on a CPU (accelerate would run float32 without a word). "
                "Use 'bf16' or 'no'."
            )
        if timeout is not None and self.world_size > 1:
            _set_timeout(timeout)
        self._group = _host_group(timeout) if self.world_size > 1 else None

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
        return nullcontext() if self.world_size == 1 else module.no_sync()  # type: ignore[operator]

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision for a step that does not run inside the wrapped module."""
        if self.mixed_precision == "no":
            return nullcontext()
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    # Between ranks. Each of these is called by all ranks, or by none.

    def agree(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over all ranks."""
        if self.world_size == 1:
            return list(values)
        packed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(packed, group=self._group)
        sums: list[float] = packed.tolist()
        return sums

    def sum_on_device(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, a tensor on this rank's device, summed over all ranks in place."""
        dist.all_reduce(values)
        return values

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's `values` (equally many on each), in rank order: float64, one collective."""
        if self.world_size == 1:
            return [list(values)]
        packed = torch.tensor(values, dtype=torch.float64)
        parts = [torch.empty_like(packed) for _ in range(self.world_size)]
        dist.all_gather(parts, packed, group=self._group)
        return [part.tolist() for part in parts]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order; tensors should be on the CPU."""
        if self.world_size == 1:
            return [value]
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, value, group=self._group)
        return parts

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Of the values that rank 0 gives (one for each rank), the one for this rank; the others give None."""
        if self.world_size == 1:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, list(values) if values is not None else None, src=0, group=self._group)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.agree([0.0])

    @contextmanager
    def main_first(self) -> Iterator[bool]:
        """Run the block on the first rank of each machine while the others wait; yields whether this is that rank.

        An error of one rank reaches all of them.
        """
        error: BaseException | None = None
        try:
            yield self.is_local_main
        except Exception as raised:  # noqa: BLE001 - told to all ranks and raised below
            error = raised
        self.raise_together(error)

    def on_main(self, make: Callable[[], T]) -> T:
        """What `make()` returns on rank 0, on every rank; its error there reaches all of them."""
        made: Any = None
        error: Exception | None = None
        if self.is_main:
            try:
                made = make()
            except Exception as raised:  # noqa: BLE001 - told to all ranks and raised below
                error = raised
        self.raise_together(error)
        value: T = self.broadcast_object(made)
        return value

    def raise_together(self, error: BaseException | None) -> None:
        """Raise on every rank when any rank has an `error`: its own where it happened, a RankError elsewhere."""
        texts = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise RankError(f"Another rank failed and this one (rank {self.rank}) ends with it. {'; '.join(failed)}")

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
                dist.broadcast(packed, src=0)
                for tensor, part in zip(same, packed.split([t.numel() for t in same]), strict=True):
                    tensor.copy_(part.view_as(tensor))


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
    return Accelerator(
        mixed_precision=mixed_precision,
        cpu=cpu,
        # A plain gradient_accumulation_steps=1 is overridden by the launcher's environment variable; a plugin is not.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_backend="no",
        kwargs_handlers=handlers,
    )


def _host_group(timeout: float | None) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    if world not in _host_groups:
        if dist.get_backend() == "gloo":
            _host_groups[world] = world
        else:
            wait = None if timeout is None else timedelta(seconds=timeout)
            group = dist.new_group(backend="gloo", timeout=wait)
            assert isinstance(group, dist.ProcessGroup)  # every rank is a member
            _host_groups[world] = group
    return _host_groups[world]


def _set_timeout(seconds: float) -> None:
    # The group outlives a Trainer, so a second Trainer's timeout has to be set on it; torch has no public name for it.
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
