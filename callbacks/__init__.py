"""The built-in callbacks: one policy a file, written with public names only, as yours would be.

    ProgressBar ("progress_bar")    how far the run is: a bar in a terminal, a few lines in a log file
    Summary ("summary")             the task at the start of a fit, its results at the end

Each class is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sanctuary_trainer.callbacks.progress_bar import ProgressBar
    from sanctuary_trainer.callbacks.summary import Summary

if __name__ != "sanctuary_trainer.callbacks":
    # In a checkout the folder can be found under a second name, and its classes would exist twice.
    raise ImportError(
        f"Import sanctuary_trainer.callbacks instead of {__name__}: it is the same folder.", name=__name__
    )

__all__ = ["ProgressBar", "Summary"]

_MODULE_OF = {"ProgressBar": "progress_bar", "Summary": "summary"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
