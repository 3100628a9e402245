"""Who was started with which number, as torchrun itself prints it."""

from unit.doctor.explain.logs import explain

TOLD = (
    "I0314 09:00:00.000000 9 torch/distributed/launcher/api.py:254]   min_nodes                : 2\n"
    "I0314 09:00:00.000000 9 torch/distributed/launcher/api.py:254]   rdzv_backend             : static\n"
    "I0314 09:00:00.000000 9 torch/distributed/launcher/api.py:254]   rdzv_configs             :"
    " {'timeout': '5', 'rank': RANK}\n"
)
WAITED = "torch.distributed.DistStoreError: wait timeout after 5000ms, keys: /none/torchelastic/role_info/1\n"


def told(rank):
    return TOLD.replace("RANK", str(rank)) + WAITED


def test_two_static_launchers_with_one_rank_are_named_with_it(tmp_path):
    first = explain(tmp_path, n1=told(0), n2=told(0)).first
    assert (first.cause, first.confidence.value) == ("wrong-node-rank", "high")
    assert "several nodes have the node rank 0" in first.sentence


def test_static_rank_beyond_the_count_is_named(tmp_path):
    first = explain(tmp_path, n1=told(0), n2=told(2)).first
    assert (first.cause, first.confidence.value) == ("wrong-node-rank", "high")
    assert "node rank 2 is beyond the 2 nodes" in first.sentence
