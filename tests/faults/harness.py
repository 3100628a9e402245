"""Start `muster run` on real processes, hurt it, and wait for what follows: conditions, never times."""

import json
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from kit.command import MUSTER, muster_env
from kit.waiting import wait_until
from torchmuster.core import proc

LOOP = str(Path(__file__).with_name("loop.py"))


@dataclass
class Job:
    """One `muster run` and everything that it has started."""

    home: Path
    folder: Path
    options: tuple[str, ...] = ("--nodes", "2", "--nproc-per-node", "2")
    script: tuple[str, ...] = ()
    command: str = "run"
    env: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Job":
        self.folder.mkdir(exist_ok=True)
        script = self.script or (LOOP, str(self.folder))
        argv = [*self.prefix, *MUSTER, self.command, *self.options, *script]
        with open(self.folder / "stdout", "wb") as out, open(self.folder / "stderr", "wb") as err:
            self.process = subprocess.Popen(
                argv,
                env=muster_env(self.home, **self.env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return self

    def write(self, text: str, *words: str) -> "Job":
        """Let it run this program; its words are its folder unless others are given."""
        self.folder.mkdir(exist_ok=True)
        script = self.folder / "script.py"
        script.write_text(text)
        self.script = (str(script), *(words or (str(self.folder),)))
        return self

    # What can be seen.

    @property
    def run_dir(self) -> Path:
        return next(iter(sorted((self.home / "runs").iterdir())))

    def events(self, name: str | None = None) -> list[dict]:
        try:
            lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        except (OSError, StopIteration):
            return []
        found = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if name is None or event["event"] == name:
                found.append(event)
        return found

    def log(self, rank: int = 0) -> Path:
        """Return the file of what a rank says in the first attempt."""
        return self.run_dir / f"logs/main/train/attempt-0/rank-{rank}.log"

    def result(self) -> dict:
        return json.loads((self.run_dir / "result.json").read_text())

    def up(self, attempt: int) -> dict[int, tuple[int, float]]:
        """Return pid and start time of the ranks of an attempt that have reduced."""
        found = {}
        for path in self.folder.glob(f"up-{attempt}-*"):
            pid, at, _ = path.read_text().split()
            found[int(path.name.rpartition("-")[2])] = (int(pid), float(at))
        return found

    def world(self, attempt: int) -> int:
        return int((self.folder / f"up-{attempt}-0").read_text().split()[2])

    def agent_pid(self, node: str) -> int:
        joined = [e for e in self.events("agent_joined") if e["node"] == node]
        return joined[-1]["pid"]

    def spawner_pid(self, node: str) -> int:
        return proc.children_of(self.agent_pid(node))[0]

    def store_pid(self) -> int:
        ranks = {int(path.read_text().split()[0]) for path in self.folder.glob("up-*")}
        children = set(proc.children_of(self.spawner_pid("n1")))
        (store,) = [p for p in children - ranks if proc.is_running(p)]
        return store

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    # What can be done.

    def wait_up(self, attempt: int, num: int = 4, timeout_s: float = 60.0) -> dict:
        def condition():
            if self.process.poll() is not None:
                raise AssertionError(f"it ended: {self.process.returncode}\n{self.stderr}")
            return len(self.up(attempt)) >= num

        wait_until(condition, f"attempt {attempt} of {num} ranks\n{self.tell()}", timeout_s)
        return self.up(attempt)

    def wait_event(self, name: str, num: int = 1, timeout_s: float = 60.0) -> dict:
        wait_until(lambda: len(self.events(name)) >= num, f"event {name}\n{self.tell()}", timeout_s)
        return self.events(name)[num - 1]

    def tell(self) -> str:
        return "\n".join(map(str, self.events()[-12:]))

    def order(self, rank: int, word: str) -> None:
        temporary = self.folder / f"tmp-do-{rank}"
        temporary.write_text(word)
        temporary.rename(self.folder / f"do-{rank}")

    def stop_workers(self) -> None:
        (self.folder / "stop").touch()

    def finish(self, timeout_s: float = 60.0) -> int:
        """Let the workers end and return muster's exit code."""
        self.stop_workers()
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 60.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"muster does not end\n{self.stderr}\n{self.tell()}") from None

    def all_pids(self) -> list[int]:
        return proc.descendants(self.process.pid)

    def clean_up(self) -> None:
        if self.process is None:
            return
        below = self.all_pids()
        proc.kill_quietly(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in below:
            proc.kill_quietly(pid, signal.SIGCONT)
            proc.kill_quietly(pid, signal.SIGKILL)


def start_pair(job, *options: str, prefixes: tuple[tuple[str, ...], ...] = ((), ())) -> list[Job]:
    """Start two `muster torchrun` of one worker each; they share a home and a folder."""
    head, other = pair = [
        job(
            "--nproc-per-node",
            "1",
            "--rdzv-backend",
            "c10d",
            *options,
            command="torchrun",
            prefix=one,
        )
        for one in prefixes
    ]
    other.home = head.home
    head.script = other.script = (LOOP, str(head.folder))
    head.start()
    other.start()
    return pair
