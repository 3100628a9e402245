"""The spawner: imports torch once, then forks a worker whenever its agent asks for one.

It always has one thread: a fork next to a second thread can copy a held lock. It checks that before
every fork, and starts fresh interpreters if forking isn't safe. It talks to its agent over a
`SOCK_SEQPACKET` pair, one JSON object per packet, with a worker's standard streams attached.

It ends its workers when the agent is gone (end of file) or has been silent for the lease.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import re
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from torchmuster.core import plugs, proc
from torchmuster.core.model import contract
from torchmuster.core.model.codec import decode, encode
from torchmuster.core.model.failure import LeftProcess
from torchmuster.core.model.lease import OwnClock, is_given_up, is_stopped
from torchmuster.core.model.plan import look_for_torch
from torchmuster.core.node.spawner import last_words, mainmodule, messages
from torchmuster.core.node.spawner.mainmodule import WorkerTask

# What a spawner knows about the script before it forks: nothing here; another room reads the source
# (table `script_readers`).


class EarlyImports(ABC):
    """Imports at the top of the script, made once in the spawner for all its workers.

    Attributes:
        stopped: Where they stop short of all, and why.
        is_spoilt: This process has tried one that it may not make, and can fork no worker.
    """

    stopped: messages.ImportsRefused | None
    is_spoilt: bool

    @abstractmethod
    def make(self, argv: list[str]) -> None:
        """Make the imports, with the workers' `sys.argv`."""

    @abstractmethod
    def what_differs(self, environment: Mapping[str, str], unset: Collection[str]) -> str | None:
        """Return a variable that an import has read and whose value differs in a worker."""

    @abstractmethod
    def renew(self) -> None:
        """Make again, in a worker, what must differ between workers."""


class ScriptReader:
    """What is known about a script from its source.

    Attributes:
        imports_torch: The script imports torch.
        imports_library: The script imports `torchmuster.train`.
    """

    def __init__(self, config: messages.BeginSpawner, at_start: Collection[str]) -> None:
        self._config, self._at_start = config, at_start
        self.imports_torch = self.imports_library = False

    def reason_for_fresh(self) -> str | None:
        """Return why workers must be fresh interpreters rather than forks; None if forks do."""
        return "nothing here reads the script before torch is imported"

    def early_imports(self, folder: str | None) -> EarlyImports | None:
        """Return the imports to make before the fork, with `folder` first in `sys.path`; None for none."""
        return None


def read_script(config: messages.BeginSpawner, at_start: Collection[str]) -> ScriptReader:
    """Return what is known about the script; `at_start` are the modules that every interpreter starts with."""
    reader: type[ScriptReader] = next(plugs.every("script_readers"), ScriptReader)
    return reader(config, at_start)


# The imports that are made once for all workers; or the reason why workers are fresh interpreters.


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
    send(
        messages.InterpreterReady(
            python=sys.version.split()[0],
            torch=torch_version,
            forks=why is None,
            why=why if is_news else None,
            imports_why=first.stopped.why if first is not None and first.stopped else "",
        )
    )
    return Prepared(why is None, script.imports_torch, first if why is None else None)


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
        with contextlib.suppress(ImportError):  # a module's function doesn't need it
            importlib.import_module("cloudpickle")
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


# The store of one attempt: torch's TCPStore in a separate process, because its server thread makes
# forking unsafe (a fork next to it hung one worker of eight in a lock), and because a new attempt
# must never see the keys of the last.


def serve_store(listen_fd: int, host: str, port: int) -> None:
    """Serve a store on a listening socket until killed."""
    # By name, because only `train` imports torch (`docs/design.md`, section 2).
    torch, distributed = map(importlib.import_module, ("torch", "torch.distributed"))
    # Before torch 2.8, libuv's store, the default, accepts no listening socket
    # (NotImplementedError).
    # Source: pytorch pull request 150215, TCPStoreLibUvBackend.cpp; seen with 2.6.0, 2.7.1, 2.8.0.
    older = {"use_libuv": False} if torch.__version__ < (2, 8) else {}
    store = distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd, **older
    )
    while store is not None:
        signal.pause()


_POLL_ORPHANS_S = 0.005
# Source: string.Template, CPython 3.11.
_MACRO = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<named>[_a-z][_a-z0-9]*)|\{(?P<braced>[_a-z][_a-z0-9]*)\})",
    re.IGNORECASE | re.ASCII,
)
_LEAVE_S = 0.5
_LOOK_EVERY_S = 1.0


class Spawner:
    """The state of one spawner between two packets."""

    def __init__(self, control: socket.socket, entry_path: str) -> None:
        self.control = control
        self.config: messages.BeginSpawner  # the first packet
        self.entry_path = entry_path
        self.can = Prepared(False, False)
        self.forks = False
        self.children: dict[int, messages.ChildStarted] = {}
        self.ending = False
        self.spares_until: float | None = None  # after a success: until when to wait for what stays
        self.sessions = {os.getsid(0)}  # ours and our children's
        self.clock = OwnClock()
        self.heard_at = self.clock()
        self.agent_waits = False
        self.wakeup_r, self.wakeup_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.dispositions: dict[int, Any] = {}

    def send(self, message: messages.SpawnerEvent) -> None:
        """Send one packet to the agent; the next read notices a lost agent."""
        try:
            self.control.send(encode(message))
        except OSError:
            return

    def receive(self) -> tuple[messages.SpawnerOrder | None, list[int]]:
        """Return the next order and its descriptors; None if the agent is gone."""
        try:
            packet, fds, _, _ = socket.recv_fds(self.control, messages.MOST_IN_PACKET, 4)
        except ConnectionError:
            return None, []
        if packet == messages.IN_MEMORY:
            with open(fds.pop(0), "rb") as memory:
                memory.seek(0)
                packet = memory.read()
        self.heard_at = self.clock()
        return (decode(packet, messages.SpawnerOrder) if packet else None), fds


def serve(control_fd: int, entry_path: str, at_start: Collection[str]) -> WorkerTask | None:
    """Serve the agent; return the task in each forked worker, and None in the spawner.

    Args:
        control_fd: The socket to the agent.
        entry_path: The script that a fresh interpreter runs.
        at_start: The modules that the interpreter had before it imported our code.
    """
    spawner = Spawner(socket.socket(fileno=control_fd), entry_path)
    config, _ = spawner.receive()
    if not isinstance(config, messages.BeginSpawner):
        return None
    spawner.config = config
    spawner.can = prepare(config, at_start, spawner.send)
    spawner.forks = spawner.can.forks
    proc.become_subreaper()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # The agent decides which signals workers get; one to the whole job must not end the
        # spawner.
        spawner.dispositions[signum] = signal.signal(signum, _ignore)
    spawner.dispositions[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _ignore)
    signal.set_wakeup_fd(spawner.wakeup_w, warn_on_full_buffer=False)
    spawner.heard_at = spawner.clock()
    task = _loop(spawner)
    spawner.control.close()  # under `-X dev`, Python would print a warning
    return task


def _ignore(signum: int, frame: object) -> None:
    """Do nothing: a handler, unlike SIG_IGN, is not inherited by a fresh interpreter."""


# Service.


def _loop(spawner: Spawner) -> WorkerTask | None:
    poll = select.poll()
    poll.register(spawner.control, select.POLLIN)
    poll.register(spawner.wakeup_r, select.POLLIN)
    while True:
        timeout_s = _POLL_ORPHANS_S if spawner.ending else _LOOK_EVERY_S
        events = dict(poll.poll(timeout_s * 1000))
        if spawner.wakeup_r in events:
            os.read(spawner.wakeup_r, 4096)
        _reap(spawner)
        if spawner.control.fileno() in events:
            order, fds = spawner.receive()
            if order is None:
                _end_everything(spawner)
                return None
            task = _obey(spawner, order, fds)
            if task is not None:
                return task
        elif spawner.children and not spawner.ending and _agent_is_stopped(spawner):
            # A stopped agent can't read this now; it learns of the deaths when it continues.
            spawner.send(messages.LeaseEnded())
            _begin_ending(spawner)
        if spawner.ending:
            _continue_ending(spawner)


def _agent_is_stopped(spawner: Spawner) -> bool:
    """Return whether the agent's lease has ended.

    An agent that only waits for a processor gets more time. One that was stopped (Ctrl-Z) while no
    other node waits is never given up: its death would be noticed at once.
    """
    silent_s = spawner.clock() - spawner.heard_at
    lease_s = spawner.config.lease_s
    if silent_s <= lease_s:
        return False
    # With a wrapper, the parent is not the agent.
    agent = None if spawner.config.wrapped else proc.read_process(os.getppid())
    state = agent.state if agent is not None else None
    if spawner.agent_waits and is_stopped(state):
        spawner.heard_at = spawner.clock()
        return False
    return is_given_up(silent_s, lease_s, state)


def _obey(spawner: Spawner, order: messages.SpawnerOrder, fds: list[int]) -> WorkerTask | None:
    match order:
        case messages.PingSpawner(waits=waits):
            spawner.agent_waits = waits
            spawner.send(messages.SpawnerPong())
        case messages.StartWorker():
            return _start_worker(spawner, order, fds)
        case messages.StartStore():
            _start_store(spawner, order, fds)
        case messages.SignalWorkerProcesses():
            for pid in [p for p, child in spawner.children.items() if child.kind == "worker"]:
                if not order.if_caught or proc.catches_signal(pid, order.signum):
                    proc.kill_quietly(pid, order.signum)
        case messages.KillChildren():
            _begin_ending(spawner)
            if order.ended_well:
                spawner.spares_until = time.monotonic() + _LEAVE_S
    return None


def _reap(spawner: Spawner) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        child = spawner.children.pop(pid, None)
        if child is not None:
            spawner.send(
                messages.ChildEnded(pid=pid, kind=child.kind, rank=child.rank, status=status)
            )


def _begin_ending(spawner: Spawner) -> None:
    for pid in spawner.children:
        proc.kill_quietly(pid)
    spawner.ending = True


def _continue_ending(spawner: Spawner) -> None:
    """Kill what the workers left, generation after generation; report when all are gone.

    After a success, what a worker has put into its own session stays, since that was intended.
    Helpers that end only a little later than their worker get a moment to do so.
    """
    _reap(spawner)
    left = _in_own_sessions(spawner) if spawner.spares_until is not None else []
    proc.leave_sessions(process.session for process in left)
    if spawner.children or proc.end_children():
        return
    if left and spawner.spares_until is not None and time.monotonic() < spawner.spares_until:
        return
    spawner.ending, spawner.spares_until = False, None
    listed = (LeftProcess(pid=p.pid, session=p.session, name=proc.name_of(p.pid)) for p in left)
    spawner.send(messages.NoChildLeft(left=tuple(listed)))


def _in_own_sessions(spawner: Spawner) -> list[proc.ProcessFacts]:
    """Return the workers' orphans in sessions that the workers created."""
    found = [proc.read_process(pid) for pid in proc.children_of(os.getpid())]
    return [
        facts
        for facts in found
        if facts is not None and facts.state != "Z" and facts.session not in spawner.sessions
    ]


def _end_everything(spawner: Spawner) -> None:
    _begin_ending(spawner)
    while spawner.ending:
        _continue_ending(spawner)
        select.select([spawner.wakeup_r], [], [], _POLL_ORPHANS_S)


# Starting.


def _start_worker(
    spawner: Spawner, order: messages.StartWorker, fds: list[int]
) -> WorkerTask | None:
    config = spawner.config
    arguments = list(config.args if order.args is None else order.args)
    if config.macros:
        local_rank = order.env["LOCAL_RANK"]
        arguments = [_with_macros(word, local_rank) for word in arguments]
    task = WorkerTask(
        kind=config.kind,
        target=config.target,
        args=arguments,
        socket_path=order.env.get(contract.SOCKET_VARIABLE, config.socket_path),
        forked=spawner.forks,
        imports_torch=spawner.can.imports_torch,
        call_sha256=config.call_sha256,
    )
    first = spawner.can.first if spawner.forks else None
    differs = first.what_differs(order.env, order.unset) if first is not None else None
    if differs is not None:
        _fall_back(
            spawner, f"{differs}, which the script's imports read, is another one for workers"
        )
    if _fork(spawner, "worker", order.rank, fds):
        return None
    for name in order.unset:
        os.environ.pop(name, None)
    os.environ.update(order.env)
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    if spawner.forks:
        return replace(task, renew=first.renew if first is not None else None)
    if config.kind == "command":
        _execute([config.target, *arguments])
    os.environ[mainmodule.TASK_VARIABLE] = mainmodule.task_to_environment(task)
    flag = ["-m"] if config.kind == "module" else []
    words = [spawner.entry_path, "worker", "--", *flag, config.target, *arguments]
    _execute([*_interpreter(config), *words])
    return None


def _with_macros(word: str, local_rank: str) -> str:
    """Return an argument as torchrun would pass it, with macros replaced as by string.Template.

    That module is not imported: a project may have its own `string.py`.
    """

    def value(found: re.Match[str]) -> str:
        name = found["named"] or found["braced"]
        return "$" if found["escaped"] else local_rank if name == "local_rank" else found[0]

    return _MACRO.sub(value, word)


def _interpreter(config: messages.BeginSpawner) -> list[str]:
    """Return the command for a fresh interpreter; our own, as a wrapper is already in effect."""
    if not config.wrapped or not sys.executable:
        return list(config.python)
    num_flags = len(sys.orig_argv) - len(sys.argv)
    return [sys.executable, *sys.orig_argv[1:num_flags]]


def _start_store(spawner: Spawner, order: messages.StartStore, fds: list[int]) -> None:
    if _fork(spawner, "store", -1, fds):
        return
    os.set_inheritable(fds[0], True)
    if not spawner.forks:
        words = [spawner.entry_path, "store", str(fds[0]), order.host, str(order.port)]
        _execute([*_interpreter(spawner.config), *words])
    try:
        serve_store(fds[0], order.host, order.port)
    finally:
        os._exit(1)


def _fork(spawner: Spawner, kind: str, rank: int, fds: list[int]) -> bool:
    """Fork; return True in the spawner. The child lacks only its standard streams."""
    why = reason_not_to_fork() if spawner.forks else None
    if why is not None:
        _fall_back(spawner, why)
    parent_pid = os.getpid()
    # A signal that comes now must not get lost: it waits until the child has its own dispositions.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, spawner.dispositions)
    pid = os.fork()
    if pid != 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for fd in fds:
            os.close(fd)
        spawner.children[pid] = messages.ChildStarted(pid=pid, kind=kind, rank=rank)
        spawner.sessions.add(pid)
        spawner.ending = False
        spawner.send(spawner.children[pid])
        return True
    proc.detach_from_parent()
    proc.die_with_parent(parent_pid)
    signal.set_wakeup_fd(-1)
    for signum, disposition in spawner.dispositions.items():
        # Schedulers signal every process of a job, and without the store, no rank could save.
        is_deaf = kind == "store" and signum != signal.SIGCHLD
        signal.signal(signum, signal.SIG_IGN if is_deaf else disposition)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    spawner.control.close()
    os.close(spawner.wakeup_r)
    os.close(spawner.wakeup_w)
    return False


def _fall_back(spawner: Spawner, why: str) -> None:
    spawner.forks = False
    spawner.send(messages.FellBack(why=why))


def _execute(argv: list[str]) -> None:
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # CPython ignores them; its children must not
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"muster: {argv[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
