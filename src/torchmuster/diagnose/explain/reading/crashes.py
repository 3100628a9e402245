"""Reports of crashes in native code: which library, which function and which Python line the process was in.

UCX, Open MPI, glibc, Ray and Python's faulthandler each draw the stack in their own way; the frame nearest to the crash that
belongs neither to the C library nor to the interpreter names who to ask.
"""

import re
from dataclasses import dataclass, field

from torchmuster.diagnose.explain.events import LogEvent, LogLine, Who

_MAX_FRAMES = 120
_MAX_ODD_LINES = 4  # titles, blank lines, others' lines
_MAX_OPEN = 64
_ADDRESS = r"\[?0x[0-9a-fA-F]+\]?"
_NATIVE = (
    # UCX, Open MPI, glibc: ` 3  /lib/libx.so(name+0x1b) [0x7f..]`, `[ 1] /lib/libx.so(name+0x1b)[0x7f..]`
    re.compile(
        r"^(?:\[? ?\d+\]? +)?(?P<path>/[^\s()]+)\((?P<symbol>[^()+]*)(?:\+0x[0-9a-f]+)?\) ?"
        + _ADDRESS
    ),
    # UCX with debug symbols: ` 1 0x000000000003c2d1 uct_progress()  ???:0`
    re.compile(r"^ ?\d+ +0x[0-9a-f]+ (?P<symbol>[\w:~<>, ]+)\(.*\) +\S*:\d+$"),
    # c10: `frame #5: name + 0x10 (0x7f.. in /lib/libx.so)`
    re.compile(r"^frame #\d+: (?P<symbol>.+?) \+ 0x[0-9a-f]+ \(0x[0-9a-f]+ in (?P<path>[^)]+)\)"),
    # Abseil, as Ray has it: `PC: @  0x7f..  (unknown)  name`
    re.compile(r"^(?:PC: )? *@ +0x[0-9a-f]+ +(?:\(unknown\)|\d+) +(?P<symbol>\S.*)$"),
)
_OF_OPEN_MPI = re.compile(r"^\[[\w.-]+:\d+\] ")  # where the host's name does not look like one
_PYTHON = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_TITLE = re.compile(
    r"^(?:=+ ?backtrace|Current thread|Stack \(most recent|C stack trace|Stack trace|Signal(?: code)?:|Failing at address|\*\*\*"
    r"|Exception raised from|$)"
)
_OTHER_THREAD = re.compile(r"^Thread 0x")
_ENDS = re.compile(r"^(?:=+$|\*\*\* End of error message|Extension modules:)")
# The handlers that draw the report, the C library, the interpreter and what only hands on a call.
_SAYS_NOTHING = re.compile(
    r"^(?:libc|libpthread|libm|libdl|ld-linux[\w-]*|libgcc_s|libstdc\+\+|libucs|libffi|libpython[\d.]*\w?|python[\d.]*|_ctypes\S*"
    r"|libasan|linux-vdso)(?:[.-]|$)"
)
_HANDLERS = re.compile(
    r"^(?:\(unknown\)|__|_?start\b|ucs_|abort$|raise$|gsignal|opal_|show_stackframe|Py|_Py|ffi_|c10::get_backtrace"
    r"|c10::detail::|c10::Error::|ray::|absl::|main$)"
)
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|lib/python\d[\w.]*)/|^<frozen")


@dataclass(slots=True)
class _Report:
    fields: dict[str, str]  # of the event that the report belongs to
    is_other_thread: bool = False
    num_lines: int = 0
    num_odd: int = 0
    files: list[re.Match[str]] = field(default_factory=list)


class CrashReader:
    """Follows the report below each line that tells of a crash, and adds to its event where the process was."""

    def __init__(self) -> None:
        self._open: dict[Who, _Report] = {}

    @property
    def is_open(self) -> bool:
        """Say whether lines are waited for."""
        return bool(self._open)

    def begin(self, event: LogEvent) -> None:
        """Follow what stands below an event, if it is one that a report follows."""
        if event.kind not in ("signal_received", "fatal_python") or event.get("type"):
            return
        if isinstance(event.fields, dict) and len(self._open) < _MAX_OPEN:
            known = self._open.get(event.who)
            # Open MPI and UCX may both tell of one crash: the first report is the one of the crash itself.
            if known is None or not known.num_lines:
                self._open[event.who] = _Report(event.fields)

    def takes(self, line: LogLine) -> bool:
        """Say whether a line is part of a report, and so means nothing else."""
        report = self._open.get(line.who)
        if report is None:
            return False
        text = _OF_OPEN_MPI.sub("", line.text)
        if _ENDS.match(text) or report.num_lines >= _MAX_FRAMES:
            del self._open[line.who]
            return False
        if (python := _PYTHON.match(text)) is not None:
            if not report.is_other_thread:
                _add_python(report, python)
        elif (native := _native(text)) is not None:
            _add_native(report.fields, native)
        elif _OTHER_THREAD.match(text):
            report.is_other_thread = True
            return True
        else:
            if text.startswith("Current thread"):
                report.is_other_thread = False
            if not _TITLE.match(text):
                report.num_odd += 1
            if report.num_odd > _MAX_ODD_LINES:
                del self._open[line.who]
            return False
        report.num_lines += 1
        return True


def _native(text: str) -> re.Match[str] | None:
    return next((found for form in _NATIVE if (found := form.match(text)) is not None), None)


def _add_native(fields: dict[str, str], frame: re.Match[str]) -> None:
    """Keep the first frame that says something: it is the nearest to the crash."""
    symbol = frame["symbol"].strip()
    path = frame.groupdict().get("path") or ""
    library = path.rpartition("/")[2]
    says = not _SAYS_NOTHING.match(library) if library else not _HANDLERS.match(symbol)
    if says and not fields.get("crash_library") and not fields.get("crash_symbol"):
        fields["crash_library"] = library
        fields["crash_symbol"] = "" if _HANDLERS.match(symbol) else symbol


def _add_python(report: _Report, frame: re.Match[str]) -> None:
    """Keep the innermost line of the user's own code, else the innermost."""
    is_own = _LIBRARY.search(frame["file"]) is None
    if not report.files or (is_own and not report.fields.get("own")):
        report.fields["where"] = f"{frame['file']}:{frame['line']}"
        report.fields["own"] = "1" if is_own else ""
    if not report.files and not is_own:
        report.fields["crash_call"] = f"{frame['function']} of {_package(frame['file'])}"
    report.files.append(frame)


def _package(file: str) -> str:
    found = re.search(r"/(?:site|dist)-packages/(\w+)", file)
    return found[1] if found is not None else "Python"
