"""What the command line says to somebody who asks, errs or interrupts."""

import subprocess
import sys
from pathlib import Path

import pytest

from sanctuary_trainer import DataError, __version__
from sanctuary_trainer.cli import demo_data
from sanctuary_trainer.cli.main import main


def exit_code(arguments: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_help_tells_what_there_is_and_imports_no_torch() -> None:
    code = (
        "import sys; from sanctuary_trainer.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0, end\n"
        "assert not {'torch', 'accelerate', 'numpy', 'PIL', 'tensorboard'} & set(sys.modules)"
    )
    for arguments, words in (
        (["--help"], ["demo", "dashboard", "--version"]),
        (["demo", "--help"], ["digits", "fashion-mnist", "FOLDER", "--processes", "--epochs"]),
        (["dashboard", "--help"], ["RUN", "--port"]),
    ):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert all(word in done.stdout for word in words)


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "sanctuary_trainer", "--version"], capture_output=True, text=True)
    assert done.stdout == f"sanctuary_trainer {__version__}\n"


def test_no_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([]) == 2
    assert "{fit,validate,test,predict,demo,dashboard}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["demo", "--processes", "0"], ["demo", "--epochs", "two"]])
def test_numbers_out_of_range_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(arguments) == 2
    assert f"{arguments[2]!r} is not a whole number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize("make", ["nothing", "empty", "one", "broken"])
def test_data_that_cannot_be_used_is_a_sentence_and_exit_code_2(
    make: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / make
    if make != "nothing":
        folder.mkdir()
    if make in ("one", "broken"):
        (folder / "cat").mkdir()
        (folder / "cat" / "x.png").write_text("no image")
    assert main(["demo", "--data", str(folder)]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("sanctuary demo: error: ") and str(folder) in errors and errors.count("\n") == 1


def test_debug_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to read"):
        main(["demo", "--debug", "--data", str(tmp_path)])


def test_files_that_may_not_be_read_are_told_like_other_mistakes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(data: str) -> None:
        raise PermissionError(13, "Permission denied", data)

    monkeypatch.setattr(demo_data, "read", refuse)
    assert main(["demo", "--data", "secret"]) == 2
    assert capsys.readouterr().err == "sanctuary demo: error: [Errno 13] Permission denied: 'secret'\n"


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(data: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_data, "read", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "sanctuary demo: interrupted\n"
