"""The commands in docs/distributed.md, as they stand there, with the script that stands there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_docs import BLOCK, ROOT

PAGE = (ROOT / "docs" / "distributed.md").read_text()
COMMANDS = re.findall(r"^(?:torchrun|accelerate launch) .*train\.py$", PAGE, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_makes_as_many_ranks_as_the_page_says(command: str, tmp_path: Path) -> None:
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not on the path")
    (tmp_path / "train.py").write_text(BLOCK.findall(PAGE)[0][0])
    done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = 1 if "--cpu" in command else 2
    assert sorted(re.findall(r"rank \d of \d", done.stdout)) == [f"rank {rank} of {ranks}" for rank in range(ranks)]
