"""How much memory a rank holds, and how near that is to what it can get."""

from __future__ import annotations

from contextlib import suppress

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
    with suppress(OSError, ValueError):
        return _of_process()
    return 0, 0.0


def _of_process() -> tuple[int, float]:
    import resource

    pages = _read("/proc/self/statm").split()
    address_space, resident = (int(number) * resource.getpagesize() for number in pages[:2])
    total, _, available = (int(line.split()[1]) for line in _read("/proc/meminfo").split("\n", 3)[:3])
    shares = [1 - available / total, _of_control_group()]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        shares.append(address_space / limit)
    return resident, min(max(shares), 1.0)


def _of_control_group() -> float:
    """What a container's limit (cgroup v2) is filled to, file pages that can be dropped left out."""
    with suppress(OSError, ValueError):  # no limit ("max"), or no such group
        limit = int(_read("/sys/fs/cgroup/memory.max"))
        held = int(_read("/sys/fs/cgroup/memory.current"))
        lines = _read("/sys/fs/cgroup/memory.stat").splitlines()
        droppable = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        return (held - droppable) / limit
    return 0.0


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:  # a third of the time of Path.read_text
        return file.read()
