"""Rules about variables: misspelt, set nowhere, dropped on the way, or set by hand. Each function is one of them."""

import difflib
import re
from collections.abc import Iterator

from torchmuster.diagnose.lint.allocation import Option, Scheduler
from torchmuster.diagnose.lint.finding import LintFinding, Rule, ScriptView, error, note, warning
from torchmuster.diagnose.lint.names import is_from_elsewhere, meant
from torchmuster.diagnose.lint.shell_lex import DEFERRED, shown
from torchmuster.diagnose.lint.shell_script import ShellScript, variables_of
from torchmuster.diagnose.lint.starts import option

_LAUNCH_ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"
# `${X:-...}` and its kin are of someone who knows that X may be unset.
_USE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{#?([A-Za-z_]\w*)(?:\[[^\]]*\])?(?![\w\[]|:?[-=?+]))")
_GUARDED = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[^\]]*\])?:?[-=?+]|-[vnz]\s+\"?\$?\{?([A-Za-z_]\w*)")
_SET = re.compile(
    r"(?:^|[\s;(&|`{\"'])(?:export\s+|declare\s+(?:-\w+\s+)*|local\s+|readonly\s+|unset\s+|for\s+|select\s+|let\s+[\"']?"
    r"|printf\s+-v\s+|getopts\s+\S+\s+|\(\(\s*)([A-Za-z_]\w*)"
    r"|(?:^|[\s;(&|`{\"',])([A-Za-z_]\w*)(?:\[[^\]]*\])?(?:[-+*/|&]?=|\+\+|--)"
)
_READERS = re.compile(
    r"(?<![-\w])(?:read|mapfile|readarray|export|declare|local|typeset)\b([^;|&<\n]*)"
)
_OTHER_FILES = frozenset({"source", ".", "eval", "module", "ml", "spack", "conda", "mamba"})
_MAX_NAMES = 200  # a script has not so many, and each is compared with all that are known
_NUMBERS = re.compile(r"\d+(?:,\d+)*")


def misspelt_variable(view: ScriptView) -> Iterator[LintFinding]:
    """A variable that looks like one of Slurm or PBS, but is none: it is empty.

    Source: the tables in names.py.
    """
    given, seen = _set_names(view), set[str]()
    for line, text in _code(view):
        for name in variables_of(text.replace(DEFERRED, "$")):
            likely = meant(name) if name not in seen and len(seen) < _MAX_NAMES else None
            seen.add(name)
            if likely is not None and name not in given:
                whose = "Slurm" if name.startswith("SLURM") else "PBS"
                what = f"${name} is empty: {whose} sets no such variable"
                why = f"its own is called {likely}"
                yield error("misspelt-variable", line, what, why, f"${likely}")


def unset_variable(view: ScriptView) -> Iterator[LintFinding]:
    """A variable that no line sets, and that neither scheduler, shell, module nor site is likely to.

    It may come from the shell that submits the job, so it is a note; near to one that is set it is a slip.

    Source: bash(1), "PARAMETERS".
    """
    given = _set_names(view)
    candidates = sorted(given)[:_MAX_NAMES]
    guarded = {
        name for match in _GUARDED.finditer(view.job.text) for name in match.groups() if name
    }
    told: set[str] = set()
    elsewhere = any(c.name in _OTHER_FILES for c in view.job.shell.commands)
    for line, name in _uses(view.job.shell):
        if name in given | guarded | told or is_from_elsewhere(name):
            continue
        told.add(name)
        if len(told) > _MAX_NAMES:
            return
        near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.88)
        if near and not _are_of_one_kind(name, near[0]):
            what = f"${name} is set nowhere in this script; {near[0]} is"
            yield warning("unset-variable", line, what, "bash expands it to nothing", f"${near[0]}")
        elif view.job.scheduler is not Scheduler.NONE and view.starts and not elsewhere:
            what = f"${name} is set nowhere in this script"
            why = "unless the shell that submits the job has it, bash expands it to nothing"
            yield note(
                "unset-variable", line, what, why, f"${{{name}:?}} ends the job when it is empty"
            )


def _are_of_one_kind(name: str, other: str) -> bool:
    """Return whether two names differ on purpose: by a number, or in one letter of a short name."""
    return re.sub(r"\d+", "", name) == re.sub(r"\d+", "", other) or len(name) < 5


def _code(view: ScriptView) -> Iterator[tuple[int, str]]:
    """Yield the words of commands and the values of assignments, with their lines."""
    for command in view.job.shell.commands:
        for word in command.words:
            yield word.line, word.text
    for given in view.job.shell.assignments:
        yield given.line, given.value


def _uses(shell: ShellScript) -> list[tuple[int, str]]:
    """Return the variables that this shell expands, by line; those of another shell or of awk are not its own."""
    texts = [(word.line, word.text) for command in shell.commands for word in command.words]
    texts += [(given.line, given.value) for given in shell.assignments]
    in_order = sorted(texts, key=lambda pair: pair[0])
    return [
        (line, match[1] or match[2])
        for line, text in in_order
        for match in _USE.finditer(re.sub(r"'[^']*'", "", text))
    ]


def _set_names(view: ScriptView) -> set[str]:
    """Return every name that any line may set; better one too many."""
    text = view.job.text
    found = {a.name for a in view.job.shell.assignments} | view.job.shell.exports
    found |= {name for match in _SET.finditer(text) for name in match.groups() if name}
    for match in _READERS.finditer(text):
        found |= set(re.findall(r"(?:^|\s)([A-Za-z_]\w*)(?=[=\[\s]|$)", match[1]))
    for given in view.job.options:
        if given.name in ("v", "export"):
            found |= set(re.findall(r"[A-Za-z_]\w*", given.value))
    return found


def launch_address(view: ScriptView) -> Iterator[LintFinding]:
    """The nodes are to meet at `$SLURM_LAUNCH_NODE_IPADDR`, the address of the host on which srun was called.

    srun sets it for what it starts, so it is empty in the job script itself; under sbatch srun runs on the first node,
    under salloc on the login node.

    Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES"; SchedMD/slurm 284c3b95f0, src/slurmd/slurmstepd/mgr.c.
    """
    given = view.job.shell.assignments
    texts = [(a.line, a.value, False) for a in given if a.name == "MASTER_ADDR"]
    texts += [
        (s.line, f"{s.given.rdzv_endpoint} {s.given.master_addr}", s.on_nodes)
        for s in view.starts
        if s.given is not None
    ]
    first = next((found for found in texts if _LAUNCH_ADDRESS in found[1]), None)
    if first is None:
        return
    line, _, on_nodes = first
    fix = "HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1), in the job script"
    if view.job.scheduler is Scheduler.SLURM and not on_nodes:
        what = f"${_LAUNCH_ADDRESS} is empty in the job script"
        yield error(
            "launch-address", line, what, "srun sets it, for the processes that it starts", fix
        )
    else:
        what = f"the nodes are to meet at ${_LAUNCH_ADDRESS}"
        why = "it is the host on which srun was called: under salloc that is the login node"
        yield warning("launch-address", line, what, why, fix)


def srun_export(view: ScriptView) -> Iterator[LintFinding]:
    """`srun --export=X` without ALL: what it starts has Slurm's variables and X, and no other, PATH among them.

    `#SBATCH --export=NONE` does the same to every srun of the job.

    Source: srun(1), --export.
    """
    directive = next((o for o in view.job.options if o.name == "export" and not o.late), None)
    for start in view.starts:
        text = option(start, "export") if start.wrapper == "srun" else None
        if text is not None and "ALL" not in text.split(","):
            what = f"srun --export={shown(text)} drops all other variables, PATH among them"
            why = "only Slurm's own and those that are named reach what it starts"
            fix = "--export=ALL" if text in ("NONE", "NIL") else f"--export=ALL,{shown(text)}"
            yield warning("srun-export", start.line, what, why, fix)
        elif text is None and start.wrapper == "srun" and _is_none(view, directive):
            what = "srun hands nothing of this script's environment on"
            why = f"--export=NONE (line {directive.line if directive else 0}) holds for srun, too"
            yield warning("srun-export", start.line, what, why, "srun --export=ALL ...")
            return


def _is_none(view: ScriptView, directive: Option | None) -> bool:
    is_none = directive is not None and directive.value in ("NONE", "NIL")
    return is_none and "SLURM_EXPORT_ENV" not in view.job.text


def visible_devices(view: ScriptView) -> Iterator[LintFinding]:
    """CUDA_VISIBLE_DEVICES holds numbers of GPUs in a job whose scheduler gives them out.

    On a node that several jobs share these may be of another job, or hide what this one got. Lines that each take
    others divide the job's own.

    Source: gres.conf(5) of Slurm and the cgroup hook of OpenPBS: both set it, or hide the other GPUs.
    """
    if view.job.scheduler is Scheduler.NONE:
        return
    given = [a for a in view.job.shell.assignments if a.name == "CUDA_VISIBLE_DEVICES"]
    given = [a for a in given if _NUMBERS.fullmatch(a.value)]
    if len({a.value for a in given}) != 1:
        return
    gpus, count = view.job.allocation.gpus_per_node, len(given[0].value.split(","))
    what = f"CUDA_VISIBLE_DEVICES={given[0].value} is set by hand"
    why = "the scheduler says which GPUs are the job's: these may be others, or of another job"
    if gpus and gpus != count:
        what += f", and the job has {gpus} GPU{'s' * (gpus > 1)} on each node"
    if gpus == count:
        yield note("visible-devices", given[0].line, what, why, "leave it out")
    else:
        yield warning("visible-devices", given[0].line, what, why, "leave it out")


RULES: tuple[Rule, ...] = (
    misspelt_variable,
    unset_variable,
    launch_address,
    srun_export,
    visible_devices,
)
