"""What the matrix needs of an engine: a world of two nodes in which `muster run` is started and hurt from outside.

A new engine is one subclass of `World`. `folder` is seen by the user and by all nodes under the same path; `scratch` is a small
disk of each node, with a package that the script imports. What a world can't do stands in `cannot`, with the reason.
"""

import json
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from kit.command import ran
from kit.memory_group import MemoryGroup
from kit.waiting import wait_until

TRAIN = Path(__file__).with_name("train.py")
NODES = ("n1", "n2")
WORKERS = 2
MEMORY_BYTES = 3 << 29
START_LIMIT_S = 90.0
RUN_ID = "r"
NEXT_RUN_ID = "next"
# For a node's own mounts: nothing in /tmp and /dev/shm is another's, and $1 is a small disk.
OWN_TMP = "mount -t tmpfs -o mode=1777 none /tmp; mount -t tmpfs -o mode=1777 none /dev/shm"
REPOSITORY = Path(__file__).resolve().parents[2]
if REPOSITORY.is_relative_to("/tmp"):  # what runs is in there: it is seen through the new /tmp
    repository = shlex.quote(str(REPOSITORY))
    OWN_TMP = (
        f"mkdir -p /run/muster-matrix; mount --bind {repository} /run/muster-matrix; {OWN_TMP};"
        f" mkdir -p {repository}; mount --move /run/muster-matrix {repository}; rmdir /run/muster-matrix"
    )
OWN_DISK = 'mount -t tmpfs -o size=64m none "$1"'
FILL_SCRATCH = """\
rm -rf "$1"/*
mkdir -p "$1/packages/matrix_tokens"
echo 'def count(samples): return samples.sum().reshape(1)' >"$1/packages/matrix_tokens/__init__.py"
"""


class World:
    """Two nodes of one engine; a context manager.

    Attributes:
        name: Of the engine, as `--engine` takes it.
        title: Of its column.
        made_of: What it consists of, for the page.
        cannot: For each fault that can't be made here, by name, why.
        is_silent: Whether a node that is lost falls silent, so that only its lease tells.
        job_ends_within_s: How long the scheduler may take to end the job of a run that has ended.
        is_one_disk: Whether all nodes save to the same disk.
        options: Those of `muster run` that lead to this engine.
        wrong_interface: A name for GLOO_SOCKET_IFNAME that does not lead to the other node.
        folder: Seen by the user and all nodes.
        home: The `MUSTER_HOME` of the user, as this process sees it.
        time_limit: For `--time`, as short as the scheduler takes it.
        group: The control group of the memory of, at least, the second node.
        running: The run that was started last, with the id `run_id`.
    """

    name = title = made_of = ""
    cannot: dict[str, str] = {}
    is_silent = True
    job_ends_within_s = 0.0
    is_one_disk = False
    options: tuple[str, ...] = ()
    wrong_interface = "ib7"
    run_id = RUN_ID
    time_limit = ""
    folder: Path
    home: Path
    group: MemoryGroup
    running: "Running"

    def why_not(self):
        """Return why this world can't be made on this machine; None where it can."""
        raise NotImplementedError

    def __enter__(self):
        raise NotImplementedError

    def __exit__(self, *error):
        raise NotImplementedError

    # How a cell begins and ends.

    @property
    def scratch(self):
        """Return the path of every node's own small disk."""
        return self.folder / "scratch"

    def prepare(self):
        """Make all nodes as new: an empty disk with the package, batches that are good."""
        for node in NODES:
            self.on(node, "sh", "-ec", FILL_SCRATCH, "sh", self.scratch)
        self._num_kills = self.group.num_kills()
        data = self.data
        data.mkdir(exist_ok=True)
        for path in data.iterdir():
            path.unlink()
        for rank in range(len(NODES) * WORKERS):
            (data / f"batch-{rank}").write_text("1000")
        shutil.copy(TRAIN, self.folder)

    @property
    def data(self):
        """Return the folder that the script reads from."""
        return self.folder / "data"

    def run(self, options=(), script_options=(), run_id=RUN_ID):
        """Start the training; return its `Running`."""
        self.run_id = run_id
        known = ("--run-id", run_id, "--max-restarts", "0", "--nproc-per-node", str(WORKERS))
        script = (TRAIN.name, self.data, self.scratch, *script_options)
        words = ("run", *self.options, *known, *options, *script)
        said = self.folder / f"said-{run_id}"
        with said.open("wb") as out:
            process = self.start(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.running = Running(self, process, said)
        return self.running

    def reset(self):
        """End what is left of a run, and make the world whole again."""
        raise NotImplementedError

    # What the user does.

    def start(self, words, **options):
        """Start `muster WORDS` where the user sits, in `folder`; return the process (options of `Popen`)."""
        raise NotImplementedError

    def cancel(self):
        """Say `muster cancel`."""
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with self.start(("cancel", self.run_id), **silent) as process:
            process.wait()

    @property
    def run_dir(self):
        """Return the run directory, as this process sees it."""
        return self.home / "runs" / self.run_id

    # What the runner does to nodes.

    def argv(self, node, words):
        """Return a command as it runs on a node, with the node's files, network and process ids."""
        raise NotImplementedError

    def on(self, node, *words):
        """Run a command on a node; return what it prints."""
        done = ran(self.argv(node, [str(word) for word in words]))
        assert done.returncode == 0, f"{words} on {node}: {done.stderr}"
        return done.stdout

    def called(self, node):
        """Return what muster calls a node."""
        return node

    def kill_node(self, node):
        """Kill all processes of a node; where `is_silent`, cut it off first."""
        raise NotImplementedError

    def cut_link(self, node):
        """Cut a node off from the other, and from the user; its processes live."""
        raise NotImplementedError

    def heal_link(self, node):
        """Undo `cut_link`."""
        raise NotImplementedError

    def wait_out_of_memory(self):
        """Return the time, in seconds since 1970, at which the kernel has killed for want of memory."""
        wait_until(lambda: self.group.num_kills() > self._num_kills, "the kernel's kill")
        return time.time()

    def wait_time_limit(self, running):
        """Return the time, in seconds since 1970, at which the time of the run was over."""
        raise NotImplementedError

    # What is left.

    def processes(self):
        """Return the command lines of what still runs of a run: on the nodes, and where the user sits."""
        raise NotImplementedError

    def jobs(self):
        """Return the jobs that the scheduler still has, if there is one."""
        return []

    def files(self, nodes):
        """Return the files of a run outside of its directory: in /tmp, /dev/shm and the home of these nodes."""
        found = set()
        for node in nodes:
            words = ("find", *self.watched, "-mindepth", "1")
            paths = self.on(node, "sh", "-c", '"$@" 2>/dev/null || true', "sh", *words).splitlines()
            kept = (*map(str, self.kept), str(REPOSITORY))
            found |= {f"{node}:{path}" for path in paths if not path.startswith(kept)}
        return found

    @property
    def watched(self):
        """Return the folders of a node in which a run may leave nothing but what it says."""
        return ("/tmp", "/dev/shm", self.home)

    @property
    def kept(self):
        """Return what is kept on purpose: run directories, and the copy of torchmuster for jobs."""
        return (self.home / "runs", self.home / "cache")


class Running:
    """One `muster run` that is under way.

    Attributes:
        world: Where it runs.
        process: The user's command.
    """

    def __init__(self, world, process, said):
        self.world, self.process, self._said = world, process, said

    @property
    def said(self):
        """Return what the terminal shows until now."""
        return self._said.read_text(errors="replace")

    @property
    def first_error(self):
        """Return the first error that the terminal shows, else its last line."""
        lines = self.said.splitlines() or ["nothing was shown"]
        return next((line for line in lines if line.startswith("error:")), lines[-1])

    def events(self, name):
        """Return the events of this name."""
        try:
            lines = (self.world.run_dir / "events.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [e for e in map(_event, lines) if e.get("event") == name]

    def result(self):
        """Return `result.json`; None as long as there is none."""
        try:
            return json.loads((self.world.run_dir / "result.json").read_text())
        except (OSError, ValueError):
            return None

    def wait_up(self):
        """Wait until all ranks train."""
        self._wait(lambda: all(path.exists() for path in self._up()), "all ranks train")

    def pids(self):
        """Return the pids of all ranks, as their nodes know them."""
        return [int(path.read_text()) for path in self._up()]

    def _up(self):
        return [self.world.data / f"up-{rank}" for rank in range(len(NODES) * WORKERS)]

    def workers_on(self, node):
        """Return the pids of the workers that live on a node."""
        first = NODES.index(node) * WORKERS
        words = ("sh", "-c", 'for pid; do kill -0 "$pid" && echo "$pid"; done; true', "sh")
        return self.world.on(node, *words, *self.pids()[first : first + WORKERS]).split()

    def wait_begun(self):
        """Wait until the script's first line has run; return when, in seconds since 1970."""
        began = self.world.data.glob
        self._wait(lambda: any(began("began-*")), "the script began")
        return min(path.stat().st_mtime for path in began("began-*"))

    def agent_pid(self, node):
        """Return the pid of a node's agent, as the node knows it."""
        name = self.world.called(node)

        def joined():
            return [e["pid"] for e in self.events("agent_joined") if e["node"] == name]

        self._wait(joined, f"the agent of {name} in the record")
        return joined()[0]

    def _wait(self, condition, what):
        def reached():
            has_ended = self.process.poll() is not None
            is_so = condition()
            assert is_so or not has_ended, f"it ended before {what}: {self.first_error}"
            return is_so

        wait_until(reached, what, START_LIMIT_S)


def _event(line):
    try:
        return json.loads(line)
    except ValueError:  # half of it is written
        return {}
