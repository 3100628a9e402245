"""Workflow files in pods without any extension: those of the tutorial, data at URLs, credentials, files, a barrier."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from kit.waiting import wait_until
from lab.kubernetes.house import ADDRESS

TESTS = Path(__file__).parents[2]
OSMO = TESTS / "seeds" / "osmo"
TRAIN = TESTS.parent / "examples" / "workflows" / "train_ddp.py"
# What a machine of two cores has, in place of 8 GPUs, 16 cores and 30 GiB.
SMALLER = (
    ("gpu: 8", "gpu: 1"),
    ("cpu: 16", "cpu: 1"),
    ("30Gi", "1Gi"),
    ("--nproc_per_node 8", "--nproc_per_node 1"),
)
# A barrier of the kind that the tutorial names: one TCP server on rank 0, nothing else.
BARRIER = """
import argparse, socket, time
parser = argparse.ArgumentParser()
parser.add_argument("--num_nodes", type=int)
parser.add_argument("--connect")
parser.add_argument("--rank", type=int)
options = parser.parse_args()
if options.rank == 0:
    with socket.create_server(("", 12344)) as server:
        for _ in range(options.num_nodes - 1):
            with server.accept()[0] as other:
                other.sendall(b"OK")
while options.rank:
    try:
        with socket.create_connection((options.connect, 12344)) as call:
            assert call.recv(2) == b"OK"
            break
    except ConnectionRefusedError:
        time.sleep(0.1)
"""
S3_PORT = 9000
LIMIT_S = 400.0  # three torchruns on a machine of two cores
S3 = f"""
import threading
from moto.server import ThreadedMotoServer
ThreadedMotoServer(ip_address="{ADDRESS}", port={S3_PORT}, verbose=False).start()
threading.Event().wait()
"""
KEYS = "[hub]\ntoken = 'not-to-be-seen'\n"
LOGIN = {
    "AWS_ENDPOINT_URL": f"http://{ADDRESS}:{S3_PORT}",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
}
WITH_LOGIN = 'spec.template.spec.containers.0.envFrom=[{"secretRef": {"name": "s3"}}]'
STORE = f"""\
import os, sys, s3fs
store = s3fs.S3FileSystem(endpoint_url="http://{ADDRESS}:{S3_PORT}", key="testing", secret="testing")
"""
WITH_DATA = """\
workflow:
  name: data
  groups:
  - name: work
    tasks:
    - name: first
      lead: true
      command: [bash]
      args: [/tmp/first.sh]
      credentials: {hub: {TOKEN: token}}
      inputs:
      - url: s3://bucket/in
      outputs:
      - url: s3://bucket/out
      files:
      - path: /tmp/first.sh
        contents: |
          tr a-z A-Z < {{input:0}}/words.txt > {{output}}/words.txt
          cat /tmp/beside.txt
          echo the secret has $(printf %s "$TOKEN" | wc -c) letters
      - path: /tmp/beside.txt
        localpath: beside.txt
    - name: second
      command: ["bash", "-c"]
      args: ["echo the other task has ${TOKEN:-no secret}; ls /tmp/first.sh || echo no file"]
"""


def seed(bench, name, changes=()):
    """Write one of the tutorial's files, with its script, as `w.yaml`."""
    text = (OSMO / f"{name}.yaml").read_text()
    for old, new in (*SMALLER, *changes):
        text = text.replace(old, new)
    (bench.user.folder / "w.yaml").write_text(text)
    shutil.copy(TRAIN, bench.user.folder / "train.py")
    bench.site(memory=None, claims=None)


def submit(bench, *words):
    """Submit `w.yaml`; return the process."""
    return bench.start_words("w", "submit", "w.yaml", "--on", "kubernetes", *words)


def test_the_two_node_file_of_the_tutorial_trains(bench):
    seed(bench, "two_nodes")
    assert bench.end(submit(bench), LIMIT_S) == 0
    assert len(re.findall(r"epoch 9: loss .* on 2 workers", bench.said)) == 1
    for task in ("master", "worker"):
        assert (bench.run_dir / "tasks" / task / "output/models/snapshot.pth").is_file()
    bench.wait_nothing_left()


def test_the_template_of_the_tutorial_trains_on_three_pods_and_keeps_the_leads_models(bench):
    seed(bench, "any_nodes")
    run = submit(bench, "--set", "n_nodes=3", "n_gpus_per_node=1")
    assert bench.end(run, LIMIT_S) == 0
    assert len(re.findall(r"epoch 9: loss .* on 3 workers", bench.said)) == 1
    said = bench.must("dataset", "info", "my-trained-model", "--json")
    assert json.loads(said)["version"] == 1
    assert [file["path"] for file in json.loads(said)["files"]] == ["models/snapshot.pth"]
    bench.wait_nothing_left()


def test_the_barrier_of_the_tutorial_holds_all_pods_for_one_that_is_late(bench):
    fragment = (OSMO / "barrier.yaml").read_text()
    line = re.search(r"python3 /tmp/osmo_barrier.py .*", fragment)[0]
    gate = bench.shared / "gate"
    late = f"if [ {{{{item}}}} = 1 ]; then until [ -e {gate} ]; do sleep 0.1; done; fi"
    script = [late, "echo at {{item}}", line, "echo past {{item}}", ""]
    files = "      - path: /tmp/osmo_barrier.py\n        localpath: osmo_barrier.py\n"
    launch, ending = "          # Launch training\n", "    {% endfor %}"
    indented = "\n".join(f"          {word}" for word in script).rstrip(" ")
    seed(bench, "any_nodes", [(launch, indented), (ending, files + ending)])
    (bench.user.folder / "osmo_barrier.py").write_text(BARRIER)
    bench.site(memory=None)
    run = submit(bench, "--set", "n_gpus_per_node=1")
    bench.wait_said("[master] at 0")
    bench.wait_said("[worker_1] + ")
    assert "past" not in bench.said.replace("+ echo past", "")
    gate.touch()
    assert bench.end(run, LIMIT_S) == 0
    # Lines of two pods come when they come: that nobody was past before is seen above.
    assert "[worker_1] at 1" in bench.said
    assert "[master] past 0" in bench.said
    assert "[worker_1] past 1" in bench.said
    bench.wait_nothing_left()


@pytest.fixture(scope="module")
def s3(cluster):
    """Return a function that runs lines of Python with `store`, an S3 server that pods and this machine reach."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    cluster.start_words("s3", [sys.executable, "-c", S3])

    def call(lines):
        return cluster.run([sys.executable, "-c", f"{STORE}{lines}"])

    wait_until(lambda: call("store.ls('')").returncode == 0, "the S3 server")
    return call


def read_at_urls(bench, s3, text, keys):
    """Run a workflow whose data is on the S3 server; see that its output is there, and no secret anywhere here."""
    s3("store.makedirs('bucket', exist_ok=True); store.pipe('bucket/in/words.txt', b'some words')")
    home, folder = bench.user.home, bench.user.folder
    home.mkdir(exist_ok=True)
    path = home / "credentials.toml"
    path.touch(mode=0o600)
    path.write_text(keys)
    (folder / "beside.txt").write_text("a file beside the workflow\n")
    (folder / "w.yaml").write_text(text)
    assert bench.end(submit(bench), LIMIT_S) == 0
    assert s3("print(store.cat('bucket/out/words.txt'))").stdout.strip() == "b'SOME WORDS'"
    assert s3("store.rm('bucket/out', recursive=True)").returncode == 0
    written = [one for one in home.rglob("*") if one.is_file() and one != path]
    assert not [one for one in written if b"not-to-be-seen" in one.read_bytes()]
    assert "not-to-be-seen" not in bench.said
    bench.wait_nothing_left()


def test_data_comes_from_urls_and_goes_there_and_credentials_reach_their_task_alone(bench, s3):
    bench.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3"}, "stringData": LOGIN}
    )
    bench.site(memory="1Gi", directives=[WITH_LOGIN])
    read_at_urls(bench, s3, WITH_DATA, KEYS)
    assert "a file beside the workflow" in bench.said
    assert "the secret has 14 letters" in bench.said
    assert "the other task has no secret" in bench.said
    assert "no file" in bench.said


def test_data_at_urls_is_read_and_written_with_the_credentials_of_its_task(bench, s3):
    bench.site(memory="1Gi")
    names = ", ".join(f"{name}: {name}" for name in LOGIN)
    text = WITH_DATA.replace("{TOKEN: token}", f"{{TOKEN: token}}, s3: {{{names}}}")
    login = {**LOGIN, "AWS_SECRET_ACCESS_KEY": "also-not-to-be-seen"}  # the server takes any
    lines = "".join(f"{name} = '{value}'\n" for name, value in login.items())
    read_at_urls(bench, s3, text, f"{KEYS}[s3]\n{lines}")
