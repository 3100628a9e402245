"""Which place a command means: each room that has places is asked, and what none takes is on this machine."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What a command line says of the place.

    Attributes:
        by_slots: Hosts have as many workers as their list says, where the command line says none.
        is_one_of_many: srun may have started the command on each node, as torchrun.
    """

    engine: str | None = None
    hosts: str | None = None
    hostfile: str | None = None
    here: bool = False
    session: str | None = None
    by_slots: bool = False
    is_one_of_many: bool = False


def where_of(request: "RunRequest") -> Where:
    """Return what the request of a run says of its place."""
    return Where(
        engine=request.engine,
        hosts=request.hosts,
        hostfile=request.hostfile,
        here=request.here,
        session=request.session,
        by_slots=request.nproc_per_node is None,
    )


def where_of_words(given: Mapping[str, Any]) -> Where:
    """Return what the words of a command line say of the place."""
    names = ("engine", "hosts", "hostfile", "here")
    return Where(session=given.get("session"), **{name: given[name] for name in names})


def find_place(where: Where, problems: "Problems") -> Place:
    """Return the place that is meant; an engine that takes no jobs, or is none, is noted.

    Raises:
        UsageError: Hosts are named for another kind of engine, or nobody names any; this is a login node.
        NotFoundError: There is no such session.
    """
    for find in plugs.every("places"):
        if (place := find(where, problems)) is not None:
            found: Place = place
            return found
    if where.engine not in (None, "local") or where.hosts or where.hostfile or where.session:
        raise UsageError("no part of muster that is installed here has this place")
    return Here()
