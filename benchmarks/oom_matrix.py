"""Whether a batch that does not fit gives the update of one that does: `python benchmarks/oom_matrix.py`.

for each configuration and number of ranks
  an undisturbed fit: three steps of three batches of seven samples
  for each cell: a fit in which one batch runs out of memory
    a bomb (tests/bombs.py) behind one layer, in forward or in backward, on some of the ranks, until pieces are small
    compare with the undisturbed fit

What must be equal, in float64 to 1e-12: the weights, and on all ranks bit for bit; every logged value at every step
(throughput and memory aside); what fit returns; the number of steps. There must be one event for each rank that failed,
which says where and with how many samples; all ranks know all of them.

Where it fails: behind the first, middle or last layer. In backward "first" is before any gradient has been made, "last"
when those of the first layer alone are missing. DDP's buckets hold one layer or two here, so that some of them are on
their way to the other ranks by then.

A cell on which a rank raised or hung is wrong, and the rest of its row is run in new processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every process that is started
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from sanctuary_trainer import Callback, Run, Trainer  # noqa: E402
from sanctuary_trainer.callbacks import OOMFallback  # noqa: E402
from tests.bombs import TEXT, Bombed, bombed_loader  # noqa: E402
from tests.distributed.workers import Ranks, Zygote  # noqa: E402
from tests.small_tasks import weights  # noqa: E402

STEPS, ACCUMULATION, BATCH_SIZE = 3, 3, 7  # seven: no two pieces need be of one size
BUCKET_CAP_MB = 0.0005  # one layer of float64
LIMITS = {"half": 4, "one": 1}  # samples that fit; of seven, half is four
OWN = ("train/samples_per_second", "memory/")  # what no two fits have in common
CELL_SECONDS, CALL_SECONDS = 3.0, 40.0  # limit of a call: so much for each cell, and so much for its start


@dataclass(frozen=True)
class Configuration:
    """How a row of cells is trained.

    Attributes:
        title: in the table.
        model: arguments of `Bombed`.
        ddp: arguments of DDP, besides the size of its buckets.
        hook: one that sends gradients in 16 bits, by accelerate's name; or "allreduce", torch's own as a user's.
        scaled: with a gradient scaler, as in fp16.
        step: the step in which a batch does not fit. In the first one DDP has not laid out its buckets.
        tolerance: of the weights and the logged values.
    """

    title: str
    model: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    hook: Literal["", "fp16", "bf16", "allreduce"] = ""
    scaled: bool = False
    step: int = 1
    tolerance: float = 1e-12


CONFIGURATIONS = {
    "plain": Configuration("plain"),
    "first_step": Configuration("in the first step", step=0),
    "unused": Configuration("a layer is not used", {"unused": True}, {"find_unused_parameters": True}),
    "find_unused": Configuration("DDP looks for unused layers", {}, {"find_unused_parameters": True}),
    "bucket_view": Configuration("gradients are views of buckets", {}, {"gradient_as_bucket_view": True}),
    "allreduce": Configuration("a communication hook", hook="allreduce"),
    # What is sent is rounded, and near the middle of two numbers 1e-17 decides: 2 ** -11 and 2 ** -8 of a gradient.
    "fp16": Configuration("a hook that sends fp16", hook="fp16", tolerance=1e-3),
    "bf16": Configuration("a hook that sends bf16", hook="bf16", tolerance=1e-2),
    "tied": Configuration("tied weights", {"tied": True}),
    "shared": Configuration("gradients that share memory", {"shared": True}),
    "frozen": Configuration("frozen first layer", {"frozen": True}),
    "layer_norm": Configuration("layer norm", {"norm": "ln"}),
    "dropout": Configuration("dropout", {"dropout": 0.3}),
    "weights": Configuration("weights from the step", {"weighted": True}),
    "scaler": Configuration("gradient scaler", scaled=True),
}
WHO: dict[str, tuple[int, tuple[int, ...]]] = {  # how many ranks, and which of them fail
    "alone": (1, (0,)),
    "rank 0": (2, (0,)),
    "rank 1": (2, (1,)),
    "both": (2, (0, 1)),
    "all three": (3, (0, 1, 2)),
}


class Cell(NamedTuple):
    """One fit in which one batch does not fit.

    Attributes:
        configuration, who: by name.
        where: "forward" or "backward".
        position: of the layer in forward, of the gradients in backward: "first", "middle" or "last".
        batch: of the window: 0, 1 or 2, which syncs.
        limit: "half" of the batch fits, or "one" sample.
    """

    configuration: str
    who: str
    where: Any
    position: str
    batch: int
    limit: str

    def __str__(self) -> str:
        title = CONFIGURATIONS[self.configuration].title
        return f"{title}, {self.who}: {self.position} in {self.where}, batch {self.batch}, {self.limit} fits"


class Fitted(NamedTuple):
    """What came of a fit on one rank."""

    weights: torch.Tensor
    logged: list[tuple[int, dict[str, float]]]
    metrics: dict[str, float]
    global_step: int
    events: list[tuple[Any, ...]]
    buckets: int


@dataclass
class Verdict:
    """What a cell came to: the largest difference, and what is wrong with it ("": nothing)."""

    cell: Cell
    difference: float
    wrong: str


def cells(part: Literal["all", "tests"] = "all") -> Iterator[Cell]:
    """All cells, row by row; "tests": two of each configuration, drawn once and for all."""
    draw = random.Random(2)
    for number, (name, configuration) in enumerate(CONFIGURATIONS.items()):
        needs_ddp = bool(configuration.ddp or configuration.hook)
        ranks = [count for count in (1, 2, 3) if count > 1 or not needs_ddp]
        if part == "tests":
            ranks = [(2, 1, 2, 3)[number % 4] if not needs_ddp else 2 + number % 2]
        who = [each for each, (count, _) in WHO.items() if count in ranks]
        axes = (who, ("forward", "backward"), ("first", "middle", "last"), range(ACCUMULATION), LIMITS)
        row = [Cell(name, *each) for each in itertools.product(*axes)]
        yield from draw.sample(row, 2) if part == "tests" else row


# On the ranks


class Watch(Callback):
    """Keeps what is logged, and makes of a run what its configuration says and no setting can."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.buckets = 1

    def setup(self, run: Run) -> None:
        if self.configuration.scaled:  # on a CPU there is no fp16 that would bring one
            run.devices.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def on_fit_start(self, run: Run) -> None:
        if self.configuration.hook == "allreduce" and run.world_size > 1:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            assert run.executor is not None
            run.executor.module.register_comm_hook(None, allreduce_hook)  # type: ignore[operator]

    def on_log(self, run: Run, values: dict[str, float], step: int) -> None:
        self.logged.append((step, _comparable(values)))

    def on_train_step_end(self, run: Run) -> None:
        if run.world_size > 1 and run.state.global_step == STEPS:
            assert run.executor is not None
            told = run.executor.module._get_ddp_logging_data()  # type: ignore[operator]
            sizes = told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]  # with unused layers they stay
            self.buckets = len(str(sizes).split(","))


def _comparable(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.startswith(OWN)}


def _accelerator(configuration: Configuration) -> Any:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DDPCommunicationHookType, GradientAccumulationPlugin, InitProcessGroupKwargs

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    hook = configuration.hook if configuration.hook != "allreduce" else ""
    settings = DistributedDataParallelKwargs(
        bucket_cap_mb=BUCKET_CAP_MB,  # type: ignore[arg-type]
        comm_hook=DDPCommunicationHookType(hook or "no"),
        **configuration.ddp,
    )
    return Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[settings, InitProcessGroupKwargs(timeout=timedelta(seconds=15))],
    )


def fit(name: str, cell: Cell | None = None, fallback: bool = True) -> Fitted:
    """One fit; with a cell, its bomb is armed."""
    configuration = CONFIGURATIONS[name]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(5)  # dropout's, which differs on the ranks all the same: the trainer's seed is given
    task = Bombed(**configuration.model)
    if cell is not None:
        bombs = list(task.bombs)[1 if configuration.model.get("frozen") and cell.where == "backward" else 0 :]
        order = bombs if cell.where == "forward" else bombs[::-1]
        place = {"first": 0, "middle": len(order) // 2, "last": -1}[cell.position]
        order[place].arm(  # type: ignore[operator]
            cell.where,
            above=LIMITS[cell.limit],
            ranks=WHO[cell.who][1],
            steps=(configuration.step,),
            batch_idxs=(configuration.step * ACCUMULATION + cell.batch,),
        )
    watch = Watch(configuration)
    trainer = Trainer(
        max_steps=STEPS,
        gradient_accumulation_steps=ACCUMULATION,
        log_every_n_steps=1,
        accelerator=_accelerator(configuration),
        seed=5,
        log_with=None,
        default_callbacks=False,
        num_sanity_val_steps=0,
        callbacks=[watch, *([OOMFallback()] if fallback else [])],
    )
    result = trainer.fit(task, bombed_loader(STEPS * ACCUMULATION * BATCH_SIZE * ranks, BATCH_SIZE))
    events = [tuple(event) for event in getattr(result, "oom_events", ())]
    return Fitted(weights(task), watch.logged, _comparable(result.metrics), result.global_step, events, watch.buckets)


def fit_row(name: str, row: Sequence[Cell | None]) -> list[Fitted]:
    """On one rank: a fit for each cell; for None an undisturbed one, and the same without the callback."""
    found: list[Fitted] = []
    for cell in row:
        if cell is None:
            found.append(fit(name, fallback=False))
        found.append(fit(name, cell))
    return found


# The comparison


def judge(cell: Cell, expected: Sequence[Fitted], found: Sequence[Fitted]) -> Verdict:
    """Compare what the ranks came to, by rank."""
    configuration = CONFIGURATIONS[cell.configuration]
    _, failing = WHO[cell.who]
    wrong: list[str] = []
    difference = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        difference = max(difference, float((mine.weights - theirs.weights).abs().max()))
        pairs = [(mine.metrics, theirs.metrics)]
        pairs += [(a, b) for (_, a), (_, b) in zip(mine.logged, theirs.logged, strict=False)]
        if [(step, a.keys()) for step, a in mine.logged] != [(step, b.keys()) for step, b in theirs.logged]:
            wrong.append("other names are logged, or at other steps")
        elif any(a.keys() != b.keys() for a, b in pairs):
            wrong.append("fit returns other metrics")
        else:
            worst, name = max((abs(a[name] - b[name]), name) for a, b in pairs for name in a)
            if worst > configuration.tolerance:
                wrong.append(f"{name} differs by {worst:.1e}")
        if mine.global_step != theirs.global_step:
            wrong.append(f"{mine.global_step} steps instead of {theirs.global_step}")
    if not difference <= configuration.tolerance:
        wrong.insert(0, f"weights differ by {difference:.1e}")
    if any(not torch.equal(each.weights, found[0].weights) for each in found):
        wrong.append("weights differ between the ranks")
    fits = LIMITS[cell.limit]
    events = [(rank, configuration.step, "train", cell.where, BATCH_SIZE, fits, "pieces") for rank in failing]
    for each in found:
        if sorted(event[:7] for event in each.events) != events or any(TEXT not in event[7] for event in each.events):
            wrong.append(f"events {each.events} instead of {events}")
            break
    return Verdict(cell, difference, "; ".join(dict.fromkeys(wrong)))


def judge_row(call: Callable[..., Any], name: str, row: Sequence[Cell]) -> list[Verdict]:
    """Run the cells of one configuration and number of ranks, and compare them.

    Args:
        call: calls `fit_row` on so many ranks, within `timeout` seconds; returns the values by rank; raises
            AssertionError with what the ranks wrote where one failed.
        row: all of them alike in configuration and number of ranks.
    """
    try:
        undisturbed = call(fit_row, name, [None], timeout=CALL_SECONDS)
    except AssertionError as error:
        return [Verdict(cell, float("nan"), f"undisturbed: {_last_errors(str(error))}") for cell in row]
    without, expected = ([each[part] for each in undisturbed] for part in (0, 1))
    wrong = ""
    if len(expected) > 1 and expected[0].buckets < 3:
        wrong = f"DDP has {expected[0].buckets} buckets, so that nothing is under way early"
    for mine, theirs in zip(expected, without, strict=True):
        if not torch.equal(mine.weights, theirs.weights) or mine[1:4] != theirs[1:4] or mine.events:
            wrong = "where nothing fails, the callback changes something"
    if wrong:
        return [Verdict(cell, float("nan"), wrong) for cell in row]
    try:
        found = call(fit_row, name, list(row), timeout=CALL_SECONDS + CELL_SECONDS * len(row))
    except AssertionError as error:
        if len(row) == 1:
            return [Verdict(row[0], float("nan"), _last_errors(str(error)))]
        halves = [row[: len(row) // 2], row[len(row) // 2 :]]
        return [verdict for half in halves for verdict in judge_row(call, name, half)]
    return [judge(cell, expected, fitted) for cell, *fitted in zip(row, *found, strict=True)]


def _last_errors(text: str) -> str:
    """Of what the ranks wrote, the lines that name an error."""
    lines = re.findall(r"^[\w.]+(?:Error|Exception|Warning|Signal\w*): .*$", text, flags=re.MULTILINE)
    return " | ".join(dict.fromkeys(lines)) or text[-500:]


def rows(chosen: Sequence[Cell]) -> dict[tuple[str, int], list[Cell]]:
    """The cells by configuration and number of ranks."""
    found: dict[tuple[str, int], list[Cell]] = {}
    for cell in chosen:
        found.setdefault((cell.configuration, WHO[cell.who][0]), []).append(cell)
    return found


# The table

HEAD = f"{'':34}{'ranks':>6}{'cells':>7}{'right':>7}{'worst difference':>18}{'s':>7}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--who", nargs="+", choices=WHO, default=list(WHO), help="only where these ranks fail")
    parser.add_argument("--every", type=int, default=1, help="only each so many-th cell of a row (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per cell instead of the table")
    options = parser.parse_args()
    chosen = [cell for cell in cells() if cell.configuration in options.configurations and cell.who in options.who]
    if not options.json:
        print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, one thread, gloo\n")
        print(HEAD, flush=True)
    count, failed, began = 0, 0, time.perf_counter()
    with Zygote() as zygote:
        for (name, ranks), whole in rows(chosen).items():
            row, started = whole[:: options.every], time.perf_counter()
            verdicts = judge_row(Ranks(zygote, ranks), name, row)
            wrong = [verdict for verdict in verdicts if verdict.wrong]
            count, failed = count + len(row), failed + len(wrong)
            if options.json:
                for verdict in verdicts:
                    print(json.dumps(asdict(verdict) | {"cell": verdict.cell._asdict()}), flush=True)
                continue
            worst = max((verdict.difference for verdict in verdicts), key=lambda value: (value != value, value))
            title, right, seconds = CONFIGURATIONS[name].title, len(row) - len(wrong), time.perf_counter() - started
            print(f"{title:34}{ranks:6}{len(row):7}{right:7}{worst:18.1e}{seconds:7.1f}", flush=True)
            for verdict in wrong:
                print(f"    {verdict.cell}: {verdict.wrong}", flush=True)
    if not options.json:
        print(f"\n{count - failed} of {count} cells right, {time.perf_counter() - began:.0f} s")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    # Under its real name: a function is sent to the ranks by it.
    from benchmarks import oom_matrix

    oom_matrix.main()
