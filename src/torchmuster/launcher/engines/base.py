"""The interface of all schedulers' dialects, and what their scripts have in common.

A dialect is pure: values in, text and values out. It runs nothing, reads no file and knows no
clock, so each answer recorded from a real scheduler can be a test. The head of a job runs on its
first node and starts the agents of the others.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torchmuster.core.model.links import ResubmitMethod
from torchmuster.core.model.verdict import Report
from torchmuster.errors import MusterError, UsageError
from torchmuster.launcher.model.job import Allocation, JobRequest, JobView, NodeLauncher

PYTHON = "$PYTHON"  # as a head's first word: the interpreter that the script chooses
ENDS_AT = "MUSTER_JOB_ENDS_AT"
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./+=@,-]*")
_BROKEN_VALUE = re.compile(r"[\s'\"\\#\x00-\x1f\x7f]")
_PROGRAMS_ENTRY = "/core/programs/__main__.py"  # in the package: starts all of our programs
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_STDERR_LINES = 5


class EngineError(MusterError):
    """A scheduler's answer can't be used."""

    exit_code = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStart:
    """A command to start on one node of the allocation.

    Attributes:
        command: The command; its first word is an absolute path, since some launchers pass no PATH.
        slot: The node's first line in PBS's node file, from 0.
        cpus: All CPUs of the job on that node; None leaves it to the scheduler.
        launcher: The launcher to use; None for the dialect's own.
    """

    node: str
    command: tuple[str, ...]
    slot: int = 0
    cpus: int | None = None
    het_group: int | None = None
    launcher: NodeLauncher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A partition of Slurm or a queue of PBS.

    Attributes:
        is_open: Whether it accepts jobs.
        starts: Whether it starts jobs; a stopped queue may still accept them.
        about: A description for people, from the scheduler.
    """

    name: str
    is_default: bool = False
    is_open: bool = True
    starts: bool = True
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueQuestion:
    """How to list a scheduler's queues.

    Attributes:
        default_argv: A second command, if the first does not show which queue is the default.
        mark_default: Marks the default queue, given that command's output.
    """

    argv: tuple[str, ...]
    parse: Callable[[str], tuple[Queue, ...]]
    default_argv: tuple[str, ...] | None = None
    mark_default: Callable[[Sequence[Queue], str], tuple[Queue, ...]] = lambda queues, _: tuple(
        queues
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountQuestion:
    """How to list the accounts that a user may name."""

    argv_for: Callable[[str], list[str]]
    parse: Callable[[str], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuestion:
    """How to ask whether the machine of a job's node is lost: `lost_node` of a dialect.

    Attributes:
        argv_for: Returns the commands, for a job and a node.
        is_lost: Returns the scheduler's words, from one answer and the node, if it says so; else
            None.
        outlives: Whether a job outlives its first node.
    """

    argv_for: Callable[[str, str], list[list[str]]]
    is_lost: Callable[[str, str], str | None]
    outlives: bool = True


@dataclass(frozen=True, slots=True)
class PreemptionQuestion:
    """How to ask whether a job is being preempted: `preemption` of a dialect whose scheduler warns jobs.

    Attributes:
        argv_for: Returns the command for a job.
        grace_s: Returns from its answer how long the job may still run: inf if unknown, None if not
            preempted.
        argv_of_rules: The command that shows the rules of preemption.
        is_the_end: Returns from both answers whether a preempted job isn't started again.
    """

    argv_for: Callable[[str], list[str]]
    grace_s: Callable[[str], float | None]
    argv_of_rules: tuple[str, ...]
    is_the_end: Callable[[str, str], bool]


class Dialect(Protocol):
    """One scheduler's language.

    Every function with a `JobRequest` raises UsageError for text that the scheduler would misread
    (a newline in a path, a space in a queue's name).
    """

    name: str
    # How the head of a job may continue its run, the best first.
    resubmit_methods: tuple[ResubmitMethod, ...]

    def script(self, job: JobRequest) -> str:
        """Return the complete job script."""

    def submit_argv(self, job: JobRequest, script_path: str) -> list[str]:
        """Return the submit command, with the dependencies, whose ids are known only now."""

    def job_id(self, stdout: str) -> str:
        """Return the job's id from the submit command's output; EngineError if there is none."""

    def status_argv(self, job_ids: Sequence[str]) -> list[list[str]]:
        """Return commands that show these jobs' state, the best first; sites may lack some."""

    def views(self, stdout: str) -> dict[str, JobView]:
        """Parse a status command's output into views by job id; EngineError if it is unreadable."""

    def cancel_argv(self, job_id: str) -> list[str]:
        """Return the command that ends a job."""

    def requeue_argv(self, job_id: str) -> list[str]:
        """Return the command that restarts a running job as the same job."""

    def end_argv(self, job_id: str) -> list[list[str]]:
        """Return commands that show when a running job has to end, the best first."""

    def job_end(self, stdout: str, now: float) -> float | None:
        """Return that end, in seconds since 1970; None if there is none or it is unreadable."""

    def node_argv(self, start: NodeStart) -> list[str]:
        """Return the command by which the head runs a command on another node."""

    def allocation(
        self, environment: Mapping[str, str], read: Callable[[str], str]
    ) -> Allocation | None:
        """Return the job around this process, or None; `read` reads a small file."""

    def unmapped(self, job: JobRequest) -> list[str]:
        """Return a sentence for each setting that this scheduler lacks, with the consequence."""

    def explain_refusal(self, stderr: str) -> Report:
        """Return a report on a refused submission."""


class ObjectDialect(Dialect, Protocol):
    """A dialect whose jobs are objects of a cluster's API, with the files that their nodes need.

    `script` shows the objects without the contents of these files.
    """

    def with_files(self, job: JobRequest, files: Mapping[str, bytes]) -> str:
        """Return the script with the contents of these files; only the user may read it."""

    def settle_argv(self, job: JobRequest, stdout: str | None) -> list[list[str]]:
        """Return commands to run after a submission, given its output (None if refused)."""

    def apart(self, job_id: str) -> str:
        """Return the part of a job's id that all jobs in one question must share."""

    def more_argv(self, argv: Sequence[str], stdout: str) -> list[list[str]]:
        """Return further questions after a status command; `views` gets all answers joined."""


class ArrayDialect(Dialect, Protocol):
    """A dialect with job arrays: `submit_argv` also submits requests for arrays.

    Attributes:
        array_variable: The variable with an element's number.
    """

    array_variable: str

    def element_id(self, job_id: str, position: int) -> str:
        """Return the id of one element, for `cancel_argv`."""

    def array_key(self, job_id: str) -> str:
        """Return the array's key in `array_views`."""

    def array_limit_argv(self) -> list[str]:
        """Return a command that shows how many elements an array may have."""

    def array_limit(self, stdout: str) -> int | None:
        """Parse that number from its output; None if it isn't there."""

    def array_status_argv(self, job_ids: Sequence[str]) -> list[list[str]]:
        """Return commands that show the state of every element of these arrays, the best first."""

    def array_views(self, stdout: str) -> dict[tuple[str, int], JobView]:
        """Parse the output into views by array key and element; EngineError if it is unreadable."""


def array_dialect(dialect: Dialect) -> ArrayDialect | None:
    """Return the dialect if it has arrays, else None."""
    has_arrays = getattr(dialect, "array_variable", "") and hasattr(dialect, "array_views")
    return cast("ArrayDialect", dialect) if has_arrays else None


def object_dialect(dialect: Dialect) -> ObjectDialect | None:
    """Return the dialect if its jobs are objects of an API, else None."""
    is_one = hasattr(dialect, "with_files") and hasattr(dialect, "more_argv")
    return cast("ObjectDialect", dialect) if is_one else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A known refusal, in `refusals` of a dialect: a pattern for the scheduler's words, and our message.

    Attributes:
        is_away: Whether the scheduler could not be reached: nothing was accepted, and a retry may
            work.
    """

    pattern: str
    error: str
    hint: str
    is_away: bool = False


def explain(stderr: str, command: str, refusals: Sequence[Refusal]) -> Report:
    """Return the report of the first matching refusal, with the scheduler's own words."""
    lines = (line.rstrip() for line in stderr.splitlines() if line.strip())
    said = tuple(dict.fromkeys(lines))[-_STDERR_LINES:]
    for refusal in refusals:
        if re.search(refusal.pattern, stderr, re.IGNORECASE):
            return Report(error=refusal.error, at=command, because=said, hint=refusal.hint)
    return Report(
        error=f"{command} refused the job",
        at=command,
        because=said or (f"{command} printed nothing",),
        hint=f"muster run --dry-run (a workflow: muster submit --dry-run) shows the script, to try it by hand with {command}",
    )


def assemble(prefix: str, ours: Sequence[str], site: Sequence[str]) -> list[str]:
    """Return directive lines; a line of the site replaces ours for the same option.

    Raises:
        UsageError: A line is not an option.
    """
    lines = [_site_line(prefix, line) for line in site]
    taken = {_option(line) for line in lines}
    kept = [line for line in ours if _option(line) not in taken]
    return [f"#{prefix} {line}" for line in [*kept, *lines]]


def _site_line(prefix: str, line: str) -> str:
    bare = check_text(line, "directives").strip().removeprefix(f"#{prefix}").strip()
    if not bare.startswith("-"):
        fix = f"write it as after #{prefix}: `--option=value` or `-x value`"
        raise UsageError(f"the directive `{line}` is not an option", where="directives", fix=fix)
    return bare


def _option(line: str) -> str:
    """Return the key of a line: `--mem`, `-q`, or `-l select`, as -l and -W have many keys."""
    words = line.split(None, 1)
    first = words[0].partition("=")[0]
    if first in ("-l", "-W") and len(words) > 1:
        return f"{first} {words[1].partition('=')[0]}"
    return first


def body(job: JobRequest) -> list[str]:
    """Return the shell part of a script: the interpreter, the site's lines, the head."""
    about = "Python 3.11 or later, for muster's own processes"
    lines = ["", f"# {about}{'; a line below may set another' if job.node_lines is None else ''}."]
    lines.append(f"PYTHON={shlex.quote(check_text(job.python, 'python'))}")
    if job.node_lines is not None:
        lines += _fallback(job.node_lines)
    if job.time_limit_s is not None:
        seconds = minutes_up(job.time_limit_s) * 60
        lines.append(f"export {ENDS_AT}=$(($(date +%s) + {seconds}))")
    lines += [check_text(line, "setup") for line in job.setup]
    if not job.head:
        raise ValueError("a job needs a head")
    words = [shlex.quote(check_text(word, "head")) for word in job.head]
    if job.head[0] == PYTHON:
        words[0] = f'"{PYTHON}"'
    head = " ".join(words)
    if job.package_copy is not None:
        more, head = _with_copy(job.head, job.package_copy)
        lines += more
    lines.append("")
    if job.about:
        lines.append(f"# {check_text(job.about, 'about')}")
    # `exec`: the scheduler sends its signals to the script, which is then the head itself.
    lines.append(f"exec {head}")
    return lines


def _with_copy(head: Sequence[str], copy: str) -> tuple[list[str], str]:
    """Return lines that use a copy of torchmuster where a node lacks it, and the head's command."""
    package = head[1].removesuffix(_PROGRAMS_ENTRY)
    lines = [
        f"MUSTER={shlex.quote(check_text(package, 'package'))}",
        f'if [ ! -r "$MUSTER{_PROGRAMS_ENTRY}" ]; then',
        f"  COPY={shlex.quote(check_text(copy, 'package_copy'))}",
        '  echo "muster: $MUSTER is not on $(uname -n): the copy in $COPY is used" >&2',
        # Array elements may do this at once on several nodes; the first to finish wins.
        '  [ -d "$COPY" ] || { PART=$(mktemp -d "$COPY.XXXXXXXX") && "$PYTHON" -I -m zipfile -e "$COPY.zip" "$PART/torchmuster" &&',
        '    { mv -T "$PART" "$COPY" 2>/dev/null || { [ -d "$COPY" ] && rm -rf "$PART"; }; }; }',
        "  MUSTER=$COPY/torchmuster",
        "fi",
    ]
    rest = " ".join(shlex.quote(check_text(word, "head")) for word in head[2:])
    return lines, f'"{PYTHON}" "$MUSTER{_PROGRAMS_ENTRY}" {rest}'


def _fallback(node_lines: Sequence[str]) -> list[str]:
    """Return lines that choose another Python where the client's can't run."""
    runs = """"$PYTHON" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null"""
    whose = "of the setup lines" if node_lines else "on PATH"
    hint = "hint: `setup = [...]` of the site loads one: a module, or source VENV/bin/activate"
    about = "# The agents run the setup lines on every node; here they are for a first node without that Python."
    return [
        *([about] if node_lines else []),
        f"if ! {runs}; then",
        f'  echo "muster: $PYTHON does not run on $(uname -n) ($(uname -m)): python3 {whose} is used" >&2',
        # `eval`: a line that isn't valid shell must not break the script where it isn't needed.
        *(f"  eval {shlex.quote(check_text(line, 'setup'))}" for line in node_lines),
        "  PYTHON=$(command -v python3)",
        f"  if ! {runs}; then",
        "    {",
        "      echo 'error: this node has no Python for muster'",
        '      echo "at: $(uname -n), ${PYTHON:-no python3 on PATH}"',
        "      echo 'because: the first node of a job needs Python 3.11 or later'",
        f"      echo {shlex.quote(hint)}",
        "    } >&2",
        "    exit 14",
        "  fi",
        "fi",
    ]


def check_text(text: str, where: str) -> str:
    """Return the text; UsageError for a newline or control character, which would end its line."""
    if _CONTROL.search(text):
        raise UsageError(
            f"{text!a} holds a newline or a control character",
            where=where,
            fix="leave it out: each line of a job script holds one thing",
        )
    return text


def check_value(text: str, where: str) -> str:
    """Return a directive's value; UsageError for space, quote, backslash or #, which break it."""
    if not text or _BROKEN_VALUE.search(text):
        what = f"{text!a} can't be used in a job script"
        fix = "leave out spaces, quotes, backslashes and #"
        raise UsageError(what, where=where, fix=fix)
    return text


def is_plain_path(path: str) -> bool:
    """Return whether all directive parsers keep the path; others go on the command line."""
    return _PLAIN_PATH.fullmatch(path) is not None


def check_log_path(path: str) -> str:
    """Return the path; UsageError if it is relative or has control characters."""
    if not check_text(path, "log_path").startswith("/"):
        raise UsageError(f"the log path `{path}` is not absolute", where="log_path")
    return path


def as_operand(path: str) -> str:
    """Return the path in a form that is never parsed as an option."""
    return f"./{path}" if path.startswith("-") else path


def clean_name(name: str, limit: int) -> str:
    """Return a job name that every scheduler accepts: letters, digits and `_.-`, a letter first."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name) or "muster"
    return (plain if plain[0].isalpha() else f"m{plain}")[:limit]


def minutes_up(seconds: float) -> int:
    """Return whole minutes, rounded up, at least 1: all schedulers accept minutes."""
    return max(1, -int(-seconds // 60))


def mebibytes_up(size_bytes: int) -> int:
    """Return whole MiB, rounded up, at least 1."""
    return max(1, -(-size_bytes // (1 << 20)))


def ends_at(environment: Mapping[str, str], *names: str) -> float | None:
    """Return the end of the time limit from the first of these variables that holds a number."""
    for name in (*names, ENDS_AT):
        text = environment.get(name, "")
        if re.fullmatch(r"\d{1,12}", text):
            return float(text)
    return None


def clock_seconds(text: str) -> float | None:
    """Parse `[days-][[hours:]minutes:]seconds`, or bare seconds, to seconds; else None."""
    match = re.fullmatch(r"(?:(\d{1,5})-)?((?:\d{1,7}:){0,2}\d{1,9})", text.strip())
    if match is None:
        return None
    parts = [int(part) for part in match.group(2).split(":")]
    if match.group(1) is not None:
        parts += [0] * (3 - len(parts))  # 1-02 is a day and two hours
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + part
    return float(int(match.group(1) or 0) * 86400 + seconds)


def check_command(start: NodeStart) -> tuple[str, ...]:
    """Return the command; ValueError if its program has no absolute path."""
    if not start.command or not start.command[0].startswith("/"):
        raise ValueError("a command for another node starts with an absolute path")
    return start.command


def check_node(name: str) -> str:
    """Return a node's name; ValueError for one that could be an option or a list."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(f"`{name}` is not a valid name of a node")
    return name
