"""The examples' claim that the same script runs on several processes."""

import importlib
import sys

import pytest

from tests.conftest import ROOT
from tests.distributed.workers import Ranks


def run_example(name: str, **settings: int) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    importlib.import_module(name).main(**settings)


@pytest.mark.parametrize(
    ("name", "settings", "last"),
    [
        ("minimal", {"max_epochs": 1}, "the first digits:"),
        ("custom_callback", {"max_epochs": 10}, "stopped after"),
        ("segmentation", {"max_epochs": 1, "scenes": 48}, "The scene with the most shapes in it:"),
        ("detection", {"max_epochs": 1, "scenes": 64}, "scene 0:"),
    ],
)
def test_an_example_runs_on_two_ranks_and_one_prints(
    two_ranks: Ranks, name: str, settings: dict[str, int], last: str
) -> None:
    first, second = two_ranks(run_example, name, **settings).outputs
    assert first.count(last) == 1
    assert last not in second
