from dataclasses import replace

import pytest

from torchmuster.diagnose.plan.scaling import (
    Arrival,
    Cluster,
    NetworkLink,
    Work,
    layouts,
    predict,
    suggest,
    with_gradients_of,
)

WORK = Work(gradient_bytes=5.2e9, forward_s=0.15, backward_s=0.30, optimizer_s=0.02)
SLOW = Cluster(per_node=1, between=NetworkLink(latency_s=60e-6, bytes_per_s=1.1e9))
NVLINK = NetworkLink(latency_s=3e-6, bytes_per_s=360e9)


def words(changes):
    return " / ".join(change.what for change in changes)


def test_on_a_slow_network_all_changes_are_offered_the_best_first():
    found = suggest(WORK, SLOW, 16, 4)
    gains = [change.gain for change in found]
    assert gains == sorted(gains, reverse=True)
    for what in ("4 micro-steps", "bf16", "25GbE"):
        assert what in words(found)


def test_the_gain_is_more_work_in_the_same_time():
    (bf16,) = [change for change in suggest(WORK, SLOW, 16, 4) if "bf16" in change.what]
    half = predict(with_gradients_of(WORK, 0.5), SLOW, 16)
    assert bf16.gain == pytest.approx(predict(WORK, SLOW, 16).step_s / half.step_s)


def test_what_is_done_already_is_not_offered():
    assert "bf16" not in words(suggest(WORK, SLOW, 16, 2))


def test_changes_that_bring_nothing_are_not_offered():
    fast = Cluster(per_node=1, between=NetworkLink(latency_s=0.0, bytes_per_s=1e13))
    assert suggest(WORK, fast, 16, 4) == []


def test_one_node_alone_needs_no_change():
    assert suggest(WORK, SLOW, 1, 4) == []


def test_fewer_nodes_are_offered_where_the_inside_is_known():
    cluster = replace(SLOW, per_node=2, inside=NVLINK)
    assert "half the nodes, 4 on each" in words(suggest(WORK, cluster, 4, 4))
    assert "half the nodes" not in words(suggest(WORK, SLOW, 4, 4))
    assert "half the nodes" not in words(suggest(WORK, cluster, 3, 4))


def test_who_shards_is_told_what_ddp_would_bring():
    assert "DDP instead of FSDP" in words(suggest(replace(WORK, is_sharded=True), SLOW, 4, 2))


def test_four_gpus_on_one_machine_beat_four_machines_on_a_slow_network():
    cluster = replace(SLOW, per_node=4, inside=NVLINK)
    found = layouts(WORK, cluster, 4)
    assert [(one.num_nodes, one.per_node) for one in found] == [(1, 4), (2, 2), (4, 1)]
    steps = [one.prediction.step_s for one in found]
    assert steps == sorted(steps)
    assert steps[-1] > 5 * steps[0]
    assert all(one.prediction.num_workers == 4 for one in found)


def test_smaller_gradients_come_at_the_same_moments():
    work = replace(WORK, arrivals=(Arrival(size_bytes=5.2e9, ready_s=0.2),))
    half = with_gradients_of(work, 0.5)
    assert half.gradient_bytes == 2.6e9
    assert half.arrivals == (Arrival(size_bytes=2.6e9, ready_s=0.2),)
