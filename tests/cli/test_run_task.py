"""`sanctuary fit` and its like: what is read from files and flags, what is refused in which words, what comes out."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sanctuary_trainer import load_predictions
from sanctuary_trainer.cli.configuration import gather
from sanctuary_trainer.cli.main import main

ROOT = Path(__file__).resolve().parent.parent.parent
TASK = ["--task", "tests.cli.tiny.Typed"]
QUIET = ["--trainer.default_callbacks", "false", "--trainer.log_with", "null"]
RUN = """
task: {class_path: tests.cli.tiny.Typed, init_args: {lr: 0.5}}
data:
  class_path: tests.cli.tiny.Data
  init_args:
    batch_size: '2'
trainer:
  max_epochs: 2
  seed: 0
  run_name: first
  log_with: null
  default_callbacks: false
callbacks:
- checkpoint: {every_n_steps: 2, save_top_k: -1}
- tests.cli.tiny.Every: {every: 5}
"""


@pytest.fixture
def run_yaml() -> Path:
    path = Path("run.yaml")
    path.write_text(RUN, encoding="utf-8")
    return path


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence that a command ends with before anything is made."""
    assert main(arguments) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.count("\n") == 1, errors
    assert not Path("runs").exists()
    return errors.removeprefix(f"sanctuary {arguments[0]}: error: ").rstrip("\n")


def refused_file(text: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    Path("bad.yaml").write_text(text, encoding="utf-8")
    return refused(["fit", "--config", "bad.yaml", *flags], capsys)


def plain(arguments: list[str]) -> Any:
    return yaml.safe_load(gather("fit", arguments).as_yaml())


# What is read


def test_flags_beat_the_file_wherever_they_stand(run_yaml: Path) -> None:
    flags = ["--task.lr", "3e-4", "--config", str(run_yaml), "--trainer.max_epochs=7"]
    for arguments in (flags, [*flags[2:4], *flags[:2], *flags[4:]]):
        told = plain(arguments)
        assert told["task"]["init_args"] == {"lr": 3e-4, "width": 2}
        assert told["data"]["init_args"] == {"batch_size": 2}
        assert told["trainer"]["max_epochs"] == 7 and told["trainer"]["run_name"] == "first"


def test_a_later_file_beats_an_earlier_one(run_yaml: Path) -> None:
    Path("more.yaml").write_text("trainer: {max_epochs: 9}\n")
    assert plain(["--config", "run.yaml", "--config", "more.yaml"])["trainer"]["max_epochs"] == 9
    assert plain(["--config", "more.yaml", "--config", "run.yaml"])["trainer"]["max_epochs"] == 2


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 0.001), ("'1e-3'", 0.001), ("1", 1.0), ('"0.25"', 0.25), ("5E-1", 0.5)]
)
def test_a_number_is_one_however_it_is_written(text: str, value: float) -> None:
    Path("run.yaml").write_bytes(f"\ufefftask:\r\n  class_path: tests.cli.tiny.Typed\r\n  lr: {text}\r\n".encode())
    assert plain(["--config", "run.yaml"])["task"]["init_args"]["lr"] == value
    assert plain([*TASK, f"--task.lr={text.strip(chr(34) + chr(39))}"])["task"]["init_args"]["lr"] == value


def test_another_task_does_not_get_the_arguments_of_the_files(run_yaml: Path) -> None:
    told = plain(["--config", str(run_yaml), "--task", "tests.cli.tiny.Untyped"])
    assert told["task"] == {"class_path": "tests.cli.tiny.Untyped", "init_args": {"lr": 0.1, "width": 2, "flag": False}}


def test_callbacks_are_named_with_their_fields_and_flags_change_those_of_files(run_yaml: Path) -> None:
    flags = ["--callback", "Checkpoint", "--callback.every_n_steps", "3", "--callback", "ema", "--callback.decay=0.5"]
    again = ["--callback", "checkpoint", "--callback.monitor", "val/loss", "--callback.mode", "min"]
    callbacks = plain(["--config", str(run_yaml), *flags, *again])["callbacks"]
    assert [one["class_path"].rpartition(".")[2] for one in callbacks] == ["Checkpoint", "Every", "EMA", "Checkpoint"]
    assert callbacks[0]["init_args"]["every_n_steps"] == 3 and callbacks[0]["init_args"]["save_top_k"] == -1
    assert callbacks[1]["init_args"] == {"every": 5} and callbacks[2]["init_args"]["decay"] == 0.5
    assert callbacks[3]["init_args"]["monitor"] == "val/loss"


def test_a_setting_that_is_switched_off_stays_so_in_the_saved_configuration() -> None:
    told = plain([*TASK, *QUIET])
    assert told["trainer"]["log_with"] is None and told["trainer"]["default_callbacks"] is False
    Path("saved.yaml").write_text(yaml.safe_dump(told))
    assert plain(["--config", "saved.yaml"]) == told


# What is refused

HEAD = "task:\n  class_path: tests.cli.tiny.Typed\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer:\n  max_epoch: 3\n", "trainer.max_epoch (bad.yaml, line 2): no argument of Trainer; did you mean"),
        (HEAD + "  init_args:\n    lr: '1e-3x'\n", "task.lr (bad.yaml, line 4): '1e-3x'; a number was expected."),
        (HEAD + "  lr: [1, 2]\n", "task.lr (bad.yaml, line 3): '[1, 2]'; a number was expected."),
        (HEAD + "  width: 2.5\n", "task.width (bad.yaml, line 3): '2.5'; a whole number was expected."),
        (HEAD + "  width:\n", "task.width (bad.yaml, line 3): 'null'; a whole number was expected."),
        (HEAD + "  widht: 2\n", "task.widht (bad.yaml, line 3): no argument of Typed; did you mean 'task.width'?"),
        (HEAD + "  lr: 1\n  lr: 2\n", "bad.yaml, line 4: task has 'lr' twice."),
        ("optimiser:\n  lr: 3\n", "optimiser (bad.yaml, line 2): fit has config, task, data, trainer, callback, "),
        ("trainer:\n  deterministic: maybe\n", "trainer.deterministic (bad.yaml, line 2): 'maybe'; true or false was"),
        ("trainer:\n max_epochs: 1\n  seed: 2\n", "bad.yaml, line 3: no YAML: "),
        ("- a\n- b\n", "bad.yaml, line 1: the file holds '[a, b]'; KEY: VALUE was expected."),
        ("", "bad.yaml is empty; "),
        ("trainer: {[a]: b}\n", "bad.yaml, line 1: trainer has the key [a]; a name was expected."),
        (HEAD + "  width: {a: 1,\n    a: 2}\n", "bad.yaml, line 4: width has 'a' twice."),
        ("trainer: 3\n", "bad.yaml, line 1: trainer holds '3'; KEY: VALUE was expected."),
        ("callbacks: [null]\n", "bad.yaml, line 1: callbacks holds 'null'; KEY: VALUE was expected."),
        ("callbacks:\n- emma\n", "callback (bad.yaml, line 2): No callback is called 'emma'. Did you mean 'ema'?"),
        ("trainer:\n  callbacks: [ema]\n", "trainer.callbacks (bad.yaml, line 2): callbacks are a list of their own"),
        ("format: {a: 1}\n", "bad.yaml, line 1: the file has format {a: 1}; "),
        ("# nothing yet\n", "bad.yaml is empty; "),
        ("format: 2\ntrainer: {max_epochs: 1}\n", "bad.yaml, line 1: the file has format 2; this version "),
        ("callbacks:\n- ema: {decayy: 0.9}\n", "callback.decayy (bad.yaml, line 2): no argument of EMA; did you mean"),
        ("callbacks: ema\n", "bad.yaml, line 1: callbacks is a list: "),
        ("callbacks:\n- early_stopping\n", "callback: EarlyStopping needs --callback.monitor, --callback.mode."),
    ],
)  # fmt: skip
def test_a_file_that_says_something_wrong_is_told_with_key_line_and_nearest_name(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused_file(text, capsys).startswith(said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "no task was named: sanctuary fit --task my.module.Task, or --config run.yaml."),
        (["--task", "tests.cli.tiny.Typd"], "task (the command line): tests.cli.tiny has no class 'Typd'; did"),
        (["--task", "tests.cli.tinny.Typed"], "task (the command line): there is no module 'tests.cli.tinny'; "),
        (["--task", "tests.cli.tiny.Data"], "task (the command line): tests.cli.tiny.Data is no VisionTask; "),
        (["--task", "tests.cli.tiny.Half"], "task (the command line): tests.cli.tiny.Half has no loss, which "),
        (["--task", "ImageClassificaton"], "task (the command line): 'ImageClassificaton' is none of "),
        (["--task", "ImageClassification"], "task: ImageClassification needs --task.model."),
        (["--task", "tests.cli.tiny.Untyped", "--task.lr", "fast"], "task.lr (the command line): 'fast'; a number "),
        ([*TASK, "--trainer.max_epochs", "-3"], "trainer.max_epochs (the command line): max_epochs=-3; "),
        ([*TASK, "--trainer.max_epochs", "1"], "fit has no train loader: "),
        ([*TASK, "--data.batch_size", "1"], "data.batch_size (the command line) is given, but no --data."),
        ([*TASK, "--callback.decay", "1"], "callback.decay (the command line) belongs to no callback: "),
        ([*TASK, "--checkpoint", "x"], "checkpoint (the command line): fit has config, "),
        (["train"], "'train' is no flag: --KEY VALUE was expected"),
        (["--config"], "--config needs a value: --config VALUE."),
        (["--trainer", "3"], "trainer (the command line): a setting was expected, as in --trainer.max_epochs 3."),
        ([*TASK, "--callback", "tests.cli.tiny.Needing"], "callback: Needing needs --callback.how."),
        (["--callback", "tests.cli.tiny.Chosen", "--callback.kind", "c"], "callback.kind (the command line): 'c'; one"),
        (["--config", "nowhere.yaml"], "[Errno 2] No such file or directory: 'nowhere.yaml'"),
    ],
)  # fmt: skip
def test_flags_that_say_something_wrong_are_told_in_one_sentence(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(["fit", *flags], capsys).startswith(said)


def test_an_empty_folder_of_images_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    flags = ["--task", "ImageClassification", "--task.model", "timm:test_resnet", "--task.pretrained", "false"]
    said = refused(["fit", *flags, "--data", "ImageData", "--data.root", "empty"], capsys)
    assert "empty" in said


def test_an_image_that_a_loaders_worker_cannot_read_is_told_in_one_sentence(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--config", str(run_yaml), "--data", "tests.cli.tiny.Unreadable"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "sanctuary fit: error: image 3 cannot be read"


def test_an_error_of_the_users_own_code_is_a_traceback(run_yaml: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="own mistake"):
        main(["fit", "--config", str(run_yaml), "--task", "tests.cli.tiny.Broken"])


def test_what_cannot_be_written_is_told(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert main(["fit", "--config", str(run_yaml), "--trainer.project_dir", "file"]) == 2
    assert "file" in capsys.readouterr().err


# What comes out


def test_a_fit_keeps_its_configuration_which_does_the_same_again(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--config", str(run_yaml)]) == 0
    output = capsys.readouterr().out
    assert "configuration: runs/first/config.yaml\ncurves: sanctuary dashboard runs/first\n" in output
    assert main(["fit", "--config", "runs/first/config.yaml", "--trainer.run_name", "second"]) == 0
    first, second = (Path(f"runs/{name}/checkpoints/step_00000008/model.safetensors") for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_a_checkpoint_is_tested_and_predicted_with(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", str(run_yaml)]) == 0
    [folder] = Path("runs/first/checkpoints").glob("*8")
    values = []
    for verb in ("validate", "test"):
        capsys.readouterr()
        assert main([verb, "--config", "runs/first/config.yaml", "--checkpoint", str(folder)]) == 0
        name, value = capsys.readouterr().out.split(": ")
        assert name == {"validate": "val/loss", "test": "test/loss"}[verb]
        values.append(value)
    assert values[0] == values[1]
    flags = ["--config", "runs/first/config.yaml", "--checkpoint", str(folder), "--output_dir", "out"]
    assert main(["predict", *flags]) == 0
    assert len(load_predictions("out")) == 8
    assert main(["predict", *flags[:-2]]) == 2
    assert "predict needs --output_dir FOLDER" in capsys.readouterr().err


def test_a_task_gets_the_class_names_of_its_data(run_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("tests.cli.tiny.Typed.setup", lambda task, stage: seen.append(task.class_names), raising=False)
    assert main(["fit", "--config", str(run_yaml)]) == 0
    assert main(["fit", "--config", str(run_yaml), "--trainer.run_name=b", "--task.class_names=[x]"]) == 0
    assert seen == [["a", "b"], ["x"]]


def test_help_shows_the_arguments_of_the_task_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *TASK, "--help"]) == 0
    output = capsys.readouterr().out
    assert "--task.lr LR" in output and "how far an update goes" in output and "--trainer.max_epochs" in output


def launched(command: list[str]) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.distributed
def test_torchrun_starts_ranks_that_fit_together(run_yaml: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = launched([*torchrun, "-m", "sanctuary_trainer", "fit", "--config", str(run_yaml), "--trainer.max_epochs=1"])
    assert done.stdout.count("configuration: runs/first/config.yaml") == 1
    assert [path.name for path in sorted(Path("runs/first/checkpoints").iterdir())][-1].endswith("2")  # 8 / 2 / 2 steps


@pytest.mark.slow
def test_accelerate_launch_that_starts_fewer_processes_is_told(run_yaml: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    done = launched([*launch, "-m", "sanctuary_trainer", "fit", "--config", str(run_yaml)])
    assert "accelerate launch was told 2 processes and started one" in done.stderr
    assert "torchrun --nproc-per-node 2 -m sanctuary_trainer" in done.stderr
