"""The probe of `muster engines check`: runs in two pods, which report and reach each other.

    python probe.py FOLDER ...

Prints one line of JSON. Standard library only, without torchmuster: the image may have any Python.
"""

import contextlib
import importlib
import json
import os
import platform
import socket
import sys
import threading
import time

PORT = 29421
LIMIT_S = 30.0
STAY_S = 60.0  # for the other pod, which may only now import torch and call later


def look(folders: "list[str]") -> "dict[str, object]":
    """Return the findings about this pod, as plain values."""
    found: dict[str, object] = {
        "host": platform.node(),
        "node": os.environ.get("MUSTER_POD_NODE", ""),
        "processor": platform.machine(),
        "python": sys.executable,
        "python_version": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "folders": {folder: try_folder(folder) for folder in folders},
    }
    try:
        torch = importlib.import_module("torch")
        found["torch"], found["gpus"] = torch.__version__, torch.cuda.device_count()
    except Exception as error:  # noqa: BLE001 - a broken library may raise anything
        found["torch_error"] = type(error).__name__ + ": " + str(error)[:300]
    return found


def try_folder(folder: str) -> "dict[str, object]":
    """Say whether a volume exists and is writable."""
    path = os.path.join(folder, f".muster-check-{platform.node()}")
    try:
        with open(path, "w") as file:
            file.write("x")
        os.unlink(path)
    except OSError as error:
        return {"ok": os.path.isdir(folder), "words": f"can't be written: {error.strerror}"}
    return {"ok": True, "words": "can be written"}


def serve(is_called: threading.Event) -> socket.socket:
    """Answer callers for as long as this process lives; set the event on the first call."""
    listening = socket.create_server(("", PORT), family=socket.AF_INET)

    def work() -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                caller, _ = listening.accept()
                with caller, contextlib.suppress(OSError):
                    caller.sendall(b"muster")
                is_called.set()

    threading.Thread(target=work, daemon=True).start()
    return listening


def reach(host: str) -> "dict[str, object]":
    """Say whether another pod's name resolves and the pod answers."""
    begun, words = time.monotonic(), ""
    while time.monotonic() - begun < LIMIT_S:
        try:
            address = socket.gethostbyname(host)
        except OSError:
            words = f"DNS does not know {host} after {LIMIT_S:.0f} s"
            threading.Event().wait(0.5)
            continue
        try:
            with socket.create_connection((address, PORT), 5.0) as other:
                if other.recv(16) == b"muster":
                    took_s = time.monotonic() - begun
                    return {"ok": True, "words": f"{address}, after {took_s:.1f} s"}
                words = f"something else answers at {address}"
        except OSError as error:
            words = f"{address} port {PORT}: {error.strerror or error}; is there a NetworkPolicy?"
            threading.Event().wait(0.5)
    return {"ok": False, "words": words}


def main(folders: "list[str]") -> None:
    """Print the findings."""
    name, _, own = platform.node().rpartition("-")
    others = [f"{name}-{index}.{name}" for index in range(2) if str(index) != own]
    is_called = threading.Event()
    with serve(is_called):
        found = look(folders)
        found["reached"] = {host: reach(host) for host in others}
        print(json.dumps(found), flush=True)
        is_called.wait(STAY_S)


if __name__ == "__main__":
    main(sys.argv[1:])
