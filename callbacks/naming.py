"""Names that users write: of a file, with values in it, and of a logged value, perhaps misspelt."""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sanctuary_trainer import SettingsError

MOST_BYTES = 200  # of the 255 that file systems allow: an unfinished file has a longer name


def file_name(template: str, values: Mapping[str, Any], missing: Any = "none") -> str:
    """A file's name without folders: what does not belong into one becomes "_".

    Args:
        template: as for `str.format`, but a field is a whole name: `{val/accuracy:.3f}` is the value "val/accuracy".
        values: what may stand in it.
        missing: stands for what is not among them; a string is taken as it is.

    Raises:
        SettingsError: the template cannot be read, or a value cannot be written as it says.
    """
    try:
        text = _Fields().vformat(template, (), _Values(values, missing=missing))
    except (ValueError, TypeError) as error:
        raise SettingsError(f"The name {template!r} cannot be used: {error}.") from None
    plain = re.sub(r"[^\w.=+,-]+", "_", text).encode()[:MOST_BYTES].decode(errors="ignore")
    return plain.strip("._") or "checkpoint"


class _Values(dict[str, Any]):
    def __init__(self, values: Mapping[str, Any], missing: Any) -> None:
        super().__init__(values)
        self.missing = missing

    def __missing__(self, name: str) -> Any:
        return self.missing


class _Fields(string.Formatter):
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        return kwargs[field_name], field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return value if isinstance(value, str) else str(super().format_field(value, format_spec))


def nearest(name: str, names: Iterable[str]) -> str:
    """A sentence that proposes the nearest of the names; empty where none is near."""
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.3)
    return f" Did you mean {near[0]!r}?" if near else ""
