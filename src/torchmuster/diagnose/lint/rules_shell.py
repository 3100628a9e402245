"""Rules about the shell script itself: continued lines, libraries, and variables.

Variables may be misspelled, never set, dropped on the way, or set by hand. `RULES` lists the rules, and `VARIABLE_RULES`.
"""

import difflib
import os
import re
from collections.abc import Iterator, Sequence

from torchmuster.diagnose.finding import Finding
from torchmuster.diagnose.lint.job import Option, Scheduler
from torchmuster.diagnose.lint.shell import DEFERRED, ShellScript, shown, variables_of
from torchmuster.diagnose.lint.starts import (
    Rule,
    ScriptStart,
    ScriptView,
    option,
)
from torchmuster.launcher.files.paragraphs import read_paragraphs

_FOR_WORKERS = re.compile(
    r"(?:NCCL|TORCH_NCCL|FI|UCX|GLOO|RCCL|TORCH|TORCHELASTIC|TORCHINDUCTOR|HSA)_[A-Z0-9_]+"
    r"|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_MAX_CONNECTIONS|OMP_NUM_THREADS|MASTER_ADDR|MASTER_PORT"
)
_EFA_MACHINE = re.compile(r"/opt/amazon|FI_EFA_|\bp[45]d?n?\.|\baws\b[^-_]", re.IGNORECASE)
_SLINGSHOT = re.compile(r"\bhsn\d*\b|\bcxi\b|cray|slingshot", re.IGNORECASE)
_OWN_NCCL = re.compile(r"(?<!ofi-)(?<!ofi_)(?<![a-z])(?:lib)?r?nccl", re.IGNORECASE)
_CONDAS = frozenset({"conda", "mamba", "micromamba"})
_CONDA_HOOK = re.compile(
    r"conda\.sh|mamba\.sh|shell\.bash|shell\s+(?:hook|activate)|\.bashrc|\.(?:bash_)?profile|micromamba\s+shell"
)
_LOGIN_SHELL = re.compile(r"#!.*\b(?:bash|sh|zsh)\b.*\s-(?:\w*[li]|-login)")
_GOES = re.compile(r"^[^#\n]*\b(?:cd|pushd|chdir)\s+\S", re.MULTILINE)
_CASE = re.compile(r"\s*\(?-[^\s|]*(?:\s*\|\s*-[^\s|]*)*\)(?:\s|$)")  # a branch of `case`
_HERE = re.compile(r"hostname|\[0\]|head -n ?1|head -1|SLURMD_NODENAME|localhost|127\.0")
_SHELLS = frozenset({"bash", "sh", "zsh", "env", "python", "python3"})


def glued_continuation(view: ScriptView) -> Iterator[Finding]:
    """Report a missing blank before the backslash at the end of a line and in the next line.

    bash joins both lines to one word: `--nproc_per_node=4--nnodes=2`.

    Source: the bash manual, "Escape Character".
    """
    lines = view.job.shell.slips.glued
    if lines:
        ends = [n for n in lines if n - lines[0] < 100][:20]
        where = f" (lines {ends[0]} to {ends[-1]})" if len(ends) > 1 else ""
        joined = _joined(view, lines[0])
        yield view.finding("glued-continuation", lines[0], lines=where, joined=joined)


def _joined(view: ScriptView, line: int) -> str:
    both = [
        view.job.lines[n].strip().rstrip("\\") for n in (line - 1, line) if n < len(view.job.lines)
    ]
    text = "".join(both)
    return text if len(text) <= 70 else f"{text[:67]}..."


def blanks_after_backslash(view: ScriptView) -> Iterator[Finding]:
    """Report a backslash with blanks after it: the command ends there.

    Source: the bash manual, "Escape Character".
    """
    for line in view.job.shell.slips.blanks_after:
        yield view.finding("blanks-behind-backslash", line)


def lost_continuation(view: ScriptView) -> Iterator[Finding]:
    """Report a line of options after a line without a backslash: bash runs it as a command.

    Source: the bash manual, "Lists of Commands"; seen in published job scripts.
    """
    for command in view.job.shell.commands:
        is_case = _CASE.match(view.job.lines[command.line - 1])
        if re.match(r"--[A-Za-z]", command.words[0].raw) and not is_case:
            word = shown(command.words[0].text)[:60]
            yield view.finding("lost-continuation", command, word=word)


def comment_inside(view: ScriptView) -> Iterator[Finding]:
    """Report a comment between two lines of a command: the options below it run as a command.

    Source: the bash manual, "Comments".
    """
    for line in view.job.shell.slips.comments_inside:
        yield view.finding("comment-inside", line)


def windows_lines(view: ScriptView) -> Iterator[Finding]:
    """Report Windows line ends: every last word has a carriage return at its end.

    Source: sbatch refuses such a script: "Batch script contains DOS line breaks".
    """
    for number, line in enumerate(view.job.lines, 1):
        if line.endswith("\r"):
            yield view.finding("windows-lines", number)
            return


def windows_path(view: ScriptView) -> Iterator[Finding]:
    r"""Report backslashes in a path: bash reads `source myenv\bin\activate` as `myenvbinactivate`.

    Source: the bash manual, "Escape Character"; a published tutorial.
    """
    for command in view.job.shell.commands:
        if command.name in ("source", ".") and len(command.words) > 1:
            word = command.words[1]
            if word.bare is False and re.search(r"\w\\\w", word.raw):
                yield view.finding(
                    "windows-path",
                    command,
                    written=shown(word.raw),
                    read=shown(word.text),
                    fix=word.raw.replace("\\", "/"),
                )


def not_exported(view: ScriptView) -> Iterator[Finding]:
    """Report `NCCL_DEBUG=INFO` without export: it never reaches a worker.

    Source: the bash manual, "Environment".
    """
    shell = view.job.shell
    if shell.exports_all or not view.starts:
        return
    used = set(variables_of(view.job.text))
    reported: set[str] = set()
    for given in shell.assignments:
        name = given.name
        if (
            given.exported
            or name in shell.exports
            or name in reported
            or not _FOR_WORKERS.fullmatch(name)
        ):
            continue
        if name not in used:
            reported.add(name)
            yield view.finding("not-exported", given, value=shown(given.raw))


def own_nccl(view: ScriptView) -> Iterator[Finding]:
    """Report an LD_LIBRARY_PATH or LD_PRELOAD with another NCCL than that of torch's wheel.

    Which of the two is loaded depends on the node; a job with two versions fails.

    Source: failures N18.
    """
    for given in view.job.shell.assignments:
        if given.name not in ("LD_LIBRARY_PATH", "LD_PRELOAD") or not view.starts:
            continue
        parts = [p for p in re.split(r"[:\s]", given.value) if "LD_LIBRARY_PATH" not in p]
        paths = [shown(view.job.shell.expand(part, given.line)) for part in parts]
        own = [path for path in paths if _OWN_NCCL.search(path) and "ofi" not in path.lower()]
        if own:
            yield view.finding("own-nccl", given, path=own[0])


def efa_provider(view: ScriptView) -> Iterator[Finding]:
    """Report `FI_PROVIDER=efa` on other machines than EC2's with EFA: libfabric fails or uses TCP.

    Source: failures N13, N15.
    """
    for given in view.job.shell.assignments:
        if given.name != "FI_PROVIDER" or "efa" not in given.value.lower():
            continue
        if _SLINGSHOT.search(view.job.text):
            yield view.finding("efa-on-slingshot", given)
        elif not _EFA_MACHINE.search(view.job.text):
            yield view.finding("efa-provider", given)


def ping_to_itself(view: ScriptView) -> Iterator[Finding]:
    """Note a head that pings its own address: that works without any network.

    Source: a published tutorial, where the ping succeeded and the job did not.
    """
    if (view.nodes or 1) < 2:
        return
    for command in view.job.shell.commands:
        if command.name != "ping" or len(command.words) < 2:
            continue
        target = command.words[-1].text
        values = [target, *(a.value for a in view.job.shell.sources(target, command.line))]
        if any(_HERE.search(value) for value in values):
            yield view.finding("ping-to-itself", command)


def not_carried(view: ScriptView) -> Iterator[Finding]:
    """Report exported variables that do not reach what ssh and pbsdsh start.

    Source: failures X20; OpenPBS 23.06: only `qsub -v` reaches processes of pbsdsh.
    """
    names = sorted(
        {*view.job.shell.exports} & {n for n in view.job.shell.exports if _FOR_WORKERS.fullmatch(n)}
    )
    names = [name for name in names if not name.startswith("MASTER_")]
    for start in view.starts:
        if start.wrapper not in ("ssh", "pbsdsh", "pdsh", "clush") or not names:
            continue
        text = " ".join(word.raw for word in start.command.words)
        lost = [name for name in names if name not in text]
        if lost:
            yield view.finding("not-carried", start, names=", ".join(lost[:3]), first=lost[0])


def conda_activate(view: ScriptView) -> Iterator[Finding]:
    """Report `conda activate` in a batch shell, which has not read the lines of `conda init`.

    A shell of PBS is a login shell and may have read them; a module, or a sourced file, may bring
    them.

    Source: conda's "CommandNotFoundError: Your shell has not been properly configured"; conda issue
    7980: functions of a shell do not reach its children.
    """
    text, commands = view.job.text, view.job.shell.commands
    found = [c for c in commands if c.name in _CONDAS and c.texts[1:2] in (["activate"], ["init"])]
    others = {c.name for c in commands} & {"source", ".", "module", "ml"}
    is_ready = _CONDA_HOOK.search(text) or _LOGIN_SHELL.match(text) or others
    if not found or is_ready or view.job.scheduler is not Scheduler.SLURM:
        return
    first = found[0]
    tool, hook = "conda", "conda shell.bash hook"
    if first.name == "micromamba":
        tool, hook = "micromamba", "micromamba shell hook --shell bash"
    name = "conda-init" if first.texts[1] == "init" else "conda-activate"
    yield view.finding(name, first, tool=tool, hook=hook)


def pbs_home(view: ScriptView) -> Iterator[Finding]:
    """Report a PBS job that begins in the home folder and never leaves it for that of its qsub.

    `-koed` concerns the output files only.

    Source: qsub(1B) of OpenPBS, "sandbox": "PBS uses the user's home directory for staging and
    execution".
    """
    if view.job.scheduler is not Scheduler.PBS or _GOES.search(view.job.text):
        return
    if any("sandbox" in o.value for o in view.job.options if not o.late):
        return
    for start in view.starts:
        script = next((word for word in start.words if re.search(r"\.py$", word)), "")
        if re.match(r"[\w.]", script) and not start.muster:
            yield view.finding("pbs-home", start, script=script)
            return


def bare_pbsdsh(view: ScriptView) -> Iterator[Finding]:
    """Report a bare command of pbsdsh, which sets PATH=/bin:/usr/bin: torchrun is not found there.

    Source: OpenPBS 23.06.
    """
    for start in view.starts:
        first = _first_of_pbsdsh(start)
        if first is not None and re.fullmatch(r"[\w.-]+", first) and first not in _SHELLS:
            yield view.finding("bare-pbsdsh", start, program=first)


def pbsdsh_dashes(view: ScriptView) -> Iterator[Finding]:
    """Report a missing `--` before pbsdsh's program: pbsdsh reads the program's options as its own.

    Source: OpenPBS 23.06: `invalid option`, its usage, exit code 1.
    """
    for command in view.job.shell.commands:
        rest = _after_options(command.texts[1:]) if command.name == "pbsdsh" else ()
        if rest and rest[0] != "--" and any(word.startswith("-") for word in rest[1:]):
            yield view.finding("pbsdsh-dashes", command, program=shown(rest[0]))


def _after_options(words: Sequence[str]) -> Sequence[str]:
    """Return the words after pbsdsh's own options: `--`, or the program."""
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        rest = rest[2:] if rest[0] in ("-n", "-c", "-h") else rest[1:]
    return rest


def _first_of_pbsdsh(start: ScriptStart) -> str | None:
    words = start.command.texts
    if start.wrapper != "pbsdsh" or not words or start.command.name != "pbsdsh":
        return None
    rest = _after_options(words[1:])
    program = rest[1:] if rest and rest[0] == "--" else rest
    return program[0] if program else None


def gpus_variable(view: ScriptView) -> Iterator[Finding]:
    """Report `$SLURM_GPUS_PER_NODE`: only --gpus-per-node sets it, to the same text.

    Source: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES".
    """
    if view.job.scheduler is not Scheduler.SLURM:
        return
    given = {o.name: o for o in view.job.options if not o.late}
    for start in view.starts:
        text = start.given.nproc_per_node if start.given is not None else ""
        if (
            "SLURM_GPUS_PER_NODE" not in variables_of(view.job.shell.expand(text, start.line))
            or ":-" in text
        ):
            continue
        asked = given.get("gpus-per-node")
        if asked is None and any(
            o.name in ("gres", "gpus", "gpus-per-task", "nodes") for o in given.values()
        ):
            yield view.finding("gpus-variable", start)
        elif asked is not None and ":" in asked.value:
            yield view.finding("gpus-with-type", start, asked=asked)


RULES: tuple[Rule, ...] = (
    glued_continuation,
    blanks_after_backslash,
    lost_continuation,
    comment_inside,
    windows_lines,
    windows_path,
    not_exported,
    own_nccl,
    efa_provider,
    ping_to_itself,
    not_carried,
    conda_activate,
    pbs_home,
    bare_pbsdsh,
    pbsdsh_dashes,
    gpus_variable,
)


# Names of variables that job scripts get from elsewhere: the schedulers' own, and those of every
# shell.
_TABLES = {
    table.name: table
    for table in read_paragraphs(os.path.join(os.path.dirname(__file__), "variables.txt"))
}
OF_SCHEDULERS = _TABLES["slurmd"].words.union(
    (f"SLURM_{word}" for word in _TABLES["slurm"].words),
    (f"PBS_{word}" for word in _TABLES["pbs"].words),
)
_FROM_MEMORY = _TABLES["from-memory"].table
# bash(1), "Shell Variables"; environ(7); and other names that sites, modules, launchers and
# libraries set.
_OF_SHELLS = re.compile(
    r"BASH\w*|COMP_\w+|DIRSTACK|E?UID|EPOCH\w+|FUNCNAME|GROUPS|HIST\w*|HOME|HOST(?:NAME|TYPE)?|IFS|LANG|LC_\w+|LINENO"
    r"|LOGNAME|MACHTYPE|MAIL|MANPATH|OLDPWD|OPT(?:ARG|IND|ERR)|OSTYPE|PATH|PIPESTATUS|PPID|PS\d|PWD|RANDOM|REPLY|SECONDS"
    r"|SHELL\w*|SHLVL|SRANDOM|TERM|TZ|USER(?:NAME)?|TMP|TEMP|TMPDIR|EDITOR|DISPLAY|_"
    r"|(?:SLURMD?|SRUN|SBATCH|PBS|OMPI|PMI|PMIX|MPI|FLUX|JOB|CONDA|CUDA|NVIDIA|NCCL|ROCR?|HIP|LMOD|EB|SPACK|XDG"
    r"|SSH|SINGULARITY|APPTAINER|TORCHELASTIC|MUSTER|HF|WANDB|AWS|KUBERNETES|RAY)_?\w*"
    r"|\w*(?:HOME|ROOT|DIR|PREFIX|SCRATCH|WORK|PROJECT|STORE|PROJ|DATA|PATH|TOKEN|KEY|PASSWORD|ACCOUNT)\w*"
    r"|\w*(?:ARGS|OPTS|OPTIONS|FLAGS)|VIRTUAL_ENV|RANK|LOCAL_RANK|WORLD_SIZE|NCPUS|NF|NR|FS",
    re.IGNORECASE,
)


def is_from_elsewhere(name: str) -> bool:
    """Return whether a variable may be set without a line of the script."""
    return _OF_SHELLS.fullmatch(name) is not None


def meant(name: str) -> str | None:
    """Return the scheduler's variable that a name probably means; None for a correct name."""
    if name in OF_SCHEDULERS or not name.startswith(("SLURM_", "PBS_", "SLURMD_")):
        return None
    joined = {known.replace("_", ""): known for known in sorted(OF_SCHEDULERS)}
    likely = _FROM_MEMORY.get(name) or joined.get(name.replace("_", ""))
    near = difflib.get_close_matches(name, sorted(OF_SCHEDULERS), n=1, cutoff=0.9)
    return likely or (near[0] if near else None)


_LAUNCH_ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"
# `${X:-...}` and similar forms show that the author knows that X may be unset.
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
_MAX_NAMES = 200  # no script has so many; each is compared with all known names
_NUMBERS = re.compile(r"\d+(?:,\d+)*")


def misspelt_variable(view: ScriptView) -> Iterator[Finding]:
    """Report a variable that looks like one of Slurm's or PBS's but is none: it is empty.

    Source: the tables in this module.
    """
    given, seen = _set_names(view), set[str]()
    for line, text in _code(view):
        for name in variables_of(text.replace(DEFERRED, "$")):
            likely = meant(name) if name not in seen and len(seen) < _MAX_NAMES else None
            seen.add(name)
            if likely is not None and name not in given:
                whose = "Slurm" if name.startswith("SLURM") else "PBS"
                words = {"variable": name, "whose": whose, "likely": likely}
                yield view.finding("misspelt-variable", line, **words)


def unset_variable(view: ScriptView) -> Iterator[Finding]:
    """Report a variable that no line sets, and probably no scheduler, shell, module or site.

    It may come from the shell that submits the job, so it is a note; if a similar name is set, it
    is a warning.

    Source: bash(1), "PARAMETERS".
    """
    given = _set_names(view)
    candidates = sorted(given)[:_MAX_NAMES]
    guarded = {
        name for match in _GUARDED.finditer(view.job.text) for name in match.groups() if name
    }
    reported: set[str] = set()
    elsewhere = any(c.name in _OTHER_FILES for c in view.job.shell.commands)
    for line, name in _uses(view.job.shell):
        if name in given | guarded | reported or is_from_elsewhere(name):
            continue
        reported.add(name)
        if len(reported) > _MAX_NAMES:
            return
        near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.88)
        if near and not _are_of_one_kind(name, near[0]):
            yield view.finding("another-is-set", line, variable=name, near=near[0])
        elif view.job.scheduler is not Scheduler.NONE and view.starts and not elsewhere:
            yield view.finding("unset-variable", line, variable=name)


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
    """Return the variables that this shell (no inner shell, no awk) expands, by line."""
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


def launch_address(view: ScriptView) -> Iterator[Finding]:
    """Report nodes that meet at `$SLURM_LAUNCH_NODE_IPADDR`, the host on which srun was called.

    srun sets it for what it starts, so it is empty in the job script itself; under sbatch srun runs
    on the first node, under salloc on the login node.

    Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES"; SchedMD/slurm 284c3b95f0,
    src/slurmd/slurmstepd/mgr.c.
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
    is_empty = view.job.scheduler is Scheduler.SLURM and not on_nodes
    yield view.finding("launch-address-empty" if is_empty else "launch-address", line)


def srun_export(view: ScriptView) -> Iterator[Finding]:
    """Report `srun --export=X` without ALL: its tasks get Slurm's variables and X, but not PATH.

    `#SBATCH --export=NONE` does the same to every srun of the job.

    Source: srun(1), --export.
    """
    directive = next((o for o in view.job.options if o.name == "export" and not o.late), None)
    for start in view.starts:
        text = option(start, "export") if start.wrapper == "srun" else None
        if text is not None and "ALL" not in text.split(","):
            more = "" if text in ("NONE", "NIL") else f",{shown(text)}"
            yield view.finding("srun-export", start, names=shown(text), more=more)
        elif text is None and start.wrapper == "srun" and _is_none(view, directive):
            yield view.finding("srun-exports-nothing", start, directive=directive)
            return


def _is_none(view: ScriptView, directive: Option | None) -> bool:
    is_none = directive is not None and directive.value in ("NONE", "NIL")
    return is_none and "SLURM_EXPORT_ENV" not in view.job.text


def visible_devices(view: ScriptView) -> Iterator[Finding]:
    """Report CUDA_VISIBLE_DEVICES with numbers in a job whose scheduler assigns the GPUs.

    On a shared node these may belong to another job, or hide this one's. Lines with different
    numbers divide the job's own.

    Source: gres.conf(5) of Slurm and the cgroup hook of OpenPBS: both set it, or hide the other
    GPUs.
    """
    if view.job.scheduler is Scheduler.NONE:
        return
    given = [a for a in view.job.shell.assignments if a.name == "CUDA_VISIBLE_DEVICES"]
    given = [a for a in given if _NUMBERS.fullmatch(a.value)]
    if len({a.value for a in given}) != 1:
        return
    gpus, count = view.job.allocation.gpus_per_node, len(given[0].value.split(","))
    if gpus == count:
        yield view.finding("visible-devices-fit", given[0])
    else:
        but = f", and the job has {gpus} GPU{'s' * (gpus > 1)} on each node" if gpus else ""
        yield view.finding("visible-devices", given[0], but=but)


VARIABLE_RULES: tuple[Rule, ...] = (
    misspelt_variable,
    unset_variable,
    launch_address,
    srun_export,
    visible_devices,
)
