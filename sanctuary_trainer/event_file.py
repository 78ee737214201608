"""TensorBoard's view of a run: everything in one event file, hyper-parameters included.

Where no experiment is described, TensorBoard's hparams plugin takes the metrics that it shows from the run's own
scalars, so a session's start and end are all that is needed (accelerate's tracker and `SummaryWriter.add_hparams` write
a second run for them).
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from sanctuary_trainer.errors import DataError

_FLUSH_SECONDS: Final = 30
_MOST_IMAGES: Final = 64
_IMAGES_PER_ROW: Final = 8
_SUFFIX: Final = ".sanctuary"  # ours among the event files of a run's folder


class EventFile:
    """The one event file of a fit. One event per call: for 6 values a thirtieth of SummaryWriter's time.

    Args:
        run_dir: where it lies.
        hparams: of the session.
        from_step: the folder holds the file of a former attempt, which a TensorBoard may be showing: it is told to
            drop its points from this step on.
    """

    def __init__(
        self, run_dir: Path, hparams: Mapping[str, bool | int | float | str], from_step: int | None = None
    ) -> None:
        # Here, because the import costs a quarter of a second.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._hparams = (api_pb2, metadata, plugin_data_pb2)
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name, value in hparams.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, str):
                start.hparams[name].string_value = value
            else:
                start.hparams[name].number_value = value
        _wait_for_a_later_name(run_dir)
        self._writer = EventFileWriter(
            str(run_dir), max_queue_size=100, flush_secs=_FLUSH_SECONDS, filename_suffix=_SUFFIX
        )
        if from_step is not None:
            self._writer.add_event(
                Event(wall_time=time.time(), step=from_step, session_log=SessionLog(status=SessionLog.START))
            )
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

    def flush(self) -> None:
        """Write all that is pending; raises what the writing thread met."""
        self._writer.flush()

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


def event_files(run_dir: Path) -> list[Path]:
    """The event files that were written here by this package, in the order in which TensorBoard reads them."""
    return sorted(run_dir.glob(f"events.out.tfevents.*{_SUFFIX}"))


def _wait_for_a_later_name(run_dir: Path) -> None:
    """TensorBoard reads files by name, which begins with the second: of one second they may come in either order."""
    while (files := event_files(run_dir)) and files[-1].name.split(".")[3] == f"{int(time.time()):010d}":
        time.sleep(0.02)


def image_grid(name: str, images: Any) -> Any:
    """The first 64 images side by side, 8 in a row, as one (H, W, 3) uint8 array.

    images: (N, C, H, W) or (C, H, W), C = 1 or 3, or a list of (C, H, W) of one size; float in [0, 1] (clipped; NaN is
    black) or uint8. A PIL image, or a list of these. Raises `DataError`.
    """
    given = _as_tensor(name, images)
    tensor = given.unsqueeze(0) if given.dim() == 3 else given
    if tensor.dim() != 4 or tensor.shape[1] not in (1, 3) or 0 in tensor.shape:
        raise DataError(
            f"log_image({name!r}) got images of shape {tuple(given.shape)}; expected (N, C, H, W) or "
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


def _as_tensor(name: str, images: Any) -> torch.Tensor:
    try:
        return _stacked(images).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"log_image({name!r}) got {type(images).__name__}: {error}. A tensor or array of images, a PIL image, or a "
            "list of images of one size was expected."
        ) from None


def _stacked(images: Any) -> torch.Tensor:
    if isinstance(images, (list, tuple)):
        return torch.stack([_stacked(image) for image in images[:_MOST_IMAGES]])
    if hasattr(images, "convert"):  # PIL's
        return torch.from_numpy(np.array(images.convert("RGB"))).permute(2, 0, 1)
    return torch.as_tensor(images)
