"""Whether LoadBalance names what keeps ranks waiting: `python benchmarks/load_balance.py` prints a confusion table.

a balanced fit on two gloo ranks, each on a core of its own: CPU seconds of a step
for each injection (balance_injections.py) and strength: a fit in which the step of the ranks it is on takes so many
  times as long
twenty balanced fits

A row is right where the verdict is the cause that was injected, and names its ranks. "silent" is one where nothing was
told because it costs less than the limit of its cause (diagnosis.py). "named" is the share that LoadBalance reports,
"true" what the injection costs by arithmetic.

A fit was disturbed where a rank was ready to run and had to wait for its core for a tenth of the time, because other
processes used it: then that rank is slower, or both are, and to say so is no error. What is wrong is listed below the
table, with these waits, and tried again. Run it on two cores that nobody else uses.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every process that is started
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.balance_injections import BALANCED, INJECTIONS, Injection, Sizes, sizes, train  # noqa: E402
from sanctuary_trainer.diagnosis import CAUSES, COMMUNICATION_LIMIT, CPU_COMPUTE_LIMIT, LIMIT  # noqa: E402
from tests.distributed.workers import Ranks, Zygote  # noqa: E402

STEPS = 61  # a row of each but the first; the last does not hold what falls on its end
STRENGTHS = (1.2, 1.5, 3.0)
LIMITS = {"slow_compute_on_rank": CPU_COMPUTE_LIMIT, "slow_communication": COMMUNICATION_LIMIT}
AGAIN = 2  # tries more of what is wrong
DISTURBED = 0.1  # of the time waited for a core; 2 to 6 % where nobody else uses it: gloo's own threads
CALL_SECONDS = 120.0
SHORT = ("data@", "data", "comp@", "work", "sampl", "commu", "callb", "log", "ckpt", "valid", "memory")  # of CAUSES


@dataclass(frozen=True)
class Found:
    """What LoadBalance said of a fit.

    Attributes:
        verdict, ranks, share: of its first finding.
        kept: by rank, the share of the time in which it was ready to run and had to wait for its core.
        seconds: that the fit took.
    """

    injection: Injection
    strength: float
    verdict: str
    ranks: tuple[int, ...]
    share: float
    kept: tuple[float, ...]
    seconds: float

    @property
    def outcome(self) -> str:
        if (self.verdict, self.ranks) == (self.injection.cause, self.injection.whom):
            return "right"
        small = self.injection.share(self.strength) < LIMITS.get(self.injection.cause, LIMIT)
        return "silent" if small and self.verdict == "balanced" else "WRONG"

    @property
    def disturbed(self) -> bool:
        meant = self.injection.on if self.injection.place == "core" else ()
        return any(kept >= DISTURBED for rank, kept in enumerate(self.kept) if rank not in meant)

    @property
    def text(self) -> str:
        kept = " and ".join(f"{share:.0%}" for share in self.kept)
        whom = f" of {list(self.ranks)}" if self.ranks else ""
        return f"{self.verdict}{whom} {self.share:.0%}; {kept} of the time waited for a core"


class Fits:
    """Makes fits on as many ranks as an injection wants."""

    def __init__(self, zygote: Zygote, strengths: Sequence[float]) -> None:
        self.ranks = {count: Ranks(zygote, count) for count in (1, 2)}
        self.sizes = dict(zip(strengths, self.ranks[1](sizes, strengths)[0], strict=True))
        self.base = max(each["cpu_step"] for each in self._train(BALANCED, 1.0, 0.0))
        self.checkpoint = 0.0  # seconds of one

    def __call__(self, injection: Injection, strength: float) -> Found:
        save_every = self._save_every(injection, strength) if injection.place == "checkpoint" else 0
        began = time.perf_counter()
        values = self._train(injection, strength, self.base, save_every)
        balance = values[0]["balance"]
        if any(each["balance"] != balance for each in values):
            raise AssertionError(f"{injection.title}: the ranks were told different balances")
        first = next(iter(balance["findings"]), {"ranks": (), "share": 0.0})
        return Found(
            injection,
            strength,
            balance["verdict"],
            tuple(first["ranks"]),
            first["share"],
            tuple(each["kept"] for each in values),
            time.perf_counter() - began,
        )

    def _save_every(self, injection: Injection, strength: float) -> int:
        """Steps between two checkpoints that cost what is wanted; the first time, one is measured."""
        if not self.checkpoint:
            self.checkpoint = self._train(injection, 1.0, self.base, STEPS // 8)[0]["saving"] / 8
        return max(round(self.checkpoint / ((strength - 1) * self.base)), 1)

    def _train(self, injection: Injection, strength: float, base: float, save_every: int = 0) -> Sequence[Any]:
        with tempfile.TemporaryDirectory() as folder:
            ranks = self.ranks[injection.ranks]
            settings = {"save_every": save_every, "sizes": self.sizes.get(strength, Sizes())}
            return ranks(train, injection, strength, base, STEPS, folder, **settings, timeout=CALL_SECONDS)


def print_row(found: Sequence[Found]) -> None:
    """One line of the table: of the fits of one injection and strength."""
    injection, strength = found[0].injection, found[0].strength
    verdicts = [each.verdict for each in found]
    counts = "".join(f"{verdicts.count(cause) or '.':>7}" for cause in (*CAUSES, "balanced"))
    title = injection.title if injection.cause == "balanced" else f"{injection.title} {strength:g}"
    shares = [each.share for each in found if each.verdict == injection.cause]
    named = f"{sum(shares) / len(shares):.0%}" if shares and injection.cause != "balanced" else ""
    true = "" if injection.cause == "balanced" else f"{injection.share(strength):.0%}"
    wrong = [each for each in found if each.outcome == "WRONG"]
    mark = "  WRONG" if wrong else "  silent" if any(each.outcome == "silent" for each in found) else ""
    mark += ", disturbed" if wrong and all(each.disturbed for each in wrong) else ""
    print(f"{title:36}{counts}{named:>8}{true:>6}{found[0].seconds:6.1f}{mark}", flush=True)


def print_wrong(wrong: Sequence[Found], fit: Fits) -> None:
    """What was wrong, and what comes of it when it is tried again."""
    print(f"\n{len(wrong)} wrong, each tried again:" if wrong else "\nnothing wrong")
    for found in wrong:
        print(f"  {found.injection.title} {found.strength:g}: {found.text}", flush=True)
        for _ in range(AGAIN):
            again = fit(found.injection, found.strength)
            print(f"    again {again.outcome}: {again.text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="fits of each row (default: 1)")
    parser.add_argument("--balanced", type=int, default=20, help="balanced fits (default: 20)")
    parser.add_argument("--strengths", type=float, nargs="+", default=STRENGTHS, help="default: 1.2 1.5 3")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="only injections with one of these words in their title"
    )
    options = parser.parse_args()
    began, all_found = time.perf_counter(), []
    with Zygote() as zygote:
        fit = Fits(zygote, options.strengths)
        print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}")
        print(f"{STEPS} steps, {1000 * fit.base:.0f} ms of computing each\n")
        heads = "".join(f"{short:>7}" for short in (*SHORT, "bal."))
        print(f"{'injected':36}{heads}{'named':>8}{'true':>6}{'s':>6}", flush=True)
        rows = [(each, s) for each in INJECTIONS for s in (options.strengths if each.place else (1.0,))]
        rows = [row for row in rows if any(word in row[0].title for word in options.only)]
        for injection, strength in rows:
            found = [fit(injection, strength) for _ in range(options.rounds)]
            all_found += found
            print_row(found)
        if options.balanced:
            found = [fit(BALANCED, 1.0) for _ in range(options.balanced)]
            all_found += found
            print_row(found)
        print_wrong([found for found in all_found if found.outcome == "WRONG"], fit)
    print_sum("all", all_found)
    print_sum("those that nothing disturbed", [found for found in all_found if not found.disturbed])
    print(f"{time.perf_counter() - began:.0f} s")


def print_sum(title: str, found: Sequence[Found]) -> None:
    outcomes = [each.outcome for each in found]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome.lower()}" for outcome in ("right", "silent", "WRONG"))
    print(f"{'':2}{title}: {len(found)}, of these {counts}")


if __name__ == "__main__":
    # Under its real name: functions are sent to the ranks by it.
    from benchmarks import load_balance

    load_balance.main()
