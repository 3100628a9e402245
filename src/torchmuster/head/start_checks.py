"""What is measured before an attempt starts: the network that its workers use, and what is wrong with the nodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.errors import ChannelError
from torchmuster.head.membership import Member
from torchmuster.model.plan import RunPlan
from torchmuster.model.record.events import RecordEvent
from torchmuster.model.verdict import Report
from torchmuster.net import messages

if TYPE_CHECKING:
    from torchmuster.head.network_survey import NetworkSurvey
    from torchmuster.head.preflight import Preflight


def preflight_form(plan: RunPlan, environment: Mapping[str, str]) -> str:
    """Return how the nodes are examined: `short`, `long`, `only`, or `off`, as for a run on one node."""
    wanted = environment.get("MUSTER_PREFLIGHT") if plan.preflight == "short" else None
    form = "off" if wanted in ("off", "no", "0") else plan.preflight
    return "off" if form == "short" and plan.num_places == 1 else form


@dataclass(frozen=True, slots=True)
class ChecksEnd:
    """How the checks end the run: a report of what makes it impossible, or None when only they were asked for."""

    exit_code: int
    report: Report | None


class StartChecks:
    """The survey of networks and the preflight of a run.

    Args:
        plan: The run's.
        form: Of the preflight, see `preflight_form`.
        send: Sends to an agent.
        name_of: Returns a node's name.
        tell: Writes an event.
        clock: The time.
        own_address: The head's, as far as it knows it.
        own_network_id: Of the head's machine.
    """

    def __init__(
        self,
        plan: RunPlan,
        form: str,
        *,
        send: Callable[[Member, messages.Message], None],
        name_of: Callable[[Member], str],
        tell: Callable[[RecordEvent], None],
        clock: Callable[[], float],
        own_address: str,
        own_network_id: str,
    ) -> None:
        self.end: ChecksEnd | None = None
        self._send, self._name_of, self._tell, self._clock = send, name_of, tell, clock
        self._own_address, self._own_network_id = own_address, own_network_id
        self._network: NetworkSurvey | None = None  # only where agents are on several machines
        self._preflight: Preflight | None = None
        if form != "off":
            from torchmuster.head import preflight

            self._preflight = preflight.Preflight(plan, send, name_of, tell, clock)

    @property
    def due(self) -> float | None:
        """Return when `settle` has to be called again even if no message comes."""
        parts = (self._network, self._preflight)
        dues = [part.due for part in parts if part is not None and part.due is not None]
        return min((due for due in dues if due > self._clock()), default=None)

    def greet(self, member: Member) -> None:
        """Take note of an agent that has joined."""
        if self._preflight is not None:
            self._preflight.greet(member)

    def take(self, member: Member, message: messages.Message) -> None:
        """Take what an agent has measured or found."""
        if self._network is not None and not isinstance(message, messages.NodeFacts):
            self._network.take(member, message)
        if self._preflight is not None:
            self._preflight.take(member, message)

    def settle(self, here: Sequence[Member]) -> bool:
        """Say whether an attempt may start with these members; once it can't, `end` says why."""
        return self._network_is_settled(here) and self._preflight_is_settled(here)

    def _network_is_settled(self, here: Sequence[Member]) -> bool:
        if self._network is None:
            if {member.hello.network_id for member in here} == {self._own_network_id}:
                return True
            from torchmuster.head import network_survey

            self._network = network_survey.NetworkSurvey(
                self._send, self._name_of, self._tell, clock=self._clock
            )
        settled = self._network.settle(list(here), self._proved_address(here))
        if self._network.error is not None:
            if self._preflight is not None and self._preflight.take_failure(self._network.error):
                return True  # the long form shows the matrix too
            self.end = ChecksEnd(ChannelError.exit_code, self._network.error)
            return False
        return settled

    def _preflight_is_settled(self, here: Sequence[Member]) -> bool:
        if self._preflight is None:
            return True
        settled = self._preflight.settle(here, self._proved_address(here), self._network)
        if self._preflight.has_failed:
            self.end = ChecksEnd(1, self._preflight.error)
        elif settled and self._preflight.is_all:
            self.end = ChecksEnd(0, None)
        return settled and self.end is None

    def interface_of(self, member: Member) -> str | None:
        """Return the interface that a node's workers use; None where none was chosen."""
        return self._network.interface_of(member) if self._network is not None else None

    def master_address(self, here: Sequence[Member]) -> str:
        """Return the head's address in the network that was chosen, else one that others have reached."""
        measured = self._network.master_address if self._network is not None else None
        return measured or self._proved_address(here)

    def _proved_address(self, here: Sequence[Member]) -> str:
        """Return the head's address that most other nodes have reached; its own when there are none."""
        proved = [
            member.channel.own_address
            for member in here
            if member.channel is not None and not member.hello.wants_place_0
        ]
        # The head's own agent may have called over loopback, which proves nothing to the others.
        outside = [address for address in proved if not address.startswith("127.")]
        proved = outside or proved
        return max(sorted(set(proved)), key=proved.count) if proved else self._own_address
