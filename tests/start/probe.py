"""The doc of the script."""

import os
import sys

MODULES_AT_START = sorted(sys.modules)
ADDRESS_MARK = " at 0x"


def text(value: object) -> str:
    """Return the repr without addresses; sets in order."""
    if isinstance(value, set | frozenset):
        return repr(sorted(value))
    words = repr(value).split(ADDRESS_MARK)
    return "".join(words[:1] + [word.lstrip("0123456789abcdef") for word in words[1:]])


def main_module() -> dict:
    def value(name: str) -> object:
        loader = globals()[name]
        if name == "__loader__":
            return [type(loader).__name__, loader.name, getattr(loader, "path", None)]
        return text(loader)

    names = [name for name in globals() if name.startswith("__")]
    return {
        "__main__": [[name, value(name)] for name in names],
        "__main__ is __mp_main__": sys.modules.get("__mp_main__", sys.modules["__main__"])
        is sys.modules["__main__"],
    }


def interpreter() -> dict:
    skipped = {"modules", "path_importer_cache", "last_traceback", "stdin", "stdout", "stderr"}
    skipped |= {"__stdin__", "__stdout__", "__stderr__"}
    found = {f"sys.{n}": text(getattr(sys, n)) for n in dir(sys) if n not in skipped}
    found["hash of a string"] = hash("torch")
    found["recursion limit"] = sys.getrecursionlimit()
    found["switch interval"] = sys.getswitchinterval()
    found["trace and profile"] = [sys.gettrace(), sys.getprofile()]
    found["encodings"] = [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()]
    frame, depth = sys._getframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    found["depth of the stack"] = depth
    return found


def streams() -> dict:
    import fcntl

    found = {}
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        raw = getattr(stream.buffer, "raw", stream.buffer)
        facts = {
            "types": [type(stream).__name__, type(stream.buffer).__name__, type(raw).__name__],
            "repr": repr(stream),
            "errors": stream.errors,
            "isatty": stream.isatty(),
            "seekable": stream.seekable(),
            "line_buffering": stream.line_buffering,
            "write_through": stream.write_through,
            "closefd": raw.closefd,
            "raw": repr(raw),
            "block size": getattr(raw, "_blksize", None),
            "dunder": stream is getattr(sys, f"__{name}__"),
            "fd flags": fcntl.fcntl(fd, fcntl.F_GETFL),
            "inheritable": os.get_inheritable(fd),
        }
        found |= {f"{name}: {key}": value for key, value in facts.items()}
    return found


def status() -> dict:
    """Return what the kernel says of this process, but for its numbers, memory and switches."""
    wanted = ("Umask", "Groups", "Threads", "Sig", "Shd", "Cap", "NoNewPrivs", "Seccomp", "Cpus")
    with open("/proc/self/status") as lines:
        pairs = [line.split(":", 1) for line in lines if line.startswith(wanted)]
    return {name: value.strip() for name, value in pairs if name != "SigQ"}


def process() -> dict:
    import resource
    import signal

    fds = sorted(os.listdir("/proc/self/fd"), key=int)
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    signals = sorted(signal.valid_signals())
    return {
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "open descriptors": [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "nice": os.nice(0),
        "oom score": read("/proc/self/oom_score_adj"),
        "cgroup": read("/proc/self/cgroup"),
        "scheduler": [os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
        "signal handlers": {int(number): text(signal.getsignal(number)) for number in signals},
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup fd": signal.set_wakeup_fd(-1),
        "timers": [signal.getitimer(which) for which in (0, 1, 2)],
        "leads its session": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "command line": read("/proc/self/cmdline").split("\0")[:-1],
        "environment in /proc": "RANK=" in read("/proc/self/environ"),
        "resident kB": int(read("/proc/self/status").split("VmRSS:")[1].split()[0]),
        **{f"{name} at start": value for name, value in status().items()},
    }


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def libraries() -> dict:
    """Return the state that modules keep, once this script has imported them."""
    import atexit
    import faulthandler
    import gc
    import locale
    import logging
    import multiprocessing
    import multiprocessing.resource_tracker
    import tempfile
    import threading
    import warnings

    import torch
    import torch.distributed
    import torch.nn.parallel
    import torch.utils.data.distributed

    main = threading.main_thread()
    process = multiprocessing.current_process()
    return {
        **{f"{name} after import torch": value for name, value in status().items()},
        "modules after import torch": sorted(sys.modules),
        "warnings.filters": text(warnings.filters),
        "warnings shown once": text(warnings.onceregistry),
        "logging.root": [text(logging.root.handlers), logging.root.level, logging.root.disabled],
        "loggers": sorted(
            (name, logger.level, text([type(handler) for handler in logger.handlers]))
            for name, logger in logging.root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger)
        ),
        "logging of sys.stderr": logging.lastResort.stream is sys.stderr,
        "threads": [text(thread.__class__) + thread.name for thread in threading.enumerate()],
        "main thread": [
            main is threading.current_thread(),
            main.ident == threading.get_ident(),
            main.native_id == os.getpid(),
        ],
        "tempfile.tempdir": tempfile.tempdir,
        "multiprocessing": [
            multiprocessing.get_start_method(allow_none=True),
            multiprocessing.parent_process(),
            process.name,
            process.pid == os.getpid(),
            next(multiprocessing.process._process_counter),
            multiprocessing.process.ORIGINAL_DIR,
            multiprocessing.resource_tracker._resource_tracker._pid,
        ],
        "atexit callbacks": atexit._ncallbacks(),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "frozen objects": gc.get_freeze_count(),
        "faulthandler": faulthandler.is_enabled(),
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding()],
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch parallel": torch.__config__.parallel_info(),
        "thread pools": thread_pools(),
        "sys.path in the end": sys.path,
    }


def thread_pools() -> list:
    try:
        import threadpoolctl
    except ImportError:
        return []
    return sorted(threadpoolctl.threadpool_info(), key=lambda pool: pool["filepath"])


def torchmuster() -> dict:
    try:
        import torchmuster
    except ImportError as error:
        return {"import torchmuster": str(error)}
    return {"import torchmuster": [torchmuster.__file__, torchmuster.__name__]}


if __name__ == "__main__":
    facts = {"modules at start": MODULES_AT_START}
    for part in (main_module, interpreter, streams, process, libraries, torchmuster):
        facts |= part()
    import json

    print(json.dumps(facts))
