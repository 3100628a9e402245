"""Stores for tests: in memory, on the disk, and one that fails as it is told to."""

import functools
import threading

import pytest

pytest.importorskip("fsspec")


def altered(store, **requests):
    """Return a store whose requests are answered by `request(ask, ...)`; `ask` asks the real one."""
    for kind, request in requests.items():
        ask = getattr(store, f"_{kind}")
        setattr(store, f"_{kind}", functools.partial(request, ask))
    return store


def flaky(store, **failures):
    """Return a store whose first requests of some kinds fail; the seam that tests fake a bad one with."""
    lock = threading.Lock()

    def failing(errors, ask, *words):
        with lock:
            error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        return ask(*words)

    requests = {kind: functools.partial(failing, list(errors)) for kind, errors in failures.items()}
    return altered(store, **requests)


@pytest.fixture(params=["memory", "disk"])
def store_url(request, tmp_path):
    if request.param == "disk":
        yield str(tmp_path / "store")
        return
    import fsspec

    yield "memory://test/store"
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


@pytest.fixture(name="flaky")
def _flaky():
    return flaky


@pytest.fixture(name="altered")
def _altered():
    return altered
