"""`muster run --on toybox`: a place is a subclass of `Place`, here of the one of this machine."""

from dataclasses import replace

from torchmuster.core.cli.find import Where
from torchmuster.core.cli.here import Here
from torchmuster.core.cli.place import warn
from torchmuster.core.spec.launch import RunRequest
from torchmuster.core.spec.problems import Problems


class Toybox(Here):
    """This machine as two nodes, with a word about it."""

    kind = "toybox"

    def fill(self, request: RunRequest) -> RunRequest:
        """Take two nodes where none are named."""
        warn(["everything goes into the toybox"])
        return replace(request, nodes=request.nodes or "2")


def find_toybox(where: Where, problems: Problems) -> Toybox:
    """Return the place; `where` is what the command line says of it, and `problems` takes what is wrong with that."""
    if where.hosts:
        problems.add("a toybox has no hosts", "--hosts")
    return Toybox()
