"""Rules about the shell script itself: continued lines, variables, libraries.

`RULES` lists them.
"""

import re
from collections.abc import Iterator, Sequence

from torchmuster.diagnose.lint.allocation import Scheduler
from torchmuster.diagnose.lint.finding import LintFinding, Rule, ScriptView, error, note, warning
from torchmuster.diagnose.lint.shell_lex import shown
from torchmuster.diagnose.lint.shell_script import variables_of
from torchmuster.diagnose.lint.starts import ScriptStart

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


def glued_continuation(view: ScriptView) -> Iterator[LintFinding]:
    """Report a missing blank before the backslash at the end of a line and in the next line.

    bash joins both lines to one word: `--nproc_per_node=4--nnodes=2`.

    Source: the bash manual, "Escape Character".
    """
    lines = view.job.shell.slips.glued
    if lines:
        ends = [n for n in lines if n - lines[0] < 100][:20]
        what = "there is no blank before the backslash"
        if len(ends) > 1:
            what += f" (lines {ends[0]} to {ends[-1]})"
        why = f"bash joins this line and the next to one word: `{_joined(view, lines[0])}`"
        yield error(
            "glued-continuation", lines[0], what, why, "write a blank before each backslash"
        )


def _joined(view: ScriptView, line: int) -> str:
    both = [
        view.job.lines[n].strip().rstrip("\\") for n in (line - 1, line) if n < len(view.job.lines)
    ]
    text = "".join(both)
    return text if len(text) <= 70 else f"{text[:67]}..."


def blanks_after_backslash(view: ScriptView) -> Iterator[LintFinding]:
    """Report a backslash with blanks after it: the command ends there.

    Source: the bash manual, "Escape Character".
    """
    for line in view.job.shell.slips.blanks_after:
        what = "there are blanks after the backslash"
        why = "the command ends here, and the next line runs as a separate command"
        yield error(
            "blanks-behind-backslash",
            line,
            what,
            why,
            "remove the blanks at the end of the line",
        )


def lost_continuation(view: ScriptView) -> Iterator[LintFinding]:
    """Report a line of options after a line without a backslash: bash runs it as a command.

    Source: the bash manual, "Lists of Commands"; seen in published job scripts.
    """
    for command in view.job.shell.commands:
        is_case = _CASE.match(view.job.lines[command.line - 1])
        if re.match(r"--[A-Za-z]", command.words[0].raw) and not is_case:
            what = f"bash runs `{shown(command.words[0].text)[:60]}` as a command"
            why = "the line above has no backslash at its end: the command ended there"
            yield error("lost-continuation", command.line, what, why, "end the line above in ` \\`")


def comment_inside(view: ScriptView) -> Iterator[LintFinding]:
    """Report a comment between two lines of a command: the options below it run as a command.

    Source: the bash manual, "Comments".
    """
    for line in view.job.shell.slips.comments_inside:
        what = "this comment ends the command above"
        why = "the options below it run as a separate command"
        yield error("comment-inside", line, what, why, "move it above the command")


def windows_lines(view: ScriptView) -> Iterator[LintFinding]:
    """Report Windows line ends: every last word has a carriage return at its end.

    Source: sbatch refuses such a script: "Batch script contains DOS line breaks".
    """
    for number, line in enumerate(view.job.lines, 1):
        if line.endswith("\r"):
            what = "the lines end as on Windows"
            why = "sbatch refuses such a script, and bash reads the carriage return as part of the last word"
            yield error("windows-lines", number, what, why, f"sed -i 's/\\r$//' {view.job.name}")
            return


def windows_path(view: ScriptView) -> Iterator[LintFinding]:
    r"""Report backslashes in a path: bash reads `source myenv\bin\activate` as `myenvbinactivate`.

    Source: the bash manual, "Escape Character"; a published tutorial.
    """
    for command in view.job.shell.commands:
        if command.name in ("source", ".") and len(command.words) > 1:
            word = command.words[1]
            if word.bare is False and re.search(r"\w\\\w", word.raw):
                what = f"`{shown(word.raw)}` has backslashes"
                why = f"bash drops them and looks for `{shown(word.text)}`"
                fix = f"source {word.raw.replace(chr(92), '/')}"
                yield error("windows-path", command.line, what, why, fix)


def not_exported(view: ScriptView) -> Iterator[LintFinding]:
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
            what = f"{name} is set but not exported"
            why = "it exists in this shell only: no worker gets it"
            yield warning(
                "not-exported", given.line, what, why, f"export {name}={shown(given.raw)}"
            )


def own_nccl(view: ScriptView) -> Iterator[LintFinding]:
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
            what = f"{given.name} adds another NCCL: {own[0]}"
            why = "torch's wheel has its own; versions that differ between nodes or libraries end the job"
            fix = "leave it out, and look at torch.cuda.nccl.version()"
            yield warning("own-nccl", given.line, what, why, fix)


def efa_provider(view: ScriptView) -> Iterator[LintFinding]:
    """Report `FI_PROVIDER=efa` on other machines than EC2's with EFA: libfabric fails or uses TCP.

    Source: failures N13, N15.
    """
    for given in view.job.shell.assignments:
        if given.name != "FI_PROVIDER" or "efa" not in given.value.lower():
            continue
        why = "libfabric finds no such device there: NCCL falls back to TCP, or fails"
        if _SLINGSHOT.search(view.job.text):
            what = "FI_PROVIDER=efa is for EC2, and this machine has Slingshot"
            yield error(
                "efa-provider", given.line, what, why, "export FI_PROVIDER=cxi, or leave it out"
            )
        elif not _EFA_MACHINE.search(view.job.text):
            what = "FI_PROVIDER=efa is for EC2 instances with EFA"
            yield note(
                "efa-provider",
                given.line,
                what,
                why,
                "on other machines leave it out; `fi_info -p efa` shows what there is",
            )


def ping_to_itself(view: ScriptView) -> Iterator[LintFinding]:
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
            what = "the head pings itself"
            why = "that works without any network: it proves nothing about the other nodes, nor about ports"
            fix = (
                "ping from another node, or leave it out: muster names a node that can't be reached"
            )
            yield note("ping-to-itself", command.line, what, why, fix)


def not_carried(view: ScriptView) -> Iterator[LintFinding]:
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
            what = f"{start.wrapper} does not pass {', '.join(lost[:3])} to the other nodes"
            why = "a variable that the job script exports reaches this node only"
            fix = f"{start.wrapper} ... env {lost[0]}=... torchrun ..."
            yield warning("not-carried", start.line, what, why, fix)


def conda_activate(view: ScriptView) -> Iterator[LintFinding]:
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
    name = f"{first.name} {first.texts[1]}"
    what = f"`{name}` does not work in a batch shell"
    why = (
        "it is a function that an interactive shell defines; the script goes on with another Python"
    )
    if first.texts[1] == "init":
        why = "it writes lines into ~/.bashrc, for shells to come; this one has read them already, or never does"
    fix = 'eval "$(conda shell.bash hook)" before conda activate'
    if first.name == "micromamba":
        fix = 'eval "$(micromamba shell hook --shell bash)" before micromamba activate'
    yield warning("conda-activate", first.line, what, why, fix)


def pbs_home(view: ScriptView) -> Iterator[LintFinding]:
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
            what = f"the job begins in the home folder, and looks for {script} there"
            why = "PBS does not begin where qsub was called"
            yield warning(
                "pbs-home", start.line, what, why, "cd $PBS_O_WORKDIR, before the first command"
            )
            return


def bare_pbsdsh(view: ScriptView) -> Iterator[LintFinding]:
    """Report a bare command of pbsdsh, which sets PATH=/bin:/usr/bin: torchrun is not found there.

    Source: OpenPBS 23.06.
    """
    for start in view.starts:
        first = _first_of_pbsdsh(start)
        if first is not None and re.fullmatch(r"[\w.-]+", first) and first not in _SHELLS:
            what = f"pbsdsh will not find `{first}`"
            why = "it starts commands with PATH=/bin:/usr/bin, in the home folder"
            fix = f'give the full path: pbsdsh -- "$(command -v {first})" ...'
            yield error("bare-pbsdsh", start.line, what, why, fix)


def pbsdsh_dashes(view: ScriptView) -> Iterator[LintFinding]:
    """Report a missing `--` before pbsdsh's program: pbsdsh reads the program's options as its own.

    Source: OpenPBS 23.06: `invalid option`, its usage, exit code 1.
    """
    for command in view.job.shell.commands:
        rest = _after_options(command.texts[1:]) if command.name == "pbsdsh" else ()
        if rest and rest[0] != "--" and any(word.startswith("-") for word in rest[1:]):
            what = f"pbsdsh reads the options of `{shown(rest[0])}` as its own and stops"
            fix = "pbsdsh -- PROGRAM --option ..."
            yield error("pbsdsh-dashes", command.line, what, "there is no `--` before it", fix)


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


def gpus_variable(view: ScriptView) -> Iterator[LintFinding]:
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
        fix = "--nproc-per-node=$SLURM_GPUS_ON_NODE, in a shell on the node, or the number itself"
        if asked is None and any(
            o.name in ("gres", "gpus", "gpus-per-task", "nodes") for o in given.values()
        ):
            what = "$SLURM_GPUS_PER_NODE is empty"
            why = "Slurm sets it only for --gpus-per-node, which is not among the directives"
            yield error(
                "gpus-variable", start.line, what, why, f"#SBATCH --gpus-per-node=N, or {fix}"
            )
        elif asked is not None and ":" in asked.value:
            what = f"$SLURM_GPUS_PER_NODE is `{asked.value}`, which is not a number"
            why = f"Slurm passes on the value from line {asked.line}, with the type"
            yield error("gpus-variable", start.line, what, why, fix)


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
