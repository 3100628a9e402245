"""The store of one attempt: torch's TCPStore in a process of its own.

It has a process of its own because its server thread makes forking unsafe (a fork beside it hung one
worker of eight in a lock), and because a new attempt must never see the keys of the last.
"""

import importlib
import signal


def serve(listen_fd: int, host: str, port: int) -> None:
    """Serve keys on a listening socket until killed."""
    # By name: only `train` imports torch (`docs/design.md`, section 2).
    distributed = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd
    )
    while store is not None:
        signal.pause()
