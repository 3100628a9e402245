"""Checks before an attempt starts: the survey of the workers' network, and the preflight.

The survey asks all agents, lets them probe each other, and chooses:

    settle() --new members--> ASKING --all have reported--> PROBING --chosen--> settled
                                 +-------- the time is up --------> settled, without a choice

Nothing here blocks: the head calls `settle` until it returns True, passes messages to `take`, and
wakes up at `due`. The survey runs while the nodes' spawners import torch.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core import plugs, proc
from torchmuster.core.head.membership import Member
from torchmuster.core.head.node_policy import ChecksEnd, NodePolicy, StartChecks
from torchmuster.core.model.contract import INTERFACE_VARIABLES
from torchmuster.core.model.events import NoticeEvent, RecordEvent
from torchmuster.core.model.verdict import Report
from torchmuster.core.net import messages
from torchmuster.errors import ChannelError
from torchmuster.launcher.model import network
from torchmuster.launcher.model.events import NetworkEvent, PairRow, Unused
from torchmuster.launcher.model.network import Interface
from torchmuster.launcher.net import part_messages


class SurveyAndPreflight(StartChecks):
    """The network survey and, where another room has added one, the preflight."""

    def __init__(self, policy: NodePolicy, own_address: str, own_network_id: str) -> None:
        super().__init__(policy, own_address, own_network_id)
        self._clock: Callable[[], float] = lambda: policy.now
        words = (policy.send, policy.members.name, policy.tell)
        self._network = NetworkSurvey(*words, clock=self._clock, own_network_id=own_network_id)
        make = plugs.find("start_checks", "preflight")
        self._preflight: Any = None
        if make is not None:
            self._preflight = make(policy.plan, *words, self._clock)

    @property
    def due(self) -> float | None:
        """Return when `settle` must be called again even if no message comes."""
        parts = (self._network, self._preflight)
        dues = [part.due for part in parts if part is not None and part.due is not None]
        return min((due for due in dues if due > self._clock()), default=None)

    def greet(self, member: Member) -> None:
        """Tell the preflight that an agent has joined."""
        if self._preflight is not None:
            self._preflight.greet(member)

    def take(self, member: Member, message: messages.Message) -> None:
        """Pass on an agent's measurement or facts."""
        if not isinstance(message, part_messages.NodeFacts):
            self._network.take(member, message)
        if self._preflight is not None:
            self._preflight.take(member, message)

    def settle(self, here: Sequence[Member]) -> bool:
        """Return whether an attempt may start with these members; if it never can, set `end`."""
        return self._network_is_settled(here) and self._preflight_is_settled(here)

    def _network_is_settled(self, here: Sequence[Member]) -> bool:
        settled = self._network.settle(list(here), super().master_address(here))
        if self._network.error is not None:
            if self._preflight is not None and self._preflight.handle_network_failure(
                self._network.error
            ):
                return True  # the long preflight shows the matrix all the same
            self.end = ChecksEnd(ChannelError.exit_code, self._network.error)
            return False
        return settled

    def _preflight_is_settled(self, here: Sequence[Member]) -> bool:
        if self._preflight is None:
            return True
        settled = self._preflight.settle(here, super().master_address(here), self._network)
        if self._preflight.has_failed:
            self.end = ChecksEnd(1, self._preflight.error)
        elif settled and self._preflight.is_all:
            self.end = ChecksEnd(0, None)
        return settled and self.end is None

    def interface_of(self, member: Member) -> str | None:
        """Return the interface that a node's workers use; None where no network was chosen."""
        return self._network.interface_of(member)

    def master_address(self, here: Sequence[Member]) -> str:
        """Return the head's address in the chosen network, else one that others have reached."""
        return self._network.master_address or super().master_address(here)


CONNECT_S = 1.0
LIMIT_S = 2.0
# When no network connects all nodes: the limits of one more survey before the run is ended.
PATIENT_CONNECT_S = 5.0
PATIENT_LIMIT_S = 7.0
_MAX_RECORDED = 64  # nodes, with 8 pairs each on average
_LOOPBACK = {"lo": "it leads to the node itself"}


@dataclass(slots=True)
class _Survey:
    """One survey under way."""

    number: int
    members: list[Member]  # the head first
    names: list[str]
    began_at: float
    ends_at: float
    connect_s: float
    facts: dict[int, part_messages.NetworkFacts] = field(default_factory=dict)
    nodes: list[network.NetworkNode] = field(default_factory=list)
    candidates: list[network.Candidate] = field(default_factory=list)
    unused: list[Unused] = field(default_factory=list)
    findings: network.NetworkFindings = field(default_factory=network.NetworkFindings)
    is_probing: bool = False
    ready_at: float | None = None  # when all spawners were ready

    @property
    def is_complete(self) -> bool:
        """Return whether every call has ended."""
        return len(self.findings.complete) >= len(self.candidates) * len(self.members)


class NetworkSurvey:
    """Chooses the network of a run's workers.

    Attributes:
        error: The report that ends the run, when no network connects all nodes.
    """

    def __init__(
        self,
        send: Callable[[Member, messages.Message], None],
        name_of: Callable[[Member], str],
        tell: Callable[[RecordEvent], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        own_network_id: str | None = None,
    ) -> None:
        self.error: Report | None = None
        self._send = send
        self._name_of = name_of
        self._tell = tell
        self._clock = clock
        self._own_network_id = proc.network_id() if own_network_id is None else own_network_id
        self._survey: _Survey | None = None
        self._num_surveys = 0
        self._settled: frozenset[str] = frozenset()  # incarnations that need no more survey
        self._interfaces: dict[str, Interface] = {}  # by incarnation
        self._head: Interface | None = None

    # Called by the head.

    @property
    def due(self) -> float | None:
        """Return when `settle` must be called again even if no message comes."""
        return self._survey.ends_at if self._survey is not None else None

    @property
    def master_address(self) -> str | None:
        """Return the head's address in the chosen network; None when none was chosen."""
        return self._head.address if self._head is not None else None

    def interface_of(self, member: Member) -> str | None:
        """Return the name of a member's interface in the chosen network."""
        interface = self._interfaces.get(member.hello.incarnation)
        return interface.name if interface is not None else None

    def address_of(self, member: Member) -> str | None:
        """Return a member's address in the chosen network."""
        interface = self._interfaces.get(member.hello.incarnation)
        return interface.address if interface is not None else None

    def settle(self, here: Sequence[Member], head_address: str) -> bool:
        """Return whether the members' network is settled; if not, start or advance a survey.

        Args:
            here: The members of the attempt.
            head_address: The head's address that most of the others have reached.
        """
        incarnations = frozenset(member.hello.incarnation for member in here)
        if self.error is not None:
            return False
        if self._survey is None:
            if incarnations <= self._settled or self._needs_none(here):
                return True
            self._begin(here, CONNECT_S, LIMIT_S)
        elif incarnations != {m.hello.incarnation for m in self._survey.members}:
            self._close()
            self._begin(here, CONNECT_S, LIMIT_S)
        self._advance(head_address)
        return self._survey is None and self.error is None

    def _needs_none(self, here: Sequence[Member]) -> bool:
        ids = {member.hello.network_id for member in here}
        return len(here) < 2 or ids == {self._own_network_id} or "" in ids

    def take(self, member: Member, message: messages.Message) -> None:
        """Record an agent's report on its interfaces or its calls."""
        survey = self._survey
        if survey is None or member not in survey.members:
            return
        node = survey.members.index(member)
        match message:
            case part_messages.NetworkFacts(survey=number) if number == survey.number:
                survey.facts[node] = message
            case part_messages.ProbeResults(survey=number) if number == survey.number:
                results = [r for r in message.results if r.source == node]
                survey.findings.add(results, [(c, node) for c in message.candidates])

    # The survey.

    def _begin(self, here: Sequence[Member], connect_s: float, limit_s: float) -> None:
        now = self._clock()
        self._num_surveys += 1
        members = sorted(here, key=_order)
        self._survey = _Survey(
            number=self._num_surveys,
            members=members,
            names=[self._name_of(member) for member in members],
            began_at=now,
            ends_at=now + limit_s,
            connect_s=connect_s,
        )
        for member in members:
            self._send(member, part_messages.AskNetwork(survey=self._num_surveys))

    def _close(self) -> None:
        survey, self._survey = self._survey, None
        if survey is not None:
            for member in survey.members:
                self._send(member, part_messages.EndProbe(survey=survey.number))

    def _advance(self, head_address: str) -> None:
        survey = self._survey
        if survey is None:
            return
        if survey.ready_at is None and all(member.ready for member in survey.members):
            survey.ready_at = self._clock()
        if not survey.is_probing and len(survey.facts) == len(survey.members):
            self._order_probes(survey, head_address)
        is_over = self._clock() >= survey.ends_at
        if survey.is_probing and (
            survey.is_complete or is_over or self._can_conclude_early(survey)
        ):
            self._conclude(survey)
        elif is_over:
            silent = [survey.names[n] for n in range(len(survey.names)) if n not in survey.facts]
            self._give_up(survey, f"{silent[0]} has not reported its interfaces")

    def _can_conclude_early(self, survey: _Survey) -> bool:
        """Return whether workers could start: a network is good, and only calls on others hang."""
        if survey.ready_at is None:
            return False
        num_nodes = len(survey.members)
        known = range(len(survey.candidates))
        return any(survey.findings.failure(number, num_nodes) is None for number in known)

    def _order_probes(self, survey: _Survey, head_address: str) -> None:
        survey.is_probing = True
        survey.nodes = [
            network.NetworkNode(
                name=survey.names[number],
                interfaces=survey.facts[number].interfaces,
                used_address=_used_address(member, head_address),
                machine=member.hello.network_id,
            )
            for number, member in enumerate(survey.members)
        ]
        survey.candidates, survey.unused = network.find_candidates(survey.nodes)
        peers = network.draw_peers(len(survey.nodes), random.randrange(1 << 30))
        for node, member in enumerate(survey.members):
            order = part_messages.ProbeNetwork(
                survey=survey.number,
                node=node,
                targets=tuple(_targets(survey, node, peers[node])),
                connect_s=survey.connect_s,
            )
            self._send(member, order)

    def _conclude(self, survey: _Survey) -> None:
        chosen = network.choose(survey.nodes, survey.candidates, survey.findings, survey.unused)
        if isinstance(chosen, network.NoNetwork):
            self._handle_failure(survey, chosen)
            return
        self._settle(survey)
        incarnations = [member.hello.incarnation for member in survey.members]
        self._interfaces = dict(zip(incarnations, chosen.members, strict=True))
        self._head = chosen.members[0]
        name, subnet = network.describe(chosen.members)
        rate, latency_s = chosen.bytes_per_s, chosen.latency_s
        now = self._clock()
        self._tell(
            NetworkEvent(
                interface=name,
                subnet=subnet,
                num_nodes=len(survey.members),
                nodes=tuple(survey.names[:_MAX_RECORDED]),
                pairs=_measured(survey.findings.results_of(chosen.candidate)),
                gbit_per_s=network.gbit(rate) if rate is not None else None,
                latency_s=round(latency_s, 7) if latency_s is not None else None,
                unused=chosen.unused,
                survey_s=round(now - survey.began_at, 3),
                waited_s=round(now - (survey.ready_at or now), 3),
            )
        )
        self._check_variables(survey, chosen)

    def _settle(self, survey: _Survey) -> None:
        self._settled = frozenset(member.hello.incarnation for member in survey.members)
        self._interfaces, self._head = {}, None
        self._close()

    def _handle_failure(self, survey: _Survey, failure: network.NoNetwork) -> None:
        if survey.connect_s < PATIENT_CONNECT_S and survey.candidates:
            self._close()
            text = f"{failure.what}; trying once more"
            self._tell(NoticeEvent(node=survey.names[0], text=text))
            self._begin(survey.members, PATIENT_CONNECT_S, PATIENT_LIMIT_S)
            return
        unheard = [
            survey.names[node]
            for node in range(len(survey.members))
            if not any(known == node for _, known in survey.findings.complete)
        ]
        if unheard and survey.candidates:
            self._give_up(survey, f"{unheard[0]} has not reported which nodes it reaches")
            return
        self._close()
        self.error = Report(
            error=failure.what,
            at=", ".join(survey.names[:8]),
            because=failure.tried,
            hint="open all TCP ports between the nodes, or choose nodes of one network",
        )

    def _give_up(self, survey: _Survey, why: str) -> None:
        """Continue without a survey, on the addresses that the agents' connections use."""
        self._settle(survey)
        text = f"the network was not measured: {why}; workers use the agents' own connections"
        self._tell(NoticeEvent(node=survey.names[0], text=text))

    # Variables that the user has set.

    def _check_variables(self, survey: _Survey, chosen: network.Choice) -> None:
        useless = ("not reachable", "same address")
        bad = _LOOPBACK | {
            one.name: one.why for one in chosen.unused if one.why.startswith(useless)
        }
        for node, facts in sorted(survey.facts.items()):
            for variable in INTERFACE_VARIABLES:
                value = facts.variables.get(variable)
                if value is None:
                    continue
                problem = _problem(variable, value, facts.names, bad)
                if problem is not None:
                    text = f"{variable}={value[:80]} on {survey.names[node]} {problem}"
                    self._tell(NoticeEvent(node=survey.names[node], text=text))


def _measured(results: Sequence[network.PairResult]) -> tuple[PairRow, ...]:
    """Return the rows of pairs, for the event."""
    return tuple(
        network.pair_row(pair)
        for pair in results[: 8 * _MAX_RECORDED]
        if max(pair.source, pair.target) < _MAX_RECORDED
    )


def _problem(variable: str, value: str, names: Sequence[str], bad: dict[str, str]) -> str | None:
    """Return what is wrong with a variable that the user has set; it is kept all the same."""
    meant = network.matches(variable, value, names)
    if not meant:
        there = ", ".join(name for name in names if name != "lo")
        problem = f"names no interface of this node (it has {there})"
        if not variable.startswith("NCCL") and value.startswith(("=", "^")):
            problem += "; `=` and `^` are NCCL's grammar, this variable takes plain names"
        return problem
    if all(name in bad for name in meant):
        return f"names {meant[0]}, which can't connect the nodes: {bad[meant[0]]}"
    return None


def _order(member: Member) -> tuple[bool, float, str]:
    place = float("inf") if member.place is None else member.place
    return not member.hello.wants_place_0, place, member.hello.host


def _used_address(member: Member, head_address: str) -> str | None:
    if member.hello.wants_place_0:
        return head_address
    if member.channel is None:
        return None
    return member.channel.peer_address.removeprefix("::ffff:")


def _targets(survey: _Survey, node: int, peers: Sequence[int]) -> list[part_messages.ProbeTarget]:
    measured = network.measured_peer(node, len(survey.nodes))
    targets = []
    for number, candidate in enumerate(survey.candidates):
        for peer in peers:
            address = candidate.members[peer].address
            ports = survey.facts[peer].ports
            targets.append(
                part_messages.ProbeTarget(
                    candidate=number,
                    node=peer,
                    address=address,
                    port=ports[-1] if ":" in address else ports[0],
                    measure=peer == measured,
                )
            )
    return targets
