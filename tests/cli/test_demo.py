"""`sanctuary demo` as a person types it: what it trains, writes and says, alone and in two processes."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from sanctuary_trainer.cli.main import main
from sanctuary_trainer.cli.small_cnn import SmallCNN

NAMES = ["blue", "green things", "red"]


def colours(root: Path, per_class: int = 20) -> Path:
    """Noise with more of one colour than of the others; a class is called like its colour."""
    generator = np.random.default_rng(0)
    for channel, name in ((2, "blue"), (1, "green things"), (0, "red")):
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            pixels = generator.integers(0, 120, (12, 12, 3), np.uint8)
            pixels[..., channel] += 100
            Image.fromarray(pixels).save(root / name / f"{i:02}.png")
    return root


def check_results(folder: Path, output: str) -> None:
    """What stands in the run's folder agrees with itself and with what was printed."""
    (run,) = folder.iterdir()
    accuracy = float(re.fullmatch(r"test accuracy: (\d\.\d{4})", output.splitlines()[-1])[1])  # type: ignore[index]
    with (run / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["image", "label", "probability", "true_label"]
    assert [row["true_label"] for row in rows] == [name for name in NAMES for _ in range(4)]
    assert all(Path(row["image"]).parts[0] == row["true_label"] and row["label"] in NAMES for row in rows)
    assert all(1 / len(NAMES) <= float(row["probability"]) <= 1 for row in rows)
    assert accuracy == pytest.approx(sum(row["label"] == row["true_label"] for row in rows) / 12, abs=1e-4)
    assert accuracy >= 0.75
    assert Image.open(run / "confusion_matrix.png").size[0] > 100
    assert list(run.glob("events.out.tfevents.*")) and (run / "metrics.jsonl").is_file()
    assert output.count("test accuracy") == 1
    for name in ("confusion_matrix.png", "predictions.csv"):
        assert str(run / name) in output
    assert f"dashboard {run}" in output
    kept = yaml.safe_load((run / "config.yaml").read_text())
    assert (
        kept["data"]["class_path"].endswith("DemoData")
        and kept["task"]["init_args"]["model"]["init_args"]["side"] == 12
    )


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 64, 64), (1, 28, 28), (3, 17, 31), (1, 3, 5)])
def test_the_network_takes_images_of_any_size(shape: tuple[int, int, int]) -> None:
    network = SmallCNN(shape[0], min(shape[1:]), 7).eval()
    assert network(torch.zeros(2, *shape, dtype=torch.uint8)).shape == (2, 7)


def test_a_folder_of_images_is_learned_and_what_came_out_lies_in_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = colours(tmp_path / "data")
    (data / "red" / "broken.png").write_text("no image")
    runs = tmp_path / "my runs"
    assert main(["demo", "--data", str(data), "--epochs", "12", "--project-dir", str(runs)]) == 0
    output, errors = capfd.readouterr()
    assert str(data / "red" / "broken.png") in errors
    assert output.splitlines()[0] == "60 images of 3 classes: 42 to train on, 6 to validate, 12 to test"
    assert "epoch 12/12" in errors
    check_results(runs, output.replace(f"'{runs}/imageclassification-1'", f"{runs}/imageclassification-1"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["--processes", "torchrun"])
def test_two_processes_speak_and_write_as_one(launcher: str, tmp_path: Path) -> None:
    data, runs = colours(tmp_path / "data"), tmp_path / "runs"
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if launcher == "torchrun" else []
    )
    command = [*torchrun, "-m", "sanctuary_trainer", "demo", "--data", str(data), "--epochs", "12"]
    command += ["--project-dir", str(runs)] + (["--processes", "2"] if launcher == "--processes" else [])
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("60 images of 3 classes") == 1
    assert "2 ranks" in done.stdout + done.stderr
    check_results(runs, done.stdout)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_a_failure_in_one_of_several_processes_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = ["-m", "sanctuary_trainer", "demo", "--data", str(colours(tmp_path / "data")), "--processes", "2"]
    done = subprocess.run(
        [sys.executable, *command, "--project-dir", str(tmp_path / "file")], capture_output=True, text=True
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert re.search(r"error: Process \d of 2 failed: .*Error: .*file", line)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_digits_are_told_apart(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    done = subprocess.run(
        [sys.executable, "-m", "sanctuary_trainer", "demo"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1].removeprefix("test accuracy: ")) >= 0.98
    assert len(list((tmp_path / "runs").iterdir())) == 1
