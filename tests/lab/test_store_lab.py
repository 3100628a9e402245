"""A firewall that lets the endpoint through and nothing else: the run says so, not after torch's time-out."""

import pytest

from kit.command import MUSTER
from lab.netlab import Host
from lab.trains import SCRIPT, Together, muster_environment

pytestmark = pytest.mark.netns
NAMES = ("10.10.0.1 n1", "10.10.0.2 n2")
WORDS = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:29500")
NEW = 'iifname != "lo" tcp dport != 29500 tcp flags & (syn|ack) == syn'


@pytest.mark.parametrize(
    "verdict", ["drop", pytest.param("reject with tcp reset", marks=pytest.mark.lab)]
)
def test_closed_port_of_the_store_ends_the_run_before_torch_does(make_lab, tmp_path, verdict):
    lab = make_lab([Host("n1", hosts=NAMES), Host("n2", hosts=NAMES)])
    (lab.shared / "train.py").write_text(SCRIPT.replace("seconds=20", "seconds=300"))
    lab.deny("n1", NEW, verdict=verdict)
    words = [*MUSTER, "torchrun", *WORDS, "train.py"]
    run = Together(lab, ["n1", "n2"], words, tmp_path, env=muster_environment(lab))
    codes = run.wait(150.0)  # torch's time-out is 300 s
    said = run.said("n1")
    assert 0 not in codes.values(), said
    assert None not in codes.values(), said
    assert "error: " in said
    assert "hint: " in said
