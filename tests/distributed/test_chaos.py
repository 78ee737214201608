"""Runs that are killed by SIGKILL and continued end as undisturbed ones; the long version is `benchmarks/chaos.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import chaos
from tests.conftest import ROOT
from tests.distributed.workers import Ranks

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="a session's processes are found in /proc")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configuration", "kills"), [("1-0-interval", 4), ("1-2", 3), ("2-0", 4)], ids=["interval", "workers", "ranks"]
)
def test_a_run_that_is_killed_at_random_times_ends_as_an_undisturbed_one(
    one_rank: Ranks, configuration: str, kills: int, tmp_path: Path
) -> None:
    [row] = one_rank(chaos.storm, configuration, kills, 1, tmp_path / "chaos", timeout=50)
    assert row.differences == []
    assert row.kills == kills


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_torchrun_restarts_a_run_whose_rank_killed_itself(two_ranks: Ranks, tmp_path: Path) -> None:
    """The others are ended by the launcher then, and all start again."""
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir()
    killed.mkdir()
    configuration = chaos.CONFIGURATIONS["2-0"]
    two_ranks(chaos.train, configuration, calm, 0)
    done = subprocess.run(
        [
            Path(sys.executable).with_name("torchrun"),
            *("--standalone", "--nproc-per-node", "2", "--max-restarts", "2"),
            *(ROOT / "benchmarks" / "chaos.py", "--train", "2-0", "--folder", killed, "--die", "1", "7"),
        ],
        # Else ranks that start again may read where the former ones listened, from the store that outlives them, and
        # torchrun fails without our doing (pytorch issue 135712).
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (killed / "notes" / "died").exists()
    assert sorted(path.name for path in (killed / "notes").glob("*.samples")) == [
        f"{attempt:04d}.{rank}.samples" for attempt in range(2) for rank in range(2)
    ]
    assert chaos.compare(calm, killed) == []
