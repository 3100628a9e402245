"""Collects the facts about a node before its workers start, as plain values.

Each part is collected in a thread of its own with a time limit: a file system that hangs, or a name server that
does not answer, affects its own part only. For a missing part the reason is given.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmuster import proc
from torchmuster.diagnose.facts.environment import EnvironmentFacts, collect_environment
from torchmuster.diagnose.facts.files import FileFacts, collect_files
from torchmuster.diagnose.facts.gpu import Ask, GpuFacts, collect_gpus
from torchmuster.diagnose.facts.network import InterfaceFacts, collect_network
from torchmuster.diagnose.facts.system import SystemFacts, collect_system

SHORT_S, LONG_S = 1.0, 3.5
NAMES_SHORT_S, NAMES_LONG_S = 0.8, 3.0
NVIDIA_SMI_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """The versions that the job's interpreter would import, found without importing them.

    Attributes:
        torch: Version, as `2.13.0+cu126`; None when there is none.
        cuda: The CUDA that torch was built for; None for a build without. `hip` for AMD's.
        nccl: Version of the wheel with NCCL, if there is one.
        is_known: Whether the versions were looked up; not for a program without Python.
    """

    python: str = ""
    executable: str = ""
    machine: str = ""
    torch: str | None = None
    cuda: str | None = None
    hip: str | None = None
    nccl: str | None = None
    is_known: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedFacts:
    """The facts about a node; a part is None if it is missing, and `unknown` says why."""

    torch: TorchFacts | None = None
    system: SystemFacts | None = None
    network: InterfaceFacts | None = None
    files: FileFacts | None = None
    gpu: GpuFacts | None = None
    environment: EnvironmentFacts | None = None
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsOrder:
    """What to collect.

    Attributes:
        names: Other nodes' names, to be resolved here; the long form only.
        once_written: A file of the run's folder that never changes.
        folders: Other folders of the run, by role.
    """

    is_long: bool
    environment: Mapping[str, str]
    names: Sequence[str] = ()
    run_dir: str | None = None
    once_written: str | None = None
    script: str | None = None
    folders: Sequence[tuple[str, str]] = ()


def collect(order: FactsOrder, ask: Ask | None = None) -> CollectedFacts:
    """Return the facts about this node that can be collected within 1 s, or 3.5 s in the long form."""
    names = order.names if order.is_long else ()
    names_s = NAMES_LONG_S if order.is_long else NAMES_SHORT_S
    asking = ask or ask_beside
    parts: dict[str, Callable[[], Any]] = {
        "system": lambda: collect_system(is_long=order.is_long),
        "network": lambda: collect_network(names, names_s),
        "files": lambda: collect_files(
            order.run_dir, order.once_written, order.script, order.environment, order.folders
        ),
        "gpu": lambda: collect_gpus(order.environment, asking, NVIDIA_SMI_S, is_long=order.is_long),
        "environment": lambda: collect_environment(order.environment),
    }
    found, unknown = run_probes(parts, LONG_S if order.is_long else SHORT_S)
    return CollectedFacts(unknown=unknown, **found)


def run_probes(
    parts: Mapping[str, Callable[[], Any]], limit_s: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run all in parallel; return their results, and the reasons for missing ones."""
    found: dict[str, Any] = {}
    unknown: dict[str, str] = {}

    def run(name: str, probe: Callable[[], Any]) -> None:
        try:
            found[name] = probe()
        except Exception as error:  # noqa: BLE001 - a probe that breaks must not cost the others
            unknown[name] = f"{type(error).__name__}: {error}"[:200]

    threads = [
        threading.Thread(target=run, args=(name, probe), name=f"facts-{name}", daemon=True)
        for name, probe in parts.items()
    ]
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    found_now, unknown_now = dict(found), dict(unknown)
    for name in parts:
        if name not in found_now and name not in unknown_now:
            unknown_now[name] = f"no answer within {limit_s:g} s"
    return found_now, unknown_now


def ask_beside(argv: Sequence[str], limit_s: float) -> proc.Answered:
    """Run a program on this node, protected from what ends this process's children."""
    return proc.ask_beside(argv, limit_s)


def own_torch() -> TorchFacts:
    """Return the versions that this interpreter would import."""
    from torchmuster.model.installed import look_for_torch

    return torch_facts(look_for_torch())


def torch_facts(found: Mapping[str, Any]) -> TorchFacts:
    """Return facts from what a spawner reports before it imports torch, without values that are not text."""

    def text(name: str) -> str | None:
        value = found.get(name)
        return value[:100] if isinstance(value, str) else None

    return TorchFacts(
        python=text("python") or sys.version.split()[0],
        executable=text("executable") or "",
        machine=text("machine") or os.uname().machine,
        torch=text("torch"),
        cuda=text("cuda"),
        hip=text("hip"),
        nccl=text("nccl"),
        is_known=bool(found.get("is_known")),
    )
