"""Run the commands of `muster exec` in the view of a running task.

Each command has its own session, separate from that of the task's command. It ends when its client
disconnects (SIGHUP, then SIGKILL) and when the task's command ends (SIGKILL). At most one window of
its output and one of its input are in flight.
"""

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from torchmuster.core import proc
from torchmuster.core.model.codec import to_arguments
from torchmuster.core.net import messages
from torchmuster.core.proc import HasStatus
from torchmuster.errors import MusterError
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.node.exec_launch import EntryOrder

HANGUP_GRACE_S = 2.0
KILLED = 128 + signal.SIGKILL
_REAP_S = 0.01
_MOST_PAUSE_S = 0.05
_QUIET_S = 0.25  # a stream silent so long after the end is held by a leftover process
_BEGIN_LIMIT_S = 30.0
_DEATH_S = 0.1
_END_OF_INPUT = b"\x04"  # Ctrl-D: how a terminal gets the end of input
_MAX_ROWS = 0xFFFF

Send = Callable[[messages.Message], None]


class ExecTarget(Protocol):
    """The process to enter: a task's command or a worker."""

    @property
    def pid(self) -> int:
        """Return its process id."""

    @property
    def worker_ticks(self) -> int | None:
        """Return a worker's start time in clock ticks, to recognize it; None for a task."""

    @property
    def environment(self) -> Mapping[str, str] | None:
        """Return the environment for a command; None for the target's initial one."""

    def has_begun(self) -> bool:
        """Return whether it has entered its view."""

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""


Launch = Callable[[part_messages.ExecStart, ExecTarget, tuple[int, int, int]], HasStatus]


def launch_in_view(
    order: part_messages.ExecStart, target: ExecTarget, streams: tuple[int, int, int]
) -> HasStatus:
    """Start a command in the view of its target.

    Raises:
        MusterError: The command can't be started.
    """
    stdin, stdout, stderr = streams
    try:
        return proc.start(
            entry_argv(order, target.pid, target.worker_ticks),
            env=target.environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            takes_terminal=order.tty,
        )
    except ValueError as error:  # a zero byte in an argument
        raise MusterError("the command can't be started", why=str(error)) from error


class Execs:
    """The `muster exec` commands of one task.

    Args:
        task: The task's name, for messages.
        send: Sends a message to the head.
        launch: Starts a command.
        grace_s: How long a command may take to end after its client has disconnected.
    """

    def __init__(
        self,
        task: str,
        send: Send,
        launch: Launch = launch_in_view,
        grace_s: float = HANGUP_GRACE_S,
    ) -> None:
        self._task = task
        self._send = send
        self._launch = launch
        self._grace_s = grace_s
        self._execs: dict[str, Exec] = {}
        self._sessions: set[int] = set()

    @property
    def pids(self) -> set[int]:
        """Return the process ids of the commands that run."""
        return {one.pid for one in self._execs.values() if one.pid}

    def take(self, message: part_messages.FromExecClient, target: ExecTarget | None) -> None:
        """Handle a client's message; `target` is the task's command, None while there is none."""
        if isinstance(message, part_messages.ExecStart):
            self._start(message, target)
            return
        one = self._execs.get(message.exec_id)
        if one is not None:
            one.take(message)

    def _start(self, start: part_messages.ExecStart, target: ExecTarget | None) -> None:
        what: str | None = None
        if target is None:
            what = f"the task {self._task} runs no command now"
        elif len(self._execs) >= part_messages.MAX_EXECS:
            what = f"the task {self._task} has {part_messages.MAX_EXECS} commands of `muster exec`"
        elif start.exec_id in self._execs:
            what = "this command has been started already"
        if what is not None or target is None:
            self._send(part_messages.ExecRefused(exec_id=start.exec_id, what=what or ""))
            return
        launch = functools.partial(self._launch, start, target)
        one = Exec(start, self._send, launch, self._grace_s)
        self._execs[start.exec_id] = one
        one.running = asyncio.create_task(self._conduct(one, target))
        one.running.add_done_callback(lambda _: self._forget(one))

    async def _conduct(self, one: "Exec", target: ExecTarget) -> None:
        last = await one.run(_wait_for_begin(target), self._sessions.add)
        if self._execs.pop(one.exec_id, None) is not None and not one.is_left:
            self._send(last)

    def _forget(self, one: "Exec") -> None:
        """Remove a command; nothing else removes one whose client left before it started."""
        if self._execs.get(one.exec_id) is one:
            del self._execs[one.exec_id]

    def end_all(self, why: str) -> None:
        """Kill all commands and what earlier ones have left; send `why` to their clients."""
        for one in self._execs.values():
            if one.running is not None:
                one.running.cancel()
            one.kill()
            one.close()
            self._send(part_messages.ExecEnded(exec_id=one.exec_id, code=KILLED, why=why))
        for one in self._execs.values():
            one.reap()
        self._execs.clear()
        sessions, self._sessions = self._sessions, set()
        kill_sessions(sessions)


async def _wait_for_begin(target: ExecTarget) -> None:
    """Wait until the task's command has its view: before that, there is nothing to enter.

    Raises:
        MusterError: The task's command ended, or had no view within the time limit.
    """
    deadline = time.monotonic() + _BEGIN_LIMIT_S
    while not target.has_begun():
        if target.poll() is not None or time.monotonic() > deadline:
            raise MusterError("the task's command has not begun")
        await asyncio.sleep(_REAP_S)


class Exec:
    """One command: its process, its streams or terminal, and its input and output windows.

    Args:
        start: The client's order.
        send: Sends a message to its client.
        launch: Starts it with the descriptors of its standard streams.
        grace_s: How long it may take to end after its client has disconnected.
        gets_hangup: Whether it then gets SIGHUP; otherwise only its streams are closed.
        most_bytes: Largest window; small where many commands share a connection.
        patience_s: How long its last output waits for a client that reads nothing.

    Attributes:
        heard_at: When output was last read from it or acknowledged by its client (monotonic).
    """

    def __init__(
        self,
        start: part_messages.ExecStart,
        send: Send,
        launch: Callable[[tuple[int, int, int]], HasStatus],
        grace_s: float,
        *,
        gets_hangup: bool = True,
        most_bytes: int = part_messages.EXEC_WINDOW_BYTES,
        patience_s: float = float("inf"),
    ) -> None:
        self.exec_id = start.exec_id
        self._launch, self._grace_s, self._gets_hangup = launch, grace_s, gets_hangup
        self._patience_s = patience_s
        self._window_bytes = min(max(1, start.window_bytes), most_bytes)
        self.is_left = False
        self.running: asyncio.Task[None] | None = None
        self._order = start
        self._send = send
        self._child: HasStatus | None = None
        self._outputs: dict[int, int] = {}  # descriptor -> stream
        self._input: int | None = None
        self._waiting: deque[bytes] = deque()
        self._input_ends = False
        self._unacknowledged_bytes = 0
        self.heard_at = 0.0
        self._kill_at: float | None = None

    @property
    def pid(self) -> int:
        """Return the process id, which is also that of its session; 0 before the start."""
        return self._child.pid if self._child is not None else 0

    # The process.

    async def run(
        self, begun: Awaitable[None] | None, note: Callable[[int], object]
    ) -> messages.Message:
        """Await `begun`, start the command, call `note(pid)`; return the message of its end."""
        try:
            if begun is not None:
                await begun
            self.start()
            note(self.pid)
            return part_messages.ExecEnded(exec_id=self.exec_id, code=await self.wait())
        except MusterError as error:
            what, why, fix = error.what, error.why, error.fix
        except OSError as error:  # out of descriptors or terminals
            what, why, fix = "the command can't be started", error.strerror, None
        finally:
            self.close()
        return part_messages.ExecRefused(exec_id=self.exec_id, what=what, why=why, fix=fix)

    def start(self) -> None:
        """Start the command.

        Raises:
            MusterError: The command can't be started.
        """
        theirs = self._open_terminal() if self._order.tty else self._open_pipes()
        try:
            self._child = self._launch(theirs)
        finally:
            for fd in set(theirs):
                os.close(fd)
        self.heard_at = time.monotonic()
        self._listen()
        self._write_waiting()

    def _open_pipes(self) -> tuple[int, int, int]:
        stdin, self._input = os.pipe2(os.O_CLOEXEC)
        stdout_end, stdout = os.pipe2(os.O_CLOEXEC)
        stderr_end, stderr = os.pipe2(os.O_CLOEXEC)
        self._outputs = {stdout_end: 1, stderr_end: 2}
        for fd in (self._input, stdout_end, stderr_end):
            os.set_blocking(fd, False)
        return stdin, stdout, stderr

    def _open_terminal(self) -> tuple[int, int, int]:
        ours, theirs = os.openpty()
        os.set_blocking(ours, False)
        self._input = ours
        self._outputs = {ours: 1}
        _resize(ours, self._order.rows, self._order.columns)
        return theirs, theirs, theirs

    async def wait(self) -> int:
        """Wait until it has ended and its output is read; return the exit code as a shell does."""
        child = self._child
        if child is None:
            raise ValueError("not started")
        pause_s = _REAP_S
        while (status := child.poll()) is None:
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self.kill()
                self._kill_at = time.monotonic() + 1.0
            await asyncio.sleep(pause_s)
            pause_s = min(_MOST_PAUSE_S, pause_s * 1.05)
        if self.is_left:
            kill_sessions({child.pid})
        ended_at = time.monotonic()
        while self._outputs and not self._is_quiet(ended_at):
            await asyncio.sleep(_REAP_S)
        return 128 - status if status < 0 else status

    def _is_quiet(self, ended_at: float) -> bool:
        if self._quiet_s(ended_at) <= 0:
            return False
        for fd in tuple(self._outputs):  # a busy event loop may not have read what is there
            self._read(fd)
        return self._quiet_s(ended_at) > 0

    def _quiet_s(self, ended_at: float) -> float:
        """Return the seconds since output was last heard, beyond the limit."""
        is_full = self._unacknowledged_bytes >= self._window_bytes
        limit_s = self._patience_s if is_full else _QUIET_S
        return time.monotonic() - max(self.heard_at, ended_at) - limit_s

    def kill(self) -> None:
        """Send SIGKILL to its session and to all its descendants."""
        if not self.pid:  # a session has yet to fork it, and its streams have ended
            return
        below = proc.descendants(self.pid)
        proc.kill_session(self.pid)
        for pid in below:
            proc.kill_quietly(pid)

    def reap(self) -> None:
        """Reap the killed process, which takes about a millisecond."""
        if self._child is not None:
            self._child.wait(_DEATH_S)

    def close(self) -> None:
        """Close our ends of its streams, which hangs up a terminal."""
        loop = asyncio.get_running_loop()
        fds = set(self._outputs) | ({self._input} if self._input is not None else set())
        for fd in fds:
            loop.remove_reader(fd)
            loop.remove_writer(fd)
            os.close(fd)
        self._outputs.clear()
        self._input = None

    # Messages of the client.

    def take(self, message: part_messages.FromExecClient) -> None:
        """Handle a message of the client."""
        match message:
            case part_messages.ExecInput():
                self._take_input(message)
            case part_messages.ExecAcknowledged(size_bytes=size_bytes):
                self._unacknowledged_bytes = max(0, self._unacknowledged_bytes - max(0, size_bytes))
                self.heard_at = time.monotonic()
                self._listen()
            case part_messages.ExecResize(rows=rows, columns=columns):
                if self._order.tty and self._input is not None:
                    _resize(self._input, rows, columns)
            case part_messages.ExecSignal(signum=signum):
                if self._child is not None and 0 < signum < signal.NSIG:
                    _signal_group(self.pid, signum)
            case part_messages.ExecLeave():
                self._leave()

    def _leave(self) -> None:
        """Begin to end the command: its client has disconnected."""
        self.is_left = True
        self._kill_at = time.monotonic() + self._grace_s
        self.close()
        if self._child is None:
            if self.running is not None:
                self.running.cancel()
            return
        if self._gets_hangup:
            _signal_group(self.pid, signal.SIGHUP)
            _signal_group(self.pid, signal.SIGCONT)  # a stopped process would not handle SIGHUP

    # Input.

    def _take_input(self, message: part_messages.ExecInput) -> None:
        data = message.data
        if sum(map(len, self._waiting)) + len(data) > self._window_bytes:
            self._leave()  # no client of ours sends more than its window
            return
        if data:
            self._waiting.append(data)
        if message.end and not self._input_ends:
            self._input_ends = True
            if self._order.tty:
                self._waiting.append(_END_OF_INPUT)
        if self._child is not None:
            self._write_waiting()

    def _write_waiting(self) -> None:
        fd, loop = self._input, asyncio.get_running_loop()
        if fd is None:  # nobody reads any more: count the input as consumed
            self._taken(sum(map(len, self._waiting)))
            self._waiting.clear()
            return
        try:
            while self._waiting:
                num_bytes = os.write(fd, self._waiting[0])
                self._waiting[0] = self._waiting[0][num_bytes:]
                if not self._waiting[0]:
                    self._waiting.popleft()
                self._taken(num_bytes)
        except BlockingIOError:
            loop.add_writer(fd, self._write_waiting)
            return
        except OSError:
            self._close_input()
            self._write_waiting()
            return
        loop.remove_writer(fd)
        if self._input_ends and not self._order.tty:
            self._close_input()

    def _taken(self, num_bytes: int) -> None:
        if num_bytes:
            self._send(part_messages.ExecAcknowledged(exec_id=self.exec_id, size_bytes=num_bytes))

    def _close_input(self) -> None:
        fd, self._input = self._input, None
        if fd is None:
            return
        asyncio.get_running_loop().remove_writer(fd)
        if fd not in self._outputs:  # a terminal is both
            os.close(fd)

    # Output.

    def _listen(self) -> None:
        """Read while the window is open."""
        loop = asyncio.get_running_loop()
        for fd in self._outputs:
            if self._unacknowledged_bytes < self._window_bytes:
                loop.add_reader(fd, self._read, fd)
            else:
                loop.remove_reader(fd)

    def _read(self, fd: int) -> None:
        room = self._window_bytes - self._unacknowledged_bytes
        if room <= 0:
            return
        try:
            data = os.read(fd, min(room, part_messages.EXEC_CHUNK_BYTES))
        except BlockingIOError:
            return
        except OSError:  # how a terminal reports its end
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(fd)
            self._outputs.pop(fd)
            if fd == self._input:
                self._close_input()
            else:
                os.close(fd)
            return
        self.heard_at = time.monotonic()
        self._unacknowledged_bytes += len(data)
        stream = self._outputs[fd]
        self._send(part_messages.ExecOutput(exec_id=self.exec_id, stream=stream, data=data))
        self._listen()


def entry_argv(
    start: part_messages.ExecStart, pid: int, worker_ticks: int | None = None
) -> list[str]:
    """Return the command line of the program that enters the view and becomes the command."""
    order = EntryOrder(
        pid=pid,
        worker_ticks=worker_ticks,
        tty=start.tty,
        term=start.term[:64] if start.tty else "",
        command=tuple(start.argv),
    )
    return proc.node_program("exec", *to_arguments(order))


def kill_sessions(leaders: set[int]) -> None:
    """Kill our own descendants in these sessions: session numbers are reused."""
    for pid in proc.descendants(os.getpid()) if leaders else ():
        facts = proc.read_process(pid)
        if facts is not None and proc.leader_of(facts, leaders) is not None:
            proc.kill_quietly(pid)


def _resize(fd: int, rows: int, columns: int) -> None:
    import termios

    size = (max(0, min(rows, _MAX_ROWS)), max(0, min(columns, _MAX_ROWS)))
    with contextlib.suppress(OSError, termios.error):
        termios.tcsetwinsize(fd, size)


def _signal_group(leader: int, signum: int) -> None:
    if not leader:  # a session has yet to fork it
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signum)
