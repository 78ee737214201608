"""Out of memory: whether an error means it, what the failed attempt still holds, and how much memory there was.

try:
    attempt()
except Exception as error:
    if not is_out_of_memory(error):
        raise
    release(error)                  # from here on the attempt's tensors are gone; `error` may still be a cause
"""

from __future__ import annotations

import errno
import gc
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import torch

from sanctuary_trainer.errors import SanctuaryError

# What a line begins with where one error quotes another, as TorchScript and torch.compile do.
_QUOTED = r"^(?:[\w.]*(?:Error|Exception): )*"
_LIBRARY = r"(?:cu|hip)(?:BLAS|DNN|FFT|SOLVER|SPARSE)"
_TEXTS = tuple(
    re.compile(_QUOTED + text, re.MULTILINE)
    for text in (
        # The caching allocators of CUDA, HIP, XPU and NPU, a full stop after it; MPS goes on in parentheses.
        r"[A-Z]{2,8}(?: backend)? out of memory(?=$|[.:,]| \()",
        r"Triton Error \[\w+\]: .*out of memory",  # of a compiled kernel
        r"CUDA ran out of memory outside PyTorch's allocator",  # torch, where cuDNN compiles kernels
        # The runtime and the driver themselves, whose text for code 2 it is.
        r"(?:CUDA|HIP)(?: driver)? error: out of memory$",
        r"Invalid buffer size: [\d.]+ [KMGT]?i?B",  # MPS: one tensor larger than what Metal gives at all
        r"(?:level_zero|UR|opencl|Native API) .*_OUT_OF_(?:DEVICE|HOST)_MEMORY\)",  # SYCL, below XPU's allocator
        r"(?:\[Rank:\d+\] )?FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",  # HPU
        # Libraries that allocate by themselves: "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ..."
        rf"(?:CUDA|HIP|(?i:{_LIBRARY})) error: (?i:{_LIBRARY})_(?:STATUS_)?ALLOC_FAILED",
        r"CUDA error: (?:insufficient resources|resource allocation failed) when calling `cusparse",  # in words
        r"cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED",  # cuDNN 9
        r"(?:CUDA|HIP|rocblas) error: rocblas_status_memory_error",
        r"(?i:miopen error): (?:miopenStatusAllocFailed|.*Memory not available to allocate buffer)",
        # cuDNN's choice of an algorithm, when the workspace of none of them fits.
        r"Unable to find a valid cuDNN algorithm to run convolution",
        r"(?:(?:GET|FIND) was u|U)nable to find an engine to execute this computation",
        r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\.",  # counted by accelerate and Lightning too (pytorch#4107)
        # The CPU's allocator, on Unix and on Windows; it says where it stands first.
        r"(?:\[enforce fail at .*?\] .*?\. )?DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        r"C10 Out of Memory\. Trying to allocate",
        r"Could not allocate memory (?:for|to change) Tensor SizesAndStrides",
        r"(?:std::bad_alloc|bad allocation)$",  # new of C++, as torch hands it on; the second is Microsoft's
        r"could not (?:create a memory(?: object)?|(?:create|execute) a primitive)$",  # oneDNN, which says no more
        r"(?:MKL FFT error: )?Intel oneMKL DFTI ERROR: Not enough memory to allocate",
        # The system's word for ENOMEM, after what torch tried: to map a file, or memory that is shared with a worker.
        r"(?:unable to .*: )?Cannot allocate memory(?: \(12\))?$",
    )
)
_DISTRIBUTED: tuple[type[BaseException], ...] = (
    (torch.distributed.DistError,) if torch.distributed.is_available() else ()
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that an allocation failed, of a device or of the host, whichever allocator it was.

    By type; of a RuntimeError by its text. Never an error of this package, nor one of a collective, which the other
    ranks would not repeat.
    """
    if isinstance(error, (SanctuaryError, *_DISTRIBUTED)):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):  # numpy's is a MemoryError
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text.search(str(error)) for text in _TEXTS)


def release(error: BaseException) -> None:
    """Free what the attempt that ended in `error` holds: its frames hold tensors, and the traceback holds the frames.

    May be called while `error` is being handled; frames that still run keep what they have. `error` and its causes
    lose their tracebacks and keep in a note where they were raised. Then memory goes back from Python's garbage and
    the accelerator's cache.
    """
    for each in _chain(error):
        if each.__traceback__ is not None:
            each.add_note(_place(each))
            traceback.clear_frames(each.__traceback__)
            each.__traceback__ = None
    gc.collect()
    with suppress(RuntimeError):  # a device without memory fails here too, and then there is nothing more to be had
        if (accelerator := torch.accelerator.current_accelerator()) is not None:
            getattr(torch, accelerator.type).empty_cache()


def release_backward() -> None:
    """Free what a backward that broke off on the CPU was to do next: it waits in this thread for another one."""
    with suppress(RuntimeError), torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True).square().backward()


def peak(device: torch.device) -> str:
    """The most memory that was in use so far: "21.3 GiB of 24.0 GiB on cuda:0", "1.2 GiB in this process"."""
    if device.type == "cpu":
        return f"{_gib(_process_peak())} in this process"
    if device.type == "mps":  # which counts no peak
        return f"{_gib(torch.mps.driver_allocated_memory())} of {_gib(torch.mps.recommended_max_memory())} on {device}"
    kind = getattr(torch, device.type)
    total = kind.get_device_properties(device).total_memory
    return f"{_gib(kind.max_memory_allocated(device))} of {_gib(total)} on {device}"


def _chain(error: BaseException) -> list[BaseException]:
    """The error, its causes and those during whose handling it was raised; each once, also where they form a ring."""
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            waiting += [each.__cause__, each.__context__]
    return list(found.values())


def _place(error: BaseException) -> str:
    """Where it was raised, and from where that was called."""
    frames = traceback.extract_tb(error.__traceback__)[:-3:-1]
    return "Raised " + ", called ".join(f"in {f.name} ({f.filename}, line {f.lineno})" for f in frames)


def _process_peak() -> int:
    """Bytes. ru_maxrss last: Linux hands it down from the process that started this one."""
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(found[1]) << 10
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
