"""README's example, as it stands, on two ranks."""

from __future__ import annotations

import pytest

from tests.distributed.workers import Ranks
from tests.test_docs import ROOT, run_page


def run_on_a_rank(text: str) -> tuple[str, bool]:
    (printed,) = run_page(text)
    return printed.splitlines()[-1], "2 ranks" in printed


def test_the_readmes_example_runs_unchanged_on_two_ranks(two_ranks: Ranks) -> None:
    pytest.importorskip("sklearn")
    (first, told), (second, told_too) = two_ranks(run_on_a_rank, (ROOT / "README.md").read_text(), timeout=100)
    assert first.startswith("360 predictions") and first == second
    assert (told, told_too) == (True, False)  # the summary, on rank 0 alone
