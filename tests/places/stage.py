"""Starts tasks in views of their own, as whatever user it runs as; one line of JSON tells of them.

    python stage.py '{"base": FOLDER, "tasks": [{"name", "files", "command", ...}], "network": false}'

With `"hold": true` it prints the pids as soon as the tasks run and waits: tests kill it then.
"""

import json
import os
import subprocess
import sys

from torchmuster.workflow.sandbox import place
from torchmuster.workflow.sandbox.network import PrivateNetwork

LIMIT_S = 180.0


def start(task, base, network):
    folder = os.path.join(base, task["name"])
    os.mkdir(folder, 0o700)
    mine = network.tasks[task["name"]] if network else None
    files = [
        place.PlacedFile(path=path, content=text.encode(), mode=0o755)
        for path, text in task.get("files", {}).items()
    ]
    if network:
        hosts = network.hosts_file(task["name"])
        files.append(place.PlacedFile(path="/etc/hosts", content=hosts))
    plan = place.plan_view(
        files,
        folder,
        working_dir=task.get("working_dir", "/"),
        shared=[base],
        **task.get("options", {}),
    )
    reports, report_fd = os.pipe()
    spec = place.write_view(
        plan,
        join=mine.join if mine else None,
        environment=mine.environment if mine else None,
        report_fd=report_fd,
    )
    child = subprocess.Popen(
        place.view_argv(spec, task["command"]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[report_fd],
    )
    os.close(report_fd)
    with os.fdopen(reports) as file:
        said = file.read()
    return plan, child, said


def result(task, plan, child, said):
    out, err = child.communicate(timeout=LIMIT_S)
    return {
        "code": child.returncode,
        "out": out.decode(),
        "err": err.decode(),
        "pid": child.pid,
        "report": json.loads(said) if said else None,
        "notes": list(plan.notes),
        "host_paths": {path: plan.host_path(path) for path in task.get("ask", [])},
    }


def main():
    wanted = json.loads(sys.argv[1])
    names = [task["name"] for task in wanted["tasks"]]
    program = wanted.get("program")
    network = None
    if wanted.get("network"):
        network = PrivateNetwork.open(names, find_program=lambda: program)
    started = [(task, *start(task, wanted["base"], network)) for task in wanted["tasks"]]
    if wanted.get("hold"):
        holder = network.holder_pid if network else None
        print(json.dumps({"holder": holder, "pids": [one[2].pid for one in started]}), flush=True)
        sys.stdin.read()
    results = {one[0]["name"]: result(*one) for one in started}
    if network:
        network.close()
    note = network.note if network else None
    print(json.dumps({"uid": os.getuid(), "gid": os.getgid(), "tasks": results, "note": note}))


if __name__ == "__main__":
    main()
