"""Of two first pods of a run on a volume, the later one has it; a volume that is full stops nobody."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from torchmuster.core import proc
from torchmuster.core.model import codec
from torchmuster.core.net.address import new_secret, write_secret
from torchmuster.kubernetes.node.order import AGAIN_CODE
from unit.kubernetes.pods.conftest import order_of

OWNER = """
import sys, time
from torchmuster.core.model import codec
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.kubernetes.firstpod.conduct import FirstPodClaim
import json

FirstPodClaim(codec.from_plain(PodOrder, json.loads(sys.argv[1])), sys.argv[2]).take()
print("has it", flush=True)
time.sleep(60)
"""


@pytest.fixture
def order(tmp_path):
    return replace(order_of(), home=str(tmp_path / "home"), has_volume=True, num_pods=1)


@pytest.fixture
def key(tmp_path):
    path = str(tmp_path / "key")
    write_secret(path, new_secret())
    return path


def start(order, key, pod):
    words = [sys.executable, "-c", OWNER, json.dumps(codec.to_plain(order)), key]
    environment = {**os.environ, "MUSTER_POD_UID": pod}
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_earlier_of_two_owners_on_a_volume_ends_before_the_later_one_begins(order, key):
    with start(order, key, "one") as earlier:
        assert earlier.stdout.readline() == "has it\n"
        with start(order, key, "two") as later:
            assert later.stdout.readline() == "has it\n"
            assert earlier.wait(5) == AGAIN_CODE
            assert "another first pod has this run now" in earlier.stderr.read()
            assert proc.read_process(later.pid) is not None
            later.kill()


def test_a_volume_that_can_not_be_written_stops_nobody(order, key, tmp_path):
    (tmp_path / "home").write_text("no folder")
    with start(order, key, "one") as owner:
        assert owner.stdout.readline() == "has it\n"
        owner.kill()
