"""One faulty job of `goodput.py --slurm`: machines of a real Slurm lose their power by a schedule until the work is done.

machines.py SIDE SEED WORK MEAN_S LIMIT_S OUT [FT_LAUNCHER]

The cluster is that of the tests (`tests/cluster/slurm_lab.py`), with Slurm's own default of 300 s until a silent node counts as
lost. The faults are those of `faults.py`, but a node and the head are machines here: the link is cut, everything on it is killed,
and it boots again after a minute. A fault that finds nothing that works, as while the job waits for a machine, hits nothing.

Every side has six of eight machines, of which it needs two. Ours runs on them as `muster run` submits it. The peers have a batch
script with `--no-kill` and `--requeue`: a loop in which `srun` starts agents on two of the machines that answer.
"""

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launching.job import LostError, lost_with
from running.power import ROOT, SlurmLab
from training.faults import (
    EPOCHS,
    FT_LAUNCHER,
    IN_MEMORY_EVERY,
    OURS,
    SAVE_EVERY,
    Fault,
    Reading,
    faults_by,
    leave_reading,
    read_events,
    read_job,
    striking,
)
from training.useful import NUM_WORKERS, Work, read_diary

HERE = Path(__file__).parent
NUM_MACHINES, NUM_SPARES = 8, 4
DOWN_AFTER_S = 300
BOOT_S = 60.0
# A peer that is silent is noticed by Gloo, whose own time-out is half an hour.
GLOO_TIMEOUT_S = 10
_PORT = 29400
_LOOK_S = 0.5
_MANY = 100_000
_LIVING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED")
# Takes two machines that answer, of those that the job has. What has failed is started anew from here: agents that stay wait for
# the lost one longer than that, and with more agents than `--nnodes` torchrun 2.13 may restart all workers every few seconds.
_SCRIPT = """\
#!/bin/bash
while :; do
  live=()
  for node in $(scontrol show hostnames); do
    timeout 1 bash -c ": </dev/tcp/$node/6818" 2>/dev/null && live+=("$node")
    [ ${{#live[@]}} = 2 ] && break
  done
  [ ${{#live[@]}} = 2 ] &&
    srun --no-kill --overlap --nodes=2 --ntasks=2 --nodelist="${{live[0]}},${{live[1]}}" --kill-on-bad-exit=1 --wait=2 {agent} &&
    exit
  sleep 1
done
"""


def measure(
    side: str, seed: int, work: Work, mean_s: float, limit_s: float, ft_launcher: str = ""
) -> Reading:
    """Return what became of a job under the faults of a seed.

    Raises:
        LostError: It did not do its work within `limit_s`, or ended before.
    """
    with SlurmLab(NUM_MACHINES, cpus=2, gpus=1, down_after_s=DOWN_AFTER_S) as lab:
        job = _Job(lab, side, work, ft_launcher)
        job.submit()
        try:
            with striking(faults_by(seed, mean_s), job) as happened:
                job.wait(limit_s)
        except LostError as lost:
            raise lost_with(str(lost), job.log()) from None
        num_starts = job.num_starts()
        return read_job(job.folder, work, side, seed, job.began_s, num_starts, happened)


class _Job:
    """A job on the cluster."""

    def __init__(self, lab: Any, side: str, work: Work, ft_launcher: str) -> None:
        self.side, self.lab, self.work = side, lab, work
        self.folder = lab.shared / "job"
        self.folder.mkdir()
        on_disk = 0 if side in (OURS, EPOCHS) else SAVE_EVERY
        in_memory = IN_MEMORY_EVERY if side == OURS else 0
        self._words = [str(self.folder), json.dumps(asdict(work)), str(on_disk), str(in_memory)]
        self._ft_launcher = ft_launcher
        self._env = {
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(HERE.parent))),
            "MUSTER_HOME": str(self.folder / "home"),
            "GLOO_TIMEOUT_S": str(GLOO_TIMEOUT_S),
        }
        self._id = ""
        self.began_s = 0.0

    def submit(self) -> None:
        """Give the job to Slurm.

        Raises:
            LostError: It was refused.
        """
        self.began_s = time.monotonic()
        shape = ["--nodes", "2", "--nproc-per-node", "1"]
        if self.side == OURS:
            words = ["run", "--on", "slurm", "--run-id", "r", "--detach", *shape]
            words += ["--spares", str(NUM_SPARES), "--max-restarts", str(_MANY)]
            words += ["--resubmit", "20", str(HERE / "goodput_ours.py"), *self._words]
            argv, script = [sys.executable, "-m", "torchmuster", *words], None
        else:
            argv = ["sbatch", "--parsable", "--no-kill", "--requeue", "--open-mode=append"]
            argv += [f"--output={self.folder}/log", "--ntasks-per-node=1"]
            argv += [f"--nodes={NUM_WORKERS + NUM_SPARES}"]
            script = _SCRIPT.format(agent=self._agent_line())
        said = self.lab.run(argv, env=self._env, cwd=str(self.folder), stdin=script)
        if said.returncode:
            raise LostError(f"{self.side}: not submitted: {said.stderr}")
        self._id = said.stdout.strip() if script else ""

    def _agent_line(self) -> str:
        """Return what `srun` starts on every node, with the shell's own variables in it."""
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        if self.side == FT_LAUNCHER:
            launcher = [self._ft_launcher]
        words = [*launcher, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        words += ["--max-restarts", "0", "--monitor-interval", "0.1"]
        script = [str(HERE / "goodput_by_hand.py"), *self._words]
        meeting = f'--rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "${{live[0]}}:{_PORT}"'
        return f"{shlex.join(words)} {meeting} {shlex.join(script)}"

    def wait(self, limit_s: float) -> None:
        """Wait until the last step is done.

        Raises:
            LostError: It was not, or the job has ended.
        """
        until = self.began_s + limit_s
        while not self._is_done():
            if time.monotonic() > until:
                raise LostError(f"{self.side}: not done after {limit_s:.0f} s")
            state = self._state()
            if state not in _LIVING and not self._is_done():
                raise LostError(f"{self.side}: its job is {state}")
            time.sleep(_LOOK_S)

    def _state(self) -> str:
        """Return the state of the newest job, as Slurm has it."""
        newest = self._id
        if self.side == OURS:
            links = self._links()
            newest = links[-1]["job_id"] if links else ""
        return str(self.lab.job(newest)["JobState"]) if newest else "PENDING"

    def _links(self) -> list[dict[str, Any]]:
        path = self.folder / "home/runs/r/links.json"
        return list(json.loads(path.read_text())["links"]) if path.exists() else []

    def _is_done(self) -> bool:
        try:
            diary = read_diary(self.folder)
        except FileNotFoundError:
            return False
        return bool(diary) and diary[-1][1] >= self.work.num_steps

    def log(self) -> str:
        """Return what it has said."""
        names = ["log", "home/runs/r/job.log", "home/runs/r/result.json"]
        paths = [self.folder / name for name in names]
        return "\n".join(path.read_text(errors="replace") for path in paths if path.exists())

    def num_starts(self) -> int:
        """Return how often Slurm has started it."""
        jobs = {link["job_id"] for link in self._links()} or {self._id}
        return sum(int(self.lab.job(job_id)["Restarts"]) + 1 for job_id in jobs)

    # The faults.

    def strike(self, fault: Fault, _done: threading.Event) -> dict[str, Any]:
        """Let a fault happen; return the machine that it has hit, "" where nothing works that it could hit."""
        return {"machine": self._hit(fault)}

    def _hit(self, fault: Fault) -> str:
        places = [self._place_of(rank) for rank in range(NUM_WORKERS)]
        if not all(pid for _, pid in places):
            return ""
        machine, pid = places[fault.rank]
        if fault.kind == "worker":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return machine
        head = self._head()
        if fault.kind == "node":
            machine = next(name for name, _ in reversed(places) if name != head)
        else:
            machine = head
        if self.lab.daemons[machine].poll() is not None:
            return ""
        self.lab.kill_node(machine, unplug=True)
        threading.Timer(BOOT_S, self._boot, (machine,)).start()
        return machine

    def _boot(self, machine: str) -> None:
        if self.lab.house.poll() is None:
            self.lab.start_node(machine)

    def _place_of(self, rank: int) -> tuple[str, int]:
        """Return the machine of a rank and its process, as this machine counts; 0 where it is not alive."""
        try:
            pid, machine = (self.folder / f"pid-{rank}").read_text().split()
        except FileNotFoundError:
            return "", 0
        for found in self.lab.processes_on(machine):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{found}/status").read_text()
                inner = status.partition("NSpid:")[2].splitlines()[0].split()[-1]
                if inner == pid:
                    return machine, found
        return machine, 0

    def _head(self) -> str:
        if self.side != OURS:
            return str(self.lab.job(self._id)["BatchHost"])
        starts = [e for e in read_events(self.folder) if e["event"] == "attempt_started"]
        return str(starts[-1]["nodes"][0]["node"])


if __name__ == "__main__":
    leave_reading(measure)
