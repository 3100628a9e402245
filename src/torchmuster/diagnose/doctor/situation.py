"""The input of doctor: the facts of all nodes and the connections between them; and words for rules that compare nodes."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torchmuster.diagnose.facts.collect import CollectedFacts
from torchmuster.diagnose.finding import Finding

V = TypeVar("V", bound=Hashable)
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node as the head knows it.

    Attributes:
        facts: None when the node has not reported any; `why_not` says why.
        machine: The same for nodes that share a kernel and its network.
        interface: Of the network that workers will use; None when none was chosen.
        clock_s: How far its clock is ahead of the head's, in seconds; None when it was not measured.
        clock_error_s: The uncertainty of that.
    """

    name: str
    facts: CollectedFacts | None = None
    why_not: str = ""
    num_workers: int = 1
    machine: str = ""
    interface: str | None = None
    clock_s: float | None = None
    clock_error_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The result of a connection from one node to another; `why` is None on success.

    Attributes:
        source, target: Positions in the list of nodes.
        stalled: A connection was made, but not all bytes came through it.
    """

    source: int
    target: int
    why: str | None = None
    stalled: bool = False
    latency_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All input of the rules; the head is the first of the nodes.

    Attributes:
        is_long: The long form (`muster doctor`), in contrast to the preflight.
        pairs: In the long form only.
        bulk_bytes: How many bytes each pair had to transfer.
        no_network: The report's sentence and evidence when no network connects all nodes.
        script_is_program: The examined script is the program of the run.
    """

    nodes: tuple[NodeView, ...]
    is_long: bool = False
    pairs: tuple[Pair, ...] = ()
    bulk_bytes: int = 0
    no_network: tuple[str, ...] = ()
    script_is_program: bool = True

    @property
    def known(self) -> tuple[NodeView, ...]:
        """The nodes that have reported facts."""
        return tuple(node for node in self.nodes if node.facts is not None)

    @property
    def has_machines(self) -> bool:
        """Return whether the nodes are on several machines."""
        return len({node.machine for node in self.nodes}) > 1


Rule = Callable[[Situation], Iterator[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Values that should be equal on all nodes and are not.

    Attributes:
        text: `n3 has torch 2.6.0, the 7 others 2.13.0`.
        odd: The nodes that are not of the majority.
    """

    text: str
    odd: tuple[str, ...]
    values: tuple[str, ...] = field(default=())


def differ(values: Mapping[str, V], what: str, show: Callable[[V], str] = str) -> Difference | None:
    """Return the difference between nodes; None when all are equal.

    Args:
        values: By the node's name, in the order of the nodes.
        what: What they have, as `torch`; may be empty.
        show: Turns a value into words.
    """
    counted = Counter(values.values())
    if len(counted) < 2:
        return None
    (common, number), (_, second) = counted.most_common(2)
    word = f"{what} " if what else ""
    groups: dict[V, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    shown = tuple(show(value) for value in groups)
    if number == second:  # no majority: each says its own
        parts = [f"{names_of(names)} {has(names)} {word}{show(v)}" for v, names in groups.items()]
        return Difference(text=", ".join(parts[:_MAX_NAMED]), odd=tuple(values), values=shown)
    odd = {v: names for v, names in groups.items() if v != common}
    parts = [f"{names_of(names)} {has(names)} {word}{show(v)}" for v, names in odd.items()]
    others = f"the {number} others" if number > 1 else "the other"
    text = f"{', '.join(parts[:_MAX_NAMED])}, {others} {show(common)}"
    return Difference(
        text=text, odd=tuple(n for names in odd.values() for n in names), values=shown
    )


def has(names: Sequence[str]) -> str:
    """Return `has` or `have`."""
    return "has" if len(names) == 1 else "have"


def names_of(names: Sequence[str]) -> str:
    """Return `n1`, `n1 and n2`, or `n1, n2, n3 and 5 others`."""
    if len(names) > _MAX_NAMED:
        return f"{', '.join(names[: _MAX_NAMED - 1])} and {len(names) - _MAX_NAMED + 1} others"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def show_bytes(number: float) -> str:
    """Return a size as `64 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
