"""A container engine for tests: it records its command lines and runs the command without a container.

The file is copied as `podman` or `docker`. Of an image it knows only the names `missing` (no such image) and
`nodaemon`. Like a daemon's, its containers outlive a client that is killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
MADE = os.path.join(HERE, "made")

FAILURES = {
    "missing": "Trying to pull missing...\nError: initializing source docker://missing: denied",
    "nodaemon": "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?",
}


def run(argv):
    options, names = {}, []
    while argv[0].startswith("-"):
        key, _, value = argv.pop(0).partition("=")
        names += [value] if key == "--env" else []
        options[key] = value
    if argv[0] in FAILURES:
        print(FAILURES[argv[0]], file=sys.stderr)
        return 125
    inside = {}
    if "--env-file" in options:
        with open(options["--env-file"]) as file:
            inside |= dict(line.split("=", 1) for line in file.read().split("\n")[:-1])
    inside |= {name: os.environ[name] for name in names}
    command = [options["--entrypoint"], *argv[1:]]
    child = subprocess.Popen(command, env=inside, cwd=options["--workdir"], start_new_session=True)
    os.makedirs(MADE, exist_ok=True)
    note = os.path.join(MADE, options["--name"])
    with open(note, "w") as file:
        file.write(str(child.pid))
    with open(options["--cidfile"], "w") as file:
        file.write("c0ffee")
    signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
    status = child.wait()
    if os.path.exists(note):
        os.unlink(note)
    return 128 - status if status < 0 else status


def remove(names):
    for name in names:
        note = os.path.join(MADE, name)
        if not name.startswith("-") and os.path.exists(note):
            with open(note) as file:
                pid = int(file.read())
            os.unlink(note)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return 0


def main(argv):
    with open(os.path.join(HERE, "calls"), "a") as log:
        log.write(json.dumps(argv) + "\n")
    if argv[0] == "run":
        return run(argv[1:])
    if argv[0] == "rm":
        return remove(argv[1:])
    if argv[0] == "ps" and os.path.isdir(MADE):
        print("\n".join(os.listdir(MADE)))
    if argv[0] == "inspect":
        with open(os.path.join(MADE, argv[-1])) as file:
            print(file.read())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
