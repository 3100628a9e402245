"""Opens a session with a pod, as ssh does with a host: what `engines/ssh_host.py` types is understood.

    call --key FILE --port PORT [-o OPTION] [-T] HOST COMMAND

The exit code is that of the command; 255 where there was no session, with one line on standard error.
"""

import argparse
import asyncio
import os
import signal
import sys

from torchmuster import proc
from torchmuster.net.channel import ChannelClosedError, connect
from torchmuster.net.handshake import HandshakeError, Role
from torchmuster.net.secret import read_secret
from torchmuster.node.pod.session import call_session

_NO_SESSION = 255


def call_argv(key: str, port: int) -> list[str]:
    """Return the words that stand for `ssh`: the key's file and the port that all pods of a run share."""
    return proc.node_program("call", "--key", key, "--port", str(port))


def main(arguments: list[str]) -> int:
    """Run a command in a pod."""
    parser = argparse.ArgumentParser(prog="call")
    parser.add_argument("--key", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("-o", action="append")
    parser.add_argument("-T", action="store_true")
    parser.add_argument("host")
    parser.add_argument("command")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    proc.die_with_parent(os.getppid())
    secret = read_secret(options.key)
    return asyncio.run(_call(options.host, options.port, secret, options.command))


async def _call(host: str, port: int, secret: bytes, command: str) -> int:
    try:
        channel = await connect(host, port, Role.SESSION, secret)
    except (OSError, HandshakeError) as error:
        sys.stderr.write(f"{host} port {port}: {_words(error)}\n")
        return _NO_SESSION
    try:
        code = await call_session(channel, command)
    except (ChannelClosedError, OSError) as error:
        sys.stderr.write(f"{host}: the connection ended: {_words(error)}\n")
        return _NO_SESSION
    finally:
        channel.abort()
    return 128 - code if code < 0 else code


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number is not None else str(error)  # asyncio has words of its own
