"""What is said of a cause: how the time is spent, and the first thing to try."""

from __future__ import annotations

import math
from collections.abc import Mapping

DEAL_BY_COST = "Deal samples by their cost: DataLoader(..., batch_sampler=BalancedBatchSampler(costs, batch_size))."
DEAL_EVENLY = "Give every rank as many samples: the same batch_size on all, or shard_data=True."
COMMUNICATE_LESS = (
    "Synchronise less often (gradient_accumulation_steps), send less (a bf16 communication hook), and look at the "
    "network: NCCL_DEBUG=INFO tells which interface is used."
)
SAVE_MEMORY = (
    "Use OOMFallback(), so that a larger batch goes on in pieces, GradientCheckpointing(), or a smaller batch."
)
LOOK_AT_THE_DEVICE = (
    "The same work takes longer there: look at the device's clock and temperature (nvidia-smi -q -d "
    "CLOCK,TEMPERATURE,PERFORMANCE), at other jobs on it, and try the run without that device."
)
# How it is said: "waits for data 41 % of each step", "spends 41 % of each step in callbacks".
_SPENT = {
    "data": ("wait for data ", ""),
    "compute": ("compute", ""),
    "callbacks": ("spend", " in callbacks"),
    "checkpoint": ("spend", " on checkpoints"),
}
_OF_KIND = {
    "callbacks": "Have {name} work less often, or in a thread, and on every rank alike.",
    "logging": "Log less often (log_every_n_steps) and fewer images; look at {name}, and the tracker's connection.",
    "checkpoint": "Save less often (every_n_steps=, every=), or to a faster disk.",
    "validation": "Validate less often (check_val_every_n_epoch, val_check_interval) or less (limit_val_batches).",
}


def read_faster(workers: int | None, cores: int, data: float, rest: float) -> str:
    """How many workers would keep up.

    Args:
        workers: processes that read for a rank; None where it is not known.
        cores: that it may use.
        data: seconds of a step that it waits for data.
        rest: the other seconds of a step.

    With n workers each of which needs d for a step's samples, one is ready every d / n. Where they are what the step
    waits for, d is n times the step; without workers it is the wait itself.
    """
    if workers is None:
        return "Prepare the batches in other processes, or make them cheaper."
    decode = data if workers == 0 else workers * (data + rest)
    needed = max(math.ceil(min(1.1 * decode, 1000 * rest) / rest) if rest > 0 else cores, workers + 1)
    cheaper = "make samples cheaper: smaller files, a cache of what is decoded, transforms on the device"
    if workers >= cores:
        return f"This rank has {cores} core{'s' if cores > 1 else ''} and {workers} workers: {cheaper}."
    if needed > cores:
        return f"Raise num_workers from {workers} to {cores}, all cores of this rank, and {cheaper}."
    return f"Raise num_workers from {workers} to {needed}, or {cheaper}."


def free_the_cores(workers: int | None, cores: int) -> str:
    """For a rank that has less of its processor than the others."""
    own = f"its {workers} workers, and what top shows there" if workers and workers >= cores else "look with top there"
    return f"Something else runs on its {'core' if cores == 1 else 'cores'} ({own}): give each rank cores of its own."


def spend_less(kind: str, name: str | None) -> str:
    """For callbacks, logging, checkpoint or validation. name: the class that takes most of it."""
    return _OF_KIND[kind].format(name=name or ("hooks on_log" if kind == "logging" else "the callbacks"))


def most_of(kind: str, classes: Mapping[str, float], seconds: float) -> str | None:
    """The class that takes half of a kind's seconds or more. Both of a step, classes as "callbacks:EMA"."""
    of_kind = {name.partition(":")[2]: spent for name, spent in classes.items() if name.startswith(f"{kind}:")}
    name = max(of_kind, key=lambda each: of_kind[each], default=None)
    return name if name is not None and of_kind[name] >= seconds / 2 else None


def spends(kind: str, number: int, share: float) -> str:
    """As in: waits for data 41 % of each step. number: of ranks."""
    does, where = _SPENT.get(kind, ("spend", f" on {kind}"))
    verb, _, what = does.partition(" ")
    return f"{verb}{'s' if number == 1 else ''} {what}{percent(share)} of each step{where}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
