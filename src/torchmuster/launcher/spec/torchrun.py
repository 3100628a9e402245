"""torchrun's command line, option by option: supported with its meaning, or refused with a message.

`docs/torchrun.md` has the table; a test compares both with `torchrun --help` of torch 2.13.

Source: torch/distributed/run.py, `get_args_parser` (2.13); PET_* as in argparse_util.py.
"""

import argparse
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torchmuster.core.model.plan import Limits, Program, RestartPolicy, ScriptKind, StartMethod
from torchmuster.core.model.text import did_you_mean, nearest
from torchmuster.core.spec import launch
from torchmuster.core.spec.problems import Problems, parse_seconds
from torchmuster.errors import UsageError
from torchmuster.launcher.spec import rendezvous
from torchmuster.launcher.spec.rendezvous import PARTS as WORLD_PARTS

_COUNTED = ("gpu", "cpu", "auto")
_ALL_STREAMS = frozenset({1, 2})


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunLine:
    """What a torchrun command line asks for.

    Attributes:
        is_host: `is_host` of --rdzv-conf; None if the address decides.
        node_rank: The place, for the static rendezvous; None if the head numbers the places.
        notes: Sentences about options without an effect here.
        no_spread: Not torchrun's: the head doesn't start the agents of other hosts.
        restart_policy: Not torchrun's: which failures are followed by another attempt.
    """

    program: Program
    min_nodes: int
    max_nodes: int
    num_workers: int
    meeting: rendezvous.Rendezvous
    limits: Limits
    is_host: bool | None
    node_rank: int | None
    secret_file: str | None
    local_addr: str | None
    role: str
    signals: tuple[signal.Signals, ...]
    signals_to_handle: str
    virtual_local_rank: bool
    log_dir: str | None
    redirects: str
    tee: str
    local_ranks_filter: tuple[int, ...] | None
    notes: tuple[str, ...]
    no_spread: bool = False
    restart_policy: RestartPolicy = RestartPolicy.COUNT

    def console(self, local_rank: int) -> frozenset[int]:
        """Return the streams of a local rank that the terminal shows."""
        if self.local_ranks_filter is not None and local_rank not in self.local_ranks_filter:
            return frozenset()
        redirected = _streams_of(self.redirects, local_rank) - _streams_of(self.tee, local_rank)
        return _ALL_STREAMS - redirected

    def saved(self, local_rank: int) -> frozenset[int]:
        """Return the streams of a local rank that are written below --log-dir."""
        if self.log_dir is None:
            return frozenset()
        return _streams_of(self.redirects, local_rank) | _streams_of(self.tee, local_rank)


# Refused options, with the reason.
REFUSED = {
    "event_log_handler": "muster writes its events into events.jsonl of the run directory",
    "logs_specs": "muster's logs are one file for each rank and attempt",
    "numa_binding": "muster does not bind workers to CPUs; numactl can, in front of the interpreter",
    "duplicate_stdout_filters": "muster's logs contain every line; `muster logs RUN --rank 0 | grep ...`",
    "duplicate_stderr_filters": "muster's logs contain every line; `muster logs RUN --rank 0 | grep ...`",
}


# Options that torchrun does not have.
OURS = frozenset({"no_spread", "restart_policy", "hang_timeout", "start", "use_env"})


# For each option: the form of a value, the message if it doesn't match, and a valid value.
_FORMS = {
    "max_restarts": (r"\d+", "is not a valid number of restarts", "3"),
    "local_ranks_filter": (r"| *\d+ *(, *\d+ *)*", "is not a valid list of local ranks", "0,1"),
    "restart_policy": ("count|evidence", "is not a restart policy", "count, or evidence"),
    "start": ("auto|fork|fresh", "is not a way to start workers", "auto, fork, or fresh"),
    "redirects": (r"[0-3]|\d+:[0-3](,\d+:[0-3])*", "does not name streams", "3, or 0:1,1:2"),
    "tee": (r"[0-3]|\d+:[0-3](,\d+:[0-3])*", "does not name streams", "3, or 0:1,1:2"),
}
# Passed on unchanged.
_AS_WRITTEN = (
    *("local_addr", "role", "signals_to_handle", "virtual_local_rank", "log_dir"),
    *("no_spread", "redirects", "tee"),
)
# Name, default, help and short spelling of each option; options with the default False are flags.
_OPTIONS: tuple[tuple[Any, ...], ...] = (
    ("nnodes", "1:1", "N or MIN:MAX nodes"),
    ("nproc-per-node", "1", "workers on this node: a number, gpu, cpu or auto"),
    ("rdzv-backend", "static", "static or c10d"),
    ("rdzv-endpoint", "", "HOST[:PORT] of the head"),
    ("rdzv-id", rendezvous.NO_ID, "name of the job"),
    (
        "rdzv-conf",
        "",
        "KEY=VALUE,...: join_timeout, last_call_timeout, timeout, is_host, secret_file",
    ),
    ("standalone", False, "one node, a free port"),
    ("max-restarts", "0", "restarts after failures"),
    ("monitor-interval", "0.1", "no effect: nothing is polled"),
    ("start-method", "spawn", "no effect on scripts, as in torchrun"),
    ("event-log-handler", "null", "refused unless `null`"),
    ("role", "default", "ROLE_NAME of the workers"),
    ("module", False, "SCRIPT is a module", "-m"),
    ("no-python", False, "execute SCRIPT without Python"),
    ("run-path", False, "run SCRIPT by its path, as muster always does"),
    ("log-dir", None, "also write the streams of -r and -t below this folder"),
    ("redirects", "0", "streams that the terminal does not show: 0 to 3, or RANK:N,...", "-r"),
    ("tee", "0", "streams that are written to files and shown", "-t"),
    ("local-ranks-filter", "", "local ranks that the terminal shows"),
    ("duplicate-stdout-filters", "", "refused"),
    ("duplicate-stderr-filters", "", "refused"),
    ("node-rank", "0", "node rank of this node, for the static rendezvous"),
    ("master-addr", "127.0.0.1", "address of the head, for the static rendezvous"),
    ("master-port", None, "port of the head, for the static rendezvous"),
    ("local-addr", None, "this node's own address"),
    ("logs-specs", None, "refused"),
    ("numa-binding", None, "refused"),
    ("signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "signals that stop the job"),
    ("shutdown-timeout", None, "seconds from a stop to SIGKILL; default 30"),
    ("virtual-local-rank", False, "LOCAL_RANK 0 for all, each with one visible GPU"),
    ("restart-policy", "count", "count always retries, evidence only if it may help"),
    ("hang-timeout", None, "how long a rank may hang while others wait, MIN[:MAX] or off"),
    ("start", "auto", "fork workers from a process with torch, or start fresh interpreters"),
    ("use-env", False, "torch.distributed.launch's: accepted, LOCAL_RANK is always set"),
    ("no-spread", False, "never start the other hosts of the job from here"),
)


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises our errors, and resolves abbreviations as torchrun does."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        return [one for one in found if one[0].dest not in OURS] or found

    def error(self, message: str) -> NoReturn:
        fix = "muster torchrun --help"
        what = message
        if unknown := re.match(r"unrecognized arguments: ([^\s=]+)", message):
            what = f"torchrun has no option `{unknown.group(1)}`"
            fix = did_you_mean(unknown.group(1), self._option_string_actions) or fix
        elif valueless := re.match(r"argument (?:.*/)?(\S+): expected one argument", message):
            what = f"`{valueless.group(1)}` needs a value"
        elif "required: training_script" in message:
            what = "`muster torchrun` needs a script"
            fix += "; is a blank missing before a backslash? `muster lint JOBSCRIPT` finds it"
        raise UsageError(what, fix=fix)


def make_parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return a parser for torchrun's options, with PET_* variables as the defaults."""
    parser = _Parser(
        prog="muster torchrun",
        description="Takes torchrun's own command line, one command per node.",
        epilog="What each option does here: docs/torchrun.md",
    )

    for name, default, text, *short in _OPTIONS:
        dest = name.replace("-", "_")
        if dest in OURS and dest != "use_env":
            text = f"not torchrun's: {text}"  # noqa: PLW2901 - said once
        spellings = dict.fromkeys([*short, f"--{name}", f"--{dest}"])
        value = environment.get(f"PET_{dest.upper()}", default)
        kind: dict[str, Any] = {"default": value, "metavar": dest.upper()}
        if default is False:
            kind = {"default": value == "1", "action": "store_true"}
        parser.add_argument(*spellings, dest=dest, help=text, **kind)
    parser.add_argument("training_script", help="the script, followed by its arguments")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def _refuse_glued(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Refuse two options without a blank between them, which would give a confusing error."""
    for word in arguments:
        glued = re.match(r"--?[\w-]+[= ].*?(--[a-z][a-z_-]*)(?:=|$)", word)
        if glued is not None and glued.group(1) in parser._option_string_actions:
            raise UsageError(
                f"there is no blank before `{glued.group(1)}`",
                where=word,
                why="bash joins two lines to one word where there is no blank before the backslash",
                fix="write a blank before each backslash; `muster lint JOBSCRIPT` finds all of them",
            )


def parse_torchrun(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    gpus: Sequence[str],
    problems: Problems,
    hosts: str = "",
    *,
    knows_head: bool = False,
) -> TorchrunLine | None:
    """Parse the command line; return None if it is invalid, with the reasons in `problems`.

    In a pod, `hosts` is the text of /etc/hosts, which has the pod's full name. With `knows_head`,
    this command is the only one of a job, or the head started it.

    Raises:
        UsageError: torchrun's parser would refuse the command line.
    """
    parser = make_parser(environment)
    _refuse_glued(arguments, parser)
    given = parser.parse_args(list(arguments))
    _refuse(given, problems)
    conf = rendezvous.parse_conf(given.rdzv_conf, problems)
    given_by = _sources_of_world(parser, arguments, environment, conf)
    given, of_world = rendezvous.settle_world(
        given, given_by, rendezvous.find_pod_world(environment, hosts), problems
    )
    nodes = launch.parse_nodes(given.nnodes, "--nnodes", problems)
    workers = _parse_nproc(given.nproc_per_node, gpus, problems)
    max_nodes = nodes[1] if nodes is not None else 1
    meeting = rendezvous.find_rendezvous(given, max_nodes, problems, knows_head=knows_head)
    limits = _parse_limits(given, conf, environment, problems)
    signals = _parse_signals(given.signals_to_handle, problems)
    for dest, (form, what, right) in _FORMS.items():
        text, option = getattr(given, dest), f"--{dest.replace('_', '-')}"
        if not re.fullmatch(form, text):
            problems.add(f"`{text}` {what}", option, fix=f"{option} {right}")
    node_rank = _parse_node_rank(given, conf, nodes, problems)
    program = _parse_program(given, environment, problems)
    if problems.found or nodes is None or workers is None or meeting is None or limits is None:
        return None
    is_host = conf.get("is_host")
    ranks = tuple(int(word) for word in given.local_ranks_filter.split(",") if word) or None
    return TorchrunLine(
        program=replace(program, start=StartMethod(given.start)),
        min_nodes=1 if meeting.alone else nodes[0],
        max_nodes=1 if meeting.alone else nodes[1],
        num_workers=workers,
        meeting=meeting,
        limits=limits,
        is_host=None if is_host is None else is_host.lower() in ("1", "true", "t", "yes", "y"),
        node_rank=node_rank if meeting.static else None,
        secret_file=conf.get("secret_file"),
        signals=signals,
        local_ranks_filter=ranks,
        notes=(*of_world, *_notes(given, conf)),
        restart_policy=RestartPolicy(given.restart_policy),
        **{name: getattr(given, name) for name in _AS_WRITTEN},
    )


def _sources_of_world(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    conf: Mapping[str, str],
) -> dict[str, str]:
    """Map each part of the world that is given to the option or variable that gives it."""
    variables = {name: f"PET_{name.upper()}" for name in WORLD_PARTS}
    given_by = {name: variable for name, variable in variables.items() if variable in environment}
    parser.set_defaults(**dict.fromkeys(WORLD_PARTS))
    on_line = vars(parser.parse_args(list(arguments)))
    given_by |= {
        name: f"--{name.replace('_', '-')}" for name in WORLD_PARTS if on_line[name] is not None
    }
    return given_by | ({"node_rank": "--rdzv-conf rank"} if "rank" in conf else {})


def _refuse(given: argparse.Namespace, problems: Problems) -> None:
    harmless = ("", None, "null", "default")
    for dest, why in REFUSED.items():
        if getattr(given, dest) not in harmless:
            option = "--" + dest.replace("_", "-")
            where = f"{option} {getattr(given, dest)}"
            problems.add(f"`{option}` is not supported", where, why, f"leave {option} out")
    if given.rdzv_backend not in ("static", "c10d"):
        problems.add(
            f"the rendezvous backend `{given.rdzv_backend}` is not supported",
            f"--rdzv-backend {given.rdzv_backend}",
            "muster brings the nodes together itself, without a service",
            "--rdzv-backend c10d",
        )
    if given.module and given.no_python:
        what = "--module and --no-python exclude each other"
        problems.add(what, fix="leave --no-python out to run a Python module")


def _parse_nproc(text: str, gpus: Sequence[str], problems: Problems) -> int | None:
    if text == "xpu":
        why = "counting them needs torch, which the agent does not import"
        problems.add("`xpu` is not supported", "--nproc-per-node xpu", why, "--nproc-per-node 4")
        return None
    if not text.isdecimal() and text not in _COUNTED:
        fix = f"--nproc-per-node {nearest(text, _COUNTED) or 4}"
        if "," in text:
            fix = "on each node, give that node's own number"
        problems.add(
            f"`{text}` is not a valid number of workers", f"--nproc-per-node {text}", fix=fix
        )
        return None
    counts = launch.parse_workers(text, gpus, problems)
    return counts[0] if counts else None


def _parse_limits(
    given: argparse.Namespace,
    conf: Mapping[str, str],
    environment: Mapping[str, str],
    problems: Problems,
) -> Limits | None:
    shutdown = given.shutdown_timeout or environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or "30"
    waits = rendezvous.parse_waits(conf, given.rdzv_backend == "static", problems)
    grace = parse_seconds(shutdown)
    if grace is None:
        what = f"`{shutdown}` is not a valid number of seconds"
        problems.add(what, "--shutdown-timeout", fix="--shutdown-timeout 30")
    watch = launch.parse_hang_timeout(given.hang_timeout, problems)
    if grace is None or waits is None or watch is None or not given.max_restarts.isdecimal():
        return None
    return Limits(
        max_restarts=int(given.max_restarts),
        grace_s=grace,
        join_timeout_s=waits[0],
        last_call_s=waits[1],
        **watch,
    )


def _parse_signals(text: str, problems: Problems) -> tuple[signal.Signals, ...]:
    found: list[signal.Signals] = []
    for word in filter(None, (w.strip() for w in text.split(","))):
        try:
            number = signal.Signals[word]
        except KeyError:
            fix = "--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT"
            problems.add(f"there is no signal `{word}`", f"--signals-to-handle {text}", fix=fix)
            continue
        if number in (signal.SIGKILL, signal.SIGSTOP):
            fix = f"leave {word} out"
            problems.add(f"{word} can't be handled", f"--signals-to-handle {text}", fix=fix)
        elif number not in (signal.SIGUSR1, signal.SIGUSR2):  # workers that handle these get them
            found.append(number)
    return tuple(found)


def _parse_node_rank(
    given: argparse.Namespace,
    conf: Mapping[str, str],
    nodes: tuple[int, int] | None,
    problems: Problems,
) -> int | None:
    text = conf.get("rank", given.node_rank)
    if not text.isdecimal():
        problems.add(
            f"`{text}` is not a valid node rank", "--node-rank", fix="--node-rank 0 on the head"
        )
        return None
    if nodes is not None and given.rdzv_backend == "static" and int(text) >= nodes[1]:
        what = f"node rank {text} is outside a run of {nodes[1]} node{'s' if nodes[1] > 1 else ''}"
        fix = f"--node-rank {nodes[1] - 1} at most, or a larger --nnodes"
        problems.add(what, f"--node-rank {text}", fix=fix)
    return int(text)


def _parse_program(
    given: argparse.Namespace, environment: Mapping[str, str], problems: Problems
) -> Program:
    kind = ScriptKind.FILE
    if given.no_python:
        kind = ScriptKind.COMMAND
    elif given.module:
        kind = ScriptKind.MODULE
        launch.check_module(given.training_script, os.getcwd(), problems, command="muster torchrun")
    else:
        args = given.training_script_args
        launch.check_script(
            given.training_script, os.getcwd(), problems, args, command="muster torchrun"
        )
    python = environment.get("PYTHON_EXEC") or sys.executable
    return Program(
        kind=kind,
        target=given.training_script,
        args=tuple(given.training_script_args),
        python=(python, "-u"),
        cwd=os.getcwd(),
        macros=True,
    )


def _streams_of(text: str, local_rank: int) -> frozenset[int]:
    """Decode torchrun's 0, 1, 2 or 3 for one local rank into a subset of {1, 2}."""
    mask = 0
    if ":" not in text:
        mask = int(text)
    for part in text.split(",") if ":" in text else []:
        rank, _, value = part.partition(":")
        if int(rank) == local_rank:
            mask = int(value)
    return frozenset(stream for stream in (1, 2) if mask & stream)


def _notes(given: argparse.Namespace, conf: Mapping[str, str]) -> tuple[str, ...]:
    static = given.rdzv_backend == "static"
    notes = rendezvous.notes_on(conf, static)
    if other := launch.other_environment(os.environ):
        notes.append(other)
    if own := launch.own_processes(given.training_script):
        notes.append(own)
    if os.environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        notes.append(
            "there is no server for file timers here: --hang-timeout ends workers that hang"
        )
    if not static and given.node_rank not in ("0", None):
        notes.append("--node-rank has no effect with c10d, as in torchrun")
    if given.standalone and (given.rdzv_endpoint or given.nnodes not in ("1", "1:1")):
        notes.append("--standalone: --nnodes and --rdzv-endpoint have no effect, as in torchrun")
    elif not static and not given.rdzv_endpoint and given.nnodes not in ("1", "1:1"):
        where = f"localhost:{rendezvous.DEFAULT_C10D_PORT}"
        notes.append(f"without --rdzv-endpoint the nodes meet at {where}, as in torchrun")
    return tuple(notes)
