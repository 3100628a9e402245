"""The scheduler's job around this process: its nodes, and the engine that starts an agent on each.

The head's agent is a child process, as on one machine; the others are started by the scheduler's own
means, with all addresses of the head. They end when the head is gone (by their lease), or with the
step that runs them.
"""

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

from torchmuster.core import proc
from torchmuster.core.engines.local import HEAD, AgentEnd, AgentProcesses, agent_argv
from torchmuster.core.files import atomic
from torchmuster.core.files.claims import Claims
from torchmuster.core.files.layout import RunDir, size_of
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.net.address import own_addresses
from torchmuster.core.node.options import AgentOrder, leave_environment
from torchmuster.core.plainfile import open_plain
from torchmuster.core.proc import HasStatus, Starter
from torchmuster.errors import HeadLostError, UsageError
from torchmuster.launcher.engines.base import Dialect, EngineError, NodeStart
from torchmuster.launcher.engines.registry import find_job, load_dialect
from torchmuster.launcher.engines.schedulers import is_in_torque, set_by_schedulers
from torchmuster.launcher.engines.wait_reasons import reasons_of
from torchmuster.launcher.model.job import AllocatedNode, Allocation, NodeLauncher
from torchmuster.launcher.model.scheduler import refuse_removed_engine
from torchmuster.launcher.net.interfaces import own_endpoints

# The launcher for agents on other hosts is the first installed one of the site's list.
#
# PBS's own commands are often not on a job script's PATH, so they are also searched where PBS is
# installed.


_WRAPPER_SAYS = "no non-PBS mpiexec in PBS_O_PATH"
_CONF = "/etc/pbs.conf"
_ROOTS = ("/opt/pbs", "/usr/local/pbs")  # Source: OpenPBS and PBS Professional, default PBS_EXEC


def _read(path: str) -> str:
    """Read a small file, such as PBS's node file."""
    with open(path) as file:
        return file.read(1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """The command that starts agents on the other hosts.

    Attributes:
        kind: None for a dialect with only one launcher.
        program: The full path of the command if it isn't on PATH.
        sentence: A note on the choice; None for the usual one.
    """

    kind: NodeLauncher | None = None
    program: str | None = None
    sentence: str | None = None

    def argv(self, dialect: Dialect, node: AllocatedNode, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a node, with this launcher's program."""
        argv = dialect.node_argv(
            NodeStart(
                node=node.name,
                command=tuple(command),
                slot=node.slot,
                cpus=node.cpus,
                het_group=node.het_group,
                launcher=self.kind,
            )
        )
        return [self.program, *argv[1:]] if self.program is not None else argv


def parse_launchers(text: str | None) -> tuple[NodeLauncher, ...]:
    """Parse a comma-separated list of launchers; UsageError for an unknown one."""
    found: list[NodeLauncher] = []
    for word in filter(None, (text or "").split(",")):
        try:
            found.append(NodeLauncher(word))
        except ValueError:
            known = ", ".join(launcher.value for launcher in NodeLauncher)
            raise UsageError(f"`{word}` is not a launcher", fix=f"one of {known}") from None
    return tuple(found)


def choose_launcher(
    dialect: Dialect,
    wanted: Sequence[NodeLauncher],
    environment: Mapping[str, str],
    which: Callable[[str], str | None] = shutil.which,
    read: Callable[[str], str] = _read,
) -> LaunchCommand:
    """Return the first wanted launcher that is installed; by default, of the dialect's own.

    Raises:
        EngineError: None is installed.
    """
    own: tuple[NodeLauncher, ...] = getattr(dialect, "launchers", ())
    if not own and not wanted:
        return LaunchCommand()
    folders = _folders(environment, read)
    wrapper: str | None = None
    launchers = wanted or own
    for launcher in launchers:
        path = which(launcher.value)
        if (
            path is not None
            and launcher is NodeLauncher.MPIEXEC
            and _is_wrapper(path, folders, read)
        ):
            wrapper = path
        elif path is not None:
            sentence = _sentence(launcher, launcher.value, launchers)
            return LaunchCommand(kind=launcher, sentence=sentence)
        # ssh and srun are not PBS's, and PBS's mpiexec is no launcher.
        if launcher not in own or launcher in (NodeLauncher.SSH, NodeLauncher.MPIEXEC):
            continue
        paths = (os.path.join(folder, launcher.value) for folder in folders)
        if path := next(filter(which, paths), None):
            sentence = _sentence(launcher, path, launchers)
            return LaunchCommand(kind=launcher, program=path, sentence=sentence)
    raise _no_launcher(launchers, folders, wrapper)


def find_commands(
    dialect: Dialect,
    environment: MutableMapping[str, str],
    which: Callable[[str], str | None] = shutil.which,
    read: Callable[[str], str] = _read,
) -> None:
    """Add PBS's commands to a job's PATH if they are missing: a login shell may have reset it."""
    program = dialect.status_argv(["1"])[0][0]
    if NodeLauncher.PBSDSH not in getattr(dialect, "launchers", ()) or which(program):
        return
    folders = _folders(environment, read)
    found = next((one for one in folders if which(os.path.join(one, program))), None)
    if found is not None:
        words = [environment["PATH"]] if environment.get("PATH") else []
        environment["PATH"] = os.pathsep.join([*words, found])


def _no_launcher(
    launchers: Sequence[NodeLauncher], folders: Sequence[str], wrapper: str | None
) -> EngineError:
    why = f"{wrapper} is OpenPBS's own, which only calls another MPI's" if wrapper else ""
    left = [one for one in launchers if not (wrapper and one is NodeLauncher.MPIEXEC)]
    missing = [launcher.value for launcher in left]
    none = f"none of these exists: {', '.join(missing)}" if missing else ""
    return EngineError(
        "there is no launcher to start agents on the job's other hosts",
        where=f"PATH, {', '.join(folders)}" if folders else "PATH",
        why="; ".join(filter(None, (why, none))),
        fix="set `start_with` in muster.toml, or load PBS's module in `setup`",
    )


def _is_wrapper(path: str, folders: Sequence[str], read: Callable[[str], str]) -> bool:
    """Return whether an mpiexec is OpenPBS's own, which calls another one from PBS_O_PATH."""
    if os.path.dirname(os.path.realpath(path)) in folders:
        return True
    try:
        return _WRAPPER_SAYS in read(path)
    except (OSError, ValueError):
        return False  # a binary, or unreadable


def _sentence(
    launcher: NodeLauncher, program: str, launchers: Sequence[NodeLauncher]
) -> str | None:
    if launcher is NodeLauncher.PBSDSH and program == launcher.value:
        return None
    before = [other.value for other in launchers[: launchers.index(launcher)]]
    why = f": there is no {' and no '.join(before)} here that works" if before else ""
    return f"agents of the other hosts are started by {program}{why}"


def _folders(environment: Mapping[str, str], read: Callable[[str], str]) -> list[str]:
    """Return the folders in which PBS may have its commands."""
    roots = [environment["PBS_EXEC"]] if environment.get("PBS_EXEC") else []
    with contextlib.suppress(OSError):  # no PBS, or one without the file
        roots += re.findall(r"^\s*PBS_EXEC=(\S+)", read(_CONF), re.MULTILINE)
    return [os.path.join(root, "bin") for root in dict.fromkeys([*roots, *_ROOTS])]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnJob:
    """The job that contains this process, or those of its nodes that are ours.

    Attributes:
        launcher: The command that starts commands on the other nodes.
    """

    dialect: Dialect
    allocation: Allocation
    launcher: LaunchCommand = field(default_factory=LaunchCommand)

    @property
    def nodes(self) -> tuple[AllocatedNode, ...]:
        """The nodes of the job."""
        return self.allocation.nodes

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of the nodes, in order."""
        return tuple(node.name for node in self.nodes)

    def from_here(self) -> "OwnJob | None":
        """Return it with this node first; None outside its nodes, e.g. in `salloc`'s shell."""
        own = self.allocation.own_node
        if own not in self.node_names:
            here = {os.uname().nodename, own or ""}
            short = {name.partition(".")[0] for name in here if name}
            own = next((n for n in self.node_names if n.partition(".")[0] in short), None)
        if own is None:
            return None
        return self.with_nodes(sorted(self.nodes, key=lambda node: node.name != own))

    def with_nodes(self, nodes: Iterable[AllocatedNode]) -> "OwnJob":
        """Return it with only these nodes, in this order."""
        return replace(self, allocation=replace(self.allocation, nodes=tuple(nodes)))

    @property
    def can_start_others(self) -> bool:
        """Whether muster can start commands on the other nodes: not in a Torque job."""
        return not is_in_torque(os.environ)

    def with_launcher(self, words: str | None = None) -> "OwnJob":
        """Return it with a launcher, one of `words`, for its other nodes; one node needs none.

        Raises:
            EngineError: None of the launchers is installed.
            UsageError: It is a Torque job.
        """
        wanted = parse_launchers(words)
        if len(self.nodes) < 2:
            return self
        if not self.can_start_others:
            refuse_removed_engine("torque", f"job {self.allocation.job_id}")
        return replace(self, launcher=choose_launcher(self.dialect, wanted, os.environ))

    def leave_environment(self, path: str) -> None:
        """Write our variables to a file for the other nodes, except those only for this one."""
        leave_environment(path, set_by_schedulers(self.dialect))

    def argv(self, node: AllocatedNode, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a node."""
        return self.launcher.argv(self.dialect, node, command)


def find_own_job(engine: str | None = None) -> OwnJob | None:
    """Return the job around this process, of any scheduler or only `engine`; else None."""
    if engine is None:
        found = find_job(os.environ, _read)
        return OwnJob(dialect=found[0], allocation=found[1]) if found is not None else None
    dialect = load_dialect(engine)
    allocation = dialect.allocation(os.environ, _read)
    return OwnJob(dialect=dialect, allocation=allocation) if allocation is not None else None


def own_job(engine: str, where: str) -> OwnJob:
    """Return the job of this scheduler that contains this process.

    Raises:
        UsageError: No such job contains it.
    """
    job = find_own_job(engine)
    if job is None:
        fix = f"muster run or submit --on {engine}"
        raise UsageError(f"this is not a job of {engine}", where=where, fix=fix)
    find_commands(job.dialect, os.environ)
    return job


# pbsdsh always exits with 0; the hosts' daemons write its task's errors to the job's output.
_TASK_FAILED = re.compile(r"^(?:\S*/)?pbsdsh: task \S+ exit status [1-9]")
_MOST_LOG_BYTES = 1 << 16
_ERROR = re.compile(r"error:|because:|not found|No such file|denied|can't open", re.IGNORECASE)
_MOST_ERRORS, _MOST_LINE = 3, 200


def _errors_of(log: str, since: int) -> tuple[str, ...]:
    """Return errors from a job's output after offset `since`, without our own lines."""
    try:
        with open_plain(log) as file:
            file.seek(since)
            lines = file.read(_MOST_LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ()
    found = [line.strip()[:_MOST_LINE] for line in lines if _ERROR.search(line)]
    return tuple(dict.fromkeys(line for line in found if not line.startswith("muster:")))[
        :_MOST_ERRORS
    ]


@dataclass
class AllocationEngine(AgentProcesses):
    """The agents of a run on the nodes of a job.

    Attributes:
        job: The job, with the launcher for its other nodes.
        holder: The claimant of the head's terms; empty if no other head can take over.
    """

    plan: RunPlan
    run_dir: RunDir
    job: OwnJob
    holder: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._kills = 0
        self._starters: dict[int, Starter] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """The head's addresses, which login nodes call."""
        return tuple(own_addresses())

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start an agent on every place, the head first."""
        self.start_head(first_attempt=first_attempt, restarts_spent=restarts_spent)
        # pbsdsh passes on no variables of the job's script, nor what `module load` has set there.
        self.job.leave_environment(self.run_dir.environment)
        for place in range(1, min(self.plan.num_places, len(self.job.nodes))):
            self.start_place(place)

    def start_head(self, *, first_attempt: int, restarts_spent: int) -> None:
        """Start the head's agent, with the newest term.

        Raises:
            HeadLostError: Another node has become the head.
        """
        if self.holder:
            claims = Claims(self.run_dir.succession)
            newest = claims.newest()
            if newest is None or newest.holder != self.holder:
                raise HeadLostError(f"{claims.head_node()} has become the head of this run")
            self.term = newest.number
        super().start_head(first_attempt=first_attempt, restarts_spent=restarts_spent)

    def _announce(self) -> None:
        claims = Claims(self.run_dir.succession)
        if self.term is None or not claims.has_heirs:
            super()._announce()
        else:  # another node may have announced itself already
            claims.announce(self.term, self._endpoints())

    def is_deposed(self) -> bool:
        """Return whether another node has become the head; reads the claims from disk."""
        if not self.holder:
            return False
        newest = Claims(self.run_dir.succession).newest()
        return newest is not None and newest.holder != self.holder

    def _endpoints(self) -> tuple[str, ...]:
        return own_endpoints(self.address[1])

    def start_place(self, place: int) -> None:
        """Start an agent on one place, the first or a replacement."""
        if place >= len(self.job.nodes):
            return  # the job has no more nodes; the head continues without, or waits
        node = self.job.nodes[place]
        order = AgentOrder(
            run_dir=self.run_dir.path,
            place=place,
            head=self._endpoints(),
            environment=self.run_dir.environment,
        )
        argv = self.job.argv(node, agent_argv(order))
        for held, child in self._agents:
            if held == place and self._is_late(child):
                child.send_signal(signal.SIGKILL)
        log_bytes = size_of(self.run_dir.job_log)
        start = proc.start_agent(argv, keeps_output=True)
        start.log_bytes = log_bytes
        self._starters[start.child.pid] = start
        self._agents.append((place, start.child))

    def cut_lifeline(self) -> None:
        """Let all agents end with their workers, even those that look for a new head."""
        if self._lifeline is not None and not self.holds(self.head_place):
            with contextlib.suppress(OSError):  # such agents are killed later
                atomic.write_json(self.run_dir.moved, [])
        super().cut_lifeline()

    def holds(self, place: int) -> bool:
        """Return whether a start of this place may still bring an agent; not if it hangs."""
        return any(held == place and not self._is_late(child) for held, child in self._agents)

    def _is_late(self, child: HasStatus) -> bool:
        """Return whether a start is late: it hangs, or its agent is lost."""
        start = self._starters.get(child.pid)
        return start is not None and start.is_late(time.monotonic())

    def _words_of(self, child: HasStatus) -> tuple[str, ...]:
        start = self._starters.pop(child.pid, None)
        if start is None:
            return ()
        said = start.said()
        if any(_TASK_FAILED.search(line) for line in said):
            said += _errors_of(self.run_dir.job_log, start.log_bytes)
        return said

    def _says_gone(self, said: Sequence[str]) -> bool:
        reasons = reasons_of(self.job.dialect)
        pattern = reasons.gone if reasons is not None else None
        return bool(pattern) and any(re.search(str(pattern), line) for line in said)

    def kill_all(self) -> None:
        """End every agent; on the second call, kill the launchers as well."""
        self._kills += 1
        for place, child in self._agents:
            # srun ends its step on SIGTERM; killed at once, it may leave the step running.
            gently = place != self.head_place and self._kills == 1
            child.send_signal(signal.SIGTERM if gently else signal.SIGKILL)


@dataclass
class InheritedEngine(AllocationEngine):
    """The agents of a run whose head an agent has become; that agent started this owner.

    Attributes:
        place: The place of the agent with the head.
        head_pid: The process of that agent: our parent.
        port: The port on which the head listens.
    """

    place: int = HEAD
    head_pid: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.address = ("127.0.0.1", self.port)
        self.head_place = self.place
        self._reported_end = False

    def start_place(self, place: int) -> None:
        """Start an agent on one place again."""
        if place != self.place:
            super().start_place(place)

    def holds(self, place: int) -> bool:
        """Return whether an agent of this place runs: the head's, or one that we started."""
        if place == self.place:
            return proc.is_running(self.head_pid)
        return super().holds(place)

    @property
    def head_state(self) -> str | None:
        """The state of the head's process; `X` if there is none."""
        facts = proc.read_process(self.head_pid)
        return facts.state if facts is not None else "X"

    def poll(self) -> list[AgentEnd]:
        """Reap the processes that we started, and report the end of the head's agent once."""
        ends = super().poll()
        if not self._reported_end and not proc.is_running(self.head_pid):
            self._reported_end = True
            ends.append(AgentEnd(place=self.place, status=1))
        return ends

    def kill_head(self) -> None:
        """SIGKILL the head's agent; the other agents then elect another head."""
        proc.kill_quietly(self.head_pid)

    def is_deposed(self) -> bool:
        """Return whether another node is the head, or has to be: we can't restart our own agent."""
        return not proc.is_running(self.head_pid) or super().is_deposed()
