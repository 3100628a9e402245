"""A job script: the directives for a scheduler, and the shell script after them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchmuster.diagnose.lint.allocation import (
    AskedNodes,
    Option,
    Scheduler,
    read_allocation,
    read_options,
)
from torchmuster.diagnose.lint.shell_lex import ShellToken
from torchmuster.diagnose.lint.shell_script import ShellScript, read_shell


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScript:
    """A parsed job script; nothing in it was run.

    Attributes:
        options: Those of all directives, in their order.
        allocation: The resources that the directives request.
        shell: Commands and assignments.
        lines: The text, line by line.
    """

    name: str
    text: str
    lines: tuple[str, ...]
    scheduler: Scheduler
    options: tuple[Option, ...]
    allocation: AskedNodes
    shell: ShellScript


def parse(text: str, name: str) -> JobScript:
    """Parse a script; skip what is not understood; never fail.

    Args:
        text: The script: with `#SBATCH` or `#PBS` lines, or only commands.
        name: Of the file, for messages.
    """
    lines = text.split("\n")
    shell = read_shell(text)
    scheduler, options = _read_directives(_without(shell.here, lines))
    for here in shell.here if not options else ():
        scheduler, options = _read_directives(enumerate(here.raw.split("\n"), here.line))
        if options:  # the job script is what `sbatch <<EOT` is given
            shell = shell.read_inner(here.text, here.line)
            break
    return JobScript(
        name=name,
        text=text,
        lines=tuple(lines),
        scheduler=scheduler,
        options=tuple(options),
        allocation=read_allocation(scheduler, options),
        shell=shell,
    )


def _without(here: Iterable[ShellToken], lines: Sequence[str]) -> Iterable[tuple[int, str]]:
    """Return the lines outside the here-documents, with their numbers."""
    inside = {n for each in here for n in range(each.line, each.line + each.raw.count("\n") + 1)}
    return [(n, line) for n, line in enumerate(lines, 1) if n not in inside]


def _read_directives(lines: Iterable[tuple[int, str]]) -> tuple[Scheduler, list[Option]]:
    """Return the scheduler and the options of the directives; those after the first command have no effect."""
    scheduler, options, late = Scheduler.NONE, list[Option](), False
    for number, line in lines:
        late = late or bool(line.strip() and not line.lstrip().startswith("#"))
        found = read_options(line, number, late=late)
        if found is None or (scheduler is not Scheduler.NONE and found[0] is not scheduler):
            continue
        scheduler = found[0]
        options += found[1]
    return scheduler, options
