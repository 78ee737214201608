"""The progress bar as a person sees it: on a terminal's screen, in a log file, on one rank of several."""

import fcntl
import io
import logging
import os
import re
import struct
import sys
import termios
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader
from tqdm import tqdm

from sanctuary_trainer.callback import Callbacks, get_callback
from sanctuary_trainer.callbacks import ProgressBar
from sanctuary_trainer.state import RunState
from tests.small_tasks import Line, NumberStream, floats, quiet_trainer


def new_run(verb: str = "fit", **attributes: Any) -> Any:
    """What the bar reads of a run."""
    given = {
        "verb": verb,
        "is_main": True,
        "state": RunState(),
        "metrics": {},
        "progress_metrics": {},
        "train_rounds": 8,
        "evaluation_rounds": 4,
        "max_epochs": 2,
        "max_steps": None,
        "loader_name": "",
    }
    return types.SimpleNamespace(**{**given, **attributes})


def evaluate(
    hooks: Callbacks,
    run: Any,
    stage: str,
    metrics: dict[str, float],
    batches: int = 4,
    between: Callable[..., Any] = id,
) -> None:
    hooks.on_evaluation_start(run, stage)
    for batch_idx in range(batches):
        hooks.on_evaluation_batch_end(run, stage, None, None, None)
        between(batch_idx)
    run.metrics.update(metrics)
    hooks.on_evaluation_end(run, stage, metrics)


def train_epoch(
    hooks: Callbacks,
    run: Any,
    *,
    batches: int = 8,
    begin: int = 0,
    val: dict[str, float] | None = None,
    between: Callable[[int], Any] = id,
) -> None:
    """The hooks of one epoch in the order of the loop; `between` is called after each batch."""
    if begin == 0:
        hooks.on_train_epoch_start(run)
    for batch_idx in range(begin, batches):
        hooks.on_train_batch_start(run, None, batch_idx)
        hooks.on_train_batch_end(run, None, batch_idx, None)
        run.state.batch += 1
        run.state.samples += 32
        run.state.global_step += 1
        between(batch_idx)
    run.metrics["train/loss_epoch"] = 0.25
    if val is not None:
        evaluate(hooks, run, "val", val)
    hooks.on_train_epoch_end(run)
    run.state.end_epoch()


def fit(bar: ProgressBar, run: Any, epochs: int = 2, **settings: Any) -> None:
    hooks = Callbacks(None, [bar])
    hooks.setup(run)
    try:
        hooks.on_fit_start(run)
        for _ in range(epochs):
            train_epoch(hooks, run, **settings)
    except BaseException as error:
        hooks.on_exception(run, error)
        raise
    finally:
        hooks.on_fit_end(run)
        hooks.teardown(run)


class Terminal:
    """A pseudo-terminal that stdout and stderr lead to, and what was written to it."""

    def __init__(self, columns: int, lines: int) -> None:
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.stdout = os.fdopen(os.dup(slave), "w", encoding="utf-8", buffering=1)
        self.stderr = os.fdopen(slave, "w", encoding="utf-8", buffering=1)
        self._master = master
        self._written = bytearray()
        # A pseudo-terminal holds 4 KiB; who writes more waits for a reader.
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._written += os.read(self._master, 65536)
            except OSError:  # the last writer is gone
                return

    def close(self) -> str:
        """Ends it; gives everything that was written."""
        if not self.stderr.closed:
            self.stdout.close()
            self.stderr.close()
            self._reader.join(10)
            os.close(self._master)
        return self._written.decode()


def screen(written: str) -> list[str]:
    """The lines of an endless screen after these bytes."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.", written, re.DOTALL):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\x1b[A":
            row -= 1
        else:
            assert not token.startswith("\x1b"), token
            line = lines[row].ljust(column)
            lines[row] = line[:column] + token + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


@pytest.fixture
def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Terminal]]:
    """Called in the test itself, because pytest exchanges the streams after its fixtures."""
    opened = []

    def call(columns: int = 100, lines: int = 30) -> Terminal:
        terminal = Terminal(columns, lines)
        opened.append(terminal)
        monkeypatch.setattr(sys, "stdout", terminal.stdout)
        monkeypatch.setattr(sys, "stderr", terminal.stderr)
        monkeypatch.setenv("TERM", "xterm")
        return terminal

    yield call
    for terminal in opened:
        terminal.close()


@pytest.fixture
def open_log_file(monkeypatch: pytest.MonkeyPatch) -> Callable[[], io.StringIO]:
    """stderr as it is when a program's output goes to a file."""

    def call() -> io.StringIO:
        file = io.StringIO()
        monkeypatch.setattr(sys, "stderr", file)
        return file

    return call


OpenTerminal = Callable[..., Terminal]
OpenLogFile = Callable[[], io.StringIO]


def lines_of(log_file: io.StringIO) -> list[str]:
    text = log_file.getvalue()
    assert "\r" not in text and "\x1b" not in text
    assert text == "" or text.endswith("\n")
    return text.splitlines()


# ---- a terminal


def test_a_terminal_keeps_one_line_for_each_epoch(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal(columns=80)
    run = new_run(metrics={"train/loss": 0.5}, progress_metrics={"train/loss": 0.5, "train/f1": 0.125})
    fit(ProgressBar(refresh_seconds=0), run, val={"val/accuracy": 0.75}, between=lambda _: time.sleep(0.02))
    shown = screen(terminal.close())
    assert len(shown) == 2
    for number, line in enumerate(shown, start=1):
        values = "loss=0.25, f1=0.125, val/accuracy=0.75"
        assert re.match(rf"epoch {number}/2: 100%\|.+\| 8/8, {values} \[00:\d\d<00:00, [\d.]+", line)


def test_the_line_moves_and_its_place_is_lent_to_the_validation(
    open_terminal: OpenTerminal,
) -> None:
    terminal = open_terminal()
    run = new_run(metrics={"train/loss": 0.5})
    fit(ProgressBar(refresh_seconds=0), run, epochs=1, val={"val/accuracy": 0.75})
    drawn = re.split(r"[\r\n]+", terminal.close())
    for batches in range(9):
        assert any(f"epoch 1/2: {100 * batches / 8:3.0f}%" in line and f"| {batches}/8" in line for line in drawn)
    assert any("loss=0.5" in line for line in drawn)
    for batches in range(5):
        assert any(line.startswith("epoch 1/2, val: ") and f"| {batches}/4 [" in line for line in drawn)


def test_what_others_write_stands_above_the_line_and_never_in_it(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()
    logger = logging.getLogger("somebody")
    logger.propagate = False
    handler = logging.StreamHandler(sys.stderr)  # made before the run, as a program's logging is
    logger.addHandler(handler)

    def say(batch_idx: int) -> None:
        if batch_idx == 1:
            print("printed")
            print("in", end=" ")
            print("pieces")
            print()
        if batch_idx == 2:
            logger.warning("logged")
            sys.stderr.write("two\nlines\n")
        if batch_idx == 3:
            # What warnings.warn does, which pytest catches.
            sys.stderr.write(warnings.formatwarning("warned", UserWarning, "script.py", 7, ""))
        if batch_idx == 4:
            tqdm.write("a message")

    fit(ProgressBar(refresh_seconds=0), new_run(), epochs=1, between=say)
    logger.removeHandler(handler)
    shown = screen(terminal.close())
    assert shown[:5] == ["printed", "in pieces", "logged", "two", "lines"]
    assert shown[5:-1] == ["script.py:7: UserWarning: warned", "a message"]
    assert [line for line in shown if "epoch" in line] == [shown[-1]]
    assert "100%" in shown[-1]


def test_the_streams_and_the_loggers_are_put_back(open_terminal: OpenTerminal) -> None:
    open_terminal()
    before = sys.stdout, sys.stderr
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("somebody").addHandler(handler)
    seen = []
    fit(ProgressBar(), new_run(), epochs=1, between=lambda _: seen.append((sys.stdout, sys.stderr, handler.stream)))
    logging.getLogger("somebody").removeHandler(handler)
    assert seen[0][0] is not before[0] and seen[0][1] is not before[1] and seen[0][2] is not before[1]
    assert seen[0][0].isatty() and seen[0][0].fileno() == before[0].fileno() and seen[0][0].encoding == "utf-8"
    assert (sys.stdout, sys.stderr) == before
    assert handler.stream is before[1]


def test_a_bar_of_somebody_else_has_a_line_of_its_own(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()

    def download(batch_idx: int) -> None:
        if batch_idx == 3:
            for _ in tqdm(range(5), desc="theirs", mininterval=0, miniters=1, ncols=80):
                pass

    fit(ProgressBar(refresh_seconds=0), new_run(), epochs=1, between=download)
    shown = screen(terminal.close())
    assert sorted(line[:11] for line in shown if "100%" in line) == ["epoch 1/2: ", "theirs: 100"]


@pytest.mark.parametrize("rounds", [8, None])
def test_a_prediction_inside_a_fit_covers_its_line_and_leaves_one_of_its_own(
    open_terminal: OpenTerminal, rounds: int | None
) -> None:
    terminal = open_terminal()
    before = sys.stdout, sys.stderr
    inner = new_run("predict", evaluation_rounds=rounds and 4)
    inner_hooks = Callbacks(None, [ProgressBar(refresh_seconds=0)])

    def predict(batch_idx: int) -> None:
        # Begun in the first epoch and ended in the second: a bar is opened while two runs show theirs.
        if batch_idx == 3 and run.state.epoch == 0:
            inner_hooks.setup(inner)
            inner_hooks.on_predict_batch_end(inner, None, None, None)
            print("inside")
        if batch_idx == 3 and run.state.epoch == 1:
            inner_hooks.teardown(inner)
            print("after")

    run = new_run(train_rounds=rounds, progress_metrics={"train/metric": 0.123456789})
    fit(ProgressBar(refresh_seconds=0), run, between=predict)
    shown = screen(terminal.close())
    assert [re.split(r"[: ]", line)[0] for line in shown] == ["inside", "epoch", "predict", "after", "epoch"]
    assert shown[2].endswith("batch/s]") and shown[2].count("[") == 1
    assert (sys.stdout, sys.stderr) == before


def test_a_failing_run_leaves_a_whole_line_behind(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()

    def fail(batch_idx: int) -> None:
        if batch_idx == 4:
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fit(ProgressBar(refresh_seconds=0), new_run(), between=fail)
    print("Traceback", file=sys.stderr)
    shown = screen(terminal.close())
    assert len(shown) == 2 and "| 5/8 [" in shown[0] and shown[1] == "Traceback"


def test_a_validation_that_fails_leaves_the_epochs_line_alone(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()
    run, hooks = new_run(), Callbacks(None, [ProgressBar(refresh_seconds=0)])
    hooks.setup(run)
    hooks.on_train_epoch_start(run)
    hooks.on_evaluation_start(run, "val")
    hooks.on_evaluation_batch_end(run, "val", None, None, None)
    hooks.on_exception(run, RuntimeError())
    hooks.on_fit_end(run)
    hooks.teardown(run)
    assert [line[:9] for line in screen(terminal.close())] == ["epoch 1/2"]


@pytest.mark.parametrize(("columns", "lines"), [(40, 30), (0, 0), (100, 0), (0, 30), (80, 1)])
@pytest.mark.parametrize("rounds", [8, None])
def test_no_line_is_wider_than_the_terminal(
    open_terminal: OpenTerminal, columns: int, lines: int, rounds: int | None
) -> None:
    terminal = open_terminal(columns, lines)
    many = {f"train/metric_{n}": n / 7 for n in range(30)}
    run = new_run(train_rounds=rounds, max_epochs=None, progress_metrics=many)
    fit(ProgressBar(refresh_seconds=0), run, val={"val/accuracy": 0.75})
    written = terminal.close()
    assert max(len(line) for line in re.split(r"[\r\n]+", written)) <= (columns or 80)
    assert [line[:8] for line in screen(written)] == ["epoch 1:", "epoch 2:"]


def test_sanity_validation_leaves_nothing(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()
    run, hooks = new_run(), Callbacks(None, [ProgressBar(refresh_seconds=0)])
    hooks.setup(run)
    evaluate(hooks, run, "sanity", {"val/accuracy": 0.1}, batches=2)
    hooks.on_fit_end(run)
    hooks.teardown(run)
    written = terminal.close()
    assert "sanity: " in written
    assert screen(written) == []


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_an_evaluation_of_its_own_keeps_its_line(open_terminal: OpenTerminal, verb: str) -> None:
    terminal = open_terminal()
    stage = {"validate": "val"}.get(verb, verb)
    run, hooks = new_run(verb), Callbacks(None, [ProgressBar()])
    hooks.setup(run)
    evaluate(hooks, run, stage, {f"{stage}/accuracy": 0.75})
    hooks.teardown(run)
    (line,) = screen(terminal.close())
    assert line.startswith(f"{stage}: 100%|") and f"| 4/4, {stage}/accuracy=0.75 [" in line


def test_each_of_several_loaders_has_its_own_count(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()
    run, hooks = new_run("validate"), Callbacks(None, [ProgressBar(refresh_seconds=0)])
    hooks.setup(run)
    hooks.on_evaluation_start(run, "val")
    for run.loader_name, run.evaluation_rounds in [("easy", 2), ("hard", 3)]:
        for _ in range(run.evaluation_rounds):
            hooks.on_evaluation_batch_end(run, "val", None, None, None)
    run.loader_name = ""
    hooks.on_evaluation_end(run, "val", {"val/easy/loss": 1.0, "val/hard/loss": 2.0})
    hooks.teardown(run)
    written = terminal.close()
    assert re.search(r"val/easy: 100%\|.*\| 2/2 ", written) and re.search(r"val/hard: 100%\|.*\| 3/3 ", written)
    assert len(screen(written)) == 1


def test_prediction_shows_its_batches(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()
    run, hooks = new_run("predict"), Callbacks(None, [ProgressBar()])
    hooks.setup(run)
    for _ in range(4):
        hooks.on_predict_batch_end(run, None, None, None)
    hooks.teardown(run)
    (line,) = screen(terminal.close())
    assert line.startswith("predict: 100%|") and "| 4/4 [" in line


def test_a_second_run_with_the_same_bar_starts_afresh(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()
    bar = ProgressBar(refresh_seconds=0)
    fit(bar, new_run(max_epochs=1), epochs=1, val={"val/accuracy": 0.75})
    fit(bar, new_run(max_epochs=1), epochs=1)
    first, second = screen(terminal.close())
    assert "val/accuracy" in first and "val/accuracy" not in second


# ---- a loader without length (case 95)


def test_an_unknown_total_is_never_a_nan(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()
    run = new_run(train_rounds=None, evaluation_rounds=None, max_epochs=None, max_steps=20)
    fit(ProgressBar(refresh_seconds=0), run, batches=10, val={"val/loss": 1.0})
    written = terminal.close()
    assert "nan" not in written and "None" not in written
    shown = screen(written)
    assert [line.split("[")[0] for line in shown] == [
        "epoch 1: 10 batches, step=10/20, loss=0.25, val/loss=1 ",
        "epoch 2: 10 batches, step=20/20, loss=0.25, val/loss=1 ",
    ]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_an_unknown_total_is_fine_in_every_verb(open_log_file: OpenLogFile, verb: str) -> None:
    log_file = open_log_file()
    run, hooks = new_run(verb, evaluation_rounds=None), Callbacks(None, [ProgressBar()])
    hooks.setup(run)
    if verb == "predict":
        for _ in range(4):
            hooks.on_predict_batch_end(run, None, None, None)
    else:
        evaluate(hooks, run, verb, {})
    hooks.teardown(run)
    (line,) = lines_of(log_file)
    assert re.fullmatch(rf"{verb}: 4 batches, 00:00, [\de.+]+ batches/s", line)


@pytest.mark.parametrize(("limits", "steps"), [({}, 3), ({"limit_train_batches": 5, "limit_val_batches": 2}, 2)])
def test_a_loader_without_length_goes_through_every_verb(
    open_log_file: OpenLogFile, limits: dict[str, int], steps: int
) -> None:
    log_file = open_log_file()
    stream = DataLoader(NumberStream(floats(range(10))), batch_size=1)
    trainer = quiet_trainer(
        max_epochs=1, gradient_accumulation_steps=4, callbacks=[ProgressBar()], num_sanity_val_steps=2, **limits
    )
    assert trainer.fit(Line(), stream, stream).global_step == steps  # the short window at the end is a step too
    trainer.validate(Line(), stream)
    trainer.test(Line(), stream)
    trainer.predict(Line(), stream)
    lines = lines_of(log_file)
    assert not any("nan" in line or "None" in line for line in lines)
    rounds = [re.findall(r"^(.+?): (?:\d+%, )?([\d/]+) batches,", line)[0] for line in lines]
    assert rounds[-4][0] == "epoch 1/1" and rounds[-4][1] in (("5", "5/5") if limits else ("10",))
    assert rounds[-3:] == [
        ("val", "2/2" if limits else "10"),
        ("test", "10"),
        ("predict", "10"),
    ]


def test_a_run_that_stops_before_the_known_end_shows_where(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()
    run, hooks = new_run(max_steps=3), Callbacks(None, [ProgressBar()])
    hooks.setup(run)
    hooks.on_train_epoch_start(run)
    for batch_idx in range(3):
        hooks.on_train_batch_end(run, None, batch_idx, None)
        run.state.global_step += 1
    hooks.on_fit_end(run)
    hooks.teardown(run)
    (line,) = screen(terminal.close())
    assert "| 3/8, step=3/3 [" in line


def test_a_resumed_epoch_goes_on_where_it_was(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()
    run, hooks = new_run(state=RunState(epoch=1, batch=5, samples=160)), Callbacks(None, [ProgressBar()])
    hooks.setup(run)
    train_epoch(hooks, run, begin=5)  # without on_train_epoch_start
    hooks.on_fit_end(run)
    hooks.teardown(run)
    (line,) = screen(terminal.close())
    assert line.startswith("epoch 2/2: 100%|") and "| 8/8, loss=0.25 [" in line


# ---- a log file


def test_a_log_file_gets_few_whole_lines(open_log_file: OpenLogFile) -> None:
    log_file = open_log_file()
    run = new_run(train_rounds=1000, metrics={"train/loss": 0.5})
    fit(ProgressBar(refresh_seconds=0), run, batches=1000, val={"val/accuracy": 0.75})
    lines = lines_of(log_file)
    assert len(lines) == 2
    for number, line in enumerate(lines, start=1):
        assert re.fullmatch(
            rf"epoch {number}/2: 100%, 1000/1000 batches, 00:0\d, [\de.+]+ samples/s, loss=0.25, "
            r"val/accuracy=0.75",
            line,
        )


def test_a_long_epoch_gets_a_line_at_each_quarter(open_log_file: OpenLogFile) -> None:
    log_file = open_log_file()
    run = new_run(train_rounds=100, metrics={"train/loss": 0.5})
    fit(ProgressBar(refresh_seconds=0, line_seconds=0), run, epochs=1, batches=100)
    lines = lines_of(log_file)
    assert [line.split(",")[0] for line in lines] == [f"epoch 1/2: {percent}%" for percent in (25, 50, 75, 100)]
    assert all("loss=0.5" in line for line in lines[:3]) and "loss=0.25" in lines[3]


def test_an_epoch_without_known_end_gets_a_line_a_minute(
    open_log_file: OpenLogFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_file = open_log_file()
    now = [0.0]
    for module in ("progress_bar", "bars"):
        monkeypatch.setattr(f"sanctuary_trainer.callbacks.{module}.perf_counter", lambda: now[0])

    def ten_seconds(batch_idx: int) -> None:
        now[0] += 10.0

    fit(ProgressBar(), new_run(train_rounds=None), epochs=1, batches=20, between=ten_seconds)
    lines = lines_of(log_file)
    assert [line.split(", ")[:2] for line in lines] == [
        ["epoch 1/2: 7 batches", "01:00"],
        ["epoch 1/2: 13 batches", "02:00"],
        ["epoch 1/2: 19 batches", "03:00"],
        ["epoch 1/2: 20 batches", "03:20"],
    ]
    assert "3.2 samples/s" in lines[-1]  # 32 samples in 10 seconds


def test_speed_and_time_leave_evaluation_out(open_log_file: OpenLogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    log_file = open_log_file()
    now = [0.0]
    for module in ("progress_bar", "bars"):
        monkeypatch.setattr(f"sanctuary_trainer.callbacks.{module}.perf_counter", lambda: now[0])
    run, hooks = new_run(), Callbacks(None, [ProgressBar()])

    def second(batch_idx: int) -> None:
        now[0] += 1.0

    def minute(batch_idx: int) -> None:
        now[0] += 60.0

    hooks.setup(run)
    hooks.on_train_epoch_start(run)
    for batch_idx in range(8):
        second(batch_idx)
        hooks.on_train_batch_end(run, None, batch_idx, None)
        run.state.samples += 32
    evaluate(hooks, run, "val", {"val/accuracy": 0.5}, between=minute)
    hooks.on_train_epoch_end(run)
    line = lines_of(log_file)[-1]
    assert line == "epoch 1/2: 100%, 8/8 batches, 00:08, 32 samples/s, val/accuracy=0.5"


def test_validation_within_an_epoch_has_a_line_and_at_its_end_none(open_log_file: OpenLogFile) -> None:
    log_file = open_log_file()
    run, hooks = new_run(), Callbacks(None, [ProgressBar()])
    hooks.setup(run)
    evaluate(hooks, run, "sanity", {"val/accuracy": 0.1}, batches=2)

    def middle(batch_idx: int) -> None:
        if batch_idx == 3:
            evaluate(hooks, run, "val", {"val/accuracy": 0.5})

    train_epoch(hooks, run, between=middle, val={"val/accuracy": 0.75})
    within, end = lines_of(log_file)
    assert re.fullmatch(r"epoch 1/2, val: 100%, 4/4 batches, 00:00, [\de.+]+ batches/s, val/accuracy=0.5", within)
    assert end.startswith("epoch 1/2: 100%, 8/8") and end.endswith("val/accuracy=0.75")


def test_a_line_of_a_log_file_names_at_most_twelve_values(open_log_file: OpenLogFile) -> None:
    log_file = open_log_file()
    fit(ProgressBar(), new_run(), epochs=1, val={f"val/class_{n}": n / 100 for n in range(100)})
    (line,) = lines_of(log_file)
    assert line.count("val/class_") == 11 and line.endswith("val/class_10=0.1, 89 more")


def test_a_dumb_terminal_gets_whole_lines(open_terminal: OpenTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal()
    monkeypatch.setenv("TERM", "dumb")
    fit(ProgressBar(), new_run(), epochs=1)
    written = terminal.close()
    assert written.replace("\r\n", "").count("\r") == 0
    assert len(screen(written)) == 1


def test_no_stderr_at_all_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    fit(ProgressBar(refresh_seconds=0, line_seconds=0), new_run(), val={"val/accuracy": 0.75})


def test_tqdms_own_switch_turns_the_bar_off(open_terminal: OpenTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    open_terminal()
    monkeypatch.setenv("TQDM_DISABLE", "1")
    fit(ProgressBar(refresh_seconds=0), new_run(), val={"val/accuracy": 0.75})


# ---- several ranks (case 94)


def test_only_rank_0_shows_anything(capfd: pytest.CaptureFixture[str]) -> None:
    for verb in ("validate", "predict"):
        run, hooks = new_run(verb, is_main=False), Callbacks(None, [ProgressBar(refresh_seconds=0, line_seconds=0)])
        hooks.setup(run)
        if verb == "predict":
            hooks.on_predict_batch_end(run, None, None, None)
        else:
            evaluate(hooks, run, "val", {"val/accuracy": 0.75})
        hooks.teardown(run)
    fit(ProgressBar(refresh_seconds=0, line_seconds=0), new_run(is_main=False), val={"val/accuracy": 0.75})
    assert capfd.readouterr() == ("", "")


def test_another_rank_in_the_same_terminal_keeps_its_hands_off(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()
    streams = sys.stdout, sys.stderr
    seen = []
    fit(ProgressBar(refresh_seconds=0), new_run(is_main=False), between=lambda _: seen.append((sys.stdout, sys.stderr)))
    assert set(seen) == {streams}
    assert terminal.close() == ""


def test_a_loader_worker_does_not_draw_the_bar(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()

    def fork(batch_idx: int) -> None:
        if batch_idx == 3:
            process = os.fork()
            if process == 0:
                print("from a worker")
                os._exit(0)
            os.waitpid(process, 0)

    fit(ProgressBar(refresh_seconds=100), new_run(), epochs=1, between=fork)
    written = terminal.close()
    assert written.count("from a worker") == 1
    assert len(re.findall("epoch 1/2", written)) <= 5  # opened, first batch, at the end; none by the worker


# ---- what it costs


def test_a_batch_costs_next_to_nothing(open_log_file: OpenLogFile) -> None:
    open_log_file()
    run, hooks = new_run(train_rounds=None), Callbacks(None, [get_callback("progress_bar")])
    hooks.setup(run)
    hooks.on_train_epoch_start(run)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        for batch_idx in range(1000):
            hooks.on_train_batch_end(run, None, batch_idx, None)
        times.append((time.perf_counter() - began) / 1000)
    hooks.teardown(run)
    assert min(times) < 5e-6  # about 0.2e-6 on an idle machine


def test_teardown_without_setup_is_harmless() -> None:
    hooks = Callbacks(None, [ProgressBar()])
    hooks.on_exception(new_run(), RuntimeError())
    hooks.on_fit_end(new_run())
    hooks.teardown(new_run())
