"""The fixtures `one_rank`, `two_ranks` and `three_ranks`: see `workers.py`."""

from collections.abc import Iterator

import pytest

from tests.distributed.workers import Ranks, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as zygote:
        yield zygote


@pytest.fixture(scope="session")
def one_rank(zygote: Zygote) -> Ranks:
    """Calls a function in a fresh process that no launcher started."""
    return Ranks(zygote, 1)


@pytest.fixture(scope="session")
def two_ranks(zygote: Zygote) -> Ranks:
    """Calls a function on 2 ranks; nothing has joined them yet, the function's first Trainer does."""
    return Ranks(zygote, 2)


@pytest.fixture(scope="session")
def three_ranks(zygote: Zygote) -> Ranks:
    """Calls a function on 3 ranks."""
    return Ranks(zygote, 3)
