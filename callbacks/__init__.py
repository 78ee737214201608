"""The built-in callbacks: one policy a file, written with public names only, as yours would be.

    Checkpoint ("checkpoint")       what a run needs to go on: the best or the latest are kept
    EMA ("ema")                     a moving average of the weights, validated beside them
    EarlyStopping(monitor, mode)    ends a fit whose metric no longer improves
    OOMFallback ("oom_fallback")    goes on in pieces where a batch does not fit into memory
    GradientCheckpointing ("gradient_checkpointing")
                                    less memory, more time: activations are computed again in the backward pass
    ClassificationDashboard ("classification_dashboard")
                                    where a classifier fails: confusion matrix, classes, the worst images
    LoadBalance ("load_balance")    which rank is slow, why, what it costs everybody, what to try first
    ProgressBar ("progress_bar")    how far the run is: a bar in a terminal, a few lines in a log file
    Summary ("summary")             the task at the start of a fit, its results at the end
    Throughput ("throughput")       samples per second, time per step, time to the end, share of the time in the model

Each class is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sanctuary_trainer.callbacks.checkpoint import Checkpoint
    from sanctuary_trainer.callbacks.classification_dashboard import ClassificationDashboard
    from sanctuary_trainer.callbacks.early_stopping import EarlyStopping
    from sanctuary_trainer.callbacks.ema import EMA
    from sanctuary_trainer.callbacks.gradient_checkpointing import GradientCheckpointing
    from sanctuary_trainer.callbacks.load_balance import LoadBalance
    from sanctuary_trainer.callbacks.oom_fallback import OOMFallback
    from sanctuary_trainer.callbacks.progress_bar import ProgressBar
    from sanctuary_trainer.callbacks.summary import Summary
    from sanctuary_trainer.callbacks.throughput import Throughput

if __name__ != "sanctuary_trainer.callbacks":
    # In a checkout the folder can be found under a second name, and its classes would exist twice.
    raise ImportError(
        f"Import sanctuary_trainer.callbacks instead of {__name__}: it is the same folder.", name=__name__
    )

__all__ = [  # noqa: RUF022 - as sorted() has them
    "Checkpoint",
    "ClassificationDashboard",
    "EMA",
    "EarlyStopping",
    "GradientCheckpointing",
    "LoadBalance",
    "OOMFallback",
    "ProgressBar",
    "Summary",
    "Throughput",
]

_MODULE_OF = {
    "Checkpoint": "checkpoint",
    "ClassificationDashboard": "classification_dashboard",
    "EMA": "ema",
    "EarlyStopping": "early_stopping",
    "GradientCheckpointing": "gradient_checkpointing",
    "LoadBalance": "load_balance",
    "OOMFallback": "oom_fallback",
    "ProgressBar": "progress_bar",
    "Summary": "summary",
    "Throughput": "throughput",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
