"""The first program on a host reached by ssh: it gets torchmuster there, and becomes the remote end (`launcher/node/remote/main.py`).

It arrives as text on standard input, before anything else is there: so it imports the standard library only, and has its own
few lines of what `launcher/net/remote_messages.py` and `launcher/files/code_copy.py` say. It sends `RemoteFacts`; where the package is missing it
reads it from one frame. Nothing is buffered: what follows belongs to the remote end.
"""

import hashlib
import io
import json
import os
import shutil
import signal
import stat
import struct
import sys
import tempfile
import zipfile

MAX_BYTES = 64 << 20
# `travels` of each room says why.
TRAVELS = (
    *("core/cli/spelling.py", "core/engines", "core/files", "core/head", "core/model"),
    *("core/net", "core/node", "core/owner", "core/plainfile.py", "core/plugs.py"),
    *("core/proc.py", "core/programs", "core/spec", "diagnose/doctor", "diagnose/explain"),
    *("diagnose/finding.py", "diagnose/preflight.py", "kubernetes/elsewhere.py"),
    *("kubernetes/engine", "kubernetes/firstpod", "kubernetes/node", "kubernetes/pods"),
    *("launcher/api", "launcher/engines", "launcher/facts", "launcher/files", "launcher/head"),
    *("launcher/jobs", "launcher/model", "launcher/net", "launcher/node", "launcher/notify"),
    *("launcher/owner", "launcher/programs", "launcher/spec/scalars.py"),
    *("launcher/spec/site.py", "launcher/spec/site_files.py"),
    *("launcher/ui/ranks.py", "launcher/ui/run_lines.py", "launcher/ui/table.py"),
    *("launcher/views", "multirun/api", "multirun/background.py", "multirun/engine.py"),
    *("multirun/held.py", "multirun/server", "multirun/sweep", "multirun/views", "train"),
    *("workflow/data", "workflow/head", "workflow/jobs.py", "workflow/owner"),
    *(
        "workflow/plan.py",
        "workflow/record.py",
        "workflow/sandbox",
        "workflow/task",
        "workflow/task_call.py",
    ),
    "workflow/tokens.py",
)
PATIENCE_S = 120


def read_exactly(count: int) -> bytes:
    """Return so many bytes of standard input; leave at its end."""
    data = bytearray()
    while len(data) < count:
        piece = os.read(0, min(count - len(data), 1 << 16))
        if not piece:
            raise SystemExit(0)
        data += piece
    return bytes(data)


def send(name: str, **fields: object) -> None:
    """Send a message."""
    payload = json.dumps({"type": name, **fields}).encode()
    view = memoryview(struct.pack(">I", len(payload)) + payload)
    while view:
        view = view[os.write(1, view) :]


def content_hash(files: list[tuple[str, bytes]]) -> str:
    """Return the hash of (relative name, bytes) pairs: names, lengths and contents."""
    whole = hashlib.sha256()
    for name, data in sorted(files):
        whole.update(f"{name}\0{len(data)}\0".encode())
        whole.update(data)
    return whole.hexdigest()


def tree_files(package: str) -> list[tuple[str, bytes]]:
    """Return the files of a package's folder that travel, as (relative name, bytes)."""
    found = []
    for folder, names, files in os.walk(package):
        names[:] = [name for name in names if name != "__pycache__"]
        for name in files:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, package)
            is_shared = "/" not in relative or name in ("__init__.py", "plug.py")
            is_needed = is_shared or any(
                relative == one or relative.startswith(one + "/") for one in TRAVELS
            )
            if is_needed and not name.endswith((".pyc", ".pyo")):
                with open(path, "rb") as file:
                    found.append((relative, file.read()))
    return found


def has_content(root: str, sha: str) -> bool:
    """Say whether root/torchmuster is this content, and nobody else's to change."""
    package = os.path.join(root, "torchmuster")
    try:
        status = os.stat(package)
        if status.st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
            return False
        return content_hash(tree_files(package)) == sha
    except OSError:
        return False


def num_gpus() -> int:
    """Return the number of GPUs that a process here may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() not in ("", "-1")])
    names = os.listdir("/dev")
    return len([name for name in names if name.startswith("nvidia") and name[6:].isdigit()])


def cache_folder() -> str:
    """Return where packages are kept on this host."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "torchmuster")


def receive_package(sha: str) -> list[tuple[str, bytes]]:
    """Return the files of the package that comes as one frame, once its checksum is right."""
    (length,) = struct.unpack(">I", read_exactly(4))
    if length > MAX_BYTES:
        raise SystemExit("the package is too large")
    with zipfile.ZipFile(io.BytesIO(read_exactly(length))) as archive:
        files = [(name, archive.read(name)) for name in archive.namelist()]
    if content_hash(files) != sha or any(n.startswith("/") or ".." in n for n, _ in files):
        send("RemoteFailed", what="torchmuster came damaged: its checksum is another")
        raise SystemExit(1)
    return files


def unpack(files: list[tuple[str, bytes]], sha: str) -> tuple[str, bool]:
    """Write the package into the cache, else into a temporary folder; return the root and whether it is temporary."""
    for base in (cache_folder(), None):
        try:
            if base is not None:
                os.makedirs(base, mode=0o700, exist_ok=True)
            root = tempfile.mkdtemp(prefix=f".{sha[:12]}-" if base else "torchmuster-", dir=base)
            for name, data in files:
                path = os.path.join(root, "torchmuster", name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(data)
            if base is None:
                return root, True
            final = os.path.join(base, sha)
            try:
                os.rename(root, final)
            except OSError:  # another session was faster, or what lies there is damaged
                if not has_content(final, sha):
                    return root, True
                shutil.rmtree(root, ignore_errors=True)
            return final, False
        except OSError as error:
            reason = error
    send("RemoteFailed", what="there is not enough space for torchmuster", why=str(reason))
    raise SystemExit(1)


def main(sha: str, package_root: str) -> None:
    """Say what this host is, get torchmuster, and become the remote end."""
    signal.alarm(PATIENCE_S)  # a client that is cut off now would leave us waiting for ever
    cached = os.path.join(cache_folder(), sha)
    root = next((r for r in (package_root, cached) if r and has_content(r, sha)), None)
    send(
        "RemoteFacts",
        has_package=root is not None,
        num_cpus=len(os.sched_getaffinity(0)),
        num_gpus=num_gpus(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    temporary = False
    if root is None:
        root, temporary = unpack(receive_package(sha), sha)
    entry = os.path.join(root, "torchmuster", "core", "programs", "__main__.py")
    signal.alarm(0)
    # A folder of installed packages holds others too, which the job's interpreter must not see.
    alone = os.path.basename(root) not in ("site-packages", "dist-packages")
    flags = ["--temporary"] * temporary + ["--importable"] * alone
    argv = [sys.executable, "-I", "-S", entry, "remote", f"--root={root}", *flags]
    os.execv(sys.executable, argv)
