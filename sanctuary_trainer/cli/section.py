"""A class and the arguments that entries give it: found by name, checked by its types, made.

jsonargparse reads texts by the types of the class's constructor and makes its help from the docstring; here are the
words for what is wrong.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from sanctuary_trainer.cli.entries import Entry
from sanctuary_trainer.errors import SettingsError


def find_class(entry: Entry, short: Mapping[str, type], base: type) -> type:
    """The class that an entry names: by one of the short names, or as `package.module.Class`.

    Raises:
        SettingsError: there is none, it is not of this kind, or it lacks methods.
    """
    module_name, _, name = entry.text.rpartition(".")
    at = _at(entry)
    if not module_name:
        if name in short:
            return short[name]
        raise SettingsError(
            f"{at}: {entry.text!r} is none of {', '.join(short)}, and no module.Class{_nearest(name, short)}"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise SettingsError(
            f"{at}: there is no module {error.name!r}; it is looked for as by python -m, from here."
        ) from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)]
        raise SettingsError(f"{at}: {module_name} has no class {name!r}{_nearest(name, classes)}")
    if not issubclass(found, base):
        raise SettingsError(f"{at}: {entry.text} is no {base.__name__}; a subclass of it was expected.")
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise SettingsError(f"{at}: {entry.text} has no {lacking}, which a {base.__name__} has to define.")
    return found


class Section:
    """The arguments of one class.

    Args:
        key: what its entries' keys begin with, "trainer" for "trainer.max_epochs".
        cls: the class.
        entries: by their key; the last one of a key counts.
        skip: arguments that cannot be given.

    Raises:
        SettingsError: an argument is unknown, missing, or of a wrong type.
    """

    def __init__(self, key: str, cls: type, entries: Sequence[Entry], skip: Collection[str] = ()) -> None:
        self.key, self.cls = key, cls
        self._parser = ArgumentParser(exit_on_error=False, add_help=False, usage="")
        self._parser.add_class_arguments(cls, key, fail_untyped=False, instantiate=False, skip=set(skip))
        self._given = given = {entry.key: entry for entry in entries}
        self._refuse_unknown(given)
        try:
            self._values = self._parser.parse_args([f"--{entry.key}={entry.text}" for entry in given.values()])
        except ArgumentError as error:
            raise SettingsError(self._plain(str(error), given)) from error
        self._check_untyped(given)

    def make(self, **more: Any) -> Any:
        """An instance. more: arguments beside those of the entries."""
        made = self._parser.instantiate(self._values).as_dict()
        arguments: dict[str, Any] = made.get(self.key) or {}
        try:
            return self.cls(**(arguments | more))
        except SettingsError as error:
            named = (entry for entry in self._given.values() if f"{entry.key.rpartition('.')[2]}=" in str(error))
            raise SettingsError(f"{_at(next(named, None)) or self.key}: {error}") from error

    def is_open(self, name: str) -> bool:
        """Whether there is such an argument, and it is None so far."""
        return f"{self.key}.{name}" in self._known() and self._values[f"{self.key}.{name}"] is None

    def plain(self) -> dict[str, Any]:
        """The arguments as data, for a config file; without those that are None by default."""
        values = yaml.safe_load(self._parser.dump(self._values, skip_unset=False)) or {}
        default = self._parser.get_defaults()
        plain: dict[str, Any] = values.get(self.key) or {}
        return {name: value for name, value in plain.items() if (value, default[f"{self.key}.{name}"]) != (None, None)}

    def help(self) -> str:
        """What the arguments are for, by the class's docstring."""
        text = self._parser.format_help()
        return re.sub(rf"  --{self.key} CONFIG .*\n", "", text[text.index("\n\n") :]).strip()  # without the usage

    def _known(self) -> list[str]:
        names = [action.dest for action in self._parser._actions]
        return [name for name in names if name.startswith(f"{self.key}.") and not name.endswith(".help")]

    def _refuse_unknown(self, given: Mapping[str, Entry]) -> None:
        known = self._known()
        for entry in given.values():
            if not any(entry.key == name or entry.key.startswith(f"{name}.") for name in known):
                raise SettingsError(f"{_at(entry)}: no argument of {self.cls.__name__}{_nearest(entry.key, known)}")

    def _check_untyped(self, given: Mapping[str, Entry]) -> None:
        """An argument without a type, whose default is a number or a switch, is one; without a default it is needed."""
        for name, parameter in inspect.signature(self.cls).parameters.items():
            entry, default = given.get(f"{self.key}.{name}"), parameter.default
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if entry is None and is_named and parameter.annotation is default is parameter.empty:
                raise SettingsError(f"{self.key}: {self.cls.__name__} needs --{self.key}.{name}.")  # else it were None
            if entry is None or parameter.annotation is not parameter.empty or not isinstance(default, int | float):
                continue
            value = self._values[entry.key]
            is_switch = isinstance(default, bool)
            if not isinstance(value, int | float) or isinstance(value, bool) is not is_switch:
                expected = "true or false" if is_switch else "a number"
                raise SettingsError(f"{_at(entry)}: {entry.text!r}; {expected} was expected, as its default {default}.")

    def _plain(self, text: str, given: Mapping[str, Entry]) -> str:
        """jsonargparse's error in one sentence, with where the value stands."""
        if lacking := re.search(r"arguments are required: (.*)", text):
            names = ", ".join(f"--{name}" for name in lacking[1].split(", "))
            return f"{self.key}: {self.cls.__name__} needs {names}."
        found = re.search(r'(?:Parser key|argument) "?(?:--)?([\w.]+)', text)
        entry = given.get(found[1]) if found else None
        if entry is None:
            return f"{self.key}: {' '.join(text.split())}"
        return f"{_at(entry)}: {entry.text!r:.100}; {_said(text):.400}."


def _said(text: str) -> str:
    """Of jsonargparse's error: why the value cannot be had (a class that is not there), or what was expected."""
    listed = re.search(r"Errors:(.*)\n *Given value type", text, re.DOTALL)
    parts = re.split(r"\n *- ", listed[1])[1:] if listed else [text.partition("\n")[2]]
    found = [re.match(r" *Expected (?:an? )?(.*?)(?:\. Got value: .*)?$", part, re.DOTALL) for part in parts]
    others = [" ".join(part.split()) for part, match in zip(parts, found, strict=True) if match is None]
    if others:
        return "; ".join(others).rstrip(".")
    expected = sorted({match[1] for match in found if match is not None})
    return f"{' or '.join(_in_words(each) for each in expected)} was expected"


def _in_words(expected: str) -> str:
    choices = re.match(r"typing\.Literal\[(.*)\]|member of <enum .*>: \{(.*)\}", expected)
    return f"one of {choices[1] or choices[2]}" if choices else _WORDS.get(expected, expected)


_WORDS = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "a text",
    "<class 'list'>": "a list",
    "<class 'collections.abc.Sequence'>": "a list",
    "<class 'dict'>": "a mapping",
    "<class 'NoneType'>": "null",
}


def _nearest(name: str, names: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else "."


def _at(entry: Entry | None) -> str:
    return f"{entry.key} ({entry.origin})" if entry else ""
