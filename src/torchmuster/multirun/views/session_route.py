"""The connection to the nodes of a session on other machines, over the session's channel.

It replaces ssh for these hosts (`launcher/engines/ssh_host.py`): one authenticated connection to
the session's head carries the remote ends' streams of all nodes, as for `muster exec`. A separate
thread has the connection; pipes lead to it.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence

from torchmuster.core.model import codec
from torchmuster.core.net.channel import Channel, ChannelClosedError
from torchmuster.errors import ChannelError, MusterError
from torchmuster.launcher.net import part_messages, remote_messages
from torchmuster.launcher.net.command import Command, CommandProcess
from torchmuster.launcher.net.frames import FrameReader
from torchmuster.launcher.views.head_call import call_head
from torchmuster.launcher.views.run_view import RunView
from torchmuster.multirun.server.messages import SessionServerState

_TRY_EVERY_S = 0.1
_START_S = 30.0


class SessionRoute:
    """The connection to a session's head, made on first use and again after it was lost.

    Args:
        view: The run that is the session.
        lives: Returns whether the session is alive.
        patience_s: How long to wait for a server that opens again.
    """

    def __init__(self, view: RunView, lives: Callable[[], bool], patience_s: float) -> None:
        self._view, self._lives, self._patience_s = view, lives, patience_s
        self._channel: Channel | None = None
        self._commands: dict[str, Command] = {}
        self._calling = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._listening: asyncio.Task[None] | None = None
        threading.Thread(target=self._loop.run_forever, name="session", daemon=True).start()

    def open(self, host: str, errors: int) -> tuple[CommandProcess, int, int]:
        """Start the remote end of a node; return its process and our ends of its stdin and stdout.

        Args:
            host: The name of the node in the session.
            errors: The descriptor for its stderr.

        Raises:
            MusterError: The node can't be reached, or its server has not opened in time.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return self._open(host, errors)
            except MusterError:
                if time.monotonic() > deadline or not self._lives():
                    raise
            threading.Event().wait(_TRY_EVERY_S)

    def _open(self, host: str, errors: int) -> tuple[CommandProcess, int, int]:
        theirs_in, ours_in = os.pipe2(os.O_CLOEXEC)
        ours_out, theirs_out = os.pipe2(os.O_CLOEXEC)
        streams = (theirs_in, theirs_out, os.dup(errors))
        began: concurrent.futures.Future[None] = concurrent.futures.Future()
        process = CommandProcess(self._loop, self._run(host, streams, began), streams)
        try:
            began.result(_START_S)
        except BaseException as error:
            process.send_signal(signal.SIGTERM)
            os.close(ours_in)
            os.close(ours_out)
            if isinstance(error, TimeoutError):
                raise ChannelError(f"the session's server on {host} does not answer") from None
            raise
        return process, ours_in, ours_out

    async def _run(
        self, host: str, streams: Sequence[int], began: "concurrent.futures.Future[None]"
    ) -> int:
        """Carry the streams of a node's remote end and return its exit status.

        `began` is done when the remote end has answered or failed.
        """
        try:
            channel = await self._connected()
            start = part_messages.ExecStart(
                exec_id=secrets.token_hex(8), task=f"node {host}", forks_remote=True
            )
            one = self._commands[start.exec_id] = Command(start, channel.send_nowait, streams)
        except MusterError as error:
            began.set_exception(error)
            raise
        try:
            one.begin()
            await one.spoken.wait()
            if (no := one.refusal) is not None:
                began.set_exception(ChannelError(no.what, why=no.why, fix=no.fix))
            elif one.lost is not None:
                began.set_exception(ChannelError("the connection to the session's head has ended"))
            else:
                began.set_result(None)
            return await asyncio.shield(one.ended)
        finally:
            self._commands.pop(start.exec_id, None)
            one.leave()

    async def _connected(self) -> Channel:
        async with self._calling:
            if self._channel is None:
                self._channel = await call_head(self._view)
                self._listening = asyncio.create_task(self._listen(self._channel))
            return self._channel

    async def _listen(self, channel: Channel) -> None:
        with contextlib.suppress(ChannelClosedError):
            while True:
                message = await channel.receive()
                exec_id = getattr(message, "exec_id", None)
                one = self._commands.get(exec_id) if isinstance(exec_id, str) else None
                if one is not None:
                    one.take(message)
        self._channel = None
        for one in list(self._commands.values()):
            one.lose("the connection to the session's head has ended")

    def close(self) -> None:
        """Close the connection; remote ends then end their agents."""

        def close_channel() -> None:
            if self._channel is not None:
                self._channel.abort()

        self._loop.call_soon_threadsafe(close_channel)


def ask_servers(view: RunView, names: Sequence[str]) -> list[SessionServerState]:
    """Return the states of the servers of these nodes of a session.

    Raises:
        MusterError: One of the servers can't be reached.
    """
    way = SessionRoute(view, lambda: False, 0.0)
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        return [_ask_server(way, name, null) for name in names]
    finally:
        os.close(null)
        way.close()


def _ask_server(way: SessionRoute, name: str, null: int) -> SessionServerState:
    streams, to, out = way.open(name, null)
    try:
        reader = FrameReader(out)
        for _ in range(2):  # facts come first
            answer = reader.read(_START_S)
            if isinstance(answer, remote_messages.SessionStatus):
                return SessionServerState(**codec.to_plain(answer))
    except (TimeoutError, remote_messages.FrameError) as error:
        raise ChannelError(f"the session's server on {name} does not answer") from error
    finally:
        streams.send_signal(signal.SIGTERM)
        os.close(to)
        os.close(out)
    raise ChannelError(f"the session's server on {name} does not say how it is")
