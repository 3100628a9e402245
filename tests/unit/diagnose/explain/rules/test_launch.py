"""Who was started with which number, as torchrun itself prints it."""

import pytest

from torchmuster.diagnose.explain.rules.launch import is_misspelled
from unit.diagnose.explain.logs import TOLD_TO_END, cause_of, explain, failed, traceback_of

GAVE_UP = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"
WAITED = "torch.distributed.DistStoreError: wait timeout after 5000ms, keys: /none/torchelastic/role_info/1\n"
STATIC = "{at}I0314 09:00:00.000000 9 torch/distributed/launcher/api.py:254]   {key} : {value}\n"


def launcher(at, rank, nodes=2):
    told = {"min_nodes": nodes, "rdzv_backend": "static"}
    told |= {"rdzv_configs": {"timeout": "5", "rank": rank}}
    return "".join(STATIC.format(at=at, key=key, value=value) for key, value in told.items())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (0, "several nodes have the node rank 0"),
        (2, "node rank 2 is beyond the 2 nodes"),
    ],
)
def test_a_static_rank_that_is_there_twice_or_beyond_the_count_is_named(tmp_path, other, words):
    first = explain(tmp_path, n1=launcher("", 0) + WAITED, n2=launcher("", other) + WAITED).first
    assert (first.cause, first.confidence.value) == ("wrong-node-rank", "high")
    assert words in first.error


@pytest.mark.parametrize(("ranks", "cause"), [((1, 1), "wrong-node-rank"), ((0, 1), "unknown")])
def test_launchers_of_one_file_are_told_apart_by_their_labels(tmp_path, ranks, cause):
    text = launcher("0: ", ranks[0]) + launcher("1: ", ranks[1])
    assert cause_of(tmp_path, job=text) == cause


def test_script_that_waits_for_ranks_in_its_own_store_misses_ranks_not_launchers(tmp_path):
    error = "torch.distributed.DistStoreError: Timed out after 13 seconds waiting for clients. 3/4 clients joined."
    verdict = explain(tmp_path, job=traceback_of(error))
    assert verdict.first.cause == "ranks-never-joined"
    assert "3 of 4" in verdict.first.error


def test_launcher_that_was_ended_while_it_waited_alone_had_waited_for_other_nodes(tmp_path):
    assert cause_of(tmp_path, n1=launcher("", 0) + TOLD_TO_END) == "launcher-on-too-few-nodes"
    assert cause_of(tmp_path, n1=launcher("", 0, nodes=1) + TOLD_TO_END) == "cancelled"


@pytest.mark.parametrize(
    "logger",
    [
        "[2026-03-14 09:00:00,702] torch.distributed.launcher.api: [INFO] ",
        "[2026-03-14 09:00:00,702][torch.distributed.launcher.api][INFO] - ",
        "INFO:torch.distributed.launcher.api:",
    ],
)
def test_settings_are_read_behind_the_names_of_loggers(tmp_path, logger):
    rows = "{logger}  min_nodes        : 2\n{logger}  run_id           : {id}\n"
    one, two = (rows.format(logger=logger, id=name) + GAVE_UP for name in ("a1", "a2"))
    assert cause_of(tmp_path, n1=one, n2=two) == "different-ids"


# Names that are written wrongly, as far as logs alone can tell it.


CALLED = "torch.distributed.DistNetworkError: The client socket has timed out after 9000ms while trying to connect to ({host}, 29400)."


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
    verdict = explain(tmp_path, cn0118=traceback_of(CALLED.format(host="cn01117")))
    assert (verdict.first.cause, verdict.first.confidence.value) == ("name-not-resolved", "low")
    assert "cn01117" in verdict.first.error
    verdict = explain(tmp_path, cn0118=traceback_of(CALLED.format(host="cn0117")))
    assert verdict.first.cause != "name-not-resolved"


# Why callers did not get through: who was there, when, and what answered.


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
    told = {"min_nodes": 2, "rdzv_configs": configs}
    head = "".join(STATIC.format(at="", key=key, value=value) for key, value in told.items())
    first = explain(tmp_path, n1=head + GAVE_UP, n2=CALL.format(time=time)).first
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


def test_worker_of_a_launcher_that_can_not_call_its_store_had_met_the_others(tmp_path):
    called = traceback_of(CALLED.format(host="n1"), rank=1)
    assert cause_of(tmp_path, n2=called + failed()) == "second-store-unreachable"
    assert cause_of(tmp_path, n2=called) == "store-unreachable"


def test_log_that_bears_the_name_of_the_called_is_its_owner_s(tmp_path):
    called = traceback_of(CALLED.format(host="worker-0"))
    said = {"worker-0": called, "worker-1": called}
    assert cause_of(tmp_path, **said) == "nobody-hosts-the-store"
