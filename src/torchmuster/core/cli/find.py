"""Find the place for runs that a command means: ask each room in turn; default: this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchmuster.core import plugs
from torchmuster.core.cli.here import Here
from torchmuster.core.cli.place import Place
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.core.spec.launch import RunRequest
    from torchmuster.core.spec.problems import Problems


_OPTIONS = ("engine", "hosts", "hostfile", "here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What a command line says about the place for runs.

    Attributes:
        by_slots: Hosts run as many workers as their list says, as the command line gives no number.
        is_one_of_many: srun may have started the command on every node, as it does torchrun.
    """

    engine: str | None = None
    hosts: str | None = None
    hostfile: str | None = None
    here: bool = False
    session: str | None = None
    by_slots: bool = False
    is_one_of_many: bool = False


def where_of(request: "RunRequest") -> Where:
    """Return what a run request says about its place for runs."""
    given = {name: getattr(request, name) for name in ("session", *_OPTIONS)}
    return Where(by_slots=request.nproc_per_node is None, **given)


def where_of_options(given: Mapping[str, Any]) -> Where:
    """Return what the options of a command line say about the place for runs."""
    return Where(session=given.get("session"), **{name: given[name] for name in _OPTIONS})


def find_place(where: Where, problems: "Problems") -> Place:
    """Return the requested place for runs; note an engine that is unknown or accepts no jobs.

    Raises:
        UsageError: Hosts are given for another kind of engine, or no engine is given on a login
            node.
        NotFoundError: There is no such session.
    """
    for find in plugs.every("places"):
        place: Place | None = find(where, problems)
        if place is not None:
            return place
    if where.engine not in (None, "local") or where.hosts or where.hostfile or where.session:
        raise UsageError("no part of muster that is installed here has this place")
    return Here()
