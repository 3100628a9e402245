"""Moving a task's data: another process does it, because it needs packages that an agent does without."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from torchmuster import proc
from torchmuster.errors import MusterError

_MAX_LINE_BYTES = 1 << 20

Note = Callable[[str], None]


class Transfer:
    """One run of `python -m torchmuster.data`, which speaks in lines of JSON."""

    def __init__(self, words: list[str], note: Note, *, keeps_stdin: bool = False) -> None:
        self._note = note
        self._stdin: int | None = None
        self._error: dict[str, Any] | None = None
        self._done: dict[str, Any] = {}
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        stdin_read: int | None = None
        if keeps_stdin:
            stdin_read, self._stdin = os.pipe2(os.O_CLOEXEC)
        try:
            self.child = proc.start(
                [sys.executable, "-m", "torchmuster.data", *words],
                env=proc.own_package_environment(),
                stdin=stdin_read,
                stdout=write_end,
            )
        finally:
            os.close(write_end)
            if stdin_read is not None:
                os.close(stdin_read)
        self._out = read_end

    async def finish(self) -> dict[str, Any]:
        """Wait for the end and return what was done.

        Raises:
            MusterError: It could not be done; the words are the other process's.
        """
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        pipe = os.fdopen(self._out, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            async for line in reader:
                self._take(line)
            code = await self._wait()
        except BaseException:
            self.child.send_signal(9)
            raise
        finally:
            transport.close()
            self.end_input()
        if code != 0 or self._error is not None:
            raise _as_error(self._error, code)
        return self._done

    def end_input(self) -> None:
        """Close its standard input: a checkpoint uploader uploads once more and ends."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    async def _wait(self) -> int:
        while (code := self.child.poll()) is None:
            await asyncio.sleep(0.01)
        return code

    def _take(self, line: bytes) -> None:
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if not isinstance(message, dict):
                return
            if isinstance(message.get("note"), str):
                self._note(message["note"])
            if isinstance(message.get("error"), dict):
                self._error = message["error"]
            if isinstance(message.get("done"), dict):
                self._done = message["done"]


def _as_error(plain: dict[str, Any] | None, code: int) -> MusterError:
    if plain is None:
        return MusterError("moving data failed without a message", why=f"exit code {code}")
    parts = {name: str(plain[name]) for name in ("where", "why", "fix") if plain.get(name)}
    return MusterError(str(plain.get("what", "moving data failed")), **parts)
