"""The three ways to start a program: plain Python, a forked worker, a fresh worker.

`muster` is the whole product: `muster run`. `Workers` is a real spawner whose agent is the test, so that
many programs can be forked from one import; each program is the file that was written last.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kit.command import SOURCE
from torchmuster.core import proc
from torchmuster.core.model.codec import decode, encode
from torchmuster.core.model.plan import Program, ScriptKind, StartMethod
from torchmuster.core.net.ipc import CallTaken, WorkerReport, pack, receive
from torchmuster.core.node.spawner import messages
from torchmuster.core.node.spawner.start import start_spawner

# The client is started without PYTHONPATH, which the job would inherit.
MUSTER = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from torchmuster.core.cli.main import main; main()"
LIMIT_S = 120.0
_PING_EVERY_S = 2.0  # a spawner kills its workers when it has heard nothing for 10 s

PLAIN, FORKED, FRESH = "plain", "forked", "fresh"
AUTO = "auto"
PYTHON = (sys.executable, "-S")  # without torch, so that a spawner starts at once
_STARTS = {FORKED: StartMethod.FORK, FRESH: StartMethod.FRESH, AUTO: StartMethod.AUTO}
_NOT_INHERITED = (
    *("PYTHON", "PET_", "TORCH", "MUSTER_", "CUDA_", "GLOO_", "RES_OPTIONS"),
    *("OMP_", "OPENBLAS_", "MKL_", "GOTO_"),
    *("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended and what it wrote; a negative code is a signal."""

    code: int
    stdout: str
    stderr: str

    def facts(self) -> dict[str, Any]:
        """Return the JSON object that the program printed as its last line."""
        assert self.code == 0, f"exit code {self.code}\n{self.stdout[-2000:]}\n{self.stderr}"
        return json.loads(self.stdout.splitlines()[-1])


def job_env(**more: str) -> dict[str, str]:
    """Return an environment in which nothing of the developer's changes what a program sees."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
    return {**inherited, "MUSTER_ON": "local", **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where programs run: a folder of their own, with runs beside it."""

    cwd: Path
    home: Path
    env: Mapping[str, str] = field(default_factory=dict)

    def write(self, name: str, text: str) -> str:
        """Write a program; return its name."""
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def plain(
        self,
        *words: str,
        python: Sequence[str] = (sys.executable,),
        stdin: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Outcome:
        """Run `python WORDS`."""
        return self._run([*python, *words], stdin, subprocess.PIPE, pass_fds)

    def muster(
        self,
        *words: str,
        options: Sequence[str] = ("--nproc-per-node", "1"),
        stdin: int | None = None,
        stdout: int = subprocess.PIPE,
        pass_fds: Sequence[int] = (),
    ) -> Outcome:
        """Run `muster run OPTIONS WORDS`."""
        argv = [sys.executable, "-c", MUSTER, "run", *options, *words]
        return self._run(argv, stdin, stdout, pass_fds)

    def muster_command(self, *words: str) -> Outcome:
        """Run `muster WORDS`."""
        return self._run([sys.executable, "-c", MUSTER, *words], None, subprocess.PIPE, ())

    def _run(
        self, argv: Sequence[str], stdin: int | None, stdout: int, pass_fds: Sequence[int]
    ) -> Outcome:
        with _input(stdin) as fd:
            done = subprocess.run(
                argv,
                cwd=self.cwd,
                env=job_env(MUSTER_HOME=str(self.home), **self.env),
                stdin=fd,
                stdout=stdout,
                stderr=subprocess.PIPE,
                pass_fds=pass_fds,
                timeout=LIMIT_S,
            )
        return Outcome(done.returncode, (done.stdout or b"").decode(), done.stderr.decode())

    def open_muster(self, *words: str, options: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start `muster run OPTIONS WORDS` with a pipe for each of its streams."""
        return subprocess.Popen(
            [sys.executable, "-c", MUSTER, "run", *options, *words],
            cwd=self.cwd,
            env=job_env(MUSTER_HOME=str(self.home), **self.env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this name, of all runs."""
        lines = [
            line
            for path in sorted((self.home / "runs").glob("*/events.jsonl"))
            for line in path.read_text().splitlines()
        ]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def log(self, attempt: int, rank: int, run: str = "*") -> str:
        """Return what a rank wrote in an attempt, from its log."""
        pattern = f"{run}/logs/*/*/attempt-{attempt}/rank-{rank}.log"
        (path,) = (self.home / "runs").glob(pattern)
        return path.read_text()


def make_place(folder: Path, **env: str) -> Place:
    """Return a place in a new folder, with variables for every program."""
    (folder / "work").mkdir()
    return Place(cwd=folder / "work", home=folder / "home", env=env)


def together(*calls: Any) -> list[Any]:
    """Return the results of several calls, two at a time."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


class Workers:
    """A real spawner, with the test in the place of its agent."""

    def __init__(
        self,
        place: Place,
        target: str,
        *args: str,
        way: str = FORKED,
        kind: ScriptKind = ScriptKind.FILE,
        python: Sequence[str] = PYTHON,
        preload: Sequence[str] = (),
    ) -> None:
        program = Program(
            kind=kind,
            target=target,
            args=args,
            python=tuple(python),
            cwd=str(place.cwd),
            start=_STARTS[way],
            preload=tuple(preload),
        )
        self.socket_path = str(place.home / "nobody-listens-here")
        self._child, self._control = start_spawner(program, job_env(**place.env), self.socket_path)
        self.pid = self._child.pid
        self.ready = self._hear(messages.InterpreterReady, messages.InterpreterRefused)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        if self._child.wait(5.0) is None:
            proc.kill_quietly(self.pid)
            self._child.wait(5.0)

    def run(self, stdin: int | None = None, **env: str) -> Outcome:
        """Start one worker and wait for its end."""
        return self.finish(self.start(stdin, **env))

    def start(self, stdin: int | None = None, **env: str) -> tuple[int, int]:
        """Start a worker; return the read ends of its stdout and stderr."""
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        environment = {"RANK": "0", "LOCAL_WORLD_SIZE": "1", **env}
        order = messages.StartWorker(rank=0, env=environment, unset=())
        with _input(stdin) as fd:
            socket.send_fds(self._control, [encode(order)], [fd, out_w, err_w])
        os.close(out_w)
        os.close(err_w)
        return out_r, err_r

    def finish(self, outputs: tuple[int, int]) -> Outcome:
        """Wait for the end of the worker that was started last."""
        stdout, stderr = self._read_all(outputs)
        return Outcome(
            os.waitstatus_to_exitcode(self._hear(messages.ChildEnded).status), stdout, stderr
        )

    def close_channel(self) -> None:
        """Go away without a word, as an agent does that was killed."""
        self._control.close()

    def signal(self, signum: signal.Signals) -> None:
        """Order a signal for all workers."""
        self._send(messages.SignalWorkerProcesses(signum=int(signum), if_caught=False))

    def _send(self, order: messages.SpawnerOrder) -> None:
        self._control.send(encode(order))

    def _hear(self, *kinds: type[messages.SpawnerEvent]) -> Any:
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            while True:
                self._wait(selector, f"the spawner does not say {kinds}")
                packet = self._control.recv(1 << 16)
                assert packet, f"the spawner ended: {self._child.wait(5.0)}"
                event = decode(packet, messages.SpawnerEvent)
                if isinstance(event, kinds):
                    return event

    def _read_all(self, fds: Sequence[int]) -> list[str]:
        texts = dict.fromkeys(fds, b"")
        with selectors.DefaultSelector() as selector:
            for fd in fds:
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map():
                for fd in self._wait(selector, "the worker neither writes nor ends"):
                    data = os.read(fd, 1 << 16)
                    texts[fd] += data
                    if not data:
                        selector.unregister(fd)
                        os.close(fd)
        return [texts[fd].decode() for fd in fds]

    def _wait(self, selector: selectors.BaseSelector, complaint: str) -> list[int]:
        """Return what can be read; be heard by the spawner meanwhile."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            ready = selector.select(_PING_EVERY_S)
            if ready:
                return [key.fd for key, _ in ready]
            self._send(messages.PingSpawner())
        raise AssertionError(f"{complaint} within {LIMIT_S:.0f} s")


@contextmanager
def _input(fd: int | None) -> Iterator[int]:
    """Give a descriptor for standard input, /dev/null if there is none, and close it."""
    given = os.open(os.devnull, os.O_RDONLY) if fd is None else fd
    try:
        yield given
    finally:
        os.close(given)


@contextmanager
def listening(workers: Workers) -> Iterator[socket.socket]:
    """Give the socket at which an agent hears what workers report."""
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(workers.socket_path)
        agent.listen()
        agent.settimeout(LIMIT_S)
        yield agent


def hear_report(agent: socket.socket) -> WorkerReport:
    """Return what the next worker to call says, and let it go on."""
    with agent.accept()[0] as worker:
        report = receive(worker, WorkerReport)
        worker.sendall(pack(CallTaken()))
    return report
