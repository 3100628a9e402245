"""The meaning of single lines.

Rows are stable fragments of messages, from torch 1.12 to 2.15, never file:line. A row says what
happened, not why: the rules weigh rows against each other. Named groups become fields.
"""

import errno
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from torchmuster.diagnose.explain.catalogue import index
from torchmuster.diagnose.explain.events import LineRole

# The C library's texts for the kernel's error numbers, in the languages in which logs are written.


SENTENCES: dict[str, int] = {os.strerror(number).lower(): number for number in errno.errorcode}
SENTENCES |= {text: getattr(errno, name) for text, name in index.TABLES["sentences"].table.items()}

# File errors: where such a text ends a message it is the cause, whatever raised it.
_OF_FILES = (
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EROFS),
    *(errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ENOTCONN),
    errno.ESHUTDOWN,
)
_AT_THE_END = re.compile(
    r"(?:^|[:,] |\bstrerror\W{1,3})(?P<text>"
    + "|".join(re.escape(words) for words, number in SENTENCES.items() if number in _OF_FILES)
    + r")(?: \(os error \d+\))?(?:: ?'?/[^ ]*)?\W*$",
    re.IGNORECASE,
)
# As HDF5 and others write it, without the kernel's text.
_NUMBERED = re.compile(r"\berrno ?[=:]? ?(?P<number>\d{1,3})\b|\(os error (?P<rust>\d{1,3})\)")
_NOT_THERE = re.compile(
    r"(?:^|: )(?:the )?(?:parent |output |data )?(?:directory|folder|file|path):? \S+ (?:does not|doesn't) exist"
    r"|^\S*/\S+ (?:does not|doesn't) exist",
    re.IGNORECASE,
)


# As libraries word it themselves.
_LIBRARY_TEXTS = (
    (
        errno.ENOSPC,
        (
            r"\b(?:disk|device|drive|volume|file ?system|partition) (?:is |was )?full\b"
            r"|(?:not enough|insufficient|no|out of) (?:free |available )?(?:disk|storage) space"
        ),
    ),
    (
        errno.EDQUOT,
        r"(?:disk|storage|inode|file|user|group|project) quota\b.{0,20}exceed|exceed\w*.{0,20}(?:disk|storage|inode) quota",
    ),
    (errno.EROFS, r"read-?only (?:database|file ?system|volume|directory)"),
)
_SAID_OTHERWISE = tuple(
    (number, re.compile(words, re.IGNORECASE)) for number, words in _LIBRARY_TEXTS
)


def file_errno(message: str) -> int:
    """Return the number of the file error with which a message ends; 0 when there is none."""
    found = _AT_THE_END.search(message)
    if found is not None:
        return SENTENCES[found["text"].lower()]
    numbered = _NUMBERED.search(message)
    if numbered is not None:
        number = int(numbered["number"] or numbered["rust"])
        return number if number in _OF_FILES else 0
    for number, words in _SAID_OTHERWISE:
        if words.search(message):
            return number
    return errno.ENOENT if _NOT_THERE.search(message) else 0


# Texts of the C library that mean trouble anywhere in a line; the others need a number or an
# exception.
_TROUBLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
    errno.EIO,
    errno.EROFS,
    errno.ENOTCONN,
    errno.ENOMEM,
    errno.ESHUTDOWN,
)
_SAID = "|".join(re.escape(words) for words, number in SENTENCES.items() if number in _TROUBLE)

_MAX_WORDS = 100_000
_MAX_WORD_BYTES = 64
_MAX_LINE_BYTES = 8000  # longer lines are examined up to here

# The first row that fits wins.
LINES = index.read_rows("lines", {"trouble": _SAID})
ROLES = {row.kind: row.role for row in LINES}
_BY_SHAPE = ("raised_line", "error_line")  # these say least
# A line without any of these means nothing here; searched before the rows, for speed.
STEMS: tuple[str, ...] = (
    "rror", "RROR", "--- Logging", "xcept", "ailed", "ailure", "imeout", "imed out", "IMEOUT", "TIME LIMIT", "exceeded", "reempt", "PREEMPT",
    "CANCEL", "ancel", "eleted", "oom", "OOM", "ut of memory", "ut Of Memory", "OUT_OF", "Evicted", "low on resource",
    "mage", "anifest", "pull ", "pyxis", "FATAL", "KeyError", "Xid", "ECC", "fallen off", "device", "srun", "slurmstepd", "STEP", "xec format", "cannot", "annot", "not found",
    "No such", "can't", "No module", "usage:", "module", "expected", "EADDRINUSE", "already in use", "clients joined",
    "keys:", "connect", "validate", "got error", "endezvous", "master_addr", "hosts the", "resolve", "not known",
    "servname", "ss_family", "ifa !=", "remote=", "peer", "pipe", "sendBytes", "recv", "Duplicate", "ismatch",
    "interface", "AF_INET", "provider", "rovider", "network", "shm", "/dev/shm", "ibv_", "NET/", "ncclRemote", "socketProgress",
    "Watchdog", "watchdog", "NCCL", "ProcessGroup", "127.0.0.1", "monitoredBarrier", "joined", "enqueued", "CUDA", "HIP",
    "ordinal", "GPU", "NVIDIA", "Cuda", "kernel image", "CUBLAS", "CUDNN", "assert", "shared memory", "us error", "DataLoader",
    "nan", "inf", "NaN", "exitcode", "Killed", "killed", "egmentation", "Aborted", "Illegal", "Terminat", "ignal", "SIG", "Fatal", "pbsdsh",
    "terminate", "what():", "panic", "egmento", "arrêté", "ötet", "griffsfehler", "段错误", "已杀死", "rc=", "returned", "with status", "^C", "ecovered", "econnected", "restored", "ucceeded", " OK", "is back", "is up again", "again", "E0", "E1", "F0", "F1", "Errno", "No space", "quota", "Stale", "open files", "nput/output", "ead-only", "endpoint", "allocate",
    "peicherplatz", "espace dispo", "espacio", "空间", "空き領域", "Root Cause", "exit", "Exit", "orward RPC", "shared object", "undefined symbol", "version `", "ELF", "ermission", "ead-only", "ost key", "reason", "refused", "unreachable", "oute to host", "GLIBC", "raceback", "File \"", "rdzv", "nodes", "entrypoint", "nproc", "run_id", "restart", "log_dir", "group_", "master_",
    "ank ", "ank:", "world", "World", "WORLD", "torchrun", "torch.distributed", "accelerate", "deepspeed", "SLURM", "PBS", "FI_", "GLOO", "TORCH",
    "MASTER", "LD_", "UCX", "NNODES", "set by env", "poch", "POCH", "tep", "iter", "Iter", "atch", "%|", "omplete", "inished", "one", "nknown command", "emporarily", "uccessful", "ucceeded", "$ ", "dmitted", "assigned", "eserved", "executing", "resumed", "equeued", "escheduled", "SUCCEEDED", "COMPLETED", "it=", "it:", "pdate", "第", "TEP", "ITER", "bounds val", "inal ",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The meaning of a line: the kind of its event, its role in the story, what it names."""

    kind: str
    role: LineRole
    fields: Mapping[str, str]


# A line without any word of failure that its logger marks as an error.
LOGGED_AS_ERROR = Meaning(kind="error_line", role=LineRole.CONTEXT, fields={})


def match(text: str, *, is_raised: bool = False) -> Meaning | None:
    """Return the meaning of a line, or of an exception's last line; None when it means nothing.

    A message of the catalogue says more than any row here, unless it is only a hint.
    """
    known = index.CATALOGUE.find(text, is_raised=is_raised)
    if known is not None and known[0].tells is not index.Telling.HINTS:
        return _as_meaning(*known)
    # Many lines pass only because of common words of the catalogue: these need no rows.
    rows = LINES if is_raised or _ANY_STEM.search(text) is not None else ()
    for row in rows:
        found = row.find(text)
        if found is not None:
            if known is not None and row.kind in _BY_SHAPE:
                break
            return Meaning(kind=row.kind, role=row.role, fields=fields_of(found))
    return _as_meaning(*known) if known is not None else None


def _as_meaning(row: index.Row, fields: Mapping[str, str]) -> Meaning:
    return Meaning(kind=row.kind, role=ROLES.get(row.kind, row.role), fields=fields)


def fields_of(found: re.Match[str]) -> dict[str, str]:
    """Return the named groups that matched."""
    return {name: value for name, value in found.groupdict().items() if value}


def one_of(words: Iterable[str]) -> str:
    """Return a regular expression for any of the words: a tree that examines each letter once."""
    heads: dict[str, list[str]] = {}
    for word in sorted(set(words)):
        heads.setdefault(word[:1], []).append(word[1:])
    if "" in heads:
        return ""  # one word ends here: longer ones add nothing
    parts = [re.escape(head) + one_of(tails) for head, tails in heads.items()]
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


_ANY_STEM = re.compile(one_of(STEMS))
_ANY_WORD = re.compile(one_of(index.CATALOGUE.stems))


def may_mean_something(text: str) -> bool:
    """Return whether a line has to be compared with the rows."""
    return _ANY_STEM.search(text) is not None or _ANY_WORD.search(text.lower()) is not None


PROGRESS = next(row for row in LINES if row.kind == "progress")


class _AnyOf:
    """A search for any of many pieces of words: a quick one for their ends comes first."""

    def __init__(self, pieces: Iterable[str]) -> None:
        self._end = re.compile(one_of(index.shorten_stems(pieces)).encode())
        self._whole = re.compile(one_of(pieces).encode())

    def is_in(self, text: bytes) -> bool:
        """Return whether a text contains one."""
        return self._end.search(text) is not None and self._whole.search(text) is not None


@cache
def _any_stem() -> _AnyOf:
    # Of a stem of several words, the longest is searched.
    return _AnyOf({max(stem.split(), key=len) for stem in STEMS})


@cache
def _any_word() -> _AnyOf:
    return _AnyOf(index.CATALOGUE.stems)


class WordFilter:
    """Remembers words without any stem: a line of such words means nothing and is cheap to skip."""

    def __init__(self) -> None:
        self._harmless: set[bytes] = set()
        self._stems = _any_stem()
        self._words = _any_word()

    def has_no_meaning(self, shape: bytes) -> bool:
        """Return whether a line, its digits replaced by zeros, can't mean anything."""
        harmless = self._harmless
        words = shape[:_MAX_LINE_BYTES].split()
        if harmless.issuperset(words):
            return True
        unknown = [word for word in words if word not in harmless]
        text = b" ".join(unknown)
        if self._stems.is_in(text) or self._words.is_in(text.lower()):
            return False
        if len(harmless) + len(unknown) > _MAX_WORDS:
            harmless.clear()  # frequent words are soon known again
        harmless.update(word for word in unknown if len(word) <= _MAX_WORD_BYTES)
        return True
