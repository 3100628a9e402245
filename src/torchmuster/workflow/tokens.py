"""Runtime tokens such as `{{output}}`: placeholders that get their value when a task starts.

    {{output}} {{input:0}} {{input:TASK}} {{workflow_id}} {{host:TASK}} {{uuid}}    the format's own
    {{ip:TASK}} {{rank}} {{num_tasks}} {{port}} {{port:NAME}} {{attempt}}           ours

Spaces inside the braces don't matter. Standard library only: agents resolve tokens on the nodes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

# `{{output}}` is a token of the format itself; `OUR_BARE_KINDS` may be variable names there.
BARE_KINDS = frozenset({"output", "workflow_id", "uuid"})
OUR_BARE_KINDS = frozenset({"rank", "num_tasks", "port", "attempt"})
ARGUMENT_KINDS = frozenset({"input", "host", "ip", "port"})

# An argument is limited to 256 characters, so that no text makes the search slow.
_TOKEN = re.compile(
    r"\{\{[ \t]*(?:"
    r"(?P<bare>output|workflow_id|uuid|rank|num_tasks|port|attempt)[ \t]*"
    r"|(?P<kind>input|host|ip|port)[ \t]*:(?P<argument>[^{}\n]{1,256})"
    r")\}\}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token in a text.

    Attributes:
        kind: `output`, `input`, `host` and so on.
        argument: The text after the colon, stripped; None without a colon.
        start: Index of its first brace.
        end: Index after its last brace.
        text: The token as written.
    """

    kind: str
    argument: str | None
    start: int
    end: int
    text: str


def find_tokens(text: str) -> list[Token]:
    """Return the tokens of a text, in order."""
    return [token for match in _TOKEN.finditer(text) if (token := _token_of(match)) is not None]


def resolve(text: str, values: Callable[[Token], str | None]) -> str:
    """Return the text with its tokens replaced; a token whose value is None remains.

    Values are not searched for tokens.
    """
    parts: list[str] = []
    position = 0
    for token in find_tokens(text):
        value = values(token)
        parts += (text[position : token.start], token.text if value is None else value)
        position = token.end
    return "".join(parts) + text[position:]


def _token_of(match: re.Match[str]) -> Token | None:
    argument = match["argument"]
    if argument is not None:
        argument = argument.strip()
        if not argument:
            return None
    return Token(
        kind=match["bare"] or match["kind"],
        argument=argument,
        start=match.start(),
        end=match.end(),
        text=match[0],
    )
