"""`muster.toml` as pydantic models: each key with its rule and its message.

Nothing is executed or expanded here: values go into job scripts, or to ssh, unchanged.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, create_model
from pydantic import field_validator as checked

from torchmuster.errors import UsageError
from torchmuster.model.job import WayOfSite
from torchmuster.model.scheduler import KeyKind, SchedulerFacts
from torchmuster.spec.launch import parse_nodes
from torchmuster.spec.problems import Problems
from torchmuster.spec.scalars import Seconds, in_quotes, kind_of, shown, wrong
from torchmuster.spec.sites.hostfile import Host, join_hosts, parse_host

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
    """Return the keys that have an effect for a kind of engine."""
    if kind == "local":
        return _COMMON
    if kind == "ssh":
        return _COMMON | {"hosts", "hostfile", "user", "port"}
    return _COMMON | _OF_JOBS | schedulers[kind].keys


def model_of_kind(own_keys: Mapping[str, KeyKind]) -> "type[SiteKeys]":
    """Return the keys of a section, with those of one scheduler."""
    fields: dict[str, Any] = {name: (_OWN[kind] | None, None) for name, kind in own_keys.items()}
    return create_model("SiteKeysOfKind", __base__=SiteKeys, **fields) if fields else SiteKeys


def text_of_own(value: Any) -> str:
    """Return the text of a scheduler's own key: lists and tables are a line for each entry."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "\n".join(entry if isinstance(entry, str) else "=".join(entry) for entry in value)
    return str(value)


_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_BROKEN_VALUE = re.compile(r"[\s'\"\\#\x00-\x1f\x7f]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_KEY)$", re.IGNORECASE
)
_MAX_ENTRIES = 1000


def _line(value: Any) -> str:
    """Check a text without a newline: one line of a job script."""
    if not isinstance(value, str):
        raise wrong(f"expected a text, found {kind_of(value)}", in_quotes(value))
    if _CONTROL.search(value):
        what = f"{shown(value)} contains a newline or a control character"
        raise wrong(what, "one entry is one line of a job script")
    if not value.strip():
        raise wrong("the text is empty", "leave the key out")
    return value


def _word(value: Any) -> str:
    """Check a value of a directive: no quotes and spaces, which schedulers read in different ways."""
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


def _pairs(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(f"expected a table, found {kind_of(value)}", '{ KEY = "VALUE" }')
    return value


def _chunk(value: Any) -> tuple[tuple[str, str], ...]:
    """Check extra keys: of a PBS chunk, or options of sbatch."""
    found: list[tuple[str, str]] = []
    for key, entry in _pairs(value).items():
        text = str(entry) if isinstance(entry, int) and not isinstance(entry, bool) else entry
        bare = key.removeprefix("--")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", bare):
            raise wrong(f"{shown(key)} can't be a key of a chunk", "letters, digits, `_` and `-`")
        if not isinstance(text, str):
            raise wrong(f"`{key}`: expected a text, found {kind_of(entry)}", in_quotes(entry))
        found.append((bare, _word(text) if text else text))
    return tuple(found)


def _labels(value: Any) -> tuple[tuple[str, str], ...]:
    """Check names and texts as labels and resources have them: `gpu.vendor/product` and a word."""
    found: list[tuple[str, str]] = []
    for name, entry in _pairs(value).items():
        text = str(entry) if isinstance(entry, int) and not isinstance(entry, bool) else entry
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?", name):
            raise wrong(
                f"{shown(name)} can't be a name here", "letters, digits, `.`, `-`, `_`, `/`"
            )
        if not isinstance(text, str):
            raise wrong(f"`{name}`: expected a text, found {kind_of(entry)}", in_quotes(entry))
        found.append((name, _word(text) if text else text))
    return tuple(found)


def _environment(value: Any) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for name, entry in _pairs(value).items():
        text = str(entry) if isinstance(entry, int) and not isinstance(entry, bool) else entry
        if not _VARIABLE.fullmatch(name):
            raise wrong(f"{shown(name)} can't be a variable", "letters, digits and `_`")
        if not isinstance(text, str):
            raise wrong(f"`{name}`: expected a text, found {kind_of(entry)}", in_quotes(entry))
        if _CONTROL.search(text):
            raise wrong(f"`{name}` contains a newline or a control character")
        if _SECRET.search(name):
            fix = f'setup = ["export {name}=$(cat ~/.secrets/{name.lower()})"], the file 0600'
            raise wrong(f"`{name}` looks like a secret: it would be written into job scripts", fix)
        found.append((name, text))
    return tuple(found)


def _host(value: Any) -> Host:
    try:
        return parse_host(_line(value))
    except UsageError as error:
        raise wrong(error.what, error.fix) from error


def _nodes(value: Any) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes, from 4 or "2:4"."""
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


_Lenient = Field(strict=False)  # the validator before has looked already
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
    """One section `[engines.NAME]`; the keys are those of the file.

    Attributes:
        time: Default time limit of jobs, in seconds.
        warn: How long before that limit the workers are warned, in seconds.
        chunk: Extra keys of a PBS chunk, or options of sbatch.
        python: The command that starts the worker side.
        nodes: The minimum and maximum number of nodes.
        scratch: A folder of each node; the node's shell expands variables in it.
        resubmit: In how many more jobs a run may continue after its time limit.
        resubmit_with: How; None for the scheduler's default.
        start_with: Commands that start agents on other nodes; the first one that exists is used.
        hostfile: As written, or made absolute: relative to the file that names it.
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
    start_with: Annotated[
        tuple[WayOfSite, ...],
        BeforeValidator(_list),
        _Lenient,
    ] = ()
    hosts: Annotated[
        tuple[Annotated[Host, BeforeValidator(_host)], ...], BeforeValidator(_list), _Lenient
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
            if prefix == "":  # no options in its scripts: its dialect checks them
                continue
            if not bare.startswith("-"):
                raise wrong(
                    f"the directive {shown(line)} is not an option", "--option=value or -x value"
                )
        return lines

    @checked("hosts")
    @classmethod
    def _join(cls, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
        return join_hosts(hosts)


class DatasetKeys(_Model):
    """`[datasets]`: where `muster dataset` keeps versions."""

    url: Line | None = None


class DefaultKeys(_Model):
    """`[defaults]`: the engine that is used without `--on`."""

    on: Line | None = None


TABLES: dict[str, type[BaseModel]] = {"datasets": DatasetKeys, "defaults": DefaultKeys}
