"""Plays one case as a user would, and judges what the product has promised; it knows nothing of how that is done.

A promise that is broken ends the case. What is promised:

exit       the exit code is that of the page, whatever else was asked for
saved      what is said to be saved is where the restart begins
weights    bit for bit those of a run that nothing has disturbed
ledger     every epoch had every sample once
trace      no traceback of ours
views      what commands say of the run agrees with its record, and with each other
hints      a command that was printed is one that works, and finds what it names
left       no process lives, and no file lies, where the run was
"""

import atexit
import functools
import json
import os
import re
import shlex
import signal
import subprocess

from kit.waiting import wait_until
from pairs.features import HOSTS, whole
from pairs.stage import SESSION, Stage

EPOCHS, STEPS_PER_EPOCH, SAMPLES = 2, 8, 32
FAULT_STEP, NAN_STEP, SLOW_STEP = 5, 3, 10
ENDS = {
    "itself": 0,
    "INT": 130,
    "TERM": 75,
    "TERM TERM": 75,
    "HUP": 129,
    "cancel": 143,
    "kill": -signal.SIGKILL,
}
LEFT_S = 30.0
# Of torch's compiler, and of readers of data that were killed.
OF_OTHERS = ("torchinductor_", "pymp-")
READING = ("status", "logs", "explain", "report", "ps", "top", "stacks")
NAMING = ("restart", "cancel", "replay")  # what they name is looked at
OURS = re.compile(r'^ *(?:\[[^]]*\]:? *)*File "[^"]*/src/torchmuster/(?!train/)', re.MULTILINE)
HINT = re.compile(r"(?:hint|continue with|next): (.*)|(`muster [^`\n]+`)")
COMMAND = re.compile(r"\bmuster ([a-z]+(?: [^;`()\n]+)?)")


class BrokenError(Exception):
    """A promise was broken.

    Attributes:
        promise: Its name.
        typed: All that was typed until then, with what it said.
    """

    def __init__(self, promise, why, typed=()):
        super().__init__(f"{promise}: {why}")
        self.promise, self.typed = promise, tuple(typed)


def play(case):
    """Play a case.

    Raises:
        BrokenError: A promise was broken.
    """
    with Stage(case) as stage:
        try:
            Play(stage).all()
        except BrokenError as error:
            error.typed = tuple(stage.typed)
            raise
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise BrokenError("time", str(error)[:300], stage.typed) from error


class Play:
    """One case on its stage; `all` plays it, the rest judges a promise each."""

    def __init__(self, stage):
        self.stage, self.case = stage, stage.case

    def all(self):
        stage, case = self.stage, self.case
        running = stage.begin(_script(case, stage.out))
        if case["look"] == "during" or case["end"] != "itself":
            self._wait_reached(running)
        if case["look"] == "during":
            hold = stage.out / "hold"
            hold.touch()
            self._look_during()
            hold.unlink()
        if case["end"] != "itself":
            self._end(running)
        (stage.out / "go").touch()
        said = stage.keep(running.wait())
        self.judge_code(said)
        self._nothing_lives()
        self.judge_views(said)
        if self._is_refused_again():
            self._judge_refusal()
        else:
            if said.code != 0:
                self._go_on()
            self.judge_work()
        self.judge_words()
        if (ended := stage.end_session()) is not None and ended.code != 0:
            raise BrokenError("exit", f"session end: {ended.code}: {ended.text}")
        self.judge_left()

    def judge_left(self):
        """See that nothing of the case lives or lies on the machine."""
        if not self._slots_outlive():
            self._wait_for_ends()
        found = os.listdir(self.stage.temporary)
        if lying := [name for name in found if not name.startswith(OF_OTHERS)]:
            raise BrokenError("left", f"files: {lying}")

    def _wait_for_ends(self):
        try:
            wait_until(lambda: not self.stage.left(), "ends", LEFT_S)
        except AssertionError:
            raise BrokenError("left", f"after {LEFT_S:g} s: {self.stage.left()}") from None

    def _wait_reached(self, running):
        mark = self.stage.out / "reached"
        wait_until(lambda: mark.exists() or running.process.poll() is not None, "step 10", 90.0)
        if running.process.poll() is not None:
            said = self.stage.keep(running.said())
            raise BrokenError("exit", f"{said.code} before its end: {said.err[-600:]}")

    def _look_during(self):
        name = self.name
        one = {"sweep": f"{name}.0", "workflow": f"{name}/train"}.get(self.case["what"], name)
        live = [("status", name), ("ps",), ("top", name, "--once"), ("logs", one), ("stacks", one)]
        if not (self.case["what"] == "sweep" and self._single_members()):  # these have no head
            live.append(("exec", one, "--", "true"))
        for words in live:
            said = self.stage.type(*words)
            ended = words[0] == "exec" and "the attempt has ended" in said.text
            if ended and said.code == 137 and self.case["fault"] == "hang":
                continue  # on a loaded machine the hang comes to its limit while we look
            if said.code != 0 or (words[0] == "stacks" and "rank 0" not in said.out):
                raise BrokenError("views", f"{words} of what runs: {said.code}: {said.text}")

    def _single_members(self):
        return self.case["workers"] == "1" and self.case["where"] == "here"

    def _end(self, running):
        end = self.case["end"]
        if end == "cancel":
            if (said := self.stage.type("cancel", self.name)).code != 0:
                raise BrokenError("exit", f"cancel: {said.code}: {said.text}")
            return
        pid = running.process.pid
        if self.case["detach"] == "yes":
            pid = json.loads((self._run_dir() / "owner.json").read_text())["pid"]
        for word in end.split():
            os.kill(pid, signal.Signals[f"SIG{word.upper()}"])

    def judge_code(self, said):
        case = self.case
        wanted = ENDS[case["end"]]
        if case["what"] in ("sweep", "workflow") and wanted == 75:
            wanted = 143  # they have parts that have not begun, so that they are cancelled
        if case["what"] == "sweep":
            wanted = self._code_of_sweep(wanted)
        if case["end"] == "kill" and case["detach"] == "yes":
            return  # `wait` has only what the record has
        if said.code != wanted:
            raise BrokenError("exit", f"{said.code}, not {wanted}: {said.err[-1500:]}")

    def _code_of_sweep(self, wanted):
        fails = self.case["fault"] != "none" and self._single_members()
        return 1 if wanted == 0 and fails else wanted

    def _nothing_lives(self):
        if self.case["where"] != "session" and not self._slots_outlive():
            self._wait_for_ends()

    def _slots_outlive(self):
        """Say whether sessions are left that end by themselves, five minutes later (docs/sweeps.md)."""
        case = self.case
        return case["what"] == "sweep" and case["where"] in HOSTS and case["end"] == "kill"

    def judge_views(self, ended):
        stage, name = self.stage, self.name
        if self.case["detach"] == "yes" or self.case["end"] == "kill":
            code = stage.type("wait", name).code
            if self.case["end"] != "kill" and code != ended.code:
                raise BrokenError("views", f"wait: {code}, the command: {ended.code}")
        status = self._json("status", name, "--json")
        top = self._json("top", name, "--json")
        state, texts = status["state"], {}
        parts = [f"{name}.0", f"{name}.1"] if self.case["what"] == "sweep" else [name]
        views = [(word, name) for word in ("status", "explain", "report")]
        for words in [*views, ("ps",), *(("logs", part) for part in parts)]:
            said = stage.type(*words)
            texts[words[0]] = texts.get(words[0], "") + said.out
            # 4: `explain` has found no failure; a member that was ended before its first attempt has no logs
            may_be_empty = words[0] == "explain" or (said.code == 4 and not self._attempts(words))
            if said.code not in ((0, 4) if may_be_empty else (0,)):
                raise BrokenError("views", f"{words}: {said.code}: {said.text[-600:]}")
        if top.get("state") != state:
            raise BrokenError("views", f"top says {top.get('state')}, status {state}")
        if not re.search(rf"^state +{state}\b", texts["status"], re.MULTILINE | re.IGNORECASE):
            raise BrokenError("views", f"status in words and in JSON ({state}): {texts['status']}")
        row = next((line for line in texts["ps"].splitlines() if line.startswith(f"{name} ")), "")
        if state not in row:
            raise BrokenError("views", f"ps says `{row}`, status {state}")
        result = self._run_dir() / "result.json"  # a workflow's has the words of its file's format
        if (
            self.case["what"] != "workflow"
            and result.exists()
            and json.loads(result.read_text())["state"] != state
        ):
            raise BrokenError("views", f"the record and status ({state}): {result.read_text()}")
        if "rank 0 begins at" not in texts["logs"]:
            raise BrokenError("views", f"logs without what rank 0 said: {texts['logs']}")

    def _attempts(self, words):
        return words[0] != "logs" or self._json("status", words[1], "--json")["attempts"]

    def _json(self, *words):
        said = self.stage.type(*words)
        try:
            return json.loads(said.out)
        except ValueError:
            raise BrokenError(
                "views", f"{words}: {said.code}: no JSON: {said.text[-600:]}"
            ) from None

    def _is_refused_again(self):
        """Say whether a restart can't find what was saved: hosts that share nothing keep it, and members go back to theirs."""
        case = self.case
        return case["where"] == "apart" and case["what"] != "sweep" and case["end"] != "itself"

    def _judge_refusal(self):
        saved, name = self._saved(), self.name
        said = self.stage.type("restart", name)
        if said.code != 2 or f"runs/{self._run_dir().name}/snapshots" not in said.text:
            raise BrokenError("saved", f"restart of {saved}: {said.code}: {said.text[-900:]}")

    def _go_on(self):
        """Restart it as the product says, and see that it ends well."""
        stage, name = self.stage, self.name
        saved = self._saved()
        hint = self._restart_hint(name)
        said = stage.type(*hint)
        if said.code != 0:
            raise BrokenError("exit", f"{hint}: {said.code}: {said.text[-1500:]}")
        self.judge_saved(saved)

    def judge_saved(self, saved):
        """See that what was restarted began where it was saved, or later: a save may be younger than the word on it."""
        for name, step in saved.items():
            began = [int(n) for n in re.findall(r"begins at step (\d+)", self._log_after(name))]
            if step is not None and not any(step <= n for n in began):
                raise BrokenError(
                    "saved", f"{name}: {step} was saved, the restart began at {began}"
                )

    def _restart_hint(self, name):
        """Return the words of the command that the product tells who wants to go on."""
        for said in reversed(self.stage.typed):
            if found := re.search(r"\bmuster (restart [-\w./]+)", said.text):
                return found[1].split()
        raise BrokenError(
            "hints", f"nothing says how to go on with {name}: {self.stage.typed[-1].text}"
        )

    def _saved(self):
        """Return what each training is said to have saved: its name -> step."""
        name, what = self.name, self.case["what"]
        if what == "sweep":
            names = [f"{name}.{n}" for n in range(2)]
        else:
            names = [f"{name}/train" if what == "workflow" else name]
        found = {}
        for one in names:
            said = self.stage.type("status", one, "--json")
            training = (json.loads(said.out).get("training") or {}) if said.code == 0 else {}
            found[one] = training.get("saved_step")
        return found

    def _log_after(self, name):
        """Return what the ranks of a training have said since it was restarted."""
        again = {"sweep": name, "workflow": f"{self.name}/train"}.get(self.case["what"], self.name)
        return self.stage.type("logs", again).out

    def judge_work(self):
        case, stage = self.case, self.stage
        lrs = ("0.1", "0.2") if case["what"] == "sweep" else ("0.1",)
        for lr in lrs:
            folder = stage.out / f"lr-{lr}"
            found = {path.name: path.read_text() for path in folder.glob("weights-*")}
            if len(set(found.values())) != 1:
                raise BrokenError("weights", f"not one for all ranks: {found}")
            if set(found.values()) != {undisturbed(case["nan"], case["model"], len(found), lr)}:
                raise BrokenError(
                    "weights",
                    f"of {len(found)} ranks, lr {lr}: not those of a run without all this",
                )
        records = [*stage.home.rglob("training.jsonl")]
        epochs = [e for path in records for e in _events(path) if e["event"] == "epoch"]
        if len(epochs) < EPOCHS * len(lrs):
            raise BrokenError("ledger", f"{len(epochs)} epochs in {records}")
        for epoch in epochs:
            if epoch["ledger"] != {"samples": SAMPLES, "lost": 0, "twice": 0, "whole": True}:
                raise BrokenError("ledger", f"{epoch}")

    def judge_words(self):
        for said in self.stage.typed:
            if "stacks" in said.argv:
                continue  # our threads are in them
            if found := OURS.search(said.text):
                raise BrokenError(
                    "trace", f"{shlex.join(said.argv)}: {said.text[found.start() - 600 :][:2500]}"
                )
        seen = set()
        for said in tuple(self.stage.typed):
            for line in HINT.finditer(said.text):
                for words in COMMAND.findall(line[0]):
                    if words not in seen:
                        seen.add(words)
                        self._judge_hint(words, said)

    def _judge_hint(self, text, by):
        words = shlex.split(text.strip().rstrip(".,:"))
        if words[0] not in READING:
            named_there = [word for word in words[1:2] if not word.startswith("-")]
            is_named = words[0] in NAMING and named_there  # else it is only spoken of
            words = ["status", *named_there] if is_named else []
        worked = (said.argv[3:] == tuple(words) for said in self.stage.typed if said.code == 0)
        if not words or any(worked):
            return
        if (said := self.stage.type(*words)).code in (2, 4, 70):
            printed = f"printed by `{shlex.join(by.argv[2:6])}`"
            raise BrokenError("hints", f"muster {text}, {printed}: {said.code}: {said.text[-600:]}")

    def _run_dir(self):
        return self.stage.run_dirs()[-1]

    @property
    def name(self):
        """What commands call the run that the user has started last."""
        return re.sub(r"^\d{8}-\d{6}-", "", self._run_dir().name)


@functools.cache
def undisturbed(nan, model, world, lr):
    """Return the digest of the weights of a run that nothing disturbs, with as many ranks."""
    stage = _held_stage()
    out = stage.code / "-".join((nan, model, str(world), lr))
    words = ("run", "--session", SESSION, "--nodes", "1", "--nproc-per-node", str(world))
    script = _script(whole({"nan": nan, "model": model}), out)
    said = stage.type(*words, "train.py", *script, "--lr", lr)
    found = {path.read_text() for path in out.glob("*/weights-*")}
    if said.code != 0 or len(found) != 1:
        raise BrokenError("weights", f"of a run without anything: {said.text}")
    return found.pop()


@functools.cache
def _held_stage():
    """Return a stage with a session, for as long as this process lives: a run there takes a second."""
    stage = Stage(whole({"where": "session"}))
    atexit.register(stage.__exit__)
    return stage.__enter__()


def _script(case, out):
    """Return the script's own words."""
    words = ["--epochs", EPOCHS, "--every", case["every"], "--out", out]
    if case["memory"] != "none":
        words += ["--memory", case["memory"]]
    if case["readers"] != "0":
        words += ["--num-workers", case["readers"]]
    words += ["--sharded"] * (case["model"] == "sharded")
    words += ["--evaluate"] * (case["evaluate"] == "yes")
    words += ["--tensorboard", "tb"] * (case["more"] == "tensorboard")
    if case["nan"] != "none":
        words += ["--nan-at", NAN_STEP, "--on-nan", case["nan"]]
    if case["fault"] != "none":
        step = STEPS_PER_EPOCH if case["place"] == "evaluation" else FAULT_STEP
        words += ["--how", case["fault"], "--die-at", step, "--place", case["place"]]
        words += ["--die-rank", case["rank"]]
    if case["look"] == "during" or case["end"] != "itself":
        words += ["--slow-from", SLOW_STEP]
    return [str(word) for word in words]


def _events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
