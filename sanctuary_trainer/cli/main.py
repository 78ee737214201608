"""`sanctuary`: what can be typed, and where each command lives.

    sanctuary fit|validate|test|predict    cli/run_task.py
    sanctuary demo         cli/demo.py
    sanctuary dashboard    cli/dashboard.py

What a person can put right ends in one sentence and exit code 2. torch is imported by the commands, not by `--help`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sanctuary_trainer import __version__
from sanctuary_trainer.errors import SanctuaryError

VERBS = {
    "fit": "train a task",
    "validate": "evaluate a task on its validation data",
    "test": "evaluate a task on its test data",
    "predict": "predict, and write the predictions to a folder",
}
DEMO = """\
Train a small convolutional network on real images, and test it on images that it has not seen.

data:
  digits          1,797 handwritten digits of 8 x 8 pixels; come with scikit-learn
  fashion-mnist   70,000 pictures of clothes, 28 x 28 pixels; on Debian: apt install dataset-fashion-mnist
  FOLDER          one folder per class, named like the class, with images of any size in it;
                  or the four IDX files of MNIST or Fashion-MNIST, gzipped or not
"""


def main(arguments: Sequence[str] | None = None, program: str = "sanctuary") -> int:
    """Run a command.

    Args:
        arguments: those of the command line when None.
        program: how the user called it.

    Returns:
        The exit code: 0; 2 for what the user can put right; 130 when interrupted.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in VERBS:
        return _verb(given[0], given[1:], program)
    chosen = _parser(program).parse_args(given)
    try:
        if chosen.command == "demo":
            _demo(chosen, program)
        else:
            _dashboard(chosen)
    except (SanctuaryError, OSError) as error:
        if chosen.debug:
            raise
        print(f"{program} {chosen.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program} {chosen.command}: interrupted", file=sys.stderr)
        return 130
    return 0


def _verb(verb: str, flags: Sequence[str], program: str) -> int:
    debug = "--debug" in flags
    # Of several processes one a machine says what all of them met. What one rank alone meets in a run, rank 0 is told.
    says = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        from sanctuary_trainer.cli import run_task

        run_task.run(verb, ["--help" if flag == "-h" else flag for flag in flags if flag != "--debug"], program)
    except (SanctuaryError, OSError) as error:
        if debug:
            raise
        if says:
            print(f"{program} {verb}: error: {_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program} {verb}: interrupted", file=sys.stderr)
        return 130
    return 0


def _sentence(error: Exception) -> str:
    """What an error says, without the traceback that torch puts before that of a loader's worker."""
    text = str(error)
    return text.rpartition(f"{type(error).__name__}: ")[2].strip() if "\nOriginal Traceback" in text else text


def _demo(chosen: argparse.Namespace, program: str) -> None:
    from sanctuary_trainer.cli import demo_data

    pictures = demo_data.read(chosen.data)
    # Read once, when torch is imported. Threads that wait for others that have no core turn 46 s into 6 minutes (the
    # digits, 2 cores, 7 other processes); asleep they do not.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from sanctuary_trainer.cli import demo

    demo.run(chosen.data, pictures, chosen.epochs, chosen.processes, chosen.project_dir, program)


def _dashboard(chosen: argparse.Namespace) -> None:
    from sanctuary_trainer.cli import dashboard

    dashboard.show(chosen.run, chosen.port)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Train and look at vision models.")
    parser.add_argument("--version", action="version", version=f"sanctuary_trainer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    for verb, text in VERBS.items():  # their flags depend on the task: see run_task
        commands.add_parser(verb, help=text, add_help=False)

    demo = commands.add_parser(
        "demo",
        help="train a small network on real images",
        description=DEMO,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument(
        "--data", default="digits", metavar="DATA", help="digits (the default), fashion-mnist or a FOLDER; see above"
    )
    demo.add_argument("--processes", type=_positive, default=1, metavar="N", help="processes that train together (1)")
    demo.add_argument(
        "--epochs", type=_positive, metavar="E", help="times to go through the images (3 to 50, fewer for more images)"
    )
    demo.add_argument(
        "--project-dir", type=Path, default=Path("runs"), metavar="DIR", help="where the run's folder is made (runs)"
    )

    dashboard = commands.add_parser(
        "dashboard",
        help="look at curves and images of runs",
        description="Serve TensorBoard on this machine until Ctrl-C, and print its address.",
    )
    dashboard.add_argument(
        "run",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="RUN",
        help="a run's folder, or a folder of runs (runs)",
    )
    dashboard.add_argument("--port", type=_port, metavar="P", help="the first free one from 6006 when not given")

    for command in (demo, dashboard):
        command.add_argument("--debug", action="store_true", help="show where an error comes from")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 (any free one) to 65535")
    return int(text)
