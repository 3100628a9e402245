"""The client's side of what runs inside a run: `muster exec`, `muster stacks`, and debuggers.

Each calls the head, whose addresses and key are in the run directory; the agents do the work, so no
ssh to the nodes is needed, and it works on every engine. Two threads do what may block, reading
standard input and writing the output; the event loop between them never blocks. Both directions
respect the window of `net.messages`: what is not read here is not sent there.

The run's record says which rank waits for a debugger, and where. An editor connects to a loopback
port of this machine, which accepts only this user's connections; pdb gets the terminal.
"""

import asyncio
import contextlib
import json
import os
import queue
import secrets
import select
import signal
import socket
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torchmuster.core import proc
from torchmuster.core.files.layout import Kind, RunDir, short_id
from torchmuster.core.model import contract
from torchmuster.core.model.events import DebuggerWaitsEvent
from torchmuster.core.model.text import did_you_mean
from torchmuster.core.net import messages
from torchmuster.core.net.channel import Channel, ChannelClosedError
from torchmuster.core.owner.record import Follow
from torchmuster.errors import ChannelError, HeadLostError, MusterError, NotFoundError, UsageError
from torchmuster.launcher.head.hang_monitor import shown, standing_of
from torchmuster.launcher.head.hang_watch import Seen, tell
from torchmuster.launcher.model.events import WorkerProcessEvent
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.net.interfaces import is_own_connection
from torchmuster.launcher.node.stacks import take_stacks
from torchmuster.launcher.views import find
from torchmuster.launcher.views.elsewhere import is_elsewhere
from torchmuster.launcher.views.head_call import call_head
from torchmuster.launcher.views.run_view import RunView

# The threads: they read standard input and write the output.

_LOOK_EVERY_MS = 200

# task, stream (1 or 2), data; may block
Write = Callable[[str, int, bytes], None]


class OutputThread:
    """Writes pieces in order. The windows of the commands limit the queue.

    Args:
        write: Writes a piece; may block.
        taken: Called for each piece that was written.
        broken: Called once when writing fails: with the reason, or None if nobody reads.
    """

    def __init__(
        self,
        write: Write,
        taken: Callable[[str, int], None],
        broken: Callable[[str | None], None],
    ) -> None:
        self._write = write
        self._taken = taken
        self._broken = broken
        self._queue: queue.SimpleQueue[tuple[str, str, int, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="exec-output", daemon=True)
        self._is_broken = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, exec_id: str, task: str, stream: int, data: bytes) -> None:
        """Queue a piece of output."""
        self._queue.put((exec_id, task, stream, data))

    async def finish(self, is_left: Callable[[], bool]) -> None:
        """Wait until everything is written, or the user leaves: a reader may never read."""
        self._queue.put(None)
        while self._thread.is_alive() and not self._is_broken and not is_left():
            await asyncio.sleep(0.005)

    def _work(self) -> None:
        while (piece := self._queue.get()) is not None:
            exec_id, task, stream, data = piece
            try:
                self._write(task, stream, data)
            except BrokenPipeError:
                self._fail(None)
                return
            except OSError as error:
                self._fail(f"the output can't be written: {error.strerror}")
                return
            self._taken(exec_id, len(data))

    def _fail(self, why: str | None) -> None:
        self._is_broken = True
        self._broken(why)


class InputThread:
    """Reads standard input, as much as the command has room for.

    The thread is a daemon, because it may be waiting for a key at the end.
    """

    def __init__(self, fd: int | None, typed: Callable[..., None]) -> None:
        self._fd = fd
        self._typed = typed
        self._room_bytes = part_messages.EXEC_WINDOW_BYTES
        self._changed = threading.Condition()
        self._is_over = False

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._work, name="exec-input", daemon=True).start()

    def taken(self, num_bytes: int) -> None:
        """Record that the command has consumed this many bytes."""
        with self._changed:
            self._room_bytes += num_bytes
            self._changed.notify()

    def stop(self) -> None:
        """Stop reading: later input is meant for other programs."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._room_bytes > 0 or self._is_over)
                room_bytes = min(self._room_bytes, part_messages.EXEC_CHUNK_BYTES)
            if self._is_over:
                return
            data = self._read(room_bytes)
            with self._changed:
                self._room_bytes -= len(data)
            self._typed(data, end=not data)
            if not data:
                return

    def _read(self, num_bytes: int) -> bytes:
        try:
            fd = self._fd if self._fd is not None else 0
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            while True:
                poll.poll(_LOOK_EVERY_MS)
                with self._changed:  # so that nothing is read after `stop`
                    if self._is_over:
                        return b""
                    if poll.poll(0):
                        return os.read(fd, num_bytes)
        except OSError:  # closed by the shell (`<&-`), or the terminal is gone
            return b""


# The user's terminal during a remote session: every key is passed on, and every exit restores the
# terminal.


DEFAULT_SIZE = (24, 80)


class RawTerminal:
    """Context manager that puts a terminal into raw mode; does nothing without a terminal.

    Args:
        fd: The terminal; None, or a file that is not a terminal, is left alone.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd if fd is not None and os.isatty(fd) else None
        self._before: list[Any] | None = None

    @property
    def is_raw(self) -> bool:
        """Whether there is a terminal in raw mode."""
        return self._before is not None

    def __enter__(self) -> Self:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            self.again()
        return self

    def __exit__(self, *error: object) -> None:
        before, self._before = self._before, None
        if self._fd is not None and before is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._fd, termios.TCSADRAIN, before)

    def again(self) -> None:
        """Set raw mode again: the shell resets it when the process is stopped."""
        if self._fd is not None:
            tty.setraw(self._fd, termios.TCSADRAIN)

    def size(self) -> tuple[int, int]:
        """Return (rows, columns); 24 x 80 without a terminal."""
        if self._fd is None:
            return DEFAULT_SIZE
        try:
            columns, rows = os.get_terminal_size(self._fd)
        except OSError:
            return DEFAULT_SIZE
        return (rows, columns) if rows and columns else DEFAULT_SIZE


TIMED_OUT = 124
BROKEN_PIPE = 128 + signal.SIGPIPE
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecOrder:
    """What to run.

    Attributes:
        argv: The command; empty for the task's shell.
        tty: Whether it gets a terminal.
        input_fd: Its standard input; None for none.
        timeout_s: The time limit, in seconds; None for no limit.
        debugger: Connect to a rank that waits for its debugger, instead of running a command.
    """

    argv: tuple[str, ...]
    tty: bool = False
    input_fd: int | None = 0
    timeout_s: float | None = None
    debugger: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How the commands ended.

    Attributes:
        codes: Exit code per task, as a shell shows it.
        notes: Messages to the user: which commands were ended, and why.
    """

    codes: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The highest exit code."""
        return max(self.codes.values(), default=0)


def choose_task(view: RunView, name: str) -> Any:
    """Return the running task of this name.

    Raises:
        NotFoundError: There is no such task.
        UsageError: The task does not run.
    """
    tasks = {task.name: task for group in view.groups_to_enter().values() for task in group}
    if name not in tasks:
        raise _no_such("task", name, list(tasks), view)
    _check_running(view, tasks[name])
    return tasks[name]


def choose_group(view: RunView, name: str) -> list[Any]:
    """Return the tasks of a group, all running.

    Raises:
        NotFoundError: There is no such group.
        UsageError: One of its tasks does not run.
    """
    groups = view.groups_to_enter()
    if name not in groups:
        raise _no_such("group", name, list(groups), view)
    for task in groups[name]:
        _check_running(view, task)
    return list(groups[name])


def _no_such(kind: str, name: str, names: Sequence[str], view: RunView) -> NotFoundError:
    fix = did_you_mean(name, names, f"its {kind}s: {', '.join(names[:12])}")
    return NotFoundError(f"the run {view.run_id} has no {kind} `{name}`", fix=fix)


def _check_running(view: RunView, task: Any) -> None:
    if find.any_result(view.run_dir) is not None or not find.owner_lives(view.run_dir):
        raise UsageError(
            f"the run {view.run_id} has ended: it is {view.state.value}",
            where=f"task {task.name}: {task.state.value}",
            fix=f"muster logs {short_id(view.run_id)} {task.name}",
        )
    in_pods = is_elsewhere(view.run_dir.group(task.group))
    if not in_pods and not find.owner_is_here(view.run_dir):
        raise find.owner_is_on(view, "ssh -t", f"exec {short_id(view.run_id)} {task.name}")
    if not task.state.is_running:
        word = "does not run any more" if task.state.is_final else "does not run yet"
        fix = "logs" if task.state.is_final else "status"
        raise UsageError(
            f"the task {task.name} {word}: it is {task.state.value}",
            why=task.why,
            fix=f"muster {fix} {view.run_id}",
        )


async def execute(
    view: RunView, tasks: Sequence[Any], order: ExecOrder, write: Write
) -> ExecResult:
    """Run a command in tasks of one group, all at once, to its end.

    Raises:
        ChannelError: The head of the group can't be reached.
        HeadLostError: The connection to the head was lost.
        UsageError: The command was not started in a single task; a group's refusals are notes.
    """
    channel = await call_head(view, tasks[0].group)
    session = ExecSession(channel, [task.name for task in tasks], order, write)
    try:
        return await session.run()
    finally:
        await channel.close()


class _LeaveError(Exception):
    """The client stops listening and exits with `code`."""

    def __init__(self, code: int, why: str | None = None) -> None:
        super().__init__(why)
        self.code = code
        self.why = why


class ExecSession:
    """A command in some tasks, from its start to its end."""

    def __init__(
        self, channel: Channel, tasks: Sequence[str], order: ExecOrder, write: Write
    ) -> None:
        self._channel = channel
        self._order = order
        self._tasks = {secrets.token_hex(8): name for name in tasks}
        self._open = set(self._tasks)
        self._codes: dict[str, int] = {}
        self._notes: list[str] = []
        self._refusals: list[part_messages.ExecRefused] = []
        self._loop = asyncio.get_running_loop()
        self._left: asyncio.Future[_LeaveError] = self._loop.create_future()
        self._output = OutputThread(write, self._taken, self._broken)
        self._input = InputThread(order.input_fd, self._typed)
        self._num_signals = 0

    async def run(self) -> ExecResult:
        """Run the command to its end in all tasks."""
        tty_fd = self._order.input_fd if self._order.tty else None
        self._output.start()
        with RawTerminal(tty_fd) as terminal, self._signals(terminal):
            self._start(terminal)
            try:
                async with asyncio.timeout(self._order.timeout_s):
                    await self._carry()
            except TimeoutError:
                limit = f"it ran longer than --timeout of {self._order.timeout_s:g} s"
                self._give_up(TIMED_OUT, limit)
            except _LeaveError as left:
                self._give_up(left.code, left.why)
            finally:
                self._input.stop()
            await self._output.finish(self._left.done)
        if self._refusals and not self._codes:
            first = self._refusals[0]
            raise UsageError(first.what, why=first.why, fix=first.fix)
        return ExecResult(codes=self._codes, notes=tuple(self._notes))

    def _start(self, terminal: RawTerminal) -> None:
        rows, columns = terminal.size()
        for exec_id, task in self._tasks.items():
            start = part_messages.ExecStart(
                exec_id=exec_id,
                task=task,
                argv=self._order.argv,
                tty=self._order.tty,
                rows=rows,
                columns=columns,
                term=os.environ.get("TERM", "") if self._order.tty else "",
                debugger=self._order.debugger,
            )
            self._channel.send_nowait(start)
            if self._order.input_fd is None:
                self._channel.send_nowait(part_messages.ExecInput(exec_id=exec_id, end=True))
        if self._order.input_fd is not None:
            self._input.start()

    async def _carry(self) -> None:
        """Handle messages until every command has ended.

        Raises:
            HeadLostError: The connection ended earlier.
        """
        listening = asyncio.create_task(self._listen())
        try:
            waits: set[asyncio.Future[Any]] = {listening, self._left}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._left.done() and not listening.done():
                raise self._left.result()
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def _listen(self) -> None:
        try:
            while self._open:
                self._take(await self._channel.receive())
        except ChannelClosedError as error:
            raise HeadLostError(
                "the connection to the run has ended, and the command with it", why=str(error)
            ) from error

    def _take(self, message: messages.Message) -> None:
        match message:
            case part_messages.ExecOutput(exec_id=exec_id) if exec_id in self._tasks:
                self._output.put(exec_id, self._tasks[exec_id], message.stream, message.data)
            case part_messages.ExecAcknowledged(size_bytes=size_bytes):
                self._input.taken(size_bytes)
            case part_messages.ExecEnded(exec_id=exec_id, code=code, why=why):
                self._end(exec_id, code, why)
            case part_messages.ExecRefused(exec_id=exec_id, what=what):
                self._refusals.append(message)
                if len(self._tasks) > 1:
                    self._end(exec_id, MusterError.exit_code, what)
                self._open.discard(exec_id)

    def _end(self, exec_id: str, code: int, why: str | None) -> None:
        if exec_id not in self._open:
            return
        self._open.discard(exec_id)
        task = self._tasks[exec_id]
        self._codes[task] = code
        if why is not None:
            self._notes.append(f"task {task}: {why}")

    def _give_up(self, code: int, why: str | None) -> None:
        """Record the end of commands that still run; the closed connection sends them SIGHUP."""
        for exec_id in list(self._open):
            self._end(exec_id, code, why)

    # The threads.

    def _typed(self, data: bytes, *, end: bool) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send_input, data, end)

    def _send_input(self, data: bytes, end: bool) -> None:
        for exec_id in self._open:
            self._channel.send_nowait(part_messages.ExecInput(exec_id=exec_id, data=data, end=end))

    def _taken(self, exec_id: str, num_bytes: int) -> None:
        taken = part_messages.ExecAcknowledged(exec_id=exec_id, size_bytes=num_bytes)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._channel.send_nowait, taken)

    def _broken(self, why: str | None) -> None:
        code = BROKEN_PIPE if why is None else MusterError.exit_code
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._leave, code, why)

    def _leave(self, code: int, why: str | None = None) -> None:
        if not self._left.done():
            self._left.set_result(_LeaveError(code, why))

    # Signals.

    @contextlib.contextmanager
    def _signals(self, terminal: RawTerminal) -> Iterator[None]:
        if self._order.debugger:  # signals are meant for the run that is followed
            yield
            return
        own = {signum: (self._signalled, signum) for signum in _FORWARDED}
        own[signal.SIGHUP] = (self._leave, 128 + signal.SIGHUP)  # type: ignore[assignment]
        for signum, (action, argument) in own.items():
            self._loop.add_signal_handler(signum, action, argument)
        if terminal.is_raw:
            self._loop.add_signal_handler(signal.SIGWINCH, self._resized, terminal)
            self._loop.add_signal_handler(signal.SIGCONT, terminal.again)
        try:
            yield
        finally:
            for number in (*own, signal.SIGWINCH, signal.SIGCONT):
                self._loop.remove_signal_handler(number)

    def _signalled(self, signum: int) -> None:
        """Forward the first signal; leave at the second, or at any if the command has a tty."""
        self._num_signals += 1
        if self._order.tty or self._num_signals > 1:
            self._leave(128 + signum)
            return
        for exec_id in self._open:
            self._channel.send_nowait(part_messages.ExecSignal(exec_id=exec_id, signum=int(signum)))

    def _resized(self, terminal: RawTerminal) -> None:
        rows, columns = terminal.size()
        for exec_id in self._open:
            self._channel.send_nowait(
                part_messages.ExecResize(exec_id=exec_id, rows=rows, columns=columns)
            )


# At a rank, or on a node: its stacks, or a command beside it.


ANSWER_LIMIT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksFound:
    """Where the ranks are: one sentence, and all stacks."""

    sentence: str
    lines: tuple[str, ...]


async def ask_stacks(view: RunView, limit_s: float = ANSWER_LIMIT_S) -> StacksFound:
    """Return the stacks of all ranks of a live run.

    Raises:
        UsageError: The run has ended, or is a workflow.
        ChannelError: The head can't be reached, or does not answer within `limit_s`.
    """
    _check_has_ranks(view)
    if (member := _own_process(view)) is not None:
        return await asyncio.to_thread(_stacks_of, member)
    if view.is_headless_member:
        what = f"the process of {view.run_id} is not in its record yet, or has ended"
        raise ChannelError(what, where=view.run_dir.events, fix="try again in a second")
    channel = await call_head(view)
    ask_id = secrets.token_hex(8)
    lines: list[str] = []
    try:
        channel.send_nowait(part_messages.AskStacks(ask_id=ask_id))
        async with asyncio.timeout(limit_s):
            while True:
                answer = await channel.receive()
                if not isinstance(answer, part_messages.StacksReport) or answer.ask_id != ask_id:
                    continue
                lines += answer.lines
                if answer.is_last:
                    return StacksFound(sentence=answer.sentence, lines=tuple(lines))
    except TimeoutError as error:
        raise ChannelError(
            f"the head of the run {view.run_id} did not answer within {limit_s:g} s",
            fix="try again",
        ) from error
    except ChannelClosedError as error:
        raise HeadLostError("the connection to the run has ended", why=str(error)) from error
    finally:
        await channel.close()


def _own_process(view: RunView) -> WorkerProcessEvent | None:
    """Return the local process of a sweep's member without a head; None for all others."""
    if os.path.exists(view.run_dir.head):
        return None
    found = view.record.process
    return found if found is not None and proc.read_process(found.pid) is not None else None


def _stacks_of(member: WorkerProcessEvent) -> StacksFound:
    (stack,) = take_stacks(member.folder, member.attempt, [(0, member.pid)])
    seen = Seen(rank=0, node=os.uname().nodename, standing=standing_of(stack), kernel=stack.kernel)
    return StacksFound(sentence=tell([seen]), lines=tuple(shown(stack).splitlines()))


async def execute_at_rank(view: RunView, word: str, order: ExecOrder, write: Write) -> ExecResult:
    """Run a command next to a rank, or on a node.

    Args:
        view: A training run.
        word: `rank 3` or `node n2`.
        order: What to run.
        write: Gets the output.

    Raises:
        UsageError: The run has ended, or has no such rank or node.
        ChannelError: The head can't be reached.
        HeadLostError: The connection to the head was lost.
    """
    _check_has_ranks(view)
    channel = await call_head(view)
    try:
        return await ExecSession(channel, [word], order, write).run()
    finally:
        await channel.close()


def _check_has_ranks(view: RunView) -> None:
    """Refuse a workflow, and a run that has ended.

    Raises:
        UsageError: It is one of these.
    """
    if view.kind is Kind.WORKFLOW:
        raise UsageError(
            f"the run {view.run_id} is a workflow: its tasks have no ranks of their own",
            fix=f"muster exec {short_id(view.run_id)} TASK -- COMMAND; a training task's own run by its folder",
        )
    if find.any_result(view.run_dir) is not None or not find.owner_lives(view.run_dir):
        raise UsageError(
            f"the run {view.run_id} has ended: it is {view.state.value}",
            fix=f"muster explain {short_id(view.run_id)}",
        )


# The user's debugger: `--debugpy` and `--pdb`.


USUAL_PORT = 5678  # editors propose this one
_LOOK_EVERY_S = 0.1


class DebuggerServer:
    """Waits, in a thread, for ranks of the followed run that ask for a debugger, and connects them.

    Args:
        run_dir: Directory of the run.
        folder: The program's working directory on this machine.
        say: Prints a message to the user.
        print_text: Prints text unchanged.
    """

    def __init__(
        self,
        run_dir: RunDir,
        folder: str,
        say: Callable[[str], None],
        print_text: Callable[[str], None],
    ) -> None:
        self._run_dir, self._folder = run_dir, folder
        self._say, self._print = say, print_text
        self._ends = threading.Event()
        self._listener: socket.socket | None = None
        self._terminal = asyncio.Lock()  # one pdb session at a time has the terminal

    def start(self) -> None:
        """Start to wait."""
        work = threading.Thread(
            target=lambda: asyncio.run(self._watch()), name="debugger", daemon=True
        )
        work.start()

    def close(self) -> None:
        """Accept no further connections, and end the open ones."""
        self._ends.set()

    async def _watch(self) -> None:
        follow = Follow(self._run_dir.events)
        sessions: set[asyncio.Task[None]] = set()
        rank = -1
        while not self._ends.is_set():
            for one in follow.events():
                if not isinstance(event := one.event, DebuggerWaitsEvent):
                    continue
                rank = event.rank
                if event.tool == contract.DEBUGPY:
                    self._listen()
                    self._print(launch_text(event, self._port, self._folder))
                else:
                    sessions.add(asyncio.create_task(self._open_pdb(event)))
            stream = self._accept()
            if stream is not None:
                sessions.add(asyncio.create_task(self._carry(rank, stream)))
            sessions = {task for task in sessions if not task.done()}
            await asyncio.sleep(_LOOK_EVERY_S)
        for task in sessions:
            task.cancel()
        if self._listener is not None:
            self._listener.close()

    # An editor.

    @property
    def _port(self) -> int:
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0

    def _listen(self) -> None:
        for port in (USUAL_PORT, 0) if self._listener is None else ():
            with contextlib.suppress(OSError):
                self._listener = socket.create_server(("127.0.0.1", port), backlog=4)
                self._listener.setblocking(False)
                return

    def _accept(self) -> socket.socket | None:
        if self._listener is None:
            return None
        try:
            stream, _ = self._listener.accept()
        except OSError:
            return None
        stream.setblocking(True)
        if is_own_connection(stream):
            return stream
        self._say("a connection of another user to the debugger's port was closed")
        stream.close()
        return None

    async def _carry(self, rank: int, stream: socket.socket) -> None:
        with stream:

            def write(task: str, number: int, data: bytes) -> None:
                if number == 1:
                    stream.sendall(data)
                else:
                    self._say(data.decode(errors="replace"))

            await self._session(rank, stream.fileno(), write)
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    # pdb.

    async def _open_pdb(self, event: DebuggerWaitsEvent) -> None:
        rank = event.rank
        what, keys = "has failed", "`q` ends the run"
        if event.tool == contract.PDB_STOPS:
            what, keys = "has stopped", "`c` goes on, `q` ends the run"
        self._say(f"rank {rank} on {event.node} {what}; all ranks wait while you look ({keys})")

        def write(task: str, number: int, data: bytes) -> None:
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]

        async with self._terminal:
            await self._session(rank, 0, write)

    async def _session(self, rank: int, input_fd: int, write: Write) -> None:
        order = ExecOrder(argv=(), input_fd=input_fd, debugger=True)
        try:
            await execute_at_rank(find.view_run(self._run_dir), f"rank {rank}", order, write)
        except MusterError as error:
            self._say(f"the debugger does not reach rank {rank}: {error.what}")


def launch_text(event: DebuggerWaitsEvent, port: int, folder: str) -> str:
    """Return what a user needs to attach an editor: a sentence and a launch.json."""
    rank, remote = event.rank, event.folder or folder
    configuration = {
        "name": f"muster: rank {rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": port},
        "pathMappings": [{"localRoot": folder, "remoteRoot": remote}],
    }
    launch = {"version": "0.2.0", "configurations": [configuration]}
    return (
        f"muster: attach your editor to 127.0.0.1:{port}; for VS Code as .vscode/launch.json:\n"
        f"{json.dumps(launch, indent=2)}\n"
    )
