"""Rules about the shell script itself: continued lines, variables, libraries. Each function is one of them."""

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
_HERE = re.compile(r"hostname|\[0\]|head -n ?1|head -1|SLURMD_NODENAME|localhost|127\.0")
_SHELLS = frozenset({"bash", "sh", "zsh", "env", "python", "python3"})


def glued_continuation(view: ScriptView) -> Iterator[LintFinding]:
    """No blank before the backslash at the end of a line, and none at the start of the next one.

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


def blanks_behind_backslash(view: ScriptView) -> Iterator[LintFinding]:
    """A backslash with blanks behind it continues nothing: the command ends there.

    Source: the bash manual, "Escape Character".
    """
    for line in view.job.shell.slips.blanks_behind:
        what = "there are blanks behind the backslash"
        why = "the command ends here, and the next line is run as one of its own"
        yield error(
            "blanks-behind-backslash",
            line,
            what,
            why,
            "take the blanks at the end of the line away",
        )


def lost_continuation(view: ScriptView) -> Iterator[LintFinding]:
    """A line of options without a backslash at the end of the line above: bash runs it as a command.

    Source: the bash manual, "Lists of Commands"; seen in published job scripts.
    """
    for command in view.job.shell.commands:
        if re.match(r"--[A-Za-z]", command.words[0].raw):
            what = f"bash runs `{shown(command.words[0].text)[:60]}` as a command"
            why = "the line above has no backslash at its end: the command ended there"
            yield error("lost-continuation", command.line, what, why, "end the line above in ` \\`")


def comment_inside(view: ScriptView) -> Iterator[LintFinding]:
    """A comment between two lines of one command ends it; the options below are run as a command.

    Source: the bash manual, "Comments".
    """
    for line in view.job.shell.slips.comments_inside:
        what = "this comment ends the command above"
        why = "the options below it are run as a command of their own"
        yield error("comment-inside", line, what, why, "move it above the command")


def windows_lines(view: ScriptView) -> Iterator[LintFinding]:
    """The lines end as on Windows: every last word has a carriage return at its end.

    Source: sbatch refuses such a script: "Batch script contains DOS line breaks".
    """
    for number, line in enumerate(view.job.lines, 1):
        if line.endswith("\r"):
            what = "the lines end as on Windows"
            why = "sbatch refuses such a script, and bash takes the carriage return for a part of the last word"
            yield error("windows-lines", number, what, why, f"sed -i 's/\\r$//' {view.job.name}")
            return


def windows_path(view: ScriptView) -> Iterator[LintFinding]:
    r"""`source myenv\bin\activate`: bash reads `myenvbinactivate`.

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
    """`NCCL_DEBUG=INFO` without export never reaches a worker.

    Source: the bash manual, "Environment".
    """
    shell = view.job.shell
    if shell.exports_all or not view.starts:
        return
    used = set(variables_of(view.job.text))
    told: set[str] = set()
    for given in shell.assignments:
        name = given.name
        if (
            given.exported
            or name in shell.exports
            or name in told
            or not _FOR_WORKERS.fullmatch(name)
        ):
            continue
        if name not in used:
            told.add(name)
            what = f"{name} is set but not exported"
            why = "it stays in this shell: no worker sees it"
            yield warning(
                "not-exported", given.line, what, why, f"export {name}={shown(given.raw)}"
            )


def own_nccl(view: ScriptView) -> Iterator[LintFinding]:
    """LD_LIBRARY_PATH or LD_PRELOAD brings another NCCL than the one in torch's wheel.

    Which of the two is loaded depends on the node; two versions in one job end it.

    Source: failures N18.
    """
    for given in view.job.shell.assignments:
        if given.name not in ("LD_LIBRARY_PATH", "LD_PRELOAD") or not view.starts:
            continue
        parts = [p for p in re.split(r"[:\s]", given.value) if "LD_LIBRARY_PATH" not in p]
        paths = [shown(view.job.shell.expand(part, given.line)) for part in parts]
        own = [path for path in paths if _OWN_NCCL.search(path) and "ofi" not in path.lower()]
        if own:
            what = f"{given.name} brings an NCCL of its own: {own[0]}"
            why = "torch's wheel has another one; versions that differ between nodes or libraries end the job"
            fix = "leave it out, and look at torch.cuda.nccl.version()"
            yield warning("own-nccl", given.line, what, why, fix)


def efa_provider(view: ScriptView) -> Iterator[LintFinding]:
    """`FI_PROVIDER=efa` away from EC2 instances with EFA: no provider is found, or TCP is used.

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
                "on other machines leave it out; `fi_info -p efa` tells",
            )


def ping_to_itself(view: ScriptView) -> Iterator[LintFinding]:
    """The head pings its own address: that works without any network.

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
    """Exported variables do not reach what ssh and pbsdsh start.

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
            what = f"{start.wrapper} does not carry {', '.join(lost[:3])} to the other nodes"
            why = "a variable that the job script exports reaches this node only"
            fix = f"{start.wrapper} ... env {lost[0]}=... torchrun ..."
            yield warning("not-carried", start.line, what, why, fix)


def bare_pbsdsh(view: ScriptView) -> Iterator[LintFinding]:
    """Pbsdsh starts a command with PATH=/bin:/usr/bin: torchrun is not found there.

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
    """Pbsdsh takes the program's options for its own, unless `--` stands before the program.

    Source: OpenPBS 23.06: `invalid option`, its usage, exit code 1.
    """
    if view.job.allocation.torque:
        return
    for command in view.job.shell.commands:
        rest = _behind_options(command.texts[1:]) if command.name == "pbsdsh" else ()
        if rest and rest[0] != "--" and any(word.startswith("-") for word in rest[1:]):
            what = f"pbsdsh takes the options of `{shown(rest[0])}` for its own, and stops"
            fix = "pbsdsh -- PROGRAM --option ..."
            yield error("pbsdsh-dashes", command.line, what, "no `--` stands before it", fix)


def _behind_options(words: Sequence[str]) -> Sequence[str]:
    """Return what stands behind pbsdsh's own options: `--`, or the program."""
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        rest = rest[2:] if rest[0] in ("-n", "-c", "-h") else rest[1:]
    return rest


def _first_of_pbsdsh(start: ScriptStart) -> str | None:
    words = start.command.texts
    if start.wrapper != "pbsdsh" or not words or start.command.name != "pbsdsh":
        return None
    rest = _behind_options(words[1:])
    program = rest[1:] if rest and rest[0] == "--" else rest
    return program[0] if program else None


def gpus_variable(view: ScriptView) -> Iterator[LintFinding]:
    """`$SLURM_GPUS_PER_NODE` is set only by --gpus-per-node, and as it was written there.

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
            why = f"Slurm hands on what line {asked.line} says, with the type"
            yield error("gpus-variable", start.line, what, why, fix)


RULES: tuple[Rule, ...] = (
    glued_continuation,
    blanks_behind_backslash,
    lost_continuation,
    comment_inside,
    windows_lines,
    windows_path,
    not_exported,
    own_nccl,
    efa_provider,
    ping_to_itself,
    not_carried,
    bare_pbsdsh,
    pbsdsh_dashes,
    gpus_variable,
)
