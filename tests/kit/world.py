"""The world that tests and benchmarks bring along, in place of that of the machine and the shell that they run on.

A developer's machine may have a scheduler, an MPI, settings of muster and hosts in ~/.ssh; his shell may stand in a job.
None of it is part of any claim. What belongs to the machine itself (Python, git, ip, bash) stays.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

# What this process was started with: for the labs, which start a real scheduler and must not do so beside another.
MACHINE: Mapping[str, str] = dict(os.environ)
MACHINE_PATH = MACHINE.get("PATH", os.defpath)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Commands by which muster finds a scheduler, a launcher, or another machine.
HIDDEN = _words("""
    sbatch srun salloc squeue sinfo sacct sacctmgr scancel scontrol sattach sbcast sprio sstat strigger
    qsub qstat qdel qrls qhold qsig qrerun qalter qmgr pbsdsh pbs_tmrsh pbsnodes pbs_attach tracejob
    mpiexec mpiexec.hydra mpiexec.mpich mpiexec.openmpi mpirun mpirun.mpich mpirun.openmpi
    orterun prterun prun palsrun aprun
    bsub bjobs flux jsrun
    kubectl ssh sftp scp
    module modulecmd
""")
_FAMILIES = tuple(
    _words("""
    SLURM SBATCH_ SRUN_ SALLOC_ SQUEUE_ SINFO_
    PBS_ PALS_ COBALT_ LSB_ FLUX_
    OMPI_ PMI_ PMIX_ PRTE_ MPI_ MPIR_ HYDRA_ I_MPI_ MV2_
    MUSTER_ PET_ TORCHMUSTER_ TORCHELASTIC_ TORCH_ NCCL_ GLOO_ CUDA_VISIBLE ROLE_ GROUP_
    XDG_ SSH_ KUBE OMP_ MKL_ LOADEDMODULES MODULE LMOD_ BASH_FUNC_
""")
)
_NAMES = _words("""
    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT MPIRUN_RANK
    BASH_ENV ENV PROMPT_COMMAND COLUMNS LINES NO_COLOR FORCE_COLOR CLICOLOR CLICOLOR_FORCE
    PYTHONUNBUFFERED PYTHONHASHSEED PYTHONSTARTUP PYTHONWARNINGS PYTHONINSPECT PYTHONBREAKPOINT
""")
# By these a person asks the tests themselves for more: `make chaos`, `make lab`.
_ASKED = _words("""
    MUSTER_LAB MUSTER_CHAOS MUSTER_CHAOS_SEED
    MUSTER_SEEDS MUSTER_TRAIN_SEEDS MUSTER_REPLAYS MUSTER_PREEMPTIONS MUSTER_AGREEMENTS
""")


def own_environment(machine: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return an environment of its own, with `home` (an empty folder, kept as long) for files and commands."""
    kept = {name: value for name, value in machine.items() if not _is_foreign(name)}
    user = home / "user"
    user.mkdir(exist_ok=True)
    return {
        **kept,
        "HOME": str(user),
        # Tests start runs on this machine, also where they stand on a login node.
        "MUSTER_ON": "local",
        "PATH": own_path(machine.get("PATH", os.defpath), home / "commands"),
    }


def _is_foreign(name: str) -> bool:
    return (name.startswith(_FAMILIES) or name in _NAMES) and name not in _ASKED


def own_path(path: str, folder: Path) -> str:
    """Return `path` without the hidden commands; a folder that holds one has a stand-in below `folder`."""
    parts = []
    for number, part in enumerate(dict.fromkeys(path.split(os.pathsep))):
        names = _names_in(part)
        if HIDDEN.isdisjoint(names):
            parts.append(part)
        else:
            parts.append(_stand_in(Path(part), names, folder / str(number)))
    return os.pathsep.join(parts)


def _names_in(part: str) -> list[str]:
    try:
        return os.listdir(part or os.curdir)
    except OSError:
        return []


def _stand_in(real: Path, names: list[str], folder: Path) -> str:
    folder.mkdir(parents=True)
    for name in names:
        if name in HIDDEN:
            continue
        if (
            real.parent / "pyvenv.cfg"
        ).exists():  # a link would lead its Python out of the environment
            (folder / name).write_text(f'#!/bin/sh\nexec "{real / name}" "$@"\n')
            (folder / name).chmod(0o755)
        else:
            (folder / name).symlink_to(real / name)
    return str(folder)


def make_home() -> Path:
    """Make the folder of a world; who makes it removes it with `remove_home`.

    Not in /tmp, and open to all: tasks have a /tmp of their own, and tests of views run as another user.
    """
    folder = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
    home = Path(tempfile.mkdtemp(prefix="muster-test-home-", dir=folder))
    home.chmod(0o755)
    return home


def remove_home(home: Path) -> None:
    """Remove the folder of a world."""
    shutil.rmtree(home, ignore_errors=True)


def enter(home: Path) -> None:
    """Make this process, and what it starts, live in a world of its own."""
    new = own_environment(MACHINE, home)
    for name in set(os.environ) - set(new):
        del os.environ[name]
    os.environ.update(new)
    # `nohup make test` and a shell's background jobs have these ignored, which every child would inherit.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
