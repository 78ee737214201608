"""Several processes on this machine that train together, started and watched by torchrun's own machinery."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sanctuary_trainer.errors import RankError

Result = TypeVar("Result")


def run_in_processes(count: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in so many new processes, which find each other as those of `torchrun` do.

    Args:
        count: of processes.
        function: of a module; like its arguments and its result it is pickled.
        arguments: the same for all.

    Returns:
        What the function returned on rank 0.

    Raises:
        RankError: a process failed; its own text is in the message.
        KeyboardInterrupt: this process was told to end.
    """
    # Each process would use all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // count, 1)))
    logging.disable(logging.ERROR)  # in this process, which only waits: what the machinery reports, it also raises
    with TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # without it, it asks the network for this machine's name
            max_restarts=0,
        )
        try:
            results: dict[int, Result] = elastic_launch(config, _run_as_rank)(function, *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            message: Any = failure.message
            text = message["message"] if isinstance(message, dict) else message
            raise RankError(f"Process {rank} of {count} failed: {text}") from error
        except SignalException as error:
            raise KeyboardInterrupt from error
        finally:
            logging.disable(logging.NOTSET)
    return results[0]


def _run_as_rank(function: Callable[..., Result], *arguments: Any) -> Result:
    def leave(*_: object) -> None:
        # A terminal's Ctrl-C reaches all processes, and the one that waits tells it and passes it on once more.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(130)

    signal.signal(signal.SIGINT, leave)
    return function(*arguments)
