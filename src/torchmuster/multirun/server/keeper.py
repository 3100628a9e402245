"""The server process: imports torch, listens, forks agents with spawners, ends with its session.

It has one thread and no event loop, so that every fork is safe. It serves its own user only: its
socket is in a folder that nobody else can enter, and the kernel names the caller.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from torchmuster.core import plugs, proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec, contract
from torchmuster.core.model.codec import encode, from_arguments, to_arguments
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.text import in_minutes
from torchmuster.core.node.options import AgentOptions, AgentOrder
from torchmuster.core.node.setup import adopt_lock, lock_for_exec, make_socket_folder
from torchmuster.core.node.spawner.serve import import_for_workers, reason_not_to_fork
from torchmuster.core.node.spawner.start import control_pair
from torchmuster.core.plainfile import write_all
from torchmuster.core.proc import kill_quietly
from torchmuster.core.programs.main import read_plan_file
from torchmuster.multirun.server import messages, modules
from torchmuster.multirun.server.call import client_lives, own_setup, peer_uid, server_file

# What a fork of the server becomes: an agent, which forks its own spawner before anything else.


_LAUNCHER_PREFIXES = (
    "TORCHELASTIC_",
    "TORCHMUSTER_",
    "MUSTER_PLACE",
    "MUSTER_NODE",
    "MUSTER_SCRATCH",
)
# The modules that an agent, and the head in it, import when they run.
_AGENT_MODULES = (
    "asyncio",
    "torchmuster.core.programs.main",
    "torchmuster.core.node.agent",
    "torchmuster.core.node.setup",
    "torchmuster.core.node.output",
    "torchmuster.launcher.node.remote.main",
    "torchmuster.core.head.training_head",
    "torchmuster.core.net.listener",
    *(
        f"torchmuster.{what.partition(':')[0]}"
        for point in (
            *("head_parts", "agent_parts", "node_work", "script_readers", "start_checks"),
            "worker_variables",
        )
        for what in plugs.table(point).values()
    ),
)
_RANK_NAMES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)
# Muster sets these for every worker, unless the user has set them.
_MUSTER_VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "RES_OPTIONS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


class ForkedChild:
    """A child that this process forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status (negative for a signal), or None while the process runs."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # already reaped elsewhere
                pid, status = self.pid, 0
            if pid != 0:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; return the exit status or None when the time is up."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            select.select([], [], [], 0.005)
        return self._status

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has been reaped already."""
        if self.poll() is None:
            kill_quietly(self.pid, signum)


def import_agents(root: str) -> None:
    """Import what an agent needs, from the folder that contains torchmuster."""
    sys.path.insert(0, root)
    for name in _AGENT_MODULES:
        importlib.import_module(name)
    sys.path.remove(root)


def forget_launcher(
    setup: messages.SessionSetup, plan: RunPlan, entry: str, root: str
) -> messages.NodeEnvironment:
    """Remove the variables that the session's own run has set; return what the node has given.

    A run in the session gets its own variables.

    Args:
        setup: The setup of the session.
        plan: The plan of the run that is the session, as this node has it.
        entry: The file that our interpreter runs.
        root: The folder that contains torchmuster.
    """
    of_site = tuple(os.environ.get(contract.SITE_NAMES_VARIABLE, "").split())
    names = [n for n in os.environ if n in _RANK_NAMES or n.startswith(_LAUNCHER_PREFIXES)]
    given = {*setup.variables, *of_site}
    for name in [*names, *(name for name in _MUSTER_VARIABLES if name not in given)]:
        os.environ.pop(name, None)
    is_here = plan.engine == "local"
    first, _, others = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    # An owner on this machine has put our root first; elsewhere PYTHONPATH is the user's.
    if is_here and first == root:  # `proc.own_package_environment`
        os.environ.pop("PYTHONPATH")
        if others:
            os.environ["PYTHONPATH"] = others
    asked = plan.program.python
    return messages.NodeEnvironment(
        asked=asked,
        python=asked if is_here else _own_python(entry),
        environment=dict(os.environ),
        site_names=of_site,
    )


def _own_python(entry: str) -> tuple[str, ...]:
    """Return the command of our interpreter, with its flags."""
    words = sys.orig_argv
    return tuple(words[: words.index(entry)]) if entry in words else (sys.executable,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrigin:
    """The server that a process was forked from.

    Attributes:
        server: The server's process id.
        mask: The signal mask to restore.
    """

    server: int
    mask: set[int | signal.Signals]

    def leave(self) -> None:
        """Detach this process from the server: own session, default signal handlers."""
        proc.detach_from_parent()
        proc.die_with_parent(self.server)
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)


def become_remote(
    fds: list[int], session: RunDir, place: int, node: messages.NodeEnvironment, origin: ForkOrigin
) -> int:
    """Serve as a remote end whose agents the server forks; does not return.

    `fds` are the order's memory file and the three streams.
    """
    origin.leave()
    try:
        os.close(fds[0])
        for target, fd in enumerate(fds[1:]):
            os.dup2(fd, target)
            os.close(fd)
        from torchmuster.multirun.server.remote import serve_forked_remote

        serve_forked_remote(session, place, node)
    except BaseException as error:  # noqa: BLE001 - this process must not continue as a server
        _report(error)
    os._exit(1)


def become_agent(
    order: messages.ForkAgent, fds: list[int], origin: ForkOrigin, *, is_warm: bool
) -> int:
    """Run the agent until it ends; return only in its spawner, with the descriptor to the agent.

    Args:
        order: The order for the agent.
        fds: The order's memory file, stdout, stderr, the lifeline, and the head's socket if any.
        origin: The server that we were forked from.
        is_warm: Whether this run can use what the server has imported, so a spawner is forked.
    """
    origin.leave()
    code = 1
    try:
        os.close(fds[0])
        null = os.open(os.devnull, os.O_RDONLY)
        for target, fd in enumerate((null, fds[1], fds[2])):
            os.dup2(fd, target)
            os.close(fd)
        _take_environment(order.environment)
        os.umask(order.umask)
        os.chdir(order.cwd)
        importlib.invalidate_caches()
        from torchmuster.core.programs.main import read_launch, run_agent

        listen_fd = fds[4] if order.has_head else None
        agent_order = from_arguments(AgentOrder, list(order.arguments))
        launch = read_launch(
            to_arguments(replace(agent_order, lifeline_fd=fds[3], listen_fd=listen_fd))
        )
        launch = replace(launch, agent=_settled(launch.agent, order.python))
        forked = None
        if is_warm:
            ours, theirs = control_pair()
            agent = os.getpid()
            pid = os.fork()
            if pid == 0:
                proc.detach_from_parent()
                proc.die_with_parent(agent)
                ours.close()
                if launch.listening is not None:
                    launch.listening.detach()
                close_all(fds[3:])
                _take_environment(dict(launch.agent.environment))
                os.chdir(launch.agent.plan.program.cwd)
                return theirs.detach()
            theirs.close()
            forked = (ForkedChild(pid), ours)
        code = run_agent(launch, forked)
    except BaseException as error:  # noqa: BLE001 - an agent must not continue as a server
        _report(error)
    os._exit(code)


def _settled(agent: AgentOptions, python: tuple[str, ...]) -> AgentOptions:
    """Return an agent's options with this interpreter and no setup lines: the server ran them."""
    setup = replace(agent.plan.node_setup, lines=(), python_follows=False)
    program = replace(agent.plan.program, python=python)
    return replace(agent, plan=replace(agent.plan, program=program, node_setup=setup))


def _take_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def close_all(fds: list[int]) -> None:
    """Close all these descriptors."""
    for fd in fds:
        os.close(fd)


def _report(error: BaseException) -> None:
    from torchmuster.core.model.text import render_report, report_of_error
    from torchmuster.errors import MusterError

    if isinstance(error, MusterError):
        sys.stderr.write(render_report(report_of_error(error)))
        return
    import traceback

    traceback.print_exception(error)


# When a session ends. The first node's server decides for all.


_WARN_S = 300.0
_CLIENT_ENDED = "the command that it was started for has ended"
_END_FILE = "session-end.json"


class SessionTime:
    """The time limits of a session, as one of its servers keeps them.

    Attributes:
        began_at: The start, in seconds since 1970; `used_at`: the end of the last run.
        ends: Why the session is ending; None while it is not.
        warned: Whether the user has been warned that it ends soon.
    """

    def __init__(self, setup: messages.SessionSetup, run_dir: RunDir, place: int) -> None:
        self.began_at = self.used_at = time.time()
        self.ends: str | None = None
        self.warned = False
        self._setup, self._place = setup, place
        self._end_file = os.path.join(run_dir.path, _END_FILE)

    def left(self, run_id: str) -> tuple[float | None, str]:
        """Return the time until the session ends if no run begins, and why; `run_id` is in it."""
        now, setup = time.time(), self._setup
        ends: list[tuple[float, str]] = []
        if setup.limit_s is not None:
            limit = in_minutes(setup.limit_s)
            ends.append((self.began_at + setup.limit_s - now, f"its time limit of {limit}"))
        if setup.idle_s is not None:
            since = now if run_id else self.used_at
            idle = in_minutes(setup.idle_s)
            ends.append((since + setup.idle_s - now, f"no run began for {idle}"))
        return min(ends) if ends else (None, "")

    def look(self, run_id: str) -> str | None:
        """Return why the session must end now, or None; warn the user some time before."""
        if self._place != 0:
            end = atomic.read_json(self._end_file)
            return str(end.get("why", "")) if isinstance(end, dict) else None
        if client_lives(self._setup) is False:
            self.write_end_file(_CLIENT_ENDED)
            return _CLIENT_ENDED
        left_s, why = self.left(run_id)
        if left_s is not None and left_s <= 0:
            self.write_end_file(why)
            return why
        if left_s is not None and left_s < self._warn_s() and not self.warned:
            self.warned = True
            name = self._setup.name
            print(f"muster: the session {name} ends in {in_minutes(left_s)}: {why}", flush=True)
        return None

    def on_job_warning(self, signum: int, frame: object) -> None:
        """Tell the user that the job's time is nearly over (a signal handler)."""
        if self._place == 0:
            print(f"muster: the session {self._setup.name} ends soon, with its job", flush=True)

    def _warn_s(self) -> float:
        limits = [x for x in (self._setup.idle_s, self._setup.limit_s) if x is not None]
        return min(_WARN_S, min(limits, default=0.0) / 2)

    def write_end_file(self, why: str) -> None:
        """On the first node, leave a file that tells the other servers to end."""
        if self._place == 0:
            atomic.write_json(self._end_file, {"why": why})


_LOOK_S = _PATIENCE_S = 1.0
_MOST_CALLERS = 32
_ABANDONED_S = 8.0  # after an owner was killed: agents see the lifeline close and leave
_GRACE_S = 20.0
_REMOTE_FDS = 4  # the order's memory file and the three streams


@dataclass(slots=True)
class _Caller:
    """A connection to the server, and the process that was forked for it."""

    line: socket.socket
    order: messages.ForkAgent | None = None
    fds: list[int] = field(default_factory=list)
    pid: int = 0
    gone_at: float | None = None
    came_at: float = field(default_factory=time.monotonic)

    @property
    def run_id(self) -> str:  # empty for a remote end: its agents come with their own orders
        return self.order.run_id if self.order is not None else ""


class SessionServer:
    """The server of one node: its imports, its socket, its callers and their processes."""

    def __init__(self, run_dir: RunDir, place: int, entry: str, root: str) -> None:
        self.run_dir, self.place, self.entry, self.root = run_dir, place, entry, root
        self.setup = own_setup(run_dir)
        self.time = SessionTime(self.setup, run_dir, place)
        self.num_runs = 0
        self.problem = ""
        self.template: modules.Template
        self.node: messages.NodeEnvironment
        self.listening: socket.socket
        self.socket_path = ""
        self.callers: list[_Caller] = []
        self.ends_at = 0.0
        self.renewed_for: _Caller | None = None  # renew at most once for each order
        self.wakeup_r, self.wakeup_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # Start.

    def import_all(
        self, begun_ns: int, python: tuple[str, ...], preload: tuple[str, ...], folder: str
    ) -> None:
        """Import what agents and workers need; record what the imports depended on."""
        environment = dict(os.environ)
        with modules.recording_reads() as read:
            _, problem = import_for_workers(folder, preload, for_calls=True)
            import_agents(self.root)
        sys.dont_write_bytecode = True  # docs/sessions.md: code may change twice in a second
        gc.collect()
        gc.freeze()
        self.problem = problem or reason_not_to_fork() or ""
        self.template = modules.Template(
            python=python,
            environment=modules.read_by_imports(environment, read),
            read=frozenset(read),
            preload=preload,
            folder=folder,
            files=modules.imported_files(begun_ns),
        )

    def listen(self) -> None:
        """Open the socket and announce it."""
        folder = make_socket_folder()
        self.socket_path = os.path.join(folder, "door.sock")
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listening.bind(self.socket_path)
        self.listening.listen(_MOST_CALLERS)
        self.announce()
        self.time.used_at = time.time()  # the import does not count as idle time

    def announce(self) -> None:
        """Write the file that says where this server listens."""
        place = messages.ServerAddress(
            socket=self.socket_path,
            pid=os.getpid(),
            machine=(proc.boot_id(), proc.network_id()),
        )
        path = server_file(self.run_dir, self.place)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        atomic.write_json(path, codec.to_plain(place), mode=0o600)

    # Service.

    def serve(self) -> int | None:
        """Serve until the session ends; in each forked spawner, return its descriptor instead."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(signum, self._hear_signal)
        signal.signal(signal.SIGUSR1, self.time.on_job_warning)  # the job's; runs get their own
        signal.set_wakeup_fd(self.wakeup_w, warn_on_full_buffer=False)
        while True:
            poll = select.poll()
            poll.register(self.listening, select.POLLIN)
            poll.register(self.wakeup_r, select.POLLIN)
            lines = {caller.line.fileno(): caller for caller in self.callers if not caller.gone_at}
            for fd in lines:
                poll.register(fd, select.POLLIN)
            events = dict(poll.poll(_LOOK_S * 1000))
            if self.wakeup_r in events:
                os.read(self.wakeup_r, 4096)
            self._reap()
            for fd in [fd for fd in events if fd in lines]:
                self._hear(lines[fd])
            if self.listening.fileno() in events:
                self._accept()
            control = self._begin_waiting()
            if control is not None:
                return control
            if self._look_at_time():
                return None

    def _hear_signal(self, signum: int, frame: object) -> None:
        if signum != signal.SIGCHLD:
            self._begin_end("it was told to stop")

    def _accept(self) -> None:
        line, _ = self.listening.accept()
        if peer_uid(line) != os.getuid() or len(self.callers) >= _MOST_CALLERS:
            line.close()
            return
        line.setblocking(False)
        self.callers.append(_Caller(line))

    def _hear(self, caller: _Caller) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(caller.line, 16, messages.MAX_FDS)
        except BlockingIOError:
            return
        except OSError:
            packet, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)
        if not packet or not fds or caller.order is not None or caller.pid:
            close_all(fds)
            self._lose(caller)
            return
        try:
            order = messages.read_order(fds[0])
        except (codec.CodecError, OSError) as error:
            close_all(fds)
            self._refuse(caller, str(error))
            return
        match order:
            case messages.ForkAgent():
                caller.order, caller.fds = order, fds
            case messages.ForkRemote():
                caller.fds = fds
                if self.time.ends is None and len(fds) == _REMOTE_FDS:
                    become = partial(become_remote, fds, self.run_dir, self.place, self.node)
                    self._fork(caller, become)
                else:
                    self._refuse(caller, f"the session ends: {self.time.ends}")
            case messages.AskServerState():
                close_all(fds)
                self._answer(caller, self._state())
            case messages.EndSession(why=why):
                close_all(fds)
                self.time.write_end_file(why)
                self._begin_end(why)
                self._answer(caller, self._state())

    def _lose(self, caller: _Caller) -> None:
        """Disconnect a caller. Its agent, which has seen its lifeline close, gets time to leave."""
        close_all(caller.fds)
        caller.fds = []
        caller.line.close()
        if caller.pid:
            caller.gone_at = time.monotonic()
        else:
            self.callers.remove(caller)

    def _refuse(self, caller: _Caller, why: str) -> None:
        self._answer(caller, messages.ForkRefused(why=why))
        self._lose(caller)

    def _answer(self, caller: _Caller, answer: messages.SessionAnswer, *fds: int) -> None:
        with contextlib.suppress(OSError):
            socket.send_fds(caller.line, [encode(answer)], fds)

    def _state(self) -> messages.SessionServerState:
        left_s, why = self.time.left(self._run_id())
        living = (c.run_id for c in self.callers if c.pid and c.run_id and not c.gone_at)
        return messages.SessionServerState(
            run_id=next(living, ""),
            num_runs=self.num_runs,
            idle_s=time.time() - self.time.used_at,
            ends_in_s=left_s,
            why_ends=why,
            memory_bytes=modules.resident_bytes(),
            problem=self.problem,
        )

    def _run_id(self) -> str:
        return next((c.run_id for c in self.callers if c.pid and c.run_id), "")

    # Agents.

    def _begin_waiting(self) -> int | None:
        """Start the agents that were asked for; in a forked spawner, return its descriptor."""
        for caller in self.callers[:]:
            if (order := caller.order) is None or caller.pid:
                continue
            others = [c for c in self.callers if c.pid and c.run_id not in ("", order.run_id)]
            is_busy = any(c.gone_at is None for c in others)  # otherwise their owner was killed
            if is_busy and time.monotonic() - caller.came_at > _PATIENCE_S:
                self._answer(caller, messages.SessionBusy(run_id=self._run_id()))
                self._lose(caller)
            if others:
                continue  # a client hears of its run's end a moment before the agents end
            control = self._begin(caller, order)
            if control is not None:
                return control
        return None

    def _begin(self, caller: _Caller, order: messages.ForkAgent) -> int | None:
        if self.time.ends is not None:
            self._refuse(caller, f"the session ends: {self.time.ends}")
            return None
        is_warm = not order.is_fresh and order.kind != "command"
        if is_warm:
            job = {**order.environment, **order.added}
            t = self.template
            stale = t.why_stale(order.python, job, order.preload, order.folder)
            was_renewed = caller is self.renewed_for
            if stale is None and self.problem and not was_renewed:
                stale = self.problem
            may_renew = not was_renewed and not self._run_id()
            if stale is not None and may_renew:
                self._answer(caller, messages.TemplateRenewed(why=stale))
                self._renew(caller, order, job)
            is_warm = stale is None and not self.problem
        become = partial(become_agent, order, caller.fds, is_warm=is_warm)
        control = self._fork(caller, become, is_warm=is_warm)
        self.num_runs += order.run_id not in [c.run_id for c in self.callers if c is not caller]
        self.time.warned = False
        return control

    def _fork(
        self, caller: _Caller, become: Callable[[ForkOrigin], int], *, is_warm: bool = True
    ) -> int | None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        origin = ForkOrigin(server=os.getpid(), mask=mask)
        pid = os.fork()
        if pid == 0:
            self._close_inherited(caller)
            return become(origin)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        close_all(caller.fds)
        caller.pid, caller.fds = pid, []
        pidfd = os.pidfd_open(pid)
        self._answer(caller, messages.AgentForked(pid=pid, is_warm=is_warm), pidfd)
        os.close(pidfd)
        return None

    def _close_inherited(self, caller: _Caller) -> None:
        """Close the server's descriptors, in a fork that serves `caller`."""
        signal.set_wakeup_fd(-1)
        self.listening.close()
        os.close(self.wakeup_r)
        os.close(self.wakeup_w)
        for other in self.callers:
            if not other.gone_at:
                other.line.close()
            if other is not caller:
                close_all(other.fds)

    def _reap(self) -> None:
        """Report processes that have ended, once everything they left behind has ended too."""
        for caller in [c for c in self.callers if c.pid]:
            try:
                pid, status = os.waitpid(caller.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = caller.pid, 0
            if pid == 0:
                if caller.gone_at and time.monotonic() > caller.gone_at + _ABANDONED_S:
                    proc.kill_quietly(caller.pid)
                continue
            living = frozenset(c.pid for c in self.callers if c.pid and c is not caller)
            while proc.end_children(living):
                select.select([], [], [], 0.005)
            if not caller.gone_at:
                code = os.waitstatus_to_exitcode(status)
                self._answer(caller, messages.ForkedEnded(status=code))
                caller.line.close()
            self.callers.remove(caller)
            if caller.order is not None:
                self.time.used_at = time.time()

    # Renewal.

    def _renew(self, caller: _Caller, order: messages.ForkAgent, job: dict[str, str]) -> None:
        """Become a new interpreter that imports again; return only if it can't be started."""
        line = caller.line.detach()
        lock = lock_for_exec(os.path.dirname(self.socket_path))
        fds = caller.fds
        waiting = [c for c in self.callers if c is not caller and not c.order and not c.gone_at]
        others = tuple((c.line.fileno(), c.pid) for c in waiting)
        handed = messages.Handover(
            node=self.node,
            python=order.python,
            preload=tuple(dict.fromkeys([*self.setup.preload, *order.preload])),
            folder=order.folder,
            socket_path=self.socket_path,
            place=self.place,
            listening=self.listening.fileno(),
            lock=lock,
            order=fds[0],
            line=line,
            fds=tuple(fds[1:]),
            began_at=self.time.began_at,
            used_at=self.time.used_at,
            num_runs=self.num_runs,
            others=others,
        )
        kept = os.memfd_create("muster-door", 0)
        write_all(kept, json.dumps(codec.to_plain(handed)).encode())
        inherited = [kept, lock, line, *fds, self.listening.fileno(), *(fd for fd, _ in others)]
        for fd in inherited:
            os.set_inheritable(fd, True)
        words = [self.entry, self.run_dir.path, "--handed", str(kept)]
        # The new interpreter reads the setup again.
        setup = {contract.SESSION_VARIABLE: json.dumps(codec.to_plain(self.setup))}
        sys.stdout.flush()
        try:
            os.execvpe(order.python[0], [*order.python, *words], {**job, **setup})
        except OSError as error:
            for fd in inherited:
                os.set_inheritable(fd, False)
            os.close(kept)
            caller.line = socket.socket(fileno=line)
            caller.line.setblocking(False)
            self.problem = f"{order.python[0]} can't be executed: {error.strerror}"
            self.renewed_for = caller

    def take_over(self, handed: messages.Handover) -> None:
        """Continue as the server that this process was before `_renew`."""
        self.listening = socket.socket(fileno=handed.listening)
        self.socket_path = handed.socket_path
        self.time.began_at, self.time.used_at = handed.began_at, handed.used_at
        self.num_runs = handed.num_runs
        adopt_lock(os.path.dirname(self.socket_path), handed.lock)
        others = [fd for fd, _ in handed.others]
        for fd in (handed.listening, handed.order, handed.line, *handed.fds, *others):
            os.set_inheritable(fd, False)
        order = messages.read_order(handed.order)
        line = socket.socket(fileno=handed.line)
        line.setblocking(False)
        if isinstance(order, messages.ForkAgent):
            caller = _Caller(line, order, [handed.order, *handed.fds])
            self.callers.append(caller)
            self.renewed_for = caller
        for fd, pid in handed.others:
            other = socket.socket(fileno=fd)
            other.setblocking(False)
            self.callers.append(_Caller(other, pid=pid))

    # End.

    def _look_at_time(self) -> bool:
        """Begin the end when it is time; return whether the session has ended and nothing runs."""
        if self.time.ends is None and (why := self.time.look(self._run_id())) is not None:
            self._begin_end(why)
        if self.time.ends is None:
            return False
        living = [c for c in self.callers if c.pid]
        if living and time.monotonic() > self.ends_at:
            for caller in living:
                proc.kill_quietly(caller.pid)
        return not living

    def _begin_end(self, why: str) -> None:
        """Start to end the session: agents get SIGTERM, as on a node that shuts down."""
        if self.time.ends is None:
            self.time.ends, self.ends_at = why, time.monotonic() + _GRACE_S
            print(f"muster: the session {self.setup.name} ends: {why}", flush=True)
            for caller in [c for c in self.callers if c.order and c.pid]:
                proc.kill_quietly(caller.pid, signal.SIGTERM)


def keep(words: list[str], entry: str, begun_ns: int, root: str) -> int | None:
    """Run a server until the session ends; in a forked spawner, return its agent's descriptor."""
    place = int(os.environ.get(contract.PLACE_VARIABLE, "0"))
    proc.become_subreaper()
    handed = None
    if len(words) > 1:
        fd = int(words[2])
        data = os.pread(fd, messages.MAX_ORDER_BYTES, 0)
        handed = codec.from_plain(messages.Handover, json.loads(data))
        os.close(fd)
        place = handed.place
    server = SessionServer(RunDir(words[0]), place, entry, root)
    os.environ.pop(contract.SESSION_VARIABLE, None)
    if handed is not None:
        server.node = handed.node
        server.import_all(begun_ns, handed.python, handed.preload, handed.folder)
        server.take_over(handed)
    else:
        setup, plan = server.setup, read_plan_file(words[0])
        server.node = forget_launcher(setup, plan, entry, root)
        server.import_all(begun_ns, server.node.python, setup.preload, setup.folder)
        server.listen()
        print(f"muster: the session's server on node {place} is open", flush=True)
    return server.serve()
