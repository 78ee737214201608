"""The dashboard of several ranks is that of one, and what callbacks ask to gather comes in rank order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sanctuary_trainer import Callback, CallbackError, Trainer
from sanctuary_trainer.callbacks import ClassificationDashboard, LoadBalance
from tests.callbacks.test_classification_dashboard import Classifier, images, keys, same_pictures, shown
from tests.distributed.workers import Ranks
from tests.small_tasks import Line, floats, loader, quiet_trainer


def train_with_dashboard(folder: str, samples: int, batch_size: int, ties: bool) -> Any:
    """What rank 0 found in the last of two validations, its metrics and pictures; elsewhere what is left there."""
    dashboard, task = ClassificationDashboard(num_images=5), Classifier()
    val = images(samples, seed=2)
    if ties:  # each image several times, with the same label
        val = [val[i % 4] for i in range(samples)]
    trainer = Trainer(
        max_epochs=2,
        project_dir=folder,
        default_callbacks=False,
        callbacks=[dashboard],
        cpu=True,
        seed=0,
        num_sanity_val_steps=1,
    )
    result = trainer.fit(task, loader(images(24), batch_size), {"all": loader(val, batch_size), "two": loader(val[:2])})
    metrics = {name: value for name, value in result.metrics.items() if "accuracy_of" in name}
    found = {
        name: (each.counts, each.total, keys(each.confident_mistakes), keys(each.worst_losses))
        for name, each in dashboard.found.items()
    }
    return found, metrics, str(result.run_dir)


@pytest.mark.parametrize(("samples", "ties"), [(37, False), (37, True), (1, False)])
def test_2_ranks_find_what_1_finds(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, samples: int, ties: bool) -> None:
    [(alone, metrics, _)] = one_rank(train_with_dashboard, str(tmp_path), samples, 8, ties)
    found, other = two_ranks(train_with_dashboard, str(tmp_path), samples, 4, ties)
    assert found[1] == other[1] == pytest.approx(metrics, abs=0)
    assert found[0].keys() == alone.keys() == {"all", "two"}
    for name, (counts, total, mistakes, losses) in alone.items():
        assert np.array_equal(found[0][name][0], counts) and np.array_equal(found[0][name][1], total)
        assert found[0][name][2:] == (mistakes, losses)
    assert alone["all"][0].sum() == samples and len(alone["all"][3]) == min(samples, 5)
    assert other[0] == {}


def test_3_ranks_draw_what_1_draws_and_one_of_them_without_a_batch_joins(
    one_rank: Ranks, three_ranks: Ranks, tmp_path: Path
) -> None:
    [(alone, _, first)] = one_rank(train_with_dashboard, str(tmp_path), 2, 12, False)
    found, *_ = three_ranks(train_with_dashboard, str(tmp_path), 2, 4, False)
    assert np.array_equal(found[0]["two"][0], alone["two"][0]) and found[0]["two"][2:] == alone["two"][2:]
    mine, theirs = shown(Path(first)), shown(Path(found[2]))
    for pictures in (mine, theirs):
        del pictures["train/images"]  # those of rank 0's own first batch
    assert same_pictures(mine, theirs)


class Gathers(Callback):
    """Asks twice; the second of them logs what came, or fails: "then", "again" (asks there), "value" (on rank 1)."""

    def __init__(self, fails: str) -> None:
        self.fails, self.came = fails, []

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        def sees(values: list[Any]) -> None:
            if self.fails == "then":
                raise ValueError("cannot be drawn")
            if self.fails == "again":
                run.gather(0, self.came.append)
            self.came.append(values)
            run.log("val/ranks", len(values))

        run.gather((stage, run.rank), self.came.append)
        run.gather(sees if self.fails == "value" and run.rank == 1 else [run.rank] * run.rank, sees)


def gather_in_a_fit(fails: str) -> Any:
    gathers, task = Gathers(fails), Line()
    trainer = quiet_trainer(max_epochs=1, callbacks=[gathers], num_sanity_val_steps=0)
    try:
        result = trainer.fit(task, loader(floats(range(8)), 1), loader(floats(range(4)), 1))
    except Exception as error:
        return type(error).__name__, str(error)
    return gathers.came, result.metrics["val/ranks"]


def test_what_is_gathered_comes_to_rank_0_in_rank_order_and_its_logs_belong_to_the_evaluation(
    one_rank: Ranks, two_ranks: Ranks
) -> None:
    assert one_rank(gather_in_a_fit, "") == [([[("val", 0)], [[]]], 1.0)]
    first, second = two_ranks(gather_in_a_fit, "")
    assert first == ([[("val", 0), ("val", 1)], [[], [1]]], 2.0)
    assert second == ([], 2.0)


def test_an_error_in_what_is_done_with_it_ends_all_ranks(two_ranks: Ranks) -> None:
    (first, _), (second, text) = two_ranks(gather_in_a_fit, "then")
    assert (first, second) == ("ValueError", "RankError")
    assert "rank 0: ValueError: cannot be drawn" in text


def test_an_error_that_one_rank_alone_can_see_is_told_to_all(two_ranks: Ranks) -> None:
    (first, text), (second, _) = two_ranks(gather_in_a_fit, "value")  # a function inside another has no name to send
    assert first == "RankError"
    assert second in ("AttributeError", "PicklingError")
    assert "rank 1" in text and "pickle" in text
    (first, _), (second, text) = two_ranks(gather_in_a_fit, "again")
    assert (first, second) == ("CallbackError", "RankError")
    assert "run.gather was called in what another run.gather calls" in text


class GathersAlone(Callback):
    """Asks on rank 1 alone, in one hook."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def ask(self, run: Any, hook: str) -> None:
        if run.rank == 1 and hook == self.hook:
            run.gather(run.rank, print)

    def on_train_step_end(self, run: Any) -> None:
        self.ask(run, "on_train_step_end")

    def on_log(self, run: Any, values: dict[str, float], step: int) -> None:
        self.ask(run, "on_log")

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        self.ask(run, "on_evaluation_end")

    def on_save_point(self, run: Any) -> None:
        if run.state.stop_reason is not None:
            self.ask(run, "on_save_point")


def gather_alone(hook: str, beside: bool) -> str:
    callbacks = [GathersAlone(hook), *([LoadBalance()] if beside else [])]
    trainer = quiet_trainer(max_epochs=1, callbacks=callbacks, log_every_n_steps=2)
    with pytest.raises(CallbackError) as caught:
        trainer.fit(Line(), loader(floats(range(8)), 1), loader(floats(range(4)), 1))
    return str(caught.value)


@pytest.mark.parametrize("hook", ["on_train_step_end", "on_log", "on_evaluation_end", "on_save_point"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_rank_that_asks_alone_ends_all_ranks_instead_of_waiting_for_ever(
    two_ranks: Ranks, hook: str, beside: bool
) -> None:
    for rank, text in enumerate(two_ranks(gather_alone, hook, beside, timeout=30.0)):
        assert f"rank {rank} called run.gather" in text and "every rank has to make the same calls" in text
