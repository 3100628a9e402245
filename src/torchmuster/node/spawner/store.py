"""The store of one attempt: torch's TCPStore in a process of its own.

It has a process of its own because its server thread makes forking unsafe (a fork beside it hung one
worker of eight in a lock), and because a new attempt must never see the keys of the last.
"""

import importlib
import signal


def serve(listen_fd: int, host: str, port: int) -> None:
    """Serve keys on a listening socket until killed."""
    # By name: only `train` imports torch (`docs/design.md`, section 2).
    torch, distributed = map(importlib.import_module, ("torch", "torch.distributed"))
    # Before torch 2.8 libuv's store, the default, takes no socket that listens (NotImplementedError).
    # Source: pytorch pull request 150215, TCPStoreLibUvBackend.cpp; seen with 2.6.0, 2.7.1, 2.8.0.
    older = {"use_libuv": False} if torch.__version__ < (2, 8) else {}
    store = distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd, **older
    )
    while store is not None:
        signal.pause()
