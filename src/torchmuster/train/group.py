"""The process group: created under any launcher, checked, and destroyed however the script ends.

The check gathers a few bytes of each rank: it proves that the group works, counts the ranks on each
node and finds two ranks on one GPU before the first step.
"""

import ctypes
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchmuster.core.model.contract import replay_order
from torchmuster.core.model.text import render_report, report_of_error
from torchmuster.core.net.address import interface_of
from torchmuster.errors import MusterError, UsageError
from torchmuster.train.exchange import gather_json
from torchmuster.train.launch import Launch, Launcher, read_launch, torchrun_variables

# Some sites forbid a zero time-out, and torch's default is 10 or 30 minutes; this is long enough to
# compile in.
DEFAULT_TIMEOUT_S = 600.0
_WAIT_IS_SAID_S = 10.0


class WorldError(MusterError):
    """The world differs from what the launcher announced."""

    exit_code = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one rank reports to all others."""

    rank: int
    host: str
    gpu: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The position of this rank in the world.

    Attributes:
        shares_gpus: Several ranks may use one GPU, so Gloo does the collectives.
        connect: Opens another connection to the group's store.
    """

    launch: Launch
    device: torch.device
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    interface: str | None
    shares_gpus: bool
    connect: Callable[[], Any]
    timeout_s: float


def join(
    *, timeout_s: float = DEFAULT_TIMEOUT_S, device: str | None = None, share_gpus: bool = False
) -> RankInfo:
    """Join the process group that the launcher announced, and check it.

    Args:
        timeout_s: Limit for a collective and for the wait for a rank, in seconds.
        device: `cpu` or `cuda`; default: CUDA where torch sees a GPU.
        share_gpus: Several ranks may use one GPU.

    Raises:
        UsageError: The environment contradicts itself.
        WorldError: Ranks are missing, or two of them share a GPU.
    """
    if timeout_s == DEFAULT_TIMEOUT_S:  # a debugger has raised torch's own timeout
        timeout_s = max(timeout_s, torch_timeout_s())
    launch = read_launch(os.environ, _node_file())
    if launch.launcher is not Launcher.NONE:  # a child process of ours is not a rank of this world
        for name, value in torchrun_variables(launch).items():
            os.environ.setdefault(name, value)
    interface = _choose_interface(launch)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    order = replay_order(os.environ)
    # A replay may run on fewer GPUs than ranks, where NCCL would refuse.
    shares = share_gpus or (order is not None and order.shares_gpus)
    chosen = _choose_device(kind, launch, shares=shares)
    connect = _open_group(
        launch, "cpu:gloo,cuda:nccl" if kind == "cuda" and not shares else "gloo", timeout_s
    )
    cards = _call_roll(chosen)
    hosts = list(dict.fromkeys(card.host for card in cards))
    on_my_node = [card.rank for card in cards if card.host == cards[launch.rank].host]
    _check_roll(launch, cards, on_my_node, shares=shares)
    return RankInfo(
        launch=launch,
        device=chosen,
        local_rank=_first_known(launch.local_rank, on_my_node.index(launch.rank)),
        local_world_size=_first_known(launch.local_world_size, len(on_my_node)),
        node_rank=_first_known(launch.node_rank, hosts.index(cards[launch.rank].host)),
        num_nodes=_first_known(launch.num_nodes, len(hosts)),
        interface=interface,
        shares_gpus=shares,
        connect=connect,
        timeout_s=timeout_s,
    )


def leave(*, is_clean: bool) -> None:
    """Destroy the process group.

    Gloo's group is never freed: in torch 2.13 its destructor joins a thread that may be waiting for
    the interpreter's lock, and a DDP model that outlives the group makes the process hang there.
    """
    if not dist.is_initialized():
        return
    group = dist.group.WORLD
    backends = str(dist.get_backend_config()) if hasattr(dist, "get_backend_config") else ""
    if "nccl" not in backends:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    if is_clean or "nccl" not in backends:
        dist.destroy_process_group()
    # With an exception under way, NCCL's destruction would wait for collectives that the other
    # ranks never join; the end of the process frees the communicator.


def print_own_errors_in_words(on_failure: Callable[[], None]) -> None:
    """Print our own errors without a traceback; call `on_failure` after any uncaught exception.

    After that, NCCL's group must not be destroyed as usual: it would wait for the other ranks.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        on_failure()
        order = replay_order(os.environ)
        if not isinstance(error, MusterError):
            previous(kind, error, trace)
        # Of a replay the rank that the user inspects reports it.
        elif order is None or os.environ.get("RANK") == str(order.rank):
            print(_in_words(error, trace), file=sys.stderr, end="", flush=True)

    sys.excepthook = hook


def _in_words(error: MusterError, trace: TracebackType | None) -> str:
    """Return the report on an error, with the script's line that led to it."""
    ours = os.path.dirname(os.path.dirname(__file__))
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(trace)]
    others = [(name, line) for name, line in frames if not name.startswith((ours, "<"))]
    script = [frame for frame in others if "/site-packages/" not in frame[0]] or others
    report = report_of_error(error)
    if script:
        line = f"{script[-1][0]}:{script[-1][1]}"
        report = replace(report, at=f"{line}, {report.at}" if report.at else line)
    return render_report(report)


def _first_known(promised: int | None, found: int) -> int:
    return found if promised is None else promised


def _node_file() -> list[str]:
    try:
        with open(os.environ.get("PBS_NODEFILE", "")) as file:
            return file.read().splitlines()
    except OSError:
        return []


def _choose_interface(launch: Launch) -> str | None:
    """Make Gloo and NCCL use the interface with the route to rank 0."""
    if launch.world_size == 1 or launch.master_addr is None:
        address = "127.0.0.1"
    else:
        address = _own_address_towards(launch.master_addr, launch.master_port or 1)
    interface = interface_of(address)
    if interface is None:
        return None
    if interface != "lo":  # NCCL refuses that with several nodes; without `=` it takes a prefix
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    return os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _own_address_towards(host: str, port: int) -> str:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise WorldError(  # name servers recover, so this is not final
            f"the name of rank 0's host can't be resolved: {host}",
            where=f"MASTER_ADDR={host}",
            why=str(error),
            fix="set MASTER_ADDR to an address that this node can reach",
        ) from error
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:  # sends nothing, only finds the route
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def _choose_device(kind: str, launch: Launch, *, shares: bool) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    local_rank = launch.local_rank or 0
    if shares and num_gpus:
        local_rank %= num_gpus
    if local_rank >= num_gpus > 1:
        raise WorldError(
            f"local rank {local_rank} has no GPU: this node shows {num_gpus}",
            where=f"rank {launch.rank} on {socket.gethostname()}",
            why=f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')}",
            fix=f"start {num_gpus} workers on this node; tm.init(share_gpus=True) lets ranks share a GPU",
        )
    # Several workers may each see one GPU, if the scheduler gave each its own.
    device = torch.device("cuda", local_rank if num_gpus > 1 else 0)
    torch.cuda.set_device(device)
    return device


def _open_group(launch: Launch, backend: str, timeout_s: float) -> Callable[[], Any]:
    """Create the process group; return a function that opens another connection to its store."""
    timeout = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        raise UsageError(
            "the process group exists already",
            fix="remove the script's own init_process_group: tm.init() calls it",
        )
    if launch.world_size == 1:  # a sweep member has no store, and its MASTER_PORT is 0
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return lambda: store
    where = f"{launch.master_addr}:{launch.master_port}"
    text = f"muster: rank {launch.rank} of {launch.world_size} waits for the others at {where}"
    if launch.launcher is Launcher.TORCHRUN and not launch.run_id:
        text += "; where no launcher has started it: unset RANK WORLD_SIZE"
    waits = threading.Timer(_WAIT_IS_SAID_S, print, (text,), {"file": sys.stderr, "flush": True})
    waits.daemon = True
    if launch.launcher is not Launcher.MUSTER:  # muster's own views name missing ranks
        waits.start()
    try:
        dist.init_process_group(
            backend,
            init_method="env://",
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"the process group of {launch.world_size} workers could not be made",
            where=f"rank {launch.rank}, store at {where}",
            why=first_line(error),
            fix="check that all workers run and that MASTER_PORT is free on rank 0's host",
        ) from error
    finally:
        waits.cancel()
    return lambda: dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timeout,
    )


def _call_roll(device: torch.device) -> list[RankFacts]:
    gpu = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = str(getattr(properties, "uuid", "")) or None
    # Simulated nodes on one machine differ in their agents.
    host = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"[:120]
    cards = enumerate(gather_json([host, gpu]))
    return [RankFacts(rank=rank, host=host, gpu=gpu) for rank, (host, gpu) in cards]


def _check_roll(
    launch: Launch, cards: list[RankFacts], on_my_node: list[int], *, shares: bool
) -> None:
    promised = launch.local_world_size
    if promised is not None and promised != len(on_my_node):
        raise WorldError(
            f"{launch.launcher.value} promised {promised} workers on this node,"
            f" {len(on_my_node)} came: ranks {on_my_node}",
            where=f"rank {launch.rank} on {socket.gethostname()}",
            fix="check that only the launcher sets LOCAL_WORLD_SIZE and the node's rank",
        )
    owners: dict[tuple[str, str], int] = {}
    for card in cards:
        if card.gpu is None or shares:
            continue
        host = card.host.rsplit("/", 1)[0]
        other = owners.setdefault((host, card.gpu), card.rank)
        if other != card.rank:
            raise WorldError(
                f"ranks {other} and {card.rank} share one GPU",
                where=f"{host}, GPU {card.gpu}",
                why="both see the same device as their own",
                fix="start one worker per GPU, e.g. muster run --nproc-per-node gpu; tm.init(share_gpus=True) lets ranks share one",
            )


def torch_timeout_s() -> float:
    """Return torch's limit for a Gloo collective in seconds, if raised to a day or more; else 0."""
    default: Any = getattr(distributed_c10d, "default_pg_timeout", None)
    is_long = isinstance(default, timedelta) and default >= timedelta(days=1)
    return float(default.total_seconds()) if is_long else 0.0


def first_line(error: BaseException) -> str:
    """Return the first line of an error from torch, without the C++ trace after it."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
