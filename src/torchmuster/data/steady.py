"""A place whose every request is tried again after failures that may pass."""

from torchmuster.data import copying
from torchmuster.data.faults import retrying
from torchmuster.data.place import Entry, FileChangedError, Store
from torchmuster.plainfile import open_plain


class SteadyPlace:
    """Asks another place, several times if need be; its errors are all DataErrors."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url

    def check(self) -> None:
        """Raise when the place can't be read."""
        retrying(self.inner.check, self.url)

    def stat(self, name: str = "") -> Entry | None:
        """Return a file, or None when there is none of that name."""
        return retrying(lambda: self.inner.stat(name), self._where(name))

    def entries(self, below: str = "") -> list[Entry]:
        """Return all files below, sorted by name."""
        return retrying(lambda: self.inner.entries(below), self._where(below))

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes of a file."""
        return retrying(lambda: self.inner.read(name, begin, end), self._where(name))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, over an older one."""
        retrying(lambda: self.inner.write(name, data), self._where(name))

    def create(self, name: str, data: bytes) -> bool | None:
        """Write a small file if none is there; `data` must be unlike what others write."""

        def work() -> bool | None:
            created = self.inner.create(name, data)
            # A create whose answer was lost reads as taken, by ourselves.
            if created is False and self.inner.stat(name) is not None:
                return self.inner.read(name) == data
            return created

        return retrying(work, self._where(name))

    def put(self, source: str, name: str, *, sha256: str | None = None) -> copying.Digests:
        """Send a local file; one that is missing or was changed meanwhile is not tried again."""

        def work() -> copying.Digests | OSError | FileChangedError:
            try:
                with open_plain(source):
                    pass
            except OSError as error:
                return error  # the store can't help it
            try:
                return self.inner.put(source, name, sha256=sha256)
            except FileChangedError as error:
                return error

        done = retrying(work, self._where(name))
        if isinstance(done, BaseException):
            raise done
        return done

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        retrying(lambda: self.inner.delete(name), self._where(name))

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url
