"""A run in pods whose client is slow, cut off or forbidden: what the pods have made comes here, or the end says what is missing.

On a pretended cluster whose pods really run, with a `kubectl port-forward` that a file breaks.
"""

import json
import os
import signal
import sys
import time

import pytest

from kit.command import ran
from kit.waiting import wait_until
from places import live

SCRIPT = """
import os, sys, time
for epoch in range(3):
    print(f"epoch {epoch}", flush=True)
with open(f"{sys.argv[1]}/begun", "w"):
    pass
while os.path.exists(f"{sys.argv[1]}/hold"):
    time.sleep(0.02)
print("epoch 3", flush=True)
with open("model.txt", "w") as file:
    file.write("weights")
"""
EPOCHS = [f"epoch {number}" for number in range(4)]


class Lab(live.Lab):
    """Runs of one pod or two, whose script waits while there is a file `hold`."""

    def __init__(self, folder, network):
        super().__init__(folder, network)
        (self.code / "train.py").write_text(SCRIPT)

    def words(self, *more, nodes=2):
        start = ("run", "--on", "kube", "--nodes", str(nodes), "--run-id", "r", "--start", "fresh")
        return (*start, *more, "train.py", str(self.folder))

    def follow(self, **more):
        """Start the run in the background; what it shows goes to a file."""
        self.shown = self.folder / "shown"
        with open(self.shown, "wb") as out:
            return self.popen(*self.words(**more), stdout=out, stderr=out)

    def epochs(self):
        return [line for line in self.shown.read_text().splitlines() if line.startswith("epoch")]

    def has_begun(self):
        return (self.folder / "begun").exists()

    def hold(self):
        (self.folder / "hold").touch()

    def release(self):
        (self.folder / "hold").unlink()

    def has_volume(self):
        """Keep runs where all pods see them."""
        volume = self.folder / "volume"
        volume.mkdir()
        site = self.code / "muster.toml"
        lines = [line for line in site.read_text().splitlines() if not line.startswith("home")]
        lines += [f'claims = ["v:{volume}"]', f'home = "{volume}/muster"']
        site.write_text("\n".join(lines))

    def kill(self, pod):
        """Kill the newest pod whose name begins so."""
        found = [one for one in self.pods() if one["metadata"]["name"].startswith(pod)]
        os.kill(int(found[-1]["metadata"]["annotations"]["pid"]), signal.SIGKILL)

    def models(self, nodes=1):
        """Return what the run's nodes have made, as it came here."""
        output = self.run_dir() / "output"
        return [(output / f"r-{node}" / "model.txt").read_text() for node in range(nodes)]

    def begin(self, **more):
        """Start a run that is held, up to its first lines; return its client."""
        self.hold()
        client = self.follow(**more)
        wait_until(lambda: self.epochs() == EPOCHS[:3], "the first lines", 60)
        return client


@pytest.fixture
def lab(tmp_path):
    with live.live_cluster(Lab, tmp_path, num_nodes=2) as made:
        yield made


def test_a_client_that_connects_late_gets_everything(lab):
    lab.breaks("sleep 17")
    done = lab(*lab.words())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == EPOCHS
    assert lab.models(2) == ["weights"] * 2
    assert lab.jobs() == []


@pytest.mark.lab
def test_a_client_that_is_cut_off_at_the_end_gets_everything_later(lab):
    client = lab.begin()
    lab.breaks("cut")
    lab.release()
    # The other pod ends at once, the first one waits.
    wait_until(lambda: sorted(map(str, lab.ends())) == ["Completed", "None"], "the end", 60)
    assert client.poll() is None
    lab.breaks("")
    assert client.wait(60) == 0
    assert lab.epochs() == EPOCHS
    assert lab.models() == ["weights"]
    assert lab.jobs() == []


def test_a_right_that_is_away_for_a_while_costs_no_line_and_no_file(lab):
    client = lab.begin()
    lab.breaks("forbidden")
    wait_until(lambda: "can't be reached from here" in lab.shown.read_text(), "the fall-back", 60)
    lab.release()
    wait_until(lambda: lab.epochs() == EPOCHS, "the last line, by the log", 60)
    lab.breaks("")
    assert client.wait(90) == 0
    assert lab.epochs() == EPOCHS
    assert lab.models() == ["weights"]


def test_a_first_pod_that_nobody_calls_ends_after_its_time_and_the_job_stays(lab):
    site = lab.code / "muster.toml"
    site.write_text(site.read_text() + 'take_within = "2s"\n')
    lab.breaks("cut")
    client = lab.follow(nodes=1)
    assert client.wait(90) == 15
    shown = lab.shown.read_text()
    assert "its results, logs and files did not come here" in shown
    assert "they went with pod r-0-" in shown
    assert lab.jobs() == ["r"]
    assert lab("cancel", "r").returncode == 0
    wait_until(lambda: not lab.jobs(), "the end of the Job")


def test_who_looks_from_another_machine_takes_nothing_away(lab):
    lab.hold()
    client = lab.follow(nodes=1)
    wait_until(lab.has_begun, "its start", 60)
    lab.breaks("cut")
    lab.release()
    wait_until(lambda: any(lab.state.glob("r/*/own")) and client.poll() is None, "the run")
    client.send_signal(signal.SIGSTOP)  # or it may be the first
    lab.breaks("")
    status = lab("status", "r", home="other")
    client.send_signal(signal.SIGCONT)
    assert status.returncode == 0, status.stderr
    assert client.wait(60) == 0
    assert lab.models() == ["weights"]


def test_what_a_killed_client_has_not_taken_is_fetched_later(lab):
    client = lab.begin(nodes=1)
    early = lab("fetch", "r")
    assert early.returncode == 1
    assert "r has not ended" in early.stderr
    client.kill()
    client.wait()
    lab.release()
    wait_until(lambda: any(lab.state.glob("**/pod-ended.json")), "the end", 60)
    assert lab("fetch", "r").returncode == 0
    assert lab.models() == ["weights"]
    assert '"state": "succeeded"' in lab("status", "r", "--json").stdout
    assert lab.jobs() == []
    assert "all of r is here" in lab("fetch", "r").stderr


def test_what_lies_on_a_volume_is_fetched_by_a_pod_that_reads_it(lab):
    lab.has_volume()
    lab.breaks("cut")
    client = lab.follow(nodes=1)
    assert client.wait(90) == 15
    lab.breaks("")
    done = lab("fetch", "r")
    assert done.returncode == 0, done.stderr
    assert lab.models() == ["weights"]
    assert lab.jobs() == []


WORKFLOW = """
workflow:
  name: two
  groups:
  - name: first
    tasks:
    - name: make
      lead: true
      command: ["sh", "-c", "echo made; echo weights > {{output}}/model.txt"]
  - name: second
    tasks:
    - name: use
      lead: true
      inputs:
      - task: make
      command: ["cat", "{{input:0}}/model.txt"]
"""


@pytest.mark.lab
def test_the_record_of_a_workflow_that_did_not_come_is_fetched_from_its_volume(lab):
    lab.has_volume()
    (lab.code / "two.yaml").write_text(WORKFLOW)
    lab.breaks("cut")
    done = lab("submit", "two.yaml", "--on", "kube", "--run-id", "w")
    assert done.returncode != 0
    assert "did not come here" in done.stderr
    lab.breaks("")
    fetched = lab("fetch", "w")
    assert fetched.returncode == 0, fetched.stderr
    assert "made\n" in lab("logs", "w", "make").stdout
    (model,) = (lab.folder / "volume").glob("**/tasks/make/output/model.txt")
    assert model.read_text() == "weights\n"  # outputs of tasks stay on the volume
    outcome = lab.run_dir("w") / "groups" / "first" / "result.json"
    assert json.loads(outcome.read_text())["state"] == "COMPLETED"
    assert lab.jobs() == []


@pytest.mark.lab
def test_files_of_a_sweep_that_nobody_followed_are_fetched_from_its_volume(lab):
    lab.has_volume()
    words = ("sweep", "--on", "kube", "--run-id", "s", "--grid", "lr=1,2", "--start", "fresh")
    (lab.code / "one.py").write_text(
        "import sys\nopen('model.txt', 'w').write(sys.argv[1])\nprint('step 1')\n"
    )
    done = lab(*words, "--detach", "one.py", "--", "{lr}")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: lab.ends() == ["Completed"] * 2, "both members", 60)
    assert lab("status", "s", home="other").returncode == 0  # it takes the logs of the pods
    assert lab("fetch", "s", home="other").returncode == 0
    fetched = lab("fetch", "s")
    assert fetched.returncode == 0, fetched.stderr
    made = lab.run_dir("s").glob("members/*/output/*/model.txt")
    assert sorted(path.read_text() for path in made) == ["1", "2"]
    for member in ("s.0", "s.1"):
        logs = [lab("logs", member, home=home).stdout for home in ("home", "other")]
        assert logs == ["step 1\n"] * 2


@pytest.mark.lab
def test_a_function_gets_its_result_through_a_client_that_connects_late(lab):
    lab.breaks("sleep 12")
    code = "import torchmuster\ndef f(x): return x * 2\n"
    code += "if __name__ == '__main__':\n    print(torchmuster.launch(f, 21, on='kube', nodes=2).results())\n"
    (lab.code / "call.py").write_text(code)
    done = ran([sys.executable, "call.py"], env=lab.env(), cwd=lab.code)
    assert done.returncode == 0, done.stderr
    assert "[42, 42]" in done.stdout


def test_a_run_whose_files_nobody_could_take_is_refused_or_runs_by_an_option_that_says_so(lab):
    lab.breaks("forbidden")
    refused = lab(*lab.words(nodes=1))
    assert refused.returncode == 2, refused.stderr
    assert "nobody could take what the run makes out of its pods" in refused.stderr
    assert lab.jobs() == []
    done = lab(*lab.words("--take-within", "0s", nodes=1))
    assert done.returncode == 15
    assert "files, logs and record go with the pods" in done.stderr
    assert done.stdout.splitlines() == EPOCHS
    assert lab.jobs() == ["r"]


@pytest.mark.lab
def test_a_secret_that_somebody_deletes_is_made_again(lab):
    client = lab.begin()
    secret = lab.state / "r" / "secret.json"
    before = json.loads(secret.read_text())
    secret.unlink()
    lab.kill("r-1-")
    wait_until(secret.exists, "the Secret", 60)
    assert json.loads(secret.read_text())["data"] == before["data"]
    told = "the Secret r was deleted by somebody: it was made again"
    wait_until(lambda: told in lab.shown.read_text(), "the word on it")
    lab.release()
    assert client.wait(90) == 0


TRAINING = """
workflow:
  name: nested
  tasks:
  - name: train
    nodes: 2
    nproc_per_node: 1
    script: say.py
    args: ["--out={{output}}/parts/x"]
"""
SAY = """
import os, sys
rank, out = os.environ["RANK"], sys.argv[1].removeprefix("--out=").removesuffix("/x")
print("rank", rank, flush=True)
for name in (f"{out}/part-{rank}", f"{out}/../same"):
    with open(name, "w") as file:
        file.write(rank)
"""


HELD = """
workflow:
  name: held
  tasks:
  - name: wait
    command: ["sh", "-c", "touch {folder}/begun; while [ -e {folder}/hold ]; do sleep 0.1; done"]
"""


def test_record_and_output_of_a_task_of_two_nodes_come_with_those_of_its_group(lab):
    (lab.code / "say.py").write_text(SAY)
    (lab.code / "nested.yaml").write_text(TRAINING)
    done = lab("submit", "nested.yaml", "--on", "kube", "--run-id", "w")
    assert done.returncode == 0, done.stderr
    (training,) = lab.run_dir("w").glob("tasks/train/training/attempt-0/*")
    assert json.loads((training / "result.json").read_text())["state"] == "succeeded"
    assert "attempt_started" in (training / "events.jsonl").read_text()
    logs = [path.read_text() for path in (training / "logs").glob("**/*") if path.is_file()]
    assert {"rank 0\n", "rank 1\n"} <= {*logs}
    assert not [*training.glob("secret*")]
    output = lab.run_dir("w") / "tasks" / "train" / "output"
    made = {str(path.relative_to(output)): path.read_text() for path in output.rglob("*[0-9e]")}
    assert made == {"parts/part-0": "0", "parts/part-1": "1", "same": "0"}


def test_files_of_other_pods_come_also_after_the_first_one_was_made_again(lab):
    client = lab.begin()
    wait_until(lambda: any(lab.state.glob("r/r-1-*/own/muster/records/r/events.jsonl")), "a copy")
    lab.kill("r-0-")
    wait_until(lambda: "attempt 1: " in lab.shown.read_text(), "the next attempt", 90)
    lab.release()
    assert client.wait(90) == 0
    assert lab.models(2) == ["weights"] * 2


@pytest.mark.lab
def test_another_machine_knows_when_a_workflow_was_submitted_and_how_it_was_cancelled(lab):
    (lab.code / "held.yaml").write_text(HELD.format(folder=lab.folder))
    lab.hold()
    client = lab.popen("submit", "held.yaml", "--on", "kube", "--run-id", "w")
    wait_until(lab.has_begun, "its start", 60)
    asked = time.time()
    time.sleep(2.0)  # by which the two times differ below: a Job tells whole seconds
    assert lab("status", "w", home="other").returncode == 0
    (seen,) = json.loads(lab("ps", "--json", home="other").stdout)
    assert seen["submitted"] <= asked
    assert lab("cancel", "w", home="other").returncode == 0
    assert client.wait(60) == 143
    for home in ("home", "other"):
        ended = json.loads(lab("status", "w", "--json", home=home).stdout)
        assert (ended["state"], ended["result"]["exit_code"]) == ("cancelled", 143), home
        assert ended["result"]["elapsed_s"] >= 2.0, home
        (group,) = ended["groups"]
        assert {group["state"]} | {task["state"] for task in group["tasks"]} == {"FAILED_CANCELED"}
