"""What a listing of the store says about datasets, without reading a manifest."""

import re
from dataclasses import dataclass, field

from torchmuster.data.store import Store

_VERSION = re.compile(r"sets/(.+)/versions/(\d{1,12})\.json")
_DELETED = re.compile(r"sets/(.+)/versions/(\d{1,12})\.deleted")
_TAG = re.compile(r"sets/(.+)/tags/([A-Za-z0-9_-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A dataset in the list: its versions, the oldest first, and when the newest was written."""

    name: str
    versions: tuple[int, ...]
    tags: tuple[str, ...]
    modified_s: float


@dataclass(slots=True)
class Found:
    """The versions that a dataset has, with their times; the highest that it ever had; its tags."""

    versions: dict[int, float] = field(default_factory=dict)
    highest: int = 0
    tags: list[str] = field(default_factory=list)


def version_name(name: str, number: int) -> str:
    """Return where a version's manifest lies."""
    return f"sets/{name}/versions/{number}.json"


def scan(store: Store, below: str) -> dict[str, Found]:
    """Return the datasets below a folder of the store, by name."""
    by_name: dict[str, Found] = {}
    for entry in store.entries(below):
        if match := _VERSION.fullmatch(entry.name):
            found = by_name.setdefault(match[1], Found())
            # A version that is being deleted has both files for a moment.
            found.versions[int(match[2])] = entry.modified_s
            found.highest = max(found.highest, int(match[2]))
        elif match := _DELETED.fullmatch(entry.name):
            found = by_name.setdefault(match[1], Found())
            found.highest = max(found.highest, int(match[2]))
        elif match := _TAG.fullmatch(entry.name):
            by_name.setdefault(match[1], Found()).tags.append(match[2])
    return by_name
