"""One environment that comes to this host: piece by piece, from the client or the host before, unpacked and brought on while it comes.

Who brings it is told which piece is wanted next, so another can go on where one has stopped. A piece is believed by its own checksum,
whoever brings it.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

from torchmuster.errors import MusterError
from torchmuster.files.parcel import LISTED, Piece, read_list
from torchmuster.model.installed import EnvironmentNeeds
from torchmuster.node.shipping import hops
from torchmuster.node.shipping.shelf import Shelf, Unpacking
from torchmuster.node.shipping.spool import Spool

LIST = -1  # the index of the list of pieces
_MAX_DAMAGED = 3
_NOBODY = 1 << 40


class ComingEnvironment:
    """An environment on its way through this host.

    Args:
        shelf: Where it goes.
        secret: By which hosts of this run know each other.
        done: Told once: None when it is in its place, else why it is not.

    Raises:
        OSError: It can't be begun.
    """

    def __init__(self, shelf: Shelf, secret: bytes, done: Callable[[str | None], None]) -> None:
        self.needs: EnvironmentNeeds = shelf.needs
        self._done, self.secret = done, secret
        self._unpacking = Unpacking(shelf)
        self._spool = Spool(shelf.folder)
        self._list = b""
        self._pieces: tuple[Piece, ...] = ()
        self._next, self._unpacked, self._onward = LIST, 0, 0
        self._damaged = 0
        self._changed = threading.Condition()
        self._taking = threading.Lock()
        self._source: socket.socket | None = None
        self._is_over = False
        self._listening = socket.create_server(("0.0.0.0", 0), backlog=16)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()
        self._unpacks = threading.Thread(target=self._unpack, daemon=True)
        self._unpacks.start()

    @property
    def wants(self) -> int:
        """Return the index of the piece that is wanted next."""
        return self._next

    @property
    def is_over(self) -> bool:
        """Say whether it has failed, or was given up."""
        return self._is_over

    # It comes.

    def take(self, index: int, data: bytes | memoryview) -> bool:
        """Take the list or a piece; False for one that is damaged. One that is not wanted is dropped.

        Raises:
            OSError: The disk is full.
        """
        with self._taking:
            if index != self._next or self._is_over:
                return True
            if index == LIST:
                try:
                    pieces = read_list(bytes(data), self.needs.sha)
                except ValueError:
                    return self._note_damage()
                self._list, self._pieces = bytes(data), pieces
            elif not self._pieces[index].check(data):
                return self._note_damage()
            else:
                try:
                    self._spool.put(index, data)
                except OSError as error:
                    self.refuse(str(error))
                    return True
            with self._changed:
                self._next += 1
                self._changed.notify_all()
            return True

    def _note_damage(self) -> bool:
        self._damaged += 1
        if self._damaged >= _MAX_DAMAGED:
            self.refuse("the environment came damaged: its checksum is another")
        return False

    def length_of(self, index: int) -> int:
        """Return how many bytes the list or a piece has."""
        if index == LIST:
            return self.needs.num_pieces * LISTED.size
        return self._pieces[index].length

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        """Take what the host before brings; another that comes later takes its place."""
        with connection, contextlib.suppress(OSError, *hops.REFUSED):
            hops.greet(connection, self.secret)
            self.supersede(connection)
            hops.receive(connection, self)

    def supersede(self, source: socket.socket | None) -> None:
        """Hear nobody else than this one; None for the client."""
        with self._changed:
            before, self._source = self._source, source
        if before is not None:
            with contextlib.suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)

    # It goes on.

    def pass_on(self, addresses: tuple[str, ...], port: int, failed: Callable[[str], None]) -> None:
        """Bring to the next host what comes, while it comes; port 0: nobody follows. `failed` hears why it can't."""
        if not port:
            self.note_onward(_NOBODY)
            return

        def bring() -> None:
            why = hops.bring(self, addresses, port)
            if why is not None and not self._is_over:
                failed(why)
            self.note_onward(_NOBODY)

        threading.Thread(target=bring, daemon=True).start()

    def piece(self, index: int, wait_s: float) -> bytes | None:
        """Return the list or a piece for the next host; None where it has not come in this time.

        Raises:
            OSError: It is gone.
        """
        self._wait_for(index, wait_s)
        if self._is_over:
            raise OSError("the environment has not come whole")
        if self._next <= index:
            return None
        data = self._list if index == LIST else self._spool.get(index)
        if data is None:
            raise OSError("what it lacks is no longer kept here")
        return data

    def _wait_for(self, index: int, limit_s: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._next > index or self._is_over, limit_s)

    def note_onward(self, index: int) -> None:
        """Note that the next host wants nothing before this piece."""
        with self._changed:
            self._onward = index
        self._forget()

    def _forget(self) -> None:
        self._spool.forget(min(self._unpacked, self._onward))

    # It is unpacked.

    def _unpack(self) -> None:
        why = None
        try:
            for index in range(self.needs.num_pieces):
                self._wait_for(index)
                data = self._spool.get(index)
                if data is None:
                    return  # it was given up
                self._unpacking.feed(self._pieces[index].content(data))
                self._unpacked = index + 1
                self._forget()
            self._unpacking.finish()
        except MusterError as error:
            why = f"{error.what}: {error.why}"
        except (OSError, ValueError) as error:
            why = str(error)
        finally:
            self._unpacking.close()
        if why is None:
            self._done(None)
        else:
            self.refuse(why)

    def refuse(self, why: str) -> None:
        """Give it up, and say why."""
        with self._changed:
            was_over, self._is_over = self._is_over, True
            self._changed.notify_all()
        if not was_over:
            self._done(why)
        self.close()

    def close(self, patience_s: float = 0.0) -> None:
        """Give up what has not come; wait so long until what there is of it is removed."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listening.shutdown(
                socket.SHUT_RDWR
            )  # who waits in `accept` does not hear a close
        self._listening.close()
        self.supersede(None)
        self._spool.close()
        if patience_s:
            self._unpacks.join(patience_s)
