"""Names, addresses and interfaces as a node sees them. Only looking up names sends packets."""

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmuster.diagnose.facts.system import list_folder, read_text
from torchmuster.model.network import Interface
from torchmuster.net.address import link_names, own_interfaces

# linux/sockios.h
_SIOCGIFMTU = 0x8921
# An address of the documentation's network: a route to it is a default route. No packet is sent.
_OUTSIDE = "198.51.100.1"
_MAX_NAMES = 64
_MAX_ADDRESSES = 16
_MAX_DEVICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of an RDMA device, as /sys shows it.

    Attributes:
        kind: `InfiniBand` or `Ethernet` (RoCE).
        state: `ACTIVE`, `DOWN`, ...
        num_gids: How many of its global ids are set; RoCE needs at least one.
    """

    name: str
    port: int
    kind: str
    state: str
    num_gids: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """Names, addresses and devices of one node.

    Attributes:
        own_name: The result of gethostname(); `own_addresses` its addresses here.
        names: Other nodes' names with their addresses here.
        unresolved: Names without an answer, and why.
        mtu: By interface.
        links: All interfaces, with an address or without.
        outside: The source address of packets to the outside; None without a default route.
        name_s: How long the slowest look-up took.
        cxi: Devices of Slingshot; `efa` those of AWS.
    """

    own_name: str
    own_addresses: tuple[str, ...] = ()
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unresolved: dict[str, str] = field(default_factory=dict)
    interfaces: tuple[Interface, ...] = ()
    links: tuple[str, ...] = ()
    mtu: dict[str, int] = field(default_factory=dict)
    outside: str | None = None
    name_s: float = 0.0
    rdma: tuple[RdmaPort, ...] = ()
    cxi: tuple[str, ...] = ()
    efa: tuple[str, ...] = ()
    has_rdma_files: bool = False


def collect_network(names: Sequence[str], limit_s: float, root: str = "/") -> InterfaceFacts:
    """Return the facts; names that take longer than `limit_s` count as unresolved."""
    own = socket.gethostname()
    wanted = list(dict.fromkeys([own, *names]))[:_MAX_NAMES]
    began = time.monotonic()
    found, unresolved = resolve(wanted, limit_s)
    name_s = time.monotonic() - began
    interfaces = own_interfaces()
    links = link_names()
    rdma = rdma_ports(root)
    return InterfaceFacts(
        own_name=own,
        own_addresses=found.get(own, ()),
        names={name: found[name] for name in wanted if name in found},
        unresolved=unresolved,
        interfaces=interfaces,
        links=links[:_MAX_DEVICES],
        mtu={i.name: mtu for i in interfaces if (mtu := _mtu(i.name)) is not None},
        outside=source_for(_OUTSIDE),
        name_s=round(name_s, 3),
        rdma=rdma,
        cxi=tuple(list_folder(os.path.join(root, "sys/class/cxi"))),
        efa=tuple(n for n in {port.name for port in rdma} if _is_efa(n, root)),
        has_rdma_files=bool(list_folder(os.path.join(root, "dev/infiniband"))),
    )


def resolve(
    names: Sequence[str], limit_s: float
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the addresses of names, and why others have none; looked up in parallel."""
    found: dict[str, tuple[str, ...]] = {}
    failed: dict[str, str] = {}

    def ask(name: str) -> None:
        try:
            rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError as error:
            failed[name] = error.strerror or str(error)
            return
        except UnicodeError:
            failed[name] = "it is no host name"
            return
        found[name] = tuple(dict.fromkeys(str(row[4][0]) for row in rows))[:_MAX_ADDRESSES]

    if len(names) == 1 and not limit_s:
        ask(names[0])
        return found, failed
    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    answered, refused = dict(found), dict(failed)
    late = [name for name in names if name not in answered and name not in refused]
    return answered, refused | dict.fromkeys(late, f"no answer within {limit_s:g} s")


def source_for(address: str) -> str | None:
    """Return the own address that packets to `address` would have; no packet is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((address, 9))
            return str(asking.getsockname()[0])
    except OSError:
        return None


def rdma_ports(root: str = "/") -> tuple[RdmaPort, ...]:
    """Return the ports of all RDMA devices."""
    base = os.path.join(root, "sys/class/infiniband")
    found = []
    for name in list_folder(base)[:_MAX_DEVICES]:
        for port in list_folder(os.path.join(base, name, "ports")):
            folder = os.path.join(base, name, "ports", port)
            state = read_text(os.path.join(folder, "state")).partition(":")[2].strip()
            gids = [read_text(os.path.join(folder, "gids", str(index))) for index in range(8)]
            found.append(
                RdmaPort(
                    name=name,
                    port=int(port) if port.isdecimal() else 0,
                    kind=read_text(os.path.join(folder, "link_layer")).strip(),
                    state=state,
                    num_gids=sum(bool(gid.strip(" :0\n")) for gid in gids),
                )
            )
    return tuple(found)


def _is_efa(name: str, root: str) -> bool:
    driver = os.path.join(root, "sys/class/infiniband", name, "device/driver")
    try:
        return os.path.basename(os.readlink(driver)) == "efa"
    except OSError:
        return False


def _mtu(name: str) -> int | None:
    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFMTU, request)
    except OSError:
        return None
    return int(struct.unpack_from("=i", answer, 16)[0])
