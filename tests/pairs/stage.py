"""A place to play a case in: a home, a session or hosts of its own, and the commands that a user types there."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kit.command import MUSTER, muster_env
from matrix.processes import pids_with
from pairs.features import HOSTS, OFF
from ssh import hosts as ssh

SCRIPT = str(Path(__file__).with_name("train.py"))
LIMIT_S = 120.0
SESSION = "held"
LAUNCH = """\
import json, sys, torchmuster
words, options = json.loads(sys.argv[1])
run = torchmuster.launch(*words, **options)
try:
    run.wait()
except torchmuster.RunFailed as failed:
    print(failed, file=sys.stderr)
    sys.exit(failed.exit_code)
"""
WORKFLOW = """\
workflow:
  name: pipe
  tasks:
  - name: train
    image: none
"""


@dataclass(frozen=True)
class Said:
    """What a command has said, and its exit code."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def text(self):
        return self.out + self.err


class Running:
    """A command that runs, with its output in files."""

    def __init__(self, stage, argv):
        stage.number += 1
        self.argv = tuple(argv)
        self._out, self._err = (stage.root / f"said-{stage.number}-{of}" for of in ("out", "err"))
        with self._out.open("wb") as out, self._err.open("wb") as err:
            options = {"env": stage.env, "cwd": stage.code, "stdin": subprocess.DEVNULL}
            self.process = subprocess.Popen(self.argv, stdout=out, stderr=err, **options)

    def said(self):
        texts = (path.read_text(errors="replace") for path in (self._out, self._err))
        return Said(self.argv, self.process.poll(), *texts)

    def wait(self, limit_s=LIMIT_S):
        """Return what it said by its end.

        Raises:
            subprocess.TimeoutExpired: It did not end in time.
        """
        self.process.wait(limit_s)
        return self.said()


class Stage:
    """Where one case is played.

    Attributes:
        case: Its values.
        root: The folder that has everything; nothing of it is left on the machine.
        code: Where commands are typed.
        home: The user's records.
        out: Weights and marks of the script.
        env: Variables of each command.
        typed: What each command has said that has ended.
    """

    def __init__(self, case):
        self.case, self.typed, self.number = case, [], 0
        self.root = Path(tempfile.mkdtemp(prefix="pairs-", dir="/tmp"))
        self._stack = contextlib.ExitStack()
        self.temporary = self.root / "tmp"
        self.temporary.mkdir()
        own = {"MUSTER_ON": "local", "TMPDIR": str(self.temporary), "MUSTER_PROGRESS": "off"}
        if case["where"] in HOSTS:
            self.hosts = ssh.SshHosts(self.root / "lab")
            self._stack.callback(self.hosts.close)
            self.code, self.home = self.hosts.code, self.hosts.home
            names = ["a", "b"] if case["spares"] == "0" else ["a", "b", "c"]
            for name in names:
                self.hosts.add(name, shares=case["where"] == "hosts")
            lab = f"[engines.lab]\nkind = 'ssh'\nhosts = {names}\n"
            (self.code / "muster.toml").write_text(lab)
            own.pop("MUSTER_ON")
            self.env = self.hosts.environment(OMP_NUM_THREADS="1", **own)
        else:
            self.code, self.home = self.root / "code", self.root / "home"
            self.code.mkdir()
            self.env = muster_env(self.home, **own)
        shutil.copy(SCRIPT, self.code / "train.py")
        self.out = self.root / "out"  # all hosts see it
        self.out.mkdir()

    def __enter__(self):
        if self.case["where"] == "session":
            held = ("session", "start", "--name", SESSION, "--nodes", "2", "--nproc-per-node", "2")
            self.type(*held)
        return self

    def end_session(self):
        if self.case["where"] == "session":
            return self.type("session", "end", SESSION)
        return None

    def __exit__(self, *_):
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stack.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def left(self):
        """Return pid -> words of the processes of this stage that live, but its hosts' sshd."""
        found = pids_with(f"MUSTER_HOME={self.home}")
        if self.case["where"] in HOSTS:
            pids = ssh.processes_with(f"{self.hosts.folder}/")
            found |= {
                pid: f"process {pid} of a host" for pid in pids if pid not in self.hosts.pids()
            }
        return found

    def type(self, *words, limit_s=LIMIT_S):
        """Run `muster` to its end."""
        return self.keep(self.start(*words).wait(limit_s))

    def keep(self, said):
        self.typed.append(said)
        return said

    def start(self, *words):
        return Running(self, [*MUSTER, *words])

    def begin(self, script):
        """Start what the case asks for, with these words for the script; return the command that ends with it."""
        what = self.case["what"]
        if what == "launch":
            options = {name.replace("-", "_"): value for name, value in self._options().items()}
            (self.code / "launch.py").write_text(LAUNCH)
            given = json.dumps([["train.py", *script], options])
            return Running(self, [sys.executable, "launch.py", given])
        if what == "workflow":
            (self.code / "w.yaml").write_text(WORKFLOW + self._task(script))
            words = ["submit", *self._words(), "w.yaml"]
        else:
            grid = ["--grid", "lr=0.1,0.2", "--metric", "loss"] if what == "sweep" else []
            dashes = ["--"] if what == "sweep" else []
            words = [what, *self._words(), *grid, "train.py", *dashes, *script]
        if self.case["detach"] == "no":
            return self.start(*words)
        self.type(*words)
        return self.start("wait", "last")

    def _words(self):
        words = []
        for name, value in self._options().items():
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return words

    def _options(self):
        """Return the options of muster that the case asks for."""
        case, found = self.case, {}
        what = case["what"]
        if case["where"] == "session":
            found["session"] = SESSION
        if case["where"] in HOSTS:
            found["on"] = "lab"
        if what not in ("workflow", "torchrun", "sweep"):
            found["nodes"] = case["nodes"]
        if what != "workflow":
            found["nproc-per-node"] = case["workers"]
        if what == "torchrun":
            found["max-restarts"] = "3"
        if case["fault"] == "hang":  # an evaluation may be quiet for longer
            found["hang-timeout"] = "4s:8s" if case["place"] == "evaluation" else "3s"
        if case["where"] in HOSTS and what != "torchrun" and what != "workflow":
            found["python"] = sys.executable
        asked = {
            "spares": ("spares", case["spares"]),
            "start": ("start", case["start"]),
            "tee": ("tee", case["tee"]),
            "verify": ("verify-every", case["verify"]),
            "detach": ("detach", True),
            "called": {"name": ("name", "mine"), "id": ("run-id", "mine")}.get(case["called"]),
            "more": {
                "preload": ("preload", "fractions"),
                "metrics": ("metrics-port", "19477"),
                "env": ("env", {"MINE": "1"} if what == "launch" else "MINE=1"),
            }.get(case["more"]),
        }
        for feature, option in asked.items():
            if option is not None and case[feature] != OFF[feature]:
                found[option[0]] = option[1]
        return found

    def _task(self, script):
        fields = {
            "script": "train.py",
            "args": list(script),
            "nodes": self.case["nodes"],
            "nproc_per_node": int(self.case["workers"]),
        }
        return "".join(f"    {name}: {json.dumps(value)}\n" for name, value in fields.items())

    def run_dirs(self):
        """Return the directories of what the user has started, the oldest first: no session."""
        found = sorted((self.home / "runs").glob("[!.]*"), key=lambda path: path.stat().st_ctime)
        return [path for path in found if "-session-" not in path.name]
