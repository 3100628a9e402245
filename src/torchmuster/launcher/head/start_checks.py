"""Checks before an attempt starts: the survey of the workers' network, and the preflight."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchmuster.core import plugs
from torchmuster.core.head.membership import Member
from torchmuster.core.head.node_policy import ChecksEnd, NodePolicy, StartChecks
from torchmuster.core.net import messages
from torchmuster.errors import ChannelError
from torchmuster.launcher.net import part_messages

if TYPE_CHECKING:
    from torchmuster.launcher.head.network_survey import NetworkSurvey


class SurveyAndPreflight(StartChecks):
    """The network survey and, where another room has added one, the preflight."""

    def __init__(self, policy: NodePolicy, own_address: str, own_network_id: str) -> None:
        super().__init__(policy, own_address, own_network_id)
        self._send, self._name_of, self._tell = policy.send, policy.members.name, policy.tell
        self._clock: Callable[[], float] = lambda: policy.now
        self._network: NetworkSurvey | None = None  # only where agents are on several machines
        make = plugs.find("start_checks", "preflight")
        words = (policy.plan, self._send, self._name_of, self._tell, self._clock)
        self._preflight: Any = make(*words) if make is not None else None

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
        if self._network is not None and not isinstance(message, part_messages.NodeFacts):
            self._network.take(member, message)
        if self._preflight is not None:
            self._preflight.take(member, message)

    def settle(self, here: Sequence[Member]) -> bool:
        """Return whether an attempt may start with these members; if it never can, set `end`."""
        return self._network_is_settled(here) and self._preflight_is_settled(here)

    def _network_is_settled(self, here: Sequence[Member]) -> bool:
        if self._network is None:
            if {member.hello.network_id for member in here} == {self._own_network_id}:
                return True
            from torchmuster.launcher.head import network_survey

            self._network = network_survey.NetworkSurvey(
                self._send, self._name_of, self._tell, clock=self._clock
            )
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
        return self._network.interface_of(member) if self._network is not None else None

    def master_address(self, here: Sequence[Member]) -> str:
        """Return the head's address in the chosen network, else one that others have reached."""
        measured = self._network.master_address if self._network is not None else None
        return measured or super().master_address(here)
