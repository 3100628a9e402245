"""Imports torch in the spawner unless workers need fresh interpreters, and says why they do."""

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torchmuster.core import plugs
from torchmuster.core.model.plan import look_for_torch
from torchmuster.core.node.spawner import last_words, mainmodule, messages
from torchmuster.core.node.spawner.script import EarlyImports, read_script

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"  # overrides OMP_NUM_THREADS
_NO_THREADS = {_BLAS_THREADS: "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Not torch._dynamo, though every optimizer imports it: it imports torch.distributed.nn, here before
# the process group exists. torch 2.13 then deadlocks when a script ends with its DDP model alive
# (the Gloo group's destructor joins a thread that waits for the GIL). Seen in the DDP tutorial.
_TORCH_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.data.distributed",
)

_LIBRARY = "torchmuster.train"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a spawner can do.

    Attributes:
        forks: Workers are forks of it; otherwise fresh interpreters.
        imports_torch: The script imports torch.
        first: The script's first imports, which the spawner has made.
    """

    forks: bool
    imports_torch: bool
    first: EarlyImports | None = None


def prepare(
    config: messages.BeginSpawner,
    at_start: Collection[str],
    send: Callable[[messages.SpawnerEvent], None],
) -> Prepared:
    """Make the imports, and tell the agent what this interpreter has and can do."""
    # Send this a second before torch is ready: the nodes are compared during its import.
    found = look_for_torch() if config.kind != "command" else {}
    send(messages.TorchFound(facts=found))
    missing = last_words.what_is_missing(os.environ)
    if missing is not None:
        send(messages.InterpreterRefused(why=missing))
        return Prepared(False, False)
    script = read_script(config, at_start)
    why = "asked for" if config.kind == "command" or config.start == "fresh" else None
    if why is None and config.start != "fork":
        why = script.reason_for_fresh()
    torch_version: str | None = None
    first: EarlyImports | None = None
    if why is None:
        # Files next to the script may hide a module, from torch as from the script.
        folder = mainmodule.first_path(config.kind, config.target)
        for_calls = config.kind == "function"
        first = script.early_imports(folder)
        torch_version, problem = import_for_workers(
            folder,
            config.preload,
            has_torch=config.has_torch,
            has_library=script.imports_library,
            for_calls=for_calls,
            first=functools.partial(first.make, [config.target, *config.args]) if first else None,
        )
        if problem is not None:
            hint = f"rename {_in_the_way}" if _in_the_way else None
            send(messages.InterpreterRefused(why=problem, hint=hint))
            return Prepared(False, script.imports_torch)
        if first is not None and first.stopped is not None and first.is_spoilt:
            send(first.stopped)
            os._exit(0)  # no exit handler of an imported module may run
        why = reason_not_to_fork()
    elif config.kind != "command":
        # The package's metadata has the same but takes longer than everything else here.
        torch_version = found.get("torch") or _installed_version("torch")
    is_news = config.start != "fresh" and config.kind != "command"
    python = sys.version.split()[0]
    left = first.stopped if first is not None else None
    ready = messages.InterpreterReady(
        python=python,
        torch=torch_version,
        forks=why is None,
        why=why if is_news else None,
        imports_why=left.why if left is not None else "",
    )
    send(ready)
    return Prepared(ready.forks, script.imports_torch, first if ready.forks else None)


def import_for_workers(
    folder: str | None,
    preload: tuple[str, ...],
    *,
    has_torch: bool = True,
    has_library: bool = False,
    for_calls: bool = False,
    first: Callable[[], None] | None = None,
) -> tuple[str | None, str | None]:
    """Import torch, the user's preloads and our library; return torch's version and a problem.

    Args:
        folder: Where to look first.
        preload: The modules that the user named.
        has_torch: The workers need torch.
        has_library: The script imports our library.
        for_calls: The workers call pickled functions.
        first: Makes the imports that the script begins with.
    """
    own = {name: os.environ.get(name) for name in _NO_THREADS}
    # At their import, numpy would start its threads and pyarrow's allocator one.
    os.environ |= {
        name: value
        for name, value in _NO_THREADS.items()
        if name == _BLAS_THREADS or own[name] is None
    }
    gc.disable()
    sys.path[:0] = [folder] if folder is not None else []
    if for_calls:
        plugs.find("script_kinds", "function")  # once for all workers
        _import_for_calls()
    try:
        with mainmodule.torchmuster_of_the_job():
            problem = _import_torch(folder) if has_torch else None
            problem = problem or _import_named(preload)
            if has_torch and has_library:
                with contextlib.suppress(Exception):  # the script reports it itself
                    importlib.import_module(_LIBRARY)
            if first is not None and problem is None and reason_not_to_fork() is None:
                first()
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
        flush_everything()
    if problem is not None:
        return None, problem
    for name, value in own.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    tempfile.tempdir = None  # a script may still set TMPDIR
    gc.enable()
    gc.freeze()  # a collection in a worker must not touch, and so copy, shared memory
    torch = sys.modules.get("torch")
    version = getattr(torch, "__version__", None)
    if version is not None and _version_tuple(version) < (2, 6):
        return version, f"the job's interpreter has torch {version}; muster needs 2.6 or newer"
    return version, None


_in_the_way = ""  # a file in the script's folder that torch's import took for a module


def _import_torch(folder: str | None = None) -> str | None:
    """Import torch; return what went wrong, if anything. A job without torch is allowed."""
    global _in_the_way
    try:
        for name in _TORCH_MODULES:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return None
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        ran = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        ran += [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
        _in_the_way = next((path for path in ran if folder and os.path.dirname(path) == folder), "")
        by = f": {_in_the_way} has the name of a module that it needs" if _in_the_way else ""
        return f"`import torch` failed{by}: {kind}{error}"
    return None


def _import_for_calls() -> None:
    """Import what unpickles functions sent by value; a module's function doesn't need it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("cloudpickle")


def _import_named(names: tuple[str, ...]) -> str | None:
    with _noting_cuda():
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - a module may raise anything
                return f"--preload {name}: {type(error).__name__}: {error}"
    return None


_cuda_line = ""  # where an import first asked for a GPU


@contextlib.contextmanager
def _noting_cuda() -> Iterator[None]:
    """Record the first line outside of torch that makes torch use CUDA or query its devices."""
    cuda = sys.modules.get("torch.cuda")
    names = [name for name in ("_lazy_init", "is_available", "device_count") if hasattr(cuda, name)]
    originals = {name: getattr(cuda, name) for name in names}

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def noted(*args: Any, **options: Any) -> Any:
            global _cuda_line
            _cuda_line = _cuda_line or _line_outside_of_torch(sys._getframe(1))
            return original(*args, **options)

        return noted

    for name, original in originals.items():
        setattr(cuda, name, noting(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            if getattr(getattr(cuda, name), "__wrapped__", None) is original:
                setattr(cuda, name, original)


def _line_outside_of_torch(frame: FrameType | None) -> str:
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "torch":
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""


def flush_everything() -> None:
    """Flush what the imports printed; otherwise every worker would print it again."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _version_tuple(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _installed_version(name: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def reason_not_to_fork() -> str | None:
    """Return why this process must not fork; None if it may."""
    by = f", at {_cuda_line}" if _cuda_line else ""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():  # before the threads, which CUDA started
        return f"the imports initialised CUDA in the spawner{by}"
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri/")):
            return f"the imports opened {target} in the spawner{by}"
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        more = "a second thread" if num_threads == 2 else f"{num_threads - 1} more threads"
        return f"the imports started {more} in the spawner"
    return None
