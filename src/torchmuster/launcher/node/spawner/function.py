"""Call the function of `torchmuster.launch` in a worker, and leave what it returns where the client finds it.

Nothing is unpickled but the call file whose hash the agent has from the plan of the run. The value becomes a file beside the
rank's log; its hash goes to the agent, and from there on the authenticated channel into the record of the run.
"""

import atexit
import contextlib
import gc
import hashlib
import io
import linecache
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import contract
from torchmuster.core.net import ipc
from torchmuster.core.plainfile import open_own, write_all
from torchmuster.launcher.model import carried

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def call(sha256: str, socket_path: str) -> None:
    """Call the function of this run, and keep its value.

    Raises:
        CarryError: The call can't be read here, or its value can't travel.
    """
    head, pickled = _read(_run_dir().call, sha256)
    _check_interpreter(head)
    sys.path[1:1] = [path for one in head.paths if (path := os.path.abspath(one)) not in sys.path]
    for name, text in head.sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    function, args, kwargs, *members = carried.unpack(
        pickled, lambda module: _missing(head, module)
    )
    if members:
        kwargs = {**kwargs, **members[0][int(os.environ[contract.MEMBER_VARIABLE])]}
    value = function(*args, **kwargs)
    _print_metric(value)
    data = carried.pack_value(value, f"what `{head.name}` returned", "value")
    _keep(data, socket_path)


def _print_metric(value: Any) -> None:
    """Print a sweep's metric if the function returned it: as a number, or by name in a mapping."""
    name = os.environ.get(contract.METRIC_VARIABLE)
    if name is None or os.environ["RANK"] != "0":
        return
    found: Any = value.get(name) if isinstance(value, Mapping) else value
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # it is no number
        if not isinstance(found, str | bytes):
            print(f"{name}={float(found)!r}", flush=True)


def leave() -> None:
    """End this worker as multiprocessing ends its children.

    It waits for threads, runs exit handlers and flushes open files. To tear down an interpreter
    with torch would take each rank 0.2 s of CPU time, at once on all ranks of a node.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
    finally:
        # What was imported before the fork is frozen, and not among these.
        opened = [one for one in gc.get_objects() if type(one) in _WRITERS]
        for writer in (*opened, sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                writer.flush()
        os._exit(0)


def _read(path: str, sha256: str) -> tuple[carried.CallHead, bytes]:
    try:
        with open_own(path) as file:
            data = file.read(carried.MAX_CALL_BYTES + (2 << 20))
    except OSError as error:
        raise carried.CarryError(
            "the call file can't be read", where=path, why=str(error)
        ) from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise carried.CarryError(
            "the call file is not the one of this run",
            where=path,
            why="its hash is not that in the plan, so nothing of it was unpickled",
            fix="launch the function again",
        )
    return carried.split_call(data)


def _check_interpreter(head: carried.CallHead) -> None:
    if head.python != carried.own_python():
        raise carried.CarryError(
            f"`{head.name}` was sent by Python {head.python}, the job's interpreter is Python {carried.own_python()}",
            where=sys.executable,
            why="functions and values are pickled, and pickles fit the same minor version only",
            fix="python=PATH names an interpreter of the client's version; a script needs no such thing",
        )
    if not head.cloudpickle:
        return
    try:
        import cloudpickle  # before the pickle, whose own error would say less
    except ImportError:
        raise carried.CarryError(
            f"`{head.name}` travels by value, and the job's interpreter has no cloudpickle",
            where=sys.executable,
            fix=f"{sys.executable} -m pip install cloudpickle=={head.cloudpickle}, or move the function into a module",
        ) from None
    own = str(getattr(cloudpickle, "__version__", ""))
    if own.partition(".")[0] != head.cloudpickle.partition(".")[0]:
        raise carried.CarryError(
            f"`{head.name}` was pickled by cloudpickle {head.cloudpickle}, the job's interpreter has {own}",
            where=sys.executable,
            why="what it pickles names its own functions, which other major versions call otherwise",
            fix=f"{sys.executable} -m pip install cloudpickle=={head.cloudpickle}, or move the function into a module",
        )


def _missing(head: carried.CallHead, module: str) -> carried.CarryError:
    return carried.CarryError(
        f"`{head.name}` needs the module `{module}`, which the job's interpreter does not find",
        where=sys.executable,
        why=f"it looks in {', '.join(path for path in sys.path[:4] if path)}, ...",
        fix="install it there, or keep it in the folder of your code, which travels",
    )


def _keep(data: bytes, socket_path: str) -> None:
    rank, attempt = int(os.environ["RANK"]), int(os.environ[contract.ATTEMPT_VARIABLE])
    path = _run_dir().rank_value(attempt, rank)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)
    sha256 = hashlib.sha256(data).hexdigest()
    note = ipc.ValueKept(size_bytes=len(data), sha256=sha256, python=carried.own_python())
    ipc.tell(socket_path, note)


def _run_dir() -> RunDir:
    return RunDir(os.environ[contract.RUN_DIR_VARIABLE])
