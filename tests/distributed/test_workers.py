"""The harness itself: values, failures, hangs and a process group made by accelerate."""

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.workers import Ranks


def sum_over_ranks(value: float) -> dict[str, Any]:
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=True)
    total = torch.tensor(value * (state.process_index + 1), dtype=torch.float64)
    if state.num_processes > 1:
        torch.distributed.all_reduce(total)
    return {"rank": state.process_index, "ranks": state.num_processes, "total": total}


def surroundings() -> dict[str, Any]:
    import torch

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MY_SETTING")
    return {
        "environment": {name: os.environ.get(name) for name in names},
        "folder": Path.cwd(),
        "process": os.getpid(),
        "threads": torch.get_num_threads(),
        "draws": (random.random(), torch.rand(()).item()),
    }


def speak() -> None:
    print("to stdout")
    print("to stderr", file=sys.stderr)
    os.system("echo from a child")


def fail_on_rank_1() -> str:
    if os.environ["RANK"] == "1":
        raise ValueError("the text of rank 1")
    return "fine"


def sleep_on_rank_1_for_ever() -> str:
    while os.environ["RANK"] == "1":
        time.sleep(1)
    return "fine"


def wait_for_a_rank_that_fails() -> None:
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=True)
    if state.process_index == 1:
        raise ValueError("the text of rank 1")
    torch.distributed.all_reduce(torch.zeros(1))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_under_ddp(steps: int) -> list[float]:
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=True)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if state.num_processes > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.utils.data.TensorDataset(torch.arange(12.0, dtype=torch.float64).reshape(4, 3))
    for _ in range(steps):
        for (batch,) in torch.utils.data.DataLoader(inputs, batch_size=4, num_workers=1):
            optimizer.zero_grad()
            wrapped(batch).mean().backward()
            optimizer.step()
    return model.weight.tolist()[0]


def test_accelerate_joins_the_ranks(one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks) -> None:
    for ranks, total in ((one_rank, 0.5), (two_ranks, 1.5), (three_ranks, 3.0)):
        values = ranks(sum_over_ranks, 0.5)
        assert [value["rank"] for value in values] == list(range(ranks.world_size))
        assert {value["ranks"] for value in values} == {ranks.world_size}
        assert {value["total"].item() for value in values} == {total}


def test_ranks_are_fresh_processes_in_the_test_s_surroundings(
    two_ranks: Ranks, one_rank: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SETTING", "yes")
    first, second, alone = two_ranks(surroundings), two_ranks(surroundings), one_rank(surroundings)
    assert len({value["process"] for value in [*first, *second, *alone]}) == 5
    assert {value["folder"] for value in first} == {Path.cwd()}
    assert {value["threads"] for value in first} == {1}
    assert len({value["draws"][0] for value in [*first, *second]}) == 4
    assert len({value["draws"][1] for value in [*first, *second]}) == 1
    common = {"WORLD_SIZE": "2", "MY_SETTING": "yes"}
    assert first[1]["environment"] == {"RANK": "1", "LOCAL_RANK": "1", **common}
    assert alone[0]["environment"] == {"RANK": None, "LOCAL_RANK": None, "WORLD_SIZE": None, "MY_SETTING": "yes"}


def test_what_ranks_write_comes_back(two_ranks: Ranks) -> None:
    values = two_ranks(speak)
    assert values == [None, None]
    for output in values.outputs:
        assert sorted(output.splitlines()) == ["from a child", "to stderr", "to stdout"]


def test_backward_passes_and_loader_workers_run_in_forked_ranks(two_ranks: Ranks, one_rank: Ranks) -> None:
    assert {tuple(weights) for weights in [*two_ranks(train_under_ddp, 3), *one_rank(train_under_ddp, steps=3)]} == {
        tuple(one_rank(train_under_ddp, 3)[0])
    }


def test_an_exception_fails_the_test_with_its_traceback(two_ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0: returned.*rank 1: Trace.*Error: the text of rank 1"):
        two_ranks(fail_on_rank_1)
    first, second = two_ranks.outcomes(fail_on_rank_1)
    assert (first.value, first.error) == ("fine", None)
    assert second.error is not None and "ValueError: the text of rank 1" in second.error


def test_a_hang_shows_the_stacks_and_costs_only_its_own_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks.outcomes(sleep_on_rank_1_for_ever, timeout=1)
    assert (first.value, first.error) == ("fine", None)
    assert second.error is not None and second.error.startswith("hung: not finished after 1 s")
    assert "in sleep_on_rank_1_for_ever" in second.output
    assert two_ranks(speak) == [None, None]


def test_a_rank_that_fails_resets_its_peers_connections(two_ranks: Ranks) -> None:
    first, second = two_ranks.outcomes(wait_for_a_rank_that_fails, timeout=30)
    assert second.error is not None and "the text of rank 1" in second.error
    assert first.error is not None and "hung" not in first.error


def test_a_killed_rank_is_told_by_its_signal(two_ranks: Ranks) -> None:
    assert [outcome.error for outcome in two_ranks.outcomes(die)] == ["killed by SIGKILL"] * 2


def test_a_function_that_has_no_name_to_be_found_by_is_refused(two_ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="move it to the top"):
        two_ranks(lambda: None)
