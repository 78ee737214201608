"""TensorBoard's view of a run: everything in one event file, hyper-parameters included.

Where no experiment is described, TensorBoard's hparams plugin takes the metrics that it shows from the run's own
scalars, so a session's start and end are all that is needed (accelerate's tracker and `SummaryWriter.add_hparams` write
a second run for them).

Of several layouts of the page "Custom Scalars" TensorBoard takes the last, so a new one is written whenever a new name
asks for another chart. All stand at step 0, where no restart of a run drops them.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from sanctuary_trainer.board_layout import board_layout

_FLUSH_SECONDS: Final = 30
_MOST_NAMES: Final = 2000  # that are looked at for charts
_SUFFIX: Final = ".sanctuary"  # ours among the event files of a run's folder


class EventFile:
    """The one event file of a fit. One event per call: for 6 values a thirtieth of SummaryWriter's time.

    Args:
        run_dir: where it lies.
        hparams: of the session.
        from_step: a TensorBoard that shows the file of a former attempt is told to drop its points from this step on.
        names: of scalars that the run has written before.

    `names` holds those of all scalars, as keys.
    """

    def __init__(
        self,
        run_dir: Path,
        hparams: Mapping[str, bool | int | float | str],
        from_step: int = 0,
        names: Iterable[str] = (),
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
        # Also in the first file of a run: TensorBoard takes the first such event that it reads for no restart.
        restart = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=from_step, session_log=restart))
        self._write_session(metadata.SESSION_START_INFO_TAG, session_start_info=start)
        self.names = dict.fromkeys(names)
        self._layout = board_layout(self.names)
        self._writer.flush()

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        value = self._summary.Value
        self._write([value(tag=name, simple_value=number) for name, number in values.items()], step)
        if not values.keys() <= self.names.keys() and len(self.names) < _MOST_NAMES:
            self.names.update(dict.fromkeys(values))
            self._lay_out()

    def add_image(self, name: str, grid: Any, step: int) -> None:
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(grid).save(buffer, format="PNG")
        height, width, channels = grid.shape
        image = self._summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=buffer.getvalue()
        )
        self._write([self._summary.Value(tag=name, image=image)], step)

    def add_text(self, name: str, markdown: str, step: int) -> None:
        self._write_bytes(name, "text", markdown.encode(errors="backslashreplace"), step)

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

    def _lay_out(self) -> None:
        from tensorboard.plugins.custom_scalar import layout_pb2, metadata

        layout = board_layout(self.names)
        if layout == self._layout:
            return
        self._layout, written = layout, layout_pb2.Layout()
        for section, charts in layout.items():
            category = written.category.add(title=section)
            for chart, curves in charts.items():
                category.chart.add(title=chart, multiline=layout_pb2.MultilineChartContent(tag=[curves]))
        self._write_bytes(metadata.CONFIG_SUMMARY_TAG, metadata.PLUGIN_NAME, written.SerializeToString(), 0)

    def _write_bytes(self, tag: str, plugin: str, content: bytes, step: int) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

        about = summary_pb2.SummaryMetadata(
            plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin),
            data_class=summary_pb2.DATA_CLASS_TENSOR,
        )
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[content])
        self._write([self._summary.Value(tag=tag, metadata=about, tensor=tensor)], step)

    def _write(self, values: list[Any], step: int) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))


def event_files(run_dir: Path) -> list[Path]:
    """The event files that were written here by this package, in the order in which TensorBoard reads them."""
    return sorted(run_dir.glob(f"events.out.tfevents.*{_SUFFIX}"))


def _wait_for_a_later_name(run_dir: Path) -> None:
    """TensorBoard reads files by name, which begins with the second: of one second they may come in either order."""
    while (files := event_files(run_dir)) and files[-1].name.split(".")[3] == f"{int(time.time()):010d}":
        time.sleep(0.02)
