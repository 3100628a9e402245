"""A process that moves files for an agent: it can be killed when a file system hangs, and may need packages of its own.

It speaks in lines of JSON: {"progress": {...}}, {"note": "..."}, and at the end {"done": {...}} or {"error": {...}}.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.model.contract import describe_exit
from torchmuster.model.display.text import show_transfer
from torchmuster.node.shell import CommandWatch

_MAX_LINE_BYTES = 1 << 20
SAY_EVERY_S = 5.0


class Transfer:
    """One run of such a program.

    Args:
        argv: Its command.
        environment: Its variables.
        note: Gets its sentences for the user, when they come.
        log: Gets what it writes to standard error; None: that goes where ours goes.
        keeps_stdin: The end of its standard input asks it to end its work.

    Attributes:
        progress: The last that it has said.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        note: Callable[[str], None],
        *,
        log: Callable[[bytes], None] | None = None,
        keeps_stdin: bool = False,
    ) -> None:
        self.progress: dict[str, Any] = {}
        self._source: object = None  # of several, one after the other, the one that is moved
        self._began_at = time.monotonic()
        self._began_bytes = 0
        self._note = note
        self._stdin: int | None = None
        self._error: dict[str, Any] | None = None
        self._done: dict[str, Any] | None = None
        self._line = b""  # what has come of the next one
        self._said, self._errors = CommandWatch(log=self._take), CommandWatch(log=log)
        with contextlib.ExitStack() as ends:
            out = ends.enter_context(self._said.listen())
            err = ends.enter_context(self._errors.listen()) if log is not None else None
            stdin = None
            if keeps_stdin:
                stdin, self._stdin = os.pipe2(os.O_CLOEXEC)
                ends.callback(os.close, stdin)
            self.child = proc.start(argv, env=environment, stdin=stdin, stdout=out, stderr=err)

    @property
    def words(self) -> str:
        """Return how far it is, how fast, and how long still; empty before its first word."""
        if not self.progress:
            return ""
        elapsed_s = time.monotonic() - self._began_at
        done, total = (self.progress.get(name, 0) for name in ("bytes_done", "total_bytes"))
        return show_transfer(done, total, elapsed_s, before_bytes=self._began_bytes)

    async def finish_aloud(self, what: str, say_every_s: float = SAY_EVERY_S) -> dict[str, Any]:
        """Wait for the end like `finish`, and say every five seconds how far it is.

        Args:
            what: Is moved: `downloading input 0: s3://...`.
            say_every_s: How often that is said.

        Raises:
            MusterError: It could not be done.
        """

        async def wait(child: proc.Child) -> int:
            say_at = time.monotonic() + say_every_s
            while (code := child.poll()) is None:
                if time.monotonic() >= say_at:
                    say_at += say_every_s
                    self._note(f"{what}: {self.words or 'not begun yet'}")
                await asyncio.sleep(0.01)
            return code

        return await self.finish(wait)

    async def finish(
        self, wait: Callable[[proc.Child], Awaitable[int]] | None = None
    ) -> dict[str, Any]:
        """Wait for the end, by `wait` or in silence, and return what was done.

        Raises:
            MusterError: It could not be done; the words are the other process's.
        """
        try:
            code = await (wait or _wait)(self.child)
        except BaseException:
            self.child.send_signal(9)
            raise
        finally:
            for watch in (self._said, self._errors):
                watch.drain()
                watch.close()
            self.end_input()
        if code != 0 or self._error is not None or self._done is None:
            raise self._failure(code)
        return self._done

    def end_input(self) -> None:
        """Close its standard input: a checkpoint uploader uploads once more and ends."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def _take(self, data: bytes) -> None:
        *lines, self._line = (self._line + data)[-_MAX_LINE_BYTES:].split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                self._take_message(json.loads(line))

    def _take_message(self, message: Any) -> None:
        match message:
            case {"note": str() as sentence}:
                self._note(sentence)
            case {"progress": dict() as progress}:
                if not self.progress or progress.get("source") != self._source:
                    self._source, self._began_at = progress.get("source"), time.monotonic()
                    self._began_bytes = int(progress.get("bytes_done", 0))
                self.progress = progress
            case {"error": dict() as parts}:
                self._error = parts
            case {"done": dict() as done}:
                self._done = done

    def _failure(self, code: int) -> MusterError:
        if self._error is None:
            why = self._errors.last_lines() or describe_exit(code)
            return MusterError("the process that moves the files ended without a message", why=why)
        parts = {
            name: str(self._error[name])
            for name in ("where", "why", "fix")
            if self._error.get(name)
        }
        return MusterError(str(self._error.get("what", "moving files failed")), **parts)


async def _wait(child: proc.Child) -> int:
    while (code := child.poll()) is None:
        await asyncio.sleep(0.01)
    return code
