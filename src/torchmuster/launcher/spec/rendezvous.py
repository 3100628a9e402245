"""The rendezvous of a torchrun command line: endpoint, backend, id, time limits and `--rdzv-conf`.

Source: torch/distributed/run.py, `run`, and elastic/rendezvous/utils.py (2.13).
"""

import argparse
import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from torchmuster.core.spec.problems import Problems
from torchmuster.core.spec.units import parse_seconds

DEFAULT_STATIC_PORT = 29500
DEFAULT_C10D_PORT = 29400
NO_ID = "none"  # torchrun's name for a job without `--rdzv-id`
_CONF_KEYS = frozenset(
    {"join_timeout", "last_call_timeout", "timeout", "rank", "is_host", "secret_file"}
)
_CONF_WITHOUT_EFFECT = frozenset(
    {
        "close_timeout",
        "heartbeat_timeout",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "read_timeout",
        "store_type",
        "use_libuv",
        "use_agent_store",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The rendezvous that a command line asks for.

    Attributes:
        port: The port; 0 lets the kernel choose.
        alone: Whether no other node has to find this one: then it has a free port and its own key.
        static: Whether --node-rank gives the places.
    """

    host: str
    port: int
    alone: bool
    static: bool
    rdzv_id: str


def find_rendezvous(
    given: argparse.Namespace, max_nodes: int, problems: Problems, *, knows_head: bool = False
) -> Rendezvous | None:
    """Return the rendezvous; None if it is invalid, with the reasons in `problems`.

    With `knows_head`, the caller knows the head anyway, so an endpoint may lack its host.
    """
    fresh_id = str(uuid.uuid4())
    if given.standalone or _is_plain(given, max_nodes):
        return Rendezvous(host="localhost", port=0, alone=True, static=False, rdzv_id=fresh_id)
    static = given.rdzv_backend == "static"
    if not static and not given.rdzv_endpoint.strip() and max_nodes == 1:
        # torchrun uses localhost:29400 here, where two jobs on one machine would collide.
        return Rendezvous(host="localhost", port=0, alone=True, static=False, rdzv_id=given.rdzv_id)
    found = _parse_endpoint(given, static, problems, knows_head=knows_head)
    if found is None:
        return None
    return Rendezvous(
        host=found[0], port=found[1], alone=False, static=static, rdzv_id=given.rdzv_id
    )


def _is_plain(given: argparse.Namespace, max_nodes: int) -> bool:
    """Return whether the command line neither has nor needs a rendezvous."""
    unnamed = not given.rdzv_endpoint.strip() and given.master_port is None
    return given.rdzv_backend == "static" and unnamed and max_nodes == 1


def _parse_endpoint(
    given: argparse.Namespace, static: bool, problems: Problems, *, knows_head: bool
) -> tuple[str, int] | None:
    text, option = given.rdzv_endpoint.strip(), "--rdzv-endpoint"
    if text.startswith(":") and text[1:].isdecimal() and knows_head:
        text = f"localhost{text}"
    if static and not text:
        host = given.master_addr.strip("[]")
        host = f"[{host}]" if ":" in host else host
        port = DEFAULT_STATIC_PORT if given.master_port is None else given.master_port
        text, option = f"{host}:{port}", "--master-addr, --master-port"
    default = DEFAULT_STATIC_PORT if static else DEFAULT_C10D_PORT
    match = re.fullmatch(r"(\[[^\]]+\]|[^:]+|[0-9a-fA-F:]+)(?::(\d+))?", text or "localhost")
    address = match.group(1).strip("[]") if match else ""
    if match is None or int(match.group(2) or 0) > 65535 or not _is_host(address):
        fix = "--rdzv-endpoint HOST:PORT"
        if option != "--rdzv-endpoint":
            fix = f"--master-addr HOST --master-port {DEFAULT_STATIC_PORT}"
        problems.add(f"`{text}` is not a valid HOST:PORT", option, fix=fix)
        return None
    return address, int(match.group(2) or default)


def _is_host(text: str) -> bool:
    try:
        if ":" in text:
            socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
        else:
            text.encode("idna")  # as the resolver does first
    except (OSError, UnicodeError):
        return False
    return True


def parse_conf(text: str, problems: Problems) -> dict[str, str]:
    """Parse the keys and values of `--rdzv-conf`, without quotes around the whole text."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    conf: dict[str, str] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            fix = "--rdzv-conf join_timeout=600,last_call_timeout=30"
            problems.add(f"`{part}` is not KEY=VALUE", f"--rdzv-conf {text}", fix=fix)
        else:
            conf[key.strip()] = value.strip()
    return conf


def parse_waits(
    conf: Mapping[str, str], static: bool, problems: Problems
) -> tuple[float, float] | None:
    """Return how long a node waits for the minimum number of nodes, and then for more, in seconds.

    As in torchrun, the key `timeout` is valid only in the static rendezvous.
    """
    join = conf.get("join_timeout") or (static and conf.get("timeout")) or (900 if static else 600)
    words = {
        "--rdzv-conf join_timeout": str(join),
        "--rdzv-conf last_call_timeout": conf.get("last_call_timeout") or "30",
    }
    seconds = [parse_seconds(word) for word in words.values()]
    for (option, word), value in zip(words.items(), seconds, strict=True):
        if value is None:
            what = f"`{word}` is not a valid number of seconds"
            problems.add(what, option, fix=f"{option}=30")
    join_s, last_call_s = seconds
    return None if join_s is None or last_call_s is None else (join_s, last_call_s)


def notes_on(conf: Mapping[str, str], static: bool) -> list[str]:
    """Return sentences about keys of `--rdzv-conf` that have no effect."""
    notes: list[str] = []
    for key in conf:
        if key in _CONF_WITHOUT_EFFECT:
            notes.append(f"--rdzv-conf {key} has no effect here")
        elif key == "timeout" and not static:
            notes.append("--rdzv-conf timeout has no effect with c10d, as in torchrun")
        elif key not in _CONF_KEYS:
            notes.append(f"--rdzv-conf {key} is unknown and has no effect, as in torchrun")
    return notes
