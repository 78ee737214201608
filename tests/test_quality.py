"""The linter and the type checker, run by the same command as the tests, so that one command is the gate."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", ["ruff check", "mypy"])
def test_the_checker_finds_nothing(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
