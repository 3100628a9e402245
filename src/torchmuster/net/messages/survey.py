"""Which network the workers use, and what each node is like: the head asks, agents look and call each other."""

from dataclasses import field
from typing import Any

from torchmuster.model.network import Interface, PairResult
from torchmuster.net.messages.base import Message

# Which network the workers use: asked and probed once, before the first attempt.


class AskNetwork(Message):
    """Head: open a port for probes and say which interfaces there are."""

    survey: int


class NetworkFacts(Message):
    """Agent: what it has.

    Attributes:
        ports: Of its probe, for IPv4 and for IPv6.
        names: All its interfaces, with an address or without.
        variables: What the user has set himself of `model.network.VARIABLES`.
    """

    survey: int
    ports: tuple[int, ...]
    interfaces: tuple[Interface, ...]
    names: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


class AskFacts(Message):
    """Head: look around on your node (`doctor.facts`) and say what you find.

    Attributes:
        names: Names to be resolved there.
        script: A script to look at instead of the program.
    """

    is_long: bool = False
    names: tuple[str, ...] = ()
    script: str | None = None


class NodeFacts(Message):
    """Agent: what was found (`doctor.facts.Facts`, at most 128 KiB), and its own clock when asked and when sent."""

    facts: dict[str, Any]
    asked_at: float
    sent_at: float


class ProbeTarget(Message):
    """One call that a node shall make; `measure` also asks for latency and bandwidth."""

    candidate: int
    node: int
    address: str
    port: int
    measure: bool = False


class ProbeNetwork(Message):
    """Head: call these; `node` is what the receiver is called among them.

    Attributes:
        bulk_bytes: How much to send to each that is measured, and take it for stalled when it does not arrive; None
            measures in passing.
    """

    survey: int
    node: int
    targets: tuple[ProbeTarget, ...]
    connect_s: float
    bulk_bytes: int | None = None


class ProbeResults(Message):
    """Agent: all its calls on these candidates have ended; what is not in `results` was reached."""

    survey: int
    candidates: tuple[int, ...]
    results: tuple[PairResult, ...] = ()


class EndProbe(Message):
    """Head: close the port, end the calls."""

    survey: int


# From agent to agent, on the port of a probe. Ping and Pong measure latency.


class ProbeCall(Message):
    """Are you this node? The answer is the same message with the answerer's own values."""

    survey: int
    node: int


class ProbeBulk(Message):
    """After your Pong I send so many bytes that mean nothing; a second Pong when you have all."""

    size_bytes: int
