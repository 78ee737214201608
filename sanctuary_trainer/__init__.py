"""A trainer for people who train and run vision models: the public names, and nothing else.

Each name is imported when it is first used, so that `import sanctuary_trainer` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sanctuary_trainer.balance import Balance, Measured, RankTimes
    from sanctuary_trainer.balanced import BalancedBatchSampler
    from sanctuary_trainer.callback import Callback, register_callback
    from sanctuary_trainer.checkpoint_folder import read_checkpoint
    from sanctuary_trainer.clock import LAPS, Trail
    from sanctuary_trainer.diagnosis import CAUSES, Finding
    from sanctuary_trainer.errors import (
        CallbackError,
        CheckpointError,
        DataError,
        NotSupportedError,
        OutOfMemoryError,
        RankError,
        RunFolderError,
        SanctuaryError,
        SettingsError,
        TaskError,
    )
    from sanctuary_trainer.history import History
    from sanctuary_trainer.learned import OOMEvent
    from sanctuary_trainer.loops.predict import load_predictions
    from sanctuary_trainer.pieces import OOMFailure
    from sanctuary_trainer.run import Run
    from sanctuary_trainer.state import RunState
    from sanctuary_trainer.task import VisionTask
    from sanctuary_trainer.trainer import FitResult, Trainer

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - as sorted() has them
    "Balance",
    "BalancedBatchSampler",
    "CAUSES",
    "Callback",
    "CallbackError",
    "CheckpointError",
    "DataError",
    "Finding",
    "FitResult",
    "History",
    "LAPS",
    "Measured",
    "NotSupportedError",
    "OOMEvent",
    "OOMFailure",
    "OutOfMemoryError",
    "RankError",
    "RankTimes",
    "Run",
    "RunFolderError",
    "RunState",
    "SanctuaryError",
    "SettingsError",
    "TaskError",
    "Trail",
    "Trainer",
    "VisionTask",
    "load_predictions",
    "read_checkpoint",
    "register_callback",
]

_ROOMS = {
    "balance": ("Balance", "Measured", "RankTimes"),
    "balanced": ("BalancedBatchSampler",),
    "callback": ("Callback", "register_callback"),
    "checkpoint_folder": ("read_checkpoint",),
    "clock": ("LAPS", "Trail"),
    "diagnosis": ("CAUSES", "Finding"),
    "errors": (
        "CallbackError",
        "CheckpointError",
        "DataError",
        "NotSupportedError",
        "OutOfMemoryError",
        "RankError",
        "RunFolderError",
        "SanctuaryError",
        "SettingsError",
        "TaskError",
    ),
    "history": ("History",),
    "learned": ("OOMEvent",),
    "loops.predict": ("load_predictions",),
    "pieces": ("OOMFailure",),
    "run": ("Run",),
    "state": ("RunState",),
    "task": ("VisionTask",),
    "trainer": ("FitResult", "Trainer"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
