"""What a command is told, in one form: each value of a config file or a flag as an `Entry` with its text and origin.

    run.yaml                               Entry("trainer.max_epochs", "3", "run.yaml, line 2")
      trainer:
        max_epochs: 3
    --trainer.max_epochs 3                 Entry("trainer.max_epochs", "3", "the command line")

So a value in a file is read exactly as the same text in a flag; what it becomes, the type decides that it is for.
Files come first, in their order, then flags, wherever they stand; of two entries with one key the later one counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sanctuary_trainer.errors import SettingsError

FORMAT = 1  # of config files; `format: 1` at the head of one that was saved
GROUPS = ("task", "data", "trainer")  # what has settings; callbacks are a list of such
NO_SWITCH = ("config", "task", "data", "callback", "resume", "checkpoint", "output_dir")  # flags that need a value
NULL = ("", "~", "null", "Null", "NULL")


class Entry(NamedTuple):
    """A value and where it stands. key: "trainer.max_epochs"; "callback" and "callback.FIELD" of the last callback."""

    key: str
    text: str
    origin: str


def read_flags(flags: Sequence[str]) -> tuple[list[str], list[Entry]]:
    """Split flags into config files and entries; a flag without a value is a switch.

    Raises:
        SettingsError: something is no flag.
    """
    files, entries, rest = list[str](), list[Entry](), list(flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise SettingsError(f"{flag!r} is no flag: --KEY VALUE was expected, as in --trainer.max_epochs 3.")
        key, equals, text = flag[2:].partition("=")
        if not equals:
            is_alone = not rest or rest[0].startswith("--")
            if is_alone and key in NO_SWITCH:
                raise SettingsError(f"{flag} needs a value: {flag} VALUE.")
            text = "true" if is_alone else rest.pop(0)
        if key == "config":
            files.append(text)
        else:
            entries.append(Entry(key.replace("-", "_") if "." not in key else key, text, "the command line"))
    return files, entries


def read_file(path: Path) -> list[Entry]:
    """The entries of a config file.

    Raises:
        SettingsError: it is no YAML, no mapping, of another format, or says something twice.
        OSError: it cannot be read.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8-sig"), yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise SettingsError(f"{path}{where}: no YAML: {getattr(error, 'problem', None) or error}.") from error
    if root is None:
        raise SettingsError(f"{path} is empty; task:, data:, trainer: and callbacks: were expected.")
    _check_keys(path, root, "the file", set())
    return list(_of_root(path, root))


def _check_keys(path: Path, node: Any, what: str, seen: set[int]) -> None:
    """Refuse keys that are no names or stand twice, at any depth; seen: nodes, which aliases lead to again."""
    if isinstance(node, yaml.ScalarNode) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for one in node.value:
            _check_keys(path, one, what, seen)
        return
    names: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise SettingsError(f"{_origin(path, key)}: {what} has the key {_text(key):.60}; a name was expected.")
        if key.value in names:
            raise SettingsError(f"{_origin(path, key)}: {what} has {key.value!r} twice.")
        names.add(key.value)
        _check_keys(path, value, key.value, seen)


def _of_root(path: Path, root: Any) -> Iterator[Entry]:
    for name, value in _pairs(path, root, "the file"):
        origin = _origin(path, value)
        if name == "format":
            if _text(value) != str(FORMAT):
                raise SettingsError(
                    f"{origin}: the file has format {_text(value):.60}; this version of the trainer reads {FORMAT}."
                )
        elif name in GROUPS:
            yield from _of_group(path, name, value)
        elif name == "callbacks":
            if not isinstance(value, yaml.SequenceNode):
                raise SettingsError(f"{origin}: callbacks is a list: '- ema', or '- ema: {{decay: 0.99}}'.")
            for one in value.value:
                yield from _of_callback(path, one)
        else:
            yield Entry(name, _text(value), origin)


def _of_group(path: Path, name: str, node: Any) -> Iterator[Entry]:
    if isinstance(node, yaml.ScalarNode) and _text(node) == "null" and name in GROUPS:
        return
    if isinstance(node, yaml.ScalarNode) and _text(node) != "null" and name != "trainer":  # task: my.module.Task
        yield Entry(name, node.value, _origin(path, node))
        return
    pairs = dict(_pairs(path, node, name))
    if name != "trainer" and "class_path" in pairs:
        yield Entry(name, _text(pairs["class_path"]), _origin(path, pairs["class_path"]))
        arguments = pairs.pop("init_args", None)
        del pairs["class_path"]
        if arguments is not None and _text(arguments) != "null":
            pairs |= dict(_pairs(path, arguments, f"{name}.init_args"))
    for key, value in pairs.items():
        yield Entry(f"{name}.{key}", _text(value), _origin(path, value))


def _of_callback(path: Path, node: Any) -> Iterator[Entry]:
    if isinstance(node, yaml.MappingNode) and all(key.value != "class_path" for key, _ in node.value):
        pairs = list(_pairs(path, node, "callbacks"))
        if len(pairs) != 1:
            raise SettingsError(
                f"{_origin(path, node)}: a callback is one name with its fields: '- ema: {{decay: 0.99}}'."
            )
        name, fields = pairs[0]
        yield Entry("callback", name, _origin(path, node))
        if _text(fields) != "null":
            for key, value in _pairs(path, fields, f"callbacks: {name}"):
                yield Entry(f"callback.{key}", _text(value), _origin(path, value))
    else:
        yield from (
            entry._replace(key=entry.key.replace("callbacks", "callback", 1))
            for entry in _of_group(path, "callbacks", node)
        )


def _pairs(path: Path, node: Any, what: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, yaml.MappingNode):
        raise SettingsError(f"{_origin(path, node)}: {what} holds {_text(node)!r:.60}; KEY: VALUE was expected.")
    for key, value in node.value:
        yield key.value, value


def _text(node: Any) -> str:
    """As it would stand in a flag."""
    if isinstance(node, yaml.ScalarNode):
        text: str = node.value
        return "null" if node.style is None and text in NULL else text
    flow: str = yaml.serialize(node, Dumper=_Flow, width=float("inf"))
    return flow.strip()


class _Flow(yaml.SafeDumper):
    def serialize_node(self, node: Any, parent: Any, index: Any) -> None:
        if not isinstance(node, yaml.ScalarNode):
            node.flow_style = True
        super().serialize_node(node, parent, index)


def _origin(path: Path, node: Any) -> str:
    return f"{path}, line {node.start_mark.line + 1}"
