"""The load balance of a run in words: a page in Markdown for the tracker, and a few lines for the console.

Load balance: rank 1 (node-b, cuda:1) waits for data 41 % of each step, rank 0 2 %; this costs
  everybody 29 % of the time
  Advice: Raise num_workers from 2 to 6, or make samples cheaper.
  rank  host    own work (ms)  data  forward  backward  wait  optimizer
  0     node-a           65.2   2.0     21.0      39.0  46.0        3.2
> 1     node-b          111.2  46.0     21.2      40.0   0.0        4.0

A rank's own work is its step without waiting for others: under DDP all steps take equally long, and only this tells who
is slow. Times that are not finite or below zero count as nothing.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sanctuary_trainer import LAPS

if TYPE_CHECKING:
    from sanctuary_trainer import Balance, Finding, RankTimes

MOST_RANKS = 16  # on the page and in the picture; of more, those that are slow and those that are fast
MOST_LINES = 13  # in the console
MOST_ROWS = 8  # of them, one a rank
WIDTH = 100  # columns of the console
LONGEST_VERDICT = 210  # characters: two lines of the picture, three of the console
LONGEST_HOST = 16  # characters in the console
SEEN = 5e-5  # seconds: a lap below this on every rank has no column

_CAUSES = {
    "slow_data_on_rank": "slow data loading on {who}",
    "slow_data": "slow data loading",
    "slow_compute_on_rank": "slow computation on {who}",
    "uneven_work": "batches of unequal work",
    "uneven_samples": "unequal numbers of samples",
    "slow_communication": "slow communication between ranks",
    "slow_callbacks": "slow callbacks",
    "slow_logging": "slow logging",
    "slow_checkpoint": "slow checkpoints",
    "slow_validation": "long validation",
    "memory_nearly_full": "memory nearly full on {who}",
}


def verdict_text(balance: Balance) -> str:
    """The verdict in one sentence, without a full stop."""
    if balance.verdict == "balanced" or not balance.findings:
        model = percent(_model_share(balance))
        return f"Load balance: balanced; {model} of the time in the model, nothing is worth looking for"
    worst = balance.findings[0]
    evidence = _one_line(worst.evidence).rstrip(".;") or cause_text(worst, balance)
    for host in sorted({_one_line(times.host) for times in balance.ranks}, key=len, reverse=True):
        evidence = evidence.replace(host, shortened(host, LONGEST_HOST))
    cost = _cost(worst, balance) and f"; this {_cost(worst, balance)}"  # it is never what is cut
    return f"Load balance: {shortened(evidence, LONGEST_VERDICT - 14 - len(cost))}{cost}"


def cause_text(finding: Finding, balance: Balance) -> str:
    """A finding's cause in plain words, with the ranks where it concerns some alone."""
    words = _CAUSES.get(finding.cause, finding.cause.replace("_", " "))
    alone = len(balance.ranks) == 1
    return words.removesuffix(" on {who}") if alone else words.format(who=_ranks_text(finding.ranks))


def balance_text(balance: Balance) -> str:
    """The report for the console: verdict, advice and, of several ranks, a table of the slowest and the fastest.

    At most 13 lines of at most 100 columns; "> " stands before a rank that is slow.
    """
    lines = wrapped(verdict_text(balance), WIDTH, most=3)
    if balance.findings:
        advice = balance.findings[0].advice
        lines += wrapped(f"Advice: {advice}", WIDTH, "  ") if advice.strip() else []
        others = [cause_text(finding, balance) for finding in balance.findings[1:]]
        lines += wrapped(f"Also: {', '.join(others)}", WIDTH, "  ", most=1) if others else []
    if len(balance.ranks) == 1:
        laps = laps_of(balance.ranks[0])
        parts = [f"{lap_text(lap)} {milliseconds(laps[lap])}" for lap in _seen_laps(balance)]
        lines += wrapped(f"ms per step: {', '.join(parts)}", WIDTH, "  ") if parts else []
    elif balance.ranks:
        lines += _console_table(balance, MOST_LINES - len(lines))
    return "\n".join(lines)


def balance_page(balance: Balance) -> str:
    """The report as a page in Markdown: verdict, findings with evidence and advice, and a table of the ranks."""
    steps = f"Means over {balance.steps:,} {'step' if balance.steps == 1 else 'steps'}"
    step = f"a step takes {milliseconds(balance.step_seconds)} ms"
    model = f"{percent(_model_share(balance))} of the time is in the model (forward and backward)"
    parts = [f"**{_escaped(verdict_text(balance))}.**", f"{steps}; {step}; {model}."]
    if balance.findings:
        parts += ["### Findings", "\n".join(_finding_lines(balance))]
    if balance.ranks:
        parts += ["### Ranks", _page_note(balance), "\n".join(_page_table(balance))]
    return "\n\n".join(parts) + "\n"


def laps_of(times: RankTimes) -> dict[str, float]:
    """Seconds per step by lap, in the order of `LAPS`; others behind them. Times by class are parts of a lap."""
    known = {lap: times.seconds[lap] for lap in LAPS if lap in times.seconds}
    other = {lap: seconds for lap, seconds in times.seconds.items() if lap not in LAPS and ":" not in lap}
    return {lap: _finite(seconds) for lap, seconds in (known | other).items()}


def own_work(times: RankTimes) -> float:
    """Seconds of a step without waiting for others."""
    return sum(seconds for lap, seconds in laps_of(times).items() if lap != "wait")


def slow_ranks(balance: Balance) -> set[int]:
    """The ranks that a finding names, but for those that are only short of memory."""
    return {rank for finding in balance.findings if finding.cause != "memory_nearly_full" for rank in finding.ranks}


def shown_ranks(balance: Balance, most: int) -> list[RankTimes]:
    """All ranks in their order, or of more than `most` one half slowest (first) and one half fastest by own work.

    Slow ranks come before others: a report that names a rank shows it.
    """
    ranks = sorted(balance.ranks, key=lambda times: times.rank)
    if len(ranks) <= most:
        return ranks
    slow = slow_ranks(balance)
    ranks.sort(key=lambda times: (times.rank not in slow, -own_work(times)))
    half = most // 2
    return ranks[:half] + ranks[-half:]


def short_hosts(balance: Balance) -> dict[str, str]:
    """A text for each host, without its domain where that leaves them different; none where there is but one."""
    hosts = {times.host: _one_line(times.host) for times in balance.ranks}
    if len(hosts) < 2:
        return {}
    bare = {host: text.split(".")[0] for host, text in hosts.items()}
    return bare if len(set(bare.values())) == len(hosts) and all(bare.values()) else hosts


def lap_text(lap: str) -> str:
    return "to device" if lap == "h2d" else lap


def milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return "?" if not math.isfinite(value) else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if math.isfinite(share) else "? %"


def shortened(text: str, longest: int) -> str:
    """Text with its middle left out where it is too long: hosts of one cluster differ at their ends."""
    if len(text) <= longest:
        return text
    half = (longest - 3) // 2
    return f"{text[: longest - 3 - half]}...{text[-half:]}"


def wrapped(text: str, columns: int, indent: str = "", most: int = 2) -> list[str]:
    """At most so many lines of text; a number stays beside its percent sign."""
    wrapper = textwrap.TextWrapper(columns, indent, indent + "  ", max_lines=most, placeholder=" ...")
    return [line.replace("\xa0", " ") for line in wrapper.wrap(text.replace(" %", "\xa0%"))]


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _model_share(balance: Balance) -> float:
    laps = [laps_of(times) for times in balance.ranks]
    model = sum(rank.get("forward", 0.0) + rank.get("backward", 0.0) for rank in laps)
    total = sum(sum(rank.values()) for rank in laps)
    return model / total if total else math.nan


def _cost(finding: Finding, balance: Balance) -> str:
    """What a finding costs, or nothing where it costs no time, such as memory that is still enough."""
    if finding.share < 0.005:
        return ""
    return f"costs{'' if len(balance.ranks) == 1 else ' everybody'} {percent(finding.share)} of the time"


def _ranks_text(ranks: Sequence[int]) -> str:
    if not ranks:
        return "all ranks"
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > 6:
        names[5:] = [f"{len(names) - 5} more"]
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _seen_laps(balance: Balance) -> dict[str, float]:
    """The laps that took some time, in the order of `LAPS`, each with the most seconds that a rank spent on it."""
    most = dict.fromkeys(LAPS, 0.0)
    for times in balance.ranks:
        most |= {lap: max(most.get(lap, 0.0), seconds) for lap, seconds in laps_of(times).items()}
    return {lap: seconds for lap, seconds in most.items() if seconds >= SEEN}


def _console_table(balance: Balance, most_lines: int) -> list[str]:
    """A table of ranks of so many lines; the laps that take least are one column where all have no room."""
    shown, title, ranks = shown_ranks(balance, min(MOST_ROWS, most_lines - 1)), [], len(balance.ranks)
    if len(shown) < ranks:
        shown = shown_ranks(balance, min(MOST_ROWS, most_lines - 2))
        title = [f"  the {len(shown) // 2} slowest and {len(shown) // 2} fastest of {ranks:,} ranks:"]
    laps = _seen_laps(balance)
    by_size = sorted(laps, key=lambda lap: -laps[lap])
    rows: list[str] = []
    for kept in range(len(laps), -1, -1):
        rows = _console_rows(balance, shown, [lap for lap in laps if lap in by_size[:kept]], kept < len(laps))
        if max(map(len, rows)) <= WIDTH:
            break
    return [*title, *rows]


def _console_rows(balance: Balance, shown: Sequence[RankTimes], columns: Sequence[str], other: bool) -> list[str]:
    hosts, slow = short_hosts(balance), slow_ranks(balance)
    texts = ["rank", "host"] if hosts else ["rank"]  # these begin at the left
    table = [[*texts, "own work (ms)", *map(lap_text, columns), *(["other"] if other else [])]]
    for times in shown:
        laps = laps_of(times)
        rest = sum(laps.values()) - sum(laps.get(lap, 0.0) for lap in columns)
        numbers = [own_work(times), *(laps.get(lap, 0.0) for lap in columns), *([rest] if other else [])]
        host = [shortened(hosts[times.host], LONGEST_HOST)] if hosts else []
        table.append([str(times.rank), *host, *map(milliseconds, numbers)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for mark, row in zip(["  ", *("> " if times.rank in slow else "  " for times in shown)], table, strict=True):
        cells = [row[i].ljust(w) if i < len(texts) else row[i].rjust(w) for i, w in enumerate(widths)]
        lines.append(mark + "  ".join(cells))
    return lines


def _finding_lines(balance: Balance) -> list[str]:
    devices = {times.rank: f"rank {times.rank} ({times.host}, {times.device})" for times in balance.ranks}
    lines = []
    for place, finding in enumerate(balance.findings, 1):
        cause = cause_text(finding, balance)
        who = [devices.get(rank, f"rank {rank}") for rank in finding.ranks[:MOST_RANKS]]
        more = len(finding.ranks) - len(who)
        lines.append(f"{place}. **{_escaped(cause[:1].upper() + cause[1:])}**: {_cost_and_when(finding, balance)}")
        concerned = ", ".join(who) + (f" and {more} more" if more else "") or "all ranks"
        for label, text in (("Who", concerned), ("Seen", finding.evidence), ("Advice", finding.advice)):
            if text.strip() and (label != "Who" or len(balance.ranks) > 1):
                lines.append(f"    - {label}: {_escaped(text)}")
    return lines


def _cost_and_when(finding: Finding, balance: Balance) -> str:
    cost = _cost(finding, balance)
    return f"{cost}, {'throughout' if finding.chronic else 'now and then'}" if cost else "costs no time so far"


def _page_note(balance: Balance) -> str:
    note = "Milliseconds per step."
    if len(balance.ranks) > 1:
        note += " Own work is the step without waiting for others."
    if len(balance.ranks) > MOST_RANKS:
        half = MOST_RANKS // 2
        note += f" The {half} slowest and the {half} fastest; {len(balance.ranks) - 2 * half:,} ranks are left out."
    return note


def _page_table(balance: Balance) -> list[str]:
    laps, slow = _seen_laps(balance), slow_ranks(balance)
    head = ["rank", "own work", *map(lap_text, laps), "samples", "cost", "memory", "host", "device"]
    rows = [head, ["---:"] * (len(head) - 2) + ["---"] * 2]
    for times in shown_ranks(balance, MOST_RANKS):
        seconds = laps_of(times)
        rank = f"**{times.rank} slow**" if times.rank in slow else str(times.rank)
        numbers = [milliseconds(own_work(times)), *(milliseconds(seconds.get(lap, 0.0)) for lap in laps)]
        work = [_quantity(times.samples), _quantity(times.cost), _memory(times)]
        rows.append([rank, *numbers, *work, _escaped(times.host), _escaped(times.device)])
    return [f"| {' | '.join(row)} |" for row in rows]


def _quantity(value: float) -> str:
    return "?" if not math.isfinite(value) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _memory(times: RankTimes) -> str:
    size, unit = (times.memory_bytes / 1e9, "GB") if times.memory_bytes >= 1e9 else (times.memory_bytes / 1e6, "MB")
    return f"{size:.1f} {unit} ({percent(times.memory_share)})"


def _escaped(text: str) -> str:
    """Text as it is: one line, nothing of it read as Markdown or HTML."""
    plain = _one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", plain)
