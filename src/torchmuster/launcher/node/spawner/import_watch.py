"""Makes a script's first imports in the spawner, and refuses what each worker must do itself.

An import must have the same effect here as in each worker. Anything else ends this process, and the
workers import as usual: a thread, a child, a device, a file, a connection, output, a changed signal
handler, a random value, a value read from what differs between ranks. A few such values are known,
with nothing derived from them: each worker makes them again.

What C code does at its import is only seen afterwards: the threads, descriptors and children that
it leaves.
"""

import ast
import contextlib
import datetime as dt
import functools
import gc
import hashlib
import importlib.machinery
import inspect
import io
import json
import os
import random
import re
import signal
import socket
import subprocess  # noqa: TID251 - to refuse it
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from types import FrameType
from typing import Any, NoReturn

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.node.spawner.messages import ImportsRefused
from torchmuster.core.node.spawner.serve import EarlyImports

# What requires a separate interpreter for each rank.
#
# A file next to the script with the name of a module of Python's hides it, from torch as from the
# script: in the spawner, one of the two would get the wrong module. And code that Python runs at
# its start (sitecustomize, `.pth` files) has run in the spawner before there was a rank to read.


RANK = re.compile(
    r"\b(?:(?:LOCAL_|GROUP_|ROLE_)?RANK|(?:LOCAL_|GROUP_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)"
    r"|TORCHELASTIC_\w+|TORCHMUSTER_\w+|SLURM_(?:PROCID|LOCALID)|(?:PMI|PMIX|OMPI_COMM_WORLD)_RANK)\b"
)
_IMPORT = re.compile(r"^import[ \t]+([A-Za-z_]\w*)")
_REFUSES = re.compile(
    r"""^[ \t]*if[ \t(]+["']torch["'][ \t]+in[ \t]+sys\.modules\b[^\n]*:\s*(?:#[^\n]*\n\s*)*raise\b""",
    re.MULTILINE,
)
_FEW_FILES = 24
_MAX_BYTES = 1 << 20


def refuses_torch(imported: Collection[str], folder: str | None) -> str | None:
    """Return which imported package raises an error if torch was imported before it; else None.

    The package's files show it, as those of Isaac Gym do. All files of its folder are read if they
    are few, else only `__init__.py`.
    """
    paths = [*([folder] if folder is not None else []), *sys.path]
    for name in sorted({name.partition(".")[0] for name in imported} - sys.stdlib_module_names):
        spec = importlib.machinery.PathFinder.find_spec(name, paths) if name != "torch" else None
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            with contextlib.suppress(OSError):
                files = [entry for entry in os.listdir(place) if entry.endswith(".py")]
                files = files if len(files) <= _FEW_FILES else ["__init__.py"]
                if any(_REFUSES.search(_read(os.path.join(place, file))) for file in files):
                    return name
    return None


def start_code_with_rank() -> str | None:
    """Return a file that Python ran at its start and that reads a worker's variables, or None."""
    return next((path for path, text in _start_code() if RANK.search(text)), None)


def _start_code() -> Iterator[tuple[str, str]]:
    for name in ("sitecustomize", "usercustomize"):
        yield from _module_text(name)
    if sys.flags.no_site:
        return
    import site

    folders = site.getsitepackages()
    folders += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    for folder in folders:
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".pth"))
        except OSError:
            continue
        for name in names:
            yield from _pth_texts(os.path.join(folder, name))


def _pth_texts(path: str) -> Iterator[tuple[str, str]]:
    """Yield the code lines of a .pth file, and the modules that they import."""
    lines = [line for line in _read(path).splitlines() if line.startswith(("import ", "import\t"))]
    yield path, "\n".join(lines)
    for line in lines:
        found = _IMPORT.match(line)
        if found is not None and found[1] not in sys.stdlib_module_names:
            yield from _module_text(found[1])


def _module_text(name: str) -> Iterator[tuple[str, str]]:
    path = getattr(sys.modules.get(name), "__file__", None)
    if isinstance(path, str) and path.endswith(".py"):
        yield path, _read(path)


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


_OF_WORKERS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
# Modules that search all variables for a prefix, which no variable that differs between ranks has.
_SEARCHES = {
    "fsspec.config": "FSSPEC_",
    "networkx.utils.backends": "NETWORKX_",
    "numba.core.config": "NUMBA_",
    "tqdm.utils": "TQDM_",
}
MOST_WHY = 200
# Values that differ between workers, are made by one assignment, and from which the import derives
# nothing.
RENEWED = frozenset(
    {
        ("lightning.fabric.utilities.rank_zero", "rank_zero_only"),
        ("lightning_fabric.utilities.rank_zero", "rank_zero_only"),
        ("rich.style", "_id_generator"),
        ("sympy.core.symbol", "Dummy"),
        ("torchmetrics.utilities.prints", "rank_zero_only"),
        ("transformers.utils.hub", "SESSION_ID"),
    }
)
_OF_MAPPINGS = ("os", "collections.abc", "_collections_abc")
_CHANGE_FILES = (
    *("rename", "replace", "rmdir", "symlink", "link", "truncate", "chmod", "remove"),
    "unlink",
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri")
_ENVIRON = type(os.environ)


class RefusedError(BaseException):
    """An import does what only a worker may do.

    It is no `Exception`, so that the import's own handlers don't catch it.
    """


@dataclass(frozen=True, slots=True)
class Renewal:
    """An assignment in a module that each worker makes again.

    Attributes:
        name: The assigned name, or the object whose attribute is removed and assigned.
        in_class: The assignment is in the body of the class `name`; `code` is its value.
    """

    module: str
    code: types.CodeType
    name: str
    attribute: str = ""
    in_class: bool = False

    def make(self) -> None:
        """Make the assignment again."""
        names = vars(sys.modules[self.module])
        if self.in_class:
            owner = names[self.name]
            setattr(owner, self.attribute, eval(self.code, names, dict(vars(owner))))
            return
        if self.attribute:
            with contextlib.suppress(AttributeError):
                delattr(names[self.name], self.attribute)
        exec(self.code, names)


@dataclass(slots=True)
class ImportWatch:
    """Watches imports while they are made.

    Attributes:
        flush: Flushes what has been printed.
        renewed: The (module, name) pairs that may be made again.
        why: What was refused, in words: this process must fork no workers.
        renewals: The assignments that each worker makes again.
        generators: Random generators seeded by the system, with their first states; None once drawn
            from.
        reads: The variables that were read, with their values.
    """

    flush: Callable[[], None]
    renewed: Collection[tuple[str, str]] = RENEWED
    why: str = ""
    renewals: list[Renewal] = field(default_factory=list)
    generators: list[tuple[random.Random, object]] = field(default_factory=list)
    reads: dict[str, str | None] = field(default_factory=dict)
    _words: str = ""
    _is_on: bool = False
    _state: object = None

    # What is refused before it happens.

    def refuse(self, what: str, frame: FrameType | None = None) -> NoReturn:
        """Record what an import does, and end it with an error.

        Args:
            what: The act, verb first.
            frame: The frame that does it.
        """
        module = _module_frame(frame)
        who = module.f_globals.get("__name__") if module is not None else self._words
        self.why = self.why or f"{who} {what}"[:MOST_WHY]
        raise RefusedError(self.why)

    @contextlib.contextmanager
    def watching(self, words: str) -> Iterator[None]:
        """Watch the imports of a statement, whose source is `words`.

        Raises:
            RefusedError: They must happen in each worker; `why` says for what.
        """
        self._words, before = words, _Traces.now()
        replaced = [self._replace(owner, name, made) for owner, name, made in self._guards()]
        self._state = random.getstate()
        os.environ.__class__ = _watched(self)
        self._is_on = True
        try:
            with captured(self.flush) as output:
                yield
            self._is_on = False
            if output:
                self.refuse(f"prints {output[0][:100]!r}")
            self._compare(before)
        finally:
            self._is_on = False
            os.environ.__class__ = _ENVIRON
            for owner, name, is_own, original, guard in replaced:
                if vars(owner).get(name) is guard:
                    setattr(owner, name, original) if is_own else delattr(owner, name)
            _give_back({id(guard): original for *_, original, guard in replaced}, before.modules)

    def _replace(self, owner: Any, name: str, made: Callable[..., Any]) -> tuple[Any, ...]:
        original, is_own = getattr(owner, name), name in vars(owner)

        def guard(*args: Any, **options: Any) -> Any:
            later = made(*args, **options) if self._is_on else None
            result = original(*args, **options)
            if later is not None:
                later()
            return result

        guard.__name__, guard.__doc__ = name, getattr(original, "__doc__", None)
        setattr(owner, name, guard)
        return owner, name, is_own, original, guard

    def _guards(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yield (owner, name, check) for each of Python's functions with an effect outside.

        The check is called before the function, and may return what to call after it.
        """

        def refusing(what: str) -> Callable[..., Any]:
            return lambda *_, **__: self.refuse(what, sys._getframe(2))

        for name in _CHANGE_FILES:
            yield os, name, self._change_files
        yield os, "mkdir", self._make_folder
        yield os, "open", self._open_descriptor
        for owner in (io, sys.modules["builtins"]):
            yield owner, "open", self._open
        for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "execv", "execve"):
            yield os, name, refusing("starts another process")
        yield subprocess, "_fork_exec", refusing("starts another process")
        yield threading, "_start_new_thread", refusing("starts a thread")
        yield signal, "signal", refusing("changes a signal handler")
        for name in ("connect", "connect_ex", "sendto", "listen"):
            yield socket.socket, name, refusing("opens a connection")
        yield socket.socket, "bind", self._bind
        for name in ("getaddrinfo", "gethostbyname"):
            yield socket, name, refusing("asks for an address")
        for owner, name in ((os, "urandom"), (random, "_urandom")):
            yield owner, name, lambda *_: self._renew("keeps a random value")
        for name in ("random", "getrandbits"):
            yield random, name, self._draw
            yield random.Random, name, self._draw
        yield random.Random, "seed", self._seed
        cuda = sys.modules.get("torch.cuda")
        if any(os.path.exists(path) for path in _GPU_NODES):
            for name in ("_lazy_init", "is_available", "device_count"):
                if hasattr(cuda, name):
                    yield cuda, name, refusing("asks for the GPUs")

    def _bind(self, one: socket.socket, *_: object) -> None:
        if one.family not in (socket.AF_INET, socket.AF_INET6):  # others leave nothing
            self.refuse("opens a socket", sys._getframe(2))

    def _open(self, file: object, mode: str = "r", *_: object, **__: object) -> None:
        if not set(mode) <= set("rbtU"):
            self._change_files(file)

    def _open_descriptor(self, path: object, flags: int, *_: object, **__: object) -> None:
        if flags & _WRITES:
            self._change_files(path)

    def _make_folder(self, path: Any, *_: object, **__: object) -> None:
        if not os.path.isdir(path):
            self._change_files(path)

    def _change_files(self, *given: object, **named: object) -> None:
        path = next(iter((*given, *named.values())), None)
        frame = sys._getframe(2)
        if path != os.devnull and not _leaves_nothing(frame):
            self.refuse(f"writes {path}", frame)

    # What each worker makes again.

    def _draw(self, generator: object = None, *_: object) -> None:
        if not isinstance(generator, random.Random) or generator is random._inst:
            self._state = None  # the state is about to change
        elif generator in (known := [one for one, _ in self.generators]):
            self.generators[known.index(generator)] = generator, None
        else:
            return  # its seed is the same for all workers
        self._renew("draws a random number")

    def _seed(
        self, generator: random.Random, a: object = None, **_: object
    ) -> Callable[[], None] | None:
        by = sys._getframe(3).f_globals.get("__name__")
        if a is not None or by == "tempfile" or isinstance(generator, random.SystemRandom):
            return None
        return lambda: self.generators.append((generator, generator.getstate()))

    def read(self, name: str, value: str | None) -> None:
        """Handle an import's read of one variable."""
        if not self._is_on:
            return
        search = _SEARCHES.get(_reader(sys._getframe(2)))
        if search is None or name.startswith(search):
            self.reads.setdefault(name, value)
            if is_of_a_worker(name):
                self._renew(f"reads {name}")

    def read_all(self) -> None:
        """Handle an import's iteration over all variables."""
        frame = sys._getframe(2)
        if self._is_on and _reader(frame) not in _SEARCHES:
            self.refuse("reads all environment variables", frame)

    def _renew(self, what: str) -> None:
        """Let each worker repeat the current assignment; refuse any other statement."""
        frame = _module_frame(sys._getframe(2))
        module = str(frame.f_globals.get("__name__")) if frame is not None else ""
        if module.partition(".")[0] in ("torch", "numpy"):
            return  # torch is imported here anyway; workers seed numpy again
        if frame is not None and _is_documentation(frame):
            return
        within = _class_frame(sys._getframe(2))
        renewal = _assignment(module, frame, within) if frame is not None else None
        if renewal is None or (module, renewal.name) not in self.renewed:
            self.refuse(what, frame)
        if renewal not in self.renewals:
            self.renewals.append(renewal)

    # What is seen afterwards.

    def _compare(self, before: "_Traces") -> None:
        now, new = _Traces.now(), []
        for name in now.modules - before.modules:
            module = sys.modules.get(name)
            if isinstance(module, types.ModuleType):
                new.append(module)
                self._check_origin(module)
        has_drawn = self._state is not None and random.getstate() != self._state
        if has_drawn or any(state and one.getstate() != state for one, state in self.generators):
            self.refuse("draws a random number")
        for what in ("threads", "children", "descriptors", "handlers", "shared_memory", "settings"):
            if getattr(now, what) != getattr(before, what):
                self.refuse(f"leaves other {what} behind")
        if any(now.generators[name] != state for name, state in before.generators.items()):
            self.refuse("draws a random number")
        for module in new:
            for name, value in list(_names_of(module).items()):
                if before.began(value):
                    self.refuse(f"keeps the time, as {module.__name__}.{name}")
        for renewal in self.renewals:
            if not renewal.attribute and _is_shared(renewal):
                self.refuse(
                    f"shares {renewal.module}.{renewal.name}, which differs between workers"
                )

    def _check_origin(self, module: types.ModuleType) -> None:
        names = _names_of(module)
        for place in (names.get("__file__"), *names.get("__path__", ())):
            # torch.ops and its like name no real file.
            if isinstance(place, str) and os.path.isabs(place) and not is_installed(place):
                self.refuse(f"imports {module.__name__} from {place}")


@dataclass(frozen=True, slots=True)
class _Traces:
    """The state of a process, compared before and after imports."""

    modules: frozenset[str]
    threads: int
    children: tuple[int, ...]
    descriptors: frozenset[str]
    handlers: tuple[object, ...]
    shared_memory: tuple[str, ...]
    settings: tuple[object, ...]
    generators: dict[str, object]
    times: tuple[float, float]

    @classmethod
    def now(cls) -> "_Traces":
        links = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.add(os.readlink(f"/proc/self/fd/{fd}"))
        return cls(
            modules=frozenset(sys.modules),
            threads=len(os.listdir("/proc/self/task")),
            children=tuple(proc.children_of(os.getpid())),
            descriptors=frozenset(link for link in links if not link.startswith("/proc/")),
            handlers=tuple(signal.getsignal(signum) for signum in sorted(signal.valid_signals())),
            shared_memory=_shared_memory(),
            settings=_settings(),
            generators=_generator_states(),
            times=(time.time(), time.monotonic()),
        )

    def began(self, value: object) -> bool:
        """Return whether a value is a time between this state and now."""
        if type(value) is dt.datetime:  # not isinstance: a lazy object may claim to be one
            with contextlib.suppress(ValueError, OverflowError):
                return self.times[0] <= value.timestamp() <= time.time()
            return False
        if type(value) is not float:
            return False
        wall, since_boot = self.times
        return wall <= value <= time.time() or since_boot <= value <= time.monotonic()


def _shared_memory() -> tuple[str, ...]:
    with open("/proc/self/maps") as maps:
        return tuple(line for line in maps if line.split(maxsplit=2)[1][3:] == "s")


def _settings() -> tuple[object, ...]:
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return os.getcwd(), tuple(sys.path), tuple(sys.argv), tuple(map(id, streams)), gc.isenabled()


def _names_of(module: object) -> dict[str, Any]:
    """Return a module's names without its own lookup, which would execute a lazy one."""
    if not isinstance(module, types.ModuleType):
        return {}
    names: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return names


def _generator_states() -> dict[str, object]:
    torch, numpy_random = sys.modules.get("torch"), sys.modules.get("numpy.random")
    states: dict[str, object] = {}
    if torch is not None:
        states["torch"] = bytes(torch.get_rng_state().tolist())
    if numpy_random is not None:
        states["numpy"] = (
            repr(numpy_random.get_state(legacy=False)),
            numpy_random.get_state()[1].tobytes(),
        )
    return states


def is_of_a_worker(name: str) -> bool:
    """Return whether a variable differs between the spawner and its workers, or among ranks."""
    return name in _OF_WORKERS or RANK.search(name) is not None


def is_installed(path: str) -> bool:
    """Return whether a path belongs to Python or an installed distribution, not to the user."""
    roots = _roots(tuple(sys.path))
    return path.startswith(roots) or os.path.realpath(path).startswith(roots)


@functools.cache
def _roots(paths: tuple[str, ...]) -> tuple[str, ...]:
    names = ("site-packages", "dist-packages")
    folders = [os.path.dirname(os.__file__)]
    folders += [path for path in paths if os.path.basename(os.path.normpath(path)) in names]
    return tuple(
        f"{folder}{os.sep}" for path in folders for folder in {path, os.path.realpath(path)}
    )


def _leaves_nothing(frame: FrameType | None) -> bool:
    """Return whether a write is harmless.

    `tempfile` tries out a folder, or torch's compiler makes its cache folder, which all share.
    """
    for _ in range(6):
        if frame is None:
            return False
        where = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        if where == ("tempfile", "_get_default_tempdir") or (
            where[0].startswith("torch._inductor.") and where[1] == "cache_dir"
        ):
            return True
        frame = frame.f_back
    return False


def _reader(frame: FrameType | None) -> str:
    """Return the module that reads variables, skipping the methods of mappings."""
    while frame is not None and frame.f_globals.get("__name__") in _OF_MAPPINGS:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")) if frame is not None else ""


def _class_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the outermost class body in the module; None if there is none."""
    found = None
    while frame is not None and frame.f_code.co_name != "<module>":
        found = found if frame.f_code.co_flags & inspect.CO_OPTIMIZED else frame
        frame = frame.f_back
    return found


def _module_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the module that is being imported."""
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame


def _statement(frame: FrameType) -> ast.stmt | None:
    """Return the innermost statement that a frame executes."""
    body = _body_of(frame.f_code.co_filename)
    found, line = None, frame.f_lineno
    while inner := [one for one in body if one.lineno <= line <= (one.end_lineno or one.lineno)]:
        found = inner[0]
        body = [one for one in ast.iter_child_nodes(found) if isinstance(one, ast.stmt)]
    return found


@functools.lru_cache(maxsize=1)  # a module that draws may do so for each of its classes
def _body_of(path: str) -> list[ast.stmt]:
    try:
        with io.open_code(path) as file:
            return ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return []


def _is_documentation(frame: FrameType) -> bool:
    match _statement(frame):
        case ast.Assign(targets=[ast.Attribute(attr="__doc__")]):
            return True
    return False


def _assignment(module: str, frame: FrameType, within: FrameType | None) -> Renewal | None:
    """Return the assignment to one name or attribute that a module or its class is making.

    Return None for any other statement.
    """
    statement = _statement(within or frame)
    if statement is None or statement.col_offset != (4 if within else 0):
        return None
    path = frame.f_code.co_filename
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if within is not None:
            code = compile(ast.Expression(body=value), path, "eval")
            return Renewal(module, code, within.f_code.co_name, name, in_class=True)
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return Renewal(module, _code_of(statement, path), name)
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name), attr=attribute)]):
            return Renewal(module, _code_of(statement, path), name, attribute)
    return None


def _code_of(statement: ast.stmt, path: str) -> types.CodeType:
    code: types.CodeType = compile(ast.Module(body=[statement], type_ignores=[]), path, "exec")
    return code


def _is_shared(renewal: Renewal) -> bool:
    value = vars(sys.modules[renewal.module]).get(renewal.name)
    holders = 0
    for module in list(sys.modules.values()):
        holders += sum(one is value for one in list(_names_of(module).values()))
    return holders > 1


def _watched(watch: ImportWatch) -> type:
    class Watched(_ENVIRON):  # type: ignore[misc, valid-type]
        """The environment, which reports what is read."""

        def __getitem__(self, key: str) -> str:
            value = self._data.get(self.encodekey(key)) if isinstance(key, str) else None
            watch.read(key, self.decodevalue(value) if value is not None else None)
            found: str = super().__getitem__(key)
            return found

        def __iter__(self) -> Iterator[str]:
            watch.read_all()
            return iter(super().__iter__())

    return Watched


@contextlib.contextmanager
def captured(flush: Callable[[], None]) -> Iterator[list[str]]:
    """Divert what anything writes to the standard streams; fill the yielded list with its lines."""
    lines: list[str] = []
    flush()
    kept = [os.dup(fd) for fd in (1, 2)]
    memory = os.memfd_create("output")
    try:
        for fd in (1, 2):
            os.dup2(memory, fd)
        yield lines
    finally:
        flush()
        for fd, original in zip((1, 2), kept, strict=True):
            os.dup2(original, fd)
            os.close(original)
        os.lseek(memory, 0, os.SEEK_SET)
        lines += os.read(memory, 4096).decode(errors="replace").splitlines()
        os.close(memory)


def _give_back(originals: dict[int, Any], before: frozenset[str]) -> None:
    """Replace the guards that new modules have imported by name with the original functions."""
    for name in set(sys.modules) - before:
        names = _names_of(sys.modules[name])
        for key in [key for key, value in names.items() if id(value) in originals]:
            names[key] = originals[id(names[key])]


# The imports that a script begins with, made once in the spawner if workers can't tell the
# difference.
#
# Only statements before everything else in the script count, and only for packages that were
# compared with an import in each worker. A watch alone can't prove that there is no difference (a
# lock that all ranks share, a value made from the rank two lines later, a module that patches
# Python). What stops a statement is cached next to the runs, so that the next run does not try it
# again.


_MOST_KEPT = 256
_TRY_AGAIN_S = 86400.0  # some effects happen once: matplotlib writes its font list
_SKIPPED = ("torchmuster", "__future__")
ROOTS = frozenset(
    {
        *("accelerate", "lightning", "numpy", "pandas", "pytorch_lightning", "safetensors"),
        *("scipy", "sklearn", "tokenizers", "torch", "torchmetrics", "tqdm", "transformers"),
    }
)


@dataclass(slots=True)
class FirstImports(EarlyImports):
    """The first imports of one script, and what the making of them has shown.

    Attributes:
        text: The script's source.
        path: The script's path.
        folder: The folder in front of `sys.path`.
        cache: The folder that caches findings; empty for none.
        roots: The packages that may be imported here.
        stopped: Where they stop early, and why.
        is_spoilt: This process has tried a refused import, so it can't fork workers.
    """

    text: bytes
    path: str
    folder: str | None
    cache: str
    watch: ImportWatch
    roots: Collection[str] = ROOTS
    stopped: ImportsRefused | None = None
    is_spoilt: bool = False
    num_made: int = 0

    def make(self, argv: list[str]) -> None:
        """Make the imports up to where an earlier process stopped; `argv` is the workers'."""
        statements = self._statements()
        self.stopped = self.stopped or self._known(statements)
        limit = self.stopped.num_made if self.stopped is not None else len(statements)
        before, sys.argv = sys.argv, argv
        try:
            for statement in statements[:limit]:
                why = self._make_one(statement)
                if why:
                    self.stopped = ImportsRefused(num_made=self.num_made, why=why)
                    self.is_spoilt = True
                    if self.watch.why:  # not for passing errors, such as an interrupt
                        self._keep(statements, self.stopped)
                    return
                self.num_made += 1
        finally:
            sys.argv = before

    def what_differs(self, environment: Mapping[str, str], unset: Collection[str]) -> str | None:
        """Return a variable that an import has read and that differs for a worker; else None."""
        reads = self.watch.reads
        changed = (name for name, value in environment.items() if reads.get(name, value) != value)
        gone = (name for name in unset if reads.get(name) is not None)
        return next((name for name in (*changed, *gone) if not is_of_a_worker(name)), None)

    def renew(self) -> None:
        """Make what differs between workers again, in a worker."""
        for generator, _ in self.watch.generators:
            generator.seed()
        for renewal in self.watch.renewals:
            renewal.make()

    def _make_one(self, statement: ast.stmt) -> str:
        words = ast.unparse(statement)
        code = compile(ast.Module(body=[statement], type_ignores=[]), self.path, "exec")
        try:
            with self.watch.watching(f"`{words}`"):
                exec(code, {"__name__": "__main__"})
        except RefusedError:
            return self.watch.why
        except BaseException as error:  # noqa: BLE001 - the workers say it, in the script's own words
            return self.watch.why or f"`{words}` raises {type(error).__name__}"
        return self.watch.why

    def _statements(self) -> list[ast.stmt]:
        """Return the imports that come before everything else, without Python's own modules."""
        try:
            body = ast.parse(self.text).body
        except (SyntaxError, ValueError):
            return []
        found: list[ast.stmt] = []
        for statement in body:
            match statement:
                case ast.Expr(value=ast.Constant()):
                    continue
                case ast.Import(names=names):
                    tops = {name.name.partition(".")[0] for name in names}
                case ast.ImportFrom(module=str(module), level=0):
                    tops = {module.partition(".")[0]}
                case _:
                    return found
            tops -= sys.stdlib_module_names.union(_SKIPPED)
            if not all(self._is_installed(top) for top in tops):
                return found
            if tops:
                found.append(statement)
        return found

    def _is_installed(self, name: str) -> bool:
        if name not in self.roots:
            return False
        paths = [*([self.folder] if self.folder is not None else []), *sys.path]
        spec = PathFinder.find_spec(name, paths)
        if spec is None or spec.origin is None:
            return False
        return is_installed(spec.origin)

    # The cache of findings.

    def _file(self, statements: list[ast.stmt]) -> str:
        installed = [entry for entry in sys.path if os.path.isdir(entry)]
        times = [os.stat(entry).st_mtime_ns for entry in installed if is_installed(f"{entry}/x")]
        parts = [
            sys.version,
            sys.prefix,
            self.folder,
            times,
            [ast.unparse(one) for one in statements],
        ]
        return os.path.join(self.cache, hashlib.sha256(repr(parts).encode()).hexdigest()[:32])

    def _known(self, statements: list[ast.stmt]) -> ImportsRefused | None:
        if not self.cache:
            return None
        path = self._file(statements)
        plain = atomic.read_json(path)
        if not isinstance(plain, dict) or not isinstance(plain.get("num_made"), int):
            return None
        try:
            is_old = time.time() > os.stat(path).st_mtime + _TRY_AGAIN_S
        except OSError:  # another run removed it
            return None
        why = str(plain.get("why"))[:MOST_WHY]
        return None if is_old else ImportsRefused(num_made=max(0, plain["num_made"]), why=why)

    def _keep(self, statements: list[ast.stmt], stopped: ImportsRefused) -> None:
        if not self.cache:
            return
        try:
            os.makedirs(self.cache, mode=0o700, exist_ok=True)
            names = sorted(
                os.listdir(self.cache),
                key=lambda name: os.stat(os.path.join(self.cache, name)).st_mtime,
            )
            for name in names[: max(0, len(names) - _MOST_KEPT)]:
                os.unlink(os.path.join(self.cache, name))
            said = json.dumps({"num_made": stopped.num_made, "why": stopped.why}).encode()
            atomic.replace_file(self._file(statements), said)
        except OSError:
            return
