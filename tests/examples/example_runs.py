"""Start the examples as their README pages do, and look at what they leave behind."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from kit.command import muster_env, ran
from kit.waiting import wait_until
from torchmuster.core import proc

EXAMPLES = Path(__file__).parents[2] / "examples"


def environment(folder, **more):
    """Return this process's environment with `folder` for runs and scratch."""
    return muster_env(folder / "home", SLURM_TMPDIR=str(folder), **more)


def bare(*script):
    """Return the command line of one process without a launcher."""
    return [sys.executable, *map(str, script)]


def muster(num_workers, *script, nodes=1, run_id="the-run"):
    """Return the command line of `muster run`."""
    line = ["-m", "torchmuster", "run", "--nodes", nodes, "--nproc-per-node", num_workers]
    return [sys.executable, *map(str, [*line, "--run-id", run_id, *script])]


def output_of(line, env, *, timeout_s=120):
    """Run a command to its end; return its standard output."""
    ended = ran(line, limit_s=timeout_s, env=env, cwd=env["SLURM_TMPDIR"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@contextmanager
def started(line, env):
    """Run a command beside the test; its output is in `out` of the scratch folder."""
    with open(Path(env["SLURM_TMPDIR"], "out"), "wb") as out:
        process = subprocess.Popen(
            line, env=env, cwd=env["SLURM_TMPDIR"], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield process
    except BaseException:
        print(Path(out.name).read_text())  # pytest shows it beside the failure
        raise
    finally:
        process.kill()  # the agents of `muster run` end with it
        process.wait()


def events(path, name):
    """Return a record's events of that name; a line that is still being written is left out."""
    if not path.exists():
        return []
    lines = [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if "\n" in line
    ]
    return [line for line in lines if line["event"] == name]


def wait_until_saved(process, record, step):
    """Wait until a save of `step` or later was ordered: the one before it is then complete."""

    def is_saved():
        assert process.poll() is None, f"it ended before step {step}; see `out`"
        return [event for event in events(record, "save") if event["step"] >= step]

    wait_until(is_saved, f"a save at step {step}")


def a_worker_of(run_dir, node):
    """Return the pid of the last worker of a node: agents start a spawner, which forks workers."""
    (agent,) = [
        e["pid"] for e in events(run_dir / "events.jsonl", "agent_joined") if e["node"] == node
    ]
    (spawner,) = proc.children_of(agent)
    return max(proc.children_of(spawner))
