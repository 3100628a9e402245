"""Python, torch, CUDA, NCCL, driver and processor: the same everywhere, and fit for each other."""

import re
from collections.abc import Callable, Iterator, Sequence

from torchmuster.diagnose.doctor.situation import (
    Difference,
    Rule,
    Situation,
    differ,
    names_of,
)
from torchmuster.diagnose.facts.collect import TorchFacts
from torchmuster.diagnose.finding import Finding, Level

# Source: CUDA Compatibility guide, "Minor Version Compatibility": the first driver of each major version.
_FIRST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


def _torch(situation: Situation) -> dict[str, TorchFacts]:
    found = {n.name: n.facts.torch for n in situation.known if n.facts is not None}
    return {name: torch for name, torch in found.items() if torch is not None and torch.is_known}


def _differ(
    situation: Situation, what: str, of: Callable[[TorchFacts], str | None]
) -> Difference | None:
    values = {name: value for name, t in _torch(situation).items() if (value := of(t)) is not None}
    return differ(values, what)


def missing_torch(situation: Situation) -> Iterator[Finding]:
    """Some nodes have torch and others don't: their workers can't start."""
    torch = _torch(situation)
    without = [name for name, t in torch.items() if t.torch is None]
    if not without or len(without) == len(torch):
        return
    yield Finding(
        level=Level.FAILURE,
        cause="package-missing",
        error=f"torch is not installed on {names_of(without)}, on the other nodes it is",
        at=names_of(without),
        because=(f"looked for by {torch[without[0]].executable or 'the interpreter of the job'}",),
        hint="use one environment that all nodes see, or `--python PATH` for one that is everywhere",
        is_certain=True,
        weight=90,
    )


def torch_versions(situation: Situation) -> Iterator[Finding]:
    """Nodes with different torch versions don't understand each other."""
    minor = _differ(situation, "torch", lambda t: minor_of(t.torch))
    whole = _differ(situation, "torch", lambda t: t.torch)
    if whole is None:
        return
    if minor is not None:
        yield Finding(
            level=Level.FAILURE,
            cause="torch-versions-differ",
            error=f"the nodes have different versions of torch: {whole.text}",
            at=names_of(whole.odd),
            because=(
                "what the ranks send each other changes with the version: they hang or train wrong",
            ),
            hint="use one environment on all nodes: a shared file system, one image, or one lock file",
            is_certain=True,
            weight=89,
        )
        return
    yield Finding(
        level=Level.WARNING,
        cause="torch-versions-differ",
        error=f"the nodes have different builds of torch: {whole.text}",
        at=names_of(whole.odd),
        hint="use one environment on all nodes",
        weight=50,
    )


def nccl_versions(situation: Situation) -> Iterator[Finding]:
    """NCCL refuses peers of another version."""
    found = _differ(situation, "NCCL", lambda t: t.nccl)
    if found is not None:
        yield Finding(
            level=Level.FAILURE,
            cause="nccl-versions-differ",
            error=f"the nodes have different versions of NCCL: {found.text}",
            at=names_of(found.odd),
            because=("NCCL refuses peers of another version, older ones hang",),
            hint="use one environment on all nodes",
            weight=70,
        )


def python_versions(situation: Situation) -> Iterator[Finding]:
    """Another Python pickles objects differently and has other packages."""
    found = _differ(situation, "Python", lambda t: minor_of(t.python) or None)
    if found is not None:
        yield Finding(
            level=Level.WARNING,
            cause="python-versions-differ",
            error=f"the nodes have different versions of Python: {found.text}",
            at=names_of(found.odd),
            because=(
                "objects that ranks exchange are pickles, which may not be read by another version",
            ),
            hint="use one environment on all nodes",
            weight=40,
        )


def processors(situation: Situation) -> Iterator[Finding]:
    """One environment does not serve two kinds of processors."""
    machines = {
        n.name: n.facts.system.machine for n in situation.known if n.facts and n.facts.system
    }
    found = differ(machines, "processor")
    if found is not None:
        yield Finding(
            level=Level.WARNING,
            cause="wrong-processor",
            error=f"the nodes have different processors: {found.text}",
            at=names_of(found.odd),
            because=(
                "an interpreter or wheel of one can't run on the other (`Exec format error`)",
            ),
            hint="choose nodes of one kind, or an environment for each",
            weight=60,
        )
    for node in situation.known:
        torch, system = (node.facts.torch, node.facts.system) if node.facts else (None, None)
        if torch and system and torch.is_known and torch.machine != system.machine:
            yield Finding(
                level=Level.WARNING,
                cause="wrong-processor",
                error=f"the interpreter on {node.name} is built for {torch.machine}, the node is {system.machine}",
                at=node.name,
                because=("it runs in emulation, many times slower",),
                hint="make the environment on a node of this kind",
            )


def cpu_only(situation: Situation) -> Iterator[Finding]:
    """A wheel without CUDA on a node with GPUs trains on the CPU, silently."""
    torch = _torch(situation)
    with_gpus = [
        n.name
        for n in situation.known
        if n.facts and n.facts.gpu and n.facts.gpu.visible and n.facts.gpu.num_devices
    ]
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


def driver_for_cuda(situation: Situation) -> Iterator[Finding]:
    """A build for a CUDA that the driver does not know can't start."""
    torch = _torch(situation)
    for node in situation.known:
        gpu = node.facts.gpu if node.facts else None
        cuda = torch[node.name].cuda if node.name in torch else None
        if gpu is None or not gpu.driver or not cuda:
            continue
        needed = _FIRST_DRIVER.get(_numbers(cuda)[0])
        if needed is None or _numbers(gpu.driver) >= needed:
            continue
        yield Finding(
            level=Level.FAILURE,
            cause="driver-too-old",
            error=f"torch on {node.name} is built for CUDA {cuda}, which the driver {gpu.driver} can't run",
            at=node.name,
            because=(
                f"CUDA {cuda.partition('.')[0]} needs driver {needed[0]}.{needed[1]} or newer",
            ),
            hint=f"install torch for CUDA {_cuda_of(gpu.driver)}, or ask the site for a newer driver",
            weight=66,
        )


def drivers(situation: Situation) -> Iterator[Finding]:
    """Different drivers are the first suspect when one node behaves differently."""
    values = {
        n.name: n.facts.gpu.driver
        for n in situation.known
        if n.facts and n.facts.gpu and n.facts.gpu.driver
    }
    found = differ(values, "driver")
    if found is not None:
        yield Finding(
            level=Level.WARNING,
            cause="drivers-differ",
            error=f"the nodes have different GPU drivers: {found.text}",
            at=names_of(found.odd),
            hint="tell the site's staff; until then leave these nodes out",
        )


def minor_of(version: str | None) -> str | None:
    """Return `2.13` of `2.13.0+cpu`; None of what is no version."""
    found = re.match(r"\d+\.\d+", version or "")
    return found.group() if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", version)[:2]) or (0,)


def _cuda_of(driver: str) -> int:
    fit = [major for major, first in _FIRST_DRIVER.items() if _numbers(driver) >= first]
    return max(fit, default=min(_FIRST_DRIVER))


RULES: Sequence[Rule] = (
    missing_torch,
    torch_versions,
    nccl_versions,
    python_versions,
    processors,
    cpu_only,
    driver_for_cuda,
    drivers,
)
