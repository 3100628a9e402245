"""The form of an entry of the catalogue: the wordings of one message, what it means, how much it tells, what helps."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


class Tells(enum.IntEnum):
    """How much a message tells of the cause, from nothing to all of it."""

    NOISE = 0  # printed by healthy runs as well; it explains no failure
    ECHO = 1  # what the others say when somebody has gone
    FACT = 2  # a version, a size, an address: of use to the rules that compare
    HINTS = 3  # trouble, but of any cause; less than any exception
    NAMES = 4  # names what went wrong; why may have several answers
    PROVES = 5  # names the cause itself: there is no second reading


@dataclass(frozen=True, kw_only=True)
class KnownMessage:
    """One message of a program.

    Attributes:
        name: Unique: program, a dot, what it says; `nccl.ib-timeout`.
        wordings: Regular expressions of all releases' wordings; named groups become fields.
        source: Program, releases and file in which it was read.
        tells: How much it tells.
        cause: A word of `causes.py`; empty for noise, facts, and entries with a `kind`.
        error: The sentence for the user; words in braces are fields, `{words}` is the message itself.
        advice: What to change: one sentence, one command.
        advice_in: Better advice for surroundings that the log shows (container, kubernetes, slurm, vllm, trainer, ...), or
            `anywhere`: one sentence or several. The first of which all words in braces are known is given; they are fields,
            or values that are worked out (`advice/values.py`).
        confirm: The one command that would prove it.
        kind: A kind of event that the rules know already: this is one more wording of it.
        is_raised: It means this only as the message of an exception, not anywhere in a line.
        rivals: Causes that look the same in this message; they are said where the evidence does not decide.
    """

    name: str
    wordings: tuple[str, ...]
    source: str
    tells: Tells
    cause: str = ""
    error: str = ""
    advice: str = ""
    advice_in: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    confirm: str | None = None
    kind: str = ""
    is_raised: bool = False
    rivals: tuple[str, ...] = ()

    @cached_property
    def regexes(self) -> tuple[re.Pattern[str], ...]:
        """The wordings, compiled when a line first has one of their stems."""
        return tuple(re.compile(wording) for wording in self.wordings)

    def find(self, text: str) -> re.Match[str] | None:
        """Return where a line says it; None where it does not."""
        for regex in self.regexes:
            if (found := regex.search(text)) is not None:
                return found
        return None
