"""Why callers did not get through: who was there, when, and what answered."""

import pytest

from unit.diagnose.explain.logs import cause_of, explain, traceback_of

GAVE_UP = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"
HEAD = (
    "I0314 09:00:00.000000 9 torch/distributed/launcher/api.py:254]   min_nodes                : 2\n"
    "I0314 09:00:00.000000 9 torch/distributed/launcher/api.py:254]   rdzv_configs             : {configs}\n"
)
CALL = (
    "[E0314 {time}.000000000 socket.cpp:1028] [c10d] The client socket has timed out after 4000ms"
    " while trying to connect to (n1, 29500).\n"
)


@pytest.mark.parametrize(
    ("configs", "time", "cause", "confidence"),
    [
        ("{'join_timeout': '5'}", "09:00:20", "store-refused", "medium"),
        ("{'join_timeout': '60'}", "09:00:20", "firewall", "high"),
        ("{'timeout': 900}", "09:09:00", "firewall", "high"),
        ("{'timeout': 900}", "09:10:30", "store-refused", "medium"),
    ],
)
def test_call_after_the_head_gave_up_is_not_blamed_on_a_firewall(
    tmp_path, configs, time, cause, confidence
):
    head = HEAD.replace("{configs}", configs) + GAVE_UP
    first = explain(tmp_path, n1=head, n2=CALL.format(time=time)).first
    assert (first.cause, first.confidence.value) == (cause, confidence)


def test_firewall_is_no_more_than_likely_when_the_times_do_not_tell(tmp_path):
    first = explain(tmp_path, n1=GAVE_UP, n2=CALL.format(time="09:00:20")).first
    assert (first.cause, first.confidence.value) == ("firewall", "medium")


@pytest.mark.parametrize(
    "why",
    [
        "Ping failed, invalid value returned from server. Expected: 4, Got: 759714643",
        "Broken pipe",
        "Connection reset by peer",
    ],
)
def test_answer_of_another_protocol_is_another_service(tmp_path, why):
    line = (
        "[W0314 09:00:00.0 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host n1:29500"
        f" - retrying (try=0, timeout=4000ms, delay=694ms): {why}\n"
    )
    assert cause_of(tmp_path, n1=line, n2=line) == "other-service-on-port"


def test_nodes_that_all_call_a_host_without_a_launcher_are_not_told_of_its_owner(tmp_path):
    call = CALL.format(time="09:00:00").replace("(n1,", "(n3,")
    first = explain(tmp_path, n1=call, n2=call).first
    assert first.cause == "nobody-hosts-the-store"
    assert "n1, n2 all called n3:29500" in first.error


CALLED = "torch.distributed.DistNetworkError: The client socket has timed out after 9000ms while trying to connect to ({host}, 29501)."


def test_worker_of_a_launcher_that_can_not_call_its_store_had_met_the_others(tmp_path):
    failed = "E0314 09:00:00.000000 9 api.py:1] failed (exitcode: 1) local_rank: 0 (pid: 9) of binary: python\n"
    called = traceback_of(CALLED.format(host="n1"), rank=1)
    assert cause_of(tmp_path, n2=called + failed) == "second-store-unreachable"
    assert cause_of(tmp_path, n2=called) == "store-unreachable"


def test_log_that_bears_the_name_of_the_called_is_its_owner_s(tmp_path):
    called = traceback_of(CALLED.format(host="worker-0"))
    assert (
        cause_of(tmp_path, **{"worker-0": called, "worker-1": called}) == "nobody-hosts-the-store"
    )
