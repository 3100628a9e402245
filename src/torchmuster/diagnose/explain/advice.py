"""What advice says beyond its row: the text and place of an event, and values that no message contains.

A value is a sum, a name, a line of code, a number about GPU memory. It is computed from an event, and from the case where other
lines have to be compared. It is empty where the log does not show it; then advice that needs it is not given (`rules/rows.py`).
"""

import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.index import TABLES
from torchmuster.diagnose.explain.events import LogEvent, LogLine

# Computes a value for advice; empty where the log does not show it.
Value = Callable[[Case, LogEvent], str]


def text_of(event: LogEvent) -> str:
    """Return the text of an event: for an exception, its type and all lines of its message."""
    if not event.get("type"):
        return event.line.text
    return f"{event.get('type')}: {event.get('message')}\n{event.get('more')}".strip()


def first_of(regex: re.Pattern[str], text: str, group: str | int = 0) -> str:
    """Return the first match of a regular expression, or an empty string."""
    found = regex.search(text)
    return (found[group] or "") if found is not None else ""


def line_with(case: Case, words: str) -> str:
    """Return the first kept line that contains these words; empty when there is none."""
    return next((line.text for line in lines_of(case) if words in line.text), "")


def lines_of(case: Case) -> Iterable[LogLine]:
    """Yield the kept lines of a job: the first and last of each log, and those of events."""
    for log in case.record.logs:
        yield from log.header
        yield from log.last
    yield from (event.line for event in case.events)


def place_in_code(event: LogEvent) -> str:
    """Return file, line and code of the innermost frame of the user's own code."""
    place = event.get("where") if event.get("own") else ""
    if not place:
        return ""
    code = code_at(event)
    name = place.rpartition("/")[2]
    return f"{name}, `{code}`" if code else name


def code_at(event: LogEvent) -> str:
    """Return the code at an event's place, as its traceback shows it."""
    path, _, number = event.get("where").rpartition(":")
    for frame, code in pairwise(event.detail):
        if f'"{path}", line {number}' in frame and not code.lstrip().startswith("File "):
            text = code.strip()
            return text if len(text) <= _CODE_SHOWN else f"{text[:_CODE_SHOWN]}..."
    return ""


_CODE_SHOWN = 100


_REMEDY = re.compile(
    r"(?:^|[.;:,!?]\s+|\n\s*)(?P<words>(?:(?:[Pp]lease|[Tt]ry|[Mm]ake sure|[Cc]onsider|[Ss]et|[Uu]se|[Rr]un|[Pp]ass|[Ii]nstall|[Uu]pgrade"
    r"|[Dd]id you mean|[Ee]nsure|[Ss]ee|[Ii]ncrease|[Dd]ecrease|[Rr]educe|[Dd]isable|[Ee]nable|[Yy]ou (?:can|should|must|need to|may want to))\b[:, ]"
    r"|(?:[Ii]f [^.\n]{5,120}, )(?:please |try |consider |increase |set |use |run )).{8,240}?)(?=\.(?:\s|$)|\n|$)"
)
_NO_REMEDY = re.compile(
    r"(?:full|complete|stack|C\+\+) ?(?:stack ?)?trace|_FULL_ERROR|STACKTRACES|NCCL_DEBUG|deprecated|will be removed|"
    r"[Pp]lease (?:report|file|open|contact|check (?:the|your) (?:log|stack))|[Ss]ee (?:above|the stack|stack|exceptions?)|issue|traceback|refer to|https?:|file a bug"
)


_BROKEN_SENTENCE = re.compile(r"(?<=[\w,])\n+(?=[a-z\"'`(])")
_ELSEWHERE = ("On Windows,", "on Windows,", "On macOS,", "on macOS,")


def remedy_of(event: LogEvent) -> str:
    """Return the remedy that a message proposes; empty when it proposes none."""
    text = _BROKEN_SENTENCE.sub(" ", text_of(event).partition(": ")[2])
    for found in _REMEDY.finditer(text):
        if text[: found.start("words")].rstrip().endswith(_ELSEWHERE):
            continue
        words = " ".join(found["words"].split())
        if not _NO_REMEDY.search(words):
            return words
    return ""


# As torch 1.x to 2.x words it.
_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "bytes": 1}
_SIZE = r"(?P<{0}>[\d.]+) (?P<{0}_unit>[KMGT]iB|bytes|B)"
# torch 1.x to 2.0: (GPU 0; 23.65 GiB total capacity; 12.87 GiB already allocated; 496.00 MiB free;
#   13.06 GiB reserved ...
# torch 2.1 on: GPU 0 has a total capacity of 79.19 GiB of which 41.50 MiB is free. ... this process
#   has 4.28 GiB memory in use
_ASKED = re.compile(r"[Tt]ried to allocate " + _SIZE.format("asked"))
_TOTAL = re.compile(
    rf"total capac?i?ty of {_SIZE.format('total')}|{_SIZE.format('old_total')} total capacity"
)
_FREE = re.compile(rf"of which {_SIZE.format('free')} is free|{_SIZE.format('old_free')} free")
_OWN = re.compile(
    rf"this process has {_SIZE.format('own')} memory in use|{_SIZE.format('old_own')} reserved in total by PyTorch"
)
_UNUSED = re.compile(rf"{_SIZE.format('unused')} is reserved by PyTorch but unallocated")
_ALLOCATED = re.compile(
    rf"Of the allocated memory {_SIZE.format('allocated')} is allocated by PyTorch"
)
_GPU = re.compile(r"\bGPU (?P<gpu>\d+)\b")
_OTHERS = re.compile(rf"\bProcess (?P<pid>\d+) has {_SIZE.format('used')} memory in use")
_ALLOWED = re.compile(rf"\b{_SIZE.format('allowed')} allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """The numbers in torch's message about a GPU, in bytes; None for those that are missing.

    Attributes:
        allowed: The cap for the process.
        largest_other: The other process that holds most, with its size; empty when none is named.
    """

    gpu: str
    asked: float | None
    total: float | None
    free: float | None
    own: float | None
    unused: float | None
    allowed: float | None
    largest_other: str

    @property
    def others(self) -> float:
        """The bytes that are neither free nor held by the process that wrote the message."""
        if self.total is None or self.free is None or self.own is None:
            return 0.0
        return max(0.0, self.total - self.free - self.own)


def read_memory(text: str) -> GpuMemory:
    """Return the numbers of a message about a GPU's memory."""
    gpu = _GPU.search(text)
    own, allocated, unused = _bytes(_OWN, text), _bytes(_ALLOCATED, text), _bytes(_UNUSED, text)
    if own is None and allocated is not None:
        own = allocated + (unused or 0.0)
    return GpuMemory(
        gpu=gpu["gpu"] if gpu is not None else "?",
        asked=_bytes(_ASKED, text),
        total=_bytes(_TOTAL, text),
        free=_bytes(_FREE, text),
        own=own,
        unused=unused,
        allowed=_bytes(_ALLOWED, text),
        largest_other=_largest_other(text, _bytes(_TOTAL, text)),
    )


def in_gib(size: float) -> str:
    """Return a size for people."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 28 else f"{size / (1 << 20):.0f} MiB"


def _largest_other(text: str, total: float | None) -> str:
    """Return the process that holds most, without the impossible sizes that containers show."""
    sizes = {
        found["pid"]: float(found["used"]) * _SIZES[found["used_unit"]]
        for found in _OTHERS.finditer(text)
    }
    possible = {pid: size for pid, size in sizes.items() if total is None or size <= total}
    if not possible:
        return ""
    pid = max(possible, key=lambda pid: possible[pid])
    return f"process {pid} ({in_gib(possible[pid])})"


def _bytes(regex: re.Pattern[str], text: str) -> float | None:
    found = regex.search(text)
    if found is None:
        return None
    name = next(
        key for key, value in found.groupdict().items() if value and not key.endswith("_unit")
    )
    return float(found[name]) * _SIZES[found[f"{name}_unit"]]


# Packages that are installed under their own name, under another, or against the installed torch.
_SAME_NAME = TABLES["same-name"].words
_DISTRIBUTIONS = TABLES["distributions"].table
_BUILT_AGAINST_TORCH = TABLES["built-against-torch"].table
KNOWN_MODULES = frozenset({"torch", *_DISTRIBUTIONS, *_BUILT_AGAINST_TORCH, *_SAME_NAME})


def distribution_of(module: str) -> str:
    """Return what follows `pip install` for a module; empty when its package is not known.

    A missing module may be the user's own: only names that are known to be on PyPI are returned.
    """
    top = module.partition(".")[0]
    if top in _BUILT_AGAINST_TORCH:
        return f"{_BUILT_AGAINST_TORCH[top]} --no-build-isolation"
    return (
        _DISTRIBUTIONS.get(module) or _DISTRIBUTIONS.get(top) or (top if top in _SAME_NAME else "")
    )


# Values for advice about names: packages, commands, options, files and folders.


_OPTION = re.compile(r"'Namespace' object has no attribute '(?P<name>\w+)'")
_MODULE = re.compile(r"No module named '?(?P<module>[\w.]+)")
_COMMANDS = (
    *("python", "python3", "torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun"),
    *("sbatch", "nvidia-smi", "module", "conda", "source", "export", "bash", "singularity"),
    "apptainer",
)
_SCRIPTS = (
    *("train.py", "main.py", "finetune.py", "run.py", "pretrain.py", "eval.py", "test.py"),
    "inference.py",
)
_ALIKE = 0.8
_LEAST = 4  # letters of a word
_FILE = re.compile(r"[\w./~+-]+\.[A-Za-z]\w{0,11}\b|(?<![\w.])/[\w.+-]+(?:/[\w.+-]+)+")


def _distribution(_case: Case, event: LogEvent) -> str:
    """Return the package to install for a module that is missing or does not fit."""
    module = event.get("module") or event.get("name") or first_of(_MODULE, text_of(event), "module")
    return distribution_of(module)


def _broken_part(_case: Case, event: LogEvent) -> str:
    """Return the package whose own files import a missing part of it."""
    module = first_of(_MODULE, text_of(event), "module")
    top = module.partition(".")[0]
    frames = " ".join(event.detail)
    return distribution_of(top) if top != module and f"-packages/{top}/" in frames else ""


def _pip_install(case: Case, event: LogEvent) -> str:
    """Return the command that installs a missing module; an incomplete package is reinstalled."""
    broken = _broken_part(case, event)
    name = broken or _distribution(case, event)
    return f"pip install {'--force-reinstall ' if broken else ''}{name}" if name else ""


def _meant_module(_case: Case, event: LogEvent) -> str:
    """Return a well-known module that is spelled nearly like the missing one."""
    top = first_of(_MODULE, text_of(event), "module").partition(".")[0]
    near = _nearest(top, KNOWN_MODULES) if top else ""
    return near or (_nearest(top, sys.stdlib_module_names) if top else "")


def _hiding_file(_case: Case, event: LogEvent) -> str:
    """Return the user's file that hides a module of Python's and so causes a circular import."""
    name = os.path.basename(event.get("where").rpartition(":")[0])
    return name if name.removesuffix(".py") in sys.stdlib_module_names else ""


def _meant_command(case: Case, event: LogEvent) -> str:
    """Return a command that is spelled nearly like the one that was not found."""
    name = next(filter(None, map(event.get, ("command", "other", "name", "why", "path"))), "")
    name = name or line_with(case, "Executable: ").rpartition(" ")[2]
    return _nearest(os.path.basename(name), _COMMANDS)


def _lmod(_case: Case, event: LogEvent) -> str:
    """Return the path of Lmod's own program, if that was not found."""
    path = next(filter(None, map(event.get, ("command", "path", "other"))), "")
    return path if path.endswith("/libexec/lmod") else ""


def _existing_cluster(case: Case, _event: LogEvent) -> str:
    line = line_with(case, "existing Ray cluster at address")
    return first_of(re.compile(r"at address: ([\d.]+:\d+)"), line, 1)


def _meant_file(case: Case, event: LogEvent) -> str:
    """Return a path of the log, or a usual script name, spelled nearly like the missing one."""
    missing = missing_path(event)
    _folder, name = os.path.split(missing)
    if not name:
        return ""
    named = {path for line in lines_of(case) for path in _FILE.findall(line.text)}
    named = {path for path in named if path not in missing and os.path.basename(path) != name}
    near = _nearest(missing, named) or _nearest(name, {path for path in named if "/" not in path})
    if not near and name.endswith(".py"):
        near = _nearest(name, _SCRIPTS)
    return near


def _nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is spelled nearly like another; lengths differ by at most 1."""
    if word in known:
        return ""
    near = [
        other
        for other in difflib.get_close_matches(word, sorted(known), n=3, cutoff=_ALIKE)
        if other != word and abs(len(other) - len(word)) <= 1 and _differ_in_spelling(word, other)
    ]
    return near[0] if near else ""


def _differ_in_spelling(one: str, other: str) -> bool:
    """Return whether two names differ within words, not in the number or letter of a series."""
    if re.findall(r"\d+", one) != re.findall(r"\d+", other):
        return False
    words, others = re.findall(r"[^\W\d_]+", one), re.findall(r"[^\W\d_]+", other)
    pairs = [pair for pair in zip(words, others, strict=False) if pair[0] != pair[1]]
    return len(words) == len(others) and all(len(min(pair, key=len)) >= _LEAST for pair in pairs)


def _meant_option(case: Case, event: LogEvent) -> str:
    """Return an option from argparse's usage text that is spelled nearly like the unknown one."""
    wrong = first_of(re.compile(r"unrecognized arguments: (--[\w-]+)"), event.line.text, 1)
    usage = {option for line in lines_of(case) for option in re.findall(r"\[(--[\w-]+)", line.text)}
    same = {option for option in usage if option.replace("-", "_") == wrong.replace("-", "_")}
    return next(iter(same), "") or _nearest(wrong, usage)


def _missing_option(_case: Case, event: LogEvent) -> str:
    return first_of(_OPTION, event.get("message"), "name")


# Paths.

_NO_FOLDER = re.compile(
    r"(?:Parent directory|[Dd]irectory|[Ff]older) '?(?P<path>[^\s']+?)'? does not exist"
)
_PATH = re.compile(r"'(?P<path>[^']+)'")
_WRITES = re.compile(
    r"open\([^)]*,\s*(?:mode=)?['\"][wax]|\bsave\w*\(|\.to_(?:csv|json|parquet|pickle)\(|\bdump\(|imwrite\(|FileHandler\(|savefig\(|np\.save|mkstemp|write_\w+\("
)


def missing_path(event: LogEvent) -> str:
    """Return the path that an event reports as missing."""
    return event.get("path") or first_of(_PATH, event.get("message") or event.line.text, "path")


def _folder_to_make(_case: Case, event: LogEvent) -> str:
    """Return the missing folder if the code writes a file to it: writing a file makes no folder."""
    named = first_of(_NO_FOLDER, event.get("message"), "path")
    if named and (
        event.get("message").startswith("Parent directory") or _WRITES.search(code_at(event))
    ):
        return named
    return os.path.dirname(missing_path(event)) if _WRITES.search(code_at(event)) else ""


def _home_path(_case: Case, event: LogEvent) -> str:
    path = missing_path(event)
    return path if path.startswith("~") else ""


def _relative_path(_case: Case, event: LogEvent) -> str:
    path = missing_path(event)
    return path if "/" in path and not path.startswith(("/", "~", "$", "http")) else ""


_TMP = re.compile(r"(?<![\w/])(/(?:var/)?tmp)(?=/|'|\"|\s|$)")


def _on_tmp(_case: Case, event: LogEvent) -> str:
    if "cannot create temp file for here-document" in event.line.text:
        return "/tmp"  # where bash puts them
    return first_of(_TMP, event.line.text, 1)


_CACHES = TABLES["caches"].table


def _cache_variable(_case: Case, event: LogEvent) -> str:
    """Return the variable that moves the cache in which a path lies."""
    path = missing_path(event)
    lies_in = [
        part for part in _CACHES if f"{part}/" in f"{path}/" or (part[-1] == "_" and part in path)
    ]
    return _CACHES[max(lies_in, key=len)] if lies_in else ""


# Compilers that torch.compile lacks; those of C and C++ are separate packages.
_COMPILERS = (
    (
        re.compile(r"InvalidCxxCompiler|C\+\+ compiler"),
        "a C++ compiler",
        "g++ in the image (in build-essential, or gcc-c++; `module load gcc`, export CXX=g++)",
    ),
    (
        re.compile(r"C compiler"),
        "a C compiler",
        "gcc in the image (`module load gcc`, export CC=gcc)",
    ),
    (re.compile(r"Python\.h"), "Python's headers", "python3-dev (or python3-devel) in the image"),
)


def _compiler(_case: Case, event: LogEvent) -> str:
    return next((name for regex, name, _ in _COMPILERS if regex.search(text_of(event))), "")


def _compiler_package(_case: Case, event: LogEvent) -> str:
    return next((package for regex, _, package in _COMPILERS if regex.search(text_of(event))), "")


# Values for advice about tensors: devices, sizes, data types, what a checkpoint holds.


_PRODUCT = re.compile(r"\((?P<rows>\d+)x(?P<have>\d+) and (?P<want>\d+)x\d+\)")
_VIEW = re.compile(r"shape '\[(?P<shape>[-\d, ]+)\]' is invalid for input of size (?P<size>\d+)")
_STORED = re.compile(
    r"size mismatch for (?P<key>\S+?): copying a param with shape torch\.Size\(\[(?P<stored>[\d, ]*)\]\) from checkpoint,"
    r" the shape in current model is torch\.Size\(\[(?P<built>[\d, ]*)\]\)"
)
_TOKENS = re.compile(
    r"sequence length is longer than the specified maximum sequence length for this model \((?P<tokens>\d+) > (?P<most>\d+)\)"
)
_TABLE = re.compile(r"(?:embed|wte|lm_head|word_embeddings|tok_embeddings)", re.IGNORECASE)


def _matrix_have(_case: Case, event: LogEvent) -> str:
    return first_of(_PRODUCT, event.get("message"), "have") if _is_in_a_layer(event) else ""


def _matrix_want(_case: Case, event: LogEvent) -> str:
    return first_of(_PRODUCT, event.get("message"), "want") if _is_in_a_layer(event) else ""


def _is_in_a_layer(event: LogEvent) -> bool:
    return "nn/modules/linear.py" in event.get("through")


def _odd_view(_case: Case, event: LogEvent) -> str:
    """Return why a view fails: the number of entries is not a multiple of its fixed sizes."""
    found = _VIEW.search(event.get("message"))
    if found is None:
        return ""
    sizes = [int(word) for word in found["shape"].split(",")]
    fixed = math.prod(size for size in sizes if size > 0)
    if sizes.count(-1) != 1 or not fixed or int(found["size"]) % fixed == 0:
        return ""
    return f"{found['size']} entries are no multiple of {fixed}"


def _position_table(_case: Case, event: LogEvent) -> str:
    """Return `positions` if the frames show that the table is that of the positions."""
    return "positions" if any(map(_POSITION.search, event.detail)) else ""


_POSITION = re.compile(r"\bwpe\b|position|\bpos(?:_?emb\w*)?\b|positional", re.IGNORECASE)


def _stored_rows(_case: Case, event: LogEvent) -> str:
    """Return how many rows a token table has in the checkpoint, if only that number differs."""
    found = _STORED.search(text_of(event))
    if found is None or not _TABLE.search(found["key"]):
        return ""
    stored, built = found["stored"].split(", "), found["built"].split(", ")
    return stored[0] if stored[1:] == built[1:] and stored != built else ""


def _built_rows(case: Case, event: LogEvent) -> str:
    return (
        first_of(_STORED, text_of(event), "built").split(", ")[0]
        if _stored_rows(case, event)
        else ""
    )


def _module_prefix(_case: Case, event: LogEvent) -> str:
    """Return the wrapper's prefix that all keys of a checkpoint have and the model's do not."""
    keys = re.findall(r'"([\w.]+)"', text_of(event).partition("Unexpected key(s)")[2])
    prefixes = {prefix for key in keys if (prefix := first_of(_WRAPPERS, key))}
    return prefixes.pop() if len(prefixes) == 1 and all(map(_WRAPPERS.match, keys)) else ""


_WRAPPERS = re.compile(r"^(?:module|_orig_mod|_forward_module|model\.module)\.")


def _last_index(_case: Case, event: LogEvent) -> str:
    size = event.get("size") or first_of(_OF_SIZE, event.get("message"), 1)
    return str(int(size) - 1) if size.isdigit() and int(size) else ""


_OF_SIZE = re.compile(r"with size (\d+)")


def _multiples(size: str, unit: int) -> str:
    """Return the multiples of a number on both sides of a size that is not one itself."""
    if not size.isdigit() or not unit or int(size) % unit == 0:
        return ""
    below = int(size) // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _fitting_batch(_case: Case, event: LogEvent) -> str:
    """Return the global batch sizes next to one that does not fit.

    It must be a multiple of micro batch times data parallel size, or of the number of ranks.
    """
    sizes = [event.get(name) for name in ("micro", "dp")]
    if all(word.isdigit() for word in sizes):
        return _multiples(event.get("size"), math.prod(map(int, sizes)))
    ranks = event.get("ranks")
    return _multiples(event.get("size"), int(ranks)) if ranks.isdigit() else ""


def _fitting_world(_case: Case, event: LogEvent) -> str:
    """Return the numbers of ranks next to one that the model's division does not divide."""
    unit = re.fullmatch(r"\(?(\d+)\)?\.?", event.get("why").strip())
    return _multiples(event.get("size"), int(unit[1])) if unit is not None else ""


def _tensor_sizes(_case: Case, event: LogEvent) -> str:
    """Return the tensor parallel sizes below the requested one that divide the number of heads."""
    heads, most = event.get("heads"), event.get("tp")
    if not heads.isdigit() or not most.isdigit():
        return ""
    sizes = [str(size) for size in range(1, int(most)) if int(heads) % size == 0]
    return f"{', '.join(sizes[:-1])} and {sizes[-1]}" if len(sizes) > 1 else ""


_EQUATION = re.compile(r"(?P<train>\d+) != (?P<micro>\d+) \* (?P<steps>\d+) \* (?P<ranks>\d+)")


def _train_batch(_case: Case, event: LogEvent) -> str:
    """Return the fitting train_batch_size for DeepSpeed: micro batch x accumulation x ranks."""
    found = _EQUATION.search(text_of(event))
    return str(math.prod(int(found[name]) for name in ("micro", "steps", "ranks"))) if found else ""


def _classes_needed(_case: Case, event: LogEvent) -> str:
    """Return how many classes a label needs."""
    return str(int(event.get("target")) + 1) if event.get("target").isdigit() else ""


def _empty_split(_case: Case, event: LogEvent) -> str:
    return "num_samples" if re.search(r"assert .*num_samples > 0", code_at(event)) else ""


# The memory of GPUs.


def _of_memory(which: Callable[[GpuMemory], float | str | None]) -> Value:
    def value(_case: Case, event: LogEvent) -> str:
        found = which(read_memory(text_of(event)))
        return found if isinstance(found, str) else in_gib(found) if found else ""

    return value


def _steps_before(case: Case, event: LogEvent) -> str:
    """Return the step that training had reached before an event, if it was 200 or more."""
    steps = [
        int(step.get("number"))
        for log in case.record.logs
        if log.path == event.line.path
        for step in log.last_progress.values()
        if step.line.order < event.line.order and step.get("number").isdigit()
    ]
    return str(max(steps)) if steps and max(steps) >= _MANY_STEPS else ""


_MANY_STEPS = 200


# Limits.

_LIMIT = re.compile(r"open files\s+\(-n\)\s+(\d+)|\bulimit -n\W+(\d+)|RLIMIT_NOFILE\W+(\d+)")
_ENOUGH_FILES = 65536


def _open_files(case: Case, _event: LogEvent) -> str:
    found = _LIMIT.search(line_with(case, "open files ") or line_with(case, "ulimit -n"))
    limit = next((word for word in found.groups() if word), "") if found is not None else ""
    return limit if limit and int(limit) < _ENOUGH_FILES else ""


def _pace(case: Case, event: LogEvent) -> str:
    """Return how many steps a timed-out job had made, if the log shows its first steps too."""
    for log in case.record.logs:
        first = next((found for line in log.header if (found := _STEP_OF.search(line.text))), None)
        for step in log.last_progress.values():
            last = _STEP_OF.search(step.line.text)
            if first is None or last is None or log.path != event.line.path:
                continue
            begun, done, total = int(first["done"]), int(last["done"]), int(last["total"])
            if begun < done < total and first["total"] == last["total"]:
                times = math.ceil(10 * (total - begun) / (done - begun)) / 10
                return f"{done} of {total} steps were done, so all of them need about {times:g} times as long"
    return ""


_STEP_OF = re.compile(r"(?<![\d.])(?P<done>\d+) ?(?:/|of) ?(?P<total>\d{2,})\b")
_SMALL = 1 << 20


def _nccl_bytes(_case: Case, event: LogEvent) -> str:
    """Return the size of an allocation that NCCL did not get, if any GPU should have had room."""
    size = first_of(
        re.compile(r"Failed to CUDA (?:host )?[mc]alloc(?: async)? (\d+) bytes"), event.line.text, 1
    )
    return size if size and int(size) < _SMALL else ""


_CACHE_TOKENS = re.compile(r"can be stored in KV cache \((\d+)\)")
_FREE_AT_START = re.compile(
    r"Free memory on device \S* ?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\)"
)
_ONLY_HAS = re.compile(r"your machine only has: \[([\d, ]*)\]")


def _free_share(_case: Case, event: LogEvent) -> str:
    """Return the share of a GPU that was free when vLLM started, lowered by 5 %."""
    found = _FREE_AT_START.search(text_of(event))
    share = math.floor(95 * float(found["free"]) / float(found["total"])) / 100 if found else 0
    return f"{share:g}" if share else ""


_OF_WORKER = re.compile(
    r"memory used=(?P<own>[\d.]+)GB\) was running was [\d.]+GB / (?P<total>[\d.]+)GB"
)


def _ray_share(_case: Case, event: LogEvent) -> str:
    """Return the share of its node's memory that a worker ended by Ray held, if half or more."""
    found = _OF_WORKER.search(text_of(event))
    if found is None or 2 * float(found["own"]) < float(found["total"]):
        return ""
    return f"{found['own']} of the {found['total']} GB of its node"


def _gpus_here(_case: Case, event: LogEvent) -> str:
    """Return how many GPUs Lightning saw."""
    listed = first_of(_ONLY_HAS, text_of(event), 1)
    return str(len(listed.split(","))) if listed else ""


def _evaluation(_case: Case, event: LogEvent) -> str:
    """Return `evaluation` if the Trainer was evaluating."""
    frames = (event.get("through"), *event.detail)
    return "evaluation" if any(map(_EVALUATES.search, frames)) else ""


_EVALUATES = re.compile(
    r"trainer_pt_utils\.py|in (?:evaluation_loop|prediction_loop|prediction_step)$"
)


def _cpu_build(_case: Case, event: LogEvent) -> str:
    return "CPU build" if re.search(r"not (?:been )?compiled with CUDA", text_of(event)) else ""


def _in_text(regex: re.Pattern[str], group: str | int = 0) -> Value:
    """Return a value that is a part of an event's text."""
    return lambda _case, event: first_of(regex, text_of(event), group)


def _too_long(group: str) -> Value:
    """Return a value of the tokenizer's warning about a sequence that is too long."""
    words = "longer than the specified maximum"
    return lambda case, _event: first_of(_TOKENS, line_with(case, words), group)


VALUES: Mapping[str, Value] = {
    "matrix_have": _matrix_have,
    "matrix_want": _matrix_want,
    "odd_view": _odd_view,
    "position_table": _position_table,
    "max_tokens": _too_long("most"),
    "num_tokens": _too_long("tokens"),
    "stored_key": _in_text(_STORED, "key"),
    "stored_shape": _in_text(_STORED, "stored"),
    "built_shape": _in_text(_STORED, "built"),
    "stored_rows": _stored_rows,
    "built_rows": _built_rows,
    "wrapper_prefix": _module_prefix,
    "last_index": _last_index,
    "fitting_batch": _fitting_batch,
    "fitting_world": _fitting_world,
    "tensor_sizes": _tensor_sizes,
    "train_batch": _train_batch,
    "classes_needed": _classes_needed,
    "empty_split": _empty_split,
    "missing_option": _missing_option,
    "distribution": _distribution,
    "pip_install": _pip_install,
    "meant_command": _meant_command,
    "meant_module": _meant_module,
    "hiding_file": _hiding_file,
    "lmod": _lmod,
    "existing_cluster": _existing_cluster,
    "meant_file": _meant_file,
    "folder_to_make": _folder_to_make,
    "home_path": _home_path,
    "relative_path": _relative_path,
    "on_tmp": _on_tmp,
    "meant_option": _meant_option,
    "cache_variable": _cache_variable,
    "spelling": _in_text(re.compile(r"Did you mean:? [^?]{1,80}\?")),
    "compiler": _compiler,
    "compiler_package": _compiler_package,
    "memory_asked": _of_memory(lambda memory: memory.asked),
    "memory_total": _of_memory(lambda memory: memory.total),
    "memory_own": _of_memory(lambda memory: memory.own),
    "other_process": _of_memory(lambda memory: memory.largest_other),
    "steps_before": _steps_before,
    "open_files": _open_files,
    "pace": _pace,
    "cache_tokens": _in_text(_CACHE_TOKENS, 1),
    "free_share": _free_share,
    "gpus_here": _gpus_here,
    "ray_share": _ray_share,
    "evaluation": _evaluation,
    "remedy": lambda _case, event: remedy_of(event),
    "cpu_build": _cpu_build,
    "nccl_bytes": _nccl_bytes,
}
