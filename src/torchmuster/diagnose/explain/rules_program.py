"""The program: exceptions, exit codes, and what could not be fetched."""

import re
from collections.abc import Iterator
from dataclasses import replace

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogFinding
from torchmuster.diagnose.explain.rows import HIGH, LOW, MEDIUM, Row, Weight, at, found_by, words_of
from torchmuster.diagnose.explain.rules_signals import ended_process, signal_of
from torchmuster.diagnose.explain.tracebacks import FETCHES
from torchmuster.diagnose.finding import Confidence

_LOST = ("peer_lost", "gloo_timeout", "watchdog", "nccl_remote", "store_wait", "gloo_connect")
_RAISED = ("exception", "cuda_oom", "cuda_error", "fatal_python")
_FETCH_BEFORE = "compute nodes often have no way out: fetch it before the job, on the login node, or set the proxy"
# What is raised for want of something outside of the program is seldom said so.
_OF_ITS_SURROUNDINGS = re.compile(
    r"cuda|gpu\b|nccl|driver|out of memory|alloc|\bdisk|no space|quota|permission|denied|socket|address"
    r"|connect|resolve|network|time(?:d )?-?out|refused|\bmount|file ?system|shared memory|signal|/dev/|too many|rendezvous",
    re.IGNORECASE,
)
_GUESSED = frozenset({"package-missing", "open-files", "system-error", "download-failed"})


def _raised(
    words: str, cause: str, hint: str, confirm: str | None = None, kinds: tuple[str, ...] = ()
) -> Row:
    return Row(
        evidence=kinds,
        words=words,
        cause=cause,
        error="{who} failed first: {words:.300}",
        hint=hint,
        confirm=confirm,
        weight=Weight.PROGRAM,
        num_lines=1,
    )


# Of a type or a message what it means; the first row that fits.
_EXCEPTIONS: tuple[Row, ...] = (
    _raised(
        "",
        "cuda-out-of-memory",
        "a smaller batch, activation checkpointing, or FSDP; look for another process on that GPU",
        "nvidia-smi   on that node",
        kinds=("cuda_oom",),
    ),
    _raised(
        "",
        "cuda-error",
        "run again with CUDA_LAUNCH_BLOCKING=1: the line that is named may be a later one",
        "compute-sanitizer python ...",
        kinds=("cuda_error",),
    ),
    _raised(
        r"Expected to have finished reduction",
        "unused-parameters",
        "find_unused_parameters=True for DDP, or use all parameters in the loss",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun ...   names them",
    ),
    _raised(
        r"DDP expects same model|params? .*(?:shapes?.*across|inconsistent)|not to match \w+ of the same param",
        "models-differ",
        "the ranks built different models: use the same configuration and seed everywhere",
    ),
    _raised(
        r"no attribute '_cuda_\w+'|Torch not compiled with CUDA enabled",
        "no-gpu",
        'this torch is a CPU build: install its CUDA build, or use "cuda" only where torch.cuda.is_available()',
        "python -c 'import torch; print(torch.__version__, torch.version.cuda)'   on that node",
    ),
    _raised(
        r"operator torchvision::\w+ does not exist",
        "builds-differ",
        "torch and torchvision are builds that don't fit each other: install both at once, from one index",
        "python -c 'import torch, torchvision; print(torch.__version__, torchvision.__version__)'",
    ),
    _raised(
        r"Default process group has not been initialized",
        "no-process-group",
        "call torch.distributed.init_process_group() first, in every rank; DDP and collectives need it",
    ),
    _raised(
        r"^KeyError: '(?:SLURM_(?:PROCID|LOCALID|NTASKS|NODEID|STEP\w*|JOB_\w+)|PMIX?_RANK|PALS_\w+|OMPI_COMM_WORLD_\w+)'",
        "no-launcher",
        "it reads what srun or mpiexec sets: read RANK, LOCAL_RANK and WORLD_SIZE, which are there under every launcher",
    ),
    _raised(
        # A name that the user's own file lacks, or a wrong way to import it, is a mistake in the program.
        (
            r"^(?:ModuleNotFoundError|ImportError)\b(?!: (?:cannot import name .*\(/(?!\S*(?:site|dist)-packages)"
            r"|attempted relative import|.* is not a package))"
        ),
        "package-missing",
        "install it in the environment of that node, the one that the job uses",
        "python -c 'import ...'   on every node",
    ),
    _raised(
        r"PytorchStreamWriter failed|unexpected pos \d+ vs \d+|SafetensorError.*(?:No space|os error 28)",
        "disk-full",
        "make room where it saves, or write elsewhere; a quota looks the same",
        "df -h PATH; df -i PATH; quota -s",
    ),
    _raised(
        r"received 0 items of ancdata",
        "open-files",
        "ulimit -n 65536 in the job, or torch.multiprocessing.set_sharing_strategy('file_system')",
        "ulimit -n",
    ),
    _raised(
        r"can't start new thread|pthread_create failed",
        "system-error",
        "fewer threads and loader workers; a higher `ulimit -u`, or pids limit of the container",
        "ulimit -u; cat /sys/fs/cgroup/pids.max",
    ),
    _raised(
        (
            r"connect to '?https?://|Max retries exceeded with url|[Oo]ffline mode is enabled"
            r"|^(?!KeyError|ValueError).*[Ff]ailed to (?:download|fetch)\b|[Cc]ould not (?:download|fetch)\b"
        ),
        "download-failed",
        _FETCH_BEFORE,
        "curl -sSI URL   on that node",
    ),
    _raised(
        r"No supported gpu|[Nn]o (?:usable |available )?GPUs? (?:were |was |is |are )?(?:found|available|detected)",
        "no-gpu",
        "ask for GPUs (--gres, --gpus-per-node, ngpus), and install a CUDA build that fits the driver",
        "nvidia-smi; python -c 'import torch; print(torch.version.cuda)'   on that node",
    ),
    _raised(
        r"AF_UNIX path too long",
        "name-too-long",
        "set TMPDIR to a shorter folder, e.g. /tmp",
        "echo ${{#TMPDIR}}",
    ),
    _raised(
        r"^(?:numpy\.\S*)?_?(?:Array)?MemoryError\b|DefaultCPUAllocator: (?:can't|not enough)|std::bad_alloc",
        "memory",
        "ask for more memory, or use fewer loader workers",
        "free -g; cat /sys/fs/cgroup/memory.max",
    ),
    _raised(
        "",
        "aborted",
        "read the lines before it: an assertion or a crash of C++ stands there",
        kinds=("fatal_python",),
    ),
    # What a library that fetches raises, but for its word on a file or a name that it has got.
    _raised(
        rf"^(?![^:]*(?:Validation|NotFitted|JSONDecode))(?:{FETCHES.pattern})",
        "download-failed",
        _FETCH_BEFORE,
        "curl -sSI URL   on that node",
    ),
    _raised(
        r"[Cc]onnection refused|\bError 111\b",
        "connection-refused",
        "see what should listen there, and whether it had ended",
    ),
    _raised(
        "",
        "exception",
        "fix the line that is named; the other ranks' errors follow from it",
    ),
)
_OWN_CONNECTION = replace(
    _EXCEPTIONS[-1],
    error="{who} failed: {words:.300}",
    hint="see what should listen there, and whether it had ended",
    confidence=LOW,
    weight=Weight.ENVELOPE + 1,
)
_EXIT_CODE = Row(
    cause="exit-code",
    error="{ended} ended with {how} and no exception",
    hint="find what calls sys.exit or os._exit with this number; argparse uses 2, a shell what its last command gave",
    weight=Weight.SIGNAL,
    num_lines=1,
)


def exceptions(case: Case) -> Iterator[LogFinding]:
    """The first exception that is nobody's echo."""
    found = [e for e in case.of(*_RAISED) if e.role is LineRole.CAUSE and not signal_of(e)]
    raised = [e for e in found if e.get("type") or e.kind != "exception"]
    if not raised:
        yield from _last_lines(case)
        yield from _own_connection(case)
        return
    event = _first_of(case, raised)
    others = len({(e.who, e.line.path) for e in raised}) - 1
    later = (f"{others} other ranks raised too, later or at the same time",) if others > 0 else ()
    yield found_by(
        case,
        row_of(event),
        [event],
        confidence=_confidence(case, event, raised),
        at=event.get("where") or at(event),
        because=(*event.detail[-6:-1], *later),
        ruled_out=_echoes_ruled_out(case),
    )


def _first_of(case: Case, raised: list[LogEvent]) -> LogEvent:
    """Return the one that began: an uncaught one ends a rank, a caught one need not."""
    uncaught = [e for e in raised if e.get("uncaught") or e.kind != "exception"]
    first = case.earliest(uncaught or raised)
    if first.kind == "fatal_python" or not first.get("type"):
        # The interpreter's last words and the watchdog's are less than an exception of the same moment.
        named = [e for e in raised if e.get("type") and e.who == first.who]
        return case.earliest(named) if named else first
    return first


def _confidence(case: Case, event: LogEvent, raised: list[LogEvent]) -> Confidence:
    """Several files without times can't be ordered: then the first is a guess, unless all say the same.

    So it is where other nodes' logs are missing, or where the same writer had lost a peer before.
    """
    if case.may_lack_logs or _had_lost_a_peer(case, event) or event.kind == "cuda_error":
        return MEDIUM
    if any(e.kind == "exception" and not e.get("type") for e in case.events):
        return MEDIUM  # a log was cut in the middle of another traceback
    cause = row_of(event).cause
    if cause in _GUESSED:
        return MEDIUM  # a module of the program's own that is not on the path looks the same
    if cause == "exception" and _OF_ITS_SURROUNDINGS.search(words_of(event)):
        return MEDIUM  # what is around it may be what is wrong
    timed = all(e.line.when is not None for e in raised)
    same = len({(e.get("type"), e.get("message")[:60]) for e in raised}) == 1
    ordered = timed or same or len({e.line.path for e in raised}) == 1
    if not ordered or event.kind == "fatal_python":
        return MEDIUM
    return (
        HIGH if event.get("own") or event.get("uncaught") or event.kind != "exception" else MEDIUM
    )


def _had_lost_a_peer(case: Case, event: LogEvent) -> bool:
    return any(
        lost.line.path == event.line.path
        and lost.line.order < event.line.order
        and (lost.who == event.who or lost.who.rank is None)
        for lost in case.of(*_LOST)
    )


def row_of(event: LogEvent) -> Row:
    """Return what an exception means."""
    return next(row for row in _EXCEPTIONS if row.fits(event))


def _last_lines(case: Case) -> Iterator[LogFinding]:
    """An exception of which only the last line is there: its log was cut, or something else drew the frames."""
    failed = {e.line.path: e.line.order for e in case.of("child_failed", "task_exit", "final")}
    ends = {line.order for log in case.record.logs for line in log.last[-3:]}
    found = [
        e
        for e in case.of("raised_line")
        if e.line.order in ends or e.line.order < failed.get(e.line.path, 0)
    ]
    if not found:
        return
    event = case.earliest(found)
    had_lost = _had_lost_a_peer(case, event)
    yield found_by(
        case,
        replace(row_of(event), error=_OWN_CONNECTION.error),
        [event],
        confidence=LOW if had_lost else MEDIUM,
        weight=Weight.ENVELOPE - 1 if had_lost else Weight.SIGNAL + 2,
    )


def _own_connection(case: Case) -> Iterator[LogFinding]:
    """An exception that reads like an echo, of code that is not torch's: a server of the program's own."""
    found = [
        e
        for e in case.of("exception", "errno", "peer_lost")
        if e.role is LineRole.ECHO
        and re.match(r"(?:Connection|BrokenPipe|Timeout|EOF)\w*Error$", e.get("type"))
    ]
    if not found:
        return
    event = case.earliest(found)
    yield found_by(
        case,
        _OWN_CONNECTION,
        [event],
        cause="connection-refused" if "efused" in event.get("message") else "exception",
        at=event.get("where") or at(event),
        because=event.detail[-6:-1],
    )


def _echoes_ruled_out(case: Case) -> tuple[str, ...]:
    lost = case.of("peer_lost", "nccl_remote", "watchdog", "gloo_timeout")
    if not lost:
        return ()
    return (
        f"the network: {len(lost)} lines of lost connections came from ranks that had lost their peer",
    )


def exit_codes(case: Case) -> Iterator[LogFinding]:
    """A rank ended with a number and without a word."""
    # 126 and 127 are the shell's, 128 and more are signals.
    raised = {e.line.path for e in case.events if e.get("uncaught")}
    failed = [e for e in case.of("child_failed", "exit_code") if 0 < _code(e) < 126]
    # Python ends with 1 after an exception: one that told of a lost peer is no silent end, also where a log is cut.
    raised |= {e.line.path for e in case.events if e.role is LineRole.ECHO and e.get("type")}
    raised |= {e.line.path for e in case.of(*_LOST)}
    failed = [e for e in failed if _code(e) != 1 or e.line.path not in raised]
    failed += [
        e for e in case.of("task_exit") if re.search(r"exit code (?!0\b|1[3-9]\d)\d+", e.get("how"))
    ]
    if not failed:
        return
    event = case.earliest(failed)
    code = _code(event)
    ended = ended_process(event)
    if not ended and event.get("tasks"):
        ended = f"task {event.get('tasks')} on {event.get('host')}"
    yield found_by(
        case,
        _EXIT_CODE,
        [event],
        {"ended": ended or "a process", "how": f"exit code {code}" if code else "a failure"},
        # Python ends with 1 after an exception: it stood somewhere that is not here.
        confidence=MEDIUM if event.kind == "child_failed" and code != 1 else LOW,
        because=_last_words(case, event),
        ruled_out=_echoes_ruled_out(case),
    )


def _code(event: LogEvent) -> int:
    word = event.get("code") or event.get("other")
    return int(word) if re.fullmatch(r"-?\d{1,9}", word) else 0


def _last_words(case: Case, event: LogEvent) -> tuple[str, ...]:
    """Return what stood just before it."""
    for log in case.record.logs:
        if log.path == event.line.path:
            before = [line for line in (*log.header, *log.last) if line.number < event.line.number]
            found = [line.text.strip() for line in before[-3:] if line.text.strip()]
            return tuple(f"before it: {text[:160]}" for text in found)
    return ()
