"""A notebook: what its cells show, an interrupted cell, several ranks, and the example. Real kernels, no front end."""

import re
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")

import nbformat  # noqa: E402 - comes with nbclient
from jupyter_client.manager import KernelManager  # noqa: E402

EXAMPLE = ROOT / "examples" / "notebook.ipynb"
SECONDS = 60  # for one cell

FIRST_CELL = """
import time, torch
from torch.utils.data import DataLoader
from sanctuary_trainer import Trainer, VisionTask

class Small(VisionTask):
    slow = False
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 1))
    def training_step(self, batch, batch_idx):
        for _ in range(2 * (self.slow and self.run.state.global_step == 2)):
            print("INTERRUPT", flush=True)
            time.sleep(0.5)
        return self.model(batch).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("spread", self.model(batch).std())
    def predict_step(self, batch, batch_idx):
        return self.model(batch)

loader = DataLoader(torch.rand(32, 3, 32, 32), 8)
"""


class Notebook:
    """Runs cells in one kernel, as a front end does: an output that is redrawn is one output."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=folder)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, cell: str, interrupts: int = 0, error: str | None = None) -> tuple[list[str], str]:
        """Runs a cell, which ends well or with the `error` of that name; returns its displays and its printed text.

        interrupts: how often the kernel is interrupted, each time when the cell prints "INTERRUPT".
        """
        displays: dict[str, str] = {}
        printed: list[str] = []
        left = interrupts

        def show(message: dict[str, Any]) -> None:
            nonlocal left
            content = message["content"]
            if message["msg_type"] in ("display_data", "update_display_data"):
                displays[content["transient"]["display_id"]] = content["data"]["text/plain"]
            elif message["msg_type"] == "stream":
                printed.append(content["text"])
                for _ in range(min(left, content["text"].count("INTERRUPT"))):
                    left -= 1
                    self.manager.interrupt_kernel()

        reply = self.client.execute_interactive(textwrap.dedent(cell), output_hook=show, timeout=SECONDS)["content"]
        text = "".join(printed)
        assert reply.get("ename") == error, "\n".join([text, *reply.get("traceback", [])])
        return list(displays.values()), text


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """One kernel for all tests here: the start and the imports of one cost many seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        opened = Notebook(tmp_path_factory.mktemp("notebook"))
        try:
            opened.run(FIRST_CELL)
            yield opened
        finally:
            opened.close()


def test_a_fit_draws_in_one_output_and_duplicates_nothing(notebook: Notebook) -> None:
    [progress], printed = notebook.run(
        """
        class Talking(Small):
            def on_train_epoch_end(self, run):
                print("between", run.state.epoch)
        trainer = Trainer(max_epochs=3, log_with=None, run_name="talking")
        result = trainer.fit(Talking(), loader, loader)
        """
    )
    lines = progress.splitlines()
    assert [line[:9] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert all(re.search(r"100%\|█+\| 4/4, loss=[\d.e-]+, val/spread=[\d.e-]+ \[", line) for line in lines)
    assert re.findall(r"^between \d$", printed, re.MULTILINE) == ["between 0", "between 1", "between 2"]
    assert printed.count("Ended after 12 steps") == 1 and "epoch 1/3" not in printed and "\r" not in printed


def test_a_prediction_inside_a_fit_has_an_output_of_its_own(notebook: Notebook) -> None:
    displays, printed = notebook.run(
        """
        class Predicting(Small):
            def on_train_epoch_end(self, run):
                print(len(Trainer(log_with=None).predict(Small(), loader)), "predicted")
        result = Trainer(max_epochs=1, log_with=None, run_name="predicting").fit(Predicting(), loader)
        """
    )
    assert sorted(line[:9] for line in displays) == ["epoch 1/1", "predict: "]
    assert "32 predicted" in printed


@pytest.mark.parametrize(("interrupts", "error", "steps"), [(1, "SystemExit", 3), (2, "KeyboardInterrupt", None)])
def test_after_an_interrupt_all_can_be_used_again(
    interrupts: int, error: str, steps: int | None, notebook: Notebook
) -> None:
    notebook.run(
        f"""
        import os, signal
        numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
        handlers = [signal.getsignal(number) for number in numbers]
        task, trainer = Small(), Trainer(max_epochs=2, seed=0, log_with=None, run_name="interrupted-{interrupts}")
        task.slow = True
        """
    )
    displays, _ = notebook.run("trainer.fit(task, loader, loader)", interrupts, error)
    assert len(displays) == 1
    _, printed = notebook.run(
        """
        assert handlers == [signal.getsignal(number) for number in numbers]
        task.slow, folder = False, f"runs/{trainer.settings['run_name']}/checkpoints"
        print("saved", *(os.listdir(folder) if os.path.isdir(folder) else []))
        print("predicted", len(trainer.predict(task, loader)))
        result = trainer.fit(task, loader, loader, resume="auto")
        print("ended", result.stop_reason, result.global_step)
        print("anew", Trainer(max_epochs=1, log_with=None).fit(task, loader).global_step)
        """
    )
    assert all(line in printed.splitlines() for line in ("predicted 32", "ended max_epochs 8", "anew 4"))
    assert (f": step {steps}, epoch 0" in printed) == (f"saved step_{steps or 0:08}" in printed) == bool(steps)


def test_a_cell_that_defines_the_task_may_be_run_again(notebook: Notebook) -> None:
    for number in (1, 2):
        _, printed = notebook.run(
            f"""
            class Again(VisionTask):
                def __init__(self):
                    super().__init__()
                    self.layer = torch.nn.Linear(3 * 32 * 32, {number})
                def training_step(self, batch, batch_idx):
                    return self.layer(batch.flatten(1)).square().mean()
                def predict_step(self, batch, batch_idx):
                    return self.layer(batch.flatten(1))
            task, trainer = Again(), Trainer(max_epochs=1, log_with=None)
            result = trainer.fit(task, loader)
            print("shape", trainer.predict(task, loader)[0].shape[0], result.run_dir.name)
            """
        )
        assert f"shape {number} again-{number}" in printed


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@pytest.mark.distributed
def test_two_ranks_train_after_a_fit_in_the_same_kernel(notebook: Notebook) -> None:
    """The page's own cell. Two threads, which a fit uses before: without a word from us the ranks would hang."""
    [cell] = re.findall(r"^```py\n(.*?)^```", (ROOT / "docs" / "notebooks.md").read_text(), re.MULTILINE | re.DOTALL)
    assert "num_processes=2)" in cell
    cell = cell.replace("num_processes=2)", f"num_processes=2, use_port='{free_port()}')")
    # The advice to the reader is left out: the trainer's own guard is what is tested.
    cell = cell.replace("    torch.set_num_threads(1)\n", "")
    notebook.run(
        """
        torch.set_num_threads(2)
        torch.rand(2000, 2000).exp().sum()
        result = Trainer(max_epochs=1, log_with=None).fit(Small(), loader, loader)
        """
    )
    _, printed = notebook.run(cell + "\nprint(len(predictions), 'predictions')")
    assert "2 ranks" in printed and "epoch 2/2: 100%, 4/4 batches" in printed and "64 predictions" in printed
    assert "attempted to send message from fork" not in printed


@pytest.mark.slow
def test_the_example_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    stored = nbformat.read(EXAMPLE, as_version=4)
    executed = nbformat.read(EXAMPLE, as_version=4)
    nbclient.NotebookClient(
        executed, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    assert [kinds(cell) for cell in stored.cells] == [kinds(cell) for cell in executed.cells]
    for book in (stored, executed):
        last = "".join(output.get("text", "") for output in book.cells[-1].outputs)
        accuracy = re.search(r"^270 steps, accuracy (0\.\d+)$", last, re.MULTILINE)
        assert accuracy is not None and float(accuracy[1]) > 0.8
    assert EXAMPLE.stat().st_size < 100_000


def kinds(cell: Any) -> set[str]:
    """What a cell put out: text, pictures, values."""
    outputs = cell.get("outputs", [])
    return {kind for output in outputs for kind in ({output.output_type} | output.get("data", {}).keys())}
