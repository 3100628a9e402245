"""The server's and the hosts' part of one job: wait for its turn, run it, end it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from fake_pbs.hosts import job_environment, on_host, scratch
from fake_pbs.state import STATE, look, state


def serve(job_id):
    with state() as data:
        data["jobs"][job_id]["server_pid"] = os.getpid()
        is_array = "members" in data["jobs"][job_id]
    while look_after_array(job_id) if is_array else serve_once(job_id):
        pass  # qrerun: once more
    return 0


def look_after_array(job_id):
    """Follow the members of an array; say whether it goes on. It runs nothing itself."""
    wait(0.05)
    with state() as data:
        array = data["jobs"][job_id]
        members = [data["jobs"][name] for name in array["members"]]
        if array["deleted"] is not None:
            for member in members:
                member["deleted"] = member["deleted"] or array["deleted"]
        if array["state"] == "Q" and any(member["hosts"] for member in members):
            when = time.strftime("%a %b %d at %H:%M")
            array |= {"state": "B", "substate": 10, "comment": f"Job Array Began at {when}"}
        if any(member["state"] != "F" for member in members):
            return True
        # Source: PBS Professional Reference Guide, "Job Array Exit Status"; an array that ended well was recorded.
        code = max((member["exit"] or 0 for member in members), default=0)
        if array["deleted"] is not None:
            finish(array, 91, 1, f" and terminated by {array['deleted']}")
        else:
            finish(array, 93 if code else 92, 1 if code else 0, " and finished")
    return False


def serve_once(job_id):
    """Wait for the job's turn and run it; say whether it is to start again."""
    while True:
        with state() as data:
            job = data["jobs"][job_id]
            if job["deleted"] is not None:
                finish(job, 91, None, " and terminated" if job["state"] == "Q" else None)
                return False
            word = next_step(job, data)
            if word == "never":
                job["hold_types"] = "s"
                finish(job, 92, None, None)
                return False
            if word == "run":
                place = find_place(job["asked"], data)
                begin(job, place)
                break
        wait(0.05)
    return run(job_id)


def next_step(job, data):
    """Return run, wait or never."""
    for kind, other_id in job["depend"]:
        other = data["jobs"].get(other_id)
        if other is None:
            return "never"
        if other["state"] != "F":
            return "wait"
        if kind == "afterok" and other["exit"] != 0:
            return "never"
        if kind == "afternotok" and other["exit"] in (0, None):
            return "never"
    if job["user_hold"]:
        return "wait"
    job["state"], job["substate"] = "Q", 10
    if job["queue"] in data["stopped"]:
        job["comment"] = "Not Running: Queue not started."
        return "wait"
    empty = {**data, "jobs": {}}
    if find_place(job["asked"], empty) is None:
        job["comment"] = "Can Never Run: Not enough total nodes available"
        return "wait"
    if find_place(job["asked"], data) is None:
        job["comment"] = "Not Running: Insufficient amount of resource: ncpus"
        return "wait"
    return "run"


def find_place(asked, data):
    """Return a host for each chunk, or None."""
    free = {n: dict(room) for n, room in data["hosts"].items() if n not in data["lost"]}
    for other in data["jobs"].values():
        if other["state"] in ("R", "S"):
            for host, chunk in zip(other["hosts"], other["asked"]["chunks"], strict=True):
                for key in ("ncpus", "ngpus"):
                    free[host][key] -= chunk[key]
    scattered = "scatter" in asked["place"]
    chosen = []
    for chunk in asked["chunks"]:
        fits = (
            name
            for name, room in free.items()
            if not (scattered and name in chosen)
            and all(room[key] >= chunk[key] for key in ("ncpus", "ngpus"))
        )
        host = next(fits, None)
        if host is None:
            return None
        for key in ("ncpus", "ngpus"):
            free[host][key] -= chunk[key]
        chosen.append(host)
    return chosen


def begin(job, hosts):
    vnodes = []
    for host, chunk in zip(hosts, job["asked"]["chunks"], strict=True):
        gpus = f":ngpus={chunk['ngpus']}" if chunk["ngpus"] else ""
        vnodes.append(f"({host}:ncpus={chunk['ncpus']}{gpus})")
    job["hosts"] = hosts
    job["exec_vnode"] = "+".join(vnodes)
    job["exec_host"] = "+".join(
        f"{host}/0*{chunk['ncpus']}"
        for host, chunk in zip(hosts, job["asked"]["chunks"], strict=True)
    )
    when = time.strftime("%a %b %d at %H:%M")
    job["comment"] = f"Job run at {when} on {job['exec_vnode']}"
    job["state"], job["substate"] = "R", 42
    job["run_count"] += 1
    job["started"] = time.time()


def run(job_id):
    with state() as data:
        job = data["jobs"][job_id]
        delay_s, lag_s = data["kill_delay_s"], data["walltime_lag_s"]
    spool = STATE / "spool"
    lines = [
        host
        for host, chunk in zip(job["hosts"], job["asked"]["chunks"], strict=True)
        for _ in range(chunk["mpiprocs"])
    ]
    node_file = spool / f"aux.{job_id}"
    node_file.write_text("".join(f"{line}\n" for line in lines))
    Path(scratch(job_id)).mkdir(parents=True, exist_ok=True)
    folder = spool / f"{job_id}.tasks"
    folder.mkdir(exist_ok=True)
    out, err = (spooled(job, job_id, letter) for letter in "oe")
    joined = job["join"] in ("oe", "eo")
    with open(out, "a") as stdout, open(out if joined else err, "a") as stderr:
        # A login shell reads the script; the script's own first line is a comment to it.
        child = subprocess.Popen(
            on_host(job["hosts"][0], [job["shell"], "-l", str(spool / f"{job_id}.SC")]),
            cwd=STATE / "home",
            env=job_environment(job_id, job),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        with state() as data:
            data["jobs"][job_id]["pids"][str(child.pid)] = "script"
            data["jobs"][job_id]["session"] = child.pid
        watch = Watch(job_id, job, child, (stdout, stderr))
        status = watch.until_the_end(delay_s, lag_s)
        watch.kill_leftovers()
    shutil.rmtree(scratch(job_id), ignore_errors=True)
    shutil.rmtree(folder)
    node_file.unlink()
    deliver(out, job["out"])
    if not joined:
        deliver(err, job["err"])
    with state() as data:
        job = data["jobs"][job_id]
        if job.pop("rerun_asked", False) and not watch.last_line and job["deleted"] is None:
            job |= {
                "state": "Q",
                "substate": 10,
                "comment": None,
                "hosts": [],
                "pids": {},
                "tasks": {},
            }
            return True
        code = 256 - status if status < 0 else status
        if watch.is_over:
            finish(job, 93, -29, " and exceeded resource walltime")
        elif watch.last_line:
            finish(job, 93, 271, "")  # recorded: the comment stays as it was
        elif job["deleted"] is not None:
            finish(job, 91, code, f" and terminated by {job['deleted']}")
        else:
            finish(job, 93 if code else 92, code, " and failed" if code else " and finished")
    return False


def spooled(job, job_id, letter):
    """Return where the output goes while the job runs: in place with `-k oed`, else into the spool."""
    if letter in job["keep"] and "d" in job["keep"]:
        return job["out" if letter == "o" else "err"]
    return str(STATE / "spool" / f"{job_id}.{'OU' if letter == 'o' else 'ER'}")


class Watch:
    """The daemons of one job's hosts: they start tasks, stop and end what is in the job's sessions."""

    def __init__(self, job_id, job, child, streams):
        self.job_id, self.job, self.child, self.streams = job_id, job, child, streams
        self.tasks, self.ticks = {}, {}
        self.is_over, self.last_line = False, None
        self.kill_at = self.back_at = self.suspended_at = None
        self.suspended_s = self.account_at = 0.0
        self.folder = STATE / "spool" / f"{job_id}.tasks"

    def until_the_end(self, delay_s, lag_s):
        """Return the script's status."""
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.child.wait(0.05)
            now, data = time.time(), look()
            job = data["jobs"][self.job_id]
            self.start_tasks(job)
            self.reap_tasks()
            if job["signals"]:
                self.take_signals(now)
            self.account(now)
            self.look_after_hosts(data, job, now)
            if self.kill_at is None:
                if self.must_end(job, now, lag_s):
                    if self.last_line:  # Source: openpbs src/resmom/mom_main.c: before the signal
                        self.say(f"=>> PBS: job killed: {self.last_line}\n")
                    self.signal_all(signal.SIGTERM)
                    self.signal_all(signal.SIGCONT)
                    self.kill_at = now + delay_s
                elif job.get("rerun_asked"):
                    self.signal_all(
                        signal.SIGKILL
                    )  # Source: openpbs src/resmom/requests.c, req_rerunjob
            elif now > self.kill_at:
                self.signal_all(signal.SIGKILL)

    def must_end(self, job, now, lag_s):
        limit_s = job["asked"].get("walltime_s")
        if self.suspended_at is not None:
            return job["deleted"] is not None
        elapsed_s = now - self.job["started"] - self.suspended_s
        if limit_s is not None and elapsed_s > limit_s + lag_s:
            self.is_over = True
            over_s = max(int(elapsed_s), limit_s + 1)
            self.last_line = f"walltime {over_s} exceeded limit {limit_s}"
        self.last_line = self.last_line or job.get("breaks")
        return self.last_line is not None or job["deleted"] is not None

    def say(self, line):
        """Add a line to the job's output, behind what its processes have written."""
        fd = self.streams[0].fileno()
        os.lseek(fd, 0, os.SEEK_END)
        os.write(fd, line.encode())

    def start_tasks(self, job):
        for wanted in sorted(self.folder.glob("*.wanted")):
            asked = json.loads(wanted.read_text())
            wanted.unlink()
            path = self.folder / wanted.name.removesuffix(".wanted")
            try:
                child = subprocess.Popen(
                    on_host(asked["host"], asked["command"]),
                    cwd=STATE / "home",
                    env=asked["env"],
                    stdin=subprocess.DEVNULL,
                    stdout=self.streams[0],  # recorded: a task's output is the job's
                    stderr=self.streams[1],
                    start_new_session=True,
                )
            except OSError as error:
                os.write(self.streams[1].fileno(), b"\xf0@,\x01: %s\n" % error.strerror.encode())
                (self.folder / f"{path.name}.ended").write_text("254")
                continue
            with state() as data:
                data["jobs"][self.job_id]["pids"][str(child.pid)] = asked["host"]
            self.tasks[path] = child
            (self.folder / f"{path.name}.pid").write_text(str(child.pid))

    def reap_tasks(self):
        for path, child in list(self.tasks.items()):
            if child.poll() is not None:
                del self.tasks[path]
                (self.folder / f".{path.name}").write_text(str(child.returncode))
                (self.folder / f".{path.name}").replace(self.folder / f"{path.name}.ended")

    def take_signals(self, now):
        with state() as data:
            job = data["jobs"][self.job_id]
            names, job["signals"] = job["signals"], []
            for name in names:
                if name == "suspend":
                    job["state"], job["substate"], self.suspended_at = "S", 43, now
                elif name == "resume":
                    job["state"], job["substate"] = "R", 42
                    self.suspended_s += now - (self.suspended_at or now)
                    self.suspended_at = None
        for name in names:
            known = {"suspend": signal.SIGSTOP, "resume": signal.SIGCONT}
            self.signal_all(known.get(name) or signal.Signals[name])

    def look_after_hosts(self, data, job, now):
        """A lost host takes its processes along; when it is back, the job is ended for it."""
        for index, host in enumerate(dict.fromkeys(job["hosts"])):
            if host in data["lost"]:
                for pid in self.below(host):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                if host not in job["was_lost"]:
                    with state() as data:
                        data["jobs"][self.job_id]["was_lost"].append(host)
            elif host in job["was_lost"] and self.last_line is None:
                self.back_at = self.back_at or now
                if now > self.back_at + data["come_back_s"]:
                    self.last_line = f"node {index} ({host}) requested job die, code 15009"

    def account(self, now):
        """Add up what the processes of the job's sessions have used; a mom sees no others."""
        if now < self.account_at:
            return
        self.account_at = now + 0.5
        pages = 0
        for pid in self.below():
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                self.ticks[pid] = int(fields[11]) + int(fields[12])
                pages += int(fields[21])
        cput_s, mem_kb = sum(self.ticks.values()) // os.sysconf("SC_CLK_TCK"), pages * 4
        with state() as data:
            job = data["jobs"][self.job_id]
            job["cput_s"], job["mem_kb"] = max(job["cput_s"], cput_s), max(job["mem_kb"], mem_kb)

    def below(self, host=None):
        """Return every process of the job, or of one of its hosts: those in its sessions."""
        pids = look()["jobs"][self.job_id]["pids"]
        sessions = {int(pid) for pid, where in pids.items() if host in (None, where)}
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                with contextlib.suppress(OSError):
                    fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) in sessions and fields[0] not in "ZX":
                        found.append(int(entry))
        return found

    def signal_all(self, signum):
        for pid in self.below():
            with contextlib.suppress(OSError):
                os.kill(pid, signum)

    def kill_leftovers(self):
        """Kill what the script left behind in the job's sessions; what has left them is not known."""
        while self.below():
            self.signal_all(signal.SIGKILL)
            self.reap_tasks()
            wait(0.01)
        for child in self.tasks.values():
            child.wait()


def deliver(spooled, path):
    """The output comes when the job is over, and to `undelivered` where its folder has gone."""
    if spooled == path:
        return
    until = time.time() + look()["deliver_retry_s"]
    while not Path(path).parent.is_dir():
        if time.time() > until:
            path = STATE / "undelivered" / Path(spooled).name
            path.parent.mkdir(exist_ok=True)
            break
        wait(0.05)
    shutil.move(spooled, path)


def finish(job, substate, code, suffix):
    job["state"], job["substate"], job["exit"] = "F", substate, code
    known = job["comment"]
    job["comment"] = known + suffix if suffix is not None and known else None
    job["pids"], job["server_pid"] = {}, None


def wait(seconds):
    """Let time pass; there is nothing to be told of another process's file."""
    signal.sigtimedwait([], seconds)
