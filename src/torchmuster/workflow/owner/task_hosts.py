"""The ssh hosts of one workflow: a session with each, which starts the agents of its tasks.

The heads of the groups are processes of this machine. For each agent elsewhere, one of their
children asks our broker (`launcher/net/broker.py`). The run of a training task asks the broker of
its own host, which passes the request on as a message. Every host must see the run directory,
through which tasks pass on their data.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from torchmuster.core.files.layout import RunDir
from torchmuster.errors import UsageError
from torchmuster.launcher.engines.ssh import SshOptions, bad_hosts
from torchmuster.launcher.engines.ssh_command import HostProblem, SshHost
from torchmuster.launcher.engines.ssh_host import (
    Bundle,
    HostError,
    RemoteHost,
    in_parallel,
    share_token,
)
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.broker import AgentBroker, AgentRequest
from torchmuster.launcher.node.remote.files import TOKEN_FILE
from torchmuster.workflow.owner.capacity import HostFacts

_MAX_SHOWN = 8

Ended = Callable[[int, str | None], None]
_Key = AgentRequest | tuple[RemoteHost, int]  # a local process's, or a host and a number


class TaskHosts:
    """The ssh hosts of one workflow.

    Args:
        set_up: The message that tells every host what to have and do.
        min_hosts: The minimum number of usable hosts to start the workflow.
    """

    def __init__(
        self,
        run_dir: RunDir,
        wishes: SshOptions,
        bundle: Bundle,
        set_up: messages.SetUpTasks,
        min_hosts: int,
        say: Callable[[str], None],
    ) -> None:
        self._run_dir = run_dir
        self._wishes = wishes
        self._bundle = bundle
        self._set_up = set_up
        self._min_hosts = min_hosts
        self._say = say
        self._token = share_token(run_dir)
        self._hosts: dict[str, RemoteHost] = {}
        self._opening = {host.name: threading.Lock() for host in wishes.hosts}
        self._lock = threading.Lock()
        self._agents: dict[_Key, tuple[RemoteHost, int] | None] = {}  # None while it starts
        self._ports: set[int] = set()
        self._closing = False
        self._broker = AgentBroker(self._take_request, self._withdraw)

    @property
    def broker(self) -> str:
        """Return the name of the broker that starts agents."""
        return self._broker.name

    @property
    def facts(self) -> tuple[HostFacts, ...]:
        """Return the resources of the usable hosts, in the order of the list."""
        return tuple(
            HostFacts(
                name=host.name,
                num_cpus=self._hosts[host.name].facts.num_cpus,
                num_gpus=self._hosts[host.name].facts.num_gpus,
                memory_bytes=self._hosts[host.name].facts.memory_bytes,
                slots=host.slots,
            )
            for host in self._wishes.hosts
            if host.name in self._hosts
        )

    # Connecting.

    def open(self) -> None:
        """Connect to all hosts, and check that the workflow can run there.

        Raises:
            ChannelError: Too few hosts answer; the message names those that don't.
            UsageError: Hosts don't see the run directory, or a folder of training scripts.
        """
        outcomes = in_parallel(self._connect, self._wishes.hosts)
        bad = [outcome for outcome in outcomes if isinstance(outcome, HostProblem)]
        self._hosts = {host.host.name: host for host in outcomes if isinstance(host, RemoteHost)}
        placed = {name: host.placed for name, host in self._hosts.items()}
        lacking = {name: one.lacks[0] for name, one in placed.items() if one and one.lacks}
        if lacking:
            raise self._not_shared(lacking)
        if len(self._hosts) < self._min_hosts:
            raise bad_hosts(bad, self._min_hosts, self._wishes.where)
        for problem in bad:
            self._say(f"{problem.line()}: the workflow begins without it ({problem.fix})")

    def _not_shared(self, lacking: Mapping[str, str]) -> UsageError:
        names = list(lacking)
        shown = ", ".join(names[:_MAX_SHOWN]) + (" ..." if len(names) > _MAX_SHOWN else "")
        folder = lacking[names[0]]
        hosts = f"the hosts {shown} don't" if len(names) > 1 else f"the host {shown} doesn't"
        is_run = folder == self._run_dir.path
        what = f"{hosts} see the {'run directory' if is_run else 'folder of the workflow'}"
        why = "tasks pass their data on through it: a workflow over ssh needs a shared file system"
        fix = "MUSTER_HOME=/shared/folder" if is_run else "start in a folder that all hosts see"
        if not self._wishes.may_share:
            fix = f"{fix}, and MUSTER_SSH_SHARED unset"
        return UsageError(what, where=folder, why=why, fix=f"{fix}, with the same numeric user id")

    def _connect(self, ssh_host: SshHost) -> RemoteHost | HostProblem:
        host = RemoteHost(ssh_host, self._bundle, self._run_dir)
        host.on_message = self._take
        host.on_lost = self._lose
        host.relay.ports = self._ports  # the heads' ports that a host may call
        message = replace(self._set_up, token=self._token, host=ssh_host.name)
        try:
            host.open()
            host.set_up(message)
        except HostError as error:
            host.abandon()
            return error.problem
        if self._closing:
            host.abandon()
        return host

    def _host(self, name: str) -> RemoteHost:
        """Return a host; reconnect to a lost one, which takes up to 10 s.

        Raises:
            HostError: The host can't be used now.
        """
        with self._opening[name]:
            host = self._hosts.get(name)
            if host is not None and _is_usable(host):
                return host
            if host is not None and not host.is_lost:
                host.abandon()
            opened = self._connect(next(h for h in self._wishes.hosts if h.name == name))
            if isinstance(opened, HostProblem):
                raise HostError(opened)
            if opened.placed is not None and opened.placed.lacks:
                opened.abandon()
                words = "it doesn't see the run directory any more"
                raise HostError(HostProblem(host=name, words=words, fix=""))
            self._hosts[name] = opened
            return opened

    def _host_or_other(self, name: str, *, may_move: bool) -> RemoteHost:
        """Return a host; if it can't be reached, return the one with the fewest agents.

        Raises:
            HostError: It can't be reached, and the agent may not move, or no other host is usable.
        """
        try:
            return self._host(name)
        except HostError as error:
            others = [host for host in list(self._hosts.values()) if _is_usable(host)]
            if not may_move or not others:
                raise
            chosen = min(others, key=lambda host: host.num_agents)
            self._say(f"{error.problem.line()}: its task goes to {chosen.host.name}")
            return chosen

    # Agents.

    def _take_request(self, request: AgentRequest) -> None:
        """Start the agent that a local process asks for; runs in the request's own thread."""
        if isinstance(request.start, messages.StartTask):
            self._ports.add(request.start.port)
        self._agents[request] = None
        self._start(request, request.start, request.end)

    def _start(self, key: _Key, start: messages.StartNode | messages.StartTask, end: Ended) -> None:
        """Start the agent recorded under `key`; call `end` at its end, or if it can't start."""

        def ended(status: int, why: str | None) -> None:
            with self._lock:
                self._agents.pop(key, None)
            end(status, why)

        if self._closing or start.host not in self._opening:
            ended(messages.GONE, f"`{start.host[:80]}` is no host of this workflow")
            return
        may_move = isinstance(start, messages.StartTask) and start.may_move
        try:
            host = self._host_or_other(start.host, may_move=may_move)
            agent_id = host.start(start, ended).agent_id
        except HostError as error:
            ended(messages.GONE, error.problem.line())
            return
        with self._lock:
            is_wanted = key in self._agents
            if is_wanted:
                self._agents[key] = host, agent_id
        if not is_wanted:
            host.kill(agent_id)

    def _withdraw(self, key: _Key) -> None:
        with self._lock:
            agent = self._agents.pop(key, None)
        if agent is not None:
            agent[0].kill(agent[1])

    # Messages from hosts.

    def _take(self, host: RemoteHost, message: messages.RemoteMessage) -> None:
        match message:
            case messages.StartNode():  # hosts may only ask for nodes of a training task
                self._agents[host, message.agent_id] = None
                # It may have to reconnect to the other host, for which this host's reader can't
                # wait.
                args = (host, message)
                threading.Thread(target=self._start_for, args=args, daemon=True).start()
            case messages.KillAgent(agent_id=agent_id):
                self._withdraw((host, agent_id))
            case _:
                raise messages.FrameError(f"{type(message).__name__} is not for a workflow")

    def _start_for(self, host: RemoteHost, start: messages.StartNode) -> None:
        def end(status: int, why: str | None) -> None:
            host.send(messages.AgentEnded(agent_id=start.agent_id, status=status, why=why))

        key = (host, start.agent_id)
        self._start(key, start, end)
        if host.is_lost:
            self._withdraw(key)

    def _lose(self, host: RemoteHost) -> None:
        if host.num_agents and not self._closing and host.problem is not None:
            self._say(f"the connection to {host.problem.line()}")
        with self._lock:
            asked = [key for key in self._agents if isinstance(key, tuple) and key[0] is host]
        for key in asked:
            self._withdraw(key)

    def close(self) -> None:
        """Leave all hosts; their remotes end what still runs there."""
        self._closing = True
        self._broker.close()
        in_parallel(RemoteHost.close, [host for host in self._hosts.values() if not host.is_lost])
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._run_dir.path, TOKEN_FILE))


def _is_usable(host: RemoteHost) -> bool:
    return host.is_usable and host.is_answering
