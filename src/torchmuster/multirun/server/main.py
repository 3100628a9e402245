"""The server of a node that a session holds: the job's interpreter with torch imported, one thread.

    python main.py SESSION_DIR [--handed FD]

It is the only worker on its node in the run that is the session. A run's owner calls its Unix
socket and asks for an agent. The server forks the agent, which forks its own spawner at once; both
have their imports already. Otherwise the run is like any other, with the server as the parent that
waits for it. If something imported has changed since, the server becomes a new interpreter in the
same process (`--handed`), keeps its socket and callers, and imports again.

Old interpreters must be able to parse this file, so that it can refuse them in one sentence.
"""

import os
import sys
import time

_at_start = frozenset(sys.modules)
_begun_ns = time.time_ns()

if sys.version_info < (3, 11):  # noqa: UP036 - the job's interpreter may be any
    sys.exit("the job's interpreter is Python %d.%d; muster needs 3.11" % sys.version_info[:2])  # noqa: UP031

_here = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0]) == _here:
    del sys.path[0]  # the interpreter put this folder in front
_package = os.path.dirname(os.path.dirname(_here))
_root = os.path.dirname(_package)
sys.path.insert(0, _root)

from torchmuster.core.node.spawner import mainmodule, serve  # noqa: E402 - after the path
from torchmuster.multirun.server import keeper  # noqa: E402

sys.path.remove(_root)

if __name__ == "__main__":
    # Returns in every forked spawner, and in the server at its end.
    _control = keeper.keep(sys.argv[1:], os.path.abspath(__file__), _begun_ns, _root)
    if _control is not None:
        _entry = os.path.join(_package, "core", "node", "spawner", "entry.py")
        _task = serve.serve(_control, _entry, _at_start)
        if _task is None:
            os._exit(0)  # a spawner at its end: tearing down torch would keep its agent waiting
        mainmodule.run(_task, _at_start)
