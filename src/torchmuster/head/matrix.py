"""The matrix of the long form: every node calls every other on a random port, measures, and moves bytes.

It uses the probes of the survey of networks (`node/probe.py`), on the network that workers will use, or on the
agents' own connections where none was chosen. A pair that takes a connection and then no bytes is told apart.
"""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchmuster.head.membership import Member
from torchmuster.model.network import PairResult, PairRow, pair_row
from torchmuster.model.network_choice import draw_peers
from torchmuster.net import messages

if TYPE_CHECKING:
    from torchmuster.diagnose.doctor.situation import Pair

# Numbers of surveys of networks begin at 1.
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
    """All pairs of one run."""

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
            send(member, messages.AskNetwork(survey=SURVEY))

    def _draw(self) -> list[Sequence[int]]:
        num = len(self.members)
        if num <= (SIMULATED_PAIRS_UP_TO if self._is_one_machine else ALL_PAIRS_UP_TO):
            return [[peer for peer in range(num) if peer != node] for node in range(num)]
        return list(draw_peers(num, random.randrange(1 << 30)))

    @property
    def _is_one_machine(self) -> bool:
        return len({member.hello.network_id for member in self.members}) == 1

    def _bulk(self) -> int:
        """Return the bytes of each pair: all together stay below 2 GB.

        A bandwidth between many simulated nodes would be that of a machine's memory, shared by all of them.
        """
        if self._is_one_machine and len(self.members) > SIMULATED_PAIRS_UP_TO:
            return _MIN_BULK_BYTES
        num_pairs = sum(len(peers) for peers in self._peers) or 1
        share = _MAX_TOTAL_BYTES // num_pairs
        return _MIN_BULK_BYTES if share < 1 << 20 else min(share, _MAX_BULK_BYTES)

    def take(self, member: Member, message: messages.Message) -> None:
        """Take ports and results."""
        if member not in self.members:
            return
        node = self.members.index(member)
        match message:
            case messages.NetworkFacts(survey=number) if number == SURVEY:
                self._ports[node] = message.ports
            case messages.ProbeResults(survey=number) if number == SURVEY:
                for peer in message.candidates:
                    self._found.setdefault((node, peer), None)
                for result in message.results:
                    self._found[node, result.target] = result

    def advance(self) -> bool:
        """Order the calls when all ports are known; say whether all calls have ended."""
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
                self._send(member, messages.EndProbe(survey=SURVEY))
        return self.is_over

    def _order(self, node: int) -> messages.ProbeNetwork:
        targets = []
        for peer in self._peers[node]:
            address, ports = self._addresses[peer], self._ports[peer]
            if ports:
                target = messages.ProbeTarget(
                    candidate=peer,  # so that each result is reported as it comes
                    node=peer,
                    address=address,
                    port=ports[-1] if ":" in address else ports[0],
                    measure=True,
                )
                targets.append(target)
        return messages.ProbeNetwork(
            survey=SURVEY,
            node=node,
            targets=tuple(targets),
            connect_s=CONNECT_S,
            bulk_bytes=self.bulk_bytes,
        )

    def pairs(self) -> "tuple[Pair, ...]":
        """Return what is known of every pair."""
        from torchmuster.diagnose.doctor.situation import Pair

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
        """Return the nodes between which and the head large messages do not pass."""
        bad = [pair for pair in self.pairs() if pair.stalled]
        ends = {
            end
            for pair in bad
            for end in (pair.source, pair.target)
            if 0 in (pair.source, pair.target)
        }
        return ends - {0}

    def rows(self) -> tuple[PairRow, ...]:
        """Return the row of each pair, for the event."""
        return tuple(map(pair_row, self.pairs()[:_MAX_ROWS]))
