"""A host reached by ssh, for a run or tasks: what it is offered, connection, agents, relay, end.

It has two threads: one reads messages, one writes them and pings, so that a stalled host delays no
other.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir, muster_home
from torchmuster.core.model.plan import Program, RunPlan
from torchmuster.core.model.text import show_transfer
from torchmuster.core.net.address import read_secret
from torchmuster.core.proc import HasStatus
from torchmuster.errors import MusterError
from torchmuster.launcher.engines import ssh_command
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.files.code_copy import CodeFolder
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.relay import Relay
from torchmuster.launcher.net.replica import send_file
from torchmuster.launcher.node.remote.files import TOKEN_FILE, mark_of

SAY_EVERY_S = 5.0


class Route(Protocol):
    """A way to a host other than ssh; its remote end is waiting already."""

    def open(self, host: str, errors: int) -> tuple[HasStatus, int, int]:
        """Return a handle of the remote end, and its input and output; errors go to `errors`.

        Raises:
            MusterError: The host can't be reached.
        """


Starts = Callable[[Sequence[str], int, int, int], HasStatus]


def start_between_pipes(
    start: Starts, argv: Sequence[str], stderr: int
) -> tuple[HasStatus, int, int]:
    """Start a session; return its handle, and our ends of its input and output."""
    theirs_in, ours_in = os.pipe2(os.O_CLOEXEC)
    ours_out, theirs_out = os.pipe2(os.O_CLOEXEC)
    try:
        return start(argv, theirs_in, theirs_out, stderr), ours_in, ours_out
    except BaseException:
        os.close(ours_in)
        os.close(ours_out)
        raise
    finally:
        os.close(theirs_in)
        os.close(theirs_out)


def start_process(argv: Sequence[str], stdin: int, stdout: int, stderr: int) -> HasStatus:
    """Start ssh itself."""
    return proc.start(argv, stdin=stdin, stdout=stdout, stderr=stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What every host is offered, and how hosts are called.

    Attributes:
        way: How hosts are reached; None for ssh.
        root: Folder of this torchmuster, for hosts that share the file system; empty for none.
        pythons: Interpreters to try first for muster's own processes.
        start: Starts a session from ssh's command line, with these descriptors.
        connect_limit_s: How long a host may take to answer; a pod's replacement has to be created
            first.
        hint_of: Returns the remedy for an unusable host, given its name and the error.
    """

    ssh: tuple[str, ...]
    sha: str
    root: str
    files: tuple[tuple[str, bytes], ...]
    pythons: tuple[str, ...] = ()
    connect_limit_s: float = ssh_command.CONNECT_LIMIT_S
    way: Route | None = None
    start: Starts = start_process
    hint_of: Callable[[str, str], str] = ssh_command.hint_for

    def loader(self) -> bytes:
        """Return the program that is sent first."""
        source = dict(self.files)["launcher/node/remote/loader.py"]
        return source + f"\nmain({self.sha!r}, {self.root!r})\n".encode()

    def argv(self, host: ssh_command.SshHost) -> list[str]:
        """Return the command that opens a session with a host."""
        command = ssh_command.remote_command(
            ssh_command.marker_of(self.sha), len(self.loader()), self.pythons
        )
        return ssh_command.session_argv(self.ssh, host, command)

    def package(self) -> bytes:
        """Return the archive for hosts without this version of the package."""
        cache = os.path.join(muster_home(), "cache")
        return code_copy.cached_archive(cache, list(self.files), self.sha)


def make_bundle(ssh: Sequence[str], pythons: Sequence[str], *, may_share: bool) -> Bundle:
    """Return the offer of the torchmuster that runs here."""
    files = code_copy.package_files(proc.PACKAGE_FOLDER)
    return Bundle(
        ssh=tuple(ssh),
        sha=code_copy.content_hash(files),
        root=os.path.dirname(proc.PACKAGE_FOLDER) if may_share else "",
        files=tuple(files),
        pythons=tuple(pythons),
    )


class CodeArchive:
    """The code folder as one file, created when the first host asks for it."""

    def __init__(self, program: Program, run_dir: RunDir, root: str | None = None) -> None:
        self.base = root or code_copy.root_of(program.cwd)  # its files are not read here
        self._program = program
        self._path = os.path.join(run_dir.path, messages.CODE_FILE)
        self._lock = threading.Lock()
        self._folder: CodeFolder | None = None

    def path(self) -> str:
        """Return the archive's path; create it on the first call.

        Raises:
            UsageError: The code is too large, or the script is not in it.
        """
        with self._lock:
            if self._folder is None:
                folder = code_copy.find_code(self.base)
                code_copy.check_inside(self._program, folder.root)
                with open(self._path, "wb") as file:
                    code_copy.write_archive(folder.root, folder.names, file)
                self._folder = folder
        return self._path

    def describe(self, num_hosts: int) -> str | None:
        """Return a sentence on the code copied to `num_hosts` hosts; None if none was copied."""
        if self._folder is None or not num_hosts:
            return None
        hosts = f"{num_hosts} host{'s' if num_hosts != 1 else ''}"
        return f"no shared file system: copied {self._folder.describe()} to {hosts}"

    def telling(self, host: str, say: Callable[[str], None]) -> Callable[[int], None]:
        """Return a callback for the bytes sent to a host; it reports progress every few seconds."""
        began_at = said_at = time.monotonic()

        def note(done_bytes: int) -> None:
            nonlocal said_at
            now = time.monotonic()
            if now - said_at >= SAY_EVERY_S:
                said_at, total = now, os.path.getsize(self._path)
                say(f"the code goes to {host}: {show_transfer(done_bytes, total, now - began_at)}")

        return note

    def remove(self) -> None:
        """Remove the archive."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def order_to_set_up(
    plan: RunPlan,
    run_dir: RunDir,
    *,
    token: str,
    may_share: bool,
    code_root: str,
    of_head: messages.Placed | None,
) -> messages.SetUpRun:
    """Return the message that sets up a run on a host.

    Args:
        plan: Plan of the run.
        run_dir: The run directory here.
        token: Content of a file in `run_dir`, by which a host notices that it shares the directory.
        may_share: Look for a shared file system; else everything is copied.
        code_root: The folder of the code.
        of_head: The run's placement on the head's host; None for that host.
    """
    script = code_copy.script_of(plan.program)
    return messages.SetUpRun(
        plan=plan,
        run_dir=run_dir.path,
        mark=mark_of(run_dir.path),
        token=token,
        may_share=may_share,
        secret=read_secret(run_dir.secret).hex(),
        script=code_copy.identity(script) if script is not None else None,
        code_root=code_root,
        head_run_dir=of_head.run_dir if of_head is not None else None,
        head_mark=of_head.mark if of_head is not None else "",
    )


_PING_EVERY_S = 4.0
_FACTS_LIMIT_S = 20.0
_SILENCE_S = 30.0
_GONE_S = 10.0  # less than a lease, after which the head asks for another agent
_MAX_NOISE_BYTES = 1 << 20
_LEAVE_S = 12.0
_MAX_STDERR_BYTES = 16 << 10

_MAX_THREADS = 256

Answer = TypeVar("Answer", bound=messages.RemoteMessage)
Item = TypeVar("Item")
Made = TypeVar("Made")


class HostError(Exception):
    """A host can't be used, or not any more."""

    def __init__(self, problem: ssh_command.HostProblem) -> None:
        super().__init__(problem.line())
        self.problem = problem


def share_token(run_dir: RunDir) -> str:
    """Write a token into the run directory and return it: hosts that read it there share it."""
    token = secrets.token_hex(16)
    with open(os.path.join(run_dir.path, TOKEN_FILE), "w") as file:
        file.write(token + "\n")
    return token


def in_parallel(action: Callable[[Item], Made], items: Collection[Item]) -> list[Made]:
    """Apply the action to each item, in threads because hosts are slow; return the results."""
    if not items:
        return []
    with ThreadPoolExecutor(min(len(items), _MAX_THREADS), "ssh") as pool:
        return list(pool.map(action, items))


@dataclass(slots=True)
class _Agent:
    ended: Callable[[int, str | None], None]
    started: messages.AgentStarted | None = None
    why: str | None = None


class RemoteHost:
    """A session with a host.

    Attributes:
        on_message: Gets messages that answer no question: pieces of files, requests for agents
            elsewhere.
        on_lost: Called once when the connection has ended for any reason, before its agents are
            reported as ended.
        session: The state of its session's server; None without one.
        placed: Where the run is on the host; None before it is set up.
        problem: Why the host can't be used any more; None if it can.
        place: Its place in a run.
    """

    def __init__(self, host: ssh_command.SshHost, bundle: Bundle, run_dir: RunDir) -> None:
        self.host = host
        self.place: int | None = None
        self.facts = messages.RemoteFacts(has_package=False, num_cpus=1, num_gpus=0, memory_bytes=0)
        self.placed: messages.Placed | None = None
        self.is_lost = False
        self.last_heard = time.monotonic()
        self.on_message: Callable[[RemoteHost, messages.RemoteMessage], None] = lambda *_: None
        self.on_lost: Callable[[RemoteHost], None] = lambda _: None
        self.relay = Relay(self, first_id=1)
        self._bundle, self._run_dir = bundle, run_dir
        self._stderr_path = os.path.join(run_dir.path, "logs", "ssh", f"{host.name}.log")
        self._child: HasStatus | None = None
        self.session: messages.SessionStatus | None = None
        self._answers: dict[type[messages.RemoteMessage], messages.RemoteMessage] = {}
        self._agents: dict[int, _Agent] = {}
        self._num_agents = 0
        self.problem: ssh_command.HostProblem | None = None
        self._changed = threading.Condition()
        self._writer: messages.FrameWriter | None = None

    @property
    def pid(self) -> int:
        """The process id of ssh."""
        return self._child.pid if self._child is not None else 0

    @property
    def is_usable(self) -> bool:
        """Whether agents can be started there."""
        return not self.is_lost and self.problem is None

    @property
    def is_answering(self) -> bool:
        """Whether it was heard lately; after a power cut its connection stays for 30 s."""
        return time.monotonic() - self.last_heard < _GONE_S

    @property
    def num_agents(self) -> int:
        """How many agents run there, or are being started."""
        return len(self._agents)

    # Connecting.

    def open(self) -> None:
        """Connect and bring torchmuster there; blocks, so each host has a thread.

        Raises:
            HostError: The host can't be used; raised within 10 s if it doesn't answer.
        """
        try:
            reader, writer = self._start_ssh()
            self._meet(reader, writer)
        except HostError:
            self.abandon()
            raise
        except MusterError as error:
            words = ": ".join(word for word in (error.what, error.why) if word)
            problem = ssh_command.HostProblem(host=self.host.name, words=words, fix=error.fix or "")
            raise HostError(problem) from error
        name = self.host.name
        threading.Thread(target=self._read, args=(reader,), name=name, daemon=True).start()

    def _start_ssh(self) -> tuple[messages.FrameReader, messages.FrameWriter]:
        os.makedirs(os.path.dirname(self._stderr_path), exist_ok=True)
        error = os.open(self._stderr_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        way = self._bundle.way
        try:
            if way is not None:
                self._child, to, out = way.open(self.host.name, error)
            else:
                argv = self._bundle.argv(self.host)
                self._child, to, out = start_between_pipes(self._bundle.start, argv, error)
        finally:
            os.close(error)
        self._writer = messages.FrameWriter(to)
        if way is None:
            self._writer.send_raw(self._bundle.loader())
        return messages.FrameReader(out), self._writer

    def _meet(self, reader: messages.FrameReader, writer: messages.FrameWriter) -> None:
        """Wait for the loader, read the host's facts, send the package if it lacks it."""
        marker = ssh_command.marker_of(self._bundle.sha).encode()
        limit_s = self._bundle.connect_limit_s
        try:
            is_there = self._bundle.way is not None
            if not is_there and reader.read_until(marker, _MAX_NOISE_BYTES, limit_s) is None:
                raise HostError(self._why("the connection ended before anything ran"))
            self.facts = self._read_facts(reader)
            status = reader.read(_FACTS_LIMIT_S) if is_there else None
            self.session = status if isinstance(status, messages.SessionStatus) else None
        except TimeoutError as error:
            raise HostError(self._why(f"no answer for {limit_s:.0f} s")) from error
        except messages.FrameError as error:
            raise HostError(self._why(f"the output of its shell can't be read: {error}")) from error
        if not self.facts.has_package:
            package = self._bundle.package()
            writer.send_raw(messages.LENGTH.pack(len(package)) + package)
        writer.ping_every(_PING_EVERY_S)

    def _read_facts(self, reader: messages.FrameReader) -> messages.RemoteFacts:
        try:
            facts = reader.read(_FACTS_LIMIT_S)
        except messages.FrameError:
            facts = None
        if isinstance(facts, messages.RemoteFacts):
            return facts
        if b"no-python" in reader.rest:
            raise HostError(ssh_command.no_python(self.host.name, self._stderr()))
        raise HostError(self._why("its Python ended at once"))

    # Messages.

    def send(self, message: messages.RemoteMessage, *, bulk: bool = False) -> bool:
        """Send a message; bulk waits for room. Return whether the connection is open."""
        if self._writer is None:
            raise ValueError("open comes first")
        return self._writer.send(message, bulk=bulk)

    def ask(self, message: messages.RemoteMessage, kind: type[Answer]) -> Answer:
        """Send a question and wait for its answer.

        Raises:
            HostError: The host refuses, or is gone.
        """
        with self._changed:
            self._answers.pop(kind, None)
        self.send(message)
        return self.expect(kind)

    def expect(self, kind: type[Answer]) -> Answer:
        """Wait for an answer while the host gives signs of life: speeds differ."""
        with self._changed:
            self._changed.wait_for(lambda: kind in self._answers or self.problem is not None)
            answer = self._answers.pop(kind, None)
            if isinstance(answer, kind):
                return answer
            raise HostError(self.problem or self._why("the connection ended"))

    def set_up(
        self,
        message: messages.SetUpRun | messages.SetUpTasks,
        code: Callable[[], str] | None = None,
        note: Callable[[int], None] | None = None,
    ) -> str | None:
        """Set up the run on a host, sending the code if it lacks it; return a note for the user.

        Args:
            message: The run, or the tasks.
            code: Returns the path of the code archive.
            note: Called with the number of bytes sent so far.

        Raises:
            HostError: The setup failed.
            UsageError: The code can't be copied.
        """
        with self._changed:
            self._answers.pop(messages.SetUpDone, None)
        placed = self.ask(message, messages.Placed)
        has_call = isinstance(message, messages.SetUpRun) and message.plan.program.call is not None
        if has_call and not placed.is_shared and not placed.with_head:
            send_file(self, self._run_dir.call, messages.CALL_FILE)
        if placed.wants_code and code is not None:
            send_file(self, code(), messages.CODE_FILE, note)
            self.send(messages.CodeSent())
        done = self.expect(messages.SetUpDone)
        self.placed = placed
        return done.note

    def _read(self, reader: messages.FrameReader) -> None:
        reason = "the connection ended"
        try:
            while (message := reader.read(_SILENCE_S)) is not None:
                self.last_heard = time.monotonic()
                self._take(message)
        except TimeoutError:
            reason = f"no sign of life for {_SILENCE_S:.0f} s"
        except (messages.FrameError, OSError, ValueError, RecursionError) as error:
            reason = f"what came is no message: {error}"
        self.is_lost = True
        self._end_ssh(1.0)
        self.refuse(self._why(reason))
        self.relay.close()
        self.on_lost(self)
        for agent_id in list(self._agents):
            self._end_agent(agent_id, messages.GONE, f"the connection to {self.host.name} is lost")

    def _take(self, message: messages.RemoteMessage) -> None:
        match message:
            case messages.RemotePong():
                pass
            case messages.RemoteReady(protocol=protocol):
                if protocol != messages.PROTOCOL:
                    words = f"its torchmuster speaks version {protocol} of the protocol, this one {messages.PROTOCOL}"
                    fix = "remove ~/.cache/torchmuster there"
                    self.refuse(ssh_command.HostProblem(host=self.host.name, words=words, fix=fix))
            case (
                messages.Placed()
                | messages.SetUpDone()
                | messages.Collected()
                | messages.EnvironmentPlaced()
                | messages.EnvironmentWants()
                | messages.EnvironmentDone()
                | messages.EnvironmentsPruned()
            ):
                with self._changed:
                    self._answers[type(message)] = message
                    self._changed.notify_all()
            case messages.RemoteFailed():
                parts = (message.what, message.where, message.why)
                words = ": ".join(part for part in parts if part)
                self.refuse(
                    ssh_command.HostProblem(host=self.host.name, words=words, fix=message.fix or "")
                )
            case messages.AgentStarted(agent_id=agent_id):
                with self._changed:
                    if agent_id in self._agents:
                        self._agents[agent_id].started = message
                    self._changed.notify_all()
            case messages.AgentEnded(agent_id=agent_id, status=status, why=why):
                self._end_agent(agent_id, status, why)
            case _ if isinstance(message, messages.OfRelay):
                self.relay.take(message)
            case _:
                self.on_message(self, message)

    def refuse(self, problem: ssh_command.HostProblem) -> None:
        """Stop using the host, for the first problem; threads that wait for it get that."""
        with self._changed:
            self.problem = self.problem or problem
            self._changed.notify_all()

    # Agents.

    def start(
        self,
        message: messages.StartNode | messages.StartTask,
        ended: Callable[[int, str | None], None],
    ) -> messages.AgentStarted:
        """Start an agent, wait until it runs; `ended` gets its status, and why if not its own.

        Raises:
            HostError: It can't be started; `ended` is not called.
        """
        agent = _Agent(ended)
        with self._changed:
            self._num_agents += 1
            agent_id = self._num_agents
            self._agents[agent_id] = agent
        self.send(replace(message, agent_id=agent_id))
        with self._changed:
            self._changed.wait_for(
                lambda: agent.started or agent_id not in self._agents or self.problem is not None
            )
            if agent.started is not None:
                return agent.started
            self._agents.pop(agent_id, None)
            if agent.why is None or self.problem is not None:
                raise HostError(self.problem or self._why("the connection ended"))
            raise HostError(ssh_command.HostProblem(host=self.host.name, words=agent.why, fix=""))

    def _end_agent(self, agent_id: int, status: int, why: str | None) -> None:
        with self._changed:
            agent = self._agents.pop(agent_id, None)
            if agent is not None:
                agent.why = why
            self._changed.notify_all()
        if agent is not None and agent.started is not None:
            agent.ended(status, why)

    def kill(self, agent_id: int) -> None:
        """SIGKILL an agent and what it started; its end is not reported."""
        with self._changed:
            self._agents.pop(agent_id, None)
        self.send(messages.KillAgent(agent_id=agent_id))

    def cut_off(self) -> None:
        """Kill ssh; the remote end then sees the end of its input."""
        if self._child is not None:
            self._child.send_signal(9)

    def kill_all(self) -> None:
        """SIGKILL all agents and what they started."""
        for agent_id in list(self._agents):
            self.send(messages.KillAgent(agent_id=agent_id))

    # The end.

    def last_words(self) -> str:
        """Return the last lines of the session's standard error."""
        return " / ".join(self._stderr().strip().splitlines()[-3:])

    def close(self) -> None:
        """Let the remote end leave, then make sure that ssh has ended."""
        if self._writer is not None:
            self._writer.send(messages.LeaveHost())
            self._writer.close()
        self._end_ssh(_LEAVE_S)

    def abandon(self) -> None:
        """End ssh now; the remote end then sees the end of its input."""
        if self._writer is not None:
            self._writer.close()
        self._end_ssh(0.0)

    def _end_ssh(self, patience_s: float) -> None:
        child = self._child
        if child is None:
            return
        for signum in (15, 9):
            if patience_s and child.wait(patience_s) is not None:
                return
            child.send_signal(signum)
            patience_s = 1.0
        child.wait(1.0)

    def _why(self, otherwise: str) -> ssh_command.HostProblem:
        if self._child is not None:
            self._child.wait(0.3)  # so that its last words have arrived
        hint_of = self._bundle.hint_of
        return ssh_command.problem_of(self.host.name, self._stderr(), otherwise, hint_of)

    def _stderr(self) -> str:
        with contextlib.suppress(OSError), open(self._stderr_path, errors="replace") as file:
            return file.read(_MAX_STDERR_BYTES)
        return ""
