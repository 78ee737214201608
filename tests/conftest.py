"""What every test starts from: an empty current folder, fixed seeds, one thread, no state of the test before."""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before torch is imported anywhere. With more threads than cores the tests' processes wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
# Subprocesses find the package in a bare checkout too, whatever folder they stand in.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

# The same examples in every run, and no deadline: a shared machine is slow at times.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in config.getoption("markexpr"):
        # Equality claims in float64 are made about the CPU; a test that wants the accelerator says so.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpus_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    for item in items:
        if "distributed" in item.path.parent.parts[len(ROOT.parts) :]:
            item.add_marker("distributed")
        if item.get_closest_marker("distributed"):
            # One group on one xdist worker: each has ranks of its own, and 2 cores are few.
            item.add_marker(pytest.mark.xdist_group("distributed"))
        if gpus_hidden and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an accelerator: run with -m gpu"))


@pytest.fixture(autouse=True)
def _fresh_process(tmp_path: Path) -> Iterator[None]:
    """Puts each test into an empty folder; environment, seeds, torch's and accelerate's state are as at the start."""
    environment, folder = dict(os.environ), Path.cwd()
    os.chdir(tmp_path)
    _reset_global_state()
    yield
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _reset_global_state()


def _reset_global_state() -> None:
    """Nothing is imported here: a module that no test has imported has no state to reset."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        if torch.are_deterministic_algorithms_enabled():  # setting it costs an import of 1.5 s
            torch.use_deterministic_algorithms(False)
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """An empty folder for `project_dir=`."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder
