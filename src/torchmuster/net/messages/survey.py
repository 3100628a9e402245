"""The network survey, and facts about the nodes: the head asks, agents collect facts and connect to each other."""

from dataclasses import field
from typing import Any

from torchmuster.model.network import Interface, PairResult
from torchmuster.net.messages.base import Message

# Which network the workers use: asked and probed once, before the first attempt.


class AskNetwork(Message):
    """From the head: open a port for probes and report the interfaces."""

    survey: int


class NetworkFacts(Message):
    """From an agent: its interfaces and ports.

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
    """From the head: collect facts about your node (`diagnose.facts`) and report them.

    Attributes:
        names: Names to be resolved there.
        script: A script to look at instead of the program.
    """

    is_long: bool = False
    names: tuple[str, ...] = ()
    script: str | None = None


class NodeFacts(Message):
    """From an agent: the facts (`diagnose.facts`, at most 128 KiB), and its own clock at the request and at the answer."""

    facts: dict[str, Any]
    asked_at: float
    sent_at: float


class ProbeTarget(Message):
    """A connection that a node has to try; `measure` also requests latency and bandwidth."""

    candidate: int
    node: int
    address: str
    port: int
    measure: bool = False


class ProbeNetwork(Message):
    """From the head: connect to these; `node` is the number of the receiver.

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
    """From an agent: all its connections on these candidates have ended; targets without an entry in `results` were reached."""

    survey: int
    candidates: tuple[int, ...]
    results: tuple[PairResult, ...] = ()


class EndProbe(Message):
    """From the head: close the port, end the connections."""

    survey: int


# From agent to agent, on the port of a probe. Ping and Pong measure latency.


class ProbeCall(Message):
    """Asks whether the receiver is this node; the answer is the same message with its own values."""

    survey: int
    node: int


class ProbeBulk(Message):
    """Announces padding bytes after the Pong; a second Pong confirms all of them."""

    size_bytes: int
