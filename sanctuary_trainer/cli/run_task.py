"""`sanctuary fit`, `validate`, `test`, `predict`: a task, its data and a Trainer from config files and flags.

gather            files and flags -> classes and their arguments, all checked
make              the data, the task (which may get the data's class names), the Trainer with its callbacks
run               the verb; a fit keeps the resolved configuration in its folder, and it runs again from there
"""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from sanctuary_trainer import Callback, Run, SettingsError, Trainer, VisionTask
from sanctuary_trainer.cli.configuration import OWN, SHORT, Configuration, gather
from sanctuary_trainer.cli.launched import warn_of_fewer_processes
from sanctuary_trainer.cli.section import Section
from sanctuary_trainer.seeding import seed_everything

FILE = "config.yaml"


def run(verb: str, arguments: Sequence[str], program: str) -> None:
    """Do what a command line says.

    Raises:
        SanctuaryError, OSError: with what the user can put right.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    told = gather(verb, arguments)
    if "help" in told.switches:
        print(_help(verb, told, program))
    elif "print_config" in told.switches:
        print(told.as_yaml(), end="")
    elif told.task is None:
        raise SettingsError(f"no task was named: {program} {verb} --task my.module.Task, or --config run.yaml.")
    elif verb == "predict" and "output_dir" not in told.own:
        raise SettingsError("predict needs --output_dir FOLDER, to write the predictions to.")
    else:
        warn_of_fewer_processes(f"{program} {verb}")
        _do(verb, told, told.task, program)


class Made(NamedTuple):
    """The objects of a configuration."""

    trainer: Trainer
    task: VisionTask
    data: Any


def make(verb: str, told: Configuration, task_section: Section) -> Made:
    """Make what a configuration names: the weights seeded, the data first, whose class names the task may get."""
    trainer: Trainer = told.trainer.make(callbacks=_made_callbacks(verb, told))
    if trainer.settings["seed"] is not None:
        seed_everything(trainer.settings["seed"])  # for the weights; the run is seeded when it begins
    data = None if told.data is None else told.data.make()
    more = {}
    if task_section.is_open("class_names") and (names := getattr(data, "class_names", None)) is not None:
        more["class_names"] = list(names)
    task = task_section.make(**more)
    if callable(adapt := getattr(data, "adapt", None)):
        adapt(task)
    return Made(trainer, task, data)


def _do(verb: str, told: Configuration, task_section: Section, program: str) -> None:
    trainer, task, data = make(verb, told, task_section)
    is_main = os.environ.get("RANK", "0") == "0"
    if verb == "fit":
        result = trainer.fit(task, data=data, resume=told.own.get("resume"))
        if is_main:
            print(f"configuration: {result.run_dir / FILE}")
            print(f"curves: {program} dashboard {shlex.quote(str(result.run_dir))}")
    elif verb == "predict":
        folder, checkpoint = told.own["output_dir"], told.own.get("checkpoint")
        trainer.predict(task, data=data, checkpoint=checkpoint, return_predictions=False, output_dir=folder)
        if is_main:
            print(f"predictions: {folder}")
    else:
        for name, value in getattr(trainer, verb)(task, data=data, **told.own).items():
            if is_main:
                print(f"{name}: {value:.6g}")


def _made_callbacks(verb: str, told: Configuration) -> list[Callback]:
    made: list[Callback] = [section.make() for section in told.callbacks]
    return [*made, _Keep(told.as_yaml())] if verb == "fit" else made


class _Keep(Callback):
    """Keeps the resolved configuration in the run's folder."""

    def __init__(self, text: str) -> None:
        self.text = text

    def on_fit_start(self, run: Run) -> None:
        if run.is_main and run.run_dir is not None:
            (run.run_dir / FILE).write_text(self.text, encoding="utf-8")


def _help(verb: str, told: Configuration, program: str) -> str:
    lines = [
        f"usage: {program} {verb} [--config FILE]... [--task CLASS] [--data CLASS] [--KEY VALUE]...",
        "",
        inspect.getdoc(getattr(Trainer, verb)).split("\n")[0],  # type: ignore[union-attr]
        "",
        "  --config FILE          YAML with the same keys; flags beat files, a later file an earlier one",
        f"  --task CLASS           my.module.Task, or one of {', '.join(SHORT['task'])}",
        "  --task.ARGUMENT VALUE  an argument of its constructor",
        "  --data CLASS           ImageData, or any class with train_dataloader() and the like",
        "  --callback NAME        a callback (ema, my.module.Callback); --callback.FIELD VALUE after it is its field",
        *(f"  --{f'{name} VALUE':20} {text}" for name, text in OWN[verb].items()),
        "  --print_config         print the resolved configuration, and do nothing",
        "  --debug                show where an error comes from",
    ]
    sections = [section for section in (told.task, told.data, told.trainer, *told.callbacks) if section is not None]
    return "\n\n".join(["\n".join(lines), *(section.help() for section in sections)])
