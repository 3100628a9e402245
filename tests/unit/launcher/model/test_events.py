"""Numbers as people read them."""

import pytest

from torchmuster.core.model.events import event_of
from torchmuster.core.model.narration import narrate
from torchmuster.launcher.model.events import significant


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (23.4, "23"),
        (1.84, "1.8"),
        (0.05, "0.05"),
        (0.0523, "0.052"),
        (118.0, "120"),
        (9.96, "10"),
        (1.0, "1"),
        (0.996, "1"),
        (0.0, "0"),
    ],
)
def test_a_number_has_two_significant_digits(number, text):
    assert significant(number) == text


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        (
            "network",
            {
                "interface": "hsn0",
                "subnet": "10.10.0.0/24",
                "num_nodes": 2,
                "gbit_per_s": "23",
                "latency_s": 0.0000503,
                "unused": [
                    {"name": "mgmt0", "why": "not reachable from n2"},
                    {"name": "docker0", "why": "same address on 2 nodes"},
                ],
            },
            (
                "network: hsn0 (10.10.0.0/24), 2 nodes, 23 Gbit/s, 0.05 ms;"
                " not used: mgmt0 (not reachable from n2), docker0 (same address on 2 nodes)"
            ),
        ),
        (
            "network",
            {
                "interface": "eth0",
                "subnet": "2 subnets",
                "num_nodes": 3,
                "gbit_per_s": None,
                "latency_s": None,
                "unused": [{"name": f"ib{i}", "why": "not reachable from n3"} for i in range(9)],
            },
            "network: eth0 (2 subnets), 3 nodes; not used: "
            + ", ".join(f"ib{i} (not reachable from n3)" for i in range(8))
            + ", 1 more",
        ),
        (
            "head_replaced",
            {"node": "n2", "before": "n1", "attempt": 3},
            "the head on n1 was lost: n2 takes its place with attempt 3",
        ),
    ],
)
def test_an_event_becomes_a_sentence(name, fields, sentence):
    assert narrate(event_of(name, fields)) == sentence


def test_a_preflight_says_failures_and_warnings_and_no_notes():
    finding = {"error": "e1", "because": ["b"], "hint": "h", "at": "n1", "cause": "c"}
    findings = [finding | {"level": level} for level in ("failure", "warning", "note")]
    said = narrate(event_of("preflight", {"form": "short", "findings": findings}))
    assert said.splitlines() == ["preflight failure: e1 (b); h", "preflight warning: e1 (b); h"]
    assert narrate(event_of("preflight", {"form": "short", "findings": findings[2:]})) is None
    assert narrate(event_of("preflight", {"form": "long", "findings": findings})) is None
