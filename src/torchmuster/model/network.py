"""Interfaces of nodes, the networks that they may form, and results of probes: values only.

What is chosen among them, and why, is `model/network_choice.py`.
"""

from dataclasses import dataclass
from typing import Any

# Above 32 nodes a node calls the head, its two neighbours and 8 random ones, not all.
ALL_PAIRS_UP_TO = 32
RANDOM_PEERS = 8
# Every node of a ring sends 4 MiB for each candidate: 64 * 7 * 4 MiB is less than 2 GB.
RING_UP_TO = 64
MAX_CANDIDATES = 7
# Variables that name interfaces, each in a grammar of its own.
GLOO, NCCL, TENSORPIPE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
VARIABLES = (GLOO, NCCL, TENSORPIPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One interface of a node with its first address of a family.

    Attributes:
        prefix_bits: Length of the network's prefix; 32 (128) for a point-to-point link.
        speed_mbit: What the driver says, in Mbit/s; None when it says nothing.
    """

    name: str
    address: str
    prefix_bits: int
    speed_mbit: int | None = None
    is_up: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkNode:
    """The facts about one node before the probes; in a list of nodes the head is the first.

    Attributes:
        used_address: The node's end of its agent's connection; on the head, the end that most others reached.
        machine: What two agents of one machine have in common; empty: this node has a machine of its own.
    """

    name: str
    interfaces: tuple[Interface, ...]
    used_address: str | None = None
    machine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One interface for each node, in the order of the nodes: a candidate for the network of the run."""

    members: tuple[Interface, ...]
    is_used: bool = False  # by the agents' own connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """An interface that is not used, and why, in a few words."""

    name: str
    why: str


# Source and target by their places, why one does not reach the other (or None), microseconds and MB/s.
PairRow = tuple[int, int, str | None, float | None, float | None]


def pair_row(pair: Any) -> PairRow:
    """Return the row of a measured pair: a `PairResult`, or a `Pair` of the doctor's."""
    return (
        pair.source,
        pair.target,
        pair.why,
        round(pair.latency_s * 1e6) if pair.latency_s is not None else None,
        round(pair.bytes_per_s / 1e6, 1) if pair.bytes_per_s is not None else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """The result of one probe; `why` is None when the other node was reached.

    Attributes:
        candidate, source, target: Positions in the lists of candidates and nodes.
        latency_s: Half of the shortest round trip; None when it was not measured.
        bytes_per_s: Payload of one connection; what a program in Python could move at least.
        stalled: A connection was made, and then bytes did not arrive.
    """

    candidate: int
    source: int
    target: int
    why: str | None = None
    latency_s: float | None = None
    bytes_per_s: float | None = None
    stalled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The network of a run.

    Attributes:
        candidate: Its position in the list of candidates.
        latency_s: The largest that was measured in it; None when none was.
        bytes_per_s: The smallest that was measured in it.
    """

    candidate: int
    members: tuple[Interface, ...]
    unused: tuple[Unused, ...]
    latency_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoNetwork:
    """No network connects all nodes: the sentence of the error, and what was tried."""

    what: str
    tried: tuple[str, ...]


def significant(number: float) -> str:
    """Return a number with two significant digits: 23, 1.8, 0.05, 120."""
    if number <= 0:
        return "0"
    digits = f"{number:.1e}"
    rounded = float(digits)
    decimals = max(1 - int(digits.partition("e")[2]), 0)
    text = f"{rounded:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
