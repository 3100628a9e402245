"""A virtual environment that comes to this host: from the client or the host before, on to the host after, then unpacked.

It is unpacked beside its place and renamed at the end, so nobody meets half of one; of two that come at once, the first stays. Who uses
one holds a lock on it, and what nobody has used for longest is removed.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.files import code_copy, environment
from torchmuster.model.display.text import show_size
from torchmuster.model.installed import EnvironmentNeeds
from torchmuster.net import handshake
from torchmuster.net.address import is_own_address, own_addresses
from torchmuster.net.relay import SendsMessages
from torchmuster.net.remote_messages import (
    EnvironmentDone,
    EnvironmentHopFailed,
    EnvironmentPlaced,
    FrameError,
    OfferEnvironment,
    PassEnvironment,
)
from torchmuster.node.scratch import make_scratch, parent_folder, remove_scratch

VARIABLE = "MUSTER_ENVIRONMENT"
_KEPT = 3
_MAX_ADDRESSES = 16
_CALL_LIMIT_S = 10.0
_TRY_LIMIT_S = 300.0
_PIECE_BYTES = 256 << 10
_LOOK_S = 0.005
_ROOM_BYTES = 256 << 20


class EnvironmentPlace:
    """One environment on this host.

    Raises:
        MusterError: The host is not fit for it, or has no room.

    Attributes:
        path: Its folder, once it is there.
    """

    def __init__(self, offer: OfferEnvironment, session: SendsMessages) -> None:
        self._offer, self._session = offer, session
        needs = self._needs = offer.needs
        parent = parent_folder(dict(os.environ))
        self._folder = make_scratch(parent, f"muster-environments-{os.getuid()}")
        self.path = os.path.join(self._folder, needs.sha[:16])
        self._secret = bytes.fromhex(offer.secret)
        self._received, self._hash = 0, hashlib.sha256()
        self._file: int | None = None
        self._lock = threading.Lock()
        self._hold: int | None = None
        _check_fit(needs)

    def answer(self) -> None:
        """Tell the client whether it has to come, and where the host before may bring it."""
        if self._take_hold():
            self._session.send(EnvironmentPlaced(has=True))
            return
        _forget_old(self._folder)
        free = shutil.disk_usage(self._folder).free
        wanted = self._needs.size_bytes + self._needs.unpacked_bytes + _ROOM_BYTES
        if free < wanted:
            raise MusterError(
                "there is no room for the environment",
                where=self._folder,
                why=f"{show_size(free)} are free, it needs {show_size(wanted)}",
                fix="TMPDIR names a folder with more room",
            )
        self._file, name = tempfile.mkstemp(prefix=".archive-", dir=self._folder)
        os.unlink(name)  # it ends with this process
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()

    def _take_hold(self) -> bool:
        """Use what is there, and let nobody remove it as long as this process lives."""
        try:
            hold = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        fcntl.flock(hold, fcntl.LOCK_SH)
        if not os.path.exists(self.path):  # it was being removed
            os.close(hold)
            return False
        os.utime(self.path)
        self._hold = hold
        return True

    # It comes.

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._take_stream, "0.0.0.0", 0)
        port = server.sockets[0].getsockname()[1]
        addresses = (*own_addresses(), "127.0.0.1")[:_MAX_ADDRESSES]
        self._session.send(EnvironmentPlaced(has=False, port=port, addresses=addresses))
        async with server:
            await server.serve_forever()

    async def _take_stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(_CALL_LIMIT_S):
                await handshake.answer(reader, writer, (self._secret, None))
            offset = 0
            while data := await reader.read(_PIECE_BYTES):
                self.take(offset, data)
                offset += len(data)
        except (OSError, TimeoutError, handshake.HandshakeError, FrameError, EOFError):
            pass
        finally:
            writer.close()

    def take(self, offset: int, data: bytes) -> None:
        """Take a piece; what begins again, begins anew.

        Raises:
            FrameError: It does not follow the last one.
        """
        with self._lock:
            if offset == 0 and self._received:
                self._received, self._hash = 0, hashlib.sha256()
            if self._file is None or offset != self._received:
                raise FrameError("a piece of an environment that was not asked for")
            if offset + len(data) > self._needs.size_bytes:
                raise FrameError("more than the environment")
            os.pwrite(self._file, data, offset)
            self._hash.update(data)
            self._received += len(data)
            is_whole = self._received == self._needs.size_bytes
        if is_whole:
            threading.Thread(target=self._finish, daemon=True).start()

    # It goes on.

    def pass_on(self, order: PassEnvironment) -> None:
        """Send what comes to the next host, while it comes."""
        threading.Thread(target=lambda: asyncio.run(self._pass_on(order)), daemon=True).start()

    async def _pass_on(self, order: PassEnvironment) -> None:
        writer = None
        try:
            writer = await self._call_any(order)
            sent = 0
            while sent < self._needs.size_bytes:
                if self._received <= sent:
                    await asyncio.sleep(_LOOK_S)
                    continue
                count = min(_PIECE_BYTES, self._received - sent)
                data = os.pread(self._file if self._file is not None else -1, count, sent)
                writer.write(data)
                await writer.drain()
                sent += len(data)
        except (OSError, TimeoutError, handshake.HandshakeError, EOFError) as error:
            why = str(error) or type(error).__name__
            self._session.send(EnvironmentHopFailed(why=why[:300]))
        finally:
            if writer is not None:
                writer.close()

    async def _call_any(self, order: PassEnvironment) -> asyncio.StreamWriter:
        """Return a connection to the next host, by the first of its addresses that answers.

        Raises:
            OSError: None does.
        """
        # A bridge of containers has the same address on every host: there we would call ourselves.
        others = [one for one in order.addresses if not is_own_address(one)] or order.addresses
        calls = [asyncio.create_task(self._call(one, order.port)) for one in others]
        try:
            for call in asyncio.as_completed(calls):
                with contextlib.suppress(OSError, TimeoutError, handshake.HandshakeError, EOFError):
                    return await call
        finally:
            for call in calls:
                call.cancel()
        raise OSError(f"it does not answer at {', '.join(others)}")

    async def _call(self, address: str, port: int) -> asyncio.StreamWriter:
        async with asyncio.timeout(_CALL_LIMIT_S):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                await handshake.call(reader, writer, handshake.Role.AGENT, self._secret)
            except BaseException:
                writer.close()
                raise
        return writer

    # It is there.

    def _finish(self) -> None:
        why = None
        try:
            self._unpack()
        except (OSError, ValueError, KeyError, MusterError) as error:
            why = f"{error.what}: {error.why}" if isinstance(error, MusterError) else str(error)
        self._session.send(EnvironmentDone(why=why))

    def _unpack(self) -> None:
        if self._file is None or self._hash.hexdigest() != self._needs.sha:
            raise ValueError("the environment came damaged: its checksum is another")
        # Its final name has the same length everywhere; scripts name it, so it is written before the rename.
        temporary = tempfile.mkdtemp(prefix=".unpacking-", dir=self._folder)
        try:
            os.lseek(self._file, 0, os.SEEK_SET)
            with os.fdopen(os.dup(self._file), "rb") as file:
                code_copy.read_archive(file, temporary, 2 * self._needs.unpacked_bytes + 1)
            environment.relocate(temporary, self.path)
            with contextlib.suppress(OSError):  # another run was first
                os.rename(temporary, self.path)
        finally:
            remove_scratch(temporary)
        if not self._take_hold():
            raise ValueError("the environment was removed while it was unpacked")
        if self._offer.tries:
            _try(self.path, self._needs)


def _check_fit(needs: EnvironmentNeeds) -> None:
    """Refuse a host on which the environment can't run, before anything is sent."""
    machine, own = os.uname().machine, _own_glibc()
    if machine != needs.machine:
        raise MusterError(
            "the environment is for another processor",
            why=f"its files are for {needs.machine}, this host has {machine}",
            fix="make one on a machine of this kind, and name it there: --python",
        )
    if needs.glibc and (own is None or own < needs.glibc):
        has = f"glibc 2.{own}" if own is not None else "no glibc"
        raise MusterError(
            "the environment needs a newer C library",
            why=f"its files need glibc 2.{needs.glibc}, this host has {has}",
            fix="make the environment on a machine as old as this one",
        )
    if not needs.base:
        return
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        said = proc.ask_beside([needs.base, "-I", "-S", "-c", ask], _CALL_LIMIT_S)
        found = said.stdout.decode(errors="replace").strip()
    except MusterError:
        found = ""
    if found != needs.python:
        raise MusterError(
            "the base interpreter of the environment is missing",
            why=f"this host has no Python {needs.python} at {needs.base}",
            fix="make the environment with `uv venv --managed-python`: its interpreter travels too",
        )


def _own_glibc() -> int | None:
    """Return the minor number of this host's glibc 2."""
    try:
        words = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        return int(words[1].split(".")[1])
    except (ValueError, OSError, IndexError):
        return None


def _try(path: str, needs: EnvironmentNeeds) -> None:
    """Import torch as the job will.

    Raises:
        MusterError: It does not work here.
    """
    word = "torch" if needs.has_torch else "sys"
    argv = [os.path.join(path, "env", "bin", "python"), "-I", "-c", f"import {word}"]
    said = proc.ask_beside(argv, _TRY_LIMIT_S)
    if said.status != 0:
        last = said.stderr.decode(errors="replace").strip().splitlines()[-1:]
        what = f"`import {word}` fails in the environment on this host"
        raise MusterError(what, why=last[0][:500] if last else f"status {said.status}")


def _forget_old(folder: str) -> None:
    """Remove the environments that were not used for longest, unless somebody uses them."""
    entries = [e for e in os.scandir(folder) if e.is_dir(follow_symlinks=False)]
    known = [e.path for e in entries if not e.name.startswith(".")]
    known.sort(key=os.path.getmtime, reverse=True)
    for path in known[_KEPT - 1 :]:
        _unless_held(path, lambda path=path: remove_scratch(path))  # type: ignore[misc]


def _unless_held(path: str, action: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        hold = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
            action()
        finally:
            os.close(hold)
