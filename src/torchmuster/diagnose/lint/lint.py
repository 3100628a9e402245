"""What will go wrong in a job script, with the line and the mend. The rules are in `lint_*.py`; nothing is run."""

from torchmuster.diagnose.finding import Level
from torchmuster.diagnose.lint import rules_meeting as lint_meeting
from torchmuster.diagnose.lint import rules_shell as lint_shell
from torchmuster.diagnose.lint import rules_starts as lint_starts
from torchmuster.diagnose.lint.finding import LintFinding, ScriptView
from torchmuster.diagnose.lint.jobscript import JobScript
from torchmuster.diagnose.lint.starts import find_starts

RULES = (*lint_starts.RULES, *lint_meeting.RULES, *lint_shell.RULES)
_ORDER = list(Level)


def lint(job: JobScript) -> tuple[LintFinding, ...]:
    """Return everything that is wrong with a script, by line.

    A rule speaks only of what the script itself shows: what comes from outside is not guessed.
    """
    view = ScriptView(job=job, starts=find_starts(job))
    found = {finding for rule in RULES for finding in rule(view)}
    return tuple(sorted(found, key=lambda f: (f.line, _ORDER.index(f.level), f.cause, f.error)))


def starts_training(job: JobScript) -> bool:
    """Say whether any line of a script is known to start training."""
    return bool(find_starts(job))
