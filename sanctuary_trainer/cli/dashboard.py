"""`sanctuary dashboard`: TensorBoard for this machine's eyes only."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from pathlib import Path

from sanctuary_trainer.errors import RunFolderError, SettingsError


def show(folder: Path, port: int | None = None) -> None:
    """Serve TensorBoard on localhost until the process is interrupted.

    Args:
        folder: a run's folder, or one that holds runs.
        port: 0 for any free one; None for the first free one from TensorBoard's own on, 6006.

    Raises:
        RunFolderError: there is no such folder, or no run in it.
        SettingsError: the port is taken.
    """
    if not folder.is_dir():
        found = "is no folder" if folder.exists() else "does not exist"
        raise RunFolderError(f"{folder} {found}. Name the folder of a run, or make one: sanctuary demo")
    if next(folder.rglob("events.out.tfevents.*"), None) is None:
        raise RunFolderError(f"{folder} holds no run: there is no TensorBoard file in it or below.")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)

    from tensorboard import program

    board = program.TensorBoard()
    chosen = [] if port is None else ["--port", str(port)]
    board.configure(argv=["tensorboard", "--logdir", str(folder), "--host", "localhost", *chosen])
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # advice about options that it was not given
            address = board.launch()
    except program.TensorBoardServerException as error:
        raise SettingsError(f"{error.msg}. Choose another --port, or none.") from error
    print(f"{folder} is shown at {address} (Ctrl-C ends it)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
