"""Remote end of an ssh session: starts agents, relays connections, sends files back, and ends all when the client is gone.

Messages of `launcher/net/remote_messages.py` come on standard input and go to standard output. The end of input, or silence for 20 s,
is the end of the run on this host: the agents' lifeline is cut, after 5 s everything below is killed, the secret is removed.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torchmuster.core import plugs, proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, muster_home
from torchmuster.core.model import codec, contract
from torchmuster.core.model.codec import from_arguments, to_arguments
from torchmuster.core.model.plan import ScriptKind
from torchmuster.core.net.address import bind, own_addresses
from torchmuster.core.node.options import AgentOrder
from torchmuster.core.node.setup import start_removing_leftovers
from torchmuster.core.proc import HasStatus
from torchmuster.errors import MusterError
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.broker import AgentBroker, AgentRequest
from torchmuster.launcher.net.relay import Relay, RelayPort, SendsMessages
from torchmuster.launcher.net.replica import Copy, CopyScope, CopyState, Feed
from torchmuster.launcher.node import shelf as shelves
from torchmuster.launcher.node.arrival import ComingEnvironment
from torchmuster.launcher.node.remote.files import (
    RUN_RECORD,
    CodeOutputs,
    make_own_run_dir,
    mark_of,
    sees_run,
    send_made,
    write_private,
)
from torchmuster.launcher.node.remote.proxy import BROKER_VARIABLE, HOST_VARIABLE
from torchmuster.launcher.node.shelf import VARIABLE, Shelf, check_fit, try_torch
from torchmuster.launcher.node.shell import NodeShell

# A session's side of an environment that comes to this host (`launcher/node/arrival.py`): what the client says of it, and what it hears.


_MAX_ADDRESSES = 16
_REMOVE_S = 5.0


class EnvironmentPlace:
    """One environment on this host.

    Raises:
        MusterError: The host is not fit for it.

    Attributes:
        path: Its folder, once it is there.
    """

    def __init__(self, offer: messages.OfferEnvironment, session: SendsMessages) -> None:
        self._offer, self._session = offer, session
        check_fit(offer.needs)
        self._shelf = Shelf(offer.needs, _here(offer.scratch))
        self.path = self._shelf.path
        self._arrival: ComingEnvironment | None = None
        self._tries = False

    def answer(self) -> None:
        """Tell the client whether it has to come, and where the host before may bring it.

        Raises:
            MusterError: There is no room.
            OSError: It can't be taken.
        """
        if self._shelf.take():
            self._session.send(messages.EnvironmentPlaced(has=True))
            return
        self._shelf.check_room()
        arrival = ComingEnvironment(self._shelf, bytes.fromhex(self._offer.secret), self._end)
        self._arrival = arrival
        addresses = (*own_addresses(), "127.0.0.1")[:_MAX_ADDRESSES]
        self._session.send(
            messages.EnvironmentPlaced(has=False, port=arrival.port, addresses=addresses)
        )

    def take(
        self,
        message: messages.PassEnvironment | messages.BringEnvironment | messages.EnvironmentPiece,
    ) -> None:
        """Do what the client says."""
        arrival = self._arrival
        if arrival is None:
            return
        match message:
            case messages.PassEnvironment(addresses=addresses, port=port):
                session = self._session
                arrival.pass_on(
                    addresses,
                    port,
                    lambda why: session.send(messages.EnvironmentHopFailed(why=why)),
                )
            case messages.BringEnvironment(tries=tries):
                self._tries = self._tries or tries
                arrival.supersede(None)
                self._session.send(messages.EnvironmentWants(index=arrival.wants))
            case messages.EnvironmentPiece(index=index, data=data):
                if not arrival.take(index, data):
                    arrival.refuse("the environment came damaged: its checksum is another")

    def _end(self, why: str | None) -> None:
        if why is None and self._tries:
            try:
                try_torch(self.path, self._offer.needs)
            except MusterError as error:
                why = f"{error.what}: {error.why}"
        self._session.send(messages.EnvironmentDone(why=why))

    def close(self) -> None:
        """Remove what has not come whole."""
        if self._arrival is not None:
            self._arrival.close(_REMOVE_S)


def _here(scratch: str | None) -> str | None:
    """Return the site's folder on this host."""
    return os.path.expandvars(os.path.expanduser(scratch)) if scratch else None


def prune(wanted: messages.PruneEnvironments) -> messages.EnvironmentsPruned:
    """Remove old environments of this host, or say which they are; those that a run uses stay."""
    folder = shelves.find_folder(_here(wanted.scratch))
    found = shelves.old_ones(folder, wanted.older_s, wanted.most_bytes)
    if not wanted.dry_run:
        found = [one for one in found if shelves.forget(one[0].path)]
    paths = tuple(kept.path for kept, _ in found)
    return messages.EnvironmentsPruned(paths=paths, size_bytes=sum(size for _, size in found))


# The agents at the remote end of an ssh session: they are started, watched, killed, and end when the session does.
#
# The agent of a task calls the head of its group, which is a process of the client's machine, at a port of the loopback here.
# A training task on several hosts asks a broker here (`launcher/net/broker.py`) for the agents of its other hosts; the request goes on to
# the client, and from there to the other host.


_GENTLE_S = 5.0
_KILL_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")
_HEAD = re.compile(r"[0-9a-zA-Z.:]{1,300}")


class AgentForker(Protocol):
    """Forks the agents of this node: that of a session, or of a pod that has imported torch."""

    say: Callable[[str], None]

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that agents get."""

    def wait_open(self) -> bool:
        """Wait until agents can be asked for; say whether they can."""

    def state(self) -> messages.SessionStatus:
        """Return how it is.

        Raises:
            ChannelError: It does not answer.
        """

    def fork(
        self, order: AgentOrder, environment: Mapping[str, str], fds: Sequence[int]
    ) -> proc.ForkedAgent:
        """Ask for an agent with these descriptors: its lifeline, and the head's socket.

        Raises:
            ChannelError: It does not answer.
        """


class RemoteAgents:
    """The agents of one run, or of the tasks of one workflow, on one host.

    Args:
        ended: Called before the client is told of the end of an agent.
        server: Forks the agents, where a session holds this host, or a pod has imported torch; None: they are started.

    Attributes:
        environment: What agents get.
        run_dir: Where the run lives; None before it has come.
    """

    def __init__(
        self,
        session: SendsMessages,
        relay: Relay,
        ended: Callable[[], None],
        fork_server: AgentForker | None = None,
    ) -> None:
        self._fork_server = fork_server
        self.environment = dict(os.environ if fork_server is None else fork_server.environment)
        self.run_dir: RunDir | None = None
        self._session = session
        self._relay = relay
        self._ended = ended
        self._lifeline: tuple[int, int] | None = None
        self._lock = threading.Lock()  # over starts and ends: what is just starting is no orphan
        self._agents: dict[int, HasStatus] = {}
        self._changed = threading.Condition()
        self._ports: dict[int, RelayPort] = {}
        self._broker: AgentBroker | None = None
        self._requests: dict[int, AgentRequest] = {}
        self._num_requests = 0
        self._is_ending = False

    def start(self, message: messages.StartNode | messages.StartTask) -> None:
        """Start an agent; its end is told, also where it can't be started."""
        if self._fork_server is not None and not self._fork_server.wait_open():
            self._fork_server = None
        try:
            with self._lock:
                started, child = self._start(message)
                self._agents[message.agent_id] = child
            if isinstance(child, proc.ForkedAgent):
                child.wait_started()
        except (MusterError, OSError, ValueError) as error:
            self._agents.pop(message.agent_id, None)
            self._tell_end(
                message.agent_id, messages.GONE, f"an agent can't be started there: {error}"
            )
            return
        self._session.send(started)
        threading.Thread(target=self._watch, args=(message.agent_id, child), daemon=True).start()

    def _start(
        self, message: messages.StartNode | messages.StartTask
    ) -> tuple[messages.AgentStarted, HasStatus]:
        if self._is_ending:
            raise MusterError("this node is shutting down")
        started = messages.AgentStarted(agent_id=message.agent_id)
        if isinstance(message, messages.StartTask):
            return started, self._launch("task", self._task_order(message), self.environment)
        environment = self.environment
        if message.gpus is not None:
            environment = {**environment, "CUDA_VISIBLE_DEVICES": ",".join(message.gpus)}
        if message.heads:
            return started, self._launch("agent", self._node_order(message), environment)
        with bind("0.0.0.0", 0) as listening:
            port = int(listening.getsockname()[1])
            self._relay.ports = {port}
            order = replace(
                self._node_order(replace(message, heads=(f"127.0.0.1:{port}",))),
                listen_fd=listening.fileno(),
                first_attempt=message.first_attempt,
                restarts_spent=message.restarts_spent,
            )
            child = self._launch("agent", order, environment, listening.fileno())
        return replace(started, port=port, addresses=tuple(own_addresses())), child

    def _launch(
        self, program: str, order: Any, environment: dict[str, str], *fds: int
    ) -> HasStatus:
        if self._lifeline is None:
            self._lifeline = os.pipe2(os.O_CLOEXEC)
        lifeline = self._lifeline[0]
        if self._fork_server is not None and isinstance(order, AgentOrder):
            return self._fork_server.fork(order, environment, [lifeline, *fds])
        argv = proc.node_program(program, *to_arguments(replace(order, lifeline_fd=lifeline)))
        return proc.start(argv, env=environment, pass_fds=[lifeline, *fds])

    def _node_order(self, message: messages.StartNode) -> AgentOrder:
        run_dir, inside = message.run_dir, os.path.realpath(self._path())
        if not all(_HEAD.fullmatch(head) for head in message.heads):
            raise ValueError("these are not addresses")
        if run_dir is None:
            return AgentOrder(run_dir=self._path(), place=message.place, head=message.heads)
        if os.path.commonpath([os.path.realpath(run_dir), inside]) != inside:
            raise ValueError(f"{run_dir} is not of this workflow")
        return AgentOrder(
            run_dir=run_dir,
            place=message.place,
            head=message.heads,
            environment=RunDir(run_dir).environment,
        )

    def _task_order(self, message: messages.StartTask) -> Any:
        for name in (message.group, message.task):
            if not _NAME.fullmatch(name):
                raise ValueError(f"`{name}` is no name")
        make = plugs.find("host_orders", "task")
        if make is None:
            raise ValueError("what runs tasks of workflows is not here")
        return make(message, self._path(), f"127.0.0.1:{self._port(message.port)}", _own_address())

    def _path(self) -> str:
        if self.run_dir is None:
            raise ValueError("the run has not come yet")
        return self.run_dir.path

    def _port(self, head_port: int) -> int:
        """Return the local port that is forwarded to the head's port on the client."""
        if head_port not in self._ports:
            self._ports[head_port] = RelayPort(lambda: (self._relay, head_port))
        return self._ports[head_port].port

    def _watch(self, agent_id: int, child: HasStatus) -> None:
        """Wait for an agent's end, end what it left, then tell."""
        status: int | None = None
        while status is None:
            status = child.wait(3600.0)
        with self._lock:
            self._agents.pop(agent_id, None)
        end_all(self._end_orphans)
        self._ended()
        self._tell_end(agent_id, status, None)
        with self._changed:
            self._changed.notify_all()

    def _end_orphans(self) -> bool:
        with self._lock:
            return proc.end_children(frozenset(child.pid for child in self._agents.values()))

    def _tell_end(self, agent_id: int, status: int, why: str | None) -> None:
        self._session.send(messages.AgentEnded(agent_id=agent_id, status=status, why=why))

    def kill(self, agent_id: int) -> None:
        """SIGKILL an agent; its watcher ends what it started."""
        with self._lock:
            child = self._agents.get(agent_id)
            if child is not None:
                child.send_signal(9)

    def move(self, heads: Sequence[str]) -> None:
        """Tell the agents of a run where the head is that stands in for a lost one."""
        if self.run_dir is not None and all(_HEAD.fullmatch(head) for head in heads):
            atomic.write_json(self.run_dir.moved, list(heads))

    def cut_lifeline(self) -> None:
        """Let the agents end themselves."""
        with self._lock:
            for fd in self._lifeline or ():
                os.close(fd)
            self._lifeline = None

    # Requests of processes here for agents on other hosts.

    def open_broker(self) -> str:
        """Return the name of the broker that takes requests."""
        if self._broker is None:
            self._broker = AgentBroker(self._take_request, self._withdraw_request)
        return self._broker.name

    def _take_request(self, request: AgentRequest) -> None:
        with self._lock:
            self._num_requests += 1
            number = self._num_requests
            self._requests[number] = request
        self._session.send(replace(request.start, agent_id=number))

    def _withdraw_request(self, request: AgentRequest) -> None:
        with self._lock:
            number = next((n for n, one in self._requests.items() if one is request), None)
            self._requests.pop(number or 0, None)
        if number is not None:
            self._session.send(messages.KillAgent(agent_id=number))

    def answer(self, message: messages.AgentEnded) -> None:
        """Tell the process that asked for an agent elsewhere how it ended."""
        with self._lock:
            request = self._requests.pop(message.agent_id, None)
        if request is not None:
            request.end(message.status, message.why)

    def pass_on(self, signum: int) -> None:
        """Send a signal to all agents; from now on none is started: this machine shuts down."""
        self._is_ending = True
        for child in list(self._agents.values()):
            child.send_signal(signum)

    def wait_for_ends(self) -> None:
        """Wait until no agent is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._agents)

    def leave(self) -> None:
        """Let the agents end themselves for a moment, then kill what is left."""
        if self._broker is not None:
            self._broker.close()
        self.cut_lifeline()
        for child in list(self._agents.values()):
            if isinstance(child, proc.ForkedAgent):
                child.let_go()
        with self._changed:
            self._changed.wait_for(lambda: not self._agents, _GENTLE_S)
        end_all(proc.end_children)


def end_all(end_some: Callable[[], bool]) -> None:
    """Call what ends processes until nothing is left of them, for a few seconds at most."""
    deadline = time.monotonic() + _KILL_S
    while end_some() and time.monotonic() < deadline:
        threading.Event().wait(0.01)


def _own_address() -> str:
    """Return where other hosts reach this one: the address that the client called, unless that was a tunnel's."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    called = words[2] if len(words) == 4 else ""
    if called and ":" not in called and not called.startswith("127."):
        return called
    return next(iter(own_addresses()), "127.0.0.1")


# Where a run lives on a host that ssh reaches: in the client's run directory, in the head's, or in one of its own.


class RemotePlace:
    """The run directory of a run on this host.

    Attributes:
        is_own: It was made here, and holds a copy of the secret.
        code: The copy of the code folder; None where the host has the code.
    """

    def __init__(self, message: messages.SetUpRun) -> None:
        self._message = message
        plan, head = message.plan, message.head_run_dir
        # An earlier session's own folder may have the same path and token as the client's, or the head's: the mark tells them apart.
        is_same = mark_of(message.run_dir) == message.mark
        sees_client = message.may_share and is_same and sees_run(message.run_dir, message.token)
        # What a function without a file uses has only who shares the client's files.
        is_by_value = message.script is None and plan.program.kind is ScriptKind.FUNCTION
        has_code = message.may_share and (_has_code(message) or (sees_client and is_by_value))
        has_code = has_code and (sees_client or not _is_own_copy(message))
        self.is_own = self._with_head = False
        if sees_client and has_code:
            self.run_dir = RunDir(message.run_dir)
        elif head and sees_run(head, message.token) and mark_of(head) == message.head_mark:
            self.run_dir, self._with_head = RunDir(head), True
        else:
            self.is_own = True
            self.run_dir = RunDir(make_own_run_dir(plan.run_id, message.token, message.secret))
        self.code = CodeOutputs(self.run_dir) if self.is_own and not has_code else None
        self._secret_inode = 0

    def answer(self) -> messages.Placed:
        """Return what the client is told."""
        return messages.Placed(
            run_dir=self.run_dir.path,
            mark=mark_of(self.run_dir.path),
            is_shared=not self.is_own and not self._with_head,
            with_head=self._with_head,
            wants_code=self.code is not None and not self.code.is_there,
            is_copied=self.code is not None,
        )

    def write_run(self) -> str | None:
        """Write plan and secret; return a sentence when the interpreter is another than asked for.

        Raises:
            MusterError: There is no interpreter.
        """
        plan, note = self._message.plan, None
        program = plan.program
        if self.code is not None:
            program = code_copy.moved(program, self._message.code_root, self.code.root)
        by_server = plan.session is not None and plan.node_setup.python_follows
        if not by_server and shutil.which(program.python[0]) is None:
            found = shutil.which("python3") or shutil.which("python")
            if found is None:
                what = f"there is no {program.python[0]} and no python3 for the script"
                raise MusterError(what, fix="python = [...] in the engine's section, or --python")
            note = f"{program.python[0]} does not exist: the script runs with {found}"
            program = replace(program, python=(found, *program.python[1:]))
        atomic.write_json(self.run_dir.plan, codec.to_plain(replace(plan, program=program)))
        write_private(self.run_dir.secret, self._message.secret)
        self._secret_inode = os.stat(self.run_dir.secret).st_ino
        return note

    def remove_secret(self) -> None:
        """Remove the secret, unless a later session of this run has written a new one."""
        try:
            if self.is_own and os.stat(self.run_dir.secret).st_ino == self._secret_inode:
                os.unlink(self.run_dir.secret)
        except OSError:
            return


def _is_own_copy(message: messages.SetUpRun) -> bool:
    """Say whether the code would be what an earlier session has brought here: to a place of the same name as the client's own copy.

    So it is where the client is a first pod that was made again.
    """
    folder = os.path.join(muster_home(), "runs", message.plan.run_id, "code")
    program = message.plan.program
    place = message.script["path"] if message.script is not None else program.cwd
    return f"{place}/".startswith(f"{folder}/")


def _has_code(message: messages.SetUpRun) -> bool:
    """Say whether this host has the client's script, or its folder when the program is no file."""
    program = message.plan.program
    # What a function uses may have been edited since the folder was copied by hand.
    if message.script is None:
        return program.kind is not ScriptKind.FUNCTION and os.path.isdir(program.cwd)
    return code_copy.identity(message.script["path"]) == message.script


def lacking_folders(message: messages.SetUpTasks) -> tuple[str, ...]:
    """Return which folders of a workflow this host lacks, or can't write to."""
    run_dir = RunDir(message.run_dir)
    sees = message.may_share and sees_run(run_dir.path, message.token)
    if not sees or not os.access(run_dir.path, os.W_OK) or not os.access(run_dir.secret, os.R_OK):
        return (run_dir.path,)
    return tuple(folder for folder in message.folders if not os.path.isdir(folder))


async def do_setup_lines(
    message: messages.SetUpTasks, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment after the site's variables and setup lines.

    Raises:
        MusterError: A line failed.
    """
    environment = {**environment, **message.environment}
    if not message.lines:
        return environment
    shell = NodeShell(message.host, lambda _: None, lambda _: None)
    done = await shell.run_lines(message.lines, environment, message.environment, message.origin)
    return done.environment


SILENCE_S = 20.0
_BROUGHT = CopyScope((messages.CODE_FILE, messages.CALL_FILE))
_SWEEP_LIMIT_S = 5.0  # a folder of staged data takes longer: the next run goes on with it


class RemoteEnd:
    """One host's side of one session."""

    def __init__(
        self, session: messages.FrameWriter, fork_server: AgentForker | None = None
    ) -> None:
        self._session = session
        self._relay = Relay(session, first_id=2)
        self.agents = RemoteAgents(session, self._relay, self._send_record, fork_server)
        if fork_server is not None:
            fork_server.say = self._say
        self._fork_server = fork_server
        self._place: RemotePlace | None = None
        self._brought: Copy | None = None  # the code and the call
        self._known = CopyState()
        self._record: Feed | None = None
        self._environment: EnvironmentPlace | None = None
        self._lock = threading.Lock()  # over writing the secret and leaving
        self._is_leaving = False

    def _say(self, text: str) -> None:
        self._session.send(messages.RemoteNote(text=text))

    def serve(self, reader: messages.FrameReader) -> None:
        """Do what the client says until it is gone."""
        self._session.send(messages.RemoteReady(protocol=messages.PROTOCOL))
        with contextlib.suppress(TimeoutError, messages.FrameError, OSError):
            while (message := reader.read(SILENCE_S)) is not None:
                if isinstance(message, messages.LeaveHost):
                    return
                self.take(message)

    def take(self, message: messages.RemoteMessage) -> None:
        """Do one thing; what may take longer goes on in a thread, since pings must be answered."""
        match message:
            case messages.RemotePing():
                self._session.send(messages.RemotePong())
            case messages.SetUpRun():
                self._in_background(lambda: self._set_up_run(message))
            case messages.SetUpTasks():
                self._in_background(lambda: self._set_up_tasks(message))
            case messages.FilePiece():
                if self._brought is not None and not self._brought.take(message):
                    self._fail_to_take(self._brought)
            case messages.CopyHas():
                if self._known.take(message) and self._record is not None:
                    self._record.go_back(self._known)
            case messages.OfferEnvironment():
                self._in_background(lambda: self._take_environment(message))
            case (
                messages.PassEnvironment()
                | messages.BringEnvironment()
                | messages.EnvironmentPiece()
            ):
                if self._environment is not None:
                    self._environment.take(message)
            case messages.PruneEnvironments():
                self._in_background(lambda: self._session.send(prune(message)))
            case messages.CodeSent():
                self._in_background(self._unpack_code)
            case messages.StartNode() | messages.StartTask():
                if self._fork_server is None:
                    self.agents.start(message)
                else:  # it may have to import first
                    self._in_background(lambda: self.agents.start(message))
            case messages.AgentEnded():
                self.agents.answer(message)
            case messages.KillAgent(agent_id=agent_id):
                self.agents.kill(agent_id)
            case messages.HeadMoved(heads=heads):
                self.agents.move(heads)
            case messages.CutLifeline():
                self.agents.cut_lifeline()
            case messages.Collect(output=output):
                self._in_background(lambda: self._collect(output))
            case _ if isinstance(message, messages.OfRelay):
                self._relay.take(message)

    def _in_background(self, action: Callable[[], object]) -> None:
        threading.Thread(target=self._report_failure, args=(action,), daemon=True).start()

    def _report_failure(self, action: Callable[[], object]) -> None:
        try:
            action()
        except MusterError as error:
            failed = messages.RemoteFailed(
                what=error.what, where=error.where, why=error.why, fix=error.fix
            )
            self._session.send(failed)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            self._session.send(messages.RemoteFailed(what="the run can't be set up there", why=why))

    def _fail_to_take(self, copy: Copy) -> None:
        """Say why what the client brings can't be written: the first time, what follows has no place then."""
        if (trouble := copy.trouble) is not None:
            what = "what the run needs can't be written there"
            failed = messages.RemoteFailed(what=what, where=copy.root, why=trouble.strerror)
            self._session.send(failed)
            self._brought = None

    # What runs here.

    def _set_up_run(self, message: messages.SetUpRun) -> None:
        place = self._place = RemotePlace(message)
        self.agents.run_dir = place.run_dir
        with contextlib.suppress(OSError):
            os.unlink(place.run_dir.moved)  # that of an earlier session is past
        if place.is_own:
            self._brought = Copy(place.run_dir.path, _BROUGHT, mode=0o600)
        placed = place.answer()
        self._session.send(placed)
        if not placed.wants_code:
            self._finish_run(place)

    def _take_environment(self, offer: messages.OfferEnvironment) -> None:
        place = self._environment = EnvironmentPlace(offer, self._session)
        self.agents.environment[VARIABLE] = place.path
        place.answer()

    def _unpack_code(self) -> None:
        if self._place is not None and self._place.code is not None:
            self._place.code.unpack()
            self._finish_run(self._place)

    def _finish_run(self, place: RemotePlace) -> None:
        note = None
        if place.is_own:
            with self._lock:
                if self._is_leaving:
                    return
                note = place.write_run()
            root = place.run_dir.path
            mark = mark_of(root)
            self._session.send(messages.CopyOf(mark=mark))
            known = self._known if self._known.mark == mark else None
            self._record = Feed(root, RUN_RECORD, self._session, known)
            self._record.start()
        self._session.send(messages.SetUpDone(note=note))

    def _set_up_tasks(self, message: messages.SetUpTasks) -> None:
        lacks = lacking_folders(message)
        if not lacks:
            agents = self.agents
            names = {BROKER_VARIABLE: agents.open_broker(), HOST_VARIABLE: message.host}
            setting_up = do_setup_lines(message, {**agents.environment, **names})
            agents.environment = asyncio.run(setting_up)
            agents.run_dir = RunDir(message.run_dir)
        self._session.send(messages.Placed(run_dir=message.run_dir, lacks=lacks))
        self._session.send(messages.SetUpDone())

    # What goes back.

    def _send_record(self) -> None:
        if self._record is not None:
            self._record.look(is_over=True)

    def _collect(self, output: str) -> None:
        """Send what the run has made in the copied code folder, or in this one."""
        self._send_record()
        stay: list[str] = []
        root = snapshots = ""
        if output:
            root = output
            stay = send_made(self._session, output, {})
        elif self._place is not None and self._place.code is not None:
            root = self._place.code.root
            stay = self._place.code.send(self._session)
        if self._place is not None and self._place.is_own:
            folder = self._place.run_dir.snapshots
            snapshots = folder if os.path.isdir(folder) else ""
        said = messages.Collected(
            num_stay=len(stay),
            stay=tuple(stay[:20]),
            root=root,
            snapshots=snapshots,
            unread=self._record.unread_report() if self._record is not None else (),
        )
        self._session.send(said)

    def shut_down(self) -> None:
        """Let the agents tell the head that this machine, or pod, shuts down; leave when they have ended."""
        self.agents.pass_on(signal.SIGTERM)
        self._in_background(self._leave_agents)

    def _leave_agents(self) -> None:
        self.agents.wait_for_ends()
        self.leave()
        os._exit(0)

    def leave(self) -> None:
        """End the agents and all below them, and take the secret away."""
        self.agents.leave()
        if self._environment is not None:
            self._environment.close()
        if self._record is not None:
            self._record.stop()
        with self._lock:
            self._is_leaving = True
            if self._place is not None:
                self._place.remove_secret()
        self._session.drain(1.0)
        # What killed agents have left: there may be no other run here to remove it.
        start_removing_leftovers(None).join(_SWEEP_LIMIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOrder:
    """The command line of `remote`, which `loader.py` writes.

    Attributes:
        root: Where this torchmuster is.
        importable: Let the script import it from there.
        temporary: Remove it at the end.
    """

    root: str
    importable: bool = False
    temporary: bool = False


def main(arguments: list[str]) -> None:
    """Serve one session."""
    order = from_arguments(RemoteOrder, arguments)
    incoming, outgoing = take_streams()
    if order.importable:  # by the script: the folder holds only this torchmuster
        os.environ["PYTHONPATH"] = proc.importable(os.environ.get("PYTHONPATH"), order.root)
    servers = (make() for make in plugs.every("fork_servers"))
    fork_server = next((one for one in servers if one is not None), None)
    try:
        serve(RemoteEnd(messages.FrameWriter(outgoing), fork_server), incoming)
    finally:
        if order.temporary:
            shutil.rmtree(order.root, ignore_errors=True)
    os._exit(0)


def serve(end: RemoteEnd, incoming: int) -> None:
    """Serve the other end of a connection until it leaves."""
    signal.signal(signal.SIGTERM, lambda *_: end.shut_down())
    signal.signal(contract.OVERUSED_SIGNAL, lambda signum, _: end.agents.pass_on(signum))
    try:
        end.serve(messages.FrameReader(incoming))
    finally:
        end.leave()


def take_streams() -> tuple[int, int]:
    """Return our input and output; nothing that is started here may write between our messages, or read them."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    proc.become_subreaper()
    incoming, outgoing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return incoming, outgoing
