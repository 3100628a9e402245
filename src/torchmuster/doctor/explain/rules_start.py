"""Something was missing on a node before any training: a command, a script, a package, a processor."""

from collections.abc import Iterator

from torchmuster.doctor.explain.case import Case, short
from torchmuster.doctor.explain.events import Event, Finding
from torchmuster.doctor.explain.weigh import HIGH, Weight, at

_START = {
    "not_executable": ("wrong-processor", "a program was built for another processor than this node has", HIGH, "make the environment on a node of the kind that runs it: login and compute nodes may differ (x86_64, aarch64)", "uname -m; file $(readlink -f $(which python))"),
    "no_script": ("script-missing", "the script is not there on this node", HIGH, "put it on a file system that all nodes see, or give its absolute path", "ls -l SCRIPT   on every node"),
    "module_load": ("module-load", "a module of the cluster could not be loaded", HIGH, "`module spider NAME` lists what there is; the line belongs into setup of muster.toml", "module spider NAME"),
    "no_command": ("command-missing", "a command or interpreter was not found on this node", HIGH, "activate the environment on every node: PATH of the login shell does not travel", "which torchrun python   on every node"),
    "no_module_main": ("package-missing", "a Python package is missing in the environment of this node", HIGH, "install it there, or activate the environment that has it, on every node", "python -c 'import NAME'   on every node"),
    "bad_arguments": ("bad-arguments", "the command line was refused", HIGH, "mend the argument that the line names", None),
    "image": ("image-missing", "the container image could not be fetched", HIGH, "check the image's name and the credentials of the node", None),
    "srun_launch": ("srun-launch", "Slurm could not start the step", HIGH, "read Slurm's own words below; --overlap is needed for a second step on the same nodes", None),
    "env_missing": ("no-launcher", "the script was started without a launcher: the variables of torch.distributed are not set", HIGH, "start it with `muster run` or torchrun; under srun, `torchmuster.train` finds its rank by itself", None),
}  # fmt: skip


def could_not_start(case: Case) -> Iterator[Finding]:
    """Something was missing on a node before any training."""
    for kind, (cause, sentence, confidence, cure, confirm) in _START.items():
        found = [event for event in case.of(kind) if not _is_probe(event)]
        if not found:
            continue
        event = case.earliest(found)
        named = next(
            (
                event.get(n)
                for n in ("path", "command", "module", "name", "variable", "why")
                if event.get(n)
            ),
            "",
        )
        hosts = sorted({short(e.who.host) for e in found if e.who.host})
        because = (f"the same on {', '.join(hosts)}",) if len(hosts) > 1 else ()
        yield Finding(
            cause=cause,
            sentence=f"{sentence}{f': {named}' if named else ''}",
            confidence=confidence,
            weight=Weight.START,
            evidence=tuple(e.line for e in found[:3]),
            at=at(event),
            because=because,
            ruled_out=_victims_of_start(case),
            cure=cure,
            confirm=confirm,
            began=event.line,
        )


def _is_probe(event: Event) -> bool:
    """Say whether a script only looked for something: `which nvidia-smi`, `ls`, deactivate."""
    command = event.get("command").rpartition("/")[2]
    return command in (
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
    )


def _victims_of_start(case: Case) -> tuple[str, ...]:
    if case.of("rdzv_timeout", "store_wait", "store_clients", "rdzv_connection"):
        return ("the network: the other nodes only waited for this one",)
    return ()
