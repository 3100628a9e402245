"""Who was started with which number, as torchrun itself prints it."""

import pytest

from unit.diagnose.explain.logs import cause_of, explain, traceback_of

LAUNCH_LOG = (
    "I0314 09:00:00.000000 9 torch/distributed/launcher/api.py:254]   min_nodes                : 2\n"
    "I0314 09:00:00.000000 9 torch/distributed/launcher/api.py:254]   rdzv_backend             : static\n"
    "I0314 09:00:00.000000 9 torch/distributed/launcher/api.py:254]   rdzv_configs             :"
    " {'timeout': '5', 'rank': RANK}\n"
)
WAITED = "torch.distributed.DistStoreError: wait timeout after 5000ms, keys: /none/torchelastic/role_info/1\n"


def told(rank):
    return LAUNCH_LOG.replace("RANK", str(rank)) + WAITED


def test_two_static_launchers_with_one_rank_are_named_with_it(tmp_path):
    first = explain(tmp_path, n1=told(0), n2=told(0)).first
    assert (first.cause, first.confidence.value) == ("wrong-node-rank", "high")
    assert "several nodes have the node rank 0" in first.error


def test_static_rank_beyond_the_count_is_named(tmp_path):
    first = explain(tmp_path, n1=told(0), n2=told(2)).first
    assert (first.cause, first.confidence.value) == ("wrong-node-rank", "high")
    assert "node rank 2 is beyond the 2 nodes" in first.error


STATIC = "{at}I0314 09:00:00.000000 9 torch/distributed/launcher/api.py:254]   {key} : {value}\n"


def launcher(at, rank, nodes=2):
    told = {"min_nodes": nodes, "rdzv_backend": "static", "rdzv_configs": f"{{'rank': {rank}}}"}
    return "".join(STATIC.format(at=at, key=key, value=value) for key, value in told.items())


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
    ended = (
        "W0314 09:05:00.000000 9 x/api.py:723] Received 15 death signal, shutting down workers\n"
    )
    assert cause_of(tmp_path, n1=launcher("", 0) + ended) == "launcher-on-too-few-nodes"
    assert cause_of(tmp_path, n1=launcher("", 0, nodes=1) + ended) == "cancelled"


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
    wait = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"
    one, two = (rows.format(logger=logger, id=name) + wait for name in ("a1", "a2"))
    assert cause_of(tmp_path, n1=one, n2=two) == "different-ids"
