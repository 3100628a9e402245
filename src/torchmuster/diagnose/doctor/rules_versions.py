"""Python, torch, CUDA, NCCL, driver and processor: equal on all nodes, and compatible."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torchmuster.diagnose.doctor.checks import Check, Equal, NodePart, look
from torchmuster.diagnose.doctor.show import Rule, Situation, names_of
from torchmuster.diagnose.facts.collect import TorchFacts
from torchmuster.diagnose.finding import Finding, Level

# Source: CUDA Compatibility guide, "Minor Version Compatibility": the first driver of each major version.
_FIRST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
_ONE_ENVIRONMENT = "use one environment on all nodes"


def _torch(situation: Situation) -> dict[str, TorchFacts]:
    return {s.node.name: s.facts for s in look(situation, "torch") if s.facts.is_known}


def missing_torch(situation: Situation) -> Iterator[Finding]:
    """Some nodes have torch and others don't: their workers can't start."""
    torch = _torch(situation)
    without = [name for name, t in torch.items() if t.torch is None]
    if not without or len(without) == len(torch):
        return
    yield Finding(
        level=Level.FAILURE,
        cause="package-missing",
        error=f"torch is not installed on {names_of(without)}, but on the other nodes it is",
        at=names_of(without),
        because=(f"looked for by {torch[without[0]].executable or 'the interpreter of the job'}",),
        hint="use one environment that all nodes see, or `--python PATH` for one that is everywhere",
        is_certain=True,
        weight=90,
    )


def _torches_do_not_fit(situation: Situation) -> bool:
    minors = [minor_of(t.torch) for t in _torch(situation).values()]
    return len({minor for minor in minors if minor is not None}) > 1


_VERSIONS_DIFFER = Equal(
    of="torch",
    cause="torch-versions-differ",
    level=Level.FAILURE,
    when=_torches_do_not_fit,
    value=lambda s: s.facts.torch if s.facts.is_known else None,
    what="torch",
    error="the nodes have different versions of torch: {text}",
    because=("messages between ranks differ between versions: they hang or train incorrectly",),
    hint="use one environment on all nodes: a shared file system, one image, or one lock file",
    is_certain=True,
    weight=89,
)


def _cpu_only(situation: Situation) -> Iterator[Finding]:
    """A wheel without CUDA on a node with GPUs trains on the CPU without a message."""
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
    some = len(plain) < len(with_gpus)
    yield Finding(
        level=Level.FAILURE if some else Level.WARNING,
        cause="no-gpu",
        error=f"torch on {names_of(plain)} is built without CUDA, and the GPUs there can't be used",
        at=names_of(plain),
        because=(f"torch {torch[plain[0]].torch} on {torch[plain[0]].machine}",),
        hint="pip install torch --index-url https://download.pytorch.org/whl/cu126"
        " (on aarch64 the plain wheel may have no CUDA)",
        weight=65,
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


RULES: Sequence[Rule] = (
    missing_torch,
    _VERSIONS_DIFFER,
    Equal(
        of="torch",
        cause="torch-versions-differ",
        level=Level.WARNING,
        when=lambda situation: not _torches_do_not_fit(situation),
        value=_VERSIONS_DIFFER.value,
        what="torch",
        error="the nodes have different builds of torch: {text}",
        hint=_ONE_ENVIRONMENT,
        weight=50,
    ),
    Equal(
        of="torch",
        cause="nccl-versions-differ",
        level=Level.FAILURE,
        value=lambda s: s.facts.nccl if s.facts.is_known else None,
        what="NCCL",
        error="the nodes have different versions of NCCL: {text}",
        because=("NCCL refuses peers of another version, older ones hang",),
        hint=_ONE_ENVIRONMENT,
        weight=70,
    ),
    Equal(
        of="torch",
        cause="python-versions-differ",
        level=Level.WARNING,
        value=lambda s: minor_of(s.facts.python) if s.facts.is_known else None,
        what="Python",
        error="the nodes have different versions of Python: {text}",
        because=(
            "objects that ranks exchange are pickles, which may not be read by another version",
        ),
        hint=_ONE_ENVIRONMENT,
        weight=40,
    ),
    Equal(
        of="system",
        cause="wrong-processor",
        level=Level.WARNING,
        value=lambda s: s.facts.machine,
        what="processor",
        error="the nodes have different processors: {text}",
        because=("an interpreter or wheel of one can't run on the other (`Exec format error`)",),
        hint="choose nodes of one kind, or an environment for each",
        weight=60,
    ),
    Check(
        of="torch",
        cause="wrong-processor",
        level=Level.WARNING,
        bad=_is_emulated,
        each=True,
        error="the interpreter on {nodes} is built for {facts.machine}, the node is {node.facts.system.machine}",
        because=("it runs in emulation, many times slower",),
        hint="make the environment on a node of this kind",
    ),
    _cpu_only,
    Check(
        of="gpu",
        cause="driver-too-old",
        level=Level.FAILURE,
        bad=_is_driver_too_old,
        each=True,
        error="torch on {nodes} is built for CUDA {cuda}, which the driver {facts.driver} can't run",
        words=_of_driver,
        because=("CUDA {major} needs driver {needed} or newer",),
        hint="install torch for CUDA {fits}, or ask the site for a newer driver",
        weight=66,
    ),
    # Different drivers are the first suspect when one node behaves differently.
    Equal(
        of="gpu",
        cause="drivers-differ",
        level=Level.WARNING,
        value=lambda s: s.facts.driver or None,
        what="driver",
        error="the nodes have different GPU drivers: {text}",
        hint="report it to the site's staff; until then leave these nodes out",
    ),
)
