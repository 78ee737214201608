"""One batch runs out of memory somewhere, on some of the ranks: the fit is the undisturbed one.

Some cells of `benchmarks/oom_matrix.py`, which has them all.
"""

from __future__ import annotations

import pytest

from benchmarks.oom_matrix import cells, judge_row, rows
from tests.distributed.workers import Ranks, Zygote

ROWS = rows(list(cells("tests")))


@pytest.mark.parametrize(("configuration", "ranks"), ROWS, ids=lambda each: str(each))
def test_a_fit_in_which_a_batch_does_not_fit_is_the_undisturbed_one(
    zygote: Zygote, configuration: str, ranks: int
) -> None:
    verdicts = judge_row(Ranks(zygote, ranks), configuration, ROWS[configuration, ranks])
    assert len(verdicts) == len(ROWS[configuration, ranks])
    assert [f"{verdict.cell}: {verdict.wrong}" for verdict in verdicts if verdict.wrong] == []
