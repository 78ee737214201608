"""Why ranks wait: from the seconds of each step, lap and rank to the causes, what they cost, and what to try first.

A step lasts until the slowest rank has come to the sync and the gradients are summed:

    time of a step = the longest own work of any rank (all laps but "wait") + communication that nothing hides
    communication  = the shortest wait of any rank: the slowest one waits for nothing else

So a cause costs everybody what the step would be shorter without it, and this is reckoned step by step:

    lost = longest own work - longest of (own work - what the cause adds to each rank's)

    computing         is smoothed, but for what work explains: the noise of single steps is nobody's
    uneven work       what a batch is above the ranks' mean in that step, at the seconds that work was found to take
    a slow rank       what it takes longer than the rank in the middle (of two the faster)
    all ranks         the rest of their data, callbacks, ...: what a step would be shorter without any

The thresholds stand below, each with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sanctuary_trainer import advice
from sanctuary_trainer.clock import LAPS

Floats = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.bool_]  # (R,) whether it belongs to them

CAUSES = (
    "slow_data_on_rank",
    "slow_data",
    "slow_compute_on_rank",
    "uneven_work",
    "uneven_samples",
    "slow_communication",
    "slow_callbacks",
    "slow_logging",
    "slow_checkpoint",
    "slow_validation",
    "memory_nearly_full",
)

# Of everybody's time: below a tenth, looking for the cause costs more than it brings.
LIMIT = 0.10
# Two processes that compute the same, each on its own core, differ by up to 19 % for as long as they live, by where
# memory happens to lie and who shares the machine underneath (60 balanced runs, benchmarks/load_balance.py). Not so
# where the processor's time tells that another process had a core.
CPU_COMPUTE_LIMIT = 0.20
# Some communication is needed, and what there is to try halves it at best; on two cores that others use too, a message
# waits for its turn, 5 to 7 % of a balanced step of 50 ms (benchmarks/load_balance.py).
COMMUNICATION_LIMIT = 0.15
# Validation is wanted; only where it takes a third of the time is it worth a word.
VALIDATION_LIMIT = 1 / 3
# What the allocator holds in pieces that fit nobody, and the libraries' own memory, take up to this much.
MEMORY_LIMIT = 0.92
# Parts of a run that are looked at one by one. Steps in a row have their noise in common (another job ran for a
# second), so that parts tell what lasts, and single steps do not.
PARTS, PART_STEPS = 8, 25  # so many at least; in a long run each has so many steps
# A rank is slower than the others when the parts agree on it: by three times the standard error of their mean.
STANDARD_ERRORS = 3.0
# A rank has less of its processor than the others: noise is under a tenth, a job of equal weight takes a half.
LESS_PROCESSOR = 0.85
OF_ONE = 0.75  # of what unequal work costs stands on ranks that have more on the whole; of two in turn a half
# A step in twenty may be an outlier: where seconds are compared with work, it counts as the next slowest.
OUTLIERS = 0.95

_KINDS = {
    "data": ("data", "h2d"),
    "compute": ("forward", "backward", "optimizer"),
    "callbacks": ("callbacks",),
    "logging": ("logging",),
    "checkpoint": ("checkpoint",),
    "validation": ("validation",),
}
# What takes longer for more work.
_OF_WORK = ("data", "compute")
# What falls on some steps: these are what is to be counted. In the rest, which each step has, a part of the run that is
# unlike all others (the machine paused) counts for nothing.
RARE = ("callbacks", "logging", "checkpoint", "validation")


@dataclass(frozen=True)
class Finding:
    """One cause.

    Attributes:
        cause: one of `CAUSES`.
        ranks: whom it concerns; () for all of them, or for ranks in turn.
        share: of everybody's time that it costs, in [0, 1]; 0 where it costs nothing yet.
        chronic: whether it goes on; False: now and then, or no more.
        evidence: what was measured, as a sentence.
        advice: the first thing to try.
    """

    cause: str
    ranks: tuple[int, ...]
    share: float
    chronic: bool
    evidence: str
    advice: str


@dataclass(frozen=True)
class Times:
    """K steps of R ranks.

    Attributes:
        laps: (K, R, len(LAPS)) seconds.
        samples, cost: (K, R).
        processor: (R,) seconds of processor for a second of own work; None where it is not known.
        classes: by rank, seconds of a step: "callbacks:EMA". Over the whole run, also where the steps are its last.
        memory: by rank, the share of what there is.
        places: by rank, host and device.
        workers: by rank, processes that read; None where it is not known.
        cores: by rank, those it may use.
    """

    laps: Floats
    samples: Floats
    cost: Floats
    processor: Floats | None
    classes: Sequence[dict[str, float]]
    memory: Sequence[float]
    places: Sequence[tuple[str, str]]
    workers: Sequence[int | None]
    cores: Sequence[int]


def diagnose(times: Times) -> list[Finding]:
    """What costs everybody a tenth of the time or more, the most costly first; then ranks whose memory is full."""
    findings = []
    if len(times.laps) and (steps := _Steps(times)).step.any():
        findings = [*steps.of_work(), *steps.of_slow_ranks(), *steps.of_all(), *steps.of_communication()]
    return [*sorted(findings, key=lambda finding: -finding.share), *_memory(times)]


class _Steps:
    """The measured steps, with what all the rules ask of them."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.ranks = times.laps.shape[1]
        self.kinds = {kind: times.laps[:, :, [LAPS.index(lap) for lap in laps]].sum(2) for kind, laps in _KINDS.items()}
        self.wait = times.laps[:, :, LAPS.index("wait")]
        self.step = sum(self.kinds.values(), np.zeros_like(self.wait)).max(1) + self.wait.min(1)  # (K,)
        self.mean = {kind: each.mean(0) for kind, each in self.kinds.items()}  # (R,)
        self.work = self._work()
        uneven = {kind: self._uneven(self.kinds[kind]) for kind in _OF_WORK}  # (K, R)
        self.kinds["compute"] = _smooth(self.kinds["compute"] - uneven["compute"]) + uneven["compute"]
        self.own = sum(self.kinds.values(), np.zeros_like(self.wait))  # (K, R)
        self.rare = sum((self.kinds[kind] for kind in RARE), np.zeros_like(self.wait)).max(1)  # (K,)
        self.uneven = sum(uneven.values(), np.zeros_like(self.wait))
        self.on_ranks = {kind: self._more(kind, self.kinds[kind] - uneven.get(kind, 0.0)) for kind in _KINDS}  # (K, R)
        total, even = sum(self.on_ranks.values(), np.zeros_like(self.wait)), self.own - self.uneven
        slowest = even == even.max(1, keepdims=True)
        lost = _lost(even, total) / np.maximum((total * slowest).sum(1), np.finfo(float).tiny)
        # What the slow ranks cost together goes to the causes as the slowest rank of each step has them.
        self.lost = {kind: lost * (more * slowest).sum(1) for kind, more in self.on_ranks.items()}  # (K,)

    # What each cause adds to the ranks' own work

    def _work(self) -> Floats:
        """(K, R): how much work the batches were, of mean 1; 1 everywhere where that is not known."""
        for work in (self.times.cost, self.times.samples):
            if np.isfinite(work).all() and (work.sum(1) > 0).all() and np.ptp(work):
                relative: Floats = work / work.mean()
                return relative
        return np.ones_like(self.times.cost)

    def _uneven(self, seconds: Floats) -> Floats:
        """(K, R): what dealing all work evenly would take off each rank (below 0: put on it) in each step.

        How long work takes tells a regression, which knows that some of a step does not depend on it; but not longer
        than by proportion at the rank in the middle: what a slow rank takes more is not its work's fault.
        """
        work, capped = self.work, _capped(seconds)
        if not (variance := float(work.var())):
            return np.zeros_like(seconds)
        slope = float(((work - 1) * (capped - capped.mean())).mean()) / variance
        some = work.mean(0) > 0
        slope = max(min(slope, float(_middle(capped.mean(0)[some] / work.mean(0)[some]))), 0.0)
        more: Floats = slope * (work - work.mean(1, keepdims=True))
        return more

    def _more(self, kind: str, seconds: Floats) -> Floats:
        """(K, R): what the slow ranks take longer than the rank in the middle; of computing, if it is more than noise.

        seconds: (K, R) but for what uneven work explains.
        """
        if kind != "compute":
            more: Floats = (seconds - _middle(seconds)[:, None]).clip(0)
            slow = _slow(more.mean(0))
            if kind == "data" and (slow | self._behind(seconds)).all():
                return np.zeros_like(seconds)  # no rank would be faster than the slow ones for long
            return more * (slow & (not slow.all()))
        usual = _usual(seconds)
        slow = _slow((usual - _middle(usual)).clip(0))
        if not (slow.any() and _lasts(seconds[:, slow].mean(1) - seconds[:, ~slow].mean(1))):
            return np.zeros_like(seconds)
        return (seconds - _middle(usual)).clip(0) * slow

    def _behind(self, data: Floats) -> Ranks:
        """The ranks whose workers are at their limit, though a rank that waits for another gives them time to catch up.

        Workers that keep up have a batch ready; where they do not, it shows in some steps.
        """
        now_and_then = _high(data) > LIMIT * self.step.mean()
        behind: Ranks = np.array([bool(workers) for workers in self.times.workers]) & now_and_then
        return behind

    # What is told

    def of_work(self) -> list[Finding]:
        """Batches of unlike size: always larger on some ranks, or now on this rank and now on that."""
        lost = _lost(self.own, self.uneven)
        if self._share(lost, "compute") < LIMIT:
            return []
        slow = _slow(self.uneven.mean(0).clip(0))
        if _lost(self.own, self.uneven.clip(0) * slow).mean() < OF_ONE * lost.mean():
            more = advice.percent(float((self.work.max(1) / self.work.mean(1)).mean()) - 1)
            evidence = f"the ranks take turns at the largest batch, which is {more} more work than their mean"
            return [self._finding("uneven_work", (), "compute", lost, evidence, advice.DEAL_BY_COST)]
        samples, cost = (_ratio(each.mean(0), slow) for each in (self.times.samples, self.times.cost))
        who = f"{self._who(slow)} {'has' if slow.sum() == 1 else 'have'}"
        if samples - 1 >= (cost - 1) / 2:
            mean = self.times.samples.mean(0)
            evidence = f"{who} {mean[slow].mean():.4g} samples in a step, the others {mean[~slow].mean():.4g}"
            return [self._finding("uneven_samples", slow, "compute", lost, evidence, advice.DEAL_EVENLY)]
        evidence = f"{who} {advice.percent(cost - 1)} more work in a step than the others (VisionTask.cost)"
        return [self._finding("uneven_work", slow, "compute", lost, evidence, advice.DEAL_BY_COST)]

    def of_slow_ranks(self) -> list[Finding]:
        """One rank, or a few, that the others wait for."""
        slow = {kind: more.max(0) > 0 for kind, more in self.on_ranks.items()}
        limits = dict.fromkeys(slow, LIMIT)
        if all(device == "cpu" for _, device in self.times.places) and not self._short_of_processor(slow["compute"]):
            limits["compute"] = CPU_COMPUTE_LIMIT
        return [
            self._slow_rank(kind, slow[kind], lost)
            for kind, lost in self.lost.items()
            if self._share(lost, kind) >= limits[kind]
        ]

    def _slow_rank(self, kind: str, slow: Ranks, lost: Floats) -> Finding:
        seconds, step, first = self.mean[kind], float(self.step.mean()), int(np.argmax(slow))
        evidence = (
            f"{self._who(slow)} {advice.spends(kind, int(slow.sum()), seconds[slow].mean() / step)}, "
            f"the others {advice.percent(seconds[~slow].mean() / step)}"
        )
        workers, cores = self.times.workers[first], self.times.cores[first]
        if kind == "data":
            rest = float(self.own.mean(0)[~slow].max())
            advised = advice.read_faster(workers, cores, float(seconds[first]), rest)
            return self._finding("slow_data_on_rank", slow, kind, lost, evidence, advised)
        if kind == "compute":
            shortage = self._short_of_processor(slow)
            advised = advice.free_the_cores(workers, cores) if shortage else advice.LOOK_AT_THE_DEVICE
            return self._finding("slow_compute_on_rank", slow, kind, lost, evidence + shortage, advised)
        return self._of_kind(kind, slow, lost, evidence, first)

    def _short_of_processor(self, slow: Ranks) -> str:
        """What tells that other processes have the cores of these ranks; "" where nothing does."""
        processor = self.times.processor
        if processor is None or not np.isfinite(processor).all() or not slow.any():
            return ""
        had, usual = float(processor[slow].mean()), float(processor[~slow].mean())
        told = f"; it had {had:.2f} s of processor for each second of work, the others {usual:.2f}"
        return told if had < LESS_PROCESSOR * usual else ""

    def of_all(self) -> list[Finding]:
        """What every rank does beside computing, but for what is told of slow ones."""
        found = []
        for kind, seconds in self.kinds.items():
            lost = _lost(self.own, seconds) - self.lost[kind]
            share = self._share(lost, kind)
            if kind == "compute" or share < (VALIDATION_LIMIT if kind == "validation" else LIMIT):
                continue
            evidence = f"{'every rank' if self.ranks > 1 else 'the process'} {advice.spends(kind, 1, share)}"
            if kind == "data":
                data, rest = float(lost.mean()), float((self.step - lost).mean())
                advised = advice.read_faster(self.times.workers[0], self.times.cores[0], data, rest)
                found.append(self._finding("slow_data", (), kind, lost, evidence, advised))
            else:
                found.append(self._of_kind(kind, (), lost, evidence, 0))
        return found

    def of_communication(self) -> list[Finding]:
        """What the slowest rank waits for, too."""
        lost = self.wait.min(1)
        if self.ranks == 1 or (share := self._share(lost, "wait")) < COMMUNICATION_LIMIT:
            return []
        evidence = f"every rank waits {advice.percent(share)} of each step for communication, the slowest one included"
        return [self._finding("slow_communication", (), "wait", lost, evidence, advice.COMMUNICATE_LESS)]

    def _of_kind(self, kind: str, slow: Ranks | tuple[()], lost: Floats, evidence: str, first: int) -> Finding:
        """Of callbacks, logging, checkpoint or validation, with the class that takes most of it on rank `first`."""
        name = advice.most_of(kind, self.times.classes[first], float(self.mean[kind][first]))
        evidence += f", most of it in {name}" if name else ""
        return self._finding(f"slow_{kind}", slow, kind, lost, evidence, advice.spend_less(kind, name))

    def _share(self, lost: Floats, kind: str) -> float:
        """Of everybody's time, where each step loses so many of (K,) seconds."""
        if kind in RARE:
            mean, seconds = lost.mean(), self.step.mean()
        else:  # what falls on some steps is everybody's time, too, however few parts of the run have it
            mean, seconds = _usual(lost), _usual(self.step - self.rare) + self.rare.mean()
        return float(np.clip(mean / seconds, 0, 1)) if seconds else 0.0

    def _finding(
        self, cause: str, slow: Ranks | tuple[()], kind: str, lost: Floats, evidence: str, advised: str
    ) -> Finding:
        """lost: (K,) seconds of each step; it goes on where the latest parts of the run, or half of them, lose some."""
        late, late_steps = (_parts(each, PARTS)[-PARTS // 2 :] for each in (lost, self.step))
        chronic = bool(np.mean(late > LIMIT / 2 * late_steps) >= 0.5)
        ranks = tuple(np.flatnonzero(slow).tolist())
        return Finding(cause, ranks, self._share(lost, kind), chronic, evidence, advised)

    def _who(self, slow: Ranks) -> str:
        """As in: rank 3 (host b, cuda:3); of several ranks those that fit, and their hosts."""
        ranks = np.flatnonzero(slow).tolist()
        names = ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
        places = [self.times.places[rank] for rank in ranks]
        if len(ranks) == 1:
            return f"rank {names} (host {places[0][0]}, {places[0][1]})"
        hosts = sorted({host for host, _ in places})
        return f"ranks {names} (host{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:3])})"


def _memory(times: Times) -> list[Finding]:
    full = [rank for rank, share in enumerate(times.memory) if share >= MEMORY_LIMIT]
    if not full:
        return []
    worst = max(full, key=lambda rank: times.memory[rank])
    host, device = times.places[worst]
    others = [share for rank, share in enumerate(times.memory) if rank not in full]
    evidence = f"rank {worst} (host {host}, {device}) holds {advice.percent(times.memory[worst])} of its memory"
    evidence += f", the others at most {advice.percent(max(others))}" if others else ""
    return [Finding("memory_nearly_full", tuple(full), 0.0, True, evidence, advice.SAVE_MEMORY)]


def _lost(own: Floats, added: Floats) -> Floats:
    """(K,): what each step would be shorter without the (K, R) that a cause adds to the ranks' own work."""
    lost: Floats = own.max(1) - (own - added).max(1)
    return lost


def _middle(values: Floats) -> Floats:
    """That of the rank in the middle, along the last axis; of an even number of ranks the lower one."""
    middle: Floats = np.sort(values, axis=-1)[..., (values.shape[-1] - 1) // 2]
    return middle


def _slow(more: Floats) -> Ranks:
    """The ranks that have half or more of what the slowest has of (R,) seconds."""
    slow: Ranks = (more > 0) & (more >= more.max() / 2)
    return slow


def _parts(values: Floats, number: int | None = None) -> Floats:
    """The means over consecutive parts of the steps, along the first axis."""
    number = min(number or max(PARTS, len(values) // PART_STEPS), len(values))
    return np.array([part.mean(0) for part in np.array_split(values, number)])


def _alike(values: Floats) -> Floats:
    """The parts in order of size, without the two that are least like the others."""
    parts = np.sort(_parts(values), axis=0)
    return parts[1:-1] if len(parts) >= PARTS else parts


def _smooth(values: Floats) -> Floats:
    """Each step as the mean of its part of the run."""
    parts = _parts(values)
    return np.repeat(parts, [len(part) for part in np.array_split(values, len(parts))], axis=0)


def _usual(values: Floats) -> Floats:
    """The mean over the steps, along the first axis, but for a part that is unlike the others."""
    usual: Floats = _alike(values).mean(0)
    return usual


def _lasts(more: Floats) -> bool:
    """Whether (K,) is above zero by more than its noise."""
    parts, alike = np.sort(_parts(more)), _alike(more)
    if len(parts) == 1:
        return False
    # The standard error of a mean without its extremes (Tukey and McLaughlin, 1963): they count as their neighbours do.
    spread = float(parts.clip(alike[0], alike[-1]).std(ddof=1)) * len(parts) / len(alike)
    return float(alike.mean()) > STANDARD_ERRORS * spread / math.sqrt(len(parts))


def _capped(seconds: Floats) -> Floats:
    """(K, R) with each rank's outliers brought down to its next slowest steps."""
    return np.minimum(seconds, _high(seconds))


def _high(seconds: Floats) -> Floats:
    """(R,): the `OUTLIERS` quantile of each rank. numpy's own imports more of numpy at its first call, in the run."""
    high: Floats = np.sort(seconds, axis=0)[math.ceil(OUTLIERS * (len(seconds) - 1))]
    return high


def _ratio(mean: Floats, slow: Ranks) -> float:
    usual = float(mean[~slow].mean())
    return float(mean[slow].mean()) / usual if usual > 0 else 1.0
