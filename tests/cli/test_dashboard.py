"""`sanctuary dashboard`: TensorBoard answers at the address that was printed, and ends when told to."""

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from sanctuary_trainer.cli.main import main


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_the_runs_until_it_is_ended(end: signal.Signals, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a-1"
    run.mkdir(parents=True)
    (run / "events.out.tfevents.1.here").touch()
    with subprocess.Popen(
        [sys.executable, "-m", "sanctuary_trainer", "dashboard", "--port", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            address = re.search(r"runs is shown at (http://localhost:\d+/)", process.stdout.readline())
            assert address is not None, process.stderr.read()
            with urllib.request.urlopen(address[1], timeout=60) as answer:
                assert b"TensorFlow Authors" in answer.read(1000)
            process.send_signal(end)
            assert process.wait(30) == (0 if end == signal.SIGINT else -signal.SIGTERM)
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_a_folder_without_runs_is_a_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name, says in (("nowhere", "does not exist"), ("file", "is no folder"), (".", "holds no run")):
        assert main(["dashboard", name]) == 2
        assert says in capsys.readouterr().err
    assert main(["dashboard"]) == 2
    assert "runs does not exist" in capsys.readouterr().err


def test_a_port_that_is_taken_is_a_sentence_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.out.tfevents.1.here").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["dashboard", ".", "--port", str(port)]) == 2
    assert f"port {port}, it was already in use. Choose another --port" in capsys.readouterr().err
    for port in ("-1", "70000", "x"):
        with pytest.raises(SystemExit) as caught:
            main(["dashboard", ".", "--port", port])
        assert caught.value.code == 2
