"""Run the user's program in this process as a freshly started interpreter would.

The same code serves a forked worker and a fresh one. `docs/workers.md` lists all differences from
`python SCRIPT`; any other one is a defect.
"""

import contextlib
import importlib.machinery
import io
import json
import os
import pkgutil
import re
import runpy
import sys
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from typing import Any

from torchmuster.core import plugs
from torchmuster.core.node.spawner import last_words
from torchmuster.core.node.spawner.last_words import CodeNote, Debugging, strip_own_frames

TASK_VARIABLE = "TORCHMUSTER_TASK"


# The first that is a number above 0 counts. Source: OpenBLAS, driver/others/openblas_env.c and
# memory.c, `blas_get_cpu_number`.
_BLAS_VARIABLES = tuple(
    f"{prefix}_NUM_THREADS" for prefix in ("OPENBLAS", "OPENBLAS_DEFAULT", "GOTO", "OMP")
)
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """What a worker runs: plain values, so that a fresh interpreter can get it as JSON."""

    kind: str
    target: str
    args: list[str]
    socket_path: str
    forked: bool
    imports_torch: bool = False
    call_sha256: str = ""
    renew: Callable[[], None] | None = None  # makes again what the imports before the fork made


def task_from_environment() -> WorkerTask:
    """Return the task that the spawner left for a fresh interpreter, and remove it."""
    task = WorkerTask(**json.loads(os.environ.pop(TASK_VARIABLE)))
    behind = sys.argv.index("--") + (3 if task.kind == "module" else 2)
    return replace(task, args=sys.argv[behind:])


def task_to_environment(task: WorkerTask) -> str:
    """Return the task as the text that `task_from_environment` reads."""
    plain = asdict(replace(task, args=[]))  # a variable may have 128 KiB
    del plain["renew"]  # a function of this process; the reader may be of another version
    return json.dumps(plain)


def run(task: WorkerTask, at_start: Collection[str]) -> None:
    """Run the program, and end in the interpreter's usual way.

    Args:
        task: What to run.
        at_start: The modules that the interpreter had before it imported our code.
    """
    other = plugs.find("script_kinds", task.kind)  # while our own modules are here
    if other is not None:
        last_words.OWN_FOLDERS.add(os.path.dirname(other.__file__))
    _forget_ourselves()
    folder = first_path(task.kind, task.target)
    _uncover(folder, at_start)
    if task.forked:
        _renew_streams()
        _renew_identity()
        _reseed()
        _restore_blas_threads()
        if task.renew is not None:
            task.renew()
    _line_buffer_stdout()
    last_words.notice_the_debugger(task.socket_path)
    last_words.write_stacks_on_signal(task.socket_path)
    watch = last_words.GroupWatch(forked=task.forked, imports_torch=task.imports_torch)
    pid = os.getpid()
    debugging = Debugging(task.socket_path, os.environ)
    note = CodeNote(folder)
    try:
        debugging.before_script()
        if folder is not None:
            sys.path.insert(0, folder)
        if other is not None:
            _run_other(task, other)
        elif task.kind == "module":
            _run_module(task)
        else:
            _run_file(task, folder, note)
    except SystemExit as error:
        if os.getpid() == pid:
            if error.code in (None, 0):
                last_words.tell_at_exit(task.socket_path, watch, note)
            else:
                last_words.report(task.socket_path, error, note)
        raise
    except BaseException as error:
        if os.getpid() == pid:  # not in the script's own forks
            debugging.post_mortem(error)
            last_words.report(task.socket_path, error, note)
        _hide_own_frames()
        raise  # the interpreter prints it, and dies by SIGINT after a KeyboardInterrupt
    if os.getpid() == pid:
        last_words.tell_at_exit(task.socket_path, watch, note)
        if other is not None:
            other.leave()


def hidden_modules(folder: str | None, at_start: Collection[str]) -> list[str]:
    """Return Python's own modules that files in the script's folder hide.

    Args:
        folder: The folder in front of `sys.path`.
        at_start: The modules that every interpreter has from its start: these can't be hidden.
    """
    try:
        entries = os.listdir(folder) if folder is not None else []
    except OSError:
        return []
    own = sys.stdlib_module_names.difference(at_start, sys.builtin_module_names)
    return sorted({name for entry in entries if (name := _module_name(folder, entry)) in own})


def _module_name(folder: str | None, entry: str) -> str:
    for suffix in importlib.machinery.all_suffixes():
        if entry.endswith(suffix):
            return entry.removesuffix(suffix)
    return entry if os.path.isfile(os.path.join(folder or "", entry, "__init__.py")) else ""


def first_path(kind: str, target: str) -> str | None:
    """Return what CPython puts in front of `sys.path` for a program; None if nothing.

    Source: Python/pathconfig.c, `_PyPathConfig_ComputeSysPath0`; Modules/main.c,
    `pymain_run_python`.
    """
    if kind == "file" and pkgutil.get_importer(target) is not None:
        return _absolute(target)  # a zip file
    if sys.flags.safe_path or kind == "command":
        return None
    in_folder = kind in ("module", "function")
    return os.getcwd() if in_folder else os.path.dirname(os.path.realpath(target))


def _run_file(task: WorkerTask, folder: str | None, note: CodeNote) -> None:
    _set_argv([task.target, *task.args], [task.target, *task.args])
    path = _absolute(task.target)
    if folder == path:
        _new_main_module()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    compiled = path.endswith(".pyc")
    loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", path)
    main = _new_main_module(__file__=path, __cached__=None, __loader__=loader)
    try:
        with io.open_code(path) as source:
            text = source.read()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: {why}\n")
        raise SystemExit(2) from None
    note.take_script(path, text)
    code: Any = (
        loader.get_code("__main__") if compiled else compile(text, path, "exec", dont_inherit=True)
    )
    exec(code, main.__dict__)


def _absolute(path: str) -> str:
    """Return the absolute path as CPython does: dots and links stay (`_Py_abspath`)."""
    return os.path.join(os.getcwd(), path)


def _run_module(task: WorkerTask) -> None:
    _set_argv(["-m", *task.args], ["-m", task.target, *task.args])
    _new_main_module()
    runpy._run_module_as_main(task.target)  # type: ignore[attr-defined]  # what `python -m` calls


def _run_other(task: WorkerTask, other: Any) -> None:
    _set_argv([task.target], [task.target])
    _new_main_module()
    other.call(task.call_sha256, task.socket_path)


def _set_argv(argv: list[str], original: list[str]) -> None:
    """Remove our own arguments from the command line; the interpreter and its flags stay."""
    num_flags = len(sys.orig_argv) - len(sys.argv)
    sys.orig_argv = [*sys.orig_argv[:num_flags], *original]
    sys.argv = argv


def _new_main_module(**values: Any) -> types.ModuleType:
    """Replace our `__main__` by an empty one, with the names that CPython gave ours."""
    ours = sys.modules["__main__"]
    _kept.append(ours)
    values = {"__name__": "__main__", "__annotations__": {}, **values}
    values.setdefault("__loader__", sys.modules["builtins"].__loader__)
    values["__builtins__"] = ours.__dict__["__builtins__"]
    if "__file__" not in values:  # runpy sets these two
        names = [n for n in ours.__dict__ if n not in ("__file__", "__cached__")]
    else:
        names = list(ours.__dict__)
    main = types.ModuleType("__main__")
    main.__dict__.clear()
    main.__dict__.update({n: values.get(n) for n in names if n.startswith("__")})
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing's other name for it
        sys.modules["__mp_main__"] = main
    return main


_kept: list[Any] = []  # modules that the script must not see, but whose code still runs


def _forget_ourselves() -> None:
    """Let the script import its own environment's torchmuster, not the agent's copy."""
    _kept.extend(_take_out_torchmuster().values())
    if imported_for_the_job:
        sys.meta_path.insert(0, _ImportedFinder())


def _take_out_torchmuster() -> dict[str, types.ModuleType]:
    own = [n for n in sys.modules if n == "torchmuster" or n.startswith("torchmuster.")]
    return {name: sys.modules.pop(name) for name in own}


# The job's own torchmuster, if it was imported before the fork.
imported_for_the_job: dict[str, types.ModuleType] = {}


@contextlib.contextmanager
def torchmuster_of_the_job() -> Iterator[None]:
    """Let imports find the job's torchmuster, and keep it apart from ours."""
    ours = _take_out_torchmuster()
    sys.modules.update(imported_for_the_job)
    try:
        yield
    finally:
        imported_for_the_job.update(_take_out_torchmuster())
        sys.modules.update(ours)


class _ImportedFinder:
    """Gives the script the torchmuster imported before the fork, if `sys.path` leads to it."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name != "torchmuster":
            return None
        found = PathFinder.find_spec(name)
        before = getattr(imported_for_the_job[name], "__file__", None)
        if found is None or found.origin is None or found.origin != before:
            return None
        found.loader = self  # type: ignore[assignment]
        return found

    def create_module(self, _spec: ModuleSpec) -> None:
        """Let the import make an empty module, which the imported one then replaces."""

    def exec_module(self, _module: types.ModuleType) -> None:
        sys.meta_path.remove(self)
        sys.modules.update(imported_for_the_job)


def _uncover(folder: str | None, at_start: Collection[str]) -> None:
    """Remove Python's modules that the script's own files hide, so that it can import those."""
    names = hidden_modules(folder, at_start)
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if not path.startswith(f"{folder}{os.sep}"):
            _kept.append(sys.modules.pop(name))


def _renew_streams() -> None:
    """Initialise the standard streams again, for this process's own descriptors.

    They were made in the spawner for other descriptors, whose properties, such as seeking, they
    keep. The objects stay, because imported modules (such as logging handlers) hold them.

    Source: CPython, Python/pylifecycle.c, `create_stdio`.
    """
    streams = ((sys.__stdin__, "r"), (sys.__stdout__, "w"), (sys.__stderr__, "w"))
    for fd, (stream, mode) in enumerate(streams):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        unbuffered = stream.write_through
        size = 0 if unbuffered and mode == "w" else -1
        buffer: Any = open(fd, f"{mode}b", buffering=size, closefd=False)  # noqa: SIM115 - it stays
        raw = getattr(buffer, "raw", buffer)
        raw.name = stream.name
        stream.__init__(  # type: ignore[misc]
            buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=not unbuffered and (raw.isatty() or fd == 2),
            write_through=unbuffered,
        )
        stream.mode = mode  # type: ignore[misc]


def _line_buffer_stdout() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=True)


def _renew_identity() -> None:
    """Correct what imported modules recorded about the process that imported them."""
    threading = sys.modules.get("threading")
    if threading is not None and hasattr(threading.Thread, "_set_native_id"):
        threading.main_thread()._set_native_id()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    logging: Any = sys.modules.get("logging")
    if logging is not None:  # nanoseconds from Python 3.13 on
        in_ns = isinstance(logging._startTime, int)
        logging._startTime = time.time_ns() if in_ns else time.time()


def _reseed() -> None:
    """Give this process its own random states, as a fresh interpreter has.

    Otherwise forked workers would draw the same numbers on all ranks, and again after each restart.
    The `random` module reseeds itself after a fork (`os.register_at_fork` in Lib/random.py).
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _restore_blas_threads() -> None:
    """Give OpenBLAS as many threads as a fresh interpreter would have.

    The spawner loads it with one thread, to stay single-threaded itself.
    """
    num_threads = blas_threads(os.environ, len(os.sched_getaffinity(0)))
    if num_threads == 1:
        return
    import ctypes

    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "openblas" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for prefix in ("", "scipy_"):
            for suffix in ("", "64_", "_64"):
                setter = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
                if setter is not None:
                    setter(ctypes.c_int(num_threads))


def blas_threads(environment: Mapping[str, str], num_cpus: int) -> int:
    """Return how many threads OpenBLAS would start when it is loaded."""
    for name in _BLAS_VARIABLES:
        found = re.match(r"\s*\+?(\d+)", environment.get(name, ""))  # what C's atoi reads
        if found is not None and int(found[1]) > 0:
            return min(int(found[1]), num_cpus)
    return num_cpus


# What ended the program.


def _hide_own_frames() -> None:
    """Let the exception hook see the traceback only from the user's first frame on."""
    hook: Any = getattr(sys, "excepthook", _MISSING)

    def once(kind: type[BaseException], error: BaseException, _: object) -> None:
        trace = strip_own_frames(error)
        error.__traceback__ = sys.last_traceback = trace
        if hook is _MISSING:
            del sys.excepthook
            sys.stderr.write("sys.excepthook is missing\n")
            sys.__excepthook__(kind, error, trace)
            return
        sys.excepthook = hook
        try:
            hook(kind, error, trace)
        except SystemExit:
            raise
        except BaseException as second:  # noqa: BLE001 - as CPython, Python/pythonrun.c
            second.__traceback__ = strip_own_frames(second)
            sys.stderr.write("Error in sys.excepthook:\n")
            sys.__excepthook__(type(second), second, second.__traceback__)
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = once
