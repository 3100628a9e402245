"""Hide what looks like a secret in text that is made to be passed on: a command line, a difference of files.

A guess by name and form, so it hides what people write by habit; it can't know every secret.
"""

import re
from collections.abc import Sequence

HIDDEN = "<hidden>"
_NAME = r"(?:api[_-]?key|access[_-]?key|secret|password|passwd|passphrase|credentials?|auth[_-]?token|[a-z_-]*_token)"
_IS_SECRET = re.compile(rf"(?i)(?:^|[_-]){_NAME}(?:[_-]?id)?$|(?:^|-)token$|_KEY$")
# `password = "..."`, `API_KEY: ...`; a number or a name of Python is no secret: `pad_token = 0`, `secret = secrets.x()`.
_ASSIGNED = re.compile(
    rf"""(?ix)(\b[\w.-]*{_NAME}["']?\s*[:=]\s*)(["'])(?P<value>[^"'\s]{{6,}})\2"""
)
_KNOWN = re.compile(
    r"\b(?:AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|hf_[A-Za-z0-9]{30,}|glpat-[\w-]{18,}"
    r"|sk-[A-Za-z0-9_-]{24,}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
_IN_URL = re.compile(r"(?<=://)([^/\s:@]+):([^/\s@]+)(?=@)")
_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)


def is_secret_name(name: str) -> bool:
    """Say whether the value of a variable or an option of this name is probably a secret."""
    return _IS_SECRET.search(name.strip("-")) is not None


def hide_secrets(text: str) -> str:
    """Return a text with what looks like a secret replaced."""
    text = _BLOCK.sub(HIDDEN, text)
    text = _KNOWN.sub(HIDDEN, text)
    text = _IN_URL.sub(rf"\1:{HIDDEN}", text)
    return _ASSIGNED.sub(rf"\1\2{HIDDEN}\2", text)


def hide_in_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command line without the values of options that name a secret."""
    found: list[str] = []
    follows = False
    for word in words:
        name, is_pair, _ = word.partition("=")
        if follows and not word.startswith("-"):
            found.append(HIDDEN)
        elif is_pair and is_secret_name(name):
            found.append(f"{name}={HIDDEN}")
        else:
            found.append(hide_secrets(word))
        follows = word.startswith("-") and not is_pair and is_secret_name(word)
    return tuple(found)
