"""Names that are written wrongly, as far as logs alone can tell it."""

import pytest

from torchmuster.diagnose.explain.rules.launch import is_misspelled
from unit.diagnose.explain.logs import explain, traceback_of

TIMED_OUT = "torch.distributed.DistNetworkError: The client socket has timed out after 9000ms while trying to connect to ({host}, 29400)."


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("cn01117", "cn0118", True),
        ("gpu-nod1", "gpu-node2", True),
        ("gpu-ndoe1", "gpu-node2", True),
        ("cn0117", "cn0118", False),
        ("node9", "node10", False),
        ("node-a1", "node-b1", False),
        ("login1", "gpu-node1", False),
    ],
)
def test_name_is_misspelled_where_names_of_one_cluster_do_not_differ_so(name, known, expected):
    assert is_misspelled(name, known) is expected


def test_call_in_vain_to_a_misspelled_name_is_told_with_little_confidence(tmp_path):
    verdict = explain(tmp_path, cn0118=traceback_of(TIMED_OUT.format(host="cn01117")))
    assert (verdict.first.cause, verdict.first.confidence.value) == ("name-not-resolved", "low")
    assert "cn01117" in verdict.first.error
    verdict = explain(tmp_path, cn0118=traceback_of(TIMED_OUT.format(host="cn0117")))
    assert verdict.first.cause != "name-not-resolved"
