"""The first process of a pod: lets those who prove the run's key run commands here, and reaps what nobody else does.

    pod --key FILE --port PORT

SIGTERM ends it: the sessions' commands see the end of their input, and have as long as the pod's grace.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.net.channel import Channel
from torchmuster.net.handshake import HandshakeError, Role
from torchmuster.net.listener import Listener, bind
from torchmuster.net.secret import read_secret
from torchmuster.node.pod.session import Sessions

_REAP_EVERY_S = 1.0
_STOPS = (signal.SIGTERM, signal.SIGINT)


class PodDoor:
    """Serves sessions until it is told to stop."""

    def __init__(self, secret: bytes, port: int) -> None:
        self._sessions = Sessions()
        self._refused: set[str] = set()
        try:
            listening = bind("", port)
        except OSError as error:
            raise MusterError(
                f"port {port} of this pod can't be opened",
                why=error.strerror,
                fix="with the host's network another process of the host may have it",
            ) from error
        self._listener = Listener(listening, (secret, None), self._serve, self._refuse)

    @property
    def port(self) -> int:
        """Return the port that callers use."""
        return self._listener.port

    async def serve(self) -> None:
        """Serve until SIGTERM."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in _STOPS:
            loop.add_signal_handler(signum, stop.set)
        print(f"muster: sessions are served at port {self.port}", flush=True)
        serving = asyncio.create_task(self._listener.serve())
        while not stop.is_set():
            self._reap()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REAP_EVERY_S):
                    await stop.wait()
        # A second one must not end it before its sessions have ended; the loop restores defaults when it closes.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def _serve(self, channel: Channel) -> None:
        if channel.role is Role.SESSION:
            await self._sessions.serve(channel)

    def _refuse(self, address: str, error: HandshakeError) -> None:
        if address not in self._refused:
            self._refused.add(address)
            sys.stderr.write(f"muster: a caller from {address} was refused: {error}\n")

    def _reap(self) -> None:
        """Wait for processes whose parents have gone: the kernel gives them to the first process of a container."""
        if self._sessions.num_starting:
            return  # its end, should it come at once, belongs to its session
        for pid in proc.children_of(os.getpid()):
            facts = proc.read_process(pid)
            if pid not in self._sessions.pids and facts is not None and facts.state == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def main(arguments: list[str]) -> int:
    """Serve sessions in this pod."""
    parser = argparse.ArgumentParser(prog="pod")
    parser.add_argument("--key", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(arguments)
    proc.become_subreaper()
    door = PodDoor(read_secret(options.key), options.port)
    asyncio.run(door.serve())
    return 0
