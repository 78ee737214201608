"""The load balance in words: short lines for the console, a page in Markdown for the tracker."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from sanctuary_trainer import CAUSES, Balance, Finding, RankTimes
from sanctuary_trainer.callbacks.balance_page import balance_page, balance_text, shown_ranks

EVIDENCE = "rank 3 (host b, cuda:3) waits for data 41 % of each step, the others 2 %"
ADVICE = "Raise num_workers from 2 to 6, or move decoding out of __getitem__."
SENTENCES = {
    "slow_data_on_rank": "slow data loading on rank 1",
    "slow_data": "slow data loading",
    "slow_compute_on_rank": "slow computation on rank 1",
    "uneven_work": "batches of unequal work",
    "uneven_samples": "unequal numbers of samples",
    "slow_communication": "slow communication between ranks",
    "slow_callbacks": "slow callbacks",
    "slow_logging": "slow logging",
    "slow_checkpoint": "slow checkpoints",
    "slow_validation": "long validation",
    "memory_nearly_full": "memory nearly full on rank 1",
}


def rank_times(rank: int, host: str = "a", **milliseconds: float) -> RankTimes:
    laps = milliseconds or {"data": 2.0, "forward": 20.0, "backward": 40.0, "wait": 38.0}
    seconds = {lap: value / 1000 for lap, value in laps.items()}
    return RankTimes(rank, host, f"cuda:{rank}", seconds, 32.0, 32 * 224 * 224, 60_000_000_000, 0.43)


def finding(cause: str = "slow_data_on_rank", **fields: Any) -> Finding:
    return replace(Finding(cause, (1,), 0.29, True, EVIDENCE, ADVICE), **fields)


def balance(ranks: Any, *findings: Finding) -> Balance:
    """ranks: a number, or what each of them did."""
    times = tuple(map(rank_times, range(ranks))) if isinstance(ranks, int) else tuple(ranks)
    return Balance(findings[0].cause if findings else "balanced", findings, times, 1200, 0.1)


def rows_of(text: str) -> list[list[str]]:
    """The cells of the console's table, its head first."""
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("  rank  "))
    return [re.split("  +", line[2:].strip()) for line in lines[head:]]


def table_of(page: str) -> list[list[str]]:
    """The cells of the page's table, its head first."""
    rows = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in page.splitlines() if line.startswith("| ")]
    return [rows[0], *rows[2:]]


def html_of(page: str) -> str:
    from tensorboard.plugin_util import markdown_to_safe_html

    return str(markdown_to_safe_html(page))


def test_the_verdict_says_what_was_seen_and_what_it_costs_everybody() -> None:
    text = balance_text(balance(4, finding()))
    assert " ".join(text.split()).startswith(
        f"Load balance: {EVIDENCE}; this costs everybody 29 % of the time Advice: "
    )


def test_one_process_alone_is_told_what_it_loses_and_where_its_time_goes() -> None:
    one = balance([rank_times(0, data=58.25, forward=14, backward=27, logging=0.01)], finding("slow_data", ranks=()))
    assert balance_text(one).splitlines() == [
        "Load balance: rank 3 (host b, cuda:3) waits for data 41 % of each step, the others 2 %; this costs",
        "  29 % of the time",
        f"  Advice: {ADVICE}",
        "  ms per step: data 58.2, forward 14.0, backward 27.0",
    ]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_balanced_run_is_told_what_its_time_is_spent_on(ranks: int) -> None:
    verdict = balance_text(balance(ranks)).splitlines()[0]
    assert verdict == "Load balance: balanced; 60 % of the time in the model, nothing is worth looking for"


def test_every_cause_has_its_sentence() -> None:
    assert SENTENCES.keys() == set(CAUSES)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_told_in_plain_words(cause: str) -> None:
    words = SENTENCES[cause]
    page = balance_page(balance(2, finding(cause)))
    assert f"\n1. **{words[0].upper()}{words[1:]}**: costs everybody 29 % of the time, throughout\n" in page
    alone = balance_page(balance(1, finding(cause)))
    sentence = words.removesuffix(" on rank 1")
    assert f"\n1. **{sentence[0].upper()}{sentence[1:]}**: costs 29 % of the time, throughout\n" in alone
    # Without evidence these words are the verdict.
    assert balance_text(balance(2, finding(cause, evidence=""))).startswith(f"Load balance: {words}; this costs")


def test_what_comes_and_goes_and_what_costs_nothing_is_said_so() -> None:
    page = balance_page(
        balance(2, finding("slow_logging", chronic=False), finding("memory_nearly_full", ranks=(0, 1), share=0.0))
    )
    assert "1. **Slow logging**: costs everybody 29 % of the time, now and then\n" in page
    assert "2. **Memory nearly full on ranks 0 and 1**: costs no time so far\n" in page


def test_memory_alone_is_no_cost() -> None:
    text = balance_text(balance(2, finding("memory_nearly_full", share=0.0, evidence="rank 1 holds 97 %", advice="")))
    assert text.splitlines()[0] == "Load balance: rank 1 holds 97 %"
    assert ">" not in text  # it is not slow


def test_the_console_names_the_other_findings_in_one_line() -> None:
    others = [finding(cause) for cause in CAUSES]
    lines = balance_text(balance(2, finding(), *others)).splitlines()
    (line,) = [line for line in lines if line.startswith("  Also: ")]
    assert line.startswith("  Also: slow data loading on rank 1, slow data loading, slow computation on rank 1")
    assert line.endswith(" ...")


def test_the_table_of_the_console_has_own_work_and_marks_slow_ranks() -> None:
    times = [
        rank_times(0, "node-a.cluster", data=2, forward=20.04, wait=1234.5),
        rank_times(1, "node-b.cluster", data=46, forward=20, wait=0),
    ]
    text = balance_text(balance(times, finding()))
    assert rows_of(text) == [
        ["rank", "host", "own work (ms)", "data", "forward", "wait"],
        ["0", "node-a", "22.0", "2.0", "20.0", "1,234"],
        ["1", "node-b", "66.0", "46.0", "20.0", "0.0"],
    ]
    assert [line[0] for line in text.splitlines()[-2:]] == [" ", ">"]
    assert len(set(map(len, text.splitlines()[-3:]))) == 1  # the columns stand under each other


def test_laps_that_have_no_room_are_one_column_and_none_of_the_time_is_lost() -> None:
    laps = (
        "data",
        "h2d",
        "forward",
        "backward",
        "wait",
        "optimizer",
        "callbacks",
        "logging",
        "validation",
        "checkpoint",
    )
    times = [rank_times(rank, f"h{rank}", **dict.fromkeys(laps, 10.0), extra=3.0) for rank in range(2)]
    head, first, _ = rows_of(balance_text(balance(times)))
    assert head[-1] == "other"
    assert float(first[2]) == 93  # own work
    assert sum(map(float, first[3:])) == pytest.approx(103)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 9, 16, 17, 64, 2048])
@pytest.mark.parametrize("host", ["a", "h" * 300, "gpu-node.with-a-long-name.example", "two words\nand | lines", ""])
def test_the_console_gets_few_and_short_lines(ranks: int, host: str) -> None:
    evidence = EVIDENCE.replace("host b", f"host {host}1") + "; it had 0.61 s of processor for each second of work" * 3
    times = [rank_times(rank, f"{host}{rank % 2}") for rank in range(ranks)]
    text = balance_text(balance(times, finding(evidence=evidence, advice=ADVICE * 5), finding("slow_logging")))
    lines = text.splitlines()
    assert len(lines) <= 13
    assert max(map(len, lines)) <= 100
    cost = "costs 29 % of the time" if ranks == 1 else "costs everybody 29 % of the time"
    assert cost in " ".join(text.split())
    assert lines[0].startswith("Load balance: rank 3")
    if ranks > 1:
        assert len(rows_of(text)) - 1 in ({ranks} if ranks <= 3 else {4, 6, 8})


def test_of_many_ranks_the_slowest_and_the_fastest_are_shown() -> None:
    times = [rank_times(rank, forward=100 + (rank * 7) % 40, wait=500 - rank) for rank in range(40)]
    slowest = [time.rank for time in sorted(times, key=lambda time: -time.seconds["forward"])]
    shown = [time.rank for time in shown_ranks(balance(times), 16)]
    assert shown == [*slowest[:8], *slowest[-8:]]
    text = balance_text(balance(times))
    assert [int(row[0]) for row in rows_of(text)[1:]] == [*slowest[:4], *slowest[-4:]]
    assert "  the 4 slowest and 4 fastest of 40 ranks:\n" in text
    page = balance_page(balance(times))
    assert [int(row[0]) for row in table_of(page)[1:]] == shown
    assert "The 8 slowest and the 8 fastest; 24 ranks are left out." in page


def test_a_rank_that_is_named_is_shown_among_many() -> None:
    times = [rank_times(rank, forward=100.0 + rank) for rank in range(40)]
    named = balance(times, finding(ranks=(20,)))
    assert shown_ranks(named, 16)[0].rank == 20
    assert table_of(balance_page(named))[1][0] == "**20 slow**"


def test_the_page_has_a_table_of_the_ranks() -> None:
    times = [
        rank_times(0, data=2, h2d=0.04, forward=20, wait=44, callbacks=0.06),
        replace(rank_times(1, data=46, h2d=0.03, forward=20), memory_bytes=512_000_000, cost=0.25, samples=7.5),
    ]
    page = balance_page(balance(times, finding()))
    assert table_of(page) == [
        ["rank", "own work", "data", "forward", "wait", "callbacks", "samples", "cost", "memory", "host", "device"],
        ["0", "22.1", "2.0", "20.0", "44.0", "0.1", "32", "1,605,632", "60.0 GB (43 %)", "a", "cuda:0"],
        ["**1 slow**", "66.0", "46.0", "20.0", "0.0", "0.0", "7.5", "0.25", "512.0 MB (43 %)", "a", "cuda:1"],
    ]


def test_times_by_class_are_parts_of_their_lap() -> None:
    times = [rank_times(rank, **{"forward": 20, "callbacks": 5, "callbacks:EMA": 4}) for rank in range(2)]
    head, first, _ = table_of(balance_page(balance(times)))
    assert head[:4] == ["rank", "own work", "forward", "callbacks"]
    assert first[:4] == ["0", "25.0", "20.0", "5.0"]


def test_a_finding_says_who_what_and_what_to_try() -> None:
    html = html_of(balance_page(balance(2, finding(), finding("slow_logging", ranks=()))))
    assert f"<li>Seen: {EVIDENCE}</li>" in html
    assert "<li>Who: rank 1 (a, cuda:1)</li>" in html
    assert "<li>Who: all ranks</li>" in html
    assert f"<li>Advice: {ADVICE}</li>" in html  # __getitem__ is not read as bold
    assert html.count("<ol>") == 1 and html.count("<ul>") == 2


def test_names_are_shown_as_they_are() -> None:
    host = "a|b_c_d*<b>*`x`\\|&amp;[y]"
    times = [rank_times(0, host), rank_times(1, "b")]
    page = balance_page(balance(times, finding(evidence=f"{host} is\n\n# slow")))
    assert {len(row) for row in table_of(page)} == {len(table_of(page)[0])}
    html = html_of(page)
    shown = "a|b_c_d*&lt;b&gt;*`x`\\|&amp;amp;[y]"
    assert f"<td>{shown}</td>" in html
    assert f"<li>Seen: {shown} is # slow</li>" in html
    assert "<h1>" not in html


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_times_that_are_no_times_break_nothing(value: float) -> None:
    strange = replace(rank_times(0, data=value, forward=value), samples=value, cost=value, memory_share=value)
    for ranks in ([strange], [strange, rank_times(1)], []):
        for findings in ((), (finding(share=value),)):
            given = replace(balance(ranks, *findings), step_seconds=value)
            assert balance_text(given).startswith("Load balance: ")
            assert html_of(balance_page(given)).startswith("<p><strong>Load balance: ")
    assert table_of(balance_page(balance([strange, rank_times(1)])))[1][1] == "0.0"


def test_no_steps_at_all_have_no_share_of_the_model() -> None:
    assert "balanced; ? % of the time in the model" in balance_text(balance([rank_times(0, forward=0.0)]))
