"""The grammars of the variables that users set for NCCL, Gloo, libfabric and torch.

Sources: NCCL's user guide, "Environment Variables"; torch/csrc/distributed (socket names of Gloo, TORCH_* of
ProcessGroupNCCL); libfabric's fi_provider(7). The checks find values that the reading program ignores without a message.
"""

import difflib
import re
from collections.abc import Callable, Mapping

Check = Callable[[str], str | None]


def _words(*allowed: str) -> Check:
    shown = ", ".join(allowed)
    known = {word.upper() for word in allowed}
    return lambda text: None if text.strip().upper() in known else f"it takes one of {shown}"


def _whole(low: int, high: int | None = None) -> Check:
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
        return None  # no GPU shall be seen
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


_PROVIDERS = [
    "cxi",
    "efa",
    "verbs",
    "tcp",
    "sockets",
    "shm",
    "psm2",
    "psm3",
    "opx",
    "gni",
    "udp",
    "ofi_rxm",
    "ofi_rxd",
    "mrail",
    "hook_debug",
    "lnx",
    "usnic",
    "ucx",
    "net",
    "xpmem",
]


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


_SWITCH = _whole(0, 1)
_DISTANCE = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS", "0", "1", "2", "3", "4", "5")
GRAMMAR: Mapping[str, Check] = {
    "NCCL_SOCKET_IFNAME": _interfaces_of_nccl,
    "NCCL_SOCKET_FAMILY": _words("AF_INET", "AF_INET6"),
    "NCCL_SOCKET_NTHREADS": _whole(1, 16),
    "NCCL_NSOCKS_PERTHREAD": _whole(1, 16),
    "NCCL_SOCKET_RETRY_CNT": _whole(0),
    "NCCL_DEBUG": _words("VERSION", "WARN", "INFO", "TRACE", "ABORT", "NONE"),
    "NCCL_IB_DISABLE": _SWITCH,
    "NCCL_IB_TIMEOUT": _whole(0, 31),
    "NCCL_IB_RETRY_CNT": _whole(0, 7),
    "NCCL_IB_GID_INDEX": _whole(-1, 255),
    "NCCL_IB_TC": _whole(0, 255),
    "NCCL_IB_SL": _whole(0, 15),
    "NCCL_IB_QPS_PER_CONNECTION": _whole(1, 128),
    "NCCL_CROSS_NIC": _whole(0, 2),
    "NCCL_P2P_DISABLE": _SWITCH,
    "NCCL_P2P_LEVEL": _words(*_DISTANCE),
    "NCCL_NET_GDR_LEVEL": _words(*_DISTANCE),
    "NCCL_SHM_DISABLE": _SWITCH,
    "NCCL_BUFFSIZE": _whole(1),
    "NCCL_NTHREADS": _words("64", "128", "256", "512"),
    "NCCL_MIN_NCHANNELS": _whole(1, 64),
    "NCCL_MAX_NCHANNELS": _whole(1, 64),
    "NCCL_CUMEM_ENABLE": _whole(-2, 1),
    "NCCL_NVLS_ENABLE": _whole(0, 2),
    "NCCL_DMABUF_ENABLE": _SWITCH,
    "NCCL_IGNORE_CPU_AFFINITY": _SWITCH,
    "NCCL_LAUNCH_MODE": _words("PARALLEL", "GROUP"),
    "GLOO_SOCKET_IFNAME": _plain_interfaces,
    "TP_SOCKET_IFNAME": _plain_interfaces,
    "FI_PROVIDER": _provider,
    "OMP_NUM_THREADS": _threads,
    "CUDA_VISIBLE_DEVICES": _devices,
    "TORCH_DISTRIBUTED_DEBUG": _words("OFF", "INFO", "DETAIL"),
    "TORCH_CPP_LOG_LEVEL": _words("INFO", "WARNING", "ERROR", "FATAL"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _whole(0, 3),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": _whole(1),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": _whole(0),
    "PYTORCH_CUDA_ALLOC_CONF": _pairs,
}
# Known, with values that are free, so that they are no misspelling of the others.
_FREE = [
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_IB_HCA",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_TOPO_FILE",
    "NCCL_TOPO_DUMP_FILE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_COMM_ID",
    "NCCL_CONF_FILE",
    "NCCL_TUNER_PLUGIN",
    "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_IB_PCI_RELAXED_ORDERING",
    "NCCL_IB_ADAPTIVE_ROUTING",
    "NCCL_NET_GDR_READ",
    "NCCL_NET_GDR_C2C",
    "NCCL_MAX_CTAS",
    "NCCL_MIN_CTAS",
    "NCCL_CGA_CLUSTER_SIZE",
    "NCCL_GRAPH_MIXING_SUPPORT",
    "NCCL_MNNVL_ENABLE",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_PXN_DISABLE",
    "NCCL_OOB_NET_IFNAME",
    "NCCL_IB_MERGE_NICS",
    "NCCL_IB_SPLIT_DATA_ON_QPS",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_SET_THREAD_NAME",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_LOGS",
    "TORCH_HOME",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_EXTENSIONS_DIR",
]
_OLD = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}


def problem_of(name: str, value: str) -> str | None:
    """Return the problem of a variable's value; None when it is valid or unknown."""
    check = GRAMMAR.get(name)
    if check is None:
        return None
    if not value:
        return None if name == "CUDA_VISIBLE_DEVICES" else "it is empty: unset it"
    return check(value)


def meant(name: str) -> str | None:
    """Return the variable that was probably meant by an unknown name."""
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
