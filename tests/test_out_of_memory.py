"""Out of memory: which errors mean it, and that nothing of a failed attempt stays."""

from __future__ import annotations

import errno
import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from numpy._core._exceptions import _ArrayMemoryError
from torch import nn

from sanctuary_trainer.errors import DataError, OutOfMemoryError
from sanctuary_trainer.out_of_memory import is_out_of_memory, peak, release

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.03 GiB is "
    "free. Including non-PyTorch memory, this process has 22.60 GiB memory in use."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)
OUT_OF_MEMORY = [
    CUDA,
    "CUDA out of memory.",
    "CUDA out of memory",
    "CUDA out of memory. Tried to allocate more than 1EB memory.",
    "CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction ...",
    "CUDA ran out of memory outside PyTorch's allocator. If this workload uses many dynamic shapes, cuDNN may need ...",
    "CUDA error: out of memory",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call, so ...",
    "CUDA driver error: out of memory",
    "HIP out of memory. Tried to allocate 1.50 GiB (GPU 0; 15.98 GiB total capacity)",
    "HIP error: out of memory\nHIP kernel errors might be asynchronously reported",
    "XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "UR backend failed. UR backend returns:38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)",
    "NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity; 59.36 GiB already allocated;",
    "MPS backend out of memory (MPS allocated: 9.05 GB, other allocations: 1.02 MB, max allowed: 9.07 GB). Tried ...",
    "Invalid buffer size: 31.25 GB",
    "Invalid buffer size: 31.25 GiB",
    "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::939524096 (896)MB",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "CUDA error: insufficient resources when calling `cusparseSpGEMM_workEstimation( handle, opA, opB, &alpha)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "HIP error: rocblas_status_memory_error",
    "miopen error: miopenStatusAllocFailed",
    "MIOpen Error: /MIOpen/src/hip/handlehip.cpp:70: Memory not available to allocate buffer: 655360000",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
    "Unable to find an engine to execute this computation",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    CPU,
    "[enforce fail at alloc_cpu.cpp:80] . DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 ...",
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes.",
    "C10 Out of Memory. Trying to allocate ",
    "std::bad_alloc",
    "bad allocation",
    "could not create a memory object",
    "could not create a primitive",
    "could not execute a primitive",
    "MKL FFT error: Intel oneMKL DFTI ERROR: Not enough memory to allocate",
    "unable to mmap 4096 bytes from file </torch_81_2_0>: Cannot allocate memory (12)",
    "unable to open shared memory object </torch_81_2_0> in read-write mode: Cannot allocate memory (12)",
    # one error that quotes another
    f"The following operation failed in the TorchScript interpreter.\nTraceback ...:\nRuntimeError: {CUDA}\n",
    f"backend='inductor' raised:\ntorch.OutOfMemoryError: {CUDA}",
]
ANYTHING_ELSE = [
    "shape mismatch",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "required rank 4 tensor to use channels_last memory format",
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: device-side assert triggered",
    "CUDA error: too many resources requested for launch",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasSgemm(handle)`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN error: CUDNN_STATUS_MAPPING_ERROR",
    "the replay buffer is out of memory slots",
    "CUDA out of memory slots",
    "set batch_size lower if you see: CUDA out of memory.",
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location",
    "could not create a memory descriptor describing host side scalar",
    "cannot pin 'torch.cuda.FloatTensor': only dense CPU tensors can be pinned in memory",
    "unable to allocate shared memory(shm) for file </torch_81_2_0>: No space left on device (28)",
    "DataLoader worker (pid 81) is killed: Bus error. Possibly dataloader's workers are out of shared memory.",
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "Invalid buffer size: negative",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] writev: Cannot allocate memory",
    "NCCL Error 1: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
]


@pytest.mark.parametrize("text", OUT_OF_MEMORY, ids=range(len(OUT_OF_MEMORY)))
def test_the_text_of_every_allocator_is_known(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(type("Quoting", (RuntimeError,), {})(text))


@pytest.mark.parametrize("text", ANYTHING_ELSE, ids=range(len(ANYTHING_ELSE)))
def test_an_error_that_mentions_memory_in_passing_is_another(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("whatever it says"),
        torch.AcceleratorError("CUDA error: out of memory") if hasattr(torch, "AcceleratorError") else MemoryError(),
        MemoryError(),
        _ArrayMemoryError((1 << 40,), numpy.dtype(float)),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_some_types_say_it_themselves(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError(CUDA),
        KeyError(CUDA),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(CUDA),
        OutOfMemoryError(CUDA),
        DataError(CUDA),
        torch.distributed.DistBackendError(CUDA),
        torch.distributed.DistNetworkError("writev: Cannot allocate memory"),
        KeyboardInterrupt(),
        RuntimeError(),
        RuntimeError(12, CUDA),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_types_do_not_whatever_their_text(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def too_large_for_torch() -> None:
    torch.empty(1 << 50)


def too_large_for_numpy() -> None:
    numpy.empty(1 << 50)


def too_large_for_python() -> None:
    bytearray(1 << 60)


@pytest.mark.parametrize("attempt", [too_large_for_torch, too_large_for_numpy, too_large_for_python])
def test_what_really_does_not_fit_is_known(attempt: Callable[[], None]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        attempt()
    assert is_out_of_memory(caught.value)


class Bomb(nn.Module):
    """Makes a large tensor and fails; keeps a weak reference to it."""

    made: weakref.ref[Any]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = x.expand(1000, -1) + 1
        self.made = weakref.ref(large)
        return self.fail(large * 2)

    def fail(self, larger: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


class Keeping(Bomb):
    """Keeps the error that goes through it: a cycle over the traceback."""

    def fail(self, larger: torch.Tensor) -> torch.Tensor:
        try:
            return super().fail(larger)
        except RuntimeError as error:
            self.last = error
            mine = error  # noqa: F841
            raise


class Wrapping(Bomb):
    """Raises another error while it handles the first."""

    def fail(self, larger: torch.Tensor) -> torch.Tensor:
        try:
            return super().fail(larger)
        except RuntimeError:
            raise RuntimeError("CUDA out of memory.")  # noqa: B904


class Causing(Bomb):
    """Raises another error from the first, of which the first is the cause too."""

    def fail(self, larger: torch.Tensor) -> torch.Tensor:
        try:
            return super().fail(larger)
        except RuntimeError as first:
            second = RuntimeError("CUDA out of memory.")
            first.__cause__ = second
            raise second from first


@pytest.fixture
def no_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> Any:
    gc.disable()
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("kind", [Bomb, Keeping, Wrapping, Causing])
def test_nothing_of_the_failed_attempt_is_alive_after_release(kind: type[Bomb]) -> None:
    module = kind()
    caught = None
    try:
        module(torch.zeros(1, 1000, requires_grad=True))
    except RuntimeError as error:
        assert module.made() is not None  # the traceback holds it
        release(error)
        assert module.made() is None  # while the error is being handled
        caught = error
    assert module.made() is None
    assert caught is not None
    assert is_out_of_memory(caught)


def test_the_error_stays_a_cause_that_says_where_it_was_raised() -> None:
    error: BaseException | None = None
    try:
        Wrapping()(torch.zeros(1, 4))
    except RuntimeError as raised:
        error = raised
        release(error)
        release(error)  # adds nothing
    with pytest.raises(OutOfMemoryError) as caught:
        raise OutOfMemoryError("one sample does not fit into memory") from error
    cause = caught.value.__cause__
    assert cause is error is not None
    assert str(cause) == "CUDA out of memory."
    (note,) = cause.__notes__
    assert re.fullmatch(r"Raised in fail \(.*_of_memory.py, line \d+\), called in forward \(.*, line \d+\)", note)
    first = cause.__context__
    assert isinstance(first, torch.OutOfMemoryError)
    assert len(first.__notes__) == 1
    assert first.__traceback__ is None


def test_frames_that_still_run_keep_what_they_have() -> None:
    mine = torch.ones(3)
    try:
        Bomb()(mine)
    except RuntimeError as error:
        release(error)
    assert mine.tolist() == [1, 1, 1]


def test_garbage_is_collected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(gc, "collect", lambda *_: calls.append(1) or 0)
    try:
        Wrapping()(torch.zeros(1, 4))
    except RuntimeError as error:
        release(error)
    assert calls == [1]


def test_the_peak_of_a_cpu_is_that_of_the_process() -> None:
    # Its own process: the peak of this one is of many tests.
    code = (
        "import torch; from sanctuary_trainer.out_of_memory import peak\n"
        "cpu = torch.device('cpu'); before = peak(cpu); del [torch.ones(2**28)][:]; print(before, peak(cpu), sep=';')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    gib = [float(text.removesuffix(" GiB in this process")) for text in done.stdout.strip().split(";")]
    assert 0.9 < gib[1] - gib[0] < 1.2


def test_without_proc_the_peak_is_asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.read_text", none)
    assert re.fullmatch(r"\d+\.\d GiB in this process", peak(torch.device("cpu")))


def test_the_peak_of_an_accelerator_names_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 21.34 * 2**30)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"total_memory": 24 * 2**30})
    )
    assert peak(torch.device("cuda", 0)) == "21.3 GiB of 24.0 GiB on cuda:0"
