"""Lines that leave no second reading: they name their cause themselves."""

import re
from collections.abc import Iterator

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogEvent, LogFinding, LogLine
from torchmuster.diagnose.explain.weigh import (
    HIGH,
    LOW,
    MEDIUM,
    Weight,
    at,
    is_notice,
    was_survived,
)
from torchmuster.diagnose.finding import Confidence

_SLINGSHOT = re.compile(r"\bhsn\d|\bcxi\b|cray", re.IGNORECASE)
_OWN_PLUGIN = re.compile(r"aws[-_]ofi", re.IGNORECASE)
# Kind of event: cause, sentence, cure.
# fmt: off
_SPECIFIC = {
    "gloo_family": ("mixed-ip-families", "one node talks IPv4, another IPv6", "pin GLOO_SOCKET_IFNAME to an interface with one family on all nodes"),
    "gloo_interface": ("no-such-interface", "GLOO_SOCKET_IFNAME names no interface of this node", "unset it (`muster run` sets it by node), or name one that `ip -br addr` shows on every node"),
    "nccl_interface": ("no-such-interface", "NCCL_SOCKET_IFNAME fits no interface of this node", "unset it, or name one that every node has; NCCL takes prefixes, `=name` for exactly one"),
    "nccl_lo": ("nccl-loopback", "NCCL uses the loopback interface between nodes", "an exclusion list replaces NCCL's own: NCCL_SOCKET_IFNAME=^docker,lo"),
    "nccl_duplicate_gpu": ("duplicate-gpu", "two ranks of one node use the same GPU", "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group"),
    "nccl_family": ("mixed-ip-families", "NCCL met an address family that a node does not have", "NCCL_SOCKET_FAMILY=AF_INET on all nodes"),
    "nccl_version": ("nccl-versions-differ", "the nodes have different versions of NCCL", "use one environment everywhere; take NCCL off LD_LIBRARY_PATH"),
    "nccl_shm": ("small-dev-shm", "/dev/shm is too small for NCCL", "--shm-size=1g or --ipc=host for the container; emptyDir with medium Memory in Kubernetes"),
    "shm": ("small-dev-shm", "/dev/shm is full: loader workers pass batches through it", "--shm-size=8g or --ipc=host for the container, or fewer loader workers"),
    "nccl_memlock": ("memlock", "RDMA could not pin memory: the limit of locked memory is too low in the job", "the site has to raise LimitMEMLOCK of the scheduler's daemon; docker: --ulimit memlock=-1"),
    "nccl_ib": ("ib-path", "an InfiniBand path between two nodes does not work", "check the cable, GID index and NCCL_IB_HCA; rail-only fabrics need NCCL_CROSS_NIC=0"),
    "nccl_plugin": ("network-plugin", "NCCL did not find the network plugin or provider that was asked for", "load the module of the plugin, unset FI_PROVIDER and NCCL_NET, or use the one of this machine (Slingshot: cxi)"),
    "nccl_mismatch": ("collectives-differ", "ranks made different collectives at the same time", "all ranks have to make the same calls with the same sizes in the same order"),
    "mismatch": ("collectives-differ", "ranks made different collectives at the same time", "all ranks have to make the same calls with the same sizes in the same order"),
    "barrier_missing": ("ranks-missing-at-barrier", "some ranks did not come to a barrier", "look at what the named ranks did: `muster stacks RUN`"),
    "cuda_ordinal": ("gpu-ordinal", "a rank asked for a GPU that it does not see", "each task sees its own GPU only: use device 0, or --gpus-per-node instead of --gpus-per-task"),
    "no_gpu": ("no-gpu", "no usable GPU for this process: none given to it, a CPU build of torch, or a driver that is too old", "ask for GPUs (--gres, --gpus-per-node, ngpus), and install a CUDA build that fits the driver"),
    "cuda_arch": ("gpu-not-supported", "this build of torch has no code for this GPU", "install a build for it (newer torch or another CUDA version)"),
    "xid": ("gpu-hardware", "the driver reported a fault of a GPU (Xid)", "exclude the node and report it to the site"),
    "gpu_hardware": ("gpu-hardware", "a GPU has a hardware fault", "exclude the node and report it to the site"),
    "fabric_manager": ("fabric-manager", "the GPUs of a node are not initialised: NVIDIA's fabric manager does not run or does not fit", "the site has to start the fabric manager that fits the driver; exclude the node until then"),
}
# fmt: on

# What a rank that is gone leaves behind too: an exception or an end of another rank beats them.
_MAY_FOLLOW = frozenset({"nccl_ib", "barrier_missing"})
# A program's own faults, and what the driver writes when it cleans up after any process that was killed.
_XIDS_OF_BROKEN_GPUS = frozenset({"48", "64", "74", "79", "95", "119", "120", "140"})
_NO_MEMORY = re.compile(r"allocate memory|memlock|locked")
_XIDS_OF_PROGRAMS = frozenset({"13", "31", "43", "45"})


def said_itself(case: Case) -> Iterator[LogFinding]:
    """A line that leaves no second reading."""
    for kind, (cause, sentence, cure) in _SPECIFIC.items():
        found = [e for e in case.of(kind) if e.get("xid") not in _XIDS_OF_PROGRAMS]
        found = [e for e in found if not is_notice(e)]
        if not found:
            continue
        event = case.earliest(found)
        more = [f"ranks {event.get('ranks')}"] if event.get("ranks") else []
        more += [f"Xid {event.get('xid')} of {event.get('bus')}"] if event.get("xid") else []
        if event.get("rank_a"):
            more.append(f"ranks {event.get('rank_a')} and {event.get('rank_b')}")
        yield LogFinding(
            cause=cause,
            error=sentence + (f" ({', '.join(more)})" if more else ""),
            confidence=_how_sure(case, found),
            weight=_how_heavy(case, found),
            evidence=tuple(e.line for e in found[:4]),
            at=at(event),
            hint=cure,
            began=event.line,
        )


def _how_sure(case: Case, found: list[LogEvent]) -> Confidence:
    """A line that ended nothing is a guess; what others leave behind, or a program may do without, is no proof."""
    if all(was_survived(case, e) for e in found):
        return LOW
    told = any(e.get("xid") in _XIDS_OF_BROKEN_GPUS for e in found)
    if found[0].kind in _MAY_FOLLOW or (found[0].kind == "xid" and not told):
        return MEDIUM
    if found[0].kind == "nccl_memlock":
        return HIGH if any(_NO_MEMORY.search(e.line.text) for e in found) else MEDIUM
    return HIGH


def _how_heavy(case: Case, found: list[LogEvent]) -> int:
    if all(was_survived(case, e) for e in found):
        return Weight.ENVELOPE - 2
    return Weight.PROGRAM - 1 if found[0].kind in _MAY_FOLLOW else Weight.SPECIFIC


def nccl_warnings(case: Case) -> Iterator[LogFinding]:
    """NCCL said something that no other rule knows."""
    event = case.first("nccl_warn")
    if event is None:
        return
    yield LogFinding(
        cause="nccl-warning",
        error=f"NCCL failed: {event.get('text')[:200]}",
        confidence=LOW,
        weight=Weight.COLLECTIVE + 1,
        evidence=(event.line,),
        at=at(event),
        hint="run again with NCCL_DEBUG=INFO and read the lines before this one",
        began=event.line,
    )


def wrong_provider(case: Case) -> Iterator[LogFinding]:
    """A libfabric provider of another kind of network than this machine's."""
    asked = case.variable("FI_PROVIDER")
    headers = [line for log in case.record.logs for line in log.header]
    plugin = [line for line in headers if _OWN_PLUGIN.search(line.text)]
    if not any(_SLINGSHOT.search(line.text) for line in headers):
        return
    if asked is not None and asked.get("value") == "efa":
        sentence = "FI_PROVIDER=efa names Amazon's network, this machine has Slingshot (cxi)"
        yield _provider(sentence, asked.line, sure=True)
    elif asked is None and plugin:
        sentence = (
            "an own aws-ofi-nccl is used on a Cray: with FI_PROVIDER=efa, as recipes for Amazon set it,"
            " NCCL would find no network here"
        )
        yield _provider(sentence, plugin[0], sure=False)


def _provider(sentence: str, line: LogLine, *, sure: bool) -> LogFinding:
    return LogFinding(
        cause="wrong-provider",
        error=sentence,
        confidence=HIGH if sure else LOW,
        weight=Weight.ENVELOPE + 1,
        evidence=(line,),
        hint="unset FI_PROVIDER, or FI_PROVIDER=cxi; use the site's own module of the plugin",
        confirm="fi_info -p cxi; env | grep FI_",
        began=line,
    )
