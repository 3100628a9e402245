"""The first program of a pod: unpacks torchmuster from Secrets to the pod's disk and starts it.

The image's interpreter, of whatever version, runs this file alone. So it imports only the standard
library, and it reports itself what an image lacks: in the exit code and in the message that
Kubernetes keeps.
"""

import json
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
OWN_DISK = os.environ.get("MUSTER_POD_DISK", "/scratch")
MESSAGE = "/dev/termination-log"
FINAL = 113  # the Job makes no replacement after this exit code
PIECE = ".part-"  # precedes the number of a piece of a file that is larger than a Secret


def give_up(what: str, because: str, hint: str) -> None:
    """Exit with an error where people and clients look for it."""
    text = f"error: {what}\nat: {os.uname()[1]}\nbecause: {because}\nhint: {hint}\n"
    sys.stderr.write(text)
    try:
        with open(MESSAGE, "r+") as file:  # created by Kubernetes
            file.write(json.dumps({"error": what, "because": because, "hint": hint}))
    except OSError:
        pass
    sys.exit(FINAL)


def writable_home() -> None:
    """Set HOME and TMPDIR to writable folders: a random uid has none, the root may be read-only."""
    home = os.environ.get("HOME", "")
    if home in ("", "/") or not os.access(home, os.W_OK):
        os.environ["HOME"] = OWN_DISK
    if not os.access("/tmp", os.W_OK):
        folder = os.path.join(OWN_DISK, "tmp")
        os.makedirs(folder, exist_ok=True)
        os.environ["TMPDIR"] = folder


def gather() -> str:
    """Return a folder on the pod's disk with links to all files; join those that are in pieces."""
    folder = os.path.join(OWN_DISK, "torchmuster", "came")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    parts: dict[str, list[str]] = {}
    for name in sorted(os.listdir(FOLDER)):
        if not name.startswith("."):  # the kubelet's folders for atomic updates
            parts.setdefault(name.partition(PIECE)[0], []).append(os.path.join(FOLDER, name))
    for name, paths in parts.items():
        target = os.path.join(folder, name)
        part = f"{target}.{os.getpid()}"
        if len(paths) == 1:
            os.symlink(paths[0], part)
        else:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as whole:
                for path in paths:
                    with open(path, "rb") as piece:
                        whole.write(piece.read())
        os.rename(part, target)
    return folder


def unpack(folder: str) -> str:
    """Unpack the package to the pod's disk; return its folder."""
    import hashlib
    import tarfile

    archive = os.path.join(folder, "package.txz")
    with open(archive, "rb") as file:
        sha = hashlib.sha256(file.read()).hexdigest()
    root = os.path.join(OWN_DISK, "torchmuster", sha[:32])
    if not os.path.isdir(root):
        part = f"{root}.{os.getpid()}"
        os.makedirs(part)
        with tarfile.open(archive) as packed:
            packed.extractall(part)
        os.rename(part, root)
    return root


def own_key() -> str:
    """Return a copy of the key that only we can read: a Secret's file may be group-readable."""
    path = os.path.join(OWN_DISK, "torchmuster", "key")
    with open(os.path.join(FOLDER, "key")) as file:
        text = file.read()
    part = f"{path}.{os.getpid()}"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.rename(part, path)
    return path


def warm(program: "list[str]", order: str) -> None:
    """Start importing torch in the background; it dominates start-up, and the run needs it."""
    folder = os.path.join(OWN_DISK, "torchmuster", f"warm-{os.getpid()}")
    words = [*program, "pod-warm", f"--order={order}", f"--folder={folder}"]
    pid = os.posix_spawn(sys.executable, words, os.environ)
    os.environ["MUSTER_WARM"] = f"{pid} {folder}"


def main() -> None:
    """Become the pod server."""
    if sys.version_info < (3, 11):  # noqa: UP036  # it is the image that decides
        give_up(
            "the image's Python is too old for muster",
            f"{sys.executable} is {sys.version.split()[0]}",
            "take an image with Python 3.11 or later, or set `python` of the site to another interpreter of it",
        )
    if not os.access(OWN_DISK, os.W_OK):
        give_up(
            "the pod can't write to its own disk",
            f"{OWN_DISK} belongs to another user than {os.getuid()}",
            "`run_as` of the site sets the user",
        )
    try:
        writable_home()
        came = gather()
        root, key = unpack(came), own_key()
    except (OSError, ImportError) as error:
        give_up(
            "torchmuster can't be put on the pod's disk",
            str(error),
            f"room on {OWN_DISK}, and an interpreter with lzma, are needed",
        )
    order = os.path.join(came, "order.json")
    program = [
        sys.executable,
        "-I",
        "-S",
        os.path.join(root, "torchmuster", "core", "programs", "__main__.py"),
    ]
    try:
        warm(program, order)
        os.execv(sys.executable, [*program, "pod", f"--key={key}", f"--order={order}"])
    except OSError as error:
        give_up(
            "the image's Python can't be started again",
            f"{sys.executable}: {error.strerror}, for user {os.getuid()}",
            "`run_as` of the site sets the user, `python` another interpreter of the image",
        )


if __name__ == "__main__":
    main()
