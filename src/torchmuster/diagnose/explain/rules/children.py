"""Programs that a rank started and that failed: their own last words stand above the exception that only counts their exit code."""

import re
from dataclasses import replace

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogEvent, LogFinding
from torchmuster.diagnose.explain.reading.chains import BETWEEN
from torchmuster.diagnose.explain.reading.sentences import of_a_file
from torchmuster.diagnose.explain.rules import shape
from torchmuster.diagnose.explain.rules.rows import words_of
from torchmuster.diagnose.explain.rules.system import row_of_number

_OF_A_CHILD = re.compile(
    r"returned non-zero exit status|Error (?:building extension|compiling objects)|exited with (?:exit )?(?:code|status) [1-9]"
    r"|failed with exit (?:code|status)|[Cc]ommand .{0,200} failed"
)
_FAR = 150  # lines: what a compiler writes, and a traceback
_LEAST = 2


def with_words_of_child(case: Case, event: LogEvent, finding: LogFinding) -> LogFinding:
    """Return a finding on an exception; if that tells of a program's exit code only, with what the program said itself."""
    if not _OF_A_CHILD.search(words_of(event)):
        return finding
    said = [
        e
        for e in case.of("error_line")
        if e.line.path == event.line.path
        and 0 < event.line.order - e.line.order < _FAR
        and shape.strength(e) >= _LEAST
        and not BETWEEN.match(e.line.text)
    ]
    if not said:
        return finding
    best = max(said, key=lambda e: (shape.strength(e), -e.line.order))
    words = best.line.text.strip()[:300]
    because = (words, *finding.because)
    if finding.cause != "exception":
        error = f"{finding.error}: {words}"
        return replace(
            finding, error=error, because=because, evidence=(best.line, *finding.evidence)
        )
    row = row_of_number(of_a_file(words))
    return replace(
        finding,
        cause=row.cause if row is not None else finding.cause,
        error=f"a program that {str(event.who) or 'the script'} started has failed: {words}",
        hint=f"{row.hint}"
        if row is not None
        else f"the message is that program's own; {finding.at} starts it",
        because=because,
        evidence=(best.line, *finding.evidence),
    )
