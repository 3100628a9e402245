"""What an owner works with: its engine, its display, its record, and standard input for workers."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from torchmuster.core.engines.local import AgentEnd
from torchmuster.core.files import atomic
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.events import RecordEvent, line_of
from torchmuster.core.model.plan import RunPlan

LAST_WRITES_S = 5.0
_LOOK_EVERY_S = 0.01


class RecordWriter:
    """Writes an owner's events and small files in order; its exit waits for them, with a limit.

    It writes in a thread: a hung file system must not keep an owner from its heads.

    Args:
        run_dir: The run directory of the files.
        say: Prints for the user what could not be written.
    """

    def __init__(self, run_dir: RunDir, say: Callable[[str], None]) -> None:
        self._run_dir, self._say = run_dir, say
        self._disk = DiskWriter(root=run_dir.path)
        self._reported: set[str] = set()

    async def __aenter__(self) -> Self:
        """Start writing."""
        loop = asyncio.get_running_loop()

        def lose(lines: int, why: str) -> None:
            del lines
            loop.call_soon_threadsafe(self._report_loss, why)

        self._disk.on_loss = lose
        self._disk.reserve_space(self._run_dir.room)
        self._disk.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait until everything is written, or the time limit has passed."""
        self._disk.close_file(self._run_dir.events)
        deadline = time.monotonic() + LAST_WRITES_S
        while not (is_written := self._disk.flush(0.0)) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_EVERY_S)
        if is_written:
            with contextlib.suppress(OSError):
                os.unlink(self._run_dir.room)
        self._disk.on_loss = None  # the loop ends
        if not is_written:
            self._report_loss(f"the file system took more than {LAST_WRITES_S:.0f} s")

    def event(self, event: RecordEvent) -> None:
        """Append an event with the current time."""
        self._disk.append(self._run_dir.events, line_of(event).encode())

    def replace(self, path: str, value: Any, *, mode: int = 0o644) -> None:
        """Rewrite a file as JSON."""
        self._disk.replace(path, atomic.as_json(value), mode=mode)

    def _report_loss(self, why: str) -> None:
        if why not in self._reported:
            self._reported.add(why)
            self._say(
                f"files in {self._run_dir.path} can't be written, so other commands may not find this run"
                f" or see all of it: {why}"
            )


_WAIT_S = 0.01
_MAX_UNSENT_BYTES = 1 << 20


class RunDisplay(Protocol):
    """What an owner uses to show a run."""

    def say(self, sentence: str) -> None:
        """Show a sentence from muster."""

    def tell(self, event: RecordEvent) -> None:
        """Show the sentence for an event of the run."""

    def show(self, rank: int, stream: int, text: str, left_out: int) -> None:
        """Show output of a rank."""

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is shown."""


class Engine(Protocol):
    """Starts agents at the places of a run: on this machine, or on the nodes of a job.

    Attributes:
        keeps_agents: Agents outlive a head: they find the new one through the file with its
            address.
    """

    keeps_agents: ClassVar[bool]
    head_place: int
    plan: RunPlan
    run_dir: RunDir

    @property
    def address(self) -> tuple[str, int]:
        """Return where the head listens, for this process."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the head's addresses for other machines; empty if only this one can connect."""

    @property
    def pids(self) -> list[int]:
        """Return the pids of the processes that it has started."""

    @property
    def head_state(self) -> str | None:
        """Return the state of the head's process (/proc/PID/stat); None if on another machine."""

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start an agent at every place, the head first."""

    def start_head(self, *, first_attempt: int, restarts_spent: int) -> None:
        """Start only the head's agent: the others are running."""

    def start_place(self, place: int) -> None:
        """Start an agent at one place."""

    def holds(self, place: int) -> bool:
        """Say whether an agent runs at this place."""

    def poll(self) -> list[AgentEnd]:
        """Return the agents that have ended."""

    def has_orphans(self) -> bool:
        """End what ended agents left behind; say whether any of it remains."""

    def kill_head(self) -> None:
        """Kill the head's agent."""

    def kill_all(self) -> None:
        """Kill all agents."""

    def cut_lifeline(self) -> None:
        """Make the agents end themselves."""


def _is_in_background() -> bool:
    """Say whether another process group has the terminal on standard input."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # a terminal that does not control us: anybody may read it
        return False


class StandardInput:
    """Forwards standard input, typed or from a file, to the workers.

    Args:
        send: Forwards the bytes; empty at the end.
        unsent_bytes: Returns how many bytes have not been received yet; a file waits for them.
    """

    def __init__(self, send: Callable[[bytes], None], unsent_bytes: Callable[[], int]) -> None:
        self._send, self._unsent_bytes = send, unsent_bytes
        self._has_ended = False
        self._reading: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start reading; after the end of input, tell a new head about it."""
        loop = asyncio.get_running_loop()
        if self._has_ended:
            self._pass(b"")
            return
        try:
            loop.add_reader(0, self._read)
        except (OSError, ValueError):  # a plain file can't be waited for
            if self._reading is None:
                self._reading = loop.create_task(self._read_file())

    def _read(self) -> None:
        if _is_in_background():
            return  # reading would stop us
        if not self._pass(os.read(0, 4096)):
            asyncio.get_running_loop().remove_reader(0)

    async def _read_file(self) -> None:
        while self._pass(await asyncio.to_thread(os.read, 0, 1 << 16)):
            while self._unsent_bytes() > _MAX_UNSENT_BYTES:
                await asyncio.sleep(_WAIT_S)

    def _pass(self, data: bytes) -> bool:
        """Forward input, byte for byte; say whether more may follow."""
        self._has_ended = not data
        self._send(data)
        return bool(data)
