"""What a check uses: this machine's GPUs, runs of muster and torchrun, and what they report.

GPUs are real, by nvidia-smi, or pretended, by a folder; see `scripts/gpu.py`.
"""

import contextlib
import glob
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torchmuster.core import proc
from torchmuster.core.node.kernel import count_devices, visible_gpus
from torchmuster.launcher.facts.gpu import Gpu, ask_gpus

PRETENDED = "pretended"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMachine:
    """The GPUs and driver of this machine.

    Attributes:
        gpus: The GPUs that CUDA_VISIBLE_DEVICES leaves visible.
        why_none: Why there is no GPU, as a phrase.
        pretended: Folder that records the use of pretended devices; empty if they are real.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    why_none: str = ""
    pretended: str = ""

    @property
    def patience(self) -> float:
        """Factor for time limits: a pretending processor is shared, and slower."""
        return 10.0 if self.pretended else 1.0

    @property
    def names(self) -> list[str]:
        """Names of the visible GPUs for CUDA_VISIBLE_DEVICES."""
        return [str(gpu.index) for gpu in self.gpus]


def look() -> GpuMachine:
    """Return the GPUs of this machine."""
    folder = os.environ.get("GPUCHECK_PRETEND", "")
    if folder:
        count = int(os.environ.get("GPUCHECK_PRETEND_GPUS", "1"))
        name = "a pretended GPU (the processor)"
        pretended = (
            Gpu(index=n, uuid=f"GPU-pretended-{n}", name=name, memory_bytes=0, used_bytes=0)
            for n in range(count)
        )
        return GpuMachine(gpus=tuple(pretended), driver=PRETENDED, pretended=folder)
    if not count_devices():
        return GpuMachine(why_none="the kernel shows no NVIDIA device")
    gpus, driver, why = ask_gpus(proc.ask_spared, 10.0)
    chosen = visible_gpus()
    seen = [gpu for gpu in gpus if {str(gpu.index), gpu.uuid} & set(chosen)]
    return GpuMachine(gpus=tuple(seen), driver=driver, why_none=why or "none is visible")


def in_use(machine: GpuMachine) -> list[int]:
    """Return the bytes in use on each visible GPU; for a pretended one, the number of its users."""
    if machine.pretended:
        held = [name.partition("-") for name in os.listdir(machine.pretended)]
        alive = [number for number, _, pid in held if proc.is_running(int(pid))]
        return [alive.count(str(gpu.index)) for gpu in machine.gpus]
    return [gpu.used_bytes for gpu in look().gpus]


def forget(machine: GpuMachine) -> None:
    """Remove the marks of ended processes from pretended devices."""
    if machine.pretended:
        for name in os.listdir(machine.pretended):
            if not proc.is_running(int(name.partition("-")[2])):
                os.unlink(os.path.join(machine.pretended, name))


SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts")
_RUN_S = 100.0
_MAY_BE_IN_A_JOB = ("run", "sweep", "replay", "doctor")


class FailedError(Exception):
    """A promise does not hold; the text is the evidence."""


class ImpossibleError(Exception):
    """This machine can't test it; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedCommand:
    """A command that has ended, with its output and facts.

    Attributes:
        began: When it was started, by `time.time()`.
        facts: The facts that its scripts reported, by time.
    """

    line: str
    code: int | None
    text: str
    began: float
    facts: list[dict[str, Any]]

    def all(self, name: str) -> list[Any]:
        """Return the values of a fact over all ranks and attempts, by time."""
        return [fact[name] for fact in self.facts if name in fact]

    def one(self, name: str) -> Any:
        """Return the last value of a fact; fail the check if it was not reported."""
        return (self.all(name) or [self.fail(f"no rank reported `{name}`")])[-1]

    def ranks(self, name: str) -> dict[int, Any]:
        """Return each rank's last value of a fact."""
        return {fact["rank"]: fact[name] for fact in self.facts if name in fact}

    def fail(self, what: str) -> NoReturn:
        """Fail the check, with the command's output as evidence."""
        raise FailedError(f"{what}\n$ {self.line}  (exit code {self.code})\n{self.text[-1500:]}")

    def expect(self, holds: object, what: str) -> None:
        """Fail the check unless `holds` is true."""
        if not holds:
            self.fail(what)

    def expect_text(self, *words: str) -> None:
        """Fail the check unless the output contains all of these words."""
        missing = [word for word in words if word not in self.text]
        self.expect(not missing, f"it does not say {', '.join(map(repr, missing))}")


@dataclass(slots=True)
class Kit:
    """The toolkit of one check.

    Attributes:
        measures: Numbers for the results, by name with the unit.
        scratch: A folder that is removed after the check.
    """

    machine: GpuMachine
    scratch: str
    measures: dict[str, Any] = field(default_factory=dict)
    draw: random.Random = field(default_factory=random.Random)
    _num_runs: int = 0

    @property
    def quick(self) -> bool:
        """Whether devices are pretended, so that sizes and times are minimal."""
        return bool(self.machine.pretended)

    def muster(
        self,
        options: Sequence[object],
        script: str,
        *words: object,
        env: Mapping[str, str | None] | None = None,
        ok: bool | None = True,
        limit_s: float = _RUN_S,
        over_nodes: bool = False,
    ) -> FinishedCommand:
        """Run a script of the kit with `muster run OPTIONS`.

        Args:
            options: Options before the script.
            script: Its name without `.py`.
            words: Arguments of the script.
            env: Variables to set; None removes one.
            ok: Whether it has to succeed or to fail; None: either.
            limit_s: Time limit.
            over_nodes: Use all nodes of the surrounding job; else only this machine.
        """
        words = (*options, os.path.join(SCRIPTS, f"{script}.py"), *words)
        ran = self.command(["run", *words], env=env, limit_s=limit_s, over_nodes=over_nodes)
        impossible = ran.all("impossible")
        if impossible:
            raise ImpossibleError(impossible[0])
        if ok is not None:
            wanted = "succeed" if ok else "fail"
            ran.expect(ran.code is not None and (ran.code == 0) == ok, f"it did not {wanted}")
        return ran

    def command(
        self,
        words: Sequence[object],
        *,
        env: Mapping[str, str | None] | None = None,
        limit_s: float = _RUN_S,
        program: Sequence[str] = ("-m", "torchmuster"),
        over_nodes: bool = False,
    ) -> FinishedCommand:
        """Run muster, or another module of this interpreter; return its output and facts."""
        self._num_runs += 1
        facts = os.path.join(self.scratch, f"facts-{self._num_runs}")
        os.mkdir(facts)
        if words[0] in _MAY_BE_IN_A_JOB and not over_nodes:
            words = [words[0], "--here", *words[1:]]
        argv = [sys.executable, *program, *map(str, words)]
        path = os.path.join(facts, "said")
        began = time.time()
        with open(path, "wb") as said:
            environment, out = self._environment(facts, env), said.fileno()
            # Its own folder: without muster the library keeps snapshots where it is started.
            argv = proc.node_program("dies_with_parent", *argv)
            child = proc.start(argv, env=environment, cwd=facts, stdout=out, stderr=out)
        code = child.wait(limit_s := limit_s * self.machine.patience)
        if code is None:
            for pid in [child.pid, *proc.descendants(child.pid)]:
                proc.kill_quietly(pid)
            child.wait(10.0)
        with open(path, errors="replace") as file:
            text = file.read()
        return FinishedCommand(
            line=" ".join(["python", *argv[1:]]),
            code=code,
            text=text if code is not None else f"{text}\n(ended after {limit_s:g} s)",
            began=began,
            facts=_read_facts(facts),
        )

    def _environment(self, facts: str, more: Mapping[str, str | None] | None) -> dict[str, str]:
        own = proc.own_package_environment()
        own |= {
            "MUSTER_HOME": os.path.join(self.scratch, "home"),
            "TMPDIR": self.scratch,  # so leftovers of a killed check are removed, too
            "GPUCHECK_FACTS": facts,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(self.machine.names),
        }
        for name, value in (more or {}).items():
            own.pop(name, None)
            if value is not None:
                own[name] = value
        return own

    def torchrun(self, num: int, script: str, *words: object, restarts: int = 0) -> FinishedCommand:
        """Run a script of the kit with torchrun at its best settings."""
        options = ["--standalone", "--nproc-per-node", num, "--max-restarts", restarts]
        line = [*options, os.path.join(SCRIPTS, f"{script}.py"), *words]
        ran = self.command(line, program=("-m", "torch.distributed.run"))
        ran.expect(ran.code == 0, "torchrun did not succeed")
        return ran


def _read_facts(folder: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in glob.glob(os.path.join(folder, "*.jsonl")):
        with open(path) as file:
            for line in file:
                with contextlib.suppress(ValueError):  # cut short by a kill
                    found.append(json.loads(line))
    return sorted(found, key=lambda fact: fact["at"])
