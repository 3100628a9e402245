"""The rendezvous of a torchrun command line, and the world of a pod that another tool has made.

The rendezvous is the endpoint, backend, id, time limits and `--rdzv-conf`. The world is the number
of nodes, the own rank, the head's address: what the command line and torchrun's PET_* variables
leave open is read from the variables that the pod's maker has set. Kubeflow's Trainer sets only
PET_*. Nothing here asks the API server, so pods need no rights.

Sources: torch/distributed/run.py, `run`, and elastic/rendezvous/utils.py (2.13);
kubeflow/training-operator pkg/controller.v1/pytorch/{envvar,elastic}.go (PyTorchJob: with
a Master MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK of pods; PET_NNODES and PET_NODE_RANK in
later versions); volcano-sh/volcano
pkg/controllers/job/plugins/{env,svc,distributed-framework/pytorch}; kubernetes.io, "Job"
(JOB_COMPLETION_INDEX, host name JOB-INDEX); kubernetes-sigs/jobset sets labels only: JOBSET_NAME,
REPLICATED_JOB_NAME, REPLICATED_JOB_REPLICAS and JOB_INDEX are the names that its users give them in
the pod.
"""

import argparse
import re
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster.core.spec.problems import Problems, parse_seconds

DEFAULT_STATIC_PORT = 29500
DEFAULT_C10D_PORT = 29400
NO_ID = "none"  # torchrun's name for a job without `--rdzv-id`
_CONF_KEYS = frozenset(
    {"join_timeout", "last_call_timeout", "timeout", "rank", "is_host", "secret_file"}
)
_CONF_WITHOUT_EFFECT = frozenset(
    {
        *("close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"),
        *("read_timeout", "store_type", "use_libuv", "use_agent_store"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The rendezvous that a command line asks for.

    Attributes:
        port: The port; 0 lets the kernel choose.
        alone: Whether no other node has to find this one: then it has a free port and its own key.
        static: Whether --node-rank gives the places.
    """

    host: str
    port: int
    alone: bool
    static: bool
    rdzv_id: str


def find_rendezvous(
    given: argparse.Namespace, max_nodes: int, problems: Problems, *, knows_head: bool = False
) -> Rendezvous | None:
    """Return the rendezvous; None if it is invalid, with the reasons in `problems`.

    With `knows_head`, the caller knows the head anyway, so an endpoint may lack its host.
    """
    fresh_id = str(uuid.uuid4())
    if given.standalone or _is_plain(given, max_nodes):
        return Rendezvous(host="localhost", port=0, alone=True, static=False, rdzv_id=fresh_id)
    static = given.rdzv_backend == "static"
    if not static and not given.rdzv_endpoint.strip() and max_nodes == 1:
        # torchrun uses localhost:29400 here, where two jobs on one machine would collide.
        return Rendezvous(host="localhost", port=0, alone=True, static=False, rdzv_id=given.rdzv_id)
    found = _parse_endpoint(given, static, problems, knows_head=knows_head)
    if found is None:
        return None
    return Rendezvous(
        host=found[0], port=found[1], alone=False, static=static, rdzv_id=given.rdzv_id
    )


def _is_plain(given: argparse.Namespace, max_nodes: int) -> bool:
    """Return whether the command line neither has nor needs a rendezvous."""
    unnamed = not given.rdzv_endpoint.strip() and given.master_port is None
    return given.rdzv_backend == "static" and unnamed and max_nodes == 1


def _parse_endpoint(
    given: argparse.Namespace, static: bool, problems: Problems, *, knows_head: bool
) -> tuple[str, int] | None:
    text, option = given.rdzv_endpoint.strip(), "--rdzv-endpoint"
    if text.startswith(":") and text[1:].isdecimal() and knows_head:
        text = f"localhost{text}"
    if static and not text:
        host = given.master_addr.strip("[]")
        host = f"[{host}]" if ":" in host else host
        port = DEFAULT_STATIC_PORT if given.master_port is None else given.master_port
        text, option = f"{host}:{port}", "--master-addr, --master-port"
    default = DEFAULT_STATIC_PORT if static else DEFAULT_C10D_PORT
    match = re.fullmatch(r"(\[[^\]]+\]|[^:]+|[0-9a-fA-F:]+)(?::(\d+))?", text or "localhost")
    address = match.group(1).strip("[]") if match else ""
    if match is None or int(match.group(2) or 0) > 65535 or not _is_host(address):
        fix = "--rdzv-endpoint HOST:PORT"
        if option != "--rdzv-endpoint":
            fix = f"--master-addr HOST --master-port {DEFAULT_STATIC_PORT}"
        problems.add(f"`{text}` is not a valid HOST:PORT", option, fix=fix)
        return None
    return address, int(match.group(2) or default)


def _is_host(text: str) -> bool:
    try:
        if ":" in text:
            socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
        else:
            text.encode("idna")  # as the resolver does first
    except (OSError, UnicodeError):
        return False
    return True


def parse_conf(text: str, problems: Problems) -> dict[str, str]:
    """Parse the keys and values of `--rdzv-conf`, without quotes around the whole text."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    conf: dict[str, str] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            fix = "--rdzv-conf join_timeout=600,last_call_timeout=30"
            problems.add(f"`{part}` is not KEY=VALUE", f"--rdzv-conf {text}", fix=fix)
        else:
            conf[key.strip()] = value.strip()
    return conf


def parse_waits(
    conf: Mapping[str, str], static: bool, problems: Problems
) -> tuple[float, float] | None:
    """Return how long a node waits for the minimum number of nodes, and then for more, in seconds.

    As in torchrun, the key `timeout` is valid only in the static rendezvous.
    """
    join = conf.get("join_timeout") or (static and conf.get("timeout")) or (900 if static else 600)
    words = {
        "--rdzv-conf join_timeout": str(join),
        "--rdzv-conf last_call_timeout": conf.get("last_call_timeout") or "30",
    }
    seconds = [parse_seconds(word) for word in words.values()]
    for (option, word), value in zip(words.items(), seconds, strict=True):
        if value is None:
            what = f"`{word}` is not a valid number of seconds"
            problems.add(what, option, fix=f"{option}=30")
    join_s, last_call_s = seconds
    return None if join_s is None or last_call_s is None else (join_s, last_call_s)


def notes_on(conf: Mapping[str, str], static: bool) -> list[str]:
    """Return sentences about keys of `--rdzv-conf` that have no effect."""
    notes: list[str] = []
    for key in conf:
        if key in _CONF_WITHOUT_EFFECT:
            notes.append(f"--rdzv-conf {key} has no effect here")
        elif key == "timeout" and not static:
            notes.append("--rdzv-conf timeout has no effect with c10d, as in torchrun")
        elif key not in _CONF_KEYS:
            notes.append(f"--rdzv-conf {key} is unknown and has no effect, as in torchrun")
    return notes


# Options about the world.
PARTS = ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_backend")
_OF_WORKERS = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "GROUP_RANK")
_ALONE = {
    "nnodes": "1",
    "node_rank": "0",
    "master_addr": "127.0.0.1",
    "master_port": None,
    "rdzv_endpoint": "",
}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodWorld:
    """What a pod's environment says about its world; each part with its source, or None.

    Attributes:
        kind: What made the pod.
        node_rank: The rank among the pods of its own Job.
        job: The index of that Job, and how many Jobs share the nodes evenly.
        why_no_head: Why the head's name is not known.
        why_no_rank: Why the node rank is not known.
    """

    kind: str
    num_nodes: tuple[str, str] | None = None
    node_rank: tuple[str, str] | None = None
    head: tuple[str, str] | None = None
    port: str | None = None
    job: tuple[int, int] = (0, 1)
    why_no_head: str = ""
    why_no_rank: str = ""


def settle_world(
    given: argparse.Namespace,
    given_by: Mapping[str, str],
    world: PodWorld | None,
    problems: Problems,
) -> tuple[argparse.Namespace, list[str]]:
    """Add the pod's world to the line; return it and notes. Missing parts make one problem.

    `given_by` maps each of `PARTS` that the user or PET_* has given to its option or variable.
    """
    if given.standalone or (_is_one(given.nnodes) and given_by.get("nnodes") == "--nnodes"):
        return _without_variables(given, given_by), []
    settled, sources = argparse.Namespace(**vars(given)), dict(given_by)
    if world is not None and world.num_nodes is not None and "nnodes" not in given_by:
        settled.nnodes, sources["nnodes"] = world.num_nodes
    if _is_one(settled.nnodes):
        return given, _note_on_one(given_by, world)
    if world is not None:
        missing = _add_head(settled, sources, world) + _add_rank(settled, sources, world)
        if missing:
            _refuse(settled, world, missing, problems)
    return settled, _note(settled, sources)


def _without_variables(
    given: argparse.Namespace, given_by: Mapping[str, str]
) -> argparse.Namespace:
    """Return the line for a single node, without the PET_* variables about the pod's world."""
    alone = {
        name: value for name, value in _ALONE.items() if not given_by.get(name, "").startswith("--")
    }
    return argparse.Namespace(**{**vars(given), **alone})


def find_pod_world(environment: Mapping[str, str], hosts: str) -> PodWorld | None:
    """Return the world that this pod's variables describe; None if none do, and in a worker.

    `hosts` is the text of /etc/hosts, where the kubelet writes the pod's full name.
    """
    if "KUBERNETES_SERVICE_HOST" not in environment:
        return None
    if any(name in environment for name in _OF_WORKERS):
        return None  # a worker's MASTER_ADDR and RANK describe the run's own world
    for find in (_ranked, _volcano, _indexed):
        found = find(environment, hosts)
        if found is not None:
            return found
    return None


def _ranked(environment: Mapping[str, str], _: str) -> PodWorld | None:
    """Return the world of a PyTorchJob or Volcano's `pytorch`, which count pods as processes."""
    size, rank = environment.get("WORLD_SIZE", ""), environment.get("RANK", "")
    head = _master(environment)
    if head is None or not (size.isdecimal() and rank.isdecimal()):
        return None
    own = environment.get("HOSTNAME", "")
    if head[0] in _LOOPBACK and rank == "0" and own:
        # Older operators set a loopback address in the first pod; the others need its name.
        head = own, "HOSTNAME"
    return PodWorld(
        kind="a job with MASTER_ADDR, WORLD_SIZE and RANK, as of PyTorchJob",
        num_nodes=(size, "WORLD_SIZE"),
        node_rank=(rank, "RANK"),
        head=head,
        port=environment.get("MASTER_PORT"),
    )


def _volcano(environment: Mapping[str, str], _: str) -> PodWorld | None:
    """Return a Volcano Job's world: the hosts of its only task, or of `master`, then `worker`."""
    index = environment.get("VC_TASK_INDEX") or environment.get("VK_TASK_INDEX")
    kind, head, port = "a Job of Volcano", _master(environment), environment.get("MASTER_PORT")
    tasks = {
        match.group(1): value.split(",")
        for name, value in environment.items()
        if (match := re.fullmatch(r"VC_(\w+)_HOSTS", name)) and value
    }
    if index is None and not tasks:
        return None
    if len(tasks) != 1 and set(tasks) != {"MASTER", "WORKER"}:
        listed = ", ".join(task.lower() for task in sorted(tasks))
        why = f"its tasks are {listed}: which of them train together is not said"
        if not tasks:
            why = "no VC_<TASK>_HOSTS is set: its plug-in `svc` sets them"
        rank = None if tasks or index is None else (index, "VC_TASK_INDEX")
        return PodWorld(
            kind=kind, node_rank=rank, head=head, port=port, why_no_head=why, why_no_rank=why
        )
    names = [host for task in sorted(tasks) for host in tasks[task]]
    source = " and ".join(f"VC_{task}_HOSTS" for task in sorted(tasks))
    own = environment.get("HOSTNAME", "")
    places = [n for n, name in enumerate(names) if name.partition(".")[0] == own]
    rank = (str(places[0]), source) if places else None
    if rank is None and index is not None and len(tasks) == 1:
        rank = (index, "VC_TASK_INDEX")  # with host networking HOSTNAME is the node's name
    return PodWorld(
        kind=kind,
        num_nodes=(str(len(names)), source),
        node_rank=rank,
        head=head or (names[0], source),
        port=port,
        why_no_rank=f"`{own}` is not among the names of {source}",
    )


def _indexed(environment: Mapping[str, str], hosts: str) -> PodWorld | None:
    """Return the world of an Indexed Job, alone or in a JobSet: head is pod 0, size unknown."""
    index = environment.get("JOB_COMPLETION_INDEX", "")
    if not index.isdecimal():
        return None
    job_index = environment.get("JOB_INDEX", "")
    in_set = "JOBSET_NAME" in environment and job_index.isdecimal()
    head, why_no_head = _first_pod(environment, in_set, hosts)
    jobs = environment.get("REPLICATED_JOB_REPLICAS", "1" if job_index == "0" else "")
    is_known = not in_set or (jobs.isdecimal() and int(jobs) > int(job_index))
    return PodWorld(
        kind="a JobSet" if in_set else "an Indexed Job",
        node_rank=(index, "JOB_COMPLETION_INDEX") if is_known else None,
        head=_master(environment) or head,
        port=environment.get("MASTER_PORT"),
        job=(int(job_index), int(jobs)) if in_set and is_known else (0, 1),
        why_no_head=why_no_head,
        why_no_rank=f"JOB_INDEX is {job_index}; how many Jobs share the nodes REPLICATED_JOB_REPLICAS could say",
    )


def _first_pod(
    environment: Mapping[str, str], in_set: bool, hosts: str
) -> tuple[tuple[str, str] | None, str]:
    """Return the full name of pod 0 and its source, or why it is not known."""
    own = environment.get("HOSTNAME", "")
    stem, _, last = own.rpartition("-")
    if last != environment["JOB_COMPLETION_INDEX"]:
        return None, f"the pod has the name of its node, `{own}`, as with `hostNetwork`"
    subdomain = _subdomain(own, hosts)
    if subdomain is None:
        why = "its pods have no names that can be looked up: the pod template has no `subdomain`"
        return None, why
    first = f"{stem.rpartition('-')[0]}-0-0" if in_set else f"{stem}-0"
    return (f"{first}.{subdomain}", "this pod's name"), ""


def _master(environment: Mapping[str, str]) -> tuple[str, str] | None:
    host = environment.get("MASTER_ADDR")
    return (host, "MASTER_ADDR") if host else None


def _subdomain(own: str, hosts: str) -> str | None:
    """Return the part after the pod's own name in its full name; None if there is none."""
    for line in hosts.splitlines():
        words = line.partition("#")[0].split()[1:]
        if own in words:
            full = next((word for word in words if word.startswith(f"{own}.")), "")
            return full.partition(".")[2] or None
    return None


def _is_one(nnodes: str) -> bool:
    return nnodes.rpartition(":")[2] == "1"


def _add_head(settled: argparse.Namespace, sources: dict[str, str], world: PodWorld) -> list[str]:
    """Set the head's address; return what is missing."""
    if "rdzv_endpoint" in sources or "master_addr" in sources:
        return []
    if world.head is None:
        return ["where the head is"]
    host, source = world.head
    port = settled.master_port if "master_port" in sources else world.port
    if settled.rdzv_backend == "static":
        settled.master_addr, settled.master_port = host, port or str(DEFAULT_STATIC_PORT)
    else:
        name = f"[{host}]" if ":" in host else host
        settled.rdzv_endpoint = f"{name}:{port or DEFAULT_C10D_PORT}"
    sources["head"] = source
    return []


def _add_rank(settled: argparse.Namespace, sources: dict[str, str], world: PodWorld) -> list[str]:
    """Set the node rank for a static rendezvous; return what is missing."""
    if settled.rdzv_backend != "static" or "node_rank" in sources:
        return []
    if world.node_rank is None:
        return ["which node it is itself"]
    text, sources["node_rank"] = world.node_rank
    job, num_jobs = world.job
    _, _, most = settled.nnodes.rpartition(":")
    before = job * (int(most) // num_jobs) if job and most.isdecimal() else 0
    settled.node_rank = str(int(text) + before)
    if before:
        sources["node_rank"] = f"JOB_INDEX and {sources['node_rank']}"
    return []


def _refuse(
    settled: argparse.Namespace, world: PodWorld, missing: Sequence[str], problems: Problems
) -> None:
    static = settled.rdzv_backend == "static"
    whys, flags = [], []
    if "where the head is" in missing:
        whys.append(world.why_no_head)
        flags.append("--master-addr HOST" if static else "--rdzv-endpoint HOST:PORT")
    if "which node it is itself" in missing:
        whys.append(world.why_no_rank)
        flags.append("--node-rank N")
    problems.add(
        f"this pod of {world.kind} does not say {' and '.join(missing)}",
        f"--nnodes {settled.nnodes}",
        "; ".join(dict.fromkeys(why for why in whys if why)),
        f"add {' '.join(flags)}",
    )


def _note_on_one(given_by: Mapping[str, str], world: PodWorld | None) -> list[str]:
    """Note that a Job's index alone makes no world, unless the number of nodes was given."""
    if (
        world is None
        or world.num_nodes is not None
        or "nnodes" in given_by
        or world.node_rank is None
    ):
        return []
    what = f"one node, as in torchrun: this is a pod of {world.kind}"
    return [f"{what}; --nnodes N (or PET_NNODES) lets N pods train together"]


def _note(settled: argparse.Namespace, sources: Mapping[str, str]) -> list[str]:
    """Return a line about the world, unless the command line or the defaults give all of it."""
    static = settled.rdzv_backend == "static"
    head = next(
        (sources[name] for name in ("rdzv_endpoint", "master_addr", "head") if name in sources),
        "the default",
    )
    parts = {"nodes": sources.get("nnodes", "the default"), "head": head}
    if static:
        parts["node rank"] = sources.get("node_rank", "the default")
    if all(source.startswith(("--", "the default")) for source in parts.values()):
        return []
    where = settled.rdzv_endpoint
    if static and not where:
        port = settled.master_port or DEFAULT_STATIC_PORT
        where = f"{settled.master_addr}:{port}"
    first = f"node {settled.node_rank} of {settled.nnodes}" if static else f"{settled.nnodes} nodes"
    said = "; ".join(f"{part} from {source}" for part, source in parts.items())
    return [f"{first}, head at {where} ({said})"]
