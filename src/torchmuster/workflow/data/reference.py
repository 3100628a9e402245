"""What a user writes of a dataset: its name `[bucket/]NAME[:tag|version]`, its metadata, and where datasets are stored."""

import json
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core.files.layout import muster_home
from torchmuster.core.model.text import nearest, printable
from torchmuster.core.plainfile import open_plain
from torchmuster.errors import UsageError
from torchmuster.launcher.spec.site_files import is_new, why_not_used
from torchmuster.workflow.data.faults import DataError

STORE_VARIABLE = "MUSTER_DATASETS"
LATEST = "latest"
_PART = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A dataset with a version number or a tag; with neither, its newest version."""

    name: str
    version: int | None = None
    tag: str | None = None

    def __str__(self) -> str:
        selector = self.version if self.version is not None else self.tag
        return self.name if selector is None else f"{self.name}:{selector}"


def parse_reference(text: str) -> Reference:
    """Parse `[bucket/]NAME[:tag|version]`.

    Raises:
        UsageError: The text does not have this form.
    """
    name, colon, selector = text.partition(":")
    parts = name.split("/")
    if len(parts) > 2 or not all(_PART.fullmatch(part) for part in parts):
        raise _bad(text, name)
    if not colon or selector == LATEST:
        return Reference(name=name)
    if not _PART.fullmatch(selector):
        raise _bad(text, selector)
    if selector.isdecimal():
        return Reference(name=name, version=int(selector))
    return Reference(name=name, tag=selector)


def check_tag(tag: str) -> None:
    """Refuse a tag that looks like a version, `latest` or a path.

    Raises:
        UsageError: The tag is invalid.
    """
    if tag == LATEST:
        raise UsageError("the tag `latest` is always the newest version", where="--tag latest")
    if tag.isdecimal() or not _PART.fullmatch(tag):
        why = "allowed: letters, digits, `_`, `-`"
        if tag.isdecimal():
            why = "numbers are reserved for versions"
        raise UsageError(f"`{tag}` can't be a tag", where="--tag", why=why)


def _bad(text: str, part: str) -> UsageError:
    mended = re.sub(r"[^A-Za-z0-9_-]+", "-", part).strip("-")
    return UsageError(
        f"`{text}` is not a valid name of a dataset",
        why="the form is [bucket/]NAME[:tag or version], of letters, digits, `_` and `-`",
        fix=f"did you mean `{mended}`?" if mended and "/" not in part else None,
    )


def datasets_url() -> str:
    """Return the URL or path where datasets are stored.

    It is MUSTER_DATASETS, else `datasets.url` of a config file, else `$MUSTER_HOME/datasets`.

    Raises:
        UsageError: A config file is damaged.
    """
    given = os.environ.get(STORE_VARIABLE)
    if given:
        return given
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    for path in ("muster.toml", os.path.join(base, "muster", "config.toml")):
        url = _url_of(path)
        if url is not None:
            return url
    return os.path.join(muster_home(), "datasets")


def _url_of(path: str) -> str | None:
    try:
        with open_plain(path) as file:
            whole = os.path.abspath(path)
            stranger = why_not_used(whole, os.fstat(file.fileno()), os.environ)
            if stranger is not None:
                note = f"{whole} is not used: {stranger}"
                if is_new(note):
                    sys.stderr.write(f"muster: {printable(note)}\n")
                return None
            value = tomllib.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError("the settings can't be read", where=path, why=str(error)) from error
    section = value.get("datasets", {})
    url = section.get("url") if isinstance(section, dict) else section
    if url is None:
        return None
    if not isinstance(url, str) or not url:
        fix = '[datasets]\nurl = "s3://BUCKET/datasets"'
        raise UsageError("`datasets.url` is not a URL", where=path, why=f"it is {url!r}", fix=fix)
    if "://" not in url and not os.path.isabs(os.path.expanduser(url)):
        return os.path.join(os.path.dirname(os.path.abspath(path)), url)
    return url


def unknown(kind: str, name: str, known: list[str], where: str) -> DataError:
    """Return the error for a name that does not exist, with the nearest one that does."""
    near = nearest(name, known)
    shown = ", ".join(known[-8:]) or "none"
    return DataError(
        f"there is no {kind} `{name}`",
        where=where,
        why=f"available: {shown}",
        fix=f"did you mean `{near}`?" if near else None,
    )


_MAX_BYTES = 1 << 20


def parse_metadata(words: Sequence[str], option: str = "--metadata") -> dict[str, Any]:
    """Return the values of `key=value` arguments and of files; later ones win.

    Raises:
        UsageError: An argument is neither, or a file is unreadable or has no keys and values.
    """
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key:
            values[key] = _scalar(text)
        elif os.path.isfile(word):
            values.update(_read(word, option))
        else:
            fix = f"{option} key=value or {option} FILE.yaml"
            raise UsageError(f"`{word}` is neither `key=value` nor a file", where=option, fix=fix)
    return values


def _scalar(text: str) -> Any:
    """Convert text to the number or boolean that it spells; otherwise return the text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (int, float, bool)) else text


def _read(path: str, option: str) -> dict[str, Any]:
    import yaml

    try:
        if os.path.getsize(path) > _MAX_BYTES:
            raise UsageError("the metadata are larger than 1 MiB", where=f"{option} {path}")
        with open_plain(path, or_descriptor=True) as file:
            value = yaml.safe_load(file.read().decode())
        # Dates and the like become text, because they are stored as JSON.
        plain = json.loads(json.dumps(value, default=str))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UsageError("the metadata can't be read", where=f"{option} {path}", why=why) from error
    if not isinstance(plain, dict):
        raise UsageError("the file has no keys and values", where=f"{option} {path}")
    return plain
