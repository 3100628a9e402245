"""Reports as plain text (`error / at / because / hint`), and escaping of untrusted text."""

import itertools
import math
import re
from collections.abc import Iterable

from torchmuster.core.model.verdict import Report
from torchmuster.errors import MusterError

# Hide likely secrets in text that may be passed on: a command line, a diff. They are guessed by
# name and form: not every secret can be recognized.


HIDDEN = "<hidden>"
_NAME = r"(?:api[_-]?key|access[_-]?key|secret|password|passwd|passphrase|credentials?|auth[_-]?token|[a-z_-]*_token)"
_IS_SECRET = re.compile(rf"(?i)(?:^|[_-]){_NAME}(?:[_-]?id)?$|(?:^|-)token$|_KEY$")
# `password = "..."`, `API_KEY: ...`; a number or an expression is no secret: `pad_token = 0`.
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
    """Say whether a variable or an option with this name probably holds a secret."""
    return _IS_SECRET.search(name.strip("-")) is not None


def hide_secrets(text: str) -> str:
    """Return a text with likely secrets replaced."""
    text = _BLOCK.sub(HIDDEN, text)
    text = _KNOWN.sub(HIDDEN, text)
    text = _IN_URL.sub(rf"\1:{HIDDEN}", text)
    return _ASSIGNED.sub(rf"\1\2{HIDDEN}\2", text)


# Characters that control a terminal or reorder text: C0 and C1 controls except \t and \n, Unicode's
# directional marks, and surrogates, which can't be encoded.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
# In a rank's output: what is kept, cursor movements, other controls.
_OUTPUT = re.compile(f"({_COLOUR.pattern}|\r)|\x1b\\[[0-9;?]*[A-HJKSTfhlsu]|{_CONTROL.pattern}")
_MAX_WORD, _MAX_NAMES = 200, 200  # limits of a search for similar names
MAX_NAMES = 8


def printable(text: str) -> str:
    """Return an untrusted text with control characters escaped and colours removed.

    Every message of muster passes through it: an exception, a host name or a scheduler's output may
    contain anything.
    """
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda found: _visible(found[0]), _COLOUR.sub("", text))


def as_bytes(text: str) -> bytes:
    """Return the original bytes of a rank's output, even where they are not UTF-8."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # surrogates that don't come from a rank
        return text.encode(errors="replace")


def _visible(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def as_output(text: str) -> str:
    """Return a rank's output for a later viewer: keep colours, escape or drop other controls.

    A progress bar's cursor movements are dropped: its lines are shown separately here.
    """
    if text.isprintable():
        return text
    return _OUTPUT.sub(
        lambda found: found[1] or (_visible(found[0]) if len(found[0]) == 1 else ""), text
    )


def in_one_line(text: str) -> str:
    """Return a printable text without newlines and tabs, for a table cell or a list."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def name_on(name: str, machine: str) -> str:
    """Return `r-1 (n2)`: a node's name, and the machine under it if that has its own name."""
    return f"{name} ({machine})" if machine else name


def name_alone(name: str) -> str:
    """Return the name of a node without the machine under it."""
    return name.partition(" (")[0]


def few_of(names: Iterable[str], most: int, num_names: int | None = None) -> str:
    """Return `a, b, c and 3 more`; `num_names` is the total, if more than `names`."""
    listed = [in_one_line(name) for name in names]
    more = (num_names or len(listed)) - len(listed[:most])
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, or None."""
    import difflib

    names = list(known)
    if len(word) > _MAX_WORD:
        return None
    if len(names) > _MAX_NAMES:  # comparing each with each takes time
        alike = (name for name in names if abs(len(name) - len(word)) < 3 and name[:1] == word[:1])
        names = list(itertools.islice(alike, _MAX_NAMES))
    near = difflib.get_close_matches(word, names, n=1)
    folded = {name.lower().replace("_", "").replace("-", ""): name for name in names}
    return near[0] if near else folded.get(word.lower().replace("_", "").replace("-", ""))


def did_you_mean(word: str, known: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return a hint with the nearest known word, else `otherwise`."""
    near = nearest(word, known)
    return f"did you mean `{near}`?" if near else otherwise


def report_of_error(error: MusterError) -> Report:
    """Return an error as a report."""
    because = tuple(error.why.splitlines()) if error.why else ()
    return Report(error=error.what, at=error.where, because=because, hint=error.fix)


def render_report(report: Report) -> str:
    """Return the message with each part on its own lines and a newline at the end."""
    lines = [f"error: {report.error}"]
    if report.at:
        lines.append(f"  at: {in_one_line(report.at)}")
    if report.because:
        first, *rest = report.because
        lines.append(f"  because: {first}")
        lines += [f"    {line}".rstrip() for line in rest]
    if report.hint:
        lines.append(f"hint: {report.hint}")
    lines += [f"  {line}" for line in report.more]
    return printable("\n".join(lines) + "\n")


def span(seconds: float | None, *, whole: bool = False) -> str:
    """Return a duration as `85 ms`, `4.2 s`, `3 min 20 s`, `1 h 2 min`, `2 d 3 h`; `-` if unknown.

    Args:
        seconds: None, or not finite: unknown.
        whole: Whole seconds only: `4 s`, for what changes while it is shown.
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if whole:
        seconds = float(int(max(seconds, 0.0)))
    if seconds < 1 and not whole:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.0f} s" if whole else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h" + (f" {minutes} min" if minutes else "")
    return f"{hours // 24} d {hours % 24} h"


def in_minutes(seconds: float) -> str:
    """Return a duration for a sentence: `40 s`, `5 min`, `2 h 10 min`."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    hours, minutes = divmod(round(whole / 60), 60)
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def show_transfer(
    done_bytes: float, total_bytes: float | None, elapsed_s: float, *, before_bytes: float = 0
) -> str:
    """Return the progress of a transfer: `3 GiB of 12 GiB (25 %), 512 MiB/s, 18 s left`.

    Args:
        done_bytes: Bytes transferred so far.
        total_bytes: None or 0 if unknown.
        elapsed_s: Seconds since `before_bytes`; no speed is shown in the first second.
        before_bytes: Bytes transferred before `elapsed_s` began, e.g. by an earlier attempt.
    """
    done = max(done_bytes, 0)
    text = show_size(done)
    speed = (done - before_bytes) / elapsed_s if elapsed_s >= 1.0 else 0.0
    if total_bytes:
        text += f" of {show_size(total_bytes)} ({min(done / total_bytes, 1.0) * 100:.0f} %)"
    if speed >= 1.0:
        text += f", {show_size(speed)}/s"
        if total_bytes:
            minutes, seconds = divmod(math.ceil(max(total_bytes - done, 0) / speed), 60)
            hours, minutes = divmod(minutes, 60)
            left = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
            text += f", {left if hours or minutes else f'{seconds} s'} left"
    return text


_TRANSFER = re.compile(
    r"(?P<what>.*): (?:not begun yet|[\d.e+]+ \w+ of [\d.e+]+ \w+ \(\d+ %\)(?:, [\d.e+]+ \w+/s(?:, [\d:]+(?: s)? left)?)?"
    r"|[\d.e+]+ \w+, [\d.e+]+ \w+/s)"
)


def transfer_in(sentence: str) -> str | None:
    """Return what a sentence that ends like `show_transfer` says is transferred, or None."""
    found = _TRANSFER.fullmatch(sentence)
    return found["what"] if found is not None else None


def show_size(size_bytes: float) -> str:
    """Return a human-readable size, e.g. `30 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB"


def place_of(name: str) -> int:
    """Return a metric's sort key in views: `loss`, then other losses, then the rest."""
    return 0 if name == "loss" else 1 if "loss" in name.lower() else 2


def loss_of(names: Iterable[str]) -> str | None:
    """Return the name of a training's loss: a run with a loss that is not finite learns nothing."""
    first = min(names, key=place_of, default="")
    return first if place_of(first) < 2 else None
