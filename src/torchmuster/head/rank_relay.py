"""The head's part in `muster exec` and a training run: which agent has the rank or the node that is named.

What a client names is a word: `rank 3`, or `node n2`. The rest is that of workflows (`head/exec_relay.py`).
"""

from collections.abc import Callable
from typing import Protocol

from torchmuster.head.exec_relay import Client, ExecRelay
from torchmuster.head.membership import Member
from torchmuster.model.display.text import name_alone, nearest
from torchmuster.model.ranks import NodeRanks
from torchmuster.net import messages


class RunningAttempt(Protocol):
    """The attempt that runs."""

    members: dict[int, Member]
    ranks: dict[int, NodeRanks]


class RankRelay:
    """Passes messages on between clients and the agents of ranks.

    Args:
        attempt: Returns the attempt that runs.
        name: Returns what a member is called.
        send: Sends to an agent.
    """

    def __init__(
        self,
        attempt: Callable[[], RunningAttempt | None],
        name: Callable[[Member], str],
        send: Callable[[Member, messages.Message], None],
    ) -> None:
        self._attempt = attempt
        self._name = name
        self._send = send
        self._relay = ExecRelay(self._to_word, self._why_not)
        self._members: dict[str, Member] = {}  # by the word, as long as it was last used

    def from_client(self, client: Client, message: messages.FromExecClient) -> None:
        """Pass a client's message on."""
        self._relay.from_client(client, message)

    def client_gone(self, client: Client) -> None:
        """End what a client has started."""
        self._relay.client_gone(client)

    def from_node(self, member: Member, message: messages.FromExecTask) -> None:
        """Pass on what an agent says."""
        for word, known in self._members.items():
            if known is member:
                self._relay.from_task(word, message)

    def node_gone(self, member: Member, why: str) -> None:
        """Tell the clients of a node that its agent is no more."""
        for word in [word for word, known in self._members.items() if known is member]:
            self._relay.task_gone(word, why)
            del self._members[word]

    def _to_word(self, word: str, message: messages.Message) -> bool:
        member = self._members.get(word)
        if isinstance(message, messages.ExecStart) or member is None:
            member = self._find(word)
        if member is None or not member.is_present:
            return False
        self._members[word] = member
        self._send(member, message)
        return True

    def _find(self, word: str) -> Member | None:
        attempt = self._attempt()
        kind, _, name = word.partition(" ")
        if attempt is None:
            return None
        for place, member in attempt.members.items():
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

    def _why_not(self, word: str) -> tuple[str, str | None]:
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
