"""How long `--ship-env` takes to one host, to eight, and again, over links of 200 Mbit/s.

    python benchmarks/ship_env.py [--hosts 8] [--megabytes 1000] [--files 20000] [--repeats 1] [--rate 200mbit] [--json FILE] [--limit SECONDS]

Hosts are namespaces of this machine with an sshd each (tests/lab), and share its processors: what eight hosts unpack at the same time
is unpacked here by two cores. As root on Linux.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from running.results import FOLDER, headline, machine_facts, save
from running.stage import REPOSITORY, Stage, stage

SOURCE = REPOSITORY / "src"
SCRIPT = "import os, sys; print('rank', os.environ['RANK'], 'in', sys.prefix)\n"


def make_environment(folder: Path, megabytes: int, num_files: int) -> Path:
    """Return a virtual environment with so many files that can't be compressed."""
    prefix = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    (site,) = prefix.glob("lib/python3*/site-packages")
    size = megabytes * 1_000_000 // num_files
    for number in range(num_files):
        below = site / f"package{number // 500}"
        below.mkdir(exist_ok=True)
        (below / f"data{number}.bin").write_bytes(os.urandom(size))
    return prefix


class Client:
    """The user's side of a lab."""

    def __init__(self, lab: Any, home: Path, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._lab, self._prefix = lab, lab.home / "venv"
        self._code = lab.home / "code"
        (home / "code").mkdir()
        (home / "code" / "train.py").write_text(SCRIPT)

    def run(self, hosts: list[str], *, ship: bool = True) -> dict[str, float]:
        """Run on hosts; return the seconds of the whole command, and those of the environment's way."""
        # An interpreter of the hosts without torch, as that of the environment.
        words = [f"--ship-env={self._prefix}"] if ship else ["--python", f"{sys.executable} -S"]
        argv = [sys.executable, "-m", "torchmuster", "run", "--on", "ssh", "--hosts"]
        env = {
            "PYTHONPATH": str(SOURCE),
            "MUSTER_HOME": str(self._lab.home / "muster"),
            "MUSTER_SSH": " ".join(self._lab.ssh),
        }
        began_s = time.monotonic()
        done = self._lab.run(
            self._lab.controller,
            [*argv, ",".join(hosts), *words, "train.py"],
            env=env,
            cwd=self._code,
            limit_s=1800.0,
        )
        took_s = time.monotonic() - began_s
        if done.returncode:
            raise SystemExit(f"muster failed:\n{done.stdout}\n{done.stderr}")
        if "gets the environment from here" in done.stderr:
            raise SystemExit(f"no chain:\n{done.stderr}")
        self._tell(f"{took_s:.1f} s: {done.stderr.splitlines()[-1]}")
        came = re.search(r"has come to \d+ hosts? in ([0-9.]+) s", done.stderr)
        return {"whole": took_s, "way": float(came[1]) if came else 0.0}

    def forget(self, hosts: list[str]) -> None:
        """Remove what hosts have got."""
        for host in hosts:
            command = "rm -rf ${TMPDIR:-/tmp}/muster-environments-*"
            self._lab.run(host, ["sh", "-c", command], limit_s=300.0)


def measure(options: argparse.Namespace, running: Stage) -> dict[str, list[dict[str, float]]]:
    """Return the readings of each case."""
    from lab.netlab import Host, NetLab, Network  # type: ignore[import-not-found]

    names = [f"n{number + 1}" for number in range(options.hosts)]
    network = Network(name="hsn0", subnet="10.10.0", rate=options.rate)
    found: dict[str, list[dict[str, float]]] = {"one": [], "all": [], "again": [], "without": []}
    lab = NetLab(
        [Host(name, shared=False) for name in names],
        networks=(network,),
        ssh_over="hsn0",
        controller_on=("hsn0",),
    )
    with lab:
        home = lab.root(lab.controller) / "home"  # what lies below `lab.home` there
        running.step(f"making {options.files} files of {options.megabytes} MB")
        prefix = make_environment(home, options.megabytes, options.files)
        client = Client(lab, home, running.tell)
        try:
            running.step("packing, to the first host")
            client.run(names[:1])
            for turn in range(options.repeats):
                client.forget(names)
                running.step(f"to one host, {turn + 1}")
                found["one"].append(client.run(names[:1]))
                client.forget(names)
                running.step(f"to {len(names)} hosts, {turn + 1}")
                found["all"].append(client.run(names))
                running.step(f"again, {turn + 1}")
                found["again"].append(client.run(names))
                running.step(f"without, {turn + 1}")
                found["without"].append(client.run(names, ship=False))
        finally:
            client.forget(names)  # the end of a lab has no time for so many files
            shutil.rmtree(prefix, ignore_errors=True)
    return found


def median(readings: list[dict[str, float]], key: str) -> float:
    """Return the median of a reading."""
    return statistics.median(reading[key] for reading in readings)


def table(found: dict[str, list[dict[str, float]]], num_hosts: int, floor_s: float) -> str:
    """Return the table; `floor_s` is what the bytes alone take on one link."""
    one, every = median(found["one"], "way"), median(found["all"], "way")
    more_s = median(found["again"], "whole") - median(found["without"], "whole")
    rows = [
        "| | median |",
        "|---|---|",
        f"| to one host | {one:.1f} s |",
        f"| to {num_hosts} hosts | {every:.1f} s |",
        f"| {num_hosts} hosts, for one | {every / one:.2f} |",
        f"| the bytes alone on one link (the floor) | {floor_s:.1f} s |",
        f"| one host, for the floor | {one / floor_s:.2f} |",
        f"| {num_hosts} hosts, for the floor | {every / floor_s:.2f} |",
        f"| again, more than without `--ship-env` | {more_s:.2f} s |",
    ]
    return "\n".join(rows)


def main() -> None:
    """Measure, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--files", type=int, default=20000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--json", type=Path, default=FOLDER / "ship_env.json")
    parser.add_argument("--limit", type=float, default=3600.0)
    parser.add_argument("--quick", action="store_true", help="two hosts, a small environment")
    options = parser.parse_args()
    if options.quick:
        options.hosts, options.megabytes, options.files = 2, 4, 40
    machine = machine_facts()
    with stage("ship_env", options.limit) as running:
        found = measure(options, running)
    how = f"{options.megabytes} MB in {options.files} files, links of {options.rate}, {options.repeats} of each"
    floor_s = options.megabytes * 8 / float(options.rate.removesuffix("mbit"))
    text = f"{headline(machine, how)}\n\n{table(found, options.hosts, floor_s)}\n"
    save(options.json, {"machine": machine, "how": how, "samples": found}, text)


if __name__ == "__main__":
    main()
