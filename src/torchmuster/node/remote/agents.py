"""The agents at the remote end of an ssh session: they are started, watched, killed, and end when the session does.

The agent of a task calls the head of its group, which is a process of the client's machine, at a port of the loopback here.
A training task on several hosts asks a broker here (`net/broker.py`) for the agents of its other hosts; the request goes on to
the client, and from there to the other host.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model.codec import to_words
from torchmuster.net import remote_messages as messages
from torchmuster.net.address import bind, own_addresses
from torchmuster.net.broker import AgentBroker, AgentRequest
from torchmuster.net.relay import Relay, RelayPort, SendsMessages
from torchmuster.node.door.call import DoorAgent
from torchmuster.node.door.forked import HasStatus
from torchmuster.node.options import AgentOrder
from torchmuster.node.remote.door import RemoteDoor
from torchmuster.node.task.options import TaskOrder

_GENTLE_S = 5.0
_KILL_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")
_HEAD = re.compile(r"[0-9a-zA-Z.:]{1,300}")


class RemoteAgents:
    """The agents of one run, or of the tasks of one workflow, on one host.

    Args:
        ended: Called before the client is told of the end of an agent.
        door: Forks the agents, where a session holds this host, or a pod has imported torch; None: they are started.

    Attributes:
        environment: What agents get.
        run_dir: Where the run lives; None before it has come.
    """

    def __init__(
        self,
        session: SendsMessages,
        relay: Relay,
        ended: Callable[[], None],
        door: RemoteDoor | None = None,
    ) -> None:
        self._door = door
        self.environment = dict(os.environ if door is None else door.node.environment)
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
        if self._door is not None and not self._door.wait_open():
            self._door = None
        try:
            with self._lock:
                started, child = self._start(message)
                self._agents[message.agent_id] = child
            if isinstance(child, DoorAgent):
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
        self, program: str, order: AgentOrder | TaskOrder, environment: dict[str, str], *fds: int
    ) -> HasStatus:
        if self._lifeline is None:
            self._lifeline = os.pipe2(os.O_CLOEXEC)
        lifeline = self._lifeline[0]
        if self._door is not None and isinstance(order, AgentOrder):
            return self._door.fork(order, environment, [lifeline, *fds])
        argv = proc.node_program(program, *to_words(replace(order, lifeline_fd=lifeline)))
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

    def _task_order(self, message: messages.StartTask) -> TaskOrder:
        for name in (message.group, message.task):
            if not _NAME.fullmatch(name):
                raise ValueError(f"`{name}` is no name")
        return TaskOrder(
            run_dir=self._path(),
            group=message.group,
            task=message.task,
            attempt=message.attempt,
            head=(f"127.0.0.1:{self._port(message.port)}",),
            address=_own_address(),
        )

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
            if isinstance(child, DoorAgent):
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
