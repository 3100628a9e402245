"""Something was missing on a node before any training: a command, a script, a package, a processor."""

from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.diagnose.explain.case import Case, short
from torchmuster.diagnose.explain.events import LogEvent, LogFinding
from torchmuster.diagnose.explain.weigh import HIGH, LOW, Weight, at, is_notice, was_survived


@dataclass(frozen=True, slots=True, kw_only=True)
class _Missing:
    cause: str
    error: str
    hint: str
    confirm: str | None = None


_MISSING = {
    "not_executable": _Missing(
        cause="wrong-processor",
        error="a program was built for another processor than this node has",
        hint="make the environment on a node of the kind that runs it: login and compute nodes may differ (x86_64, aarch64)",
        confirm="uname -m; file $(readlink -f $(which python))",
    ),
    "library": _Missing(
        cause="wrong-library",
        error="a shared library is missing on this node, or of another version than the program needs",
        hint="make the environment on a node of the same kind and system; load the modules that it was built with",
        confirm="ldd $(which python) | grep 'not found'   on that node",
    ),
    "no_script": _Missing(
        cause="script-missing",
        error="the script is not there on this node",
        hint="put it on a file system that all nodes see, or give its absolute path",
        confirm="ls -l SCRIPT   on every node",
    ),
    "module_load": _Missing(
        cause="module-load",
        error="a module of the cluster could not be loaded",
        hint="`module spider NAME` lists what there is; the line belongs into setup of muster.toml",
        confirm="module spider NAME",
    ),
    "not_permitted": _Missing(
        cause="permission",
        error="a program, its interpreter or the script may not be read or run by this user",
        hint="open its folders for the user of the job (`chmod a+rx`), or make the environment where all may enter",
        confirm="namei -l PATH   as that user, on that node",
    ),
    "no_command": _Missing(
        cause="command-missing",
        error="a command or interpreter was not found on this node",
        hint="activate the environment on every node: PATH of the login shell does not travel",
        confirm="which torchrun python   on every node",
    ),
    "no_module_main": _Missing(
        cause="package-missing",
        error="a Python package is missing in the environment of this node",
        hint="install it there, or activate the environment that has it, on every node",
        confirm="python -c 'import NAME'   on every node",
    ),
    "bad_arguments": _Missing(
        cause="bad-arguments",
        error="the command line was refused",
        hint="mend the argument that the line names",
    ),
    "pbsdsh_usage": _Missing(
        cause="bad-arguments",
        error="pbsdsh took an option of the program for its own, and started nothing",
        hint="write `--` before the program: pbsdsh -- /full/path/PROGRAM --option; or `muster torchrun`, which needs no pbsdsh",
    ),
    "pbs_mpiexec": _Missing(
        cause="launch-failed",
        error="OpenPBS's own mpiexec only calls that of another MPI, and there was none on PATH at qsub",
        hint="write `muster torchrun`, which needs no mpiexec; or load an MPI before qsub",
    ),
    "image": _Missing(
        cause="image-missing",
        error="the container image could not be fetched",
        hint="check the image's name and the credentials of the node",
    ),
    "srun_launch": _Missing(
        cause="srun-launch",
        error="Slurm could not start the step",
        hint="read Slurm's own words below; --overlap is needed for a second step on the same nodes",
    ),
    "launch_failed": _Missing(
        cause="launch-failed",
        error="a node could not be reached or started",
        hint="start `hostname` on all nodes in the same way first; report a node that fails",
        confirm="mpiexec -n NODES --ppn 1 hostname   (Slurm: srun hostname)",
    ),
    "env_missing": _Missing(
        cause="no-launcher",
        error="the script was started without a launcher: the variables of torch.distributed are not set",
        hint="start it with `muster run` or torchrun; under srun, `torchmuster.train` finds its rank by itself",
    ),
}
_PROBES = frozenset(
    [
        "nvidia-smi",
        "deactivate",
        "ls",
        "rm",
        "cat",
        "which",
        "rocm-smi",
        "mkdir",
        "cp",
        "tput",
        "nvcc",
        "module",
        "git",
        "lspci",
        "ibstat",
    ]
)
_NAMES = (
    "path",
    "command",
    "other",
    "module",
    "name",
    "variable",
    "library",
    "symbol",
    "version",
    "host",
    "why",
)


def could_not_start(case: Case) -> Iterator[LogFinding]:
    """Something was missing on a node before any training."""
    for kind, missing in _MISSING.items():
        found = [e for e in case.of(kind) if not _is_probe(e) and not is_notice(e)]
        if not found:
            continue
        event = case.earliest(found)
        named = next((event.get(name) for name in _NAMES if event.get(name)), "")
        hosts = sorted({short(e.who.host) for e in found if e.who.host})
        passed = all(was_survived(case, e) for e in found)
        yield LogFinding(
            cause=missing.cause,
            error=f"{missing.error}{f': {named}' if named else ''}",
            confidence=LOW if passed else HIGH,
            weight=Weight.ENVELOPE - 2 if passed else Weight.START,
            evidence=tuple(e.line for e in found[:3]),
            at=at(event),
            because=(f"the same on {', '.join(hosts)}",) if len(hosts) > 1 else (),
            ruled_out=_victims(case),
            hint=missing.hint,
            confirm=missing.confirm,
            began=event.line,
        )


def _is_probe(event: LogEvent) -> bool:
    """Say whether a script only looked for something: `which nvidia-smi`, `ls`, deactivate."""
    command = (event.get("command") or event.get("other")).rpartition("/")[2]
    return command in _PROBES


def _victims(case: Case) -> tuple[str, ...]:
    if case.of("rdzv_timeout", "store_wait", "store_clients", "rdzv_connection"):
        return ("the network: the other nodes only waited for this one",)
    return ()
