"""Which curves share a chart, from their names alone."""

import re

from hypothesis import assume, given
from hypothesis import strategies as st

from sanctuary_trainer.board_layout import MOST_CHARTS, MOST_CURVES, MOST_SECTIONS, board_layout


def shown(names: list[str], all_names: list[str] | None = None) -> dict[str, dict[str, list[str]]]:
    """The curves of each chart among `all_names`, as TensorBoard finds them, where the layout was made from `names`."""
    return {
        section: {
            chart: [name for name in all_names or names if re.compile(curves).match(name)]
            for chart, curves in charts.items()
        }
        for section, charts in board_layout(names).items()
    }


def test_training_and_validation_of_one_metric_share_a_chart() -> None:
    names = ["train/lr", "train/accuracy", "train/loss", "val/accuracy", "val/loss", "train/loss_epoch", "epoch"]
    assert shown(names) == {
        "metrics": {
            "loss": ["train/loss", "val/loss", "train/loss_epoch"],
            "accuracy": ["train/accuracy", "val/accuracy"],
        },
        "optimization": {"lr": ["train/lr"]},
    }
    assert list(shown(names)["metrics"]) == ["loss", "accuracy"], "the loss stands first"


def test_a_run_without_validation_has_the_charts_of_training() -> None:
    assert shown(["train/loss", "train/grad_norm"]) == {
        "metrics": {"loss": ["train/loss"]},
        "optimization": {"grad_norm": ["train/grad_norm"]},
    }
    assert board_layout([]) == {}


def test_what_comes_later_is_in_the_chart_that_is_there() -> None:
    before = ["train/loss", "val/loss", "balance/wait/rank0"]
    after = [*before, "val/loss_ema", "train/loss_epoch", "balance/wait/rank1", "val/loss/box"]
    assert shown(before, after) == {
        "metrics": {"loss": ["train/loss", "val/loss", "val/loss_ema", "train/loss_epoch", "val/loss/box"]},
        "balance": {"wait": ["balance/wait/rank0", "balance/wait/rank1"]},
    }
    assert board_layout(before) == board_layout(after), "so that two runs' charts are equal, and shown once"


def test_several_validation_loaders_share_the_chart_of_a_metric() -> None:
    names = ["train/loss", "val/day/loss", "val/night/loss", "val/day/accuracy", "val/night/accuracy"]
    assert shown(names)["metrics"] == {
        "loss": ["train/loss", "val/day/loss", "val/night/loss"],
        "accuracy": ["val/day/accuracy", "val/night/accuracy"],
    }
    names = ["val/day/accuracy_of/cat", "val/night/accuracy_of/cat", "val/night/accuracy_of/dog"]
    assert shown(names)["metrics"] == {"accuracy_of": names}
    assert shown(["val/0/loss", "val/1/loss", "val/1/loss_ema"])["metrics"] == {
        "loss": ["val/0/loss", "val/1/loss", "val/1/loss_ema"]
    }


def test_the_entries_of_one_metric_share_a_chart() -> None:
    names = ["val/loss", "val/precision/cat", "val/precision/dog", "val/recall/cat", "val/iou_0", "val/iou_1"]
    assert shown(names)["metrics"] == {
        "loss": ["val/loss"],
        "iou": ["val/iou_0", "val/iou_1"],
        "precision": ["val/precision/cat", "val/precision/dog"],
        "recall": ["val/recall/cat"],
    }


def test_another_metric_that_begins_alike_has_its_own_chart() -> None:
    assert shown(["train/loss", "train/loss_box", "val/loss_box", "train/accuracy", "val/accuracy_of/cat"]) == {
        "metrics": {
            "loss": ["train/loss"],
            "accuracy": ["train/accuracy"],
            "accuracy_of": ["val/accuracy_of/cat"],
            "loss_box": ["train/loss_box", "val/loss_box"],
        }
    }


def test_learning_rates_balance_memory_and_speed_have_sections_of_their_own() -> None:
    balance = [f"balance/{lap}/rank{rank}" for lap in ("data", "wait") for rank in range(3)]
    speed = ["speed/step_ms_median", "speed/step_ms_p95", "speed/samples_per_second", "train/samples_per_second"]
    names = ["memory/peak", *balance, *speed, "mine/x", "train/loss", "train/lr/body", "train/lr/head"]
    assert shown(names) == {
        "metrics": {"loss": ["train/loss"]},
        "optimization": {"lr": ["train/lr/body", "train/lr/head"]},
        "speed": {
            "samples_per_second": ["speed/samples_per_second", "train/samples_per_second"],
            "step_ms": ["speed/step_ms_median", "speed/step_ms_p95"],
        },
        "balance": {"data": balance[:3], "wait": balance[3:]},
        "memory": {"peak": ["memory/peak"]},
        "mine": {"x": ["mine/x"]},
    }
    assert list(shown(names)) == ["metrics", "optimization", "speed", "balance", "memory", "mine"]


@given(st.lists(st.text(st.characters(exclude_characters="\n"), min_size=1), min_size=1, max_size=4))
def test_a_name_of_any_characters_is_in_its_chart(parts: list[str]) -> None:
    assume(not any("/" in part for part in parts))
    name = "/".join(parts)
    found = [curves for charts in shown([name]).values() for curves in charts.values()]
    assert found == ([[name]] if len(parts) > 1 else [])


def test_characters_of_regular_expressions_mean_themselves() -> None:
    names = ["val/f1(macro)", "val/p@.5", "val/p@x5", "val/a+b"]
    assert shown(names)["metrics"] == {name.removeprefix("val/"): [name] for name in names}


def test_names_that_lack_a_part_have_no_chart() -> None:
    assert board_layout(["epoch", "", "/", "train/", "/loss", "val//loss", "mine/"]) == {}


def test_of_too_many_the_first_are_shown() -> None:
    charts = board_layout([f"val/metric{i:04}" for i in range(1000)])["metrics"]
    assert list(charts) == [f"metric{i:04}" for i in range(MOST_CHARTS)]
    assert len(board_layout([f"mine{i}/x" for i in range(100)])) == MOST_SECTIONS - 5
    curves = [f"val/accuracy_of/{i}" for i in range(MOST_CURVES)]
    assert shown(["val/loss", *curves])["metrics"]["accuracy_of"] == curves
    assert list(shown(["val/loss", *curves, "val/accuracy_of/last"])["metrics"]) == ["loss"]
