"""Check the options of `muster run` together, and report every problem rather than the first."""

import contextlib
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchmuster.core import plugs
from torchmuster.core.model import contract, plan
from torchmuster.core.model.text import nearest
from torchmuster.core.plainfile import open_plain
from torchmuster.core.spec.problems import (
    Problems,
    duration_fix,
    near_file,
    parse_set_env,
    parse_size,
    parse_timeout,
)
from torchmuster.errors import UsageError

_MOST_READ_BYTES = 1 << 20
_ONLY_PYTHONS = frozenset({"-u", "-O", "-OO", "-B", "-E", "-s", "-I"})  # options without a value
_READS_RANK = re.compile(
    r"""["'](?:LOCAL_)?RANK["']|["']WORLD_SIZE["']|torchelastic|env://|TORCHELASTIC"""
)
_OF_EACH_WORKER = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"})
_MAX_NODES = 65536
_MAX_WORKERS = 4096
_MOST_SIMULATED, _SIMULATED_PER_CPU = 64, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A request for a run: text where it may be invalid, None for an option that was not given.

    Attributes:
        engine: The argument of `--on`; None until it is chosen.
        warn: How long before the end of the job to warn the workers.
        call: For `torchmuster.launch`, the call file; the script is then the function's name.
        launched: This process was started to own the run in the background.
        inline: This process runs the script itself.
    """

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    nodes: str | None = None
    nproc_per_node: str | None = None
    max_restarts: int = plan.MAX_RESTARTS
    grace: str | None = None
    join_timeout: str | None = None
    last_call: str | None = None
    grow: bool = False
    start: str = "auto"
    preload: tuple[str, ...] = ()
    tee: str = "0"
    stdin_rank: int | None = None
    python: str | None = None
    stage: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    set_env: tuple[str, ...] = ()
    hang_timeout: str | None = None
    debug: bool = False
    debugpy: int | None = None
    pdb: bool = False
    ship_env: str | None = None
    cwd: str = field(default_factory=os.getcwd)
    preflight: str = "short"
    preflight_script: str | None = None
    restart_policy: str = "evidence"
    name: str | None = None
    run_id: str | None = None
    engine: str | None = None
    here: bool = False
    hosts: str | None = None
    hostfile: str | None = None
    detach: bool = False
    dry_run: bool = False
    time_limit: str | None = None
    queue: str | None = None
    account: str | None = None
    cpus_per_node: int | None = None
    gpus_per_node: int | None = None
    mem: str | None = None
    take_within: str | None = None
    warn: str | None = None
    resubmit: int | None = None
    spares: int = 0
    verify_every: int | None = None
    metrics_port: int | None = None
    call: plan.FunctionCall | None = None
    launched: bool = False
    session: str | None = None
    inline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """Durations and sizes of a request's job; None where not given."""

    time_limit_s: float | None = None
    warn_s: float | None = None
    memory_bytes: int | None = None


_LEAST_BARE_S = 60.0  # less was meant as minutes or hours: that is how schedulers read it


def read_job_limits(request: RunRequest, problems: Problems) -> JobLimits:
    """Return the job's durations and sizes as numbers; add problems to `problems`."""
    limit_s = warn_s = memory_bytes = None
    if request.time_limit is not None:
        limit_s = parse_timeout(request.time_limit)
        if not limit_s:
            fix = duration_fix("--time", request.time_limit, "2h, 90m, 1:30:00 or 1-12:00:00")
            problems.add(f"`{request.time_limit}` is not a valid duration", "--time", fix=fix)
        elif request.time_limit.isdecimal() and limit_s < _LEAST_BARE_S:
            what = f"`--time {request.time_limit}` is {limit_s:g} s"
            fix = f"--time {request.time_limit}m, or {request.time_limit}s"
            problems.add(what, "--time", "a bare number is in seconds", fix)
    if request.warn is not None:
        warn_s = parse_timeout(request.warn)
        if warn_s is None:
            fix = duration_fix("--warn", request.warn, f"{plan.WARN_S:g}s")
            problems.add(f"`{request.warn}` is not a valid duration", "--warn", fix=fix)
        elif limit_s and warn_s >= limit_s:
            what = "the warning would come before the job begins"
            where = f"--warn {request.warn} --time {request.time_limit}"
            problems.add(what, where, fix="a shorter --warn")
    if request.mem is not None:
        memory_bytes = parse_size(request.mem)
        if not memory_bytes:
            problems.add(f"`{request.mem}` is not a valid size", "--mem", fix="--mem 64Gi")
    return JobLimits(time_limit_s=limit_s, warn_s=warn_s, memory_bytes=memory_bytes)


def plan_run(
    options: RunRequest,
    run_id: str,
    gpus: Sequence[str],
    problems: Problems,
    *,
    simulated: bool = True,
) -> plan.RunPlan | None:
    """Return the plan of a run; None if there are problems.

    Args:
        options: The request.
        run_id: Id of the run.
        gpus: GPUs of this machine, shared by simulated nodes; else those of each node.
        problems: Collects problems.
        simulated: All nodes are simulated on this machine.
    """
    nodes = parse_nodes(options.nodes or "1", "--nodes", problems)
    workers = count_workers(
        options.nproc_per_node, nodes, gpus, problems, simulated=simulated, spares=options.spares
    )
    if options.spares and nodes is not None and nodes[0] < nodes[1]:
        what = "--spares needs a fixed number of nodes"
        why = "a run with a range takes every node that comes"
        fix = f"--nodes {nodes[0]} --spares {nodes[1] - nodes[0]}"
        problems.add(what, f"--nodes {options.nodes}", why, fix)
    program = _program(options, problems)
    limits = _limits(options, problems)
    setup = _node_setup(options, problems)
    if nodes is not None and workers is not None:
        per_node = workers if len(workers) > 1 else workers * nodes[1]
        for option, rank in (("--stdin", options.stdin_rank), ("--debugpy", options.debugpy)):
            if rank is not None and not 0 <= rank < sum(per_node):
                what = f"there is no rank {rank} among {sum(per_node)} workers"
                problems.add(what, f"{option} {rank}", fix=f"{option} 0")
    if problems.found or nodes is None or workers is None or program is None or limits is None:
        return None
    minimum, maximum = nodes
    return plan.RunPlan(
        run_id=run_id,
        program=program,
        min_nodes=minimum,
        max_nodes=maximum,
        workers_per_node=workers,
        limits=limits,
        node_names=tuple(f"n{place + 1}" for place in range(maximum + options.spares)),
        grow=options.grow,
        tee=plan.Tee(options.tee),
        stdin_rank=options.stdin_rank,
        node_setup=setup,
        preflight=options.preflight,
        preflight_script=options.preflight_script,
        restart_policy=plan.RestartPolicy(options.restart_policy),
        metrics_port=options.metrics_port,
        spares=options.spares,
        head_parts=plugs.carried("head_parts"),
    )


def _node_setup(options: RunRequest, problems: Problems) -> plan.NodeSetup:
    environment = debug_environment(os.environ) if options.debug else ()
    if options.debugpy is not None:
        tool = f"{contract.DEBUGPY} {options.debugpy}"
        environment = (*environment, (contract.DEBUGGER_VARIABLE, tool))
    elif options.pdb:
        environment = (*environment, (contract.DEBUGGER_VARIABLE, contract.PDB))
    if options.verify_every is not None:
        environment = (*environment, (contract.VERIFY_VARIABLE, str(options.verify_every)))
    if options.set_env:
        given = parse_set_env(options.set_env, problems, "--env")
        for name in given.keys() & _OF_EACH_WORKER:
            fix = "--nodes and --nproc-per-node say how many workers there are"
            problems.add(f"muster sets `{name}` itself, in each worker", f"--env {name}", fix=fix)
        environment = (*environment, *given.items())
    if not options.stage and not options.before:
        return plan.NodeSetup(environment=environment)
    stages = parse_stages(options.stage, options.cwd, problems)
    before = parse_commands(options.before, problems)
    return plan.NodeSetup(environment=environment, stages=stages, before=before)


def debug_environment(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the NCCL and torch variables that `--debug` sets, except those set by the user.

    Source: docs.nvidia.com, NCCL environment variables; pytorch.org, distributed, "Debugging" and
    torch_environment.
    """
    wanted = (
        ("NCCL_DEBUG", "INFO"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
        ("TORCH_CPP_LOG_LEVEL", "INFO"),
        ("TORCH_SHOW_CPP_STACKTRACES", "1"),
        ("PYTHONFAULTHANDLER", "1"),
    )
    missing = tuple((name, value) for name, value in wanted if name not in environ)
    return (*missing, (contract.DEBUG_VARIABLE, "1"))


def parse_nodes(text: str, option: str, problems: Problems) -> tuple[int, int] | None:
    """Return (minimum, maximum) from `N` or `MIN:MAX`."""
    low, colon, high = text.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()):
        fix = f"{option} 2 or {option} 1:3"
        problems.add(f"`{text}` is not a valid number of nodes", option, fix=fix)
        return None
    minimum, maximum = int(low), int(high) if colon else int(low)
    if minimum < 1:
        problems.add("a run needs at least 1 node", f"{option} {text}", fix=f"{option} 1")
    elif minimum > maximum:
        fix = f"{option} {maximum}:{minimum}"
        what = f"`{text}` asks for at least {minimum} and at most {maximum} nodes"
        problems.add(what, f"{option} {text}", fix=fix)
    elif maximum > _MAX_NODES:
        problems.add(f"{maximum} nodes are more than {_MAX_NODES}", f"{option} {text}")
    else:
        return minimum, maximum
    return None


def parse_workers(text: str, gpus: Sequence[str], problems: Problems) -> tuple[int, ...] | None:
    """Return the numbers of workers from `4`, `4,2`, `gpu`, `cpu` or `auto`."""
    where = f"--nproc-per-node {text}"
    counts: list[int] = []
    for word in text.split(","):
        if word == "gpu" and not gpus:
            why = "neither /proc/driver/nvidia nor /dev/nvidia* lists a GPU"
            if "CUDA_VISIBLE_DEVICES" in os.environ:
                shown = os.environ["CUDA_VISIBLE_DEVICES"]
                why = f"CUDA_VISIBLE_DEVICES is {f'`{shown}`' if shown else 'empty'}"
            fix = "--nproc-per-node 1"
            what = "`gpu` asks for one worker on each GPU, but this machine has no visible GPU"
            problems.add(what, where, why, fix)
            return None
        if word in ("gpu", "auto", "cpu"):
            num_cpus = len(os.sched_getaffinity(0))
            counts.append(len(gpus) if gpus and word != "cpu" else num_cpus)
        elif word.isdecimal():
            counts.append(int(word))
        else:
            near = nearest(word, ["gpu", "cpu", "auto"])
            fix = f"--nproc-per-node {near}" if near else "--nproc-per-node 4 or 4,2"
            problems.add(f"`{word}` is not a valid number of workers", where, fix=fix)
            return None
    if min(counts) < 1:
        problems.add("a node needs at least 1 worker", where, fix="--nproc-per-node 1")
        return None
    if max(counts) > _MAX_WORKERS:
        problems.add(f"{max(counts)} workers on one node are more than {_MAX_WORKERS}", where)
        return None
    return tuple(counts)


def count_workers(
    text: str | None,
    nodes: tuple[int, int] | None,
    gpus: Sequence[str],
    problems: Problems,
    *,
    simulated: bool,
    spares: int = 0,
) -> tuple[int, ...] | None:
    """Return the workers of each node, by default one per GPU; arguments as in `plan_run`."""
    least, num_nodes = nodes or (1, 1)
    most = max(_MOST_SIMULATED, _SIMULATED_PER_CPU * len(os.sched_getaffinity(0)))
    if simulated and num_nodes + spares > most:
        what = f"{num_nodes + spares} simulated nodes are more than this machine can hold"
        why = f"each is an agent and a process with torch; here at most {most} are started"
        problems.add(what, f"--nodes {num_nodes}", why, "--hosts, or --on slurm, for real ones")
        return None
    if text is None:
        return (max(1, len(gpus) // (num_nodes + spares if simulated else 1)),)
    workers = parse_workers(text, gpus, problems)
    if workers is None or nodes is None:
        return workers
    if len(workers) > 1 and len(workers) != num_nodes:
        nodes_word = "nodes" if num_nodes > 1 else "node"
        what = f"there are {len(workers)} numbers of workers for {num_nodes} {nodes_word}"
        fix = f"--nodes {len(workers)}, or one number for all"
        problems.add(what, f"--nproc-per-node {text}", fix=fix)
        return None
    total = sum(workers) if len(workers) > 1 else workers[0] * num_nodes
    total += spares * workers[-1]
    if simulated and num_nodes + spares > 1 and gpus and total > len(gpus):
        asked = str(num_nodes) if least == num_nodes else f"{least}:{num_nodes}"
        problems.add(
            f"{num_nodes} simulated nodes ask for {total} GPUs, this machine has {len(gpus)}",
            f"--nodes {asked} --nproc-per-node {text}",
            "each worker of a simulated node gets a GPU of its own",
            "lower --nproc-per-node, or hide the GPUs: CUDA_VISIBLE_DEVICES= muster run ...",
        )
        return None
    return workers


def _program(options: RunRequest, problems: Problems) -> plan.Program | None:
    python = find_python(options.python, problems)
    if options.module:
        check_module(options.script, options.cwd, problems)
    elif options.call is None:
        check_script(options.script, options.cwd, problems, options.args)
    if python is None:
        return None
    kind = plan.ScriptKind.MODULE if options.module else plan.ScriptKind.FILE
    return plan.Program(
        kind=kind if options.call is None else plan.ScriptKind.FUNCTION,
        target=options.script,
        args=options.args,
        python=python,
        cwd=options.cwd,
        start=plan.StartMethod(options.start),
        preload=options.preload,
        call=options.call,
    )


def other_environment(environment: Mapping[str, str], option: str = "") -> str:
    """Return a note if muster's Python has no torch while another environment is active.

    `option` names the option that selects an interpreter, if the command has one.
    """
    import importlib.util

    active = environment.get("VIRTUAL_ENV") or environment.get("CONDA_PREFIX") or ""
    python = os.path.join(active, "bin", "python")
    if not active or os.path.realpath(active) == os.path.realpath(sys.prefix):
        return ""
    if not os.access(python, os.X_OK) or importlib.util.find_spec("torch") is not None:
        return ""
    said = f"muster's own Python runs the workers, {sys.executable}, and has no torch; the environment {active} is active"
    return f"{said}: {option} {python}" if option else said


def own_processes(script: str, *, refuses: bool = False) -> str:
    """Return a note if a script spawns its own training processes; else empty.

    Below a launcher their rendezvous waits for ever: torchrun and muster announce a store
    (TORCHELASTIC_USE_AGENT_STORE), but at the launcher's port, not at the script's. A script that
    reads a launcher's variables may handle that.

    Args:
        script: Its path.
        refuses: Raise an error if it reads no launcher variable, so is sure to wait.

    Raises:
        UsageError: It is sure to wait, and `refuses` is set.
    """
    try:
        with open(script, "rb") as file:
            text = file.read(_MOST_READ_BYTES).decode(errors="replace")
    except OSError:
        return ""
    spawn = re.search(r"^[^#\n]*\bspawn\(", text, re.MULTILINE)
    port = re.search(r"""^[^#\n]*environ\[["']MASTER_PORT["']\]\s*=""", text, re.MULTILINE)
    if spawn is None or port is None:
        return ""
    line = text.count("\n", 0, spawn.start()) + 1
    name = os.path.basename(script)
    if refuses and not _READS_RANK.search(text):
        raise UsageError(
            f"{name} starts the processes of its training itself",
            where=f"{script}:{line}",
            why="they wait for a store at its own MASTER_PORT that nobody serves below a launcher",
            fix=f"`python {name}` runs it as it is; for muster, in place of spawn: rank, world_size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])",
        )
    return (
        f"{name} starts processes of its own (spawn in line {line}), which wait for a store at its own MASTER_PORT that"
        f" nobody serves below a launcher: `python {name}` runs it as it is"
    )


def find_python(text: str | None, problems: Problems) -> tuple[str, ...] | None:
    """Return the interpreter and its flags; None with a problem."""
    if text is None:
        return (sys.executable,)
    try:
        words = shlex.split(text)
    except ValueError:  # an unclosed quotation mark
        words = []
    path = shutil.which(words[0]) if words else None
    if path is None:
        inside = os.path.join(words[0] if words else "", "bin", "python")
        is_folder = bool(words) and os.access(inside, os.X_OK)
        what = "is a folder" if is_folder else "does not exist or can't be executed"
        fix = f"--python {inside if is_folder else sys.executable}"
        problems.add(f"the interpreter {what}", f"--python {text}", fix=fix)
        return None
    return (os.path.abspath(path), *words[1:])


def check_script(
    target: str,
    cwd: str,
    problems: Problems,
    args: Sequence[str] = (),
    *,
    command: str = "muster run",
) -> None:
    """Refuse a script that is missing, unreadable, a folder or not Python; suggest a fix.

    Args:
        target: The script as typed.
        cwd: Folder to which it is relative.
        problems: Collects problems.
        args: The arguments after it.
        command: The command before it.
    """
    path = os.path.join(cwd, target)
    if target == "-":
        what = "a script can't come from standard input"
        why = "every worker on every node reads the script itself"
        problems.add(what, "-", why, "write it to a file first")
    elif os.path.isdir(path):
        inside = os.path.join(target, "__main__.py")
        fix = f"name the file: {inside}" if os.path.exists(os.path.join(cwd, inside)) else None
        problems.add("the script is a directory", target or cwd, fix=fix)
    elif not os.path.exists(path) and re.fullmatch(r"python[0-9.]*", target) and args:
        why = "muster starts Python itself, one for each worker"
        rest = shlex.join(itertools.dropwhile(_ONLY_PYTHONS.__contains__, args))
        problems.add("Python stands before the script", target, why, f"{command} {rest}")
    elif not os.path.exists(path) and os.path.isfile(os.path.join(cwd, target.partition(" ")[0])):
        why = "its name and its arguments stand in one pair of quotes"
        problems.add("the script does not exist", target, why, f"{command} {target}")
    elif not os.path.exists(path) and target in ("torchrun", "accelerate") and args:
        what, why = "another launcher stands before the script", "muster starts the workers itself"
        instead = f"muster torchrun {shlex.join(args)}"
        problems.add(what, target, why, instead if target == "torchrun" else f"{command} train.py")
    elif not os.path.exists(path):
        why = f"there is no file {os.path.normpath(path)}"
        problems.add("the script does not exist", target, why, near_file(target, cwd, (".py",)))
    elif not os.access(path, os.R_OK):
        problems.add("the script can't be read", target, fix=f"chmod u+r {target}")
    elif target.endswith(".ipynb"):
        fix = f"jupyter nbconvert --to script {target}; or torchmuster.launch in the notebook"
        problems.add("the script is a notebook", target, fix=fix)
    elif target.endswith((".yaml", ".yml")):
        fix = f"a workflow: muster submit {target}"
        problems.add("the script is a YAML file, not Python", target, fix=fix)
    elif shell := _shell_of(path):
        fix = f"name the Python script that it starts: {command} train.py"
        problems.add("the script is a shell script, not Python", target, shell, fix)


def _shell_of(path: str) -> str:
    """Return why a file looks like a shell script; empty if it doesn't."""
    first = ""
    # A pipe, such as `<(...)`, is left alone: what is read here is gone for the workers.
    with contextlib.suppress(OSError), open_plain(path) as file:
        first = file.readline(200).decode(errors="replace").strip()
    if re.match(r"#!.*\b(?:ba|da|z|k|c|tc|fi)?sh\b", first):
        return f"its first line is {first}"
    return "its name ends in .sh" if path.endswith((".sh", ".bash")) else ""


def check_module(target: str, cwd: str, problems: Problems, *, command: str = "muster run") -> None:
    """Refuse a file path in place of a module name."""
    if "/" in target or (target.endswith(".py") and os.path.isfile(os.path.join(cwd, target))):
        name = os.path.normpath(target).removesuffix(".py").strip("/").replace("/", ".")
        why = "-m takes the name of a module, with dots"
        problems.add("a path is no module", f"-m {target}", why, f"{command} -m {name}")


def _limits(options: RunRequest, problems: Problems) -> plan.Limits | None:
    durations: dict[str, float] = {}
    num_problems = len(problems.found)
    for name in ("grace", "join_timeout", "last_call"):
        text = getattr(options, name)
        if text is None:
            continue
        seconds = parse_timeout(text)
        option = "--" + name.replace("_", "-")
        if seconds is None:
            fix = f"{option} 30s, 10m or 1h"
            problems.add(f"`{text}` is not a valid duration", option, fix=fix)
        else:
            durations[f"{name}_s"] = seconds
    if options.max_restarts < 0:
        where = f"--max-restarts {options.max_restarts}"
        problems.add("a number of restarts can't be negative", where, fix="--max-restarts 0")
    watch = parse_hang_timeout(options.hang_timeout, problems)
    if len(problems.found) > num_problems or watch is None:
        return None
    return plan.Limits(max_restarts=options.max_restarts, **durations, **watch)


def parse_hang_timeout(text: str | None, problems: Problems) -> dict[str, float] | None:
    """Return the hang limits from `60s`, `60s:30m` or `off`; None if invalid."""
    if text is None:
        return {}
    if text == "off":
        return {"hang_s": 0.0}
    words = text.split(":")
    seconds = [parse_timeout(word) for word in words]
    fix = "--hang-timeout 5m, --hang-timeout 5m:30m or off"
    where = f"--hang-timeout {text}"
    known = [value for value in seconds if value]
    if len(words) > 2 or len(known) < len(words):
        problems.add(f"`{text}` is not a time above 0", where, fix=fix)
        return None
    if known[-1] < known[0]:
        what = f"the maximum, {words[-1]}, is less than the minimum, {words[0]}"
        problems.add(what, where, fix=fix)
        return None
    most_s = known[1] if len(known) > 1 else max(known[0], plan.Limits().hang_most_s)
    return {"hang_s": known[0], "hang_blind_s": known[0], "hang_most_s": most_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """Order of `torchmuster.launch` or `.sweep` to the command, in a file that only its user reads.

    The file has mode 0600, because others can read command lines.

    Attributes:
        call: The call of a function; None for a script.
        args: Arguments of a script.
        environment: Variables that `env=` sets in every worker.
        names: Names of what a sweep varies.
        members: Each member's values as text, in the order of `names`.
    """

    call: plan.FunctionCall | None = None
    args: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    members: tuple[tuple[str, ...], ...] = ()


_MAX_STAGES = 256
_OTHER_ARCHIVES = (".7z", ".rar", ".gz", ".bz2", ".xz", ".zst")
OWN_NAME = ".muster"


def parse_stages(texts: Sequence[str], cwd: str, problems: Problems) -> tuple[plan.Stage, ...]:
    """Return the data to stage into the scratch folder of every node.

    Without DST an archive is unpacked directly into the scratch folder, like `tar xf` there; a file
    or a folder keeps its name. SRC is relative to `cwd`; it need not exist on this machine.
    """
    parsed = [_parse(text, cwd, problems) for text in texts]
    stages = [stage for stage in parsed if stage is not None]
    _check_targets(stages, problems)
    if len(stages) > _MAX_STAGES:
        problems.add(f"{len(stages)} stages are more than {_MAX_STAGES}", "--stage")
    return tuple(stages)


def parse_commands(texts: Sequence[str], problems: Problems) -> tuple[str, ...]:
    """Return the commands that run once on every node."""
    for text in texts:
        if not text.strip():
            problems.add("--before has no command", "--before ''", fix="--before 'nvidia-smi'")
        if "\0" in text:
            problems.add("a command can't contain a NUL", "--before")
    return tuple(texts)


def _parse(text: str, cwd: str, problems: Problems) -> plan.Stage | None:
    where = f"--stage {text}"
    source, colon, target = text.rpartition(":")
    if not colon or os.path.exists(os.path.join(cwd, text)):  # a name may hold a colon
        source, colon, target = text, "", ""
    source = os.path.expanduser(source)
    if not source or "\0" in text:
        problems.add("--stage has no source", where, fix="--stage data.tar or --stage data:train")
        return None
    if colon and not target:
        problems.add("--stage has no target after `:`", where, fix=f"--stage {source}")
        return None
    path = os.path.normpath(os.path.join(cwd, source))
    archive = path.endswith(plan.ARCHIVE_SUFFIXES) and not os.path.isdir(path)
    if not colon:
        if _is_odd_archive(path, where, problems):
            return None
        target = "." if archive else os.path.basename(path)
    problem = _wrong_target(target, archive)
    if problem is not None:
        why = "DST is a path below the scratch folder"
        problems.add(problem, where, why, _mend(source, target))
        return None
    return plan.Stage(source=path, target=os.path.normpath(target))


def _wrong_target(target: str, archive: bool) -> str | None:
    parts = target.split("/")
    if target.startswith(("/", "~")):
        return f"the target `{target}` is absolute"
    if ".." in parts:
        return f"the target `{target}` is outside the scratch folder"
    if parts[0] == OWN_NAME:
        return f"`{OWN_NAME}` is reserved by muster in the scratch folder"
    if not archive and os.path.normpath(target) == ".":
        return "a file or folder can't take the place of the scratch folder itself"
    return None


def _mend(source: str, target: str) -> str:
    parts = [part for part in target.split("/") if part not in ("", ".", "..", "~", OWN_NAME)]
    return f"--stage {source}:{'/'.join(parts)}" if parts else f"--stage {source}"


def _is_odd_archive(path: str, where: str, problems: Problems) -> bool:
    """Refuse an archive of an unsupported format that would only be copied."""
    name = os.path.basename(path)
    if not name.endswith(_OTHER_ARCHIVES) or name.endswith(plan.ARCHIVE_SUFFIXES):
        return False
    odd = ".tar." in name or name.endswith((".7z", ".rar"))
    if odd:
        near = nearest(os.path.splitext(name)[1], plan.ARCHIVE_SUFFIXES)
        hint = f"; {near} is one" if near else ""
        why = f"these are unpacked: {', '.join(plan.ARCHIVE_SUFFIXES)}{hint}"
        fix = f"{where}:{name} copies it as it is"
        problems.add(f"`{name}` is not an archive that can be unpacked", where, why, fix)
    return odd


def _check_targets(stages: Sequence[plan.Stage], problems: Problems) -> None:
    seen: dict[str, str] = {}
    for stage in stages:
        archive = stage.source.endswith(plan.ARCHIVE_SUFFIXES)
        if stage.target in seen and not archive:
            what = f"two sources go to `{stage.target}`"
            why = f"{seen[stage.target]} and {stage.source}"
            problems.add(what, "--stage", why, f"--stage {stage.source}:OTHER_NAME")
        if not archive:
            seen[stage.target] = stage.source
