"""The commands in docs/distributed.md, as they stand there, with the script that stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import BLOCK, ROOT

PAGE = (ROOT / "docs" / "distributed.md").read_text()
COMMANDS = re.findall(r"^(?:torchrun|accelerate launch) .*train\.py$", PAGE, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_makes_as_many_ranks_as_the_page_says(command: str, tmp_path: Path) -> None:
    # Beside this Python: the tests run from environments that are not activated.
    launcher = Path(sys.executable).with_name(command.split()[0])
    (tmp_path / "train.py").write_text(BLOCK.findall(PAGE)[0][0])
    done = subprocess.run(
        [str(launcher), *command.split()[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = 1 if "--cpu" in command else 2
    found = sorted(re.findall(r"rank \d of \d", done.stdout))
    assert found == [f"rank {rank} of {ranks}" for rank in range(ranks)], done.stdout + done.stderr


REPORT = """
import atexit, os


def report():
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    # In one piece: both ranks write to one pipe, unbuffered.
    os.write(1, f"threads of gloo: {sum('gloo' in name for name in names)}\\n".encode())


atexit.register(report)  # before the trainer's, so it runs after that
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted where Linux lists them")
def test_no_thread_of_the_process_group_outlives_it(tmp_path: Path) -> None:
    """One that releases a tensor while the interpreter ends aborts the process, after all was done."""
    (tmp_path / "train.py").write_text(REPORT + BLOCK.findall(PAGE)[0][0])
    launcher = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [str(launcher), "--standalone", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("threads of gloo: 0") == 2, done.stdout
