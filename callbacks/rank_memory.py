"""How much memory a rank holds, and how near that is to what it can get."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from pathlib import Path

import torch


def rank_memory(device: torch.device) -> tuple[int, float]:
    """Bytes and the share of what there is.

    On CUDA the peak that tensors took, of that peak and what is free; without a wait for the device. On a CPU what the
    process holds, and the fullest of: the machine, its control group, its own limit of address space (Linux; elsewhere
    0). (0, 0.0) on other devices.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        free, _ = torch.cuda.mem_get_info(device)
        # What the allocator has reserved and not given out is as good as free.
        within_reach = free + torch.cuda.memory_reserved(device)
        return peak, min(peak / max(within_reach, 1), 1.0)
    if device.type != "cpu":
        return 0, 0.0
    with suppress(OSError, ValueError, KeyError, IndexError):
        return _of_process()
    return 0, 0.0


def _of_process() -> tuple[int, float]:
    import resource

    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    address_space, resident = (int(number) * resource.getpagesize() for number in pages[:2])
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        kilobytes = {(parts := line.split())[0]: int(parts[1]) for line in islice(lines, 3)}
    shares = [1 - kilobytes["MemAvailable:"] / kilobytes["MemTotal:"], _of_control_group()]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        shares.append(address_space / limit)
    return resident, min(max(shares), 1.0)


def _of_control_group() -> float:
    """What a container's limit (cgroup v2) is filled to, file pages that can be dropped left out."""
    folder = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no limit ("max"), or no such group
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        held = int((folder / "memory.current").read_text(encoding="ascii"))
        droppable = next(
            int(line.split()[1])
            for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            if line.startswith("inactive_file ")
        )
        return (held - droppable) / limit
    return 0.0
