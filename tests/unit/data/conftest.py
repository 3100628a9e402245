"""Places for tests: in memory, on the disk, and one that fails as it is told to."""

import threading

import pytest

pytest.importorskip("fsspec")


class Flaky:
    """A place whose first requests of one kind fail; the seam that tests fake a bad store with."""

    def __init__(self, inner, **failures):
        self._inner, self.url = inner, inner.url
        self._failures = {kind: list(errors) for kind, errors in failures.items()}
        self._lock = threading.Lock()

    def __getattr__(self, kind):
        def ask(*words, **options):
            with self._lock:
                error = self._failures[kind].pop(0) if self._failures.get(kind) else None
            if error is not None:
                raise error
            return getattr(self._inner, kind)(*words, **options)

        return ask


@pytest.fixture(params=["memory", "disk"])
def place_url(request, tmp_path):
    if request.param == "disk":
        yield str(tmp_path / "place")
        return
    import fsspec

    yield "memory://test/place"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "folder"
    (path / "deep").mkdir(parents=True)
    (path / "a.txt").write_bytes(b"a")
    (path / "deep/run.sh").write_bytes(b"#!/bin/sh\n")
    (path / "deep/run.sh").chmod(0o755)
    (path / "empty").write_bytes(b"")
    return path


@pytest.fixture
def tree():
    def read(path):
        return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}

    return read


@pytest.fixture
def flaky():
    return Flaky
