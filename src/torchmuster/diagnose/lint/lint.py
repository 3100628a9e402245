"""Finds mistakes in a job script, each with its line and a fix; runs nothing.

The rules are in `rules_*.py`, what they say in `rules.txt`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torchmuster.diagnose.finding import Finding, Level
from torchmuster.diagnose.lint import rules_launchers, rules_meeting, rules_shell, rules_starts
from torchmuster.diagnose.lint.job import JobScript
from torchmuster.diagnose.lint.starts import ScriptView, find_starts

RULES = (
    *rules_starts.RULES,
    *rules_launchers.RULES,
    *rules_meeting.RULES,
    *rules_shell.RULES,
    *rules_shell.VARIABLE_RULES,
)
_ORDER = list(Level)


def lint(job: JobScript) -> tuple[Finding, ...]:
    """Return all findings for a script, by line.

    A rule uses only what the script itself contains: values from outside are not guessed.
    """
    view = ScriptView(job=job, starts=find_starts(job))
    found = {finding for rule in RULES for finding in rule(view)}
    in_order = sorted(found, key=lambda f: (f.line, _ORDER.index(f.level), f.cause, f.error))
    return tuple(_once(in_order))


def _once(found: Iterable[Finding]) -> Iterator[Finding]:
    """Merge findings that differ only in their lines; the first one names the others."""
    groups: dict[Finding, list[int]] = {}
    for finding in found:
        groups.setdefault(replace(finding, line=0), []).append(finding.line)
    for finding, lines in groups.items():
        more = sorted(set(lines[1:]) - {lines[0]})
        named = ", ".join(str(line) for line in more[:8]) + (", ..." if len(more) > 8 else "")
        also = (f"so it is in line{'s' * (len(more) > 1)} {named}",) if more else ()
        yield replace(finding, line=lines[0], because=(*finding.because, *also))


def starts_training(job: JobScript) -> bool:
    """Return whether any line of a script is recognised as a start of training."""
    return bool(find_starts(job))
