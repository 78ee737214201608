"""LoadBalance in one process, by a clock that moves only where the test says so."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from sanctuary_trainer import LAPS, Callback, FitResult, Measured, Run, TaskError, VisionTask, clock
from sanctuary_trainer.callbacks import Checkpoint, LoadBalance
from sanctuary_trainer.callbacks.load_balance import _cores, curves
from sanctuary_trainer.callbacks.rank_memory import rank_memory
from tests.small_tasks import quiet_trainer

Spend = Callable[[float], None]


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Spend:
    """Lets the clock of laps go on by so many seconds."""
    now = [100.0]
    monkeypatch.setattr("sanctuary_trainer.clock.perf_counter", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    return spend


class Samples(Dataset[Any]):
    def __init__(self, count: int, spend: Spend, seconds: float) -> None:
        self.count, self.spend, self.seconds = count, spend, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.spend(self.seconds)
        return torch.full((3, 2, 2), float(index))


class Pooled(VisionTask):
    """Takes `forward` seconds in its step and `backward` in the backward pass, and logs what it validates."""

    def __init__(self, spend: Spend, forward: float = 0.0, backward: float = 0.0, validation: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.spend, self.seconds = spend, (forward, backward, validation)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        forward, backward, _ = self.seconds
        output = self.layer(batch.mean((2, 3)))
        self.spend(forward)
        output.register_hook(lambda gradient: self.spend(backward))
        return output.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.spend(self.seconds[2])
        self.log("mean", batch.mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch.mean((2, 3)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def fit(
    task: VisionTask, spend: Spend, folder: Path, data: float = 0.0, steps: int = 50, batch: int = 4, **settings: Any
) -> FitResult:
    """Steps of `batch` samples, each of which takes `data` seconds to read."""
    loader = DataLoader(Samples(steps * batch, spend, data), batch)
    settings = {"max_epochs": 1, "log_every_n_steps": 10, "project_dir": folder, "run_name": "run", **settings}
    settings["callbacks"] = [LoadBalance(), *settings.get("callbacks", ())]
    val = settings.pop("val", None)
    return quiet_trainer(**settings).fit(task, loader, val)


def milliseconds(result: FitResult) -> dict[str, float]:
    """Of a step of the only rank, by lap; laps without time are left out."""
    assert result.balance is not None
    (rank,) = result.balance.ranks
    return {name: round(1000 * seconds, 6) for name, seconds in rank.seconds.items() if seconds and ":" not in name}


def test_each_lap_gets_the_time_that_was_spent_in_it(spend: Spend, run_folder: Path) -> None:
    class Slow(Callback):
        def on_train_batch_start(self, run: Run, batch: Any, batch_idx: int) -> None:
            spend(0.001)

        def on_train_step_end(self, run: Run) -> None:
            spend(0.002)

        def on_log(self, run: Run, values: dict[str, float], step: int) -> None:
            if "train/loss" in values:
                spend(0.05)

    result = fit(Pooled(spend, 0.008, 0.016), spend, run_folder, data=0.001, steps=51, callbacks=[Slow()])
    assert result.balance is not None
    assert result.balance.steps == 50  # the first step has no sync before it
    # Four samples a step; five logs between the 51 syncs.
    expected = {"data": 4.0, "forward": 8.0, "backward": 16.0, "callbacks": 3.0, "logging": 5.0}
    assert milliseconds(result) == pytest.approx(expected)
    assert result.balance.step_seconds == pytest.approx(0.036)
    (rank,) = result.balance.ranks
    assert rank.seconds["callbacks:Slow"] == pytest.approx(0.003)
    assert rank.seconds["logging:Slow"] == pytest.approx(0.005)
    assert (rank.samples, rank.cost) == (4.0, 4 * 3 * 2 * 2)


def test_a_run_that_waits_for_data_is_told_so_with_the_workers_that_would_do(spend: Spend, run_folder: Path) -> None:
    result = fit(Pooled(spend, 0.005, 0.005), spend, run_folder, data=0.005)
    assert result.balance is not None
    assert result.balance.verdict == "slow_data"
    (finding,) = result.balance.findings
    assert finding.share == pytest.approx(2 / 3)
    assert finding.chronic
    assert finding.ranks == ()
    assert "num_workers from 0" in finding.advice


def test_a_run_that_only_computes_is_balanced(spend: Spend, run_folder: Path) -> None:
    result = fit(Pooled(spend, 0.01, 0.02), spend, run_folder, data=0.0001)
    assert result.balance is not None
    assert (result.balance.verdict, result.balance.findings) == ("balanced", ())


def test_a_slow_callback_is_named(spend: Spend, run_folder: Path) -> None:
    class Thinks(Callback):
        def on_train_batch_end(self, run: Run, batch: Any, batch_idx: int, loss: Any) -> None:
            spend(0.03)

    result = fit(Pooled(spend, 0.01), spend, run_folder, callbacks=[Thinks()])
    assert result.balance is not None
    assert result.balance.verdict == "slow_callbacks"
    assert "Thinks" in result.balance.findings[0].evidence
    assert result.balance.findings[0].share == pytest.approx(0.75)


def test_validation_counts_whole_and_only_a_third_of_the_time_is_worth_a_word(spend: Spend, run_folder: Path) -> None:
    val = [torch.zeros(1, 3, 2, 2)] * 5
    seldom = fit(Pooled(spend, 0.01, validation=0.02), spend, run_folder, val=val, val_check_interval=25)
    assert milliseconds(seldom)["validation"] == pytest.approx(100 / 49)  # one between the syncs: 5 of 20 ms
    assert seldom.balance is not None
    assert seldom.balance.verdict == "balanced"
    often = fit(Pooled(spend, 0.01, validation=0.02), spend, run_folder / "often", val=val, val_check_interval=5)
    assert often.balance is not None
    assert often.balance.verdict == "slow_validation"


def test_the_time_of_checkpoints_is_theirs(spend: Spend, run_folder: Path) -> None:
    class Heavy(Pooled):
        def get_extra_state(self) -> Any:
            spend(0.5)  # while it is written
            return torch.zeros(1)

        def set_extra_state(self, state: Any) -> None:
            pass

    result = fit(Heavy(spend, 0.01), spend, run_folder, callbacks=[Checkpoint(every_n_steps=10)])
    assert result.balance is not None
    assert result.balance.verdict == "slow_checkpoint"
    assert milliseconds(result)["forward"] == pytest.approx(10)


def test_the_processors_time_is_that_of_the_steps_alone(
    spend: Spend, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of sanity validation and the first step, in which much is made ready, nor of what follows the last."""
    heard: list[Measured] = []

    class Hears(LoadBalance):
        def _hear(self, run: Run, of_ranks: list[Measured]) -> None:
            heard.extend(of_ranks)

    class Ends(Callback):
        def on_train_epoch_end(self, run: Run) -> None:
            spend(64.0)

    monkeypatch.setattr("time.process_time", lambda: clock.perf_counter())  # a process that always computes
    loader, val = DataLoader(Samples(100, spend, 0.25), 4), [torch.zeros(1, 3, 2, 2)]
    trainer = quiet_trainer(
        max_epochs=1,
        log_every_n_steps=10,
        num_sanity_val_steps=1,
        project_dir=run_folder,
        callbacks=[Hears(), Ends()],
    )
    trainer.fit(Pooled(spend, 0.5, 0.5, validation=64.0), loader, val)
    assert sum(measured.processor_seconds or 0.0 for measured in heard) == pytest.approx(24 * 2.0)
    assert sum(float(measured.seconds.sum()) for measured in heard) == pytest.approx(24 * 2.0)


def test_the_report_is_printed_and_lies_in_the_run_folder(
    spend: Spend, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fit(Pooled(spend, 0.005), spend, run_folder, data=0.005, log_with="tensorboard")
    assert "Load balance: the process waits for data" in capsys.readouterr().out
    saved = json.loads((result.run_dir / "balance.json").read_text())
    assert result.balance is not None
    assert saved == json.loads(json.dumps(result.balance.as_dict()))
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    percents = next(line for line in lines if "balance/data/rank0" in line)
    assert percents["balance/data/rank0"] == pytest.approx(80)
    assert percents["balance/forward/rank0"] == pytest.approx(20)


def test_what_is_severe_is_told_at_once_and_once(
    spend: Spend, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, str]] = []

    class Listens(Callback):
        def on_train_step_end(self, run: Run) -> None:
            if out := capsys.readouterr().out:
                seen.append((run.state.global_step, out))

    fit(Pooled(spend, 0.005), spend, run_folder, data=0.005, steps=700, callbacks=[Listens()])
    ((step, text),) = seen
    assert 40 < step <= 61
    assert text.startswith("Load balance: the process waits for data")


def test_what_costs_less_than_a_quarter_or_is_over_waits_for_the_end(
    spend: Spend, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class BeginsSlowly(Callback):
        def on_train_step_end(self, run: Run) -> None:
            if run.state.global_step < 15:
                spend(0.1)

    class Listens(Callback):
        def on_train_epoch_end(self, run: Run) -> None:
            assert capsys.readouterr().out == ""

    small = fit(Pooled(spend, 0.008), spend, run_folder, data=0.0005, steps=100, callbacks=[Listens()])
    capsys.readouterr()
    early = fit(Pooled(spend, 0.01), spend, run_folder / "early", steps=100, callbacks=[BeginsSlowly(), Listens()])
    assert small.balance is not None and early.balance is not None
    assert (small.balance.verdict, early.balance.verdict) == ("slow_data", "slow_callbacks")
    assert small.balance.findings[0].share == pytest.approx(0.2)
    assert early.balance.findings[0].share > 0.5 and not early.balance.findings[0].chronic


def test_the_picture_is_shown_now_and_then_and_at_the_end(
    spend: Spend, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def steps_of(name: str) -> list[int]:
        fit(Pooled(spend, 0.01), spend, run_folder, steps=25, log_with="tensorboard", run_name=name)
        return [
            image.step for image in EventAccumulator(str(run_folder / name)).Reload().Images("balance/time_of_ranks")
        ]

    assert steps_of("short") == [25]
    monkeypatch.setattr("sanctuary_trainer.callbacks.load_balance.SHOW_SECONDS", 0.0)
    assert sorted(set(steps_of("long"))) == [10, 20, 25]


def test_a_second_fit_with_the_same_instance_begins_anew(spend: Spend, run_folder: Path) -> None:
    balance = LoadBalance()

    def again(name: str, seconds: float) -> FitResult:
        loader = DataLoader(Samples(80, spend, seconds), 4)
        trainer = quiet_trainer(max_epochs=1, project_dir=run_folder, run_name=name, callbacks=[balance])
        return trainer.fit(Pooled(spend, 0.01), loader)

    first, second = again("first", 0.01), again("second", 0.0)
    assert first.balance is not None
    assert second.balance is not None
    assert (first.balance.verdict, second.balance.verdict) == ("slow_data", "balanced")
    assert second.balance.steps == 19


def test_a_fit_that_fails_tells_what_was_known(
    spend: Spend, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails(Pooled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 35:
                raise ValueError("the step failed")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="the step failed"):
        fit(Fails(spend, 0.005), spend, run_folder, data=0.005)
    assert "waits for data" in capsys.readouterr().out
    assert json.loads((run_folder / "run" / "balance.json").read_text())["steps"] == 29  # until the last log


def test_a_fit_of_one_step_has_nothing_to_tell(spend: Spend, run_folder: Path) -> None:
    assert fit(Pooled(spend, 0.01), spend, run_folder, steps=1).balance is None


def test_a_fit_without_the_callback_has_no_balance(run_folder: Path, spend: Spend) -> None:
    trainer = quiet_trainer(max_epochs=1, project_dir=run_folder)
    result = trainer.fit(Pooled(spend), DataLoader(Samples(8, spend, 0.0), 4))
    assert result.balance is None
    assert not (result.run_dir / "balance.json").exists()


def test_accumulated_batches_are_one_step(spend: Spend, run_folder: Path) -> None:
    result = fit(Pooled(spend, 0.01), spend, run_folder, steps=40, gradient_accumulation_steps=4)
    assert result.balance is not None
    assert result.balance.steps == 9
    assert milliseconds(result) == pytest.approx({"forward": 40.0})
    assert result.balance.ranks[0].samples == 16


def test_a_cost_of_ones_own_counts(spend: Spend, run_folder: Path) -> None:
    class Squares(Pooled):
        def cost(self, batch: Any) -> float:
            return float(len(batch)) ** 2

    result = fit(Squares(spend, 0.01), spend, run_folder)
    assert result.balance is not None
    assert result.balance.ranks[0].cost == 16


@pytest.mark.parametrize(
    "cost", [None, "much", [1, 2], -1, float("nan"), float("inf"), torch.tensor(torch.nan), 10**400]
)
def test_a_cost_that_is_no_number_is_refused(spend: Spend, run_folder: Path, cost: Any) -> None:
    class Wrong(Pooled):
        def cost(self, batch: Any) -> Any:
            return cost

    with pytest.raises(TaskError, match=r"Wrong\.cost returned .* a number was expected"):
        fit(Wrong(spend), spend, run_folder)


def test_an_attribute_called_cost_is_told_before_the_first_step(spend: Spend, run_folder: Path) -> None:
    task = Pooled(spend)
    task.cost = 3.0  # type: ignore[assignment,method-assign]
    with pytest.raises(TaskError, match=r"Pooled\.cost is 3\.0; .* by another name"):
        fit(task, spend, run_folder)


def test_the_weights_are_those_of_a_fit_without(spend: Spend, run_folder: Path) -> None:
    found = []
    for callbacks in ([], [LoadBalance()]):
        torch.manual_seed(0)
        task = Pooled(spend)
        trainer = quiet_trainer(max_epochs=2, seed=0, project_dir=run_folder, callbacks=callbacks)
        trainer.fit(task, DataLoader(Samples(40, spend, 0.0), 4, shuffle=True))
        found.append(task.layer.weight.detach().clone())
    assert torch.equal(*found)


def test_of_many_ranks_the_curves_are_the_extremes() -> None:
    import numpy as np

    from sanctuary_trainer import History

    rows = np.zeros((3, 20, len(LAPS) + 2))
    rows[:, :, LAPS.index("forward")] = np.arange(1, 21)
    history = History(recent=rows, steps=3)
    values = curves(history, 2)
    assert values.keys() == {"balance/forward/min", "balance/forward/max", "balance/forward/median"}
    assert values["balance/forward/max"] == pytest.approx(100 * 20 / 10.5)


def test_memory_of_a_process_is_what_it_holds() -> None:
    before, share = rank_memory(torch.device("cpu"))
    assert 0 < share < 1
    held = torch.ones(64_000_000)  # 256 MB, touched
    after, _ = rank_memory(torch.device("cpu"))
    assert 250e6 < after - before < 300e6
    assert held.sum() == 64_000_000


def test_a_limit_of_the_process_or_of_its_control_group_is_what_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    former, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(mapped / 0.95), hard))
    try:
        assert rank_memory(cpu)[1] == pytest.approx(0.95, abs=0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (former, hard))
    group = {"max": "1000\n", "current": "1170\n", "stat": "anon 970\nfile 200\ninactive_file 200\n"}

    def read(path: str) -> str:
        kind = path.removeprefix("/sys/fs/cgroup/memory.")
        return group[kind] if kind != path else Path(path).read_text()

    monkeypatch.setattr("sanctuary_trainer.callbacks.rank_memory._read", read)
    assert rank_memory(cpu)[1] == pytest.approx(0.97)
    group["max"] = "max\n"
    assert rank_memory(cpu)[1] < 0.97


def test_a_rank_has_the_cores_that_it_is_bound_to_or_its_part_of_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for bound, cores in ((16, 4), (6, 6)):
        monkeypatch.setattr("os.sched_getaffinity", lambda process, bound=bound: set(range(bound)))
        assert _cores() == cores


@pytest.mark.gpu
def test_on_a_gpu_the_laps_are_those_of_its_own_timeline(run_folder: Path) -> None:
    """The host is far ahead of the device: by its clock the forward would take next to nothing."""

    class Multiplies(VisionTask):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.eye(2048))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                product = batch[0]
                for _ in range(20):
                    product = product @ batch[0]
            return (self.factor * product[:2048, :2048]).mean()

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    data = DataLoader([torch.eye(4096) for _ in range(30)], 1)
    trainer = quiet_trainer(
        max_epochs=3, cpu=False, project_dir=run_folder, log_every_n_steps=30, callbacks=[LoadBalance()]
    )
    balance = trainer.fit(Multiplies(), data).balance
    assert balance is not None
    (rank,) = balance.ranks
    assert rank.seconds["forward"] > 20 * 2 * 4096**3 / 1e15  # what no device does faster
    assert balance.steps >= 15
    assert 0 < rank.memory_share < 1
