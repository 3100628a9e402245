"""Where the job's interpreter begins: the spawner, a fresh worker, or a fresh store.

Run by its path, so that the job's environment needs no torchmuster. Its command line ends in the
user's script and arguments: forked workers keep it, so `ps`, `py-spy` and `nvidia-smi` show them.

    python entry.py spawner FD -- SCRIPT ARGS      serve the agent at the other end of socket FD
    python entry.py spawner PATH -- SCRIPT ARGS    the same, where a wrapper closes what it inherits
    python entry.py worker -- SCRIPT ARGS          a fresh worker; its task is in the environment
    python entry.py store FD HOST PORT             the store of one attempt, on the listening FD

This file must be readable by old interpreters, to refuse them in one sentence.
"""

import os
import sys

_at_start = frozenset(sys.modules)  # what every interpreter has: a script's own files don't hide it


def _control_fd():  # type: ignore[no-untyped-def]
    """Return the socket to the agent: inherited, or called by its path."""
    if sys.argv[2].isdigit():
        return int(sys.argv[2])
    import socket

    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(sys.argv[2])
    return control.detach()


def _refuse_old_interpreter():  # type: ignore[no-untyped-def]
    version = "%d.%d" % sys.version_info[:2]  # noqa: UP031 - read by old interpreters
    sentence = "the job's interpreter is Python " + version + "; muster needs 3.11 or newer"
    if sys.argv[1] == "spawner":
        os.write(_control_fd(), ('{"type": "InterpreterRefused", "why": "%s"}' % sentence).encode())  # type: ignore[no-untyped-call]  # noqa: UP031
    sys.exit(sentence)


if sys.version_info < (3, 11):  # noqa: UP036 - the job's interpreter may be any
    _refuse_old_interpreter()

_here = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0]) == _here:
    del sys.path[0]  # the interpreter put this folder in front; the script must not see it
_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(_here))))
sys.path.insert(0, _root)

from torchmuster.core.node.spawner import mainmodule, serve  # noqa: E402 - after the path

sys.path.remove(_root)

if __name__ == "__main__":
    if sys.argv[1] == "store":
        serve.serve_store(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1] == "worker":
        mainmodule.run(mainmodule.task_from_environment(), _at_start)
    else:
        # Returns in every forked worker, with its task, and in the spawner only at its end.
        _task = serve.serve(_control_fd(), os.path.abspath(__file__), _at_start)  # type: ignore[no-untyped-call]
        if _task is None:
            # A spawner at its end: what was imported for workers has nothing to say here.
            os._exit(0)
        mainmodule.run(_task, _at_start)
