"""Where values go: one TensorBoard event file and `metrics.jsonl` in the run folder, and accelerate's other trackers.

    Tracking(run_dir, ...)   open the files, write the hyper-parameters          main process; nothing elsewhere
      log(values, step)      one event and one JSON line                         no flush: every 30 s, and at close
      log_images(...)        one grid
    close(status)            end the session, flush, close

All of a run's TensorBoard data is in one event file, hyper-parameters included: where no experiment is described, the
hparams plugin takes the metrics that it shows from the run's own scalars, so no second run is needed (accelerate's
tracker and `SummaryWriter.add_hparams` write one).

A tracker that cannot write (disk full) ends the run with its own error: a curve with a hole in it would be worse.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any, Final, TextIO

import torch
from torch import Tensor

from sanctuary_trainer.errors import DataError, SettingsError

_FLUSH_SECONDS: Final = 30
_MOST_IMAGES: Final = 64
_IMAGES_PER_ROW: Final = 8


class Tracking:
    """The trackers of one run. On a process that is not the main one every method does nothing of its own.

    Args:
        run_dir: the run's folder; made when it is missing.
        log_with: "tensorboard", None for `metrics.jsonl` alone, another of accelerate's tracker names, a
            `GeneralTracker` object, or a list of these; see `check_log_with`.
        is_main: whether this process writes. accelerate's trackers are told everything on every process and decide
            for themselves.
        hparams: shown beside the metrics; never changed. See `flatten_hparams`.

    Raises:
        SettingsError: for a `log_with` that is unknown or not installed.
        OSError: from any method, when a file cannot be written.
    """

    def __init__(self, run_dir: Path, *, log_with: Any, is_main: bool, hparams: Mapping[str, Any]) -> None:
        names = check_log_with(log_with)
        self._lines: TextIO | None = None
        self._board: _TensorBoard | None = None
        flat = flatten_hparams(hparams)
        if is_main:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._lines = (run_dir / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
            if "tensorboard" in names:
                self._board = _TensorBoard(run_dir, flat)
        self.trackers: list[Any] = [
            _accelerate_tracker(tracker, run_dir) for tracker in names if tracker != "tensorboard"
        ]
        for tracker in self.trackers:
            tracker.start()
            tracker.store_init_configuration(dict(flat))

    def log(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        """Write values at x = step, with the epoch beside them.

        In `metrics.jsonl` a value that is not finite is the string "NaN", "Infinity" or "-Infinity": JSON has no such
        numbers, and `float(...)` reads them back.
        """
        if self._lines is not None:
            line: dict[str, Any] = {"step": step, "epoch": epoch, "time": time.time()}
            line.update((name, _for_json(value)) for name, value in values.items())
            self._lines.write(json.dumps(line, allow_nan=False) + "\n")
        if self._board is not None:
            self._board.add_scalars({**values, "epoch": epoch}, step)
        for tracker in self.trackers:
            tracker.log({**values, "epoch": epoch}, step=step)

    def log_images(self, name: str, images: Any, step: int) -> None:
        """Show images as one grid, the first 64 of them, in TensorBoard and in those other trackers that take images.

        images: (N, C, H, W) or (C, H, W), C = 1 or 3, tensor or array; float in [0, 1] (clipped) or uint8.

        Raises:
            DataError: for another shape or type.
        """
        if self._board is None and not self.trackers:
            return
        grid = image_grid(name, images)  # (H, W, 3) uint8
        if self._board is not None:
            self._board.add_image(name, grid, step)
        for tracker in self.trackers:
            if hasattr(tracker, "log_images"):
                tracker.log_images({name: [grid]}, step=step)

    def close(self, status: str = "success") -> None:
        """Write everything that is pending and close. status: "success", "failure" or "unknown"."""
        lines, board, trackers = self._lines, self._board, self.trackers
        self._lines, self._board, self.trackers = None, None, []
        with ExitStack() as stack:  # one that fails does not keep the others open
            for tracker in trackers:
                stack.callback(tracker.finish)
            if board is not None:
                stack.callback(board.close, status)
            if lines is not None:
                stack.callback(lines.close)


class _TensorBoard:
    """The one event file of a run. One event per call: for 6 values a thirtieth of SummaryWriter's time."""

    def __init__(self, run_dir: Path, hparams: Mapping[str, bool | int | float | str]) -> None:
        # Here, because the import costs a quarter of a second.
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        self._event, self._summary = Event, Summary
        self._hparams = (api_pb2, metadata, plugin_data_pb2)
        self._writer = EventFileWriter(str(run_dir), max_queue_size=100, flush_secs=_FLUSH_SECONDS)
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name, value in hparams.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, str):
                start.hparams[name].string_value = value
            else:
                start.hparams[name].number_value = value
        self._write_session(metadata.SESSION_START_INFO_TAG, session_start_info=start)
        self._writer.flush()

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        value = self._summary.Value
        self._write([value(tag=name, simple_value=number) for name, number in values.items()], step)

    def add_image(self, name: str, grid: Any, step: int) -> None:
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(grid).save(buffer, format="PNG")
        height, width, channels = grid.shape
        image = self._summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=buffer.getvalue()
        )
        self._write([self._summary.Value(tag=name, image=image)], step)

    def close(self, status: str) -> None:
        api, metadata, plugin_data = self._hparams
        end = plugin_data.SessionEndInfo(status=api.Status.Value(f"STATUS_{status.upper()}"), end_time_secs=time.time())
        self._write_session(metadata.SESSION_END_INFO_TAG, session_end_info=end)
        self._writer.flush()  # raises what the writing thread met; close alone would not
        self._writer.close()

    def _write_session(self, tag: str, **info: Any) -> None:
        _, metadata, plugin_data = self._hparams
        about = metadata.create_summary_metadata(plugin_data.HParamsPluginData(**info))
        self._write([self._summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)], 0)

    def _write(self, values: list[Any], step: int) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))


def check_log_with(log_with: Any) -> list[Any]:
    """Check `log_with` before a run and give it as a list.

    Returns:
        Tracker names and objects, each name once; "all" becomes every tracker that is installed.

    Raises:
        SettingsError: for a name that is unknown or not installed, or an object that is no tracker.
    """
    asked = [] if log_with is None else list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    names: list[Any] = []
    for item in asked:
        name = item.value if isinstance(item, Enum) else item  # accelerate has its names as an enum, too
        for one in _installed() if name == "all" else [name]:
            if one != "tensorboard":
                _check_tracker(one)
            if one not in names:
                names.append(one)
    return names


def flatten_hparams(hparams: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Hyper-parameters as trackers take them: nested names joined by "/", numbers and bools kept, the rest as text.

    Mappings and dataclasses are flattened. A sequence is text, `[1, 2]`; a class or function its qualified name; a
    tensor of one element its number, a larger one `tensor of shape (64, 3), float32`. NaN and infinity are text, too:
    TensorBoard's table would leave the number out.
    """
    return dict(_flattened("", hparams))


def image_grid(name: str, images: Any) -> Any:
    """The first 64 images side by side, 8 in a row, as one (H, W, 3) uint8 array.

    images: (N, C, H, W) or (C, H, W), C = 1 or 3; float in [0, 1] (clipped; NaN is black) or uint8. Raises `DataError`.
    """
    tensor = torch.as_tensor(images).detach()
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() != 4 or tensor.shape[1] not in (1, 3) or 0 in tensor.shape:
        raise DataError(
            f"log_image({name!r}) got images of shape {tuple(torch.as_tensor(images).shape)}; expected (N, C, H, W) or "
            "(C, H, W) with 1 or 3 channels."
        )
    tensor = tensor[:_MOST_IMAGES].cpu()
    if tensor.is_floating_point():
        tensor = (tensor.float().nan_to_num(nan=0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    elif tensor.dtype != torch.uint8:
        raise DataError(f"log_image({name!r}) got {tensor.dtype}; expected float in [0, 1] or uint8 in [0, 255].")
    tensor = tensor.expand(-1, 3, -1, -1)
    count, _, height, width = tensor.shape
    columns = min(count, _IMAGES_PER_ROW)
    rows = -(-count // columns)
    grid = tensor.new_zeros(rows * columns, 3, height, width)
    grid[:count] = tensor
    grid = grid.reshape(rows, columns, 3, height, width).permute(0, 3, 1, 4, 2)  # rows, H, columns, W, 3
    return grid.reshape(rows * height, columns * width, 3).numpy()


def _for_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _flattened(prefix: str, value: Any) -> Iterator[tuple[str, bool | int | float | str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            yield from _flattened(f"{prefix}/{key}" if prefix else str(key), inner)
    elif isinstance(value, Tensor) and value.numel() == 1:
        yield from _flattened(prefix, value.item())
    elif isinstance(value, (bool, int, float)):
        yield prefix, value if math.isfinite(value) else str(value)
    elif hasattr(value, "dtype") and getattr(value, "shape", None) == () and hasattr(value, "item"):
        yield from _flattened(prefix, value.item())  # numpy's numbers
    else:
        yield prefix, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        return str(value)
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (list, tuple)):
        open_, shut = "[]" if isinstance(value, list) else "()"
        return open_ + ", ".join(_text(item) for item in value) + shut
    return repr(value)


def _installed() -> list[str]:
    """The trackers that can be used here. Importing accelerate's costs, so only for another tracker than ours."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    registered = set(LOGGER_TYPE_TO_CLASS) - set(LoggerType.list())
    return sorted({str(name) for name in get_available_trackers()} | registered)


def _check_tracker(tracker: Any) -> None:
    from accelerate.tracking import GeneralTracker

    if isinstance(tracker, GeneralTracker):
        return
    installed = _installed()
    if not isinstance(tracker, str):
        raise SettingsError(
            f"log_with got {tracker!r:.80} of type {type(tracker).__name__}; a tracker's name, one of accelerate's "
            f"GeneralTracker objects, a list of these or None was expected. Installed here: {', '.join(installed)}."
        )
    if tracker not in installed:
        raise SettingsError(
            f"log_with={tracker!r} is unknown or not installed. Installed here: {', '.join(installed)}."
        )


def _accelerate_tracker(tracker: Any, run_dir: Path) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    if not isinstance(tracker, str):
        return tracker
    make = LOGGER_TYPE_TO_CLASS[tracker]
    # The project is the folder of runs; who wants another name, an entity or tags gives a tracker object.
    project = run_dir.resolve().parent.name
    return make(project, str(run_dir)) if make.requires_logging_directory else make(project)
