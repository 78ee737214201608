"""The checks of a Trainer's settings: each by itself, then together where two must agree.

What can be known without data and devices is told when the Trainer is made, before anything is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from sanctuary_trainer.errors import SettingsError

Limit = int | float | None

_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches")
_COUNTS_FROM_1 = ("max_epochs", "max_steps", "min_epochs", "min_steps", "gradient_accumulation_steps")
_BOOLS = (
    "non_blocking",
    "dispatch_batches",
    "shard_data",
    "sync_batchnorm",
    "find_unused_parameters",
    "channels_last",
    "deterministic",
    "default_callbacks",
)


def check_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, checked and in one form.

    Raises:
        SettingsError: with the setting, the value that was met and what was expected.
    """
    settings = {name: _plain(value) for name, value in given.items()}
    for name in _COUNTS_FROM_1:
        if settings[name] is not None:
            _check(name, settings[name], _is_int(settings[name], 1), "a whole number of at least 1")
    for name in ("check_val_every_n_epoch", "log_every_n_steps"):
        _check(name, settings[name], _is_int(settings[name], 1), "a whole number of at least 1")
    sanity = settings["num_sanity_val_steps"]
    _check("num_sanity_val_steps", sanity, _is_int(sanity, 0), "a whole number of at least 0")
    for name in _LIMITS:
        value = settings[name]
        fine = value is None or _is_int(value, 0) or (isinstance(value, float) and 0.0 <= value <= 1.0)
        _check(name, value, fine, "a whole number of batches (at least 0), or a fraction of the loader in [0.0, 1.0]")
    for name in _BOOLS:
        _check(name, settings[name], isinstance(settings[name], bool), "True or False")
    settings["max_time"] = _seconds(settings["max_time"])
    _check_values(settings)
    _check_together(settings)
    return _with_overfit(_with_fast_dev_run(settings))


def limit_rounds(limit: Limit, rounds: int | None, name: str) -> int | None:
    """A limit as a number of rounds; None for no limit.

    Raises:
        SettingsError: a fraction of a loader without a length.
    """
    if limit is None or (limit == 1.0 and isinstance(limit, float)):
        return None
    if isinstance(limit, int):
        return limit
    if rounds is None:
        raise SettingsError(
            f"{name}={limit} is a fraction, and the loader has no length; give a whole number of batches."
        )
    # As written: 0.29 * 100 is 28.999999999999996 in floats. Something is left of a loader unless 0 was asked for.
    return math.floor(rounds * Fraction(str(limit))) or min(rounds, math.ceil(limit))


def _check(name: str, value: Any, fine: bool, expected: str) -> None:
    if not fine:
        raise SettingsError(f"{name}={value!r}; {expected} was expected.")


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _plain(value: Any) -> Any:
    """numpy's whole numbers as Python's."""
    return int(value) if hasattr(value, "__index__") and not isinstance(value, bool | int) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_values(settings: dict[str, Any]) -> None:
    clip = settings["gradient_clip_val"]
    _check("gradient_clip_val", clip, clip is None or (_is_number(clip) and clip > 0), "a number above 0, or None")
    algorithm = settings["gradient_clip_algorithm"]
    _check("gradient_clip_algorithm", algorithm, algorithm in ("norm", "value"), '"norm" or "value"')
    interval = settings["val_check_interval"]
    fine = interval is None or _is_int(interval, 1) or (isinstance(interval, float) and 0.0 < interval <= 1.0)
    _check("val_check_interval", interval, fine, "a whole number of steps, or a fraction of an epoch in (0.0, 1.0]")
    if isinstance(interval, float) and interval == 1.0:
        settings["val_check_interval"] = None  # that is the epoch's end
    precision = settings["mixed_precision"]
    _check("mixed_precision", precision, precision in (None, "no", "bf16", "fp16"), '"no", "bf16", "fp16" or None')
    _check("cpu", settings["cpu"], settings["cpu"] in (None, True, False), "True, False or None")
    timeout = settings["timeout"]
    _check("timeout", timeout, timeout is None or (_is_number(timeout) and timeout > 0), "seconds above 0, or None")
    seed = settings["seed"]
    _check("seed", seed, seed is None or _is_int(seed, 0), "a whole number of at least 0, or None")
    if seed is not None and seed >= 2**63:
        raise SettingsError(f"seed={seed}; a number below 2**63 was expected.")
    compiled = settings["compile"]
    _check(
        "compile",
        compiled,
        compiled is None or isinstance(compiled, bool | str | Mapping),
        "True, a backend, or a dict",
    )
    fast = settings["fast_dev_run"]
    _check("fast_dev_run", fast, isinstance(fast, bool) or _is_int(fast, 0), "True, False, or a number of steps")
    accelerator = settings["accelerator"]
    if accelerator is not None and not hasattr(accelerator, "prepare_model"):
        raise SettingsError(
            f"accelerator={accelerator!r}; an accelerate.Accelerator was expected. "
            "To choose the device, give cpu=True, or launch with `accelerate launch` or `torchrun`."
        )
    folder = settings["project_dir"]
    _check("project_dir", folder, isinstance(folder, str | Path), "a folder's path")
    name = settings["run_name"]
    wrong = name is not None and (not isinstance(name, str) or name in ("", ".", "..") or {*name} & {"/", "\0"})
    _check("run_name", name, not wrong, "a folder's name without '/'")


def _check_together(settings: dict[str, Any]) -> None:
    for least, most in (("min_epochs", "max_epochs"), ("min_steps", "max_steps")):
        if settings[least] is not None and settings[most] is not None and settings[least] > settings[most]:
            raise SettingsError(f"{least}={settings[least]} is above {most}={settings[most]}.")
    if _is_int(settings["val_check_interval"], 1) and settings["check_val_every_n_epoch"] > 1:
        raise SettingsError(
            f"val_check_interval={settings['val_check_interval']} counts steps across epochs, so "
            f"check_val_every_n_epoch={settings['check_val_every_n_epoch']} contradicts it. Give one of the two."
        )
    if settings["overfit_batches"] is not None and settings["limit_train_batches"] is not None:
        raise SettingsError("overfit_batches and limit_train_batches both limit training; give one of the two.")
    if settings["dispatch_batches"] and not settings["shard_data"]:
        raise SettingsError("dispatch_batches=True deals what rank 0 reads, so shard_data=False contradicts it.")
    if settings["accelerator"] is not None:
        both = [name for name in ("cpu", "timeout") if settings[name] is not None]
        if settings["find_unused_parameters"]:
            both.append("find_unused_parameters")
        if both:
            raise SettingsError(f"{', '.join(both)} must be given to the accelerator itself, since it is made already.")


def _with_overfit(settings: dict[str, Any]) -> dict[str, Any]:
    overfit = settings["overfit_batches"]
    if overfit is not None:
        settings["limit_train_batches"] = overfit
        if settings["limit_val_batches"] is None:
            settings["limit_val_batches"] = overfit
    return settings


def _with_fast_dev_run(settings: dict[str, Any]) -> dict[str, Any]:
    steps = int(settings["fast_dev_run"])
    if not steps:
        return settings
    for name in _LIMITS:
        settings[name] = None if name == "overfit_batches" else steps
    settings.update(
        max_epochs=1,
        max_steps=None,
        max_time=None,
        min_epochs=None,
        min_steps=None,
        gradient_accumulation_steps=1,
        val_check_interval=None,
        check_val_every_n_epoch=1,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        run_name=None,
    )
    return settings


def _seconds(value: Any) -> float | None:
    """`max_time` in seconds."""
    if value is None:
        return None
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        parts = value.split(":")
        if len(parts) != 4 or not all(part.isdigit() for part in parts):
            raise SettingsError(f'max_time={value!r}; seconds, a timedelta or "DD:HH:MM:SS" was expected.')
        days, hours, minutes, rest = map(int, parts)
        seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    else:
        _check("max_time", value, _is_number(value), 'seconds, a timedelta or "DD:HH:MM:SS"')
        seconds = float(value)
    _check("max_time", value, seconds > 0, "more than 0 seconds")
    return seconds
