"""What a person sees of a run: TensorBoard's own server is asked as its page asks it, and the page is opened."""

import importlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sanctuary_trainer import Callback, Run, Trainer, VisionTask
from sanctuary_trainer.callbacks import EMA, ClassificationDashboard
from tests.conftest import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
REPORT = "# Report\n\n| rank | ms |\n|--|--:|\n| 0 | 3 |\n"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60), pytest.mark.xdist_group("browser")]


class Digits(VisionTask):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        logits = self.model(images)
        self.log("loss", nn.functional.cross_entropy(logits, labels))
        self.log("accuracy", (logits.argmax(-1) == labels).float().mean())
        if batch_idx == 0:
            self.log_image("first", images[:11])
        return logits

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Reports(Callback):
    def on_fit_end(self, run: Run) -> None:
        assert run.tracking is not None
        run.tracking.log_text("balance/report", REPORT, run.state.global_step)


class Shown(NamedTuple):
    """Two runs and the TensorBoard that shows them: the final metrics by run, a function that asks, and its address."""

    metrics: dict[str, dict[str, float]]
    images: torch.Tensor  # (N, 1, 8, 8) of validation
    ask: Callable[..., Any]
    address: str


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    runs = tmp_path_factory.mktemp("dashboard") / "runs"
    metrics, images = train_twice(runs)
    with subprocess.Popen(
        [sys.executable, "-m", "sanctuary_trainer", "dashboard", str(runs), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+/", server.stdout.readline())
            assert address is not None

            def ask(path: str, body: Any = None, **query: Any) -> Any:
                url = f"{address[0]}data/{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
                data = None if body is None else json.dumps(body).encode()
                request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=20) as answer:
                    content = answer.read()
                return json.loads(content) if answer.headers["Content-Type"] == "application/json" else content

            # It reads in the background, and the report is the last that a run writes but for its end.
            end = time.monotonic() + 30
            while ask("plugin/text/tags").keys() != metrics.keys() and time.monotonic() < end:
                time.sleep(0.2)
            yield Shown(metrics, images, ask, address[0])
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(10)


def train_twice(runs: Path) -> tuple[dict[str, dict[str, float]], torch.Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels))
    train, val = TensorDataset(*digits[:320]), TensorDataset(*digits[320:480])
    metrics = {}
    for lr in (1e-3, 1e-2):
        torch.manual_seed(0)
        trainer = Trainer(
            max_epochs=2,
            seed=0,
            project_dir=runs,
            log_every_n_steps=2,
            gradient_clip_val=1.0,
            callbacks=[ClassificationDashboard(), EMA(0.9), Reports()],
            default_callbacks=False,
        )
        result = trainer.fit(Digits(lr), DataLoader(train, 32, shuffle=True), DataLoader(val, 80))
        metrics[result.run_dir.name] = result.metrics
    return metrics, digits[320:480][0]


def test_scalars_and_images_are_listed(shown: Shown) -> None:
    scalars, images = shown.ask("plugin/scalars/tags"), shown.ask("plugin/images/tags")
    assert scalars.keys() == images.keys() == shown.metrics.keys() == {"digits-1", "digits-2"}
    for run, metrics in shown.metrics.items():
        assert scalars[run].keys() == {*metrics, "epoch"}
        dashboard = {"val/confusion_matrix", "val/confident_mistakes", "val/worst_losses", "train/images"}
        assert images[run].keys() == {"val/first", "val/first_ema", *dashboard}


def test_an_image_arrives_with_its_pixels(shown: Shown) -> None:
    for tag, size in (("val/first", (64, 16)), ("val/confusion_matrix", (900, 900))):
        *_, last = shown.ask("plugin/images/images", run="digits-1", tag=tag, sample=0)
        assert last["step"] == 20
        picture = Image.open(io.BytesIO(shown.ask(f"plugin/images/individualImage?{last['query']}")))
        assert picture.size == size
        if tag == "val/first":
            right_of_first = np.asarray(picture.convert("L"))[:8, 8:16]
            assert (right_of_first == (shown.images[1, 0] * 255).round().numpy()).all()


def test_custom_scalars_show_training_beside_validation(shown: Shown) -> None:
    layout = shown.ask("plugin/custom_scalars/layout")
    charts = {
        f"{section['title']}: {chart['title']}": chart["multiline"]["tag"]
        for section in layout["category"]
        for chart in section["chart"]
    }
    assert sum(len(section["chart"]) for section in layout["category"]) == len(charts), "both runs' charts, each once"
    curves = {}
    for title, (tag,) in charts.items():
        found = shown.ask("plugin/custom_scalars/scalars", run="digits-2", tag=tag)
        assert found["regex_valid"]
        curves[title] = set(found["tag_to_events"])
    classes = {f"val/accuracy_of/{digit}" for digit in range(10)}
    assert curves == {
        "metrics: loss": {"train/loss", "train/loss_epoch", "val/loss", "val/loss_ema"},
        "metrics: accuracy": {"val/accuracy", "val/accuracy_ema"},
        "metrics: accuracy_of": classes,
        "optimization: grad_norm": {"train/grad_norm"},
        "optimization: lr": {"train/lr"},
        "speed: samples_per_second": {"train/samples_per_second"},
    }


def test_a_text_is_shown_as_markdown(shown: Shown) -> None:
    assert shown.ask("plugin/text/tags") == {run: ["balance/report"] for run in shown.metrics}
    (text,) = shown.ask("plugin/text/text", run="digits-1", tag="balance/report")
    assert text["step"] == 20
    assert re.sub(r"\s", "", text["text"]) == (
        "<h1>Report</h1><table><thead><tr><th>rank</th><th>ms</th></tr></thead>"
        "<tbody><tr><td>0</td><td>3</td></tr></tbody></table>"
    )


def test_each_run_has_its_hyper_parameters_and_final_metrics(shown: Shown) -> None:
    columns = shown.ask("plugin/hparams/experiment", {"hparamsLimit": 0, "includeMetrics": True})
    asked = [{"hparam": info["name"], "includeInResult": True} for info in columns["hparamInfos"]]
    asked += [{"metric": info["name"], "includeInResult": True} for info in columns["metricInfos"]]
    about = {"allowedStatuses": ["STATUS_SUCCESS"], "startIndex": 0, "sliceSize": 10, "includeMetrics": True}
    rows = shown.ask("plugin/hparams/session_groups", {**about, "colParams": asked})["sessionGroups"]
    found = {row["name"]: row for row in rows}
    assert found.keys() == shown.metrics.keys()
    assert [found[run]["hparams"]["lr"] for run in ("digits-1", "digits-2")] == [1e-3, 1e-2]
    assert found["digits-1"]["hparams"]["trainer/max_epochs"] == 2
    for run, metrics in shown.metrics.items():
        final = {metric["name"]["tag"]: metric["value"] for metric in found[run]["metricValues"]}
        assert final == pytest.approx({**metrics, "epoch": 1}, rel=1e-6)  # curves are of float32


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_draws_the_curves_and_pictures_of_the_runs(
    shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    with importlib.import_module("screenshot").Browser(tmp_path / "profile") as browser:
        browser.show(f"{shown.address}?tagFilter=loss%24|confusion#timeseries", 1600, 1200)
        pictures = "[...document.querySelectorAll('image-card img')]"
        browser.wait(f"{pictures}.filter((picture) => picture.naturalWidth === 900).length === 2")  # one of each run
        tags = browser.run("[...document.querySelectorAll('card-view [title*=\"/\"]')].map((tag) => tag.title)")
        assert sorted(tags) == ["train/loss", "val/confusion_matrix", "val/confusion_matrix", "val/loss"]
        text = browser.run("document.body.innerText")
        assert "digits-1" in text and "digits-2" in text

        browser.show(f"{shown.address}?#custom_scalars", 1600, 2000)
        chart, lines = (
            "tf-custom-scalar-multi-line-chart-card",
            "all(card.shadowRoot).filter((e) => e.matches('path.line'))",
        )
        browser.wait(f"all(document).filter((card) => card.matches('{chart}') && {lines}.length).length === 6")
        drawn = browser.run(
            f"all(document).filter((card) => card.matches('{chart}')).map((card) => [card.title, {lines}.length])"
        )
        curves = {"loss": 4, "accuracy": 2, "accuracy_of": 10, "grad_norm": 1, "lr": 1, "samples_per_second": 1}
        # Of both runs, and each curve twice: as it is, and smoothed.
        assert dict(drawn) == {title: 4 * count for title, count in curves.items()}
