"""Scalar types of a workflow file, each with its check: names, sizes, times, paths, URLs.

Errors of pydantic are translated into ours; its own never reach a user.
"""

import datetime as dt
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Discriminator, Tag, ValidationError
from pydantic_core import PydanticCustomError

from torchmuster.core.model.text import did_you_mean
from torchmuster.core.spec.launch import parse_nodes, parse_workers
from torchmuster.core.spec.problems import (
    KeyPath,
    Problems,
    near_duration,
    parse_size,
    parse_timeout,
)
from torchmuster.errors import UsageError

NAME = re.compile(r"[a-zA-Z]([a-zA-Z0-9_-]*[a-zA-Z0-9])?")
MAX_NAME = 64
_MAX_NUMBER = 1_000_000_000
_MAX_SIZE_BYTES = 1 << 62
_MAX_SECONDS = 10 * 366 * 86400.0
_MAX_RANGES = 256
_MAX_WORD = 64  # characters in a number, a size or a time
_EXIT_CODES = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_SCHEMES = ("s3", "gs", "swift", "tos", "azure", "abfs", "abfss", "file", "memory")
_SHOWN_SCHEMES = "s3://, gs://, swift://, tos://, azure://, abfs://, file:///"
_DATASET = re.compile(r"(?:[A-Za-z0-9_-]+/)?[A-Za-z0-9_-]+(?::[A-Za-z0-9_-]+)?")
_TOKEN = re.compile(r"\{\{[^{}]*\}\}")
_TIMES = "e.g. 30s, 90m, 8h, 1:30:00, PT1H30M"
_SIZES = "e.g. 64Gi, 500Mi"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProblem:
    """An error or a warning about a file.

    Attributes:
        path: Keys and indices from the top of the file; `workflow` is the first.
        at_key: It concerns the key itself, not its value.
    """

    path: KeyPath
    what: str
    why: str | None = None
    fix: str | None = None
    at_key: bool = False

    def as_error(self, where: str | None) -> UsageError:
        """Return the error with its location."""
        return UsageError(self.what, where=where, why=self.why, fix=self.fix)


@dataclass(slots=True)
class FileProblems:
    """Collects errors and warnings about a file."""

    with_effect: frozenset[str] = frozenset()
    errors: list[FileProblem] = field(default_factory=list)
    warnings: list[FileProblem] = field(default_factory=list)

    def add(
        self,
        path: KeyPath,
        what: str,
        fix: str | None = None,
        *,
        why: str | None = None,
        at_key: bool = False,
    ) -> None:
        """Add an error."""
        self.errors.append(FileProblem(path=path, what=what, why=why, fix=fix, at_key=at_key))

    def warn(
        self,
        path: KeyPath,
        what: str,
        fix: str | None = None,
        *,
        why: str | None = None,
        at_key: bool = True,
    ) -> None:
        """Add a warning."""
        self.warnings.append(FileProblem(path=path, what=what, why=why, fix=fix, at_key=at_key))


def show_path(path: KeyPath) -> str:
    """Return `workflow.groups[0].tasks[1].image`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def wrong(what: str, fix: str | None = None) -> PydanticCustomError:
    """Return an error with our message; `fix` becomes the hint."""
    # pydantic formats the template with its context, so braces of a token must not be in the
    # template.
    return PydanticCustomError("muster", "{what}", {"what": what, "fix": fix})


def shown(text: str) -> str:
    """Return a text in backticks, shortened to fit a line."""
    if not text.strip():
        return "an empty text"
    line = " ".join(text.split("\n"))
    return f"`{line}`" if len(line) <= 60 else f"`{line[:57]}...`"


def kind_of(value: Any) -> str:
    """Return the usual name of a YAML value's type."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dt.date):
        return f"the date {value}"
    if isinstance(value, int | float):
        return f"the number {_number(value)}"
    return shown(str(value))


def in_quotes(value: Any) -> str | None:
    """Return how to write a value as text if YAML reads it as another type."""
    if value is None:
        return 'an empty text is written ""'
    if isinstance(value, bool):
        return f'put it in quotes: "{str(value).lower()}"'
    if isinstance(value, dt.date):
        return f'put it in quotes: "{value}"'
    return None


def _number(value: float) -> str:
    huge = isinstance(value, int) and abs(value) > 10**30  # Python may refuse to print these
    return "of more than 30 digits" if huge else str(value)


def _text(value: Any) -> Any:
    """Accept text, and numbers as text, as in the reference, but no booleans or other types."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, int) and abs(value) > 10**30:
            raise wrong(f"expected a text, found {kind_of(value)}", "put it in quotes")
        return str(value)
    if not isinstance(value, str):
        raise wrong(f"expected a text, found {kind_of(value)}", in_quotes(value))
    if "\0" in value:
        raise wrong("the text contains a null byte")
    return value


def _name(value: Any) -> Any:
    word = "" if value is None else _text(value)
    if not word:
        raise wrong("the name is empty")
    if token := _TOKEN.search(word):
        raise wrong(f"a name can't contain the token `{token[0]}`: tokens get a value inside tasks")
    if not NAME.fullmatch(word):
        near = re.sub(r"[^a-zA-Z0-9_-]+", "-", word).strip("-_0123456789")
        raise wrong(
            f"{shown(word)} can't be a name: letters, digits, `-` and `_`, a letter first,"
            " a letter or digit last",
            f"`{near}`" if NAME.fullmatch(near) else None,
        )
    if len(word) > MAX_NAME:
        raise wrong(f"the name has {len(word)} characters; at most {MAX_NAME} are allowed")
    return word


def _variable(value: Any) -> Any:
    word = _text(value)
    if not _VARIABLE.fullmatch(word):
        what = f"{shown(word)} is not a valid name of an environment variable"
        near = re.sub(r"[^A-Za-z0-9_]+", "_", word).strip("_").lstrip("0123456789")
        raise wrong(what, f"`{near}`" if near else None)
    return word


def _environment_value(value: Any) -> Any:
    """Accept scalars as text in Python's notation, as in the reference: `true` becomes "True"."""
    return str(value) if isinstance(value, bool) else _text(value)


def _whole_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong(f"expected a whole number, found {kind_of(value)}")
    if isinstance(value, str) and not re.fullmatch(r"[+-]?[0-9]{1,30}", value.strip()):
        raise wrong(f"expected a whole number, found {shown(value)}")
    number = int(value)
    if number < 0:
        raise wrong(f"{_number(number)} is negative")
    if number > _MAX_NUMBER:
        raise wrong(f"{_number(number)} is too large; at most {_MAX_NUMBER} is allowed")
    return number


def _size(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong(f"expected a size, found {kind_of(value)}", _SIZES)
    word = (_number(value) if isinstance(value, int) else value).strip()
    if re.match(r"-[\d.]", word):
        raise wrong(f"the size {shown(word)} is negative")
    size = parse_size(word) if len(word) <= _MAX_WORD else None
    if size is not None and size <= _MAX_SIZE_BYTES:
        return size
    if size is not None:
        raise wrong(f"the size {shown(word)} is too large")
    raise wrong(f"{shown(word)} is not a valid size", _near_size(word))


def _near_size(word: str) -> str:
    match = re.fullmatch(r"([0-9]{1,12})(\.[0-9]{1,3})?\s*([kmgtKMGT])(?:i?[bB]?)", word)
    if match is None:
        return _SIZES
    number, fraction, unit = match[1], match[2], match[3].upper()
    if not fraction:
        return f"{number}{unit}i"
    if unit == "K":
        return _SIZES
    smaller = {"T": "G", "G": "M", "M": "K"}[unit]
    return f"{round(float(number + fraction) * 1024)}{smaller}i"


def _seconds(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong(f"expected a time, found {kind_of(value)}", _TIMES)
    word = value.strip() if isinstance(value, str) else _number(value)
    if re.match(r"-[\dP]", word):
        raise wrong(f"the time {shown(word)} is negative", word[1:])
    seconds = parse_timeout(word) if len(word) <= _MAX_WORD else None
    if seconds is None or not math.isfinite(seconds):
        near = near_duration(word[:_MAX_WORD])
        raise wrong(
            f"{shown(word)} is not a valid time", f"did you mean {near}?" if near else _TIMES
        )
    if seconds <= 0:
        raise wrong("a time must be more than 0", _TIMES)
    if seconds > _MAX_SECONDS:
        raise wrong(f"the time {shown(word)} is longer than ten years", _TIMES)
    return seconds


def _regex(value: Any) -> Any:
    word = _text(value)
    try:
        re.compile(word)
    except (re.error, OverflowError, RecursionError) as error:
        fix = f"`.*{re.escape(word[1:])}`" if word.startswith("*") else None
        raise wrong(f"{shown(word)} is not a valid regular expression: {error}", fix) from None
    return word


def _list_of_words(value: Any) -> Any:
    if isinstance(value, str):
        raise wrong(f"expected a list, found the text {shown(value)}", _as_list(value))
    if not isinstance(value, list):
        fix = "begin each entry with `- `" if isinstance(value, dict) else None
        raise wrong(f"expected a list, found {kind_of(value)}", fix)
    return value


def _as_list(line: str) -> str:
    """Format the words of a command line as a YAML list."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = [line]
    plain = re.compile(r"[A-Za-z./_-][\w./=-]*", re.ASCII)
    return f"[{', '.join(word if plain.fullmatch(word) else json.dumps(word) for word in words)}]"


def truth_of(value: Any) -> bool | None:
    """Return the boolean that a value means, or None."""
    if isinstance(value, bool):
        return value
    words = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
    return words.get(value.lower()) if isinstance(value, str) else None


def _flag(value: Any) -> Any:
    truth = truth_of(value)
    if truth is None:
        raise wrong(f"expected true or false, found {kind_of(value)}")
    return truth


def _file_path(value: Any) -> Any:
    """Check the path of a file in its task: no `..`, no folder of the kernel."""
    word = _text(value)
    if not word:
        raise wrong("the path is empty")
    if len(word) > 4096:
        raise wrong(f"the path has {len(word)} characters; at most 4096 are allowed")
    if ".." in word.split("/"):
        raise wrong(f"{shown(word)} contains `..`", "write the path without `..`")
    if word.endswith("/"):
        raise wrong(f"{shown(word)} is a folder, not a file")
    folded = re.sub(r"/(\.?/)+", "/", word)
    if re.match(r"/(proc|sys|dev)(/|$)", folded):
        raise wrong(f"{shown(word)} belongs to the kernel")
    if re.match(r"/osmo(/|$)", folded):
        raise wrong(f"{shown(word)} is reserved in this format", "another folder, e.g. /tmp")
    return word


def _folder_path(value: Any) -> Any:
    """Check the path of a checkpoint, within the task's folder or absolute: no `..`."""
    word = _text(value)
    if not word.strip():
        raise wrong("the path is empty")
    if ".." in word.split("/"):
        raise wrong(f"{shown(word)} contains `..`", "write the path without `..`")
    return word


def _path_in_output(value: Any) -> Any:
    """Check a path below `{{output}}`."""
    word = _text(value)
    if word.startswith("/") or ".." in word.split("/"):
        kind = "is absolute" if word.startswith("/") else "contains `..`"
        raise wrong(f"{shown(word)} {kind}; the path starts at `{{{{output}}}}`")
    return word


def _url(value: Any) -> Any:
    word = _text(value)
    if not word.strip():
        raise wrong("the URL is empty", _SHOWN_SCHEMES)
    if word.startswith("{{"):
        return word
    match = _SCHEME.fullmatch(word)
    if match is None:
        if re.match(r"[A-Za-z][A-Za-z0-9]+:", word):  # `s3:/bucket` was meant as a URL
            scheme, _, rest = word.partition(":")
            raise wrong(f"{shown(word)} is not a URL", f"{scheme}://{rest.strip('/')}")
        return _folder_path(word)
    if match[1].lower() not in _SCHEMES:
        near = did_you_mean(match[1], _SCHEMES)
        fix = near.replace("`?", "://`?") if near else _SHOWN_SCHEMES
        raise wrong(f"`{match[1]}://` is not supported for data", fix)
    if not match[2].strip("/") and match[1] != "memory":
        raise wrong(f"{shown(word)} has no bucket or path", f"{match[1]}://BUCKET/FOLDER")
    if ".." in word.split("/"):
        raise wrong(f"{shown(word)} contains `..`", "write the URL without `..`")
    return word


def _dataset_name(value: Any) -> Any:
    word = _text(value)
    if not _DATASET.fullmatch(_TOKEN.sub("x", word)):
        what = f"{shown(word)} is not a valid dataset: [BUCKET/]NAME[:VERSION or :TAG]"
        raise wrong(what, "each part takes letters, digits, `-` and `_`")
    return word


def _exit_ranges(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong(f"expected exit codes, found {kind_of(value)}", "e.g. 3, 1-2, 3,10-20")
    word = value if isinstance(value, str) else _number(value)
    if not _EXIT_CODES.fullmatch(word):
        fix = re.sub(r"\s+", "", word)
        hint = fix if _EXIT_CODES.fullmatch(fix) else "e.g. 3, 1-2, 3,10-20"
        raise wrong(f"{shown(word)} is not a valid list of exit codes", hint)
    if word.count(",") >= _MAX_RANGES:
        raise wrong(f"there are more than {_MAX_RANGES} ranges")
    for part, low, high in split_ranges(word):
        if low > high:
            raise wrong(f"the range {part} is empty: it never matches", f"{high}-{low}")
    return tuple((low, high) for _, low, high in split_ranges(word))


def split_ranges(word: str) -> list[tuple[str, int, int]]:
    """Return (text, first, last) of each range; none if the text is no valid list of codes."""
    if word.count(",") >= _MAX_RANGES or not _EXIT_CODES.fullmatch(word):
        return []
    parts = [(part, *part.partition("-")[::2]) for part in word.split(",")]
    return [(part, int(low), int(high or low)) for part, low, high in parts]


def _like_option(option: str, parse: Callable[[str, Problems], Any]) -> BeforeValidator:
    """Return the check of the corresponding option of `muster run`."""

    def check(value: Any) -> Any:
        word, problems = _text(value).strip(), Problems()
        parse(word, problems)
        for problem in problems.found:
            raise wrong(problem.what, (problem.fix or "").replace(f"{option} ", "") or None)
        return word

    return BeforeValidator(check)


def _parse_workers(word: str, problems: Problems) -> Any:
    return parse_workers(word, ("gpu",), problems)  # the machine here may have no GPU


def _folder_of_credential(value: Any) -> Any:
    if isinstance(value, str):
        return _folder_path(value)
    fix = "a folder, or a map such as {WANDB_API_KEY: wandb_api_key}"
    raise wrong(f"expected a text or a map, found {kind_of(value)}", fix)


Text = Annotated[str, BeforeValidator(_text)]
Name = Annotated[str, BeforeValidator(_name)]
Variable = Annotated[str, BeforeValidator(_variable)]
EnvironmentValue = Annotated[str, BeforeValidator(_environment_value)]
WholeNumber = Annotated[int, BeforeValidator(_whole_number)]
Size = Annotated[int, BeforeValidator(_size)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Regex = Annotated[str, BeforeValidator(_regex)]
Words = Annotated[list[Text], BeforeValidator(_list_of_words)]
Flag = Annotated[bool, BeforeValidator(_flag)]
FilePath = Annotated[str, BeforeValidator(_file_path)]
FolderPath = Annotated[str, BeforeValidator(_folder_path)]
PathInOutput = Annotated[str, BeforeValidator(_path_in_output)]
PathsInOutput = Annotated[list[PathInOutput], BeforeValidator(_list_of_words)]
Url = Annotated[str, BeforeValidator(_url)]
DatasetName = Annotated[str, BeforeValidator(_dataset_name)]
ExitRanges = Annotated[tuple[tuple[int, int], ...], BeforeValidator(_exit_ranges)]
Nodes = Annotated[
    str, _like_option("--nodes", lambda word, found: parse_nodes(word, "--nodes", found))
]
Workers = Annotated[str, _like_option("--nproc-per-node", _parse_workers)]
# The tags get into the path of an error; `_real_path` removes them.
Credential = Annotated[
    Annotated[str, BeforeValidator(_folder_of_credential), Tag("(text)")]
    | Annotated[dict[Variable, Text], Tag("(map)")],
    Discriminator(lambda value: "(map)" if isinstance(value, dict) else "(text)"),
]


_Keys = TypeVar("_Keys", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """How to write hints for one kind of file.

    Attributes:
        missing: Format of an entry for a missing key: `{}: ...`.
        unknown: Returns the hint for an unknown key at a path.
        map: Returns the hint for a value that should be a map.
    """

    missing: str
    unknown: Callable[[KeyPath], str | None]
    map: Callable[[KeyPath, Any], str | None] = lambda _path, _found: None

    def read(
        self,
        model: type[_Keys],
        raw: Any,
        top: KeyPath,
        findings: FileProblems,
        context: Any = None,
    ) -> _Keys | None:
        """Return the checked values; None if there are errors, which go to `findings`."""
        try:
            return model.model_validate(raw, context=context)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                self._take(problem, (*top, *_real_path(tuple(problem["loc"]), raw)), findings)
            return None

    def unknown_key(self, path: KeyPath, findings: FileProblems) -> None:
        """Report an unknown key, with the probable one."""
        what = f"unknown key {shown(str(path[-1]))} in {show_path(path[:-1]) or 'this file'}"
        findings.add(path, what, self.unknown(path), at_key=True)

    def _take(self, problem: Any, path: KeyPath, findings: FileProblems) -> None:
        kind, found = problem["type"], problem["input"]
        at_key = problem["loc"][-1:] == ("[key]",)
        if kind == "muster":
            what = problem["ctx"]["what"]
            if at_key and what.startswith("expected a text"):
                what = f"expected a text as the key, found {kind_of(found)}"
            findings.add(path, what, problem["ctx"].get("fix"), at_key=at_key)
        elif kind == "extra_forbidden":
            self.unknown_key(path, findings)
        elif kind == "missing":
            what = f"`{path[-1]}` is missing in {show_path(path[:-1])}"
            findings.add(path[:-1], what, self.missing.format(path[-1]), at_key=True)
        elif kind in ("model_type", "dict_type"):
            findings.add(path, f"expected a map, found {kind_of(found)}", self.map(path, found))
        elif kind == "list_type":
            fix = "begin each entry with `- `" if isinstance(found, dict) else None
            fix = f"[{found}]" if isinstance(found, str) and len(found) < 60 else fix
            findings.add(path, f"expected a list, found {kind_of(found)}", fix)
        elif kind == "literal_error":
            allowed = problem["ctx"]["expected"].replace("'", "`")
            names = re.findall(r"`(\w+)`", allowed)
            fix = did_you_mean(found, names) if isinstance(found, str) else None
            findings.add(path, f"{kind_of(found)} is not one of {allowed}", fix)
        elif kind == "invalid_key":
            what = f"expected a text as the key, found {kind_of(path[-1])}"
            findings.add(path, what, at_key=True)
        else:
            findings.add(path, f"this value does not fit, found {kind_of(found)}")


def hint_for_key(
    key: str, known: Any, other_words: Mapping[str, str], otherwise: str | None
) -> str | None:
    """Return a hint with the key that was probably meant: a synonym or a near miss."""
    other = other_words.get(key.lower())
    return f"did you mean `{other}`?" if other in known else did_you_mean(key, known, otherwise)


def _real_path(location: tuple[Any, ...], raw: Any) -> tuple[Any, ...]:
    """Remove pydantic's additions to a path: the members of a union, `[key]`."""
    path: list[Any] = []
    here = raw
    for part in location:
        if (isinstance(here, Mapping) and part in here) or (
            isinstance(here, list) and isinstance(part, int) and part < len(here)
        ):
            here = here[part]
        elif isinstance(here, Mapping) and (key := _key_of(here, part)) is not None:
            part = key  # noqa: PLW2901 - pydantic names a key by its text
            here = here[key]
        elif part in ("[key]", "(text)", "(map)") or not isinstance(here, Mapping):
            continue
        else:
            here = None
        path.append(part)
    return tuple(path)


def _key_of(found: Mapping[Any, Any], part: Any) -> Any:
    return next((key for key in found if not isinstance(key, str) and str(key) == part), None)
