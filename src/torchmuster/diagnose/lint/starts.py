"""The starts of training in a job script: which program, by which launcher, how often on a node; and what rules say of it."""

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torchmuster.diagnose.finding import Finding, read_texts
from torchmuster.diagnose.lint.job import JobScript, Option, number, option_pairs, whole
from torchmuster.diagnose.lint.shell import (
    DEFERRED,
    FIXED,
    Assignment,
    ShellCommand,
    ShellScript,
    is_substitution,
    shown,
    split_value,
)
from torchmuster.errors import UsageError
from torchmuster.launcher.spec.torchrun import make_parser

WRAPPERS = frozenset(
    {
        "srun",
        "mpiexec",
        "mpirun",
        "pbsdsh",
        "pbs_tmrsh",
        "ssh",
        "pdsh",
        "clush",
        "aprun",
        "jsrun",
        "ibrun",
        "parallel",
        "pssh",
    }
)
_MPI = frozenset({"mpiexec", "mpirun", "aprun"})
# A line that only mentions torchrun begins with another word.
_PREFIXES = WRAPPERS | {
    *(
        "time",
        "exec",
        "nohup",
        "command",
        "nice",
        "env",
        "stdbuf",
        "unbuffer",
        "numactl",
        "taskset",
    ),
    *("timeout", "singularity", "apptainer", "docker", "podman", "shifter", "sarus", "uv", "conda"),
    *(
        "micromamba",
        "mamba",
        "poetry",
        "pixi",
        "nsys",
        "bash",
        "sh",
        "zsh",
        "eval",
        "setsid",
        "muster",
    ),
}
_PYTHON = re.compile(r"python[\d.]*")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
# Launchers by the words that start them.
_LAUNCHERS = {
    ("accelerate", "launch"): "accelerate",
    ("accelerate-launch",): "accelerate",
    ("deepspeed",): "deepspeed",
    ("fabric", "run"): "fabric",
    ("lightning", "run"): "fabric",
    ("ray", "start"): "ray",
    ("muster", "run"): "run",
}
_NO_TRAINING = frozenset({"-c", "-V", "--version", "pip", "venv", "torch.utils.collect_env"})
_MAX_STARTS, _MAX_DEPTH, _MAX_WORDS = 100, 3, 2000
_FOLLOWS_OPTIONS = re.compile(r"\.py$|^-m$|^--(?:nnodes|nproc|rdzv|master|node|max)|^[$]")
_MENTIONS = re.compile(r"torchrun|torch\.distributed|python|accelerate|deepspeed|fabric|ray start")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptStart:
    """One line that starts training.

    Attributes:
        kind: `torchrun`, `launch` (torch.distributed.launch), `accelerate`, `deepspeed`, `fabric`,
            `ray`, `run` (`muster run`), `python` or `script` (a file that is not read).
        wrapper: What starts it on other nodes or several times; None: it runs with the script.
        given: torchrun's options; None for other kinds, and for a line that it refuses.
        refused: The error of torchrun's parser.
        partial: Options are in variables that this script does not set.
        on_nodes: A shell on each node expands its variables.
        muster: It is `muster torchrun`.
        words: The program's words, after its name.
        options: The wrapper's, `{"nodes": "2", "n": "4"}`; the first of a name counts.
    """

    kind: str
    line: int
    command: ShellCommand
    wrapper: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    given: argparse.Namespace | None = None
    refused: UsageError | None = None
    partial: bool = False
    on_nodes: bool = False
    muster: bool = False
    words: tuple[str, ...] = ()
    program: str = ""

    @property
    def by_torchrun(self) -> bool:
        """Whether it is torchrun in one of its spellings."""
        return self.kind in ("torchrun", "launch")

    @property
    def starts_workers(self) -> bool:
        """Whether it starts all workers of its node, so that each node needs it once."""
        return self.kind not in ("python", "script", "run")

    @property
    def name(self) -> str:
        """The launcher's name in sentences."""
        names = {"launch": "torchrun", "accelerate": "accelerate launch", "fabric": "fabric run"}
        names |= {"ray": "ray start", "run": "muster run"}
        return names.get(self.kind, self.kind)


def find_starts(job: JobScript) -> tuple[ScriptStart, ...]:
    """Return every start of training in a script, at most 100."""
    found: list[ScriptStart] = []
    for command in job.shell.commands:
        found += _starts_of(command, job.shell, None, 0)
        if len(found) >= _MAX_STARTS:
            break
    return tuple(found[:_MAX_STARTS])


def tasks_per_node(start: ScriptStart, job: JobScript) -> int | None:
    """Return how often the wrapper starts the program on each node; None when unknown."""
    if start.wrapper is None or start.wrapper == "ssh":
        return 1
    if start.wrapper == "srun":
        return _tasks_of_srun(start, job)
    if start.wrapper in _MPI:
        return _tasks_of_mpi(start, job)
    if start.wrapper == "pbsdsh":
        return 1 if {"u", "n", "o"} & set(start.options) else job.allocation.tasks_per_node or 1
    return None


def tasks(start: ScriptStart, job: JobScript) -> int | None:
    """Return how often the wrapper starts the program in all; None when unknown."""
    if (total := _number_of(start, job, "ntasks", "n", "np")) is not None:
        return total
    each = tasks_per_node(start, job)
    nodes = _number_of(start, job, "nodes", "N") or job.allocation.nodes
    return each * nodes if each is not None and nodes is not None else each


def option(start: ScriptStart, *names: str) -> str | None:
    """Return the wrapper's option by any of its names."""
    return next((start.options[name] for name in names if name in start.options), None)


def uses_part_of_nodes(start: ScriptStart, job: JobScript) -> bool:
    """Return whether a step uses only some of the job's nodes."""
    text = option(start, "nodes", "N")
    part = text is not None and number(text, job, start.line) != job.allocation.nodes
    return part or option(start, "w", "nodelist", "host", "H") is not None


def _number_of(start: ScriptStart, job: JobScript, *names: str) -> int | None:
    text = option(start, *names)
    return None if text is None else number(text, job, start.line)


def _tasks_of_srun(start: ScriptStart, job: JobScript) -> int | None:
    allocation = job.allocation
    if option(start, "ntasks-per-node") is not None:
        return _number_of(start, job, "ntasks-per-node")
    nodes = _number_of(start, job, "nodes", "N") or allocation.nodes
    if option(start, "ntasks", "n") is not None:
        tasks = _number_of(start, job, "ntasks", "n")
        return -(-tasks // nodes) if tasks and nodes else None
    if option(start, "nodes", "N") is not None and allocation.ntasks and nodes:
        return allocation.tasks_per_node
    return allocation.tasks_per_node or 1


def _tasks_of_mpi(start: ScriptStart, job: JobScript) -> int | None:
    per_node = ("ppn", "npernode", "N", "ntasks-per-node", "perhost")
    if option(start, *per_node) is not None:
        return _number_of(start, job, *per_node)
    mapped = re.search(r"ppr:(\d+):node", " ".join(start.options.values()))
    if mapped is not None:
        return whole(mapped[1])
    nodes = job.allocation.nodes
    if option(start, "n", "np") is not None:
        tasks = _number_of(start, job, "n", "np")
        return -(-tasks // nodes) if tasks and nodes else None
    return job.allocation.tasks_per_node


def _starts_of(
    command: ShellCommand, shell: ShellScript, outer: ScriptStart | None, depth: int
) -> Iterator[ScriptStart]:
    """Yield the starts of one command: its own, and those in scripts that it passes to a shell."""
    words = _filled_in(command, shell)
    first = words[0].rsplit("/", 1)[-1] if words else ""
    if not words or not (first in _PREFIXES or first[:1] in "$" + FIXED or _program(words, 0)):
        return
    begin = next(
        (i for i in range(len(words)) if _program(words, i, wrapped=_wrapped(words[:i], outer))),
        None,
    )
    wrapper, options = _wrapper(words if begin is None else words[:begin], outer)
    if begin is not None:
        yield _make(command, words, begin, wrapper, options, outer)
        return
    for word in words[1:]:
        if depth < _MAX_DEPTH and re.search(r"\s", word) and _MENTIONS.search(word):
            yield from _inside(word, command, shell, wrapper, options, outer, depth)


def _wrapped(before: Sequence[str], outer: ScriptStart | None) -> bool:
    return _wrapper(before, outer)[0] is not None


def _inside(
    text: str,
    command: ShellCommand,
    shell: ShellScript,
    wrapper: str | None,
    options: Mapping[str, str],
    outer: ScriptStart | None,
    depth: int,
) -> Iterator[ScriptStart]:
    """Yield the starts in a script for another shell."""
    inner = shell.read_inner(text, command.line)
    around = ScriptStart(
        kind="shell",
        line=command.line,
        command=command,
        wrapper=wrapper,
        options=options,
        on_nodes=wrapper is not None or (outer is not None and outer.on_nodes),
    )
    for nested in inner.commands:
        yield from _starts_of(nested, inner, around, depth + 1)


def _filled_in(command: ShellCommand, shell: ShellScript) -> list[str]:
    """Return the words; an unquoted variable is split into its words."""
    found: list[str] = []
    for word in command.words:
        text = word.text
        if re.fullmatch(rf"[${FIXED}]\{{?\w+(?:\[[@*]\])?\}}?", text):
            value = shell.expand(text, command.line)
            if value != text and (" " in value or "torchrun" in value or not value):
                is_one = not word.bare and "[" not in text  # "$X" is one word, whatever it holds
                found += [value] if is_one else split_value(value)
                continue
        elif FIXED in text and re.search(r"\s", text):
            text = shell.expand(text, command.line)
        found.append(text)
        if len(found) > _MAX_WORDS:
            break
    return found


def _program(words: Sequence[str], index: int, *, wrapped: bool = False) -> str | None:
    """Return the kind of start that the word at `index` is; None if it is no start."""
    name = words[index].rsplit("/", 1)[-1]
    if name == "torchrun":
        return "torchrun"
    launcher = _launcher(name, words, index)
    if launcher is not None:
        return launcher[0]
    if _PYTHON.fullmatch(name):
        rest = [word for word in words[index + 1 : index + 4] if word not in ("-u", "-O", "-s")]
        if len(rest) > 1 and rest[0] == "-m" and rest[1] in _MODULES:
            return {_MODULES[0]: "torchrun", _MODULES[1]: "launch"}.get(rest[1], "accelerate")
        if wrapped and rest and not _NO_TRAINING & set(rest[:2]):
            return "python"
    if wrapped and re.search(r"\w\.(?:sh|bash)$", name):
        return "script"
    return None


def _launcher(name: str, words: Sequence[str], index: int) -> tuple[str, int] | None:
    """Return the launcher that begins at a word and its number of words; something must follow."""
    for spelling, kind in _LAUNCHERS.items():
        if name == spelling[0] and tuple(words[index + 1 : index + len(spelling)]) == spelling[1:]:
            is_used = len(words) > index + len(spelling) and "install" not in words[:index]
            return (kind, len(spelling)) if is_used else None
    return None


def _wrapper(
    words: Sequence[str], outer: ScriptStart | None
) -> tuple[str | None, Mapping[str, str]]:
    """Return the last wrapper among words, and its options."""
    places = [i for i, word in enumerate(words) if word.rsplit("/", 1)[-1] in WRAPPERS]
    if not places:
        return (outer.wrapper, outer.options) if outer is not None else (None, {})
    name = words[places[-1]].rsplit("/", 1)[-1]
    own = list(takewhile(lambda word: word != "--", words[places[-1] + 1 :]))
    options: dict[str, str] = {}
    for key, value in option_pairs(own, long_by_one_dash=name in _MPI):
        options.setdefault(key, value)
    return name, options


def _make(
    command: ShellCommand,
    words: list[str],
    begin: int,
    wrapper: str | None,
    options: Mapping[str, str],
    outer: ScriptStart | None,
) -> ScriptStart:
    kind = _program(words, begin, wrapped=wrapper is not None) or "python"
    name = words[begin].rsplit("/", 1)[-1]
    launcher = _launcher(name, words, begin)
    rest = words[begin + (launcher[1] if launcher else 1) :]
    if launcher is None and kind not in ("python", "script") and name != "torchrun":
        rest = rest[next(i for i, word in enumerate(rest) if word in _MODULES) + 1 :]
    given = refused = None
    partial = False
    if kind in ("torchrun", "launch"):
        known = _without_unknown(rest)
        partial, rest = len(known) < len(rest), known
        given, refused = _parse(rest)
    return ScriptStart(
        kind=kind,
        line=outer.line if outer is not None else command.line,
        command=outer.command if outer is not None else command,
        wrapper=wrapper,
        options=options,
        given=given,
        refused=None if partial else refused,
        partial=partial,
        on_nodes=outer is not None and outer.on_nodes,
        muster=begin > 0 and words[begin - 1].rsplit("/", 1)[-1] == "muster",
        words=tuple(rest),
        program=shown(words[begin]),
    )


def _without_unknown(words: Sequence[str]) -> list[str]:
    """Return the words without variables for options that this script does not set."""
    kept: list[str] = []
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        bare = word[:1] in (*"$", FIXED, DEFERRED) and not re.search(r"[./]\w", word)
        bare = bare or is_substitution(word)
        is_value = bool(kept) and kept[-1].startswith("-") and "=" not in kept[-1]
        if not (bare and not is_value and _FOLLOWS_OPTIONS.search(following)):
            kept.append(word)
        if re.search(r"\.py$", word):
            return [*kept, *words[index + 1 :]]
    return kept


def _parse(words: list[str]) -> tuple[argparse.Namespace | None, UsageError | None]:
    words = [word for word in words if word not in ("--use-env", "--use_env")]
    if {"-h", "--help"} & set(words):  # argparse would print it
        return None, None
    try:
        return make_parser({}).parse_args(words), None
    except UsageError as error:
        return None, error
    except SystemExit:
        return None, None


TEXTS = read_texts(os.path.join(os.path.dirname(__file__), "rules.txt"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptView:
    """A script and its starts: the input of every rule."""

    job: JobScript
    starts: tuple[ScriptStart, ...]

    @property
    def nodes(self) -> int | None:
        """The number of nodes in the directives."""
        return self.job.allocation.nodes

    def is_wide(self, start: ScriptStart) -> bool:
        """Return whether a start is for several nodes, by the job or by its own --nnodes."""
        if self.nodes is not None:
            return self.nodes > 1
        if start.given is None:
            return False
        low = start.given.nnodes.partition(":")[2] or start.given.nnodes
        return (number(low, self.job, start.line) or 1) > 1

    def finding(
        self,
        name: str,
        at: ScriptStart | ShellCommand | Assignment | Option | int,
        **words: object,
    ) -> Finding:
        """Return what `rules.txt` says about a line.

        Args:
            name: That of the text.
            at: The line, or the start, command, assignment or option of the line.
            **words: Values by name.
        """
        line = at if isinstance(at, int) else at.line
        text = TEXTS[name]
        return text.finding((), level=None, at=None, line=line, it=at, view=self, **words)


Rule = Callable[[ScriptView], Iterable[Finding]]
