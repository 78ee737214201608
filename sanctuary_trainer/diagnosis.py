"""Why ranks wait: from the seconds of each step, lap and rank to the causes, what they cost, and what to try first.

A step lasts until the slowest rank has come to the sync and the gradients are summed:

    time of a step = the longest own work of any rank (all laps but "wait") + communication that nothing hides
    own work       = what every rank must do + what some rank does more than the others
    communication  = the shortest wait of any rank: the slowest one waits for nothing else

So a cause costs everybody what the step would be shorter without it. The threshold for telling is `LIMIT`; see there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sanctuary_trainer.clock import LAPS

Floats = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.intp]

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

# Of everybody's time. Two processes on two shared cores differ by up to 6 % in runs that are balanced
# (benchmarks/load_balance.py); below a tenth, looking for the cause costs more than it brings.
LIMIT = 0.10
# Validation is wanted; only where it takes a third of the time is it worth a word.
VALIDATION_LIMIT = 1 / 3
# What the allocator holds in pieces that fit nobody, and the libraries' own memory, take up to this much.
MEMORY_LIMIT = 0.92
# Work or samples that differ less are what any shuffled data has.
UNEVEN = 1.05
# A cause is chronic while the mean share of the last steps or so is half of the limit.
CHRONIC_STEPS = 20
# One step in twenty may be an outlier (the machine paused), and counts as much as the next slowest.
OUTLIERS = 0.95

_KINDS = {
    "data": ("data", "h2d"),
    "compute": ("forward", "backward", "optimizer"),
    "callbacks": ("callbacks",),
    "logging": ("logging",),
    "checkpoint": ("checkpoint",),
    "validation": ("validation",),
}
# What happens in each step. The rest falls on some steps, so that an outlier is what is to be counted.
_STEADY = ("data", "compute")


@dataclass(frozen=True)
class Finding:
    """One cause.

    Attributes:
        cause: one of `CAUSES`.
        ranks: whom it concerns; () for all of them, or for ranks in turn.
        share: of everybody's time that it costs, in [0, 1]; 0 where it costs nothing yet.
        chronic: whether it still goes on; False: now and then.
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
        classes: by rank, seconds of "callbacks:EMA" over the run.
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
    if len(times.laps):
        steps = _Steps(times)
        findings = [*steps.of_slow_ranks(), *steps.of_all(), *steps.in_turn()]
    return [*sorted(findings, key=lambda finding: -finding.share), *_memory(times)]


class _Steps:
    """The measured steps, with what all the rules ask of them."""

    def __init__(self, times: Times) -> None:
        self.times = times
        by_kind = {kind: times.laps[:, :, [LAPS.index(lap) for lap in laps]].sum(2) for kind, laps in _KINDS.items()}
        self.kinds = {kind: _capped(each) if kind in _STEADY else each for kind, each in by_kind.items()}  # (K, R)
        self.wait = _capped(times.laps[:, :, LAPS.index("wait")])
        self.own = sum(self.kinds.values(), np.zeros_like(self.wait))
        self.step = self.own.max(1) + self.wait.min(1)  # (K,)
        self.mean = {kind: each.mean(0) for kind, each in self.kinds.items()}  # (R,)
        self.ranks = times.laps.shape[1]

    def of_slow_ranks(self) -> list[Finding]:
        """One rank, or a few, that the others wait for: what they do more of, and whether they have more to do."""
        own = self.own.mean(0)
        order = np.argsort(-own)
        gaps = [own[order[size - 1]] - own[order[size]] for size in range(1, self.ranks // 2 + 1)]
        if not gaps:
            return []
        size = int(np.argmax(gaps)) + 1
        slow, others = np.sort(order[:size]), np.sort(order[size:])
        gain = (own[order[0]] - own[order[size]]) / self.step.mean()
        if gain < LIMIT:
            return []
        more = {kind: max(float(mean[slow].mean() - mean[others].mean()), 0.0) for kind, mean in self.mean.items()}
        if not (total := sum(more.values())):
            return []
        shares = {kind: gain * each / total for kind, each in more.items()}
        uneven = self._uneven(slow, others, more, shares)
        telling = [kind for kind, share in shares.items() if share >= LIMIT]
        if uneven is not None:
            return [uneven if telling else replace(uneven, share=gain), *self._slow_in(telling, slow, others, shares)]
        if not telling:  # everything is slower there
            telling = [max(shares, key=lambda kind: shares[kind])]
            shares[telling[0]] = gain
        return self._slow_in(telling, slow, others, shares)

    def _uneven(self, slow: Ranks, others: Ranks, more: dict[str, float], shares: dict[str, float]) -> Finding | None:
        """Of what the slow ranks do more, take out of `shares` what their larger batches explain."""
        samples, cost = (_ratio(each.mean(0), slow, others) for each in (self.times.samples, self.times.cost))
        ratio = max(samples, cost)
        if ratio < UNEVEN or not more["compute"]:
            return None
        explained = {k: min(float(self.mean[k][others].mean()) * (ratio - 1), more[k]) for k in _STEADY}
        if explained["compute"] < more["compute"] / 2:
            return None
        share = 0.0
        for kind, seconds in explained.items():
            part = shares[kind] * seconds / more[kind] if more[kind] else 0.0
            shares[kind] -= part
            share += part
        cause, who = "uneven_work", f"{self._who(slow)} {_has(slow)}"
        evidence = f"{who} {cost - 1:.0%} more work in a step than the others (VisionTask.cost)"
        advice = DEAL_BY_COST
        if samples >= UNEVEN and samples - 1 >= (cost - 1) / 2:
            mean = self.times.samples.mean(0)
            cause = "uneven_samples"
            evidence = f"{who} {mean[slow].mean():.4g} samples in a step, the others {mean[others].mean():.4g}"
            advice = "Give every rank as many samples: the same batch_size on all, or shard_data=True."
        return self._finding(cause, slow, share, _times(self.kinds["compute"], slow, others), evidence, advice)

    def _slow_in(self, kinds: Sequence[str], slow: Ranks, others: Ranks, shares: dict[str, float]) -> list[Finding]:
        return [self._slow(kind, slow, others, shares[kind]) for kind in kinds]

    def _slow(self, kind: str, slow: Ranks, others: Ranks, share: float) -> Finding:
        seconds, step = self.mean[kind], float(self.step.mean())
        evidence = (
            f"{self._who(slow)} {_spend(kind, len(slow))} {seconds[slow].mean() / step:.0%} of each step, "
            f"the others {seconds[others].mean() / step:.0%}"
        )
        if kind == "data":
            cause = "slow_data_on_rank"
            advice = self._data_advice(int(slow[0]), float(self.own.mean(0)[others].max()))
        elif kind == "compute":
            cause = "slow_compute_on_rank"
            more, advice = self._compute_advice(slow, others)
            evidence += more
        else:
            cause = f"slow_{kind}"
            name, advice = self._class_advice(kind, int(slow[0]))
            evidence += f", most of it in {name}" if name else ""
        return self._finding(cause, slow, share, _times(self.kinds[kind], slow, others), evidence, advice)

    def of_all(self) -> list[Finding]:
        """What every rank does: the rank in the middle (of two the faster) stands for all."""
        found, step = [], self.step.mean()
        for kind, seconds in self.kinds.items():
            if kind == "compute":
                continue
            of_all = np.sort(seconds, axis=1)[:, (self.ranks - 1) // 2]
            share, limit = of_all.mean() / step, VALIDATION_LIMIT if kind == "validation" else LIMIT
            if kind not in _STEADY:  # which rank is how late differs from step to step
                share = np.sort(self.mean[kind])[(self.ranks - 1) // 2] / step
            if share < limit:
                continue
            every = "every rank" if self.ranks > 1 else "the process"
            evidence = f"{every} {_spend(kind, 1)} {share:.0%} of each step"
            if kind == "data":
                advice = self._data_advice(0, float(step - of_all.mean()))
            else:
                name, advice = self._class_advice(kind, 0)
                evidence += f", most of it in {name}" if name else ""
            found.append(self._finding(f"slow_{kind}", (), share, of_all, evidence, advice))
        communication = self.wait.min(1)
        if self.ranks > 1 and (share := communication.mean() / step) >= LIMIT:
            evidence = f"every rank waits {share:.0%} of each step for communication, the slowest one included"
            found.append(self._finding("slow_communication", (), share, communication, evidence, _COMMUNICATION_ADVICE))
        return found

    def in_turn(self) -> list[Finding]:
        """Batches of unlike size, so that now this rank waits and now that one, though none is slow."""
        compute, own = self.kinds["compute"], self.own
        cost = self.times.cost
        mean_cost = cost.mean(1, keepdims=True)
        if self.ranks == 1 or not (mean_cost > 0).all():
            return []
        fair = own.mean(0).max()  # what chronic slowness costs is told elsewhere
        lost = np.minimum(own.max(1) - fair, compute.mean() * (cost.max(1) / mean_cost[:, 0] - 1)).clip(0)
        relative = (own - own.mean(0)) - (own - own.mean(0)).mean(1, keepdims=True)
        work = (cost - cost.mean(0)) - (cost - cost.mean(0)).mean(1, keepdims=True)
        share = lost.mean() / self.step.mean()
        spread = float(relative.std() * work.std())
        if share < LIMIT or not spread or float((relative * work).mean()) / spread < 0.5:
            return []
        more = (cost.max(1) / mean_cost[:, 0]).mean() - 1
        evidence = f"the ranks take turns at the largest batch, which is {more:.0%} more work than their mean"
        return [self._finding("uneven_work", (), share, lost, evidence, DEAL_BY_COST)]

    def _finding(
        self, cause: str, ranks: Sequence[int] | Ranks, share: float, lost: Floats, evidence: str, advice: str
    ) -> Finding:
        """lost: (K,) seconds of each step, which tell whether it goes on."""
        going_on = _recent(np.clip(lost / np.maximum(self.step, 1e-12), 0, 1))
        whom = tuple(int(rank) for rank in ranks)
        return Finding(cause, whom, float(min(share, 1.0)), going_on >= LIMIT / 2, evidence, advice)

    def _who(self, ranks: Ranks) -> str:
        """As in: rank 3 (host b, cuda:3); of several ranks those that fit, and their hosts."""
        names = ", ".join(str(rank) for rank in ranks[:6]) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
        places = sorted({self.times.places[int(rank)] for rank in ranks})
        if len(ranks) == 1:
            return f"rank {names} (host {places[0][0]}, {places[0][1]})"
        hosts = sorted({host for host, _ in places})
        return f"ranks {names} (host{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:3])})"

    def _data_advice(self, rank: int, rest: float) -> str:
        """How many workers would keep up.

        rest: seconds of a step without the wait for data: with n workers each of which needs d for a step's samples,
        one is ready every d / n. Where they are what the step waits for, d is n times the step; without workers it is
        the wait itself.
        """
        workers, cores = self.times.workers[rank], self.times.cores[rank]
        if workers is None:
            return "Prepare the batches in other processes, or make them cheaper."
        step, data = float(self.step.mean()), float(self.mean["data"][rank])
        decode = data if workers == 0 else workers * step
        needed = max(math.ceil(1.1 * decode / max(rest, 1e-9)), workers + 1)
        cheaper = "make samples cheaper: smaller files, a cache of what is decoded, transforms on the device"
        if workers < cores:
            fits = min(needed, cores)
            raised = f"Raise num_workers from {workers} to {fits}"
            return (
                f"{raised}, or {cheaper}." if needed <= cores else f"{raised}, all cores of this rank, and {cheaper}."
            )
        return f"This rank has {cores} core{'s' if cores > 1 else ''} and {workers} workers: {cheaper}."

    def _compute_advice(self, slow: Ranks, others: Ranks) -> tuple[str, str]:
        """What the processor's time tells about a slow rank, and what to do."""
        processor = self.times.processor
        if processor is not None and np.isfinite(processor).all():
            had, usual = float(processor[slow].mean()), float(processor[others].mean())
            if had < 0.85 * usual:
                return (
                    f"; it had {had:.2f} s of processor for each second of work, the others {usual:.2f}",
                    "Something else runs on its cores: look with top there, give each rank cores of its own.",
                )
        return (
            "",
            (
                "The same work takes longer there: look at the device's clock and temperature (nvidia-smi -q -d "
                "CLOCK,TEMPERATURE,PERFORMANCE), at other jobs on it, and try the run without that device."
            ),
        )

    def _class_advice(self, kind: str, rank: int) -> tuple[str | None, str]:
        """The class that most of a kind's time is spent in, where one takes half of it, and what to do."""
        of_kind = {n.partition(":")[2]: s for n, s in self.times.classes[rank].items() if n.startswith(f"{kind}:")}
        name = max(of_kind, key=lambda each: of_kind[each], default=None)
        total = float(self.times.laps[:, rank, LAPS.index(kind)].sum())
        if name is not None and of_kind[name] < total / 2:
            name = None
        return name, _CLASS_ADVICE[kind].format(name=name or "the callbacks")


DEAL_BY_COST = "Deal samples by their cost: DataLoader(..., batch_sampler=BalancedBatchSampler(costs, batch_size))."
_COMMUNICATION_ADVICE = (
    "Synchronise less often (gradient_accumulation_steps), send less (a bf16 communication hook), and look at the "
    "network: NCCL_DEBUG=INFO tells which interface is used."
)
_CLASS_ADVICE = {
    "callbacks": "Let {name} do its work less often, or in a thread, and on every rank alike.",
    "logging": "Log less often (log_every_n_steps) and fewer images; look at {name} and the tracker's connection.",
    "checkpoint": "Save less often (every_n_steps, every_n_minutes), or to a faster disk.",
    "validation": "Validate less often (check_val_every_n_epoch, val_check_interval) or less (limit_val_batches).",
}


def _memory(times: Times) -> list[Finding]:
    full = [rank for rank, share in enumerate(times.memory) if share >= MEMORY_LIMIT]
    if not full:
        return []
    worst = max(full, key=lambda rank: times.memory[rank])
    host, device = times.places[worst]
    others = [share for rank, share in enumerate(times.memory) if rank not in full]
    evidence = f"rank {worst} (host {host}, {device}) holds {times.memory[worst]:.0%} of its memory"
    evidence += f", the others at most {max(others):.0%}" if others else ""
    advice = "Use OOMFallback(), so that a larger batch goes on in pieces, GradientCheckpointing(), or a smaller batch."
    return [Finding("memory_nearly_full", tuple(full), 0.0, True, evidence, advice)]


def _capped(seconds: Floats) -> Floats:
    """(K, R) with each rank's outliers brought down to its next slowest steps."""
    return np.minimum(seconds, np.quantile(seconds, OUTLIERS, axis=0, method="higher", keepdims=True))


def _times(seconds: Floats, slow: Ranks, others: Ranks) -> Floats:
    """(K,): by how much the slow ranks took longer."""
    more: Floats = seconds[:, slow].mean(1) - seconds[:, others].mean(1)
    return more


def _ratio(mean: Floats, slow: Ranks, others: Ranks) -> float:
    usual = float(mean[others].mean())
    return float(mean[slow].mean()) / usual if usual > 0 else 1.0


def _recent(shares: Floats) -> float:
    """The exponential moving average over the steps, from the mean of the first ones."""
    average = float(shares[:CHRONIC_STEPS].mean())
    for share in shares[CHRONIC_STEPS:].tolist():
        average += (share - average) / CHRONIC_STEPS
    return average


def _has(ranks: Ranks) -> str:
    return "has" if len(ranks) == 1 else "have"


def _spend(kind: str, number: int) -> str:
    verb = {"data": "wait", "compute": "compute", "callbacks": "spend"}.get(kind, "spend")
    what = {"data": " for data", "compute": "", "callbacks": " in callbacks"}.get(kind, f" on {kind}")
    return f"{verb}{'s' if number == 1 else ''}{what}"
