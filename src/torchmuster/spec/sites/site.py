"""The user's clusters: `muster.toml` of the project over `~/.config/muster/config.toml` of the user.

All problems of both files are reported at once, each with file, line, column and key. Values are not executed.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchmuster.errors import ManyErrors, UsageError
from torchmuster.model.display.text import did_you_mean
from torchmuster.model.scheduler import (
    REMOVED_ENGINES,
    KeyKind,
    SchedulerFacts,
    refuse_removed_engine,
)
from torchmuster.plainfile import open_plain
from torchmuster.spec.problems import FileProblems, KeyPath, show_path
from torchmuster.spec.scalars import shown
from torchmuster.spec.sites.explain import read_table, toml_format
from torchmuster.spec.sites.files import project_file, user_file, why_not_used
from torchmuster.spec.sites.hostfile import Host, read_hostfile
from torchmuster.spec.sites.schema import (
    TABLES,
    Pairs,
    SiteKeys,
    keys_of_kind,
    kinds_of,
    model_of_kind,
    text_of_own,
)
from torchmuster.spec.sites.toml_places import Place, find_places

BUILT_IN = "built in"
RESERVED = "all"
_MAX_SIZE_BYTES = 1 << 20
_ONE_THING = (("partition", "queue"), ("hosts", "hostfile"))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Site(SiteKeys):
    """A destination of runs: the meaning of `--on NAME`; `own_keys` are keys of its scheduler alone."""

    name: str
    origin: str = BUILT_IN
    own_keys: Pairs = ()

    @property
    def queue_name(self) -> str | None:
        """Return the partition or queue: two words for the same thing."""
        return self.queue or self.partition

    @property
    def is_batch(self) -> bool:
        """Return whether it is a scheduler, which takes job scripts."""
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
            UsageError: There is none; the error suggests a near miss.
        """
        if name in self.sites:
            return self.sites[name]
        refuse_removed_engine(name, f"--on {name}")
        fix = did_you_mean(name, self.sites, f"engines: {', '.join(self.sites)}")
        none = (
            "the settings that were found are not used" if self.notes else "there is no muster.toml"
        )
        why = f"read: {', '.join(self.files)}" if self.files else none
        raise UsageError(f"there is no engine `{name}`", where="--on", why=why, fix=fix)

    @property
    def configured(self) -> tuple[Site, ...]:
        """Return the sites that have a section."""
        return tuple(site for site in self.sites.values() if site.origin != BUILT_IN)


def load_sites(
    cwd: str, environment: Mapping[str, str], schedulers: Mapping[str, SchedulerFacts]
) -> Sites:
    """Return the sites that both files describe.

    Args:
        cwd: Where the search for `muster.toml` begins; it goes up to the root.
        environment: For `XDG_CONFIG_HOME` and `HOME`.
        schedulers: The known ones, by name: kinds of sections in addition to `local` and `ssh`.

    Raises:
        ManyErrors: All problems of both files.
    """
    notes: list[str] = []
    errors: list[UsageError] = []
    sources: list[_Source] = []
    for path in (user_file(environment), project_file(cwd)):
        if path is not None and all(path != source.path for source in sources):
            source = _read(path, environment, notes, errors)
            sources += [source] if source is not None else []
    merged = _merge(sources)
    sites = _make_sites(merged, schedulers)
    tables = {name: _read_plain(name, merged) for name in TABLES}
    default_on = getattr(tables["defaults"], "on", None)
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


def site_hosts(site: Site) -> tuple[Host, ...]:
    """Return the hosts of an ssh site; reads its hostfile.

    Raises:
        ManyErrors: The hostfile can't be read or has invalid lines.
    """
    return read_hostfile(site.hostfile) if site.hostfile is not None else site.hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    path: str
    raw: dict[str, Any]
    places: dict[KeyPath, Place]

    def where(self, path: KeyPath) -> str | None:
        """Return `file:line:column key`, or None when the file doesn't have it."""
        line, column = self.places.get(path, (0, 0))
        return f"{self.path}:{line}:{column} {show_path(path)}" if line else None


@dataclass(slots=True)
class _Merged:
    """Both files as one: the project's keys over the user's, key by key."""

    sources: list[_Source]
    raw: dict[str, Any] = field(default_factory=dict)
    findings: FileProblems = field(default_factory=FileProblems)

    def names(self) -> list[str]:
        """Return the names of all sections of engines."""
        engines = self.raw.get("engines")
        return list(engines) if isinstance(engines, dict) else []

    def where(self, path: KeyPath) -> str | None:
        """Return the place of a key, or of the nearest table above; the project's file wins."""
        source, found = self._find(path)
        return None if source is None else source.where(found)

    def rank(self, path: KeyPath) -> tuple[int, Place]:
        """Return the sort key for findings in the order of the files."""
        source, found = self._find(path)
        return (
            (-1, (0, 0)) if source is None else (self.sources.index(source), source.places[found])
        )

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
    """Return the content of a file; None when it is not used or can't be read."""
    try:
        with open_plain(path) as file:
            status = os.fstat(file.fileno())
            if stranger := why_not_used(path, status, environment):
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
    """Return tomllib's error with its place in the usual form."""
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
        if name not in ("engines", *TABLES):
            toml_format(("engines", *TABLES)).unknown_key((name,), merged.findings)
    return merged


def _merge_engines(known: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, section in table.items():
        below = known.get(name)
        if not isinstance(below, dict) or not isinstance(section, dict):
            found[name] = section
            continue
        if "kind" in section and section["kind"] != below.get("kind", name):
            below = {}  # another scheduler: the user's keys are not for it
        replaced = {key for pair in _ONE_THING if set(pair) & set(section) for key in pair}
        kept = {key: value for key, value in below.items() if key not in replaced}
        found[name] = {**kept, **section}
    return found


def _make_sites(merged: _Merged, schedulers: Mapping[str, SchedulerFacts]) -> dict[str, Site]:
    # Hosts of ssh have to be listed: they have no site of their own.
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
    if hostfile is not None:
        hostfile = _beside(merged, (*path, "hostfile"), hostfile)
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
    """Return whether the kind exists; note keys without effect for it, and missing keys."""
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


def _beside(merged: _Merged, path: KeyPath, hostfile: str) -> str:
    """Return the path of a hostfile: relative to the file that names it."""
    source = next(s for s in reversed(merged.sources) if s.where(path) is not None)
    return os.path.join(os.path.dirname(source.path), os.path.expanduser(hostfile))


def _read_plain(name: str, merged: _Merged) -> Any:
    if name not in merged.raw:
        return None
    return read_table(TABLES[name], merged.raw[name], (name,), merged.findings)
