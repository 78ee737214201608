"""What a run leaves in its folder: one event file with all that TensorBoard shows of it, and `metrics.jsonl`."""

import dataclasses
import gc
import json
import math
import os
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from sanctuary_trainer.board_layout import MOST_CHARTS, board_layout
from sanctuary_trainer.errors import DataError, SettingsError
from sanctuary_trainer.hparams import flatten_hparams
from sanctuary_trainer.image_grid import image_grid
from sanctuary_trainer.tracking import Tracking, check_log_with


@dataclasses.dataclass
class Layers:
    depth: int = 3
    norm: str = "batch"


def case_93() -> dict[str, Any]:
    return {
        "a": [1, 2],
        "b": None,
        "c": torch.zeros(2, 3),
        "d": Layers(),
        "e": Path("data") / "images",
        "f": nn.ReLU,
        "g": {"h": 1.5},
        "i": math.nan,
    }


def track(folder: Path, hparams: dict[str, Any] | None = None, **settings: Any) -> Tracking:
    tracking = Tracking(folder, **{"log_with": "tensorboard", "is_main": True, "hparams": hparams or {}, **settings})
    tracking.open()
    return tracking


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def tensorboard(folder: Path) -> Iterator[Any]:
    """A function that asks TensorBoard's server, as its page does."""
    from tensorboard import default
    from tensorboard.program import TensorBoard

    server = TensorBoard(plugins=default.get_plugins())
    server.configure(argv=["", "--logdir", str(folder), "--port", "0", "--load_fast", "false"])
    url = server.launch()

    def ask(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{url}data/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    yield ask


def hparams_page(ask: Any) -> tuple[dict[str, str], list[str], list[dict[str, Any]]]:
    """Hyper-parameters with their types, metrics, and the rows of TensorBoard's page of hyper-parameters."""
    columns = ask("plugin/hparams/experiment", {"experimentName": "", "hparamsLimit": 0, "includeMetrics": True})
    kinds = {info["name"]: info["type"] for info in columns["hparamInfos"]}
    asked = [{"hparam": name, "includeInResult": True} for name in kinds]
    asked += [{"metric": info["name"], "includeInResult": True} for info in columns["metricInfos"]]
    statuses = [f"STATUS_{status}" for status in ("SUCCESS", "FAILURE", "UNKNOWN", "RUNNING")]
    about = {"experimentName": "", "startIndex": 0, "sliceSize": 10, "includeMetrics": True}
    rows = ask("plugin/hparams/session_groups", {**about, "allowedStatuses": statuses, "colParams": asked})
    return kinds, [info["name"]["tag"] for info in columns["metricInfos"]], rows["sessionGroups"]


def final_metrics(row: dict[str, Any]) -> dict[str, float]:
    return {metric["name"]["tag"]: metric["value"] for metric in row["metricValues"]}


def test_a_fit_leaves_one_event_file_and_no_second_run(tmp_path: Path) -> None:
    tracking = track(tmp_path / "run", case_93())
    for step in range(10, 60, 10):
        tracking.log({"train/loss": 1 / step, "val/accuracy": step / 100}, step, epoch=step // 30)
    tracking.log({"val/loss": 0.5}, 50, epoch=1)
    tracking.log_images("val/images", torch.rand(3, 3, 8, 8), 50)
    tracking.close("success")

    kinds = sorted(path.name.split(".")[0] for path in (tmp_path / "run").rglob("*"))
    assert kinds == ["events", "metrics"]
    written = events(tmp_path / "run")
    loss = written.Scalars("train/loss")
    assert [event.step for event in loss] == [10, 20, 30, 40, 50]
    assert loss[-1].value == pytest.approx(0.02)
    epochs = [(event.step, event.value) for event in written.Scalars("epoch")]
    assert epochs == [(10, 0), (20, 0), (30, 1), (40, 1), (50, 1)], "one point for a step"
    assert written.Tags()["images"] == ["val/images"]


def test_tensorboard_shows_hyper_parameters_and_the_last_value_in_the_run_itself(tmp_path: Path) -> None:
    first, second = track(tmp_path / "first", case_93()), track(tmp_path / "second", {"g": {"h": 2.5}})
    for step in range(5):
        first.log({"val/accuracy": step / 8}, step, epoch=0)
        second.log({"val/accuracy": step / 16}, step, epoch=0)
    first.close("success")
    second.close("failure")

    with tensorboard(tmp_path) as ask:
        for _ in range(200):
            if len(runs := ask("runs")) == 2:  # it reads in the background
                break
            time.sleep(0.1)
        assert runs == ["first", "second"]
        kinds, metrics, groups = hparams_page(ask)
        assert kinds["g/h"] == "DATA_TYPE_FLOAT64"
        assert "val/accuracy" in metrics
    sessions = {group["sessions"][0]["name"]: group for group in groups}
    assert sessions["first"]["hparams"]["g/h"] == 1.5
    assert sessions["first"]["hparams"]["d/depth"] == 3
    assert sessions["first"]["hparams"]["i"] == "nan"
    assert sessions["second"]["hparams"]["g/h"] == 2.5
    assert final_metrics(sessions["first"])["val/accuracy"] == 0.5
    assert final_metrics(sessions["second"])["val/accuracy"] == 0.25
    assert sessions["first"]["sessions"][0]["status"] == "STATUS_SUCCESS"
    assert sessions["second"]["sessions"][0]["status"] == "STATUS_FAILURE"


def test_hyper_parameters_of_any_type_are_flattened_and_left_as_they_were() -> None:
    hparams = case_93()
    before, inner = dict(hparams), deepcopy(hparams["g"])
    flat = flatten_hparams(hparams)
    assert flat == {
        "a": "[1, 2]",
        "b": "None",
        "c": "tensor of shape (2, 3), float32",
        "d/depth": 3,
        "d/norm": "batch",
        "e": str(Path("data/images")),
        "f": "torch.nn.modules.activation.ReLU",
        "g/h": 1.5,
        "i": "nan",
    }
    assert all(hparams[name] is before[name] for name in before) and hparams["g"] == inner


def test_hyper_parameters_that_are_numbers_in_other_clothes_stay_numbers() -> None:
    flat = flatten_hparams(
        {
            "bool": True,
            "int": np.int64(3),
            "float": np.float32(0.5),
            "tensor": torch.tensor(2.5),
            "one": torch.tensor([4]),
            "empty": {},
            "none": {"inside": {}},
            1: {2: "key"},
            "pair": (nn.ReLU, Path("a")),
            "function": flatten_hparams,
        }
    )
    assert flat == {
        "bool": True,
        "int": 3,
        "float": 0.5,
        "tensor": 2.5,
        "one": 4,
        "empty": "{}",
        "none/inside": "{}",
        "1/2": "key",
        "pair": "(torch.nn.modules.activation.ReLU, a)",
        "function": "sanctuary_trainer.hparams.flatten_hparams",
    }
    assert flat["bool"] is True


@dataclasses.dataclass
class HalfSet:
    depth: int = 3
    late: Any = dataclasses.field(init=False)


def test_hyper_parameters_of_odd_kinds_reach_the_event_file(tmp_path: Path) -> None:
    odd = {
        "method": torch.Tensor.relu,
        "builtin": str.upper,
        "bound": "a".join,
        "unset": HalfSet(),
        "bytes": "a\udcff",
        "path": Path(os.fsdecode(b"\xff")),
        "\udcff": 1,
        "meta": torch.zeros(1, device="meta"),
        "complex": torch.tensor(1j),
        "large": 10**400,
        "larger": [10**5000],
        "long": np.longdouble(2),
        "array": np.array(3),
        "date": np.datetime64("2020-01-01"),
    }
    flat = flatten_hparams(odd)
    assert flat["large"] == hex(10**400) and str(flat["larger"]).startswith("[0x")
    assert {name: value for name, value in flat.items() if not name.startswith("large")} == {
        "method": torch.Tensor.relu.__qualname__,
        "builtin": "str.upper",
        "bound": "str.join",
        "unset/depth": 3,
        "bytes": r"a\udcff",
        "path": r"\udcff",
        r"\udcff": 1,
        "meta": "tensor of shape (1,), float32",
        "complex": "1j",
        "long": "2.0",
        "array": 3,
        "date": "datetime.date(2020, 1, 1)",
    }
    track(tmp_path, odd).close()
    assert "_hparams_/session_start_info" in events(tmp_path).Tags()["tensors"]


def test_a_tracker_that_does_not_start_leaves_no_file_open(tmp_path: Path) -> None:
    from accelerate import PartialState

    PartialState(cpu=True)
    memory = memory_tracker()()
    broken = memory_tracker()()
    broken.start = lambda: 1 / 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with pytest.raises(ZeroDivisionError):
            track(tmp_path, log_with=["tensorboard", memory, broken])
        gc.collect()
    assert memory.seen == ["start", {}, "finish"]
    assert "_hparams_/session_end_info" in events(tmp_path).Tags()["tensors"]


def test_every_line_of_metrics_is_strict_json_and_whole_at_once(tmp_path: Path) -> None:
    tracking = track(tmp_path, log_with=None)
    tracking.log({"train/loss": math.nan, "train/up": math.inf, "train/down": -math.inf, "train/x": 1.5}, 3, epoch=1)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close
    values = json.loads(line, parse_constant=refuse)
    assert (values["step"], values["epoch"], values["train/x"]) == (3, 1, 1.5)
    assert math.isnan(float(values["train/loss"]))
    assert (float(values["train/up"]), float(values["train/down"])) == (math.inf, -math.inf)
    tracking.close("success")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_nan_reaches_tensorboard(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    tracking.log({"train/loss": math.nan}, 1, epoch=0)
    tracking.close("success")
    assert math.isnan(events(tmp_path).Scalars("train/loss")[0].value)


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    tracking = track(tmp_path / "run", is_main=False)
    tracking.log({"train/loss": 1.0}, 1, epoch=0)
    tracking.log_images("images", torch.zeros(1, 3, 2, 2), 1)
    tracking.close("success")
    assert not (tmp_path / "run").exists()


def test_close_twice_is_one_close(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    tracking.close("success")
    tracking.close("failure")
    assert "_hparams_/session_end_info" in events(tmp_path).Tags()["tensors"]


def layouts(folder: Path) -> list[dict[str, dict[str, str]]]:
    """All layouts of "Custom Scalars" in a run's folder, in the order in which TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    found = []
    for path in sorted(folder.glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == "custom_scalars__config__":
                    assert (value.metadata.plugin_data.plugin_name, event.step) == ("custom_scalars", 0)
                    found.append(Layout.FromString(value.tensor.string_val[0]))
    return [
        {section.title: {chart.title: chart.multiline.tag[0] for chart in section.chart} for section in layout.category}
        for layout in found
    ]


def test_the_layout_is_written_again_when_a_name_asks_for_another_chart(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    for step in range(3):
        tracking.log({"train/loss": 1.0, "train/lr": 0.1}, step, epoch=0)
    tracking.log({"val/loss": 1.0}, 3, epoch=0)
    tracking.log({"val/loss_ema": 1.0}, 3, epoch=0)
    tracking.log({"val/accuracy": 1.0}, 4, epoch=0)
    tracking.close()
    names = [["train/loss", "train/lr"], ["train/loss", "train/lr", "val/accuracy"]]
    assert layouts(tmp_path) == [board_layout(known) for known in names]


def test_a_continued_run_has_the_charts_of_all_that_it_ever_wrote(tmp_path: Path) -> None:
    first = track(tmp_path)
    first.log({"train/loss": 1.0}, 1, epoch=0)
    first.log({"val/accuracy": 1.0}, 2, epoch=0)
    reached = json.loads(json.dumps(first.reached()))
    first.log({"train/late": 1.0}, 3, epoch=0)  # after the checkpoint: as if it had not been
    first.close("failure")
    second = track(tmp_path, reached=reached, step=3)
    second.log({"train/loss": 1.0}, 3, epoch=0)
    assert second.reached()["names"] == ["train/loss", "epoch", "val/accuracy"]
    assert layouts(tmp_path)[-1] == board_layout(["train/loss", "val/accuracy"])
    second.log({"val/score": 1.0}, 4, epoch=0)
    second.close()
    assert layouts(tmp_path)[-1] == board_layout(["train/loss", "val/accuracy", "val/score"])
    anew = track(tmp_path)
    anew.log({"train/loss": 1.0}, 1, epoch=0)
    anew.close()
    assert layouts(tmp_path) == [board_layout(["train/loss"])]


def test_names_without_end_do_not_grow_the_layout_without_end(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    tracking.log({f"val/metric{i}": 1.0 for i in range(3000)}, 0, epoch=0)
    tracking.log({"mine/late": 1.0}, 1, epoch=0)
    assert "mine/late" not in tracking.reached()["names"]
    tracking.close()
    assert [sum(map(len, layout.values())) for layout in layouts(tmp_path)] == [MOST_CHARTS]


def test_a_tensorboard_that_was_open_all_along_drops_the_points_that_come_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    first = track(tmp_path)
    for step in range(1, 10):
        first.log({"train/loss": 1.0}, step, epoch=0)
        if step == 5:
            reached = first.reached()
    first.close("failure")
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    second = track(tmp_path, reached=reached, step=6)
    for step in range(6, 12):
        second.log({"train/loss": 2.0}, step, epoch=0)
    second.close()
    shown.Reload()
    assert [event.step for event in shown.Tensors("train/loss")] == list(range(1, 12))
    assert len(shown.Tensors("custom_scalars__config__")) == 1


def test_a_run_that_failed_and_was_continued_shows_how_it_ended(tmp_path: Path) -> None:
    first = track(tmp_path / "run", {"lr": 0.1})
    first.log({"val/accuracy": 0.25}, 1, epoch=0)
    reached = first.reached()
    first.log({"val/accuracy": 0.125, "val/gone": 1.0}, 2, epoch=0)
    first.close("failure")
    second = track(tmp_path / "run", {"lr": 0.1}, reached=reached, step=2)
    second.log({"val/accuracy": 0.5}, 2, epoch=0)
    second.close("success")
    with tensorboard(tmp_path) as ask:
        for _ in range(200):
            if "val/accuracy" in ask("plugin/scalars/tags").get("run", {}):
                break
            time.sleep(0.1)
        kinds, metrics, (row,) = hparams_page(ask)
    assert (list(kinds), metrics) == (["lr"], ["epoch", "val/accuracy"])
    assert (row["hparams"], final_metrics(row)) == ({"lr": 0.1}, {"val/accuracy": 0.5, "epoch": 0.0})
    assert [session["status"] for session in row["sessions"]] == ["STATUS_SUCCESS"]


def test_a_text_reaches_tensorboard_as_it_is(tmp_path: Path) -> None:
    tracking = track(tmp_path)
    texts = ["# Report\n\n| rank | ms |\n|--|--:|\n| 0 | 3 |\n", "überall \udcff", ""]
    for step, text in enumerate(texts):
        tracking.log_text("balance/report", text, step)
    tracking.close()
    written = events(tmp_path)
    assert written.summary_metadata["balance/report"].plugin_data.plugin_name == "text"
    found = [(event.step, event.tensor_proto.string_val[0].decode()) for event in written.Tensors("balance/report")]
    assert found == [(0, texts[0]), (1, "überall \\udcff"), (2, "")]


def test_what_is_no_text_is_told_and_other_processes_and_trackers_do_without(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"log_text\('report'\) got int; a str was expected"):
        track(tmp_path / "run").log_text("report", 3, 1)  # type: ignore[arg-type]
    tracking = track(tmp_path / "other", is_main=False)
    tracking.log_text("report", "text", 1)
    assert not (tmp_path / "other").exists()
    tracking = track(tmp_path / "lines", log_with=None)
    tracking.log_text("report", "text", 1)
    tracking.close()
    assert (tmp_path / "lines" / "metrics.jsonl").read_text() == ""


def test_images_become_one_grid_with_their_own_pixels() -> None:
    images = torch.rand(11, 3, 4, 5)
    grid = image_grid("images", images)
    assert grid.shape == (8, 40, 3) and grid.dtype == np.uint8
    expected = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    for i in range(11):
        row, column = divmod(i, 8)
        tile = grid[row * 4 : row * 4 + 4, column * 5 : column * 5 + 5]
        assert (tile == expected[i]).all()
    assert not grid[4:, 15:].any()


def test_images_of_every_allowed_kind() -> None:
    grey = image_grid("images", torch.tensor([[[0, 255], [128, 1]]], dtype=torch.uint8))
    assert grey.tolist() == [[[0] * 3, [255] * 3], [[128] * 3, [1] * 3]]
    clipped = image_grid("images", torch.tensor([-1.0, 2.0, 0.5, math.nan]).reshape(1, 1, 2, 2))
    assert clipped[..., 0].tolist() == [[0, 255], [128, 0]]
    assert image_grid("images", np.zeros((100, 1, 2, 2))).shape == (16, 16, 3)
    assert image_grid("images", torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16)).shape == (4, 8, 3)
    several = torch.rand(3, 1, 4, 5)
    assert (image_grid("images", list(several)) == image_grid("images", several)).all()
    assert image_grid("images", [torch.rand(3, 4, 4)] * 100).shape == (32, 32, 3)
    colours = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    picture = Image.fromarray(colours)
    assert (image_grid("images", picture) == colours).all()
    assert image_grid("images", [picture, picture.convert("L")]).shape == (4, 10, 3)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 4, 8, 8), r"shape \(2, 4, 8, 8\)"),
        (torch.zeros(8, 8), r"shape \(8, 8\)"),
        (torch.zeros(0, 3, 8, 8), r"shape \(0, 3, 8, 8\)"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.int64), r"torch.int64; expected float in \[0, 1\] or uint8"),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 8, 9)], "got list: .*a list of images of one size"),
        ("image.png", "got str: .*A tensor or array of images"),
        (None, "got NoneType: .*A tensor or array of images"),
        ([], "got list: .*A tensor or array of images"),
    ],
)
def test_images_that_cannot_be_shown_are_refused(tmp_path: Path, images: Any, message: str) -> None:
    tracking = track(tmp_path)
    with pytest.raises(DataError, match=message):
        tracking.log_images("val/images", images, 1)
    tracking.close("failure")


def test_an_unknown_tracker_is_refused_before_the_run_and_the_installed_are_named() -> None:
    with pytest.raises(SettingsError, match=r"'tensorbord' is unknown or not installed. Installed here: .*tensorboard"):
        check_log_with("tensorbord")
    with pytest.raises(SettingsError, match=r"got 3 of type int"):
        check_log_with(["tensorboard", 3])


def test_log_with_takes_names_lists_and_all() -> None:
    from accelerate.utils import LoggerType

    assert check_log_with(None) == []
    assert check_log_with("tensorboard") == ["tensorboard"]
    assert check_log_with([LoggerType.TENSORBOARD, "tensorboard"]) == ["tensorboard"]
    assert "tensorboard" in check_log_with("all")


def memory_tracker() -> Any:
    """A class of tracker that keeps what it is told."""
    from accelerate.tracking import GeneralTracker

    class Memory(GeneralTracker):  # type: ignore[misc]
        name = "memory"
        requires_logging_directory = False

        def __init__(self, *place: str) -> None:
            super().__init__()
            self.place = place
            self.seen: list[Any] = []

        @property
        def tracker(self) -> list[Any]:
            return self.seen

        def start(self) -> None:
            self.seen.append("start")

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.seen.append(values)

        def log(self, values: dict[str, Any], step: int | None = None, **settings: Any) -> None:
            self.seen.append((step, values))

        def log_images(self, values: dict[str, Any], step: int | None = None, **settings: Any) -> None:
            self.seen.append((step, {name: images[0].shape for name, images in values.items()}))

        def finish(self) -> None:
            self.seen.append("finish")

    return Memory


def test_accelerate_s_trackers_get_hyper_parameters_values_images_and_the_end(tmp_path: Path) -> None:
    from accelerate import PartialState

    PartialState(cpu=True)
    memory = memory_tracker()()
    tracking = track(tmp_path, {"g": {"h": 1.5}}, log_with=["tensorboard", memory])
    tracking.log({"train/loss": 0.5}, 7, epoch=2)
    tracking.log_images("images", torch.zeros(2, 3, 4, 4), 7)
    tracking.close("success")
    assert memory.seen == [
        "start",
        {"g/h": 1.5},
        (7, {"train/loss": 0.5, "epoch": 2}),
        (7, {"images": (4, 8, 3)}),
        "finish",
    ]
    assert lines(tmp_path)[0]["train/loss"] == 0.5
    assert events(tmp_path).Scalars("train/loss")[0].value == 0.5


@pytest.mark.parametrize("wants_folder", [False, True])
def test_a_tracker_given_by_name_gets_the_project_and_where_it_asks_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wants_folder: bool
) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    made = memory_tracker()
    made.requires_logging_directory = wants_folder
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "memory", made)
    run_dir = tmp_path / "runs" / "first"
    tracking = track(run_dir, log_with="memory")
    (tracker,) = tracking.trackers
    assert tracker.place == (("runs", str(run_dir)) if wants_folder else ("runs",))
    tracking.close("success")
    assert tracker.seen == ["start", {}, "finish"]
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    tmp_path.joinpath("metrics.jsonl").symlink_to("/dev/full")
    tracking = track(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        tracking.log({"train/loss": 1.0}, 1, epoch=0)
