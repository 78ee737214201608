"""Makes docs/images/dashboard.png, the picture in README. It needs chromium and Debian's dataset-fashion-mnist.

python docs/screenshot.py

two processes train on a fifteenth of Fashion-MNIST; rank 1 reads its images slowly, on purpose
TensorBoard shows the run to a chromium without a window
two of its pages, side by side: curves, and pictures
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sanctuary_trainer import Trainer
from sanctuary_trainer.callbacks import EMA, ClassificationDashboard, LoadBalance, Throughput
from sanctuary_trainer.cli.demo_data import read
from sanctuary_trainer.cli.processes import run_in_processes
from sanctuary_trainer.tasks import ImageClassification

PICTURE = Path(__file__).resolve().parent / "images" / "dashboard.png"
CURVES, PICTURES = (770, 1165), (660, 1165)  # width and height: two charts in a row, three cards in a column
GAP = 10
SHOWN = "time_of_ranks|confident_mistakes|confusion_matrix"
SECONDS_PER_IMAGE = 1e-3  # more, on the slow rank

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 40  # seconds, for anything that is waited for
# Without 3D TensorBoard draws its curves as vectors, which are there when the page is.
FLAGS = """--headless --no-sandbox --disable-gpu --disable-3d-apis --disable-quic --no-first-run --hide-scrollbars
--disable-background-networking --disable-component-update --disable-sync --remote-debugging-pipe"""
# It reads commands from 3 and writes answers to 4.
AS_3_AND_4 = """import os, sys
os.dup2(int(sys.argv[1]), 3), os.dup2(int(sys.argv[2]), 4), os.execv(sys.argv[3], sys.argv[3:])"""
# The elements of a page, also those in the shadow roots of TensorBoard's older pages.
ALL = """const all = (root) => [...root.querySelectorAll("*")].flatMap(
  (element) => [element, ...(element.shadowRoot ? all(element.shadowRoot) : [])]);"""
# Wide cards, and nothing beside them.
SETTINGS = {"timeSeriesCardMinWidth": 500, "timeSeriesSettingsPaneOpened": False, "sideBarWidthInPercent": 0}


def main() -> None:
    with TemporaryDirectory() as folder:
        run_in_processes(2, train, Path(folder))
        with dashboard(Path(folder)) as address, Browser(Path(folder) / "profile") as browser:
            pages = [curves(browser, address), pictures(browser, address)]
    whole = Image.new("RGB", (sum(page.width for page in pages) + GAP, pages[0].height), "white")
    whole.paste(pages[0], (0, 0))
    whole.paste(pages[1], (pages[0].width + GAP, 0))
    PICTURE.parent.mkdir(exist_ok=True)
    # A palette makes a third of it.
    few = whole.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=5, dither=Image.Dither.NONE)
    few.save(PICTURE, optimize=True)


class Slow(TensorDataset):
    """Images whose reading takes its time on rank 1."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if os.environ["RANK"] == "1":
            time.sleep(SECONDS_PER_IMAGE)
        sample: tuple[Tensor, ...] = super().__getitem__(index)
        return sample


def train(project_dir: Path) -> None:
    """What each of the processes does."""
    data = read("fashion-mnist")
    images, labels = torch.from_numpy(data.images).float() / 255, torch.from_numpy(data.labels)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, len(data.names)),
    )
    # The accuracies of the classes are a picture, so that the two curves that matter most stand alone.
    dashboard = ClassificationDashboard(data.names, max_scalars=0)
    trainer = Trainer(
        max_epochs=8,
        seed=0,
        log_every_n_steps=10,
        project_dir=project_dir,
        run_name="fashion",
        callbacks=[dashboard, EMA(0.95), LoadBalance(), Throughput()],
    )
    trainer.fit(
        ImageClassification(model, lr=3e-3),
        DataLoader(Slow(images[data.train[::15]], labels[data.train[::15]]), 32, shuffle=True),
        DataLoader(TensorDataset(images[data.val[::5]], labels[data.val[::5]]), 128),
    )


@contextmanager
def dashboard(project_dir: Path) -> Iterator[str]:
    """The address at which TensorBoard shows the runs."""
    command = [sys.executable, "-m", "sanctuary_trainer", "dashboard", str(project_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+/", server.stdout.readline())
            assert address is not None, "TensorBoard did not start"
            yield address[0]
        finally:
            server.send_signal(signal.SIGINT)


def curves(browser: Browser, address: str) -> Image.Image:
    """The page "Custom Scalars" with two of its sections open, and without its settings."""
    browser.show(f"{address}?#custom_scalars", *CURVES)
    browser.wait("all(document).some((element) => element.matches('path.line'))")
    browser.run("all(document).filter((element) => element.id === 'sidebar').forEach((bar) => bar.remove())")
    browser.run(
        """all(document).filter((element) => element.matches("button.heading"))
        .filter((heading) => /optimization|speed/.test(heading.textContent)).forEach((heading) => heading.click())"""
    )
    return browser.picture()


def pictures(browser: Browser, address: str) -> Image.Image:
    """The page "Time Series", with the last of these pictures each."""
    browser.show(f"{address}?tagFilter={quote(SHOWN)}#timeseries", *PICTURES)
    browser.wait("document.querySelectorAll('image-card img').length === 3")
    return browser.picture()


class Browser:
    """Chromium without a window, which is told through a pipe what to do.

    Args:
        profile: a folder for what it keeps.

    Raises:
        TimeoutError: from any method, when what was asked for does not come to be.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None, "chromium is not installed"
        (commands, self._commands), (self._answers, answers) = os.pipe(), os.pipe()
        start = [sys.executable, "-c", AS_3_AND_4, str(commands), str(answers), CHROMIUM, *FLAGS.split()]
        self._process = subprocess.Popen(
            [*start, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._count, self._heard, self._session, self._size = 0, b"", {}, (0, 0)
        (page,) = [each for each in self._ask("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self._ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self._ask("Page.enable")
        stored = f"localStorage.setItem('_tb_global_settings', {json.dumps(json.dumps(SETTINGS))})"
        self._ask("Page.addScriptToEvaluateOnNewDocument", source=f"if (location.host) {stored}")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._commands)  # it ends without them
        os.close(self._answers)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def show(self, address: str, width: int, height: int) -> None:
        """Go to a page, and show so many pixels of it."""
        # Drawn with twice as many: TensorBoard makes pictures smaller by leaving pixels out.
        self._size = width, height
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=False)
        self._ask("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """What a JavaScript expression gives on the page; `all(document)` are the page's elements."""
        answer = self._ask("Runtime.evaluate", expression=f"{{ {ALL} {expression} }}", returnByValue=True)
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"Not true on the page after {PATIENCE} s: {expression}")
            time.sleep(0.1)

    def picture(self) -> Image.Image:
        """What is shown, once nothing moves any more."""
        end, before, now = time.monotonic() + PATIENCE, b"", self._screenshot()
        while now != before:
            if time.monotonic() > end:
                raise TimeoutError(f"The page still moves after {PATIENCE} s.")
            time.sleep(1)
            before, now = now, self._screenshot()
        return Image.open(io.BytesIO(now)).convert("RGB").resize(self._size, Image.Resampling.LANCZOS)

    def _screenshot(self) -> bytes:
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"])

    def _ask(self, method: str, **params: Any) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:  # events come in between
            while b"\0" not in self._heard:
                ready, _, _ = select.select([self._answers], [], [], PATIENCE)
                more = os.read(self._answers, 1 << 16) if ready else b""
                if not more:
                    raise TimeoutError(f"chromium does not answer {method}.")
                self._heard += more
            text, _, self._heard = self._heard.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]


if __name__ == "__main__":
    main()
