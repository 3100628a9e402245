"""The rows of lines that name their cause themselves: the scheduler's word, what a node lacked, NCCL, the GPU.

Each row: the kind of event, the cause, the sentence, what helps.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torchmuster.diagnose.explain.case import Case, short
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogFinding
from torchmuster.diagnose.explain.rules.rows import INSTALL_IN, LOW, MEDIUM, Row, Weight, found_by
from torchmuster.diagnose.explain.rules.shape import strength, wraps
from torchmuster.diagnose.explain.rules.system import SHM_IN, SMALL_SHM_HINT

# A program's own faults, and what the driver writes when it cleans up after any process that was killed.
_NOT_OF_PROGRAMS = r"Xid \([^)]*\): (?!(?:8|13|31|43|45)\b)\d"
_OF_BROKEN_GPUS = r"Xid \([^)]*\): (?:48|64|74|79|95|119|120|140)\b"


def _said(kind: str, cause: str, error: str, hint: str, **more: Any) -> Row:
    more = {"num_lines": 4, **more}
    return Row(evidence=(kind,), cause=cause, error=error, hint=hint, **more)


_ends = partial(_said, weight=Weight.SCHEDULER, num_lines=1)
_lacks = partial(_said, weight=Weight.START, num_lines=3)


SCHEDULER: tuple[Row, ...] = (
    _ends(
        "time_limit",
        "time-limit",
        "the scheduler ended the job: its time limit was reached",
        "ask for more time, or save and continue: `muster run --time 8h --resubmit 3`",
        hint_in={
            "slurm": "{pace}: ask for as much (#SBATCH --time), or save and continue: `muster run --time 8h --resubmit 3`",
            "lsf": "ask for more time (#BSUB -W), or save and continue from the last checkpoint",
            "sge": "ask for more time (-l h_rt), or save and continue from the last checkpoint",
            "pbs": "{pace}: ask for as much (-l walltime), or save and continue: `muster run --time 8h --resubmit 3`",
        },
        confirm="sacct -j JOB -o State,Elapsed,Timelimit   (PBS: qstat -xf JOB | grep walltime)",
    ),
    _ends(
        "preempted",
        "preempted",
        "the scheduler took the nodes back for another job",
        "save on SIGUSR1 or SIGTERM and let the job requeue: `muster run` does both",
    ),
    _ends(
        "node_failed",
        "node-failed",
        "the scheduler lost a node of the job",
        "exclude the node and start again; `muster run --nodes MIN:MAX` continues without it",
        at="{host}{node}",
    ),
    _ends(
        "evicted",
        "evicted",
        "the node ran short of a resource and the pod was evicted",
        "ask for the memory and storage that the pod really needs",
    ),
    _ends(
        "pbs_killed",
        "scheduler-ended",
        "PBS ended the job: {why}",
        "`tracejob JOB` on the server, or the site's staff, can say more",
    ),
    _ends(
        "cancelled",
        "cancelled",
        "the job was cancelled from outside",
        "ask who cancelled it: you, a colleague, or the site's staff",
        unless=("time_limit", "preempted", "node_failed"),
        confirm="sacct -j JOB -o State%30   (the number behind `CANCELLED by` is a user)",
        confidence=MEDIUM,
        weight=Weight.SIGNAL,
    ),
)

_MISSING: tuple[Row, ...] = (
    _lacks(
        "not_executable",
        "wrong-processor",
        "a program was built for another processor than this node has{named}",
        "make the environment on a node of the kind that runs it: login and compute nodes may differ (x86_64, aarch64)",
        confirm="uname -m; file $(readlink -f $(which python))",
    ),
    _lacks(
        "library",
        "wrong-library",
        "a shared library is missing on this node, or of another version than the program needs{named}",
        "make the environment on a node of the same kind and system; load the modules that it was built with",
        confirm="ldd $(which python) | grep 'not found'   on that node",
    ),
    _lacks(
        "no_script",
        "script-missing",
        "the script is not there on this node{named}",
        "put it on a file system that all nodes see, or give its absolute path",
        hint_in={
            "anywhere": "if {meant_file} is meant, correct the name; else put the script where all nodes see it, or give its absolute path"
        },
        confirm="ls -l SCRIPT   on every node",
    ),
    _lacks(
        "module_load",
        "module-load",
        "a module of the cluster could not be loaded{named}",
        "`module spider NAME` lists what there is; the line belongs into setup of muster.toml",
        confirm="module spider NAME",
    ),
    _lacks(
        "not_permitted",
        "permission",
        "a program, its interpreter or the script may not be read or run by this user{named}",
        "open its folders for the user of the job (`chmod a+rx`), or make the environment where all may enter",
        confirm="namei -l PATH   as that user, on that node",
    ),
    _lacks(
        "no_command",
        "command-missing",
        "a command or interpreter was not found on this node{named}",
        "activate the environment on every node: PATH of the login shell does not travel",
        hint_in={
            "anywhere": (
                (
                    "Lmod itself is not on that node ({lmod}): ask the site for it, or leave the node out; without modules, name what they"
                    " bring in the job script: export PATH=/path/of/mpi/bin:$PATH"
                ),
                "if {meant_command} is meant, correct the spelling; else activate the environment that has the command",
            )
        },
        confirm="which torchrun python   on every node",
    ),
    _lacks(
        "no_module_main",
        "package-missing",
        "a Python package is missing in the environment of this node{named}",
        "install it there, or activate the environment that has it, on every node",
        hint_in=INSTALL_IN,
        confirm="python -c 'import NAME'   on every node",
    ),
    _lacks(
        "bad_arguments",
        "bad-arguments",
        "the command line was refused{named}",
        "correct the argument that the line names",
        hint_in={"anywhere": "the program's own list of options has {meant_option}: write it so"},
    ),
    _lacks(
        "pbsdsh_usage",
        "bad-arguments",
        "pbsdsh took an option of the program for its own, and started nothing{named}",
        "write `--` before the program: pbsdsh -- /full/path/PROGRAM --option; or `muster torchrun`, which needs no pbsdsh",
    ),
    _lacks(
        "pbs_mpiexec",
        "launch-failed",
        "OpenPBS's own mpiexec only calls that of another MPI, and there was none on PATH at qsub{named}",
        "write `muster torchrun`, which needs no mpiexec; or load an MPI before qsub",
    ),
    _lacks(
        "image",
        "image-missing",
        "the container image could not be fetched or unpacked{named}",
        "read the runtime's own words below: a wrong name or credentials, no network, no space, or no right to write where it unpacks",
        confidence=MEDIUM,
    ),
    _lacks(
        "srun_launch",
        "srun-launch",
        "Slurm could not start the step{named}",
        "read Slurm's own words below; --overlap is needed for a second step on the same nodes",
    ),
    _lacks(
        "launch_failed",
        "launch-failed",
        "a node could not be reached or started{named}",
        "start `hostname` on all nodes in the same way first; report a node that fails",
        confirm="mpiexec -n NODES --ppn 1 hostname   (Slurm: srun hostname)",
    ),
    _lacks(
        "env_missing",
        "no-launcher",
        "the script was started without a launcher: the variables of torch.distributed are not set{named}",
        "start it with `muster run` or torchrun; under srun, `torchmuster.train` finds its rank by itself",
    ),
)

_ORDINAL_IN = {
    "lightning": "Trainer(devices={gpus_here}): the machine shows {gpus_here} of the GPUs that were asked for (CUDA_VISIBLE_DEVICES,"
    " nvidia-smi -L)",
    "rocm": "under Ray, let each worker see all GPUs: unset HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES and"
    " RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES=1; else as many processes per node as `rocm-smi` lists GPUs",
    "vllm": "--tensor-parallel-size x --pipeline-parallel-size may be no more than the GPUs that the process sees: nvidia-smi -L,"
    " CUDA_VISIBLE_DEVICES",
    "sglang": "--tp has to be the number of nodes (--nnodes) times the GPUs of one, and every node has to show as many: nvidia-smi -L,"
    " CUDA_VISIBLE_DEVICES",
    "torchrun": "--nproc-per-node=gpu starts one process for each GPU that the node shows; if it shows too few, look at nvidia-smi -L,"
    " CUDA_VISIBLE_DEVICES, and what the job asked for",
}
# fmt: off
SAID: tuple[Row, ...] = (
    _said("gloo_family", "mixed-ip-families", "one node talks IPv4, another IPv6", "pin GLOO_SOCKET_IFNAME to an interface with one family on all nodes"),
    _said("gloo_interface", "no-such-interface", "GLOO_SOCKET_IFNAME names no interface of this node", "unset it (`muster run` sets it by node), or name one that `ip -br addr` shows on every node"),
    _said("nccl_interface", "no-such-interface", "NCCL_SOCKET_IFNAME fits no interface of this node", "unset it, or name one that every node has; NCCL takes prefixes, `=name` for exactly one", confidence=MEDIUM),
    _said("nccl_lo", "nccl-loopback", "NCCL uses the loopback interface between nodes", "an exclusion list replaces NCCL's own: NCCL_SOCKET_IFNAME=^docker,lo"),
    _said("nccl_duplicate_gpu", "duplicate-gpu", "two ranks of one node use the same GPU{pair}", "start as many ranks on a node as it has GPUs, and give each its own before the group is made: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); in C++ cudaSetDevice(local rank)"),
    _said("nccl_family", "mixed-ip-families", "NCCL met an address family that a node does not have", "NCCL_SOCKET_FAMILY=AF_INET on all nodes"),
    _said("nccl_version", "nccl-versions-differ", "the nodes have different versions of NCCL", "use one environment everywhere; take NCCL off LD_LIBRARY_PATH"),
    _said("nccl_shm", "small-dev-shm", "/dev/shm is too small for NCCL", SMALL_SHM_HINT, hint_in=SHM_IN, proof=r"failed to extend|No space left|posix_fallocate", confidence=MEDIUM),
    _said("shm", "small-dev-shm", "/dev/shm is full: loader workers pass batches through it", SMALL_SHM_HINT, hint_in=SHM_IN, proof=r"unable to allocate|No space left", confidence=MEDIUM),
    _said("nccl_memlock", "memlock", "RDMA could not pin memory: the limit of locked memory is too low in the job", "the site has to raise LimitMEMLOCK of the scheduler's daemon; docker: --ulimit memlock=-1", proof=r"allocate memory|memlock|locked", confidence=MEDIUM),
    _said("nccl_ib", "ib-path", "an InfiniBand path between two nodes does not work", "check the cable, GID index and NCCL_IB_HCA; rail-only fabrics need NCCL_CROSS_NIC=0", confidence=MEDIUM, weight=Weight.PROGRAM - 1),
    _said("nccl_plugin", "network-plugin", "NCCL did not find the network plugin or provider that was asked for", "load the module of the plugin, unset FI_PROVIDER and NCCL_NET, or use the one of this machine (Slingshot: cxi)", hint_in={"slingshot": "load the site's module of the plugin, unset NCCL_NET, and FI_PROVIDER=cxi", "aws": "use an instance type with EFA, with an interface of type efa and a security group that is open to itself (`fi_info -p efa` lists it); to go on without EFA: unset FI_PROVIDER, NCCL_NET=Socket"}),
    _said("nccl_mismatch", "collectives-differ", "ranks made different collectives at the same time", "all ranks have to make the same calls with the same sizes in the same order"),
    _said("mismatch", "collectives-differ", "ranks made different collectives at the same time{pair}", "all ranks have to make the same calls with the same sizes in the same order"),
    _said("barrier_missing", "ranks-missing-at-barrier", "some ranks did not come to a barrier (ranks {ranks})", "look at what the named ranks did: `muster stacks RUN`", confidence=MEDIUM, weight=Weight.PROGRAM - 1),
    _said("cuda_ordinal", "gpu-ordinal", "a rank asked for a GPU that it does not see", "a device number has to be below the number of visible GPUs: as many processes per node as GPUs (CUDA_VISIBLE_DEVICES, nvidia-smi -L)", hint_in=_ORDINAL_IN | {"slurm": "each task may see its own GPU only: use device 0, or --gpus-per-node instead of --gpus-per-task"}),
    _said("loader_killed", "exit-code", "a DataLoader worker ended without a message of its own", "num_workers=0 shows its own error; if it then works, its memory or /dev/shm ran out: fewer workers, more memory", words=r"exited unexpectedly", confidence=MEDIUM, weight=Weight.SIGNAL - 1),
    _said("no_gpu", "no-gpu", "no usable GPU for this process: none given to it, a CPU build of torch, or a driver that is too old", "ask for GPUs (--gres, --gpus-per-node, ngpus), and install a CUDA build that fits the driver", hint_in={"xpu": "this code is written for torch.cuda: use the device `xpu` (torch.xpu) here, or a build for these GPUs", "container": "start the container with GPUs (docker --gpus all, apptainer --nv, nvidia.com/gpu in the pod), and a CUDA build that fits the driver", "anywhere": "this torch is a {cpu_build}: pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126 (the CUDA of the driver, or older), or use the GPU only where torch.cuda.is_available()"}),
    _said("cuda_arch", "gpu-not-supported", "this build of torch has no code for this GPU", "install a build for it (newer torch or another CUDA version)"),
    _said("xid", "gpu-hardware", "the driver reported a fault of a GPU (Xid) (Xid {xid} of {bus})", "exclude the node and report it to the site", words=_NOT_OF_PROGRAMS, proof=_OF_BROKEN_GPUS, confidence=MEDIUM),
    _said("gpu_hardware", "gpu-hardware", "a GPU has a hardware fault", "exclude the node and report it to the site"),
    _said("fabric_manager", "fabric-manager", "the GPUs of a node are not initialised: NVIDIA's fabric manager does not run or does not fit", "the site has to start the fabric manager that fits the driver; exclude the node until then"),
)
# fmt: on

_NCCL_WARNING = _said(
    "nccl_warn",
    "nccl-warning",
    "NCCL failed: {text:.200}",
    "run again with NCCL_DEBUG=INFO and read the lines before this one",
    hint_in={
        "anywhere": "NCCL did not get even {nccl_bytes} bytes on the GPU: see with nvidia-smi whether another process fills it; if it has"
        " room, an earlier CUDA error is the reason (CUDA_LAUNCH_BLOCKING=1)"
    },
    confidence=LOW,
    weight=Weight.COLLECTIVE + 1,
    num_lines=1,
)


_SOUNDS_FAILED = frozenset({"error_line", "raised_line", "exit_code", "exception", "cut_traceback"})
_FEW_LINES = 10  # what others may still write while NCCL fails


def nccl_warning(case: Case) -> Iterator[LogFinding]:
    """A warning of NCCL that no rule knows; healthy runs print such lines too, and go on with their work."""
    if not all(_work_went_on(case, event) for event in case.of("nccl_warn")):
        yield from _NCCL_WARNING(case)


def _work_went_on(case: Case, warned: LogEvent) -> bool:
    """Say whether a program wrote much of its own after a warning, and nothing that sounds like a failure."""
    for event in case.events:
        if event.line.path == warned.line.path and event.line.order <= warned.line.order:
            continue
        if event.kind != "nccl_warn" and event.role in (LineRole.CAUSE, LineRole.ECHO):
            return False
        if event.kind in _SOUNDS_FAILED and (strength(event) or wraps(event)):
            return False
    after = [
        line
        for log in case.record.logs
        for line in log.last
        if line.path == warned.line.path and line.order > warned.line.order
    ]
    return len([line for line in after if line.text and "NCCL" not in line.text]) > _FEW_LINES


def could_not_start(case: Case) -> Iterator[LogFinding]:
    """Something was missing on a node before any training: other nodes may lack it too, or only have waited."""
    waited = case.of("rdzv_timeout", "store_wait", "store_clients", "rdzv_connection")
    ruled_out = ("the network: the other nodes only waited for this one",) if waited else ()
    for row in _MISSING:
        hosts = sorted({short(e.who.host) for e in row.rests_on(case) if e.who.host})
        same = (f"the same on {', '.join(hosts)}",) if len(hosts) > 1 else ()
        for finding in row(case):
            found = replace(finding, because=same, ruled_out=ruled_out)
            if _had_failed_before(case, finding):
                found = replace(found, confidence=LOW, weight=Weight.ENVELOPE - 1)
            yield found


def _had_failed_before(case: Case, finding: LogFinding) -> bool:
    """Say whether training had run and failed before: what a script lacks after that is no cause of it."""
    began = finding.began
    return began is not None and any(
        event.line.path == began.path and event.line.order < began.order
        for event in case.of("root_cause_table", "child_failed", "exception")
        if event.kind != "exception" or event.get("uncaught")
    )


_SLINGSHOT = re.compile(r"\bhsn\d|\bcxi\b|cray", re.IGNORECASE)
_OWN_PLUGIN = re.compile(r"aws[-_]ofi", re.IGNORECASE)
_WRONG_PROVIDER = Row(
    cause="wrong-provider",
    error="FI_PROVIDER=efa names Amazon's network, this machine has Slingshot (cxi)",
    hint="unset FI_PROVIDER, or FI_PROVIDER=cxi; use the site's own module of the plugin",
    confirm="fi_info -p cxi; env | grep FI_",
    weight=Weight.ENVELOPE + 1,
    num_lines=1,
)


def wrong_provider(case: Case) -> Iterator[LogFinding]:
    """A libfabric provider of another kind of network than this machine's."""
    asked = case.variable("FI_PROVIDER")
    headers = [line for log in case.record.logs for line in log.header]
    plugin = [line for line in headers if _OWN_PLUGIN.search(line.text)]
    if not any(_SLINGSHOT.search(line.text) for line in headers):
        return
    if asked is not None and asked.get("value") == "efa":
        yield found_by(case, _WRONG_PROVIDER, [asked], at=None)
    elif asked is None and plugin:
        yield LogFinding(
            cause="wrong-provider",
            error=(
                "an own aws-ofi-nccl is used on a Cray: with FI_PROVIDER=efa, as recipes for Amazon set it,"
                " NCCL would find no network here"
            ),
            confidence=LOW,
            weight=_WRONG_PROVIDER.weight,
            evidence=(plugin[0],),
            hint=_WRONG_PROVIDER.hint,
            confirm=_WRONG_PROVIDER.confirm,
            began=plugin[0],
        )
