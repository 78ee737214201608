"""Calls functions on several ranks, and pays for the imports once.

A start of torch, accelerate and their friends costs many seconds, so one process (the zygote) is started per pytest
run; it imports them, starts no thread, joins no process group, and for every call forks the ranks. Each call so gets
fresh processes within 0.1 s, as from a launcher: no state of an earlier test, and a hang costs only its own ranks.

    test             two_ranks(function, *args)                     function is sent by name, arguments are pickled
      zygote           import the function's module, fork the store's host and the ranks, watch them
        store          where the ranks meet: as torchrun does it, not in rank 0, whose end would hide its peers' errors
        rank             set the launcher's environment, call, write the outcome to a file
        rank             ... wait until all ranks have one: a rank that leaves early would reset its peers' connections
      zygote           past the time limit: stacks of all threads into the rank's output, then kill the whole session
    test             values, or a failure that shows every rank's error and output

The harness sets the environment and nothing else: the process group is the product's to make.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent.parent
START_LIMIT_SECONDS = 110  # under pytest's own limit, so that the message is ours
DUMP_SECONDS = 0.5
POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Outcome:
    """What came of one call on one rank."""

    value: Any
    """What the function returned; None where it failed."""
    error: str | None
    """The traceback's text, or what became of the process; None where it returned."""
    output: str
    """What the rank and its children wrote to stdout and stderr, in order; the stacks of all threads after a hang."""


class Values(list[Any]):
    """The returned values by rank; `outputs` holds what each rank wrote to stdout and stderr."""

    outputs: list[str]


class Ranks:
    """Calls functions on `world_size` fresh processes; with one, no launcher's variable is set.

    A function is sent by its name, so it stands at the top level of its module; arguments and results are pickled.
    It sees the test's environment and current folder, one torch thread, and the random generators of a new process.
    """

    def __init__(self, zygote: "Zygote", world_size: int) -> None:
        self.zygote, self.world_size = zygote, world_size

    def __call__(self, function: Callable[..., Any], /, *args: Any, timeout: float = 60.0, **kwargs: Any) -> Values:
        """Returns the values by rank; fails the test with every rank's error and output if a rank failed or hung.

        `timeout` in seconds is the limit of the whole call.
        """
        __tracebackhide__ = True
        outcomes = self.outcomes(function, *args, timeout=timeout, **kwargs)
        if any(outcome.error for outcome in outcomes):
            name = f"{function.__qualname__} on {self.world_size} rank(s)"
            raise AssertionError(f"{name} failed\n\n" + "\n".join(map(_describe, range(self.world_size), outcomes)))
        values = Values(outcome.value for outcome in outcomes)
        values.outputs = [outcome.output for outcome in outcomes]
        return values

    def outcomes(
        self, function: Callable[..., Any], /, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Outcome]:
        """Returns what came of the call on each rank, for tests that expect a failure."""
        return self.zygote.call(self.world_size, function, args, kwargs, timeout)


def _describe(rank: int, outcome: Outcome) -> str:
    output = outcome.output.strip() or "(nothing)"
    return f"--- rank {rank}: {outcome.error or 'returned'}\n--- rank {rank} wrote:\n{output}\n"


@dataclass(frozen=True)
class _Call:
    """One call as the zygote gets it."""

    world_size: int
    module: str
    name: str
    arguments: bytes
    """Pickled (args, kwargs): read in the ranks, where importing what they name belongs."""
    timeout: float
    environment: dict[str, str]
    current_folder: str
    folder: Path
    """Rank r writes its output to `r.output` and its outcome to `r.outcome`."""


class Zygote:
    """The process that imports once and forks the ranks of every call; started by the first call."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def call(
        self, world_size: int, function: Callable[..., Any], args: Any, kwargs: Any, timeout: float
    ) -> list[Outcome]:
        if "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} cannot be found by name: move it to the top of its module")
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            call = _Call(
                world_size=world_size,
                module=function.__module__,
                name=function.__qualname__,
                arguments=pickle.dumps((args, kwargs)),
                timeout=timeout,
                environment=dict(os.environ),
                current_folder=os.getcwd(),
                folder=Path(folder),
            )
            self._start()
            try:
                self.connection.send(call)
                failures = self._receive(timeout + 30.0)
            except BaseException:
                self.stop()  # also pytest's own timeout and Ctrl-C: what is half done must not answer the next call
                raise
            return [_read_outcome(call.folder, rank, failure) for rank, failure in enumerate(failures)]

    def stop(self) -> None:
        if self.process is None:
            return
        self.connection.close()  # the zygote kills its ranks and leaves when its connection ends
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self.process = None

    def _start(self) -> None:
        if self.process is not None:
            return
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C is for pytest, which then ends this one and its ranks in order
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        try:
            self._receive(START_LIMIT_SECONDS)
        except BaseException:
            self.stop()
            raise

    def _receive(self, seconds: float) -> Any:
        try:
            if self.connection.poll(seconds):
                return self.connection.recv()
            problem = f"did not answer within {seconds:g} s"
        except (EOFError, ConnectionError):
            problem = "died"
        self.log.seek(0)
        raise RuntimeError(f"the process that forks the ranks {problem}; it wrote:\n{self.log.read().decode()}")


def _read_outcome(folder: Path, rank: int, failure: str | None) -> Outcome:
    output = (folder / f"{rank}.output").read_text(errors="replace")
    if failure:
        return Outcome(None, failure, output)
    outcome: Outcome = pickle.loads((folder / f"{rank}.outcome").read_bytes())
    return replace(outcome, output=output)


# In the zygote.


def _serve(connection: Connection) -> None:
    """Forks the ranks of each call until the connection ends."""
    _import_what_ranks_need()
    connection.send("ready")
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        with contextlib.suppress(Exception):  # reported by the rank, which imports it again
            importlib.import_module(call.module)
        gc.freeze()  # a rank's collector would walk, and so copy, all that was imported: a tenth of a second each time
        connection.send(_run_ranks(call, connection))


def _import_what_ranks_need() -> None:
    """Imports what a run on several ranks imports, so that a forked rank finds it done.

    Nothing here may start a thread or run a backward pass: a forked child would wait for threads that it does not have.
    """
    import accelerate
    import numpy
    import torch._dynamo
    import torch.distributed.algorithms.join
    import torch.nn.parallel
    import torch.utils.data
    import torch.utils.tensorboard

    import sanctuary_trainer

    torch.set_num_threads(1)
    for name in sanctuary_trainer.__all__:
        with contextlib.suppress(ImportError):
            getattr(sanctuary_trainer, name)
    del accelerate, numpy


def _run_ranks(call: _Call, connection: Connection) -> list[str | None]:
    """Forks the ranks and waits for them; returns by rank what became of a process that left no outcome, else None."""
    gate, gatekeeper = os.pipe()

    def fork(run: Callable[[], NoReturn]) -> int:
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.close(gatekeeper)
            run()
        return pid

    environment = dict(call.environment)
    store = None
    if call.world_size > 1:
        ear, mouth = os.pipe()
        store = fork(partial(_host_store, gate, mouth))
        os.close(mouth)
        environment |= _launcher_environment(call.world_size, port=os.read(ear, 16).decode())
        os.close(ear)
    pids = [fork(partial(_run_rank, call, rank, environment, gate)) for rank in range(call.world_size)]
    os.close(gate)

    started = time.monotonic()
    failures: list[str | None] = [None] * call.world_size
    waiting = set(range(call.world_size))
    dead = set()
    while waiting and time.monotonic() - started < call.timeout and not _ended(connection):
        for rank in sorted(waiting):
            if (call.folder / f"{rank}.outcome").exists():
                waiting.discard(rank)
                continue
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                waiting.discard(rank)
                dead.add(rank)
                if not (call.folder / f"{rank}.outcome").exists():  # it may have been written since
                    failures[rank] = _what_became_of(status)
        time.sleep(POLL_SECONDS)

    for rank in waiting:
        failures[rank] = f"hung: not finished after {call.timeout:g} s; the stacks of its threads are in its output"
        os.kill(pids[rank], signal.SIGUSR2)
    if waiting:
        time.sleep(DUMP_SECONDS)
    os.close(gatekeeper)  # lets the finished ranks and the store's host leave
    for rank in set(range(call.world_size)) - dead:
        _bury(pids[rank], at_once=rank in waiting)
    if store is not None:
        _bury(store, at_once=True)
    return failures


def _launcher_environment(world_size: int, port: str) -> dict[str, str]:
    """What torchrun would set, but for the rank; and that there is no accelerator, which accelerate must be told."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "ACCELERATE_USE_CPU": "true",
    }


def _ended(connection: Connection) -> bool:
    """Whether the test's side is gone; it sends nothing while a call runs, so that readable means closed."""
    return connection.poll()


def _what_became_of(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit status {code} and no outcome"


def _bury(pid: int, at_once: bool) -> None:
    """Waits for a rank to leave, 5 seconds at most; then kills what is left of its session (loader workers)."""
    limit = time.monotonic() + (0.0 if at_once else 5.0)
    while time.monotonic() < limit:
        if os.waitpid(pid, os.WNOHANG)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            return
        time.sleep(POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# In the store's host.


def _host_store(gate: int, mouth: int) -> NoReturn:
    """Hosts the store on a free port, says which, and leaves when the gate closes."""
    try:
        os.setsid()
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(mouth, str(store.port).encode())
        os.read(gate, 1)
    finally:
        os._exit(0)


# In a rank.


def _run_rank(call: _Call, rank: int, environment: dict[str, str], gate: int) -> NoReturn:
    """Calls the function and writes the outcome; never returns, so that no line of the zygote runs twice."""
    try:
        os.setsid()  # a session of its own, so that its children can be killed with it
        _enter(call, rank, environment)
        try:
            args, kwargs = pickle.loads(call.arguments)
            function = importlib.import_module(call.module)
            for name in call.name.split("."):
                function = getattr(function, name)
            outcome = Outcome(function(*args, **kwargs), None, "")  # type: ignore[operator]
            data = pickle.dumps(outcome)
        except BaseException:  # SystemExit and KeyboardInterrupt are outcomes too
            outcome = Outcome(None, traceback.format_exc(), "")
            data = pickle.dumps(outcome)
        sys.stdout.flush()
        sys.stderr.flush()
        unfinished = call.folder / f"{rank}.unfinished"
        unfinished.write_bytes(data)
        unfinished.rename(call.folder / f"{rank}.outcome")
        if outcome.error is None:
            os.read(gate, 1)  # ends when the zygote closes it; a rank that failed leaves at once, as it would outside
    finally:
        os._exit(0)


def _enter(call: _Call, rank: int, environment: dict[str, str]) -> None:
    """Makes the forked process look like one that a launcher has just started."""
    output = os.open(call.folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    os.environ.clear()
    os.environ.update(environment)
    if call.world_size > 1:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.chdir(call.current_folder)
    # torch replaces its thread pool at the first use after a fork, without a lock: two of autograd's threads that start
    # at once abort with "Invalid thread pool". This makes the first use while there is one thread.
    sys.modules["torch"].set_num_threads(1)
    # Every new process draws differently from these two; torch's generator starts alike everywhere, and is left so.
    random.seed()
    sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    # Under its real name, so that the classes sent through the connection are the ones the test knows.
    from tests.distributed import workers

    workers._serve(Connection(int(sys.argv[1])))
