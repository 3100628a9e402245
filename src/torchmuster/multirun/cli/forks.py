"""Fork the clients of runs in a session from a process that has their imports.

So no client starts an interpreter. `muster dev` forks one for each save, and the process behind
`torchmuster.session` one for each call. Both have one thread.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import NoReturn

from torchmuster.core import proc
from torchmuster.core.plainfile import write_all
from torchmuster.errors import ManyErrors, MusterError

MAX_ORDER_BYTES = 8 << 20
PID = struct.Struct("!i")
# The modules that the client of a run in a session imports.
_CLIENT_MODULES = (
    "asyncio",
    "torchmuster.core.cli.find",
    "torchmuster.multirun.cli.held",
    "torchmuster.core.cli.run",
    "torchmuster.multirun.cli.session",
    "torchmuster.core.cli.ending",
    "torchmuster.core.node.kernel",
    "torchmuster.launcher.spec.site_files",
    "torchmuster.launcher.cli.follow",
    "torchmuster.launcher.cli.places",
    "torchmuster.launcher.cli.sites",
    "torchmuster.multirun.engine",
    "torchmuster.core.files.terminal",
    "torchmuster.launcher.model.carried",
    "torchmuster.core.owner.create",
    "torchmuster.launcher.owner.origin",
    "torchmuster.core.owner.parts",
    "torchmuster.core.owner.supervise",
    "torchmuster.launcher.views.account",
    "torchmuster.launcher.views.control",
    "torchmuster.launcher.views.execute",
    "torchmuster.multirun.views.sessions",
    "torchmuster.report.at_end",
    "torchmuster.core.spec.launch",
    "torchmuster.core.cli.messages",
)


def import_for_runs() -> None:
    """Import what the client of a run needs."""
    for name in _CLIENT_MODULES:
        importlib.import_module(name)


def run_client(run: Callable[[], int], stdin: int | None = None) -> NoReturn:
    """Run the client of one run in a fork, then exit the process.

    Args:
        run: Runs the client and returns its exit code.
        stdin: The descriptor for its stdin; None for /dev/null.
    """
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin, 0)
        code = run()
    except (MusterError, ManyErrors) as error:
        from torchmuster.core.cli.messages import print_errors

        errors = error.errors if isinstance(error, ManyErrors) else [error]
        print_errors(errors)
        code = errors[0].exit_code
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - the fork must not continue as its parent
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def serve(line: socket.socket) -> int:
    """Fork a client for each order on a socket, until its other end is closed.

    The clients continue after that. An order is a memory file with the command line, the folder and
    the variables; stdout and stderr come with it. The answer is the client's pid.
    """
    import_for_runs()
    # The caller reads the result from the run directory.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is meant for the caller
    while True:
        packet, fds, _, _ = socket.recv_fds(line, 16, 3)
        if not packet:
            return 0
        pid = os.fork()
        if pid == 0:
            _serve_order(line, fds)
        for fd in fds:
            os.close(fd)
        line.send(PID.pack(pid))


def _serve_order(line: socket.socket, fds: list[int]) -> NoReturn:
    def run() -> int:
        proc.detach_from_parent()
        line.close()
        order, out, err = fds
        order_fields = json.loads(os.pread(order, MAX_ORDER_BYTES, 0))
        for target, fd in ((1, out), (2, err)):
            os.dup2(fd, target)
        for fd in fds:
            os.close(fd)
        os.environ.clear()
        os.environ.update(order_fields["environment"])
        os.chdir(order_fields["folder"])
        from torchmuster.core.cli.main import main

        main(order_fields["words"])

    run_client(run)


def pack_order(words: list[str]) -> int:
    """Return the descriptor of a memory file with an order from this process."""
    order_fields = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    fd = os.memfd_create("muster-client", os.MFD_CLOEXEC)
    write_all(fd, json.dumps(order_fields).encode())
    return fd
