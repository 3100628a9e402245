"""The head's side of the preflight: collects the facts of all nodes and records one event.

    greet() --AskFacts--> nodes collect --NodeFacts--> settle() --all here or late--> findings

Nothing here blocks: the head calls `settle` until it returns True, passes messages to `take`, and
wakes up at `due`. The short form, before every start, runs while the spawners import torch and
delays the start by at most 0.2 s after that. In the long form (`muster doctor`) all pairs of nodes
first connect to each other (the matrix), over separate connections: a path that drops large packets
would also lose the facts, and then the agent's lease.
"""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torchmuster.core import proc
from torchmuster.core.head.membership import Member
from torchmuster.core.model import codec
from torchmuster.core.model.events import RecordEvent
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.verdict import Report
from torchmuster.core.net import messages
from torchmuster.launcher.model.events import PairRow, PreflightEvent
from torchmuster.launcher.model.network import PairResult, draw_peers, pair_row
from torchmuster.launcher.net import part_messages

if TYPE_CHECKING:
    from torchmuster.diagnose.doctor.show import NodeView, Pair, Situation
    from torchmuster.diagnose.finding import Finding
    from torchmuster.launcher.head.start_checks import NetworkSurvey


# The matrix of the long form: every node connects to every other on a random port, measures, and
# moves bytes. It uses the probes of the network survey (`launcher/node/probe.py`) on the network
# that workers will use, or on that of the agents' connections if none was chosen. A pair that
# connects but moves no bytes is reported separately.


# Network surveys are numbered from 1.
SURVEY = 1 << 20
ALL_PAIRS_UP_TO = 64
SIMULATED_PAIRS_UP_TO = 16  # all share one network and its processors
CONNECT_S = 3.0
LIMIT_S = 9.0  # ports of a probe are open for 10 s
_MAX_TOTAL_BYTES = 2_000_000_000
_MAX_BULK_BYTES = 4 << 20
_MIN_BULK_BYTES = 64 << 10
_MAX_ROWS = 8192


class Matrix:
    """The connections between all pairs of a run's nodes."""

    def __init__(
        self,
        members: list[Member],
        addresses: Sequence[str],
        send: Callable[[Member, messages.Message], None],
        clock: Callable[[], float],
    ) -> None:
        self.members = members
        self.ends_at = clock() + LIMIT_S
        self.is_over = len(members) < 2
        self._addresses = addresses
        self._send = send
        self._clock = clock
        self._ports: dict[int, tuple[int, ...]] = {}
        self._peers = self._draw()
        self._found: dict[tuple[int, int], PairResult | None] = {}
        self._is_probing = False
        self.bulk_bytes = self._bulk()
        for member in members if not self.is_over else ():
            send(member, part_messages.AskNetwork(survey=SURVEY))

    def _draw(self) -> list[Sequence[int]]:
        num = len(self.members)
        if num <= (SIMULATED_PAIRS_UP_TO if self._is_one_machine else ALL_PAIRS_UP_TO):
            return [[peer for peer in range(num) if peer != node] for node in range(num)]
        return list(draw_peers(num, random.randrange(1 << 30)))

    @property
    def _is_one_machine(self) -> bool:
        return len({member.hello.network_id for member in self.members}) == 1

    def _bulk(self) -> int:
        """Return the bytes that each pair moves; all pairs together stay below 2 GB.

        Many simulated nodes move little: their bandwidth is that of the memory that they share.
        """
        if self._is_one_machine and len(self.members) > SIMULATED_PAIRS_UP_TO:
            return _MIN_BULK_BYTES
        num_pairs = sum(len(peers) for peers in self._peers) or 1
        share = _MAX_TOTAL_BYTES // num_pairs
        return _MIN_BULK_BYTES if share < 1 << 20 else min(share, _MAX_BULK_BYTES)

    def take(self, member: Member, message: messages.Message) -> None:
        """Record the ports and results that a node reports."""
        if member not in self.members:
            return
        node = self.members.index(member)
        match message:
            case part_messages.NetworkFacts(survey=number) if number == SURVEY:
                self._ports[node] = message.ports
            case part_messages.ProbeResults(survey=number) if number == SURVEY:
                for peer in message.candidates:
                    self._found.setdefault((node, peer), None)
                for result in message.results:
                    self._found[node, result.target] = result

    def advance(self) -> bool:
        """Order the connections once all ports are known; return whether all have ended."""
        if self.is_over:
            return True
        if not self._is_probing and len(self._ports) == len(self.members):
            self._is_probing = True
            for node, member in enumerate(self.members):
                self._send(member, self._order(node))
        num_pairs = sum(len(peers) for peers in self._peers)
        is_complete = self._is_probing and len(self._found) >= num_pairs
        if is_complete or self._clock() >= self.ends_at:
            self.is_over = True
            for member in self.members:
                self._send(member, part_messages.EndProbe(survey=SURVEY))
        return self.is_over

    def _order(self, node: int) -> part_messages.ProbeNetwork:
        targets = []
        for peer in self._peers[node]:
            address, ports = self._addresses[peer], self._ports[peer]
            if ports:
                target = part_messages.ProbeTarget(
                    candidate=peer,  # so that each result is reported as it comes
                    node=peer,
                    address=address,
                    port=ports[-1] if ":" in address else ports[0],
                    measure=True,
                )
                targets.append(target)
        return part_messages.ProbeNetwork(
            survey=SURVEY,
            node=node,
            targets=tuple(targets),
            connect_s=CONNECT_S,
            bulk_bytes=self.bulk_bytes,
        )

    def pairs(self) -> "tuple[Pair, ...]":
        """Return the state of every pair."""
        from torchmuster.diagnose.doctor.show import Pair

        found = []
        for node, peers in enumerate(self._peers):
            for peer in peers:
                result = self._found.get((node, peer))
                why = result.why if result is not None else None
                if (node, peer) not in self._found:
                    why = (
                        f"no result within {LIMIT_S:g} s"
                        if self._is_probing
                        else "the nodes did not open ports"
                    )
                found.append(
                    Pair(
                        source=node,
                        target=peer,
                        why=why,
                        stalled=result is not None and result.stalled,
                        latency_s=result.latency_s if result is not None else None,
                        bytes_per_s=result.bytes_per_s if result is not None else None,
                    )
                )
        return tuple(found)

    def stalled_with_head(self) -> set[int]:
        """Return the nodes that can't exchange large messages with the head."""
        bad = [pair for pair in self.pairs() if pair.stalled]
        ends = {
            end
            for pair in bad
            for end in (pair.source, pair.target)
            if 0 in (pair.source, pair.target)
        }
        return ends - {0}

    def rows(self) -> tuple[PairRow, ...]:
        """Return each pair as a row for the event."""
        return tuple(map(pair_row, self.pairs()[:_MAX_ROWS]))


LONG, ONLY = "long", "only"  # the other forms are `short` and `off`
HOLD_S = 0.2  # after the spawners are ready
LONG_HOLD_S = 8.0
_MAX_NAMES = 64
_MAX_FINDINGS = 64
_PREFLIGHT_MAX_ROWS = 256


@dataclass(slots=True)
class _AgentFacts:
    """The facts that one agent has sent, and when they were requested."""

    asked_at: float  # by this machine's clock
    facts: part_messages.NodeFacts | None = None
    heard_at: float = 0.0


@dataclass(slots=True)
class Preflight:
    """Checks all nodes before an attempt.

    Attributes:
        error: The report that ends the run.
        has_failed: The run ends; in the long form the findings themselves are the report.
    """

    plan: RunPlan
    send: Callable[[Member, messages.Message], None]
    name_of: Callable[[Member], str]
    tell: Callable[[RecordEvent], None]
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    own_network_id: str = field(default_factory=proc.network_id)
    error: Report | None = None
    has_failed: bool = False
    _said: dict[str, _AgentFacts] = field(default_factory=dict)  # by incarnation
    _settled: frozenset[str] = frozenset()
    _ready_at: float | None = None
    _matrix: Matrix | None = None
    _has_asked: bool = False
    _no_network: tuple[str, ...] = ()
    _began_at: float | None = None

    @property
    def is_long(self) -> bool:
        """Return whether this is the long form."""
        return self.plan.preflight in (LONG, ONLY)

    @property
    def is_all(self) -> bool:
        """Return whether the run only checks the nodes and starts no workers."""
        return self.plan.preflight == ONLY

    @property
    def due(self) -> float | None:
        """Return when `settle` has to be called again even if no message arrives."""
        if self._matrix is not None and not self._matrix.is_over:
            return self._matrix.ends_at
        if self._ready_at is None:
            return None
        return self._ready_at + (LONG_HOLD_S if self.is_long else HOLD_S)

    def greet(self, member: Member) -> None:
        """Ask a new agent for its facts (short form); on the head's machine, ask only place 0's."""
        same = member.hello.network_id == self.own_network_id and self.own_network_id != ""
        if not self.is_long and (member.hello.wants_place_0 or not same):
            self._ask(member, ())

    def _ask(self, member: Member, names: tuple[str, ...]) -> None:
        self._said[member.hello.incarnation] = _AgentFacts(asked_at=self.wall())
        script = self.plan.preflight_script
        self.send(member, part_messages.AskFacts(is_long=self.is_long, names=names, script=script))

    def take(self, member: Member, message: messages.Message) -> None:
        """Handle an agent's message."""
        if isinstance(message, part_messages.NodeFacts):
            said = self._said.get(member.hello.incarnation)
            if said is not None and said.facts is None:
                said.facts, said.heard_at = message, self.wall()
        elif self._matrix is not None:
            self._matrix.take(member, message)

    def handle_network_failure(self, report: Report) -> bool:
        """Record that no network connects the nodes; return whether the run continues anyway."""
        if self.is_long and not self._no_network:
            self._no_network = (report.error, *report.because)
        return self.is_long

    def settle(
        self, here: Sequence[Member], head_address: str, network: "NetworkSurvey | None"
    ) -> bool:
        """Return whether an attempt may begin with these members."""
        incarnations = frozenset(member.hello.incarnation for member in here)
        if incarnations <= self._settled:
            return True
        if self.has_failed:
            return False
        now = self.clock()
        here = sorted(here, key=_order)
        self._began_at = self._began_at or now
        if self.is_long and not self._matrix_is_over(here, head_address, network):
            return False
        if self._ready_at is None and all(member.ready for member in here):
            self._ready_at = now
        asked = [m for m in here if m.hello.incarnation in self._said]
        missing = [m for m in asked if self._said[m.hello.incarnation].facts is None]
        if missing and not self._is_late(now):
            return False
        self._settled = incarnations
        self._conclude(asked, network)
        self._ready_at = None
        return not self.has_failed

    def _is_late(self, now: float) -> bool:
        limit_s = LONG_HOLD_S if self.is_long else HOLD_S
        return self._ready_at is not None and now >= self._ready_at + limit_s

    def _matrix_is_over(
        self, here: Sequence[Member], head_address: str, network: "NetworkSurvey | None"
    ) -> bool:
        if self._matrix is None:
            addresses = [_address(member, head_address, network) for member in here]
            self._matrix = Matrix(list(here), addresses, self.send, self.clock)
        if not self._matrix.advance():
            return False
        if not self._has_asked:
            self._has_asked = True
            deaf = self._matrix.stalled_with_head()
            several = len({member.hello.network_id for member in here}) > 1
            names = self.plan.node_names[:_MAX_NAMES] if several else ()
            for number, member in enumerate(here):
                if number not in deaf:
                    self._ask(member, names)
        return True

    # The conclusion.

    def _conclude(self, asked: Sequence[Member], network: "NetworkSurvey | None") -> None:
        from torchmuster.diagnose.doctor.compare import compare

        members = self._matrix.members if self._matrix is not None else list(asked)
        situation = self._situation(members, network)
        findings = compare(situation)
        certain = [finding for finding in findings if finding.is_certain]
        self._record_findings(situation, findings)
        if not certain:
            return
        self.has_failed = True
        if not self.is_long:
            self.error = _report(certain[0])

    def _record_findings(self, situation: "Situation", findings: "Sequence[Finding]") -> None:
        rows: dict[str, Any] = {}
        if not self.is_long:
            from torchmuster.diagnose.doctor.show import software_rows

            rows["software"] = tuple(software_rows(situation.nodes))
        else:
            from torchmuster.diagnose.doctor.show import node_row

            rows["nodes"] = tuple(map(node_row, situation.nodes[:_PREFLIGHT_MAX_ROWS]))
            rows["pairs"] = self._matrix.rows() if self._matrix is not None else ()
        event = PreflightEvent(
            form=LONG if self.is_long else self.plan.preflight,
            findings=tuple(codec.to_plain(finding) for finding in findings[:_MAX_FINDINGS]),
            num_nodes=len(situation.nodes),
            took_s=round(self.clock() - (self._began_at or self.clock()), 3),
            held_s=round(self._held(), 3),
            **rows,
        )
        self.tell(event)

    def _held(self) -> float:
        return self.clock() - self._ready_at if self._ready_at is not None else 0.0

    def _situation(self, members: Sequence[Member], network: "NetworkSurvey | None") -> "Situation":
        from torchmuster.diagnose.doctor.show import Situation

        matrix = self._matrix
        return Situation(
            nodes=tuple(self._view(member, network) for member in members),
            is_long=self.is_long,
            pairs=matrix.pairs() if matrix is not None else (),
            bulk_bytes=matrix.bulk_bytes if matrix is not None else 0,
            no_network=self._no_network,
            script_is_program=self.plan.preflight_script is None,
        )

    def _view(self, member: Member, network: "NetworkSurvey | None") -> "NodeView":
        from torchmuster.diagnose.doctor.show import NodeView
        from torchmuster.launcher.facts.collect import CollectedFacts

        said = self._said.get(member.hello.incarnation)
        facts, why_not = None, "large messages from there do not arrive"
        if said is not None:
            why_not = "it did not answer in time"
        clock_s, error_s = None, 0.0
        if said is not None and said.facts is not None:
            clock_s, error_s = _clock(said)
            try:
                facts = codec.from_plain(CollectedFacts, said.facts.facts)
            except codec.CodecError as error:
                why_not = f"its answer is invalid: {error}"
        return NodeView(
            name=self.name_of(member),
            facts=facts,
            why_not=why_not,
            num_workers=member.hello.num_workers,
            machine=member.hello.network_id or member.hello.host,
            interface=network.interface_of(member) if network is not None else None,
            clock_s=clock_s,
            clock_error_s=error_s,
        )


def _order(member: Member) -> tuple[bool, float, str]:
    place = float("inf") if member.place is None else member.place
    return not member.hello.wants_place_0, place, member.hello.host


def _clock(said: _AgentFacts) -> tuple[float | None, float]:
    """Return how far a node's clock is ahead of the head's, and the uncertainty, in seconds."""
    if said.facts is None:
        return None, 0.0
    # As in NTP (RFC 5905): from four times, two by each clock.
    there, back = said.facts.asked_at - said.asked_at, said.facts.sent_at - said.heard_at
    return (there + back) / 2, max((there - back) / 2, 0.0)


def _address(member: Member, head_address: str, network: "NetworkSurvey | None") -> str:
    chosen = network.address_of(member) if network is not None else None
    if chosen is not None:
        return chosen
    if member.hello.wants_place_0 or member.channel is None:
        return head_address
    return member.channel.peer_address.removeprefix("::ffff:")


def _report(finding: "Finding") -> Report:
    hint = f"{finding.hint}; " if finding.hint else ""
    return replace(finding.report, hint=f"{hint}`--no-preflight` starts the workers anyway")


def of_run(
    plan: RunPlan,
    send: Callable[[Member, messages.Message], None],
    name_of: Callable[[Member], str],
    tell: Callable[[RecordEvent], None],
    clock: Callable[[], float],
) -> Preflight | None:
    """Return the preflight of a run; None if it is off."""
    form = preflight_form(plan, os.environ)
    return None if form == "off" else Preflight(plan, send, name_of, tell, clock)


def preflight_form(plan: RunPlan, environment: Mapping[str, str]) -> str:
    """Return the form of the preflight: `short`, `long`, `only`, or `off` (also for one node)."""
    wanted = environment.get("MUSTER_PREFLIGHT") if plan.preflight == "short" else None
    form = "off" if wanted in ("off", "no", "0") else plan.preflight
    return "off" if form == "short" and plan.num_places == 1 else form
