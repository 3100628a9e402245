"""The workflow file as pydantic models: every key of the format, each with its rule.

Both dialects are read: 6.3 (datasets) and 6.4 (`url:`). Keys of our own: `nodes`, `nproc_per_node`, `script`,
`max_restarts` and `max_retries` of a task, `templated` of a file. What depends on more than one place of the file is
checked in `spec.check`.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
)
from pydantic_core import PydanticCustomError

from torchmuster.spec.units import parse_size, parse_timeout

NAME = re.compile(r"[a-zA-Z]([a-zA-Z0-9_-]*[a-zA-Z0-9])?")
MAX_NAME = 64
_EXIT_CODES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_CLOUD_URL = re.compile(r"(s3|gs|swift|tos|azure|abfs|abfss|file|memory)://.+")


def wrong(what: str, fix: str | None = None) -> PydanticCustomError:
    """Return an error whose sentence is ours; `fix` becomes the hint."""
    # pydantic formats the template with its context: braces of a token must survive it.
    return PydanticCustomError("muster", "{what}", {"what": what, "fix": fix})


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else f"`{value}`"
    return text if len(text) <= 60 else f"{text[:57]}..."


def kind_of(value: Any) -> str:
    """Return what a person calls a YAML value."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int | float):
        return f"the number {value}"
    return _shown(value)


def _text(value: Any) -> Any:
    """Numbers become text, as in the reference; truth values and the rest do not."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        fix = 'put it in quotes: "true"' if isinstance(value, bool) else None
        raise wrong(f"expected a text, found {kind_of(value)}", fix)
    return value


def _name(value: Any) -> Any:
    word = _text(value)
    if not NAME.fullmatch(word):
        near = re.sub(r"[^a-zA-Z0-9_-]+", "-", word).strip("-_0123456789")
        raise wrong(
            f"{_shown(word)} can't be a name: letters, digits, `-` and `_`, a letter first,"
            " a letter or digit last",
            f"`{near}`" if NAME.fullmatch(near) else None,
        )
    if len(word) > MAX_NAME:
        raise wrong(f"the name has {len(word)} characters; at most {MAX_NAME} are allowed")
    return word


def _environment_value(value: Any) -> Any:
    """Scalars become text in Python's own way, as in the reference: `true` is "True"."""
    if isinstance(value, bool | int | float):
        return str(value)
    if not isinstance(value, str):
        fix = 'an empty value is written ""' if value is None else None
        raise wrong(f"expected a text, found {kind_of(value)}", fix)
    return value


def _whole_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong(f"expected a whole number, found {kind_of(value)}")
    if isinstance(value, str) and not re.fullmatch(r"[+-]?\d+", value.strip()):
        raise wrong(f"expected a whole number, found {_shown(value)}")
    if int(value) < 0:
        raise wrong(f"{value} is negative")
    return int(value)


def _size(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong(f"expected a size, found {kind_of(value)}", "e.g. 64Gi, 500Mi")
    size = parse_size(str(value))
    if size is not None:
        return size
    word = str(value).strip()
    if word.startswith("-"):
        raise wrong(f"the size {word} is negative")
    fix = "e.g. 64Gi, 500Mi"
    if re.fullmatch(r"\d+(\.\d+)?\s*[kmgtKMGT][bB]?", word):
        fix = f"{word.rstrip('bB').strip()[:-1]}{word.rstrip('bB').strip()[-1].upper()}i"
    raise wrong(f"{_shown(word)} is no size", fix)


def _seconds(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong(f"expected a time, found {kind_of(value)}", "e.g. 30s, 90m, 8h, PT1H30M")
    word = str(value).strip()
    if word.startswith("-"):
        raise wrong(f"the time {word} is negative", word[1:])
    seconds = parse_timeout(word)
    if seconds is None:
        raise wrong(f"{_shown(word)} is no time", "e.g. 30s, 90m, 8h, PT1H30M")
    if seconds <= 0:
        raise wrong(f"the time {word} is not longer than nothing")
    return seconds


def _regex(value: Any) -> Any:
    word = _text(value)
    try:
        re.compile(word)
    except re.error as error:
        raise wrong(f"{_shown(word)} is no regular expression: {error}") from None
    return word


def _list_of_words(value: Any) -> Any:
    if isinstance(value, str):
        raise wrong(f"expected a list, found the text {_shown(value)}", f"[{value}]")
    if not isinstance(value, list):
        raise wrong(f"expected a list, found {kind_of(value)}")
    return value


def _flag(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    words = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise wrong(f"expected true or false, found {kind_of(value)}")


def _absolute_free(value: Any) -> Any:
    """A path of a file in its task: nothing that climbs, nothing that is the kernel's."""
    word = _text(value)
    if not word or word == "/":
        raise wrong(f"{_shown(word)} is no path of a file")
    if "\0" in word or len(word) > 4096:
        raise wrong("the path has a null byte, or more than 4,096 characters")
    if ".." in word.split("/"):
        raise wrong(f"{_shown(word)} climbs with `..`", "write the path that you mean")
    if word.endswith("/"):
        raise wrong(f"{_shown(word)} is a folder, not a file")
    if re.match(r"/(proc|sys|dev)(/|$)", word):
        raise wrong(f"{_shown(word)} is the kernel's")
    if re.match(r"/osmo(/|$)", word):
        raise wrong(f"{_shown(word)} is reserved in this format", "another folder, e.g. /tmp")
    return word


def _url(value: Any) -> Any:
    word = _text(value)
    if "{{" in word or _CLOUD_URL.fullmatch(word) or "://" not in word:
        if not word.strip():
            raise wrong("the URL is empty")
        return word
    import difflib

    scheme = word.partition("://")[0]
    known = ["s3", "gs", "swift", "tos", "azure", "abfs", "file"]
    near = difflib.get_close_matches(scheme, known, n=1)
    fix = f"did you mean `{near[0]}://`?" if near else ", ".join(f"{k}://" for k in known)
    raise wrong(f"`{scheme}://` is no place for data", fix)


def _exit_ranges(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong(f"expected exit codes, found {kind_of(value)}", "e.g. 3, 1-2, 3,10-20")
    word = str(value)
    if not _EXIT_CODES.fullmatch(word):
        fix = re.sub(r"\s+", "", word)
        hint = fix if _EXIT_CODES.fullmatch(fix) else "e.g. 3, 1-2, 3,10-20"
        raise wrong(f"{_shown(word)} is no list of exit codes", hint)
    ranges = []
    for part in word.split(","):
        low, dash, high = part.partition("-")
        first, last = int(low), int(high) if dash else int(low)
        if first > last:
            raise wrong(f"the range {part} is empty: it never matches", f"{last}-{first}")
        ranges.append((first, last))
    return tuple(ranges)


Text = Annotated[str, BeforeValidator(_text)]
Name = Annotated[str, BeforeValidator(_name)]
EnvironmentValue = Annotated[str, BeforeValidator(_environment_value)]
WholeNumber = Annotated[int, BeforeValidator(_whole_number)]
Size = Annotated[int, BeforeValidator(_size)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Regex = Annotated[str, BeforeValidator(_regex)]
Words = Annotated[list[Text], BeforeValidator(_list_of_words)]
Flag = Annotated[bool, BeforeValidator(_flag)]
FilePath = Annotated[str, BeforeValidator(_absolute_free)]
Url = Annotated[str, BeforeValidator(_url)]
ExitRanges = Annotated[tuple[tuple[int, int], ...], BeforeValidator(_exit_ranges)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Topology(_Model):
    """Which nodes should lie near each other."""

    key: Text
    group: Text = "default"
    requirementType: Literal["required", "preferred"] = "required"


class ResourceSpec(_Model):
    """What a task asks for."""

    cpu: WholeNumber | None = None
    gpu: WholeNumber | None = None
    memory: Size | None = None
    storage: Size | None = None
    platform: Text | None = None
    nodesExcluded: Words = Field(default_factory=list)
    topology: list[Topology] = Field(default_factory=list)


class Timeout(_Model):
    """Limits of a group: from RUNNING on, and in SCHEDULING."""

    exec_timeout: Seconds | None = None
    queue_timeout: Seconds | None = None


class DatasetInput(_Model):
    """A versioned dataset, at `{{input:N}}/<name>`."""

    name: Text
    path: Text | None = None
    metadata: Words = Field(default_factory=list)
    labels: Words = Field(default_factory=list)
    regex: Regex | None = None
    localpath: Text | None = None


class DatasetOutput(DatasetInput):
    """A new version of a dataset, from `{{output}}` or a path in it."""


class UpdateDataset(_Model):
    """A new version made of the newest one and these files."""

    name: Text
    paths: Words = Field(default_factory=list)
    metadata: Words = Field(default_factory=list)
    labels: Words = Field(default_factory=list)


class Input(_Model):
    """One input: the output of a task, a URL or a dataset."""

    task: Text | None = None
    url: Url | None = None
    dataset: DatasetInput | None = None
    regex: Regex | None = None


class Output(_Model):
    """One output: a URL or a dataset."""

    url: Url | None = None
    dataset: DatasetOutput | None = None
    update_dataset: UpdateDataset | None = None
    regex: Regex | None = None


class FileSpec(_Model):
    """A file that appears in the task."""

    path: FilePath
    contents: Text | None = None
    localpath: Text | None = None
    base64: Flag = False
    templated: Flag = False


class Checkpoint(_Model):
    """What is uploaded while the task runs."""

    path: Text
    url: Url
    frequency: Seconds
    regex: Regex | None = None


class Kpi(_Model):
    """A file of measurements; accepted, and without effect here."""

    index: Text
    path: Text


class Task(_Model):
    """One command, or one training run on several nodes."""

    name: Name
    image: Text | None = None
    command: Words | None = None
    args: Words = Field(default_factory=list)
    lead: Flag = False
    environment: dict[Text, EnvironmentValue] = Field(default_factory=dict)
    credentials: dict[Text, Text | dict[Text, Text]] = Field(default_factory=dict)
    inputs: list[Input] = Field(default_factory=list)
    outputs: list[Output] = Field(default_factory=list)
    files: list[FileSpec] = Field(default_factory=list)
    resource: Text | None = None
    exitActions: dict[Text, ExitRanges] = Field(default_factory=dict)
    checkpoint: list[Checkpoint] = Field(default_factory=list)
    privileged: Flag = False
    hostNetwork: Flag = False
    volumeMounts: Words = Field(default_factory=list)
    downloadType: Text | None = None
    cacheSize: Text | None = None
    kpis: list[Kpi] = Field(default_factory=list)
    resources: Any = None
    backend: Any = None
    nodes: Text | None = None
    nproc_per_node: Text | None = None
    script: Text | None = None
    max_restarts: WholeNumber | None = None
    max_retries: WholeNumber | None = None


class Group(_Model):
    """Tasks that start together."""

    name: Name
    barrier: Flag = True
    ignoreNonleadStatus: Flag = True
    tasks: list[Task]


class Workflow(_Model):
    """The whole of `workflow:`."""

    name: Name
    labels: dict[Text, Any] = Field(default_factory=dict)
    pool: Text | None = None
    backend: Text | None = None
    resources: dict[Text, ResourceSpec] = Field(default_factory=dict)
    timeout: Timeout = Field(default_factory=Timeout)
    tasks: list[Task] = Field(default_factory=list)
    groups: list[Group] = Field(default_factory=list)
