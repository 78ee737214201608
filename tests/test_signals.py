"""Signals that end a run: what is saved, how the process ends, what is put back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from sanctuary_trainer import Callback, Run, Trainer
from sanctuary_trainer.callbacks import Checkpoint

from .small_tasks import Net, classes, loader, quiet_trainer, weights


class Kill(Callback):
    """Sends a signal to its own process, once, at a moment."""

    def __init__(self, hook: str, step: int, number: int = signal.SIGTERM) -> None:
        self.hook, self.step, self.number, self.rounds = hook, step, number, 0

    def _at(self, hook: str, run: Run) -> None:
        if hook == self.hook and run.state.global_step == self.step and self.rounds == 0:
            self.rounds += 1
            os.kill(os.getpid(), self.number)

    def on_before_optimizer_step(self, run: Run) -> None:
        self._at("on_before_optimizer_step", run)

    def on_train_epoch_start(self, run: Run) -> None:
        self._at("on_train_epoch_start", run)

    def on_evaluation_batch_end(self, run: Run, stage: str, batch: Any, outputs: Any, sample_indices: Any) -> None:
        self._at(f"{stage} batch", run)

    def on_save_point(self, run: Run) -> None:
        self._at("on_save_point", run)


class Adam(Net):
    """Net with Adam, whose state tells how many updates it has made; counts the batches of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.validated = 0
        self.ends: list[str] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.validated += 1
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_exception(self, run: Run, exception: BaseException) -> None:
        self.ends.append("on_exception")

    def on_fit_end(self, run: Run) -> None:
        self.ends.append(f"on_fit_end {run.state.stop_reason}")

    def teardown(self, run: Run) -> None:
        self.ends.append("teardown")


def fit(folder: Path, *callbacks: Callback, resume: str | None = None, **settings: Any) -> Adam:
    """Two epochs of five steps, validated on 20 batches after each."""
    task = Adam()
    trainer = quiet_trainer(
        max_epochs=2, seed=0, project_dir=folder, run_name="run", callbacks=[Checkpoint(), *callbacks], **settings
    )
    trainer.fit(task, loader(classes(20), shuffle=True), loader(classes(40), 2), resume=resume)
    return task


def interrupted(folder: Path, *callbacks: Callback, status: int = 128 + signal.SIGTERM, **settings: Any) -> None:
    with pytest.raises(SystemExit) as left:
        fit(folder, *callbacks, **settings)
    assert left.value.code == status


def steps_of_adam(folder: Path) -> set[float]:
    from sanctuary_trainer.checkpointing import read_state

    [checkpoint] = (folder / "run" / "checkpoints").iterdir()
    state = read_state(checkpoint, "optimizer", "progress")
    made = {float(each["step"]) for each in state["optimizer"]["optimizers"][0]["state"]["state"].values()}
    assert made == {state["progress"]["global_step"]}
    return made


def test_a_signal_in_the_middle_of_an_update_is_obeyed_at_the_step(run_folder: Path) -> None:
    interrupted(run_folder / "a", Kill("on_before_optimizer_step", 2))
    assert steps_of_adam(run_folder / "a") == {3.0}
    continued = fit(run_folder / "a", resume="auto")
    assert torch.equal(weights(continued), weights(fit(run_folder / "b")))


@pytest.mark.parametrize("interval", [None, 3])
def test_a_signal_in_a_validation_is_obeyed_within_a_batch(run_folder: Path, interval: int | None) -> None:
    settings: dict[str, Any] = {"val_check_interval": interval, "log_every_n_steps": 1}
    task = Adam()
    trainer = quiet_trainer(
        max_epochs=2,
        seed=0,
        project_dir=run_folder / "a",
        run_name="run",
        callbacks=[Checkpoint(), Kill("val batch", interval or 5)],
        **settings,
    )
    with pytest.raises(SystemExit):
        trainer.fit(task, loader(classes(20), shuffle=True), loader(classes(40), 2))
    assert task.validated == 1
    assert steps_of_adam(run_folder / "a") == {float(interval or 5)}
    continued = fit(run_folder / "a", resume="auto", **settings)
    straight = fit(run_folder / "b", **settings)
    assert torch.equal(weights(continued), weights(straight))
    assert continued.validated == straight.validated == (40 if interval is None else 60)
    assert curves(run_folder / "a") == curves(run_folder / "b")


@pytest.mark.parametrize("limits", [{"max_steps": 5, "val_check_interval": 5}, {"max_steps": 5}, {"max_steps": 10}])
def test_a_signal_in_the_last_validation_leaves_it_to_the_next_start(run_folder: Path, limits: dict[str, Any]) -> None:
    limits = {"log_every_n_steps": 1, **limits}
    interrupted(run_folder / "a", Kill("val batch", limits["max_steps"]), **limits)
    continued, straight = fit(run_folder / "a", resume="auto", **limits), fit(run_folder / "b", **limits)
    assert continued.validated == 20 and straight.validated == 20 * limits["max_steps"] // 5
    assert curves(run_folder / "a") == curves(run_folder / "b")
    assert torch.equal(weights(continued), weights(straight))


def curves(folder: Path) -> list[dict[str, Any]]:
    import json

    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("time", "train/samples_per_second")} for line in lines]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_the_users_handlers_come_back_and_the_ends_are_told_once(run_folder: Path, name: str) -> None:
    number = getattr(signal, name)
    got: list[int] = []
    former = signal.signal(number, lambda signum, frame: got.append(signum))
    try:
        task = Adam()
        trainer = quiet_trainer(max_epochs=2, project_dir=run_folder, callbacks=[Kill("on_save_point", 2, number)])
        with pytest.raises(SystemExit) as left:
            trainer.fit(task, loader(classes(20)))
        assert left.value.code == 128 + number
        assert task.ends == [f"on_fit_end {name}", "teardown"]
        assert got == []
        os.kill(os.getpid(), number)
        assert got == [number]
    finally:
        signal.signal(number, former)


def test_a_signal_does_not_wait_for_min_steps(run_folder: Path) -> None:
    interrupted(run_folder, Kill("on_before_optimizer_step", 1), min_epochs=2)
    assert steps_of_adam(run_folder) == {2.0}


def test_a_signal_at_the_very_end_still_ends_the_process(run_folder: Path) -> None:
    interrupted(run_folder, Kill("on_save_point", 10))


def test_a_signal_before_the_first_step_saves_nothing(run_folder: Path) -> None:
    interrupted(run_folder, Kill("sanity batch", 0), num_sanity_val_steps=2)
    assert list((run_folder / "run" / "checkpoints").iterdir()) == []


def test_a_signal_that_is_ignored_stays_ignored(run_folder: Path) -> None:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        fit(run_folder, Kill("on_before_optimizer_step", 2, signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, former)


def test_outside_the_main_thread_no_handler_is_set(run_folder: Path) -> None:
    threads: list[Any] = []

    def train() -> None:
        threads.append(fit(run_folder))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert len(threads) == 1


SCRIPT = """
import os, signal, sys
from tests.small_tasks import Net, classes, loader, quiet_trainer

class Slow(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            for _ in range({times}):
                os.kill(os.getpid(), signal.{name})
            if {times} > 1:
                print("goes on", flush=True)
        return super().training_step(batch, batch_idx)

    def teardown(self, run):
        print("teardown", flush=True)

quiet_trainer(max_epochs=1, project_dir={folder!r}, log_with="tensorboard").fit(Slow(), loader(classes(20)))
print("done", flush=True)
"""


def run_script(folder: Path, name: str, times: int) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(name=name, times=times, folder=str(folder))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)


def test_ctrl_c_ends_the_process_with_130_after_the_step(run_folder: Path) -> None:
    done = run_script(run_folder, "SIGINT", 1)
    assert (done.returncode, done.stdout.split()) == (130, ["teardown"])


def test_a_second_signal_ends_the_process_at_once(run_folder: Path) -> None:
    done = run_script(run_folder, "SIGINT", 2)
    assert done.returncode in (130, -signal.SIGINT)
    assert "goes on" not in done.stdout and "done" not in done.stdout
    assert "KeyboardInterrupt" in done.stderr


def test_settings_of_a_trainer_know_nothing_of_signals(run_folder: Path) -> None:
    """A run that was interrupted leaves nothing to the next one of the same Trainer."""
    kill = Kill("on_before_optimizer_step", 1)
    trainer: Trainer = quiet_trainer(max_epochs=1, project_dir=run_folder, callbacks=[kill])
    with pytest.raises(SystemExit):
        trainer.fit(Adam(), loader(classes(20)))
    assert trainer.fit(Adam(), loader(classes(20))).stop_reason == "max_epochs"
