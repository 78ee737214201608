"""Files and flags of a command, checked against the classes that they name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sanctuary_trainer import Callback, CallbackError, SettingsError, Trainer, VisionTask, tasks
from sanctuary_trainer.callback import callback_class
from sanctuary_trainer.cli.entries import FORMAT, Entry, read_file, read_flags
from sanctuary_trainer.cli.section import Section, find_class

OWN = {
    "fit": {"resume": "auto, last or a path: go on with a run"},
    "validate": {"checkpoint": "a checkpoint's folder: take the weights from there"},
    "test": {"checkpoint": "a checkpoint's folder: take the weights from there"},
    "predict": {
        "checkpoint": "a checkpoint's folder: take the weights from there",
        "output_dir": "a new or empty folder: write the predictions there (load_predictions reads them)",
    },
}
ELSEWHERE = {
    "trainer": "a setting was expected, as in --trainer.max_epochs 3",
    "trainer.callbacks": "callbacks are a list of their own in a file, beside trainer, or --callback NAME",
    "trainer.accelerator": "an object that no text can stand for; its device and ranks are the launcher's business",
}
READY_MADE = {name: found for name in tasks.__all__ if isinstance(found := getattr(tasks, name), type)}
SHORT: dict[str, dict[str, type]] = {
    "task": {name: cls for name, cls in READY_MADE.items() if issubclass(cls, VisionTask)},
    "data": {name: cls for name, cls in READY_MADE.items() if not issubclass(cls, VisionTask)},
}


class Configuration(NamedTuple):
    """All that a command was told, checked."""

    task: Section | None
    data: Section | None
    trainer: Section
    callbacks: list[Section]
    own: dict[str, str]  # `resume`, `checkpoint`, `output_dir`
    switches: set[str]  # `help`, `print_config`

    def as_yaml(self) -> str:
        """A config file that says the same."""
        named = {"task": self.task, "data": self.data}
        text: dict[str, Any] = {"format": FORMAT}
        text |= {key: _with_path(section) for key, section in named.items() if section is not None}
        text |= {"trainer": self.trainer.plain(), "callbacks": [_with_path(one) for one in self.callbacks]}
        dumped: str = yaml.safe_dump(text, sort_keys=False, allow_unicode=True)
        return dumped


def gather(verb: str, arguments: Sequence[str]) -> Configuration:
    """Read files and flags, and check all of it against the classes that they name.

    Raises:
        SettingsError, OSError: something cannot be read, is unknown, missing, or of a wrong type.
    """
    files, flags = read_flags(arguments)
    of_files = [entry for file in files for entry in read_file(Path(file).expanduser())]
    switches = {entry.key for entry in flags if entry.key in ("help", "print_config") and entry.text == "true"}
    flags = [entry for entry in flags if entry.key not in ("help", "print_config")]
    own = dict[str, str]()
    for entry in [*of_files, *flags]:
        group = entry.key.partition(".")[0]
        if entry.key in ELSEWHERE:
            raise SettingsError(f"{entry.key} ({entry.origin}): {ELSEWHERE[entry.key]}.")
        if group in ("task", "data", "trainer", "callback"):
            continue
        if entry.key not in OWN[verb]:
            known = ["config", "task", "data", "trainer", "callback", "print_config", *OWN[verb]]
            raise SettingsError(
                f"{entry.key} ({entry.origin}): {verb} has {', '.join(known)}, and nothing of this name."
            )
        own[entry.key] = entry.text
    return Configuration(
        task=_named("task", VisionTask, of_files, flags),
        data=_named("data", object, of_files, flags),
        trainer=Section(
            "trainer", Trainer, _of(of_files, "trainer") + _of(flags, "trainer"), ("accelerator", "callbacks")
        ),
        callbacks=_callbacks(of_files, flags),
        own=own,
        switches=switches,
    )


def _of(entries: Sequence[Entry], key: str) -> list[Entry]:
    return [entry for entry in entries if entry.key.startswith(f"{key}.")]


def _named(key: str, base: type, of_files: Sequence[Entry], flags: Sequence[Entry]) -> Section | None:
    """The section of a class that is named by the file or, before it, by a flag."""
    name, arguments = None, list[Entry]()
    for entry in [*of_files, *flags]:
        if entry.key == key:
            if name is not None and name.text != entry.text:
                arguments = []  # those were another class's
            name = entry
        elif entry.key.startswith(f"{key}."):
            arguments.append(entry)
    if name is None:
        if arguments:
            raise SettingsError(f"{arguments[0].key} ({arguments[0].origin}) is given, but no --{key}.")
        return None
    return Section(key, find_class(name, SHORT[key], base), arguments)


def _callbacks(of_files: Sequence[Entry], flags: Sequence[Entry]) -> list[Section]:
    """Those of files, in which a flag changes the first of its class that none has changed yet, and then new ones."""
    listed: list[tuple[type, list[Entry]]] = []
    for entries in (of_files, flags):
        unchanged, fields = list(listed), None
        for entry in entries:
            if entry.key == "callback":
                cls = _callback_class(entry)
                before = next((one for one in unchanged if one[0] is cls), None)
                if before is None:
                    listed.append(before := (cls, []))
                else:
                    unchanged.remove(before)
                fields = before[1]
            elif entry.key.startswith("callback."):
                if fields is None:
                    raise SettingsError(
                        f"{entry.key} ({entry.origin}) belongs to no callback: --callback NAME comes before it."
                    )
                fields.append(entry)
    return [Section("callback", cls, fields) for cls, fields in listed]


def _callback_class(entry: Entry) -> type:
    if "." in entry.text:
        return find_class(entry, {}, Callback)
    try:
        return callback_class(entry.text)
    except CallbackError as error:
        raise SettingsError(f"{entry.key} ({entry.origin}): {error}") from error


def _with_path(section: Section) -> dict[str, Any]:
    return {"class_path": f"{section.cls.__module__}.{section.cls.__qualname__}", "init_args": section.plain()}
