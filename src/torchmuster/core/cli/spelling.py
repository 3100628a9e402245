"""Guess what the user meant by an option or command that does not exist."""

import re
from collections.abc import Collection, Sequence

import click

from torchmuster.errors import UsageError

_MOST_SOURCE = 1 << 20
_EVERYBODYS = frozenset({"--help"})

# Removed commands and options, with their replacements. An entry is kept for one release.
REMOVED = {
    "muster convert": "write `nodes`, `nproc_per_node` and `script` by hand, as docs/rewriting.md shows",
    "muster sweep --gpu-mem": "`--per-gpu K` lets K members share a GPU; choose K so that their memory fits",
}

# torchrun's options and those of `muster run`; None: not needed.
TORCHRUN_OPTIONS: dict[str, str | None] = {
    **dict.fromkeys(
        [
            "--start-method",
            "--duplicate-stderr-filters",
            "--duplicate-stdout-filters",
            "--event-log-handler",
            "--log-dir",
            "--local-addr",
            "--logs-specs",
            "--master-addr",
            "--master-port",
            "--monitor-interval",
            "--no-python",
            "--node-rank",
            "--numa-binding",
            "--rdzv-backend",
            "--rdzv-conf",
            "--rdzv-endpoint",
            "--rdzv-id",
            "--redirects",
            "--role",
            "--run-path",
            "--signals-to-handle",
            "--standalone",
            "--virtual-local-rank",
        ]
    ),
    "--nnodes": "--nodes",
    "--max-restarts": "--max-restarts",
    "--nproc-per-node": "--nproc-per-node",
    "--module": "-m",
    "--tee": "--tee",
    "--local-ranks-filter": "--tee",
    "--shutdown-timeout": "--grace",
}


# Options of other tools, and the corresponding ones of `muster run`.
_OTHER_WORDS = {
    "--job-name": "`--name NAME`",
    "-J": "`--name NAME`",
    "--gpus": "`--nproc-per-node N` for a worker on each of N GPUs, `--gpus-per-node N` to ask a scheduler for them",
    "-G": "`--gpus-per-node N`",
    "--gres": "`--gpus-per-node N`",
    "--ntasks-per-node": "`--nproc-per-node N`",
    "--cpus-per-task": "`--cpus-per-node N`",
    "-N": "`--nodes N`",
    "-p": "`--partition NAME`",
    "-q": "`--queue NAME`",
    "-t": "`--time TIME`",
    "-A": "`--account NAME`",
    "-c": "`--cpus-per-node N`",
    "--walltime": "`--time TIME`",
    "--timeout": "`--time TIME` for a job's limit, `--join-timeout TIME` for the wait for nodes",
    "--nproc": "`--nproc-per-node N`",
    "--np": "`--nproc-per-node N`",
    "-n": "`--nproc-per-node N`",
    "-H": "`--hosts A,B:N`",
    "-e": "`--env NAME=VALUE`",
}


# Options of other tools, an option of the commands that have an equivalent, and the hint.
_OTHER_WORDS_OF_VIEWS = {
    "--lines": ("--tail", "here it is `--tail N`"),
    "--watch": ("--json", "the shell's `watch` runs a command again and again: `watch muster ...`"),
    "--running": ("--all", "waiting and running runs are always listed, without an option"),
}


def refuse_removed(words: str) -> None:
    """Refuse a command or an option that was removed: `muster convert`, `muster sweep --gpu-mem`.

    Raises:
        UsageError: It was removed; the error names the replacement.
    """
    if (instead := REMOVED.get(words.replace("_", "-"))) is not None:
        raise UsageError(f"`{words}` was removed", fix=instead)


def hint_for_option(given: str, known: Sequence[str]) -> str | None:
    """Return a hint for an unknown option; None if nothing is similar."""
    if given in _OTHER_WORDS and "--nproc-per-node" in known:
        return f"here it is {_OTHER_WORDS[given]}"
    needed, hint = _OTHER_WORDS_OF_VIEWS.get(given, ("", ""))
    if needed in known:
        return hint
    dashed = "--" + given.lstrip("-").replace("_", "-")
    if dashed in known:
        return f"it is spelled `{dashed}`"
    if dashed in TORCHRUN_OPTIONS and "--nproc-per-node" in known:
        ours = TORCHRUN_OPTIONS[dashed]
        theirs = "this is an option of torchrun"
        if ours is None:
            return (
                f"{theirs} that `muster run` does without: leave it out, or use `muster torchrun`"
            )
        return f"{theirs}: here it is `{ours}`, or use `muster torchrun` with torchrun's own line"
    # Compare without the dashes, which are all that `--on` and `--foo` have in common.
    from torchmuster.core.model.text import nearest

    near = nearest(dashed[2:], [name[2:] for name in known])
    return f"did you mean `--{near}`?" if near else None


def option_names(command: click.Command) -> set[str]:
    """Return the long names of a command's options."""
    return {name for param in command.params for name in param.opts if name.startswith("--")}


def misplaced_options(script: str, args: Sequence[str], ours: Collection[str]) -> list[str]:
    """Return muster's options that come after a script whose source seems not to know them.

    The script still gets them; its source only decides whether the user may have meant muster.
    """
    before = args[: args.index("--")] if "--" in args else args
    names = [word.partition("=")[0].replace("_", "-") for word in before if word[:2] == "--"]
    names = [name for name in dict.fromkeys(names) if name in ours and name not in _EVERYBODYS]
    if not names:
        return []
    try:
        with open(script, errors="replace") as file:
            source = file.read(_MOST_SOURCE).replace("_", "-")
    except OSError:
        return []  # a module, or an unreadable script
    return [name for name in names if not _knows(source, name)]


def _knows(source: str, name: str) -> bool:
    # Of this one any mention counts: who has it behind the script is refused.
    if name == "--dry-run" and "dry-run" in source:
        return True
    # As a text, an argument or a field; an `import time` is no option `--time`.
    known = r"""["'](?:--)?{0}["']|(?:^|[(,])\s*{0}\s*[:=]""".format(name[2:])
    return bool(re.search(known, source, re.MULTILINE))


def warn_of_misplaced(script: str, names: Sequence[str]) -> str:
    """Return the sentence about options of muster that come after a script."""
    comes, them = ("comes", "it") if len(names) == 1 else ("come", "them")
    shown = ", ".join(f"`{name}`" for name in names)
    return f"{shown} {comes} after {script}, so {script} gets {them}; options of muster go before the script"
