"""The launcher's parts of a head: state of the ranks, hangs, `muster exec`, metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from torchmuster.core.head.attempt import Attempt
from torchmuster.core.head.head import HeadClient
from torchmuster.core.head.membership import Member
from torchmuster.core.head.training_head import HeadPart, TrainingHead
from torchmuster.core.model.ranks import NodeRanks
from torchmuster.core.model.text import name_alone, nearest
from torchmuster.core.net import messages
from torchmuster.launcher.head.board import Board
from torchmuster.launcher.net import part_messages

if TYPE_CHECKING:
    from torchmuster.launcher.head.hangs.monitor import HangMonitor
    from torchmuster.launcher.head.openmetrics import NewestTraining


# The head's part in `muster exec`: route messages between clients and commands on agents.
#
# It stores routes only: the windows of both ends bound the data in flight (`net.messages`).


LOST = 128 + 9
Agent = TypeVar("Agent")


class Client(Protocol):
    """The connection of a client."""

    def send_nowait(self, message: messages.Message) -> None:
        """Queue a message."""


@dataclass(frozen=True, slots=True)
class _Route(Generic[Agent]):
    client: Client
    agent: Agent


class ExecRelay(Generic[Agent]):
    """Passes messages between clients and agents: those of tasks, or of the nodes of a run.

    Args:
        find: Returns the agent for the target that a client has named; None if there is none now.
        send: Sends a message to an agent, if it is connected.
        why_not: Returns what to tell a client whose target can't be entered now.
    """

    def __init__(
        self,
        find: Callable[[str], Agent | None],
        send: Callable[[Agent, messages.Message], None],
        why_not: Callable[[str], tuple[str, str | None]],
    ) -> None:
        self._find = find
        self._send = send
        self._why_not = why_not
        self._routes: dict[str, _Route[Agent]] = {}

    @property
    def num_routes(self) -> int:
        """Return the number of running commands."""
        return len(self._routes)

    def from_client(self, client: Client, message: part_messages.FromExecClient) -> None:
        """Start a client's command, or pass a message on to a command of its own."""
        exec_id = message.exec_id
        route = self._routes.get(exec_id)
        if not isinstance(message, part_messages.ExecStart):
            if route is not None and route.client is client:
                self._send(route.agent, message)
            return
        if route is not None:
            what = "this command has been started already"
            client.send_nowait(part_messages.ExecRefused(exec_id=exec_id, what=what))
        elif (agent := self._find(message.task)) is not None:
            self._routes[exec_id] = _Route(client, agent)
            self._send(agent, message)
        else:
            what, why = self._why_not(message.task)
            client.send_nowait(part_messages.ExecRefused(exec_id=exec_id, what=what, why=why))

    def client_gone(self, client: Client) -> None:
        """End the commands of a client that has disconnected."""
        for exec_id, route in list(self._routes.items()):
            if route.client is client:
                del self._routes[exec_id]
                self._send(route.agent, part_messages.ExecLeave(exec_id=exec_id))

    def from_agent(self, agent: Agent, message: part_messages.FromExecTask) -> None:
        """Pass an agent's message on to the client of the command."""
        route = self._routes.get(message.exec_id)
        if route is None or route.agent != agent:
            return
        if isinstance(message, part_messages.ExecEnded | part_messages.ExecRefused):
            del self._routes[message.exec_id]
        route.client.send_nowait(message)

    def agent_gone(self, agent: Agent, why: str) -> None:
        """End the commands of a lost agent for their clients."""
        for exec_id, route in list(self._routes.items()):
            if route.agent == agent:
                del self._routes[exec_id]
                end = part_messages.ExecEnded(exec_id=exec_id, code=LOST, why=why)
                route.client.send_nowait(end)


# Find the agent of the rank or the node that `muster exec` names: `rank 3`, or `node n2`.


class RunningAttempt(Protocol):
    """The part of an attempt that is read here."""

    members: dict[int, Member]
    ranks: dict[int, NodeRanks]


class NamedAgents:
    """The agents of a run, by the names that clients use.

    Args:
        attempt: Returns the newest attempt; None before the first.
        name: Returns the name of a member.
    """

    def __init__(
        self, attempt: Callable[[], RunningAttempt | None], name: Callable[[Member], str]
    ) -> None:
        self._attempt = attempt
        self._name = name

    def find(self, word: str) -> Member | None:
        """Return the connected agent of the rank or node; None if there is none."""
        attempt = self._attempt()
        kind, _, name = word.partition(" ")
        if attempt is None:
            return None
        for place, member in attempt.members.items():
            if not member.is_present:
                continue
            ranks = attempt.ranks[place]
            if kind == "node" and name in (
                self._name(member),
                name_alone(self._name(member)),
                member.hello.host,
            ):
                return member
            index = int(name) - ranks.first_rank if kind == "rank" and name.isdecimal() else -1
            if 0 <= index < ranks.num_workers:
                return member
        return None

    def why_not(self, word: str) -> tuple[str, str | None]:
        """Return why `find` returned None, and what the run has instead."""
        attempt = self._attempt()
        kind, _, name = word.partition(" ")
        if attempt is None:
            return "no worker of the run has started yet", None
        if kind == "node":
            names = [self._name(member) for member in attempt.members.values()]
            near = nearest(name, names)
            known = f"did you mean {near}?" if near else f"its nodes: {', '.join(names[:12])}"
            return f"the run has no node `{name}` now", known
        total = sum(ranks.num_workers for ranks in attempt.ranks.values())
        return f"the run has no rank {name} now", f"it has ranks 0 to {total - 1}"


class BoardPart(HeadPart):
    """Serves and records the state of all ranks."""

    def __init__(self, head: TrainingHead) -> None:
        super().__init__(head)
        disk, samples = head.disk, head.options.run_dir.samples
        self.board = Board(lambda line: disk.append(samples, line), head.options.samples_bytes)

    def take_word(self, member: Member, message: messages.Message) -> bool:
        """Record the progress of ranks."""
        attempt = self.head.policy.running
        if not isinstance(message, part_messages.Progress):
            return False
        if attempt is None or member.place is None or message.attempt != attempt.number:
            return True
        now = self.head.clock()
        if self.board.attempt != attempt.number:
            self.board.begin(now, attempt.number, self.head.rank_nodes(attempt))
        self.board.take(now, message.ranks)
        return True

    def take_request(self, client: HeadClient, message: messages.Message) -> bool:
        """Answer a viewer."""
        if not isinstance(message, part_messages.AskBoard):
            return False
        for reply in self.board.answer(self.head.clock(), message.ask_id):
            client.channel.send_nowait(reply)
        return True

    def advance(self, now: float) -> None:
        """Write a line of the record when it is due."""
        attempt = self.head.policy.running
        if attempt is None:
            self.board.end(now)
        else:
            self.board.note_ends(attempt.ends)
            self.board.advance(now)


class HangPart(HeadPart):
    """Watches the running attempt for hung ranks, from the first progress report on."""

    def __init__(self, head: TrainingHead) -> None:
        super().__init__(head)
        self._hangs: HangMonitor | None = None

    def take_word(self, member: Member, message: messages.Message) -> bool:
        """Record the progress and the stacks of ranks."""
        attempt = self.head.policy.running
        if not isinstance(message, part_messages.Progress | part_messages.Stacks):
            return False
        if attempt is None or member.place is None:
            return True
        if isinstance(message, part_messages.Stacks):
            if self._hangs is not None:
                self._hangs.take_stacks(member.place, message)
        elif message.attempt == attempt.number:
            self._monitor(attempt).take_progress(self.head.clock(), message)
        return True

    def take_request(self, client: HeadClient, message: messages.Message) -> bool:
        """Start collecting the stacks of all ranks for a client."""
        if not isinstance(message, part_messages.AskStacks):
            return False
        attempt, send, ask_id = self.head.policy.running, client.channel.send_nowait, message.ask_id
        if attempt is None:
            send(part_messages.StacksReport(ask_id=ask_id, sentence="no worker runs now", lines=()))
        else:
            self._monitor(attempt).ask_for(self.head.clock(), ask_id, send)
        return True

    def lose(self, member: Member, why: str) -> None:
        """Stop waiting for the stacks of a lost node."""
        del why
        if member.place is not None and self._hangs is not None:
            self._hangs.lose(member.place)

    def advance(self, now: float) -> None:
        """Judge which ranks hang; report a hang to the policy."""
        policy, hangs = self.head.policy, self._hangs
        attempt = policy.running
        if attempt is None or hangs is None or hangs.attempt != attempt.number:
            return
        hangs.note_ends(attempt.ends)
        if (end := hangs.advance(now, held=policy.is_held)) is not None:
            policy.hung(now, end)

    def _monitor(self, attempt: Attempt) -> "HangMonitor":
        if self._hangs is None or self._hangs.attempt != attempt.number:
            from torchmuster.launcher.head.hangs.monitor import HangMonitor, watch_limits

            options = self.head.options
            self._hangs = HangMonitor(
                attempt.number,
                self.head.rank_nodes(attempt),
                watch_limits(self.head.plan.limits),
                options.run_dir.attempt_logs(attempt.number),
                self.head,
                self.head.clock(),
                attempt.store,
                options.relay_port,
            )
            self._hangs.note_ends(attempt.ends)
        return self._hangs


class ExecPart(HeadPart):
    """Passes the messages of `muster exec` between clients and agents."""

    def __init__(self, head: TrainingHead) -> None:
        super().__init__(head)
        self._execs: ExecRelay[Member] | None = None

    def take_word(self, member: Member, message: messages.Message) -> bool:
        """Pass an agent's message on to the client."""
        if not isinstance(message, part_messages.FromExecTask):
            return False
        if self._execs is not None:
            self._execs.from_agent(member, message)
        return True

    def take_request(self, client: HeadClient, message: messages.Message) -> bool:
        """Pass a client's message on to the agent."""
        if not isinstance(message, part_messages.FromExecClient):
            return False
        if self._execs is None:
            policy = self.head.policy
            agents = NamedAgents(lambda: policy.attempt, policy.members.name)
            self._execs = ExecRelay(agents.find, policy.send, agents.why_not)
        self._execs.from_client(client.channel, message)
        return True

    def client_gone(self, client: HeadClient) -> None:
        """End the commands of a client that has disconnected."""
        if self._execs is not None:
            self._execs.client_gone(client.channel)

    def lose(self, member: Member, why: str) -> None:
        """End the commands on a lost node for their clients."""
        if self._execs is not None:
            name = self.head.policy.members.name(member)
            self._execs.agent_gone(member, f"{name} was lost: {why}")


class MetricsPart(HeadPart):
    """Serves metrics for Prometheus, where the plan has a port for them."""

    def __init__(self, head: TrainingHead) -> None:
        super().__init__(head)
        self._training: NewestTraining | None = None

    async def serve(self) -> None:
        """Serve the page; if the port is in use, notify the user and continue without."""
        port = self.head.plan.metrics_port
        if port is None:
            return
        from torchmuster.core.net.address import bind
        from torchmuster.launcher.head.openmetrics import CONTENT_TYPE
        from torchmuster.launcher.net.scrape import MetricsPage

        try:
            listening = bind("127.0.0.1", port)
        except OSError as error:
            self.head.notice(f"no metrics at 127.0.0.1:{port}: {error.strerror}")
            return
        self.head.notice(f"metrics for Prometheus at http://127.0.0.1:{port}/metrics of this node")
        await MetricsPage(CONTENT_TYPE, self.page).serve(listening)

    def page(self) -> str:
        """Return the page in OpenMetrics text."""
        from torchmuster.launcher.head.openmetrics import NewestTraining, render

        head, board = self.head, self.head.parts["board"]
        if self._training is None:
            self._training = NewestTraining(head.options.run_dir.training)
        self._training.read()
        attempt = head.policy.attempt
        started = attempt.number + 1 if attempt is not None else head.options.first_attempt
        newest = board.board.newest(head.clock()) if isinstance(board, BoardPart) else None
        return render(head.plan.run_id, started, newest, self._training)
