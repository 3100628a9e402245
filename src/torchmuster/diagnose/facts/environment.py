"""The variables that a user, a site and a scheduler have set on a node, and the plugins that NCCL would find there."""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchmuster.model import contract

PREFIXES = ("NCCL_", "GLOO_", "FI_", "TORCH_", "OMP_", "PYTORCH_", "TP_", "RCCL_", "HSA_", "UCX_")
_ALSO = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "NODE_RANK",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
)
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|_KEY$", re.IGNORECASE)
# What the head has asked a scheduler whose jobs have no such variable, seconds since 1970.
ALLOCATION_ENDS_AT = "MUSTER_ALLOCATION_ENDS_AT"
_SCHEDULER = (
    contract.MACHINE_VARIABLE,  # of a pod
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_NNODES",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_CPUS_ON_NODE",
    "SLURM_GPUS_ON_NODE",
    "SLURM_JOB_END_TIME",
    "SLURM_JOB_START_TIME",
    "PBS_JOBID",
    "PBS_NODEFILE",
)
_MAX_VALUE = 200
_MAX_NO_PROXY = 4000  # a list of hosts
_MAX_VARIABLES = 128
_PLUGIN = re.compile(r"libnccl-(net|tuner)(-[\w-]+)?\.so(\.\d+)*$")
_LIBRARY_FOLDERS = (
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
)
_MAX_FOLDERS = 64
_MAX_NODEFILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFacts:
    """Variables, and facts that depend on them.

    Attributes:
        variables: Those that torch, NCCL, Gloo and libfabric read; values cut to 200 characters.
        scheduler: The scheduler's own.
        nodefile: Lines and different hosts in PBS's list of nodes; empty without one.
        left_s: Seconds to the end of the job's time limit; None if unknown.
        total_s: The whole time limit in seconds; None if unknown.
        plugins: Files of network plugins that NCCL would load.
        verbs: Whether libibverbs, which NCCL needs for InfiniBand, is found.
        umask: Of the process.
    """

    variables: dict[str, str] = field(default_factory=dict)
    proxies: dict[str, str] = field(default_factory=dict)
    scheduler: dict[str, str] = field(default_factory=dict)
    nodefile: tuple[int, ...] = ()
    left_s: float | None = None
    total_s: float | None = None
    plugins: tuple[str, ...] = ()
    verbs: bool = False


def collect_environment(
    environment: Mapping[str, str], now: float | None = None
) -> EnvironmentFacts:
    """Return the job's environment on this node, without secrets."""
    chosen = {
        name: value[:_MAX_VALUE]
        for name, value in sorted(environment.items())
        if (name.startswith(PREFIXES) or name in _ALSO) and not _SECRET.search(name)
    }
    scheduler = {n: environment[n][:_MAX_VALUE] for n in _SCHEDULER if n in environment}
    plugins, verbs = _libraries(environment)
    return EnvironmentFacts(
        variables=dict(list(chosen.items())[:_MAX_VARIABLES]),
        proxies=_proxies(environment),
        scheduler=scheduler,
        nodefile=_nodefile(environment),
        left_s=_left(environment, time.time() if now is None else now),
        total_s=_total(environment),
        plugins=plugins,
        verbs=verbs,
    )


def _proxies(environment: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name in _PROXIES:
        value = environment.get(name) or environment.get(name.upper())
        if value:  # a proxy's address may have a password in it
            most = _MAX_NO_PROXY if name == "no_proxy" else _MAX_VALUE
            found[name] = re.sub(r"//[^@/]*@", "//", value)[:most]
    return found


def _nodefile(environment: Mapping[str, str]) -> tuple[int, ...]:
    path = environment.get("PBS_NODEFILE")
    if not path:
        return ()
    try:
        with open(path, errors="replace") as file:
            lines = [line.strip() for line in file.read(_MAX_NODEFILE_BYTES).splitlines()]
    except OSError:  # only the first node has it
        return ()
    names = [line for line in lines if line]
    return len(names), len(set(names))


def _left(environment: Mapping[str, str], now: float) -> float | None:
    for name in ("SLURM_JOB_END_TIME", ALLOCATION_ENDS_AT):
        end = environment.get(name, "")
        if re.fullmatch(r"\d{1,12}", end) and int(end):
            return round(float(end) - now, 1)
    return None


def _total(environment: Mapping[str, str]) -> float | None:
    """Return the length of a job, of which Slurm reports the start."""
    words = [environment.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END")]
    if all(re.fullmatch(r"\d{1,12}", word) for word in words) and int(words[1]):
        return float(int(words[1]) - int(words[0]))
    return None


def _libraries(environment: Mapping[str, str]) -> tuple[tuple[str, ...], bool]:
    """Return NCCL's plugins on the loader's path, and whether libibverbs is there."""
    folders = [f for f in environment.get("LD_LIBRARY_PATH", "").split(":") if f]
    plugins, verbs = [], False
    for folder in [*folders[:_MAX_FOLDERS], *_LIBRARY_FOLDERS]:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        plugins += [os.path.join(folder, name) for name in sorted(names) if _PLUGIN.match(name)]
        verbs = verbs or any(name.startswith("libibverbs.so") for name in names)
    return tuple(plugins[:_MAX_FOLDERS]), verbs
