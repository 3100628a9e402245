"""One ssh session with a courier at its other end: opening, questions, and its end.

Two threads each: one reads frames, one writes them and pings, so a host that stalls holds nobody else.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster import proc
from torchmuster.engines.ssh_command import (
    CONNECT_LIMIT_S,
    HostProblem,
    SshHost,
    marker_of,
    no_python,
    problem_of,
    remote_command,
    session_argv,
)
from torchmuster.files import travel
from torchmuster.files.layout import muster_home
from torchmuster.net import frames
from torchmuster.net.frames import FrameError, FrameReader, FrameWriter, Kind

_PING_EVERY_S = 4.0
_FACTS_LIMIT_S = 20.0
_SILENCE_S = 30.0
_MAX_NOISE_BYTES = 1 << 20
_LEAVE_S = 12.0
_MAX_STDERR_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Luggage:
    """What every host is offered.

    Attributes:
        root: Where this torchmuster is, for hosts that share the file system; empty for none.
        pythons: Interpreters for muster's own processes that are tried first.
    """

    ssh: tuple[str, ...]
    sha: str
    root: str
    files: tuple[tuple[str, bytes], ...]
    pythons: tuple[str, ...] = ()

    def loader(self) -> bytes:
        """Return the program that is sent first."""
        source = dict(self.files)["node/remote/loader.py"]
        return source + f"\nmain({self.sha!r}, {self.root!r})\n".encode()

    def argv(self, host: SshHost) -> list[str]:
        """Return the words that open a session with a host."""
        command = remote_command(marker_of(self.sha), len(self.loader()), self.pythons)
        return session_argv(self.ssh, host, command)

    def package(self) -> bytes:
        """Return the archive for hosts that don't have this content."""
        cache = os.path.join(muster_home(), "cache")
        return travel.travelling_package(cache, list(self.files), self.sha)


def pack_luggage(ssh: Sequence[str], pythons: Sequence[str], *, may_share: bool) -> Luggage:
    """Return what hosts are offered of the torchmuster that runs here."""
    package = travel.package_folder()
    files = travel.package_files(package)
    return Luggage(
        ssh=tuple(ssh),
        sha=travel.content_hash(files),
        root=os.path.dirname(package) if may_share else "",
        files=tuple(files),
        pythons=tuple(pythons),
    )


class HostError(Exception):
    """A host can't be used, or no longer."""

    def __init__(self, problem: HostProblem) -> None:
        super().__init__(problem.line())
        self.problem = problem


class SshSession:
    """One host.

    Attributes:
        on_frame: Gets what no question waits for: ends, files, relayed bytes.
        on_lost: Told once when the connection has ended, however.
    """

    def __init__(self, host: SshHost, luggage: Luggage, stderr_path: str) -> None:
        self.host = host
        self.place: int | None = None
        self.facts: dict[str, Any] = {}
        self.placed: dict[str, Any] = {}
        self.holds_agent = False
        self.is_lost = False
        self.last_heard = time.monotonic()
        self.on_frame: Callable[[SshSession, int, bytes], None] = lambda *_: None
        self.on_lost: Callable[[SshSession], None] = lambda _: None
        self._luggage = luggage
        self._stderr_path = stderr_path
        self._child: proc.Child | None = None
        self._answers: dict[int, dict[str, Any]] = {}
        self._problem: HostProblem | None = None
        self._changed = threading.Condition()
        self._reader: FrameReader | None = None
        self._writer: FrameWriter | None = None
        self._out = -1

    @property
    def pid(self) -> int:
        """Return the process id of ssh."""
        return self._child.pid if self._child is not None else 0

    def open(self) -> None:
        """Connect and bring torchmuster there; blocks, so each host has a thread.

        Raises:
            HostError: The host can't be used; within 10 s when nobody answers.
        """
        try:
            self._start_ssh()
            self._meet()
        except HostError:
            self.abandon()
            raise
        threading.Thread(target=self._read_frames, name=self.host.name, daemon=True).start()

    def _start_ssh(self) -> None:
        theirs_in, ours_in = os.pipe2(os.O_CLOEXEC)
        ours_out, theirs_out = os.pipe2(os.O_CLOEXEC)
        os.makedirs(os.path.dirname(self._stderr_path), exist_ok=True)
        error = os.open(self._stderr_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self._child = proc.start(
                self._luggage.argv(self.host), stdin=theirs_in, stdout=theirs_out, stderr=error
            )
        except BaseException:
            os.close(ours_in)
            os.close(ours_out)
            raise
        finally:
            for fd in (theirs_in, theirs_out, error):
                os.close(fd)
        self._out = ours_out
        self._reader = FrameReader(ours_out)
        self._writer = FrameWriter(ours_in)
        self._writer.start()
        self._writer.send(self._luggage.loader())

    def _meet(self) -> None:
        """Wait for the loader, learn what the host is, bring the package."""
        reader, writer = self._parts()
        marker = marker_of(self._luggage.sha).encode()
        try:
            if reader.read_until(marker, _MAX_NOISE_BYTES, CONNECT_LIMIT_S) is None:
                raise HostError(self._why("the connection ended before anything ran"))
            self.facts = self._read_facts(reader)
        except TimeoutError as error:
            raise HostError(self._why("no answer for 10 s")) from error
        except FrameError as error:
            raise HostError(self._why(f"what its shell says can't be read: {error}")) from error
        if not self.facts.get("has"):
            data = self._luggage.package()
            for at in range(0, len(data), frames.CHUNK_BYTES):
                writer.send_bulk(frames.pack(Kind.PACKAGE, data[at : at + frames.CHUNK_BYTES]))
            writer.send(frames.pack(Kind.PACKAGE))
        writer.ping_every(_PING_EVERY_S)

    def _read_facts(self, reader: FrameReader) -> dict[str, Any]:
        try:
            frame = reader.read(_FACTS_LIMIT_S)
        except FrameError:
            frame = None
        if frame is not None and frame[0] == Kind.FACTS:
            return frames.read_json(frame[1])
        if b"no-python" in reader.rest:
            raise HostError(no_python(self.host.name, self._stderr()))
        raise HostError(self._why("its Python ended at once"))

    def _parts(self) -> tuple[FrameReader, FrameWriter]:
        if self._reader is None or self._writer is None:
            raise ValueError("open comes first")
        return self._reader, self._writer

    # Frames.

    def send(self, kind: Kind, value: dict[str, Any] | None = None) -> None:
        """Send a frame with a JSON object, or an empty one."""
        frame = frames.pack_json(kind, value) if value is not None else frames.pack(kind)
        self._parts()[1].send(frame)

    def send_frame(self, frame: bytes, *, bulk: bool = False) -> bool:
        """Send a frame as it is; bulk waits for room. Say whether there is anybody to get it."""
        writer = self._parts()[1]
        if bulk:
            return writer.send_bulk(frame)
        writer.send(frame)
        return not writer.is_broken

    def ask(self, kind: Kind, value: dict[str, Any], answer: Kind) -> dict[str, Any]:
        """Send a question and wait for its answer.

        Raises:
            HostError: The host says no, or is gone.
        """
        with self._changed:
            self._answers.pop(answer, None)
        self.send(kind, value)
        return self.expect(answer)

    def expect(self, answer: Kind) -> dict[str, Any]:
        """Wait for an answer; as long as the host gives signs of life, since disks and links differ.

        Raises:
            HostError: The host says no, or is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: answer in self._answers or self._problem is not None)
            if answer in self._answers:
                return self._answers.pop(answer)
            if self._problem is None:
                raise ValueError("unreachable")
            raise HostError(self._problem)

    def _read_frames(self) -> None:
        reader = self._parts()[0]
        reason = "the connection ended"
        try:
            while (frame := reader.read(_SILENCE_S)) is not None:
                self.last_heard = time.monotonic()
                self._take(*frame)
        except TimeoutError:
            reason = f"no sign of life for {_SILENCE_S:.0f} s"
        except (FrameError, OSError) as error:
            reason = f"what came is no frame: {error}"
        self.is_lost = True
        self._end_ssh(1.0)
        with self._changed:
            self._problem = self._problem or self._why(reason)
            self._changed.notify_all()
        self.on_lost(self)

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == Kind.PONG:
            return
        if kind in (Kind.PLACED, Kind.READY, Kind.STARTED, Kind.COLLECTED):
            with self._changed:
                self._answers[kind] = frames.read_json(payload)
                self._changed.notify_all()
            return
        if kind == Kind.FAIL:
            said = frames.read_json(payload)
            words = ": ".join(str(said[key]) for key in ("what", "where", "why") if said.get(key))
            fix = str(said.get("fix") or "")
            with self._changed:
                self._problem = HostProblem(host=self.host.name, words=words, fix=fix)
                self._changed.notify_all()
            return
        self.on_frame(self, kind, payload)

    # The end.

    @property
    def problem(self) -> HostProblem | None:
        """Return why the host is of no use any more."""
        return self._problem

    def last_words(self) -> str:
        """Return the last lines that came on the session's standard error."""
        return " / ".join(self._stderr().strip().splitlines()[-3:])

    def close(self) -> None:
        """Let the courier leave, then make sure that ssh has ended."""
        if self._writer is not None:
            self._writer.send(frames.pack(Kind.END))
            self._writer.close()
        self._end_ssh(_LEAVE_S)

    def abandon(self) -> None:
        """End ssh now; the courier sees the end of its input."""
        if self._writer is not None:
            self._writer.close()
        self._end_ssh(0.0)

    def _end_ssh(self, patience_s: float) -> None:
        child = self._child
        if child is None:
            return
        for signum in (15, 9):
            if patience_s and child.wait(patience_s) is not None:
                return
            child.send_signal(signum)
            patience_s = 1.0
        child.wait(1.0)

    def _why(self, otherwise: str) -> HostProblem:
        if self._child is not None:
            self._child.wait(0.3)  # its last words stand before its end
        return problem_of(self.host.name, self._stderr(), otherwise)

    def _stderr(self) -> str:
        with contextlib.suppress(OSError), open(self._stderr_path, errors="replace") as file:
            return file.read(_MAX_STDERR_BYTES)
        return ""
