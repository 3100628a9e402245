"""Checks of variables, versions, schedulers and proxies on all nodes."""

import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchmuster.core.model.contract import INTERFACE_VARIABLES
from torchmuster.diagnose.doctor.checks import LONG, TEXTS, Check, Equal, NodePart, look
from torchmuster.diagnose.doctor.show import Rule, Situation, differ
from torchmuster.diagnose.finding import Finding, Level, names_of
from torchmuster.launcher.facts.collect import TorchFacts
from torchmuster.launcher.files.paragraphs import read_paragraphs
from torchmuster.launcher.model.network import matches

# Grammars of the variables in `variables.txt`. The checks find values that the reading program
# ignores without a message.


WordCheck = Callable[[str], str | None]
_TABLES = {
    table.name: table
    for table in read_paragraphs(os.path.join(os.path.dirname(__file__), "variables.txt"))
}
_PROVIDERS = _TABLES["providers"].words


def _words(*allowed: str) -> WordCheck:
    shown = ", ".join(allowed)
    known = {word.upper() for word in allowed}
    return lambda text: None if text.strip().upper() in known else f"it takes one of {shown}"


def _whole(low: int, high: int | None = None) -> WordCheck:
    words = f"it takes a whole number from {low}" + (f" to {high}" if high is not None else " on")

    def check(text: str) -> str | None:
        if not re.fullmatch(r"-?\d+", text.strip()):
            return words
        number = int(text)
        return None if number >= low and (high is None or number <= high) else words

    return check


def _interfaces_of_nccl(text: str) -> str | None:
    body = text[1:] if text[:1] in "^=" else text
    names = [name.strip() for name in body.split(",")]
    if not all(names) or not body:
        return "it takes names or their beginnings, separated by commas, after `^` (not these) or `=` (exactly)"
    if any(name[0] in "^=" for name in names):
        return "`^` or `=` is written once, before the whole list"
    if text.startswith("^") and not any("lo".startswith(name) for name in names):
        return "a list of exclusions replaces NCCL's own: `lo` is allowed now, write ^lo,..."
    return None


def _plain_interfaces(text: str) -> str | None:
    if text[:1] in "^=":
        return "`^` and `=` are NCCL's grammar: this variable takes exact names"
    return (
        None
        if all(name.strip() for name in text.split(","))
        else "it takes names, separated by commas"
    )


def _devices(text: str) -> str | None:
    if not text.strip() or text.strip() in ("NoDevFiles", "-1"):
        return None  # hides all GPUs
    words = text.split(",")
    bad = [w for w in words if not re.fullmatch(r"\s*(\d+|GPU-[0-9a-fA-F-]+|MIG-[\w/-]+)\s*", w)]
    if bad:
        return f"`{bad[0]}` is not a GPU: it and all GPUs after it are hidden"
    return (
        None
        if len({w.strip() for w in words}) == len(words)
        else "a GPU is listed twice: then none is visible"
    )


def _threads(text: str) -> str | None:
    good = all(re.fullmatch(r"\s*[1-9]\d*\s*", word) for word in text.split(","))
    return None if good else "it takes a number of threads from 1 on"


def _provider(text: str) -> str | None:
    words = [
        w.strip() for part in text.lstrip("^").split(",") for w in part.split(";") if w.strip()
    ]
    bad = [word for word in words if word.lower() not in _PROVIDERS]
    if not bad:
        return None
    near = difflib.get_close_matches(bad[0].lower(), _PROVIDERS, n=1)
    return f"libfabric has no provider `{bad[0]}`" + (f", did you mean {near[0]}?" if near else "")


def _pairs(text: str) -> str | None:
    good = all(
        re.fullmatch(r"\s*\w+:.+", word) for word in re.split(r",(?![^\[]*\])", text) if word
    )
    return None if good else "it takes name:value, separated by commas"


GRAMMAR: Mapping[str, WordCheck] = {
    **{name: _whole(*map(int, limits.split())) for name, limits in _TABLES["whole"].table.items()},
    **{name: _words(*allowed.split(", ")) for name, allowed in _TABLES["words"].table.items()},
    "NCCL_SOCKET_IFNAME": _interfaces_of_nccl,
    "GLOO_SOCKET_IFNAME": _plain_interfaces,
    "TP_SOCKET_IFNAME": _plain_interfaces,
    "FI_PROVIDER": _provider,
    "OMP_NUM_THREADS": _threads,
    "CUDA_VISIBLE_DEVICES": _devices,
    "PYTORCH_CUDA_ALLOC_CONF": _pairs,
}
_FREE = _TABLES["free"].words
_OLD = _TABLES["old"].table


def problem_of(name: str, value: str) -> str | None:
    """Return the problem of a variable's value; None when it is valid or unknown."""
    check = GRAMMAR.get(name)
    if check is None:
        return None
    if not value:
        return None if name == "CUDA_VISIBLE_DEVICES" else "it is empty: unset it"
    return check(value)


def meant(name: str) -> str | None:
    """Return the variable that an unknown name probably means; None if it resembles none."""
    if (
        name in GRAMMAR
        or name in _FREE
        or not name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_", "FI_PROV"))
    ):
        return None
    if name in _OLD:
        return _OLD[name]
    near = difflib.get_close_matches(name, [*GRAMMAR, *_FREE], n=1, cutoff=0.92)
    return near[0] if near else None


# Versions of Python, torch, CUDA, NCCL, driver and processor: equal on all nodes, and compatible.


# Source: CUDA Compatibility guide, "Minor Version Compatibility": each major version's first
# driver.
_FIRST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


def _torch(situation: Situation) -> dict[str, TorchFacts]:
    return {s.node.name: s.facts for s in look(situation, "torch") if s.facts.is_known}


def missing_torch(situation: Situation) -> Iterator[Finding]:
    """Report nodes without torch if others have it: their workers can't start."""
    torch = _torch(situation)
    without = [name for name, t in torch.items() if t.torch is None]
    if not without or len(without) == len(torch):
        return
    yield TEXTS["torch-missing"].finding(
        without, by=torch[without[0]].executable or "the interpreter of the job"
    )


def _torches_do_not_fit(situation: Situation) -> bool:
    minors = [minor_of(t.torch) for t in _torch(situation).values()]
    return len({minor for minor in minors if minor is not None}) > 1


_VERSIONS_DIFFER = Equal(
    TEXTS["torch-versions"],
    when=_torches_do_not_fit,
    value=lambda s: s.facts.torch if s.facts.is_known else None,
)


def _cpu_only(situation: Situation) -> Iterator[Finding]:
    """Report torch without CUDA on nodes with GPUs: it trains on the CPU without a message."""
    torch = _torch(situation)
    gpus = look(situation, "gpu")
    with_gpus = [s.node.name for s in gpus if s.facts.visible and s.facts.num_devices]
    plain = [
        n
        for n in with_gpus
        if n in torch and torch[n].torch and not (torch[n].cuda or torch[n].hip)
    ]
    if not plain:
        return
    yield TEXTS["torch-without-cuda"].finding(
        plain,
        level=Level.FAILURE if len(plain) < len(with_gpus) else Level.WARNING,
        torch=torch[plain[0]],
    )


def _cuda(seen: NodePart) -> str:
    torch = seen.node.facts.torch if seen.node.facts else None
    return (torch.cuda or "") if torch is not None and torch.is_known else ""


def _is_driver_too_old(seen: NodePart) -> bool:
    needed = _FIRST_DRIVER.get(_numbers(_cuda(seen))[0])
    return bool(seen.facts.driver) and needed is not None and _numbers(seen.facts.driver) < needed


def _of_driver(seen: NodePart) -> dict[str, Any]:
    cuda = _cuda(seen)
    major, minor = _FIRST_DRIVER[_numbers(cuda)[0]]
    fit = [k for k, first in _FIRST_DRIVER.items() if _numbers(seen.facts.driver) >= first]
    fits = max(fit, default=min(_FIRST_DRIVER))
    needed = f"{major}.{minor}"
    return {"cuda": cuda, "major": cuda.partition(".")[0], "needed": needed, "fits": fits}


def _is_emulated(seen: NodePart) -> bool:
    system = seen.node.facts.system if seen.node.facts else None
    return system is not None and seen.facts.is_known and seen.facts.machine != system.machine


def minor_of(version: str | None) -> str | None:
    """Return `2.13` for `2.13.0+cpu`; None for an invalid version."""
    found = re.match(r"\d+\.\d+", version or "")
    return found.group() if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", version)[:2]) or (0,)


VERSION_RULES: Sequence[Rule] = (
    missing_torch,
    _VERSIONS_DIFFER,
    Equal(
        TEXTS["torch-builds"],
        when=lambda situation: not _torches_do_not_fit(situation),
        value=_VERSIONS_DIFFER.value,
    ),
    Equal(TEXTS["nccl-versions"], value=lambda s: s.facts.nccl if s.facts.is_known else None),
    Equal(
        TEXTS["python-versions"],
        value=lambda s: minor_of(s.facts.python) if s.facts.is_known else None,
    ),
    Equal(TEXTS["processors"], value=lambda s: s.facts.machine),
    Check(TEXTS["emulated"], bad=_is_emulated, each=True),
    _cpu_only,
    Check(TEXTS["driver-too-old"], bad=_is_driver_too_old, each=True, words=_of_driver),
    # Different drivers are the first suspect when one node behaves differently.
    Equal(TEXTS["drivers-differ"], value=lambda s: s.facts.driver or None),
)


# Variables that may differ between nodes.
_OWN = {
    *INTERFACE_VARIABLES,
    "CUDA_VISIBLE_DEVICES",
    "NCCL_IB_HCA",
    "NCCL_DEBUG_FILE",
    "NCCL_TOPO_FILE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "OMP_NUM_THREADS",
}
_LITTLE_S = 600.0


def grammars(situation: Situation) -> Iterator[Finding]:
    """Report invalid values: the program that reads them ignores them, mostly without a message."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for one in look(situation, "environment"):
        for name, value in one.facts.variables.items():
            problem = problem_of(name, value)
            if problem is not None:
                seen.setdefault((name, value, problem), []).append(one.node.name)
    for (name, value, problem), nodes in seen.items():
        yield TEXTS["bad-value"].finding(nodes, name=name, value=value, problem=problem)


def misspelled_variables(situation: Situation) -> Iterator[Finding]:
    """Note variables that no program reads and that resemble a known one."""
    seen: dict[tuple[str, str], list[str]] = {}
    for one in look(situation, "environment"):
        for name in one.facts.variables:
            likely = meant(name)
            if likely is not None:
                seen.setdefault((name, likely), []).append(one.node.name)
    for (name, likely), nodes in seen.items():
        yield TEXTS["misspelled-variable"].finding(nodes, name=name, likely=likely)


def interfaces(situation: Situation) -> Iterator[Finding]:
    """Report variables that name no interface of their node, in the long form.

    Before a start, the network survey reports them.
    """
    if not situation.is_long:
        return
    for seen in look(situation, "environment"):
        node, environment = seen.node, seen.facts
        network = node.facts.network if node.facts else None
        if network is None or not network.links:
            continue
        for name in INTERFACE_VARIABLES:
            value = environment.variables.get(name)
            if (
                value
                and problem_of(name, value) is None
                and not matches(name, value, network.links)
            ):
                there = ", ".join(link for link in network.links if link != "lo")
                yield TEXTS["no-such-interface"].finding(
                    [node.name],
                    level=Level.FAILURE if situation.has_machines else Level.WARNING,
                    name=name,
                    value=value,
                    there=there,
                )


def missing(situation: Situation) -> Iterator[Finding]:
    """Report variables that differ between nodes or exist on some only."""
    rows = {seen.node.name: seen.facts.variables for seen in look(situation, "environment")}
    names = {name for variables in rows.values() for name in variables if name not in _OWN}
    for name in sorted(names):
        values = {node: variables.get(name, "") for node, variables in rows.items()}
        found = differ(values, "", lambda v: f"`{v}`" if v else "none")
        if found is not None:
            yield TEXTS["environment-differs"].finding(found.odd, name=name, text=found.text)


def _time_is_short(seen: NodePart) -> bool:
    left_s, total_s = seen.facts.left_s, seen.facts.total_s
    # A job that was requested for a few minutes has little time left from its start.
    is_used_up = total_s is None or (left_s or 0.0) < total_s / 2
    return left_s is not None and left_s < _LITTLE_S and is_used_up


def _time(seen: NodePart) -> dict[str, Any]:
    total_s = seen.facts.total_s
    of = f" of {total_s:.0f} s" if total_s is not None else ""
    return {"left_s": max(seen.facts.left_s, 0.0), "of": of}


def _is_head(seen: NodePart) -> bool:
    return look(seen.situation, "environment")[0].node is seen.node


def _nodefile(seen: NodePart) -> dict[str, Any]:
    lines, hosts = seen.facts.nodefile or (0, 0)
    return {"lines": lines, "hosts": hosts, "used": len(seen.situation.nodes)}


def _tasks(seen: NodePart) -> dict[str, Any]:
    words = [seen.facts.scheduler.get(name, "") for name in ("SLURM_NTASKS", "SLURM_NNODES")]
    tasks, num_nodes = (int(word) if word.isdecimal() else 0 for word in words)
    return {"tasks": tasks, "num_nodes": num_nodes}


def _starts_several(seen: NodePart) -> bool:
    found = _tasks(seen)
    return _is_head(seen) and 0 < found["num_nodes"] < found["tasks"]


def _is_exempt(host: str, no_proxy: str) -> bool:
    """Return whether `no_proxy` exempts a host from the proxy.

    Source: curl(1), "NO_PROXY": names and their endings, networks; Python's urllib.request and
    requests read it alike.
    """
    return any(_matches_entry(host, entry.strip().lower()) for entry in no_proxy.split(","))


def _matches_entry(host: str, entry: str) -> bool:
    name = re.sub(r":\d+$", "", entry).removeprefix("*").lstrip(".")
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False)
    except ValueError:
        ends = bool(name) and (host == name or host.endswith(f".{name}"))
        return entry == "*" or ends


def _hosts_behind_proxy(seen: NodePart) -> list[str]:
    """Return the hosts that this node would reach by a proxy: its own services, and other nodes."""
    proxies = seen.facts.proxies
    if not set(proxies) - {"no_proxy"}:
        return []
    exempt = proxies.get("no_proxy", "")
    caught = [] if _is_exempt("localhost", exempt) else ["localhost"]
    for node in seen.situation.known if seen.situation.has_machines else ():
        network = node.facts.network if node.facts else None
        addresses = (
            [i.address for i in network.interfaces if i.name == node.interface] if network else []
        )
        names = [network.own_name.lower(), *addresses] if network else []
        if names and not any(_is_exempt(name, exempt) for name in names):
            caught.append(names[-1])
    return caught


def _proxy(seen: NodePart) -> dict[str, Any]:
    caught = _hosts_behind_proxy(seen)
    exempt = seen.facts.proxies.get("no_proxy")
    return {
        "caught": names_of(caught),
        "why": f"no_proxy is {exempt[:80]}" if exempt else "no_proxy is not set",
        "fix": ",".join(
            dict.fromkeys(
                [exempt] * bool(exempt and len(exempt) <= 80) + ["localhost", "127.0.0.1", *caught]
            )
        ),
    }


RULES: Sequence[Rule] = (
    grammars,
    misspelled_variables,
    interfaces,
    missing,
    # Variables of another launcher that were exported in a shell.
    Check(
        TEXTS["leftover-variables"],
        when=LONG,
        bad=lambda s: bool({"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(s.facts.variables)),
    ),
    Check(
        TEXTS["slow-by-variable"],
        bad=lambda s: s.facts.variables.get("CUDA_LAUNCH_BLOCKING") == "1",
    ),
    # The scheduler's allocation compared with what is started, as the head sees it.
    Check(TEXTS["time-limit"], bad=lambda s: _is_head(s) and _time_is_short(s), words=_time),
    Check(
        TEXTS["nodes-unused"],
        bad=lambda s: _is_head(s) and (s.facts.nodefile or (0, 0))[1] > len(s.situation.nodes),
        words=_nodefile,
    ),
    Check(
        TEXTS["nodefile-lines"],
        when=LONG,
        bad=lambda s: (
            _is_head(s) and s.facts.nodefile and s.facts.nodefile[0] > s.facts.nodefile[1]
        ),
        words=_nodefile,
    ),
    # The script of such a job puts `srun` in front of a launcher.
    Check(TEXTS["several-tasks-a-node"], when=LONG, bad=_starts_several, words=_tasks),
    Check(TEXTS["proxy"], when=LONG, bad=lambda s: bool(_hosts_behind_proxy(s)), words=_proxy),
)
