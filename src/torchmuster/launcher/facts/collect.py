"""Collect the facts about a node before its workers start, as plain values.

A separate thread with a time limit collects each part: a file system that hangs, or a name server
that does not answer, affects only its own part. For a missing part the reason is given.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import resource
import secrets
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core import proc
from torchmuster.core.model import contract
from torchmuster.core.model.ranks import compress_ranks
from torchmuster.core.node.kernel import (
    counter_files,
    list_folder,
    read_text,
)
from torchmuster.launcher.facts.gpu import Ask, GpuFacts, collect_gpus, run_probes
from torchmuster.launcher.model.network import Interface
from torchmuster.launcher.net.interfaces import link_names, own_interfaces

# The kernel: processors, memory, limits, shared memory, control groups.


# Files in /dev/shm that no process has open: left by killed programs of this user.
#
# torch names its files torch_PID_..., NCCL nccl-..., and POSIX semaphores are sem.NAME. Most
# programs remove their files when they end, but not when they are killed.
#
# Source: torch/lib/libshm; NCCL src/os/linux.cc and src/misc/shmutils.cc; sem_overview(7).


_NAMES = ("torch_", "nccl-", "sem.")
_MAX_FILES = 10_000
# A program may have yet to open a file that was made only a moment ago.
_AGE_S = 600.0


def leftover_shm_files(folder: str, root: str = "/") -> tuple[int, int]:
    """Return number and bytes of this user's files in /dev/shm that no process has open.

    Processes that can't be inspected (a container's init) count as having none open.
    """
    sizes = dict(_old_files(folder))
    if not sizes:
        return 0, 0
    for used in _open_files(folder, os.path.join(root, "proc")):
        sizes.pop(used, None)
    return len(sizes), sum(sizes.values())


def _old_files(folder: str) -> Iterator[tuple[str, int]]:
    until = time.time() - _AGE_S
    for name in list_folder(folder)[:_MAX_FILES]:
        if not name.startswith(_NAMES):
            continue
        try:
            status = os.lstat(os.path.join(folder, name))
        except OSError:
            continue
        mine = status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode)
        if mine and status.st_mtime < until:
            yield name, status.st_blocks * 512


def _open_files(folder: str, proc: str) -> Iterator[str]:
    """Yield the names that processes of this user have mapped or open."""
    pattern = re.compile(rf"{re.escape(folder)}/(\S+)")
    for pid in list_folder(proc):
        path = os.path.join(proc, pid)
        if not pid.isdecimal():
            continue
        try:
            if os.stat(path).st_uid != os.getuid():
                continue
            with open(os.path.join(path, "maps"), errors="replace") as file:
                yield from pattern.findall(file.read())
            for descriptor in os.listdir(os.path.join(path, "fd")):
                found = pattern.match(os.readlink(os.path.join(path, "fd", descriptor)))
                if found is not None:
                    yield found[1]
        except OSError:
            continue  # the process has ended, or may not be inspected


# A limit this large means no limit: RLIM_INFINITY, or cgroup v1's largest multiple of a page.
_NO_LIMIT = 1 << 62
_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
    "core": resource.RLIMIT_CORE,
}
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """The kernel's facts about a node.

    Attributes:
        cpus: The CPUs that this process may use, as `0-3,8`.
        limits: Soft limits by name; -1 for none.
        memory_limit_bytes: The smallest limit of the control groups above us; None without one.
        shm_bytes: Size of /dev/shm; None if there is none.
        left_shm_files: Number of this user's files there that no process has open; `left_shm_bytes`
            is their size.
    """

    host: str
    kernel: str
    machine: str
    boot_id: str
    num_cpus: int
    num_usable_cpus: int
    cpus: str
    memory_bytes: int
    limits: dict[str, int]
    memory_limit_bytes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    left_shm_files: int = 0
    left_shm_bytes: int = 0
    uid: int = 0


def collect_system(root: str = "/", *, is_long: bool = False) -> SystemFacts:
    """Return the kernel's facts about this node; `root` is the root of its files.

    The long form also checks the open files of this user's processes.
    """
    name = os.uname()
    usable = sorted(os.sched_getaffinity(0))
    shared = os.path.join(root, SHARED_MEMORY.lstrip("/"))
    shm = _room(shared)
    left = leftover_shm_files(shared, root) if is_long else (0, 0)
    return SystemFacts(
        host=name.nodename,
        kernel=name.release,
        machine=name.machine,
        boot_id=read_text(os.path.join(root, "proc/sys/kernel/random/boot_id")).strip(),
        num_cpus=os.cpu_count() or 1,
        num_usable_cpus=len(usable),
        cpus=compress_ranks(usable),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        limits={word: _plain(resource.getrlimit(which)[0]) for word, which in _LIMITS.items()},
        memory_limit_bytes=memory_limit(),
        shm_bytes=shm[0] if shm else None,
        shm_free_bytes=shm[1] if shm else None,
        left_shm_files=left[0],
        left_shm_bytes=left[1],
        uid=os.getuid(),
    )


def memory_limit() -> int | None:
    """Return the smallest memory limit, in bytes, of the control groups above us, or None."""
    found: list[int] = []
    for path in counter_files():
        is_second = path.endswith("memory.events")
        name = "memory.max" if is_second else "memory.limit_in_bytes"
        text = read_text(os.path.join(os.path.dirname(path), name)).strip()
        if text.isdecimal() and int(text) < _NO_LIMIT:
            found.append(int(text))
    return min(found, default=None)


def _plain(limit: int) -> int:
    return -1 if limit == resource.RLIM_INFINITY or limit >= _NO_LIMIT else limit


def _room(path: str) -> tuple[int, int] | None:
    try:
        disk = os.statvfs(path)
    except OSError:
        return None
    return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize


# Names, addresses and interfaces as the node sees them. Only name look-ups send packets.


# linux/sockios.h
_SIOCGIFMTU = 0x8921
# An address reserved for documentation: only the default route leads there. No packet is sent.
_OUTSIDE = "198.51.100.1"
_MAX_NAMES = 64
_MAX_ADDRESSES = 16
_MAX_DEVICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of an RDMA device, as /sys shows it.

    Attributes:
        kind: `InfiniBand` or `Ethernet` (RoCE).
        state: `ACTIVE`, `DOWN`, ...
        num_gids: Number of its global ids that are set; RoCE needs at least one.
    """

    name: str
    port: int
    kind: str
    state: str
    num_gids: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSystemFacts:
    """Names, addresses and devices of one node.

    Attributes:
        own_name: The result of gethostname(); `own_addresses` are its addresses here.
        names: Other nodes' names with their addresses here.
        unresolved: Names that were not resolved, and why.
        mtu: MTU by interface.
        links: All interfaces, with or without an address.
        outside: The source address of packets to the outside; None without a default route.
        name_s: How long the slowest look-up took.
        cxi: Slingshot devices; `efa` has those of AWS.
    """

    own_name: str
    own_addresses: tuple[str, ...] = ()
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unresolved: dict[str, str] = field(default_factory=dict)
    interfaces: tuple[Interface, ...] = ()
    links: tuple[str, ...] = ()
    mtu: dict[str, int] = field(default_factory=dict)
    outside: str | None = None
    name_s: float = 0.0
    rdma: tuple[RdmaPort, ...] = ()
    cxi: tuple[str, ...] = ()
    efa: tuple[str, ...] = ()
    has_rdma_files: bool = False


def collect_network(names: Sequence[str], limit_s: float, root: str = "/") -> NetworkSystemFacts:
    """Return the network facts; a name that takes longer than `limit_s` counts as unresolved."""
    own = socket.gethostname()
    wanted = list(dict.fromkeys([own, *names]))[:_MAX_NAMES]
    began = time.monotonic()
    found, unresolved = resolve(wanted, limit_s)
    name_s = time.monotonic() - began
    interfaces = own_interfaces()
    links = link_names()
    rdma = rdma_ports(root)
    return NetworkSystemFacts(
        own_name=own,
        own_addresses=found.get(own, ()),
        names={name: found[name] for name in wanted if name in found},
        unresolved=unresolved,
        interfaces=interfaces,
        links=links[:_MAX_DEVICES],
        mtu={i.name: mtu for i in interfaces if (mtu := _mtu(i.name)) is not None},
        outside=source_for(_OUTSIDE),
        name_s=round(name_s, 3),
        rdma=rdma,
        cxi=tuple(list_folder(os.path.join(root, "sys/class/cxi"))),
        efa=tuple(n for n in {port.name for port in rdma} if _is_efa(n, root)),
        has_rdma_files=bool(list_folder(os.path.join(root, "dev/infiniband"))),
    )


def resolve(
    names: Sequence[str], limit_s: float
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Resolve names in parallel; return the addresses, and why other names have none."""

    def ask(name: str) -> tuple[str, ...]:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(row[4][0]) for row in rows))[:_MAX_ADDRESSES]

    def why(error: Exception) -> str:
        return _why(error) if isinstance(error, OSError) else "it is no host name"

    return run_probes({name: functools.partial(ask, name) for name in names}, limit_s, why)


def source_for(address: str) -> str | None:
    """Return the source address that packets to `address` would have; send none."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((address, 9))
            return str(asking.getsockname()[0])
    except OSError:
        return None


def rdma_ports(root: str = "/") -> tuple[RdmaPort, ...]:
    """Return the ports of all RDMA devices."""
    base = os.path.join(root, "sys/class/infiniband")
    found = []
    for name in list_folder(base)[:_MAX_DEVICES]:
        for port in list_folder(os.path.join(base, name, "ports")):
            folder = os.path.join(base, name, "ports", port)
            state = read_text(os.path.join(folder, "state")).partition(":")[2].strip()
            gids = [read_text(os.path.join(folder, "gids", str(index))) for index in range(8)]
            found.append(
                RdmaPort(
                    name=name,
                    port=int(port) if port.isdecimal() else 0,
                    kind=read_text(os.path.join(folder, "link_layer")).strip(),
                    state=state,
                    num_gids=sum(bool(gid.strip(" :0\n")) for gid in gids),
                )
            )
    return tuple(found)


def _is_efa(name: str, root: str) -> bool:
    driver = os.path.join(root, "sys/class/infiniband", name, "device/driver")
    try:
        return os.path.basename(os.readlink(driver)) == "efa"
    except OSError:
        return False


def _mtu(name: str) -> int | None:
    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFMTU, request)
    except OSError:
        return None
    return int(struct.unpack_from("=i", answer, 16)[0])


# The folders of a run as a node sees them: shared with other nodes, writable, free space.


_MAX_HASHED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """A folder that a run uses.

    Attributes:
        role: `run`, `snapshots` or `temp`.
        identity: The ctime, in seconds and nanoseconds, of a file in it that is written once; equal
            on two
            nodes that see the same file. Empty without such a file.
        why: Why it can't be written, or why a file in it can't be renamed.
        free_files: How many more files it can have; -1 if the file system doesn't count them.
    """

    role: str
    path: str
    is_there: bool
    identity: tuple[int, ...] = ()
    is_writable: bool = False
    can_rename: bool = False
    why: str = ""
    free_bytes: int = 0
    free_files: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """The script as a node sees it; no checksum above 16 MiB."""

    path: str
    is_there: bool
    why: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """Folders and script of a run on one node."""

    folders: tuple[FolderFacts, ...] = ()
    script: ScriptFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsRequest:
    """What to collect.

    Attributes:
        environment: The job's variables, such as TMPDIR.
        names: Other nodes' names, to be resolved here; only in the long form.
        run_dir: The run's folder; None without a run.
        once_written: A file in it that does not change after the start.
        script: The program's absolute path.
        folders: (role, path) of other folders of the run.
    """

    is_long: bool
    environment: Mapping[str, str]
    names: Sequence[str] = ()
    run_dir: str | None = None
    once_written: str | None = None
    script: str | None = None
    folders: Sequence[tuple[str, str]] = ()


def collect_files(order: FactsRequest) -> FileFacts:
    """Return the facts about a run's folders and script; test files are removed."""
    folders = []
    if order.run_dir is not None:
        folders.append(look_at("run", order.run_dir, order.once_written))
    folders += [look_at(role, path, None) for role, path in order.folders]
    temporary = order.environment.get("TMPDIR") or tempfile.gettempdir()
    folders.append(look_at("temp", temporary, None))
    script = script_facts(order.script) if order.script else None
    return FileFacts(folders=tuple(folders), script=script)


def look_at(role: str, path: str, once_written: str | None) -> FolderFacts:
    """Return the facts about a folder; create, rename and remove a test file in it."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return FolderFacts(role=role, path=path, is_there=False, why=_why(error))
    writable, renames, why = _try_to_write(path)
    return FolderFacts(
        role=role,
        path=path,
        is_there=True,
        identity=_identity(once_written),
        is_writable=writable,
        can_rename=renames,
        why=why,
        free_bytes=disk.f_bavail * disk.f_frsize,
        free_files=disk.f_favail if disk.f_files else -1,
    )


def _identity(path: str | None) -> tuple[int, ...]:
    """Return the ctime of a file: a copy may equal it in every other attribute."""
    if path is None:
        return ()
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return divmod(status.st_ctime_ns, 1_000_000_000)


def _try_to_write(folder: str) -> tuple[bool, bool, str]:
    path = os.path.join(folder, f".muster-preflight-{secrets.token_hex(8)}")
    written = False
    try:
        with open(path, "xb") as file:
            file.write(b"preflight\n")
            file.flush()
        written = True
        os.replace(path, f"{path}.renamed")
        os.unlink(f"{path}.renamed")
    except OSError as error:
        for left in (path, f"{path}.renamed"):
            with contextlib.suppress(OSError):
                os.unlink(left)
        return written, False, _why(error)
    return True, True, ""


def script_facts(path: str) -> ScriptFacts:
    """Return whether the script is there, and its checksum."""
    digest = hashlib.sha256()
    try:
        size = os.stat(path).st_size
        if os.path.isdir(path):
            return ScriptFacts(path=path, is_there=True)
        with open(path, "rb") as file:
            if size <= _MAX_HASHED_BYTES:
                digest.update(file.read(_MAX_HASHED_BYTES))
    except OSError as error:
        is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        return ScriptFacts(path=path, is_there=not is_missing, why=_why(error))
    checksum = digest.hexdigest() if size <= _MAX_HASHED_BYTES else ""
    return ScriptFacts(path=path, is_there=True, sha256=checksum)


def _why(error: OSError) -> str:
    return error.strerror or str(error)


# The variables of user, site and scheduler, and the plugins that NCCL would find.


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
# The job's end in seconds since 1970, set by the head for jobs without such a variable.
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
        scheduler: The scheduler's own variables.
        nodefile: Numbers of lines and of distinct hosts in PBS's list of nodes; empty without one.
        left_s: Seconds to the end of the job's time limit; None if unknown.
        total_s: The whole time limit in seconds; None if unknown.
        plugins: Files of network plugins that NCCL would load.
        verbs: Whether libibverbs, which NCCL needs for InfiniBand, is found.
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
        if value:  # a proxy's address may contain a password
            most = _MAX_NO_PROXY if name == "no_proxy" else _MAX_VALUE
            found[name] = re.sub(r"//[^@/]*@", "//", value)[:most]
    return found


def _nodefile(environment: Mapping[str, str]) -> tuple[int, ...]:
    path = environment.get("PBS_NODEFILE")
    if not path:
        return ()
    try:
        with open(path, errors="replace") as file:
            lines = map(str.strip, file.read(_MAX_NODEFILE_BYTES).splitlines())
    except OSError:  # only the first node has the file
        return ()
    names = list(filter(None, lines))
    return len(names), len(set(names))


def _left(environment: Mapping[str, str], now: float) -> float | None:
    for name in ("SLURM_JOB_END_TIME", ALLOCATION_ENDS_AT):
        end = environment.get(name, "")
        if re.fullmatch(r"\d{1,12}", end) and int(end):
            return round(float(end) - now, 1)
    return None


def _total(environment: Mapping[str, str]) -> float | None:
    """Return the length of the job's time limit in seconds, if Slurm reports its start and end."""
    words = [environment.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END")]
    if all(re.fullmatch(r"\d{1,12}", word) for word in words) and int(words[1]):
        return float(int(words[1]) - int(words[0]))
    return None


def _libraries(environment: Mapping[str, str]) -> tuple[tuple[str, ...], bool]:
    """Return NCCL's plugins on the loader's path, and whether libibverbs was found."""
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


SHORT_S, LONG_S = 1.0, 3.5
NAMES_SHORT_S, NAMES_LONG_S = 0.8, 3.0
NVIDIA_SMI_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """The versions that the job's interpreter would import, found without importing them.

    Attributes:
        torch: Version, as `2.13.0+cu126`; None if torch is not installed.
        cuda: The CUDA version that torch was built for; None for a build without CUDA; `hip` for
            AMD.
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
    network: NetworkSystemFacts | None = None
    files: FileFacts | None = None
    gpu: GpuFacts | None = None
    environment: EnvironmentFacts | None = None
    unknown: dict[str, str] = field(default_factory=dict)


def collect(order: FactsRequest, ask: Ask | None = None) -> CollectedFacts:
    """Return the facts about this node that are known within 1 s, or 3.5 s in the long form."""
    names = order.names if order.is_long else ()
    names_s = NAMES_LONG_S if order.is_long else NAMES_SHORT_S
    parts: dict[str, Callable[[], Any]] = {
        "system": lambda: collect_system(is_long=order.is_long),
        "network": lambda: collect_network(names, names_s),
        "files": lambda: collect_files(order),
        "gpu": lambda: collect_gpus(
            order.environment, ask or proc.ask_spared, NVIDIA_SMI_S, is_long=order.is_long
        ),
        "environment": lambda: collect_environment(order.environment),
    }
    found, unknown = run_probes(parts, LONG_S if order.is_long else SHORT_S)
    return CollectedFacts(unknown=unknown, **found)


def own_torch() -> TorchFacts:
    """Return the versions that this interpreter would import."""
    from torchmuster.core.model.plan import look_for_torch

    return torch_facts(look_for_torch())


def torch_facts(found: Mapping[str, Any]) -> TorchFacts:
    """Return facts from a spawner's report before it imports torch; ignore what is not text."""

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
