"""The user's clusters: the project's `muster.toml` over the user's `~/.config/muster/config.toml`.

All problems of both files are reported at once, each with file, line, column and key. Values are
never executed.
"""

import bisect
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, create_model
from pydantic import field_validator as checked

from torchmuster.core.model.text import did_you_mean
from torchmuster.core.plainfile import open_plain
from torchmuster.core.spec.launch import parse_nodes
from torchmuster.core.spec.problems import KeyPath, Problems
from torchmuster.errors import ManyErrors, UsageError
from torchmuster.launcher.model.job import WayOfSite
from torchmuster.launcher.model.scheduler import (
    REMOVED_ENGINES,
    KeyKind,
    SchedulerFacts,
    refuse_removed_engine,
)
from torchmuster.launcher.spec import site_files
from torchmuster.launcher.spec.scalars import (
    FileFormat,
    FileProblems,
    Seconds,
    hint_for_key,
    in_quotes,
    kind_of,
    show_path,
    shown,
    wrong,
)

# Positions: `tomllib` parses the values; this scanner finds line and column of every key.
#
# It reads only text that `tomllib` has parsed, so it checks nothing. tomlkit preserves a file's
# text, but gives no positions.


Place = tuple[int, int]
_STRING = r'"""(?:\\.|[^\\])*?"{3,5}' + r"|'''.*?'{3,5}" + r'|"(?:\\.|[^"\\])*"' + r"|'[^']*'"
_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_PART_OF_KEY = re.compile(rf"{_STRING}|[^ \t.=\]\r\n]+", re.DOTALL)
_SCALAR = re.compile(rf"{_STRING}|[^,\]}}#\n]+", re.DOTALL)
_BRACKETS = re.compile(r"\[\[?|\]\]?")
_MARK = re.compile(r"[][{}.=,]")


def find_places(text: str) -> dict[KeyPath, Place]:
    """Return line and column, from 1, of every key, table header and list element."""
    scan = _Scan(text)
    scan.read()
    lines = [0, *(found.end() for found in re.finditer("\n", text))]
    numbers = {path: bisect.bisect_right(lines, at) for path, at in scan.places.items()}
    return {path: (line, scan.places[path] - lines[line - 1] + 1) for path, line in numbers.items()}


@dataclass(slots=True)
class _Scan:
    """A scan through the text, from left to right."""

    text: str
    at: int = 0
    table: KeyPath = ()
    places: dict[KeyPath, int] = field(default_factory=dict)
    _lengths: dict[KeyPath, int] = field(default_factory=dict)

    def read(self) -> None:
        """Read headers and pairs to the end of the text."""
        self._take(_BLANK)
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                self._header()
            else:
                self._pair(self.table)

    def _take(self, pattern: re.Pattern[str]) -> str:
        """Return the match at the current position, and move past it and the blanks after it."""
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError(f"tomllib has read it: {self.text[self.at : self.at + 20]!r}")
        after = _BLANK.match(self.text, found.end())
        self.at = after.end() if after is not None else found.end()
        return found[0]

    def _header(self) -> None:
        start = self.at
        is_list = self._take(_BRACKETS) == "[["
        path: KeyPath = ()
        parts = self._key()
        for left, part in zip(range(len(parts) - 1, -1, -1), parts, strict=True):
            path = (*path, part)
            self.places.setdefault(path, start)
            if path in self._lengths and (left or not is_list):
                path = (*path, self._lengths[path] - 1)
        if is_list:
            index = self._lengths.get(path, 0)
            self._lengths[path] = index + 1
            path = (*path, index)
        self.table = path
        self.places.setdefault(path, start)
        self._take(_BRACKETS)

    def _pair(self, above: KeyPath) -> None:
        start, path = self.at, above
        for part in self._key():
            path = (*path, part)
            self.places.setdefault(path, start)
        self._take(_MARK)  # the `=`
        self._value(path)

    def _key(self) -> list[str]:
        """Return the parts of a dotted key and move past it."""
        parts: list[str] = []
        while not parts or self.text.startswith(".", self.at):
            if parts:
                self._take(_MARK)
            part = self._take(_PART_OF_KEY)
            parts.append(tomllib.loads(f"x = {part}")["x"] if part[0] in "\"'" else part)
        return parts

    def _value(self, path: KeyPath) -> None:
        first = self.text[self.at]
        if first not in "[{":
            self._take(_SCALAR)
            return
        self._take(_MARK)
        index = 0
        while self.text[self.at] not in "]}":
            if first == "[":
                self.places.setdefault((*path, index), self.at)
                self._value((*path, index))
                index += 1
            else:
                self._pair(path)
            if self.text[self.at] == ",":
                self._take(_MARK)
        self._take(_MARK)


# `muster.toml` as pydantic models: each key with its check and its message.
#
# Nothing is executed or expanded: values go unchanged into job scripts, or to ssh.


_COMMON = frozenset(
    {
        *("kind", "setup", "python", "nodes", "gpus_per_node", "cpus_per_node"),
        *("scratch", "warn", "environment"),
    }
)
_OF_JOBS = frozenset(
    {
        *("partition", "queue", "account", "time", "directives", "chunk"),
        *("resubmit", "resubmit_with"),
    }
)


def kinds_of(schedulers: Mapping[str, SchedulerFacts]) -> tuple[str, ...]:
    """Return all kinds of engines."""
    return ("local", *schedulers, "ssh")


def keys_of_kind(kind: str, schedulers: Mapping[str, SchedulerFacts]) -> frozenset[str]:
    """Return the keys that have an effect for engines of this kind."""
    if kind == "local":
        return _COMMON
    if kind == "ssh":
        return _COMMON | {"hosts", "hostfile", "user", "port"}
    return _COMMON | _OF_JOBS | schedulers[kind].keys


def model_of_kind(own_keys: Mapping[str, KeyKind]) -> "type[SiteKeys]":
    """Return the model of a section, extended by one scheduler's own keys."""
    fields: dict[str, Any] = {name: (_OWN[kind] | None, None) for name, kind in own_keys.items()}
    return create_model("SiteKeysOfKind", __base__=SiteKeys, **fields) if fields else SiteKeys


def text_of_own(value: Any) -> str:
    """Format the value of a scheduler's own key as text; lists and tables have a line per entry."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "\n".join(entry if isinstance(entry, str) else "=".join(entry) for entry in value)
    return str(value)


_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_BROKEN_VALUE = re.compile(r"[\s'\"\\#\x00-\x1f\x7f]")
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_KEY)$", re.IGNORECASE
)
_MAX_ENTRIES = 1000


def _line(value: Any) -> str:
    """Check a text that becomes one line of a job script."""
    if not isinstance(value, str):
        raise wrong(f"expected a text, found {kind_of(value)}", in_quotes(value))
    if _CONTROL.search(value):
        what = f"{shown(value)} contains a newline or a control character"
        raise wrong(what, "one entry is one line of a job script")
    if not value.strip():
        raise wrong("the text is empty", "leave the key out")
    return value


def _word(value: Any) -> str:
    """Check a directive's value: no quotes or spaces, which schedulers treat differently."""
    text = _line(value)
    if _BROKEN_VALUE.search(text):
        raise wrong(
            f"{shown(text)} can't be used in a job script", "no space, quote, backslash or #"
        )
    if text.startswith("-"):
        raise wrong(f"{shown(text)} looks like an option", "options go to `directives`")
    return text


def _list(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        fix = f'["{value}"]' if isinstance(value, str) and len(value) < 60 else None
        raise wrong(f"expected a list, found {kind_of(value)}", fix)
    if len(value) > _MAX_ENTRIES:
        raise wrong(f"the list has {len(value)} entries; at most {_MAX_ENTRIES} are allowed")
    return tuple(value)


def _named_texts(value: Any, form: str, what: str, fix: str) -> Iterator[tuple[str, str]]:
    """Yield the entries of a table, numbers as text; refuse a name that is not of this form."""
    if not isinstance(value, dict):
        raise wrong(f"expected a table, found {kind_of(value)}", '{ KEY = "VALUE" }')
    for name, entry in value.items():
        text = str(entry) if isinstance(entry, int) and not isinstance(entry, bool) else entry
        if not re.fullmatch(form, name):
            raise wrong(f"{shown(name)} {what}", fix)
        if not isinstance(text, str):
            raise wrong(f"`{name}`: expected a text, found {kind_of(entry)}", in_quotes(entry))
        yield name, text


def _chunk(value: Any) -> tuple[tuple[str, str], ...]:
    """Check extra keys: of a PBS chunk, or options of sbatch."""
    what = "can't be a key of a chunk", "letters, digits, `_` and `-`"
    pairs = _named_texts(value, r"(--)?[A-Za-z][A-Za-z0-9_-]*", *what)
    return tuple((key.removeprefix("--"), text and _word(text)) for key, text in pairs)


def _labels(value: Any) -> tuple[tuple[str, str], ...]:
    """Check names and texts of labels and resources: `gpu.vendor/product` and a word."""
    what = "can't be a name here", "letters, digits, `.`, `-`, `_`, `/`"
    pairs = _named_texts(value, r"[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?", *what)
    return tuple((name, text and _word(text)) for name, text in pairs)


def _environment(value: Any) -> tuple[tuple[str, str], ...]:
    what = "can't be a variable", "letters, digits and `_`"
    found: list[tuple[str, str]] = []
    for name, text in _named_texts(value, r"[A-Za-z_][A-Za-z0-9_]*", *what):
        if _CONTROL.search(text):
            raise wrong(f"`{name}` contains a newline or a control character")
        if _SECRET.search(name):
            fix = f'setup = ["export {name}=$(cat ~/.secrets/{name.lower()})"], the file 0600'
            raise wrong(f"`{name}` looks like a secret: it would be written into job scripts", fix)
        found.append((name, text))
    return tuple(found)


def _host(value: Any) -> site_files.Host:
    try:
        return site_files.parse_host(_line(value))
    except UsageError as error:
        raise wrong(error.what, error.fix) from error


def _nodes(value: Any) -> tuple[int, int]:
    """Parse the minimum and maximum number of nodes, from 4 or "2:4"."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong(f"expected a number of nodes, found {kind_of(value)}", '4 or "2:4"')
    problems = Problems()
    nodes = parse_nodes(str(value), "nodes", problems)
    if nodes is None:
        raise wrong(problems.found[0].what, '4 or "2:4"')
    return nodes


def _number(low: int, high: int) -> BeforeValidator:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(f"expected a whole number, found {kind_of(value)}")
        if not low <= value <= high:
            raise wrong(f"{kind_of(value)} is not from {low} to {high}")
        return value

    return BeforeValidator(check)


_Lenient = Field(strict=False)  # the validator before it has checked already
Line = Annotated[str, BeforeValidator(_line)]
Word = Annotated[str, BeforeValidator(_word)]
Lines = Annotated[tuple[Line, ...], BeforeValidator(_list), _Lenient]
Pairs = tuple[tuple[str, str], ...]
_OWN: dict[KeyKind, Any] = {
    KeyKind.WORD: Word,
    KeyKind.LINE: Line,
    KeyKind.LINES: Lines,
    KeyKind.PAIRS: Annotated[Pairs, BeforeValidator(_labels), _Lenient],
    KeyKind.COUNT: Annotated[int, _number(0, 1 << 31)],
    KeyKind.YES: bool,
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SiteKeys(_Model):
    """A section `[engines.NAME]`; the fields are the keys of the file.

    Attributes:
        time: Default time limit of jobs, in seconds.
        warn: How long before that limit to warn the workers, in seconds.
        chunk: Extra keys of a PBS chunk, or options of sbatch.
        python: The command that starts the worker side.
        nodes: The minimum and maximum number of nodes.
        scratch: A folder on each node; the node's shell expands variables in it.
        resubmit: How many more jobs may continue a run after its time limit.
        resubmit_with: The method for that; None for the scheduler's default.
        start_with: Commands that start agents on other nodes; the first one that exists is used.
        hostfile: As written; in a `Site` relative to the file that names it.
    """

    kind: Line
    partition: Word | None = None
    queue: Word | None = None
    account: Word | None = None
    project: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    time: Seconds | None = None
    directives: Lines = ()
    chunk: Annotated[Pairs, BeforeValidator(_chunk), _Lenient] = ()
    setup: Lines = ()
    python: Lines = ()
    nodes: Annotated[tuple[int, int], BeforeValidator(_nodes), _Lenient] | None = None
    gpus_per_node: Annotated[int, _number(0, 4096)] | None = None
    cpus_per_node: Annotated[int, _number(1, 65536)] | None = None
    scratch: Line | None = None
    warn: Seconds | None = None
    resubmit: Annotated[int, _number(0, 1000)] | None = None
    resubmit_with: Literal["requeue", "submit", "chain"] | None = None
    start_with: Annotated[tuple[WayOfSite, ...], BeforeValidator(_list), _Lenient] = ()
    hosts: Annotated[
        tuple[Annotated[site_files.Host, BeforeValidator(_host)], ...],
        BeforeValidator(_list),
        _Lenient,
    ] = ()
    hostfile: Line | None = None
    user: Word | None = None
    port: Annotated[int, _number(1, 65535)] | None = None
    environment: Annotated[Pairs, BeforeValidator(_environment), _Lenient] = ()

    @checked("directives")
    @classmethod
    def _are_options(cls, lines: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        schedulers: Mapping[str, SchedulerFacts] = info.context or {}
        own = schedulers.get(info.data.get("kind", ""))
        prefix = own.directive if own is not None else None
        for line in lines:
            first = line.split(None, 1)[0]
            is_other = first.startswith("#") and prefix not in (None, first)
            if is_other and any(first == other.directive for other in schedulers.values()):
                raise wrong(f"{shown(line)} is a line for another scheduler", f"{prefix} ...")
            bare = line.strip().removeprefix(first if first.startswith("#") else "").strip()
            if prefix == "":  # its scripts have no options: its dialect checks the lines
                continue
            if not bare.startswith("-"):
                raise wrong(
                    f"the directive {shown(line)} is not an option", "--option=value or -x value"
                )
        return lines

    @checked("hosts")
    @classmethod
    def _join(cls, hosts: tuple[site_files.Host, ...]) -> tuple[site_files.Host, ...]:
        return site_files.join_hosts(hosts)


class DatasetKeys(_Model):
    """`[datasets]`: where `muster dataset` keeps versions."""

    url: Line | None = None


class DefaultKeys(_Model):
    """`[defaults]`: the engine that is used without `--on`."""

    on: Line | None = None


TABLES: dict[str, type[BaseModel]] = {"datasets": DatasetKeys, "defaults": DefaultKeys}
_TABLE_NAMES = ("engines", "notify", *TABLES)  # `[notify]` is read by `launcher/notify` alone


# Hints for errors in a table of `muster.toml`.


_Keys = TypeVar("_Keys", bound=BaseModel)
# Common names of keys, and their names here.
_OTHER_WORDS = {
    "walltime": "time",
    "time_limit": "time",
    "modules": "setup",
    "module": "setup",
    "type": "kind",
    "engine": "kind",
    "host": "hosts",
    "env": "environment",
    "select": "chunk",
    "resources": "chunk",
    "sbatch": "directives",
    "pbs": "directives",
    "extra": "directives",
    "gpus": "gpus_per_node",
    "cpus": "cpus_per_node",
    "ncpus": "cpus_per_node",
    "tmpdir": "scratch",
    "username": "user",
    "machinefile": "hostfile",
}


def read_table(
    model: type[_Keys], raw: Any, path: KeyPath, findings: FileProblems, context: Any = None
) -> _Keys | None:
    """Return the table; None if there are errors, which go to `findings` below `path`."""
    if not isinstance(raw, dict):
        fix = f"[{show_path(path)}] on a line of its own, keys below it"
        findings.add(path, f"expected a table, found {kind_of(raw)}", fix)
        return None
    return toml_format(model.model_fields).read(model, raw, path, findings, context)


def toml_format(known: Collection[str]) -> FileFormat:
    """Return the format of hints in a table with these known keys."""
    allowed = f"allowed here: {', '.join(known)}"
    return FileFormat(
        missing='{} = "..."',
        unknown=lambda path: hint_for_key(str(path[-1]), known, _OTHER_WORDS, allowed),
    )


BUILT_IN = "built in"
RESERVED = "all"
_MAX_SIZE_BYTES = 1 << 20
_ONE_THING = (("partition", "queue"), ("hosts", "hostfile"))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Site(SiteKeys):
    """A destination of runs, for `--on NAME`; `own_keys` are those of its scheduler alone."""

    name: str
    origin: str = BUILT_IN
    own_keys: Pairs = ()

    @property
    def queue_name(self) -> str | None:
        """The partition or queue: two names for the same thing."""
        return self.queue or self.partition

    @property
    def is_batch(self) -> bool:
        """Whether it is a scheduler, which accepts job scripts."""
        return self.kind not in ("local", "ssh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """All destinations for `--on`.

    Attributes:
        sites: By name; those without a section first.
        default_on: The value of `[defaults] on`.
        files: The files that were read, the user's first.
        notes: A sentence for each file that was not used.
    """

    sites: Mapping[str, Site]
    default_on: str | None = None
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def get(self, name: str) -> Site:
        """Return the site of this name.

        Raises:
            UsageError: There is none; the error suggests a similar name.
        """
        if name in self.sites:
            return self.sites[name]
        refuse_removed_engine(name, f"--on {name}")
        fix = did_you_mean(name, self.sites, f"engines: {', '.join(self.sites)}")
        why = "there is no muster.toml"
        if self.files:
            why = f"read: {', '.join(self.files)}"
        elif self.notes:
            why = "the settings that were found are not used"
        raise UsageError(f"there is no engine `{name}`", where="--on", why=why, fix=fix)

    @property
    def configured(self) -> tuple[Site, ...]:
        """The sites that have a section."""
        return tuple(site for site in self.sites.values() if site.origin != BUILT_IN)


def load_sites(
    cwd: str, environment: Mapping[str, str], schedulers: Mapping[str, SchedulerFacts]
) -> Sites:
    """Load the sites from both files.

    Args:
        cwd: Folder where the search for `muster.toml` begins; it goes up to the root.
        environment: For `XDG_CONFIG_HOME` and `HOME`.
        schedulers: The known schedulers by name, which are kinds besides `local` and `ssh`.

    Raises:
        ManyErrors: All problems of both files.
    """
    notes: list[str] = []
    errors: list[UsageError] = []
    sources: list[_Source] = []
    for path in (site_files.user_file(environment), site_files.project_file(cwd)):
        if path is not None and all(path != source.path for source in sources):
            source = _read(path, environment, notes, errors)
            sources += [source] if source is not None else []
    merged = _merge(sources)
    sites = _make_sites(merged, schedulers)
    tables = {
        name: read_table(model, merged.raw[name], (name,), merged.findings)
        for name, model in TABLES.items()
        if name in merged.raw
    }
    default_on = getattr(tables.get("defaults"), "on", None)
    known = list(dict.fromkeys([*sites, *merged.names()]))
    if default_on is not None and default_on not in known:
        fix = did_you_mean(default_on, known, f"engines: {', '.join(known)}")
        merged.findings.add(("defaults", "on"), f"there is no engine `{default_on}`", fix)
    findings = sorted(merged.findings.errors, key=lambda finding: merged.rank(finding.path))
    errors += [finding.as_error(merged.where(finding.path)) for finding in findings]
    if errors:
        raise ManyErrors(errors)
    return Sites(
        sites=sites,
        default_on=default_on,
        files=tuple(source.path for source in sources),
        notes=tuple(notes),
    )


def site_hosts(site: Site) -> tuple[site_files.Host, ...]:
    """Return the hosts of an ssh site, from its hostfile if it has one.

    Raises:
        ManyErrors: The hostfile can't be read or has invalid lines.
    """
    return site_files.read_hostfile(site.hostfile) if site.hostfile is not None else site.hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    path: str
    raw: dict[str, Any]
    places: dict[KeyPath, Place]

    def where(self, path: KeyPath) -> str | None:
        """Return `file:line:column key`; None if the file lacks it."""
        line, column = self.places.get(path, (0, 0))
        return f"{self.path}:{line}:{column} {show_path(path)}" if line else None


@dataclass(slots=True)
class _Merged:
    """Both files as one: the project's keys replace the user's, key by key."""

    sources: list[_Source]
    raw: dict[str, Any] = field(default_factory=dict)
    findings: FileProblems = field(default_factory=FileProblems)

    def names(self) -> list[str]:
        """Return the names of all engine sections."""
        engines = self.raw.get("engines")
        return list(engines) if isinstance(engines, dict) else []

    def where(self, path: KeyPath) -> str | None:
        """Return the place of a key, or of the nearest table above it; the project's file wins."""
        source, found = self._find(path)
        return None if source is None else source.where(found)

    def rank(self, path: KeyPath) -> tuple[int, Place]:
        """Return a sort key that orders findings as in the files."""
        source, found = self._find(path)
        if source is None:
            return -1, (0, 0)
        return self.sources.index(source), source.places[found]

    def _find(self, path: KeyPath) -> tuple[_Source | None, KeyPath]:
        while path:
            for source in reversed(self.sources):
                if path in source.places:
                    return source, path
            path = path[:-1]
        return None, ()


def _read(
    path: str, environment: Mapping[str, str], notes: list[str], errors: list[UsageError]
) -> _Source | None:
    """Read a file; return None if it is not used or can't be read."""
    try:
        with open_plain(path) as file:
            status = os.fstat(file.fileno())
            if stranger := site_files.why_not_used(path, status, environment):
                notes.append(f"{path} is not used: {stranger}")
                return None
            data = file.read(_MAX_SIZE_BYTES + 1)
    except OSError as error:
        errors.append(UsageError("the file can't be read", where=path, why=error.strerror))
        return None
    if len(data) > _MAX_SIZE_BYTES:
        errors.append(UsageError("this is not a TOML file of at most 1 MiB", where=path))
        return None
    try:
        text = data.decode()
        return _Source(path=path, raw=tomllib.loads(text), places=find_places(text))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        errors.append(_syntax_error(path, error))
        return None


def _syntax_error(path: str, error: Exception) -> UsageError:
    """Return tomllib's error, with its place in the usual form."""
    match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error), re.DOTALL)
    where = f"{path}:{match[2]}:{match[3]}" if match else path
    why = match[1] if match else str(error)
    fix = 'write texts in quotes, lists in brackets: queue = "gpu", setup = ["module load cuda"]'
    return UsageError("this is not TOML", where=where, why=why, fix=fix)


def _merge(sources: list[_Source]) -> _Merged:
    merged = _Merged(sources=sources)
    for source in sources:
        for name, table in source.raw.items():
            known = merged.raw.get(name)
            if not isinstance(known, dict) or not isinstance(table, dict):
                merged.raw[name] = table
            elif name == "engines":
                merged.raw[name] = {**known, **_merge_engines(known, table)}
            else:
                merged.raw[name] = {**known, **table}
    for name in merged.raw:
        if name not in _TABLE_NAMES:
            toml_format(_TABLE_NAMES).unknown_key((name,), merged.findings)
    return merged


def _merge_engines(known: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, section in table.items():
        below = known.get(name)
        if not isinstance(below, dict) or not isinstance(section, dict):
            found[name] = section
            continue
        if "kind" in section and section["kind"] != below.get("kind", name):
            below = {}  # another scheduler: the user's keys don't apply to it
        replaced = {key for pair in _ONE_THING if set(pair) & set(section) for key in pair}
        kept = {key: value for key, value in below.items() if key not in replaced}
        found[name] = {**kept, **section}
    return found


def _make_sites(merged: _Merged, schedulers: Mapping[str, SchedulerFacts]) -> dict[str, Site]:
    # No site for `ssh`: its hosts have to be listed.
    found = {name: Site(name=name, kind=name) for name in ("local", *schedulers)}
    engines = merged.raw.get("engines", {})
    if not isinstance(engines, dict):
        read_table(SiteKeys, engines, ("engines",), merged.findings)
        return found
    for name, section in engines.items():
        path: KeyPath = ("engines", name)
        if not _NAME.fullmatch(name) or name == RESERVED:
            why = "`--on all` means every engine" if name == RESERVED else None
            fix = "letters, digits, `_`, `-` and `.`, at most 64"
            what = f"{shown(name)} can't be the name of an engine"
            merged.findings.add(path, what, fix, why=why, at_key=True)
            continue
        site = _make_site(name, section, merged, schedulers)
        if site is not None:
            found[name] = site
    return found


def _make_site(
    name: str, section: Any, merged: _Merged, schedulers: Mapping[str, SchedulerFacts]
) -> Site | None:
    path: KeyPath = ("engines", name)
    own: dict[str, KeyKind] = {}
    if isinstance(section, dict):
        section = {"kind": name, **section} if name in kinds_of(schedulers) else section
        kind = section.get("kind")
        if isinstance(kind, str):
            if not _check_kind(name, kind, section, merged, schedulers):
                return None
            own = schedulers[kind].own_kinds if kind in schedulers else {}
    keys = read_table(model_of_kind(own), section, path, merged.findings, schedulers)
    if keys is None:
        return None
    own_keys = tuple(
        (key, text_of_own(value)) for key in own if (value := getattr(keys, key)) is not None
    )
    hostfile = keys.hostfile
    if hostfile is not None:  # relative to the file that names it
        here = (*path, "hostfile")
        source = next(s for s in reversed(merged.sources) if s.where(here) is not None)
        hostfile = os.path.join(os.path.dirname(source.path), os.path.expanduser(hostfile))
    values = {key: getattr(keys, key) for key in SiteKeys.model_fields}
    origin = (merged.where(path) or "").rpartition(" ")[0]
    values |= {"hostfile": hostfile, "own_keys": own_keys}
    return Site.model_construct(**values, name=name, origin=origin)


def _check_kind(
    name: str,
    kind: str,
    section: dict[str, Any],
    merged: _Merged,
    schedulers: Mapping[str, SchedulerFacts],
) -> bool:
    """Return whether the kind exists; report keys without effect for it, and missing keys."""
    path: KeyPath = ("engines", name)
    kinds = kinds_of(schedulers)
    if kind not in kinds or (name in kinds and name != kind):
        what = f"there is no kind of engine {shown(kind)}"
        fix = did_you_mean(kind, kinds, f"one of {', '.join(kinds)}")
        if kind in kinds:
            what, fix = f"`{name}` is the name of another kind", "give this section another name"
        elif kind in REMOVED_ENGINES:
            what, fix = REMOVED_ENGINES[kind]
        merged.findings.add((*path, "kind"), what, fix)
        return False
    keys = keys_of_kind(kind, schedulers)
    for key in section:
        if key in SiteKeys.model_fields and key not in keys:
            others = (other for other in kinds if key in keys_of_kind(other, schedulers))
            homes = ", ".join(others)
            instead = schedulers[kind].instead if kind in schedulers else {}
            fix = instead.get(key, f"it is a key of {homes}")
            what = f"`{key}` has no effect for an engine of kind {kind}"
            merged.findings.add((*path, key), what, fix, at_key=True)
    for pair in _ONE_THING:
        if all(key in section for key in pair):
            what = f"`{pair[0]}` and `{pair[1]}` mean the same: use one of them"
            merged.findings.add((*path, pair[1]), what, at_key=True)
    if kind == "ssh" and not section.get("hosts") and "hostfile" not in section:
        what = f"the engine `{name}` has no hosts"
        merged.findings.add(path, what, 'hosts = ["node1 slots=4", "node2 slots=4"]', at_key=True)
    return True
