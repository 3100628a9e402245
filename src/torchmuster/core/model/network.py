"""Interfaces of a node, and the variables that name them to gloo, NCCL and TensorPipe."""

from dataclasses import dataclass

# Variables that name interfaces, each in a grammar of its own.
GLOO, NCCL, TENSORPIPE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
VARIABLES = (GLOO, NCCL, TENSORPIPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """An interface of a node with its first address of one family.

    Attributes:
        prefix_bits: Prefix length of its network; 32 (128) for a point-to-point link.
        speed_mbit: Speed in Mbit/s as reported by the driver; None if it reports none.
    """

    name: str
    address: str
    prefix_bits: int
    speed_mbit: int | None = None
    is_up: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """An unused interface, and the reason in a few words."""

    name: str
    why: str


# Source and target by index, why the target is unreachable (or None), microseconds and MB/s.
PairRow = tuple[int, int, str | None, float | None, float | None]


def significant(number: float) -> str:
    """Return a number with two significant digits: 23, 1.8, 0.05, 120."""
    if number <= 0:
        return "0"
    digits = f"{number:.1e}"
    rounded = float(digits)
    decimals = max(1 - int(digits.partition("e")[2]), 0)
    text = f"{rounded:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
