from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.diagnose.plan.scaling import (
    BETWEEN,
    INSIDE,
    Arrival,
    Cluster,
    NetworkLink,
    Work,
    ddp_waits,
    layouts,
    make_buckets,
    next_faster,
    parse_link,
    predict,
    sharded_exposed_s,
    slowest_of,
    suggest,
    with_gradients_of,
)

MIB = 1 << 20
# 1.3 billion parameters with gradients in bf16, on 16 workers.
WORK = Work(gradient_bytes=2.6e9, forward_s=0.15, backward_s=0.30, optimizer_s=0.02)


def on(bytes_per_s, latency_s=0.0, **more):
    between = NetworkLink(latency_s=latency_s, bytes_per_s=bytes_per_s)
    return Cluster(**{"per_node": 1, "between": between, **more})


@pytest.mark.parametrize(
    ("bytes_per_s", "latency_s", "sum_s", "efficiency"),
    [(1.1e9, 60e-6, 4.43, 0.10), (6e9, 40e-6, 0.81, 0.43), (22e9, 5e-6, 0.22, 0.99)],
    ids=["10 GbE", "100 GbE by TCP", "200 Gbit/s RDMA"],
)
def test_the_worked_example_of_three_networks(bytes_per_s, latency_s, sum_s, efficiency):
    cluster = on(bytes_per_s, latency_s)
    assert cluster.all_reduce_s(WORK.gradient_bytes, 16) == pytest.approx(sum_s, abs=0.005)
    assert predict(WORK, cluster, 16).efficiency == pytest.approx(efficiency, abs=0.007)


def test_a_ring_of_two_sends_the_vector_once_each_way():
    assert on(100.0, 0.5).all_reduce_s(200.0, 2) == pytest.approx(2 * 0.5 + 2.0)


def test_one_worker_waits_for_nothing():
    alone = predict(replace(WORK, spread=0.2), on(1.0, 1.0), 1)
    assert (alone.step_s, alone.efficiency, alone.communication_s) == (WORK.alone_s, 1.0, 0.0)


def test_two_levels_take_the_time_of_inside_and_of_between():
    inside = NetworkLink(latency_s=0.0, bytes_per_s=400.0)
    cluster = on(100.0, per_node=4, inside=inside)
    # Scatter and gather inside: 3/4 of S each; between the nodes: 2/2 of S.
    assert cluster.all_reduce_s(800.0, 2) == pytest.approx(2 * 0.75 * 800 / 400 + 800 / 100)
    assert cluster.all_reduce_s(800.0, 1) == pytest.approx(2 * 0.75 * 800 / 400)


def test_more_workers_of_a_node_use_more_of_its_adapters():
    cluster = on(100.0, per_node=4, inside=NetworkLink(latency_s=0.0, bytes_per_s=1e12), adapters=4)
    assert cluster.all_reduce_s(800.0, 2) == pytest.approx(800 / 400)
    assert replace(cluster, per_node=1).all_reduce_s(800.0, 2) == pytest.approx(800 / 100)


def test_a_flat_ring_counts_all_workers_but_on_one_node_only_the_inside():
    inside = NetworkLink(latency_s=0.0, bytes_per_s=50.0)
    cluster = on(100.0, 1.0, per_node=2, inside=inside, is_flat=True)
    assert cluster.all_reduce_s(400.0, 2) == pytest.approx(2 * 3 * 1.0 + 2 * 3 / 4 * 400 / 100)
    assert cluster.all_reduce_s(400.0, 1) == pytest.approx(400 / 50)


def test_even_gradients_fill_a_small_bucket_and_then_large_ones():
    buckets = make_buckets(replace(WORK, gradient_bytes=60 * MIB))
    assert [bucket.size_bytes / MIB for bucket in buckets] == [1, 25, 25, 9]
    assert buckets[0].ready_s == pytest.approx(WORK.backward_s / 60)
    assert buckets[-1].ready_s == pytest.approx(WORK.backward_s)


def test_measured_gradients_close_a_bucket_when_it_holds_its_size_or_more():
    sizes = [(0.1, 0.5), (0.2, 3), (0.3, 20), (0.4, 10), (0.5, 1)]
    arrivals = tuple(Arrival(size_bytes=size * MIB, ready_s=ready) for ready, size in sizes)
    buckets = make_buckets(replace(WORK, arrivals=arrivals))
    assert [(b.ready_s, b.size_bytes / MIB) for b in buckets] == [(0.2, 3.5), (0.4, 30), (0.5, 1)]


THREE = [Arrival(size_bytes=1, ready_s=ready) for ready in (0.1, 0.2, 0.3)]


def test_sums_that_fit_beside_the_backward_pass_cost_only_the_last_one():
    assert ddp_waits(THREE, [0.05, 0.05, 0.05], 0.3, 0.0) == (pytest.approx(0.05), 0.0)


def test_sums_wait_for_the_sums_before_them():
    assert ddp_waits(THREE, [1.0, 1.0, 1.0], 0.3, 0.0)[0] == pytest.approx(0.1 + 3.0 - 0.3)


def test_a_processor_that_sums_computes_later():
    buckets = [Arrival(size_bytes=10, ready_s=0.1), Arrival(size_bytes=10, ready_s=0.3)]
    exposed_s, late_s = ddp_waits(buckets, [0.1, 0.1], 0.3, 0.001)
    # The first sum is wholly beside the computation, the second behind it.
    assert late_s == pytest.approx(0.01)
    assert exposed_s == pytest.approx(0.1)


def test_accumulation_pays_for_one_sum_in_several_micro_steps():
    cluster = on(1e9)
    once = predict(WORK, cluster, 8)
    often = predict(replace(WORK, accumulation=4), cluster, 8)
    assert often.exposed_s == pytest.approx(once.exposed_s)
    assert often.step_s == pytest.approx(4 * 0.45 + 0.02 + once.exposed_s)


def test_sharding_moves_half_as_much_again_as_a_sum():
    cluster = on(1e9)
    sharded = predict(replace(WORK, is_sharded=True), cluster, 8)
    all_reduce_s = cluster.all_reduce_s(WORK.gradient_bytes, 8)
    assert sharded.communication_s == pytest.approx(1.5 * all_reduce_s)


def test_sharding_on_a_slow_network_waits_for_all_of_its_volume():
    idle = replace(WORK, forward_s=0.0, backward_s=1e-9, optimizer_s=0.0)
    assert sharded_exposed_s(idle, lambda size: size / 1e9) == pytest.approx(3 * 2.6)


def test_sharding_on_a_fast_network_waits_for_the_first_and_the_last_block_only():
    fast_s = 1e-4 * 32
    waits = sharded_exposed_s(WORK, lambda size: fast_s * size / WORK.gradient_bytes)
    assert waits == pytest.approx(2 * fast_s / 32, rel=0.5)


def test_the_slowest_of_more_workers_is_slower():
    assert slowest_of(1) == 0
    assert slowest_of(2) == pytest.approx(0.564, abs=0.03)
    assert slowest_of(100) == pytest.approx(2.51, abs=0.03)


def test_steps_that_differ_cost_the_wait_for_the_slowest():
    cluster = on(1e12)
    even, uneven = (predict(replace(WORK, spread=spread), cluster, 16) for spread in (0.0, 0.1))
    assert uneven.step_s - even.step_s == pytest.approx(WORK.alone_s * 0.1 * slowest_of(16))


@given(
    nodes=st.integers(1, 2000),
    size=st.floats(1, 1e12),
    rate=st.floats(1e6, 1e12),
    latency_s=st.floats(0, 0.1),
    sharded=st.booleans(),
)
def test_no_network_makes_a_step_shorter_and_none_is_paid_twice(
    nodes, size, rate, latency_s, sharded
):
    work = replace(WORK, gradient_bytes=size, is_sharded=sharded, bucket_bytes=max(25e6, size / 50))
    found = predict(work, on(rate, latency_s), nodes)
    assert work.alone_s <= found.step_s
    # FSDP's blocks pay the latency more often than one transfer does.
    blocks = 32 * 3 * nodes * latency_s if sharded else 0.0
    assert found.exposed_s <= (found.communication_s + blocks) * (1 + 1e-9) + 1e-12


HEAVY = replace(WORK, gradient_bytes=5.2e9)
SLOW = on(1.1e9, 60e-6)
NVLINK = NetworkLink(latency_s=3e-6, bytes_per_s=360e9)


def words(changes):
    return " / ".join(change.what for change in changes)


def test_on_a_slow_network_all_changes_are_offered_the_best_first():
    found = suggest(HEAVY, SLOW, 16, 4)
    gains = [change.gain for change in found]
    assert gains == sorted(gains, reverse=True)
    for what in ("4 micro-steps", "bf16", "25GbE"):
        assert what in words(found)


def test_the_gain_is_more_work_in_the_same_time():
    (bf16,) = [change for change in suggest(HEAVY, SLOW, 16, 4) if "bf16" in change.what]
    half = predict(with_gradients_of(HEAVY, 0.5), SLOW, 16)
    assert bf16.gain == pytest.approx(predict(HEAVY, SLOW, 16).step_s / half.step_s)


def test_what_is_done_already_is_not_offered():
    assert "bf16" not in words(suggest(HEAVY, SLOW, 16, 2))


def test_changes_that_bring_nothing_are_not_offered():
    assert suggest(HEAVY, on(1e13), 16, 4) == []


def test_one_node_alone_needs_no_change():
    assert suggest(HEAVY, SLOW, 1, 4) == []


def test_fewer_nodes_are_offered_where_the_inside_is_known():
    cluster = replace(SLOW, per_node=2, inside=NVLINK)
    assert "half the nodes, 4 on each" in words(suggest(HEAVY, cluster, 4, 4))
    assert "half the nodes" not in words(suggest(HEAVY, SLOW, 4, 4))
    assert "half the nodes" not in words(suggest(HEAVY, cluster, 3, 4))


def test_who_shards_is_told_what_ddp_would_bring():
    assert "DDP instead of FSDP" in words(suggest(replace(HEAVY, is_sharded=True), SLOW, 4, 2))


def test_four_gpus_on_one_machine_beat_four_machines_on_a_slow_network():
    cluster = replace(SLOW, per_node=4, inside=NVLINK)
    found = layouts(HEAVY, cluster, 4)
    assert [(one.num_nodes, one.per_node) for one in found] == [(1, 4), (2, 2), (4, 1)]
    steps = [one.prediction.step_s for one in found]
    assert steps == sorted(steps)
    assert steps[-1] > 5 * steps[0]
    assert all(one.prediction.num_workers == 4 for one in found)


def test_smaller_gradients_come_at_the_same_moments():
    work = replace(HEAVY, arrivals=(Arrival(size_bytes=5.2e9, ready_s=0.2),))
    half = with_gradients_of(work, 0.5)
    assert half.gradient_bytes == 2.6e9
    assert half.arrivals == (Arrival(size_bytes=2.6e9, ready_s=0.2),)


@pytest.mark.parametrize(
    ("text", "bytes_per_s", "latency_s"),
    [
        ("25Gbit/s,50us", 25e9 / 8, 50e-6),
        ("8Gbit/s,1us", 1e9, 1e-6),
        ("3GB/s, 20us", 3e9, 20e-6),
        ("100 Mbps,1ms", 100e6 / 8, 1e-3),
        ("1.5TB/s,900ns", 1.5e12, 900e-9),
    ],
)
def test_a_rate_and_a_latency_are_a_link(text, bytes_per_s, latency_s):
    link = parse_link(text)
    assert (link.bytes_per_s, link.latency_s) == pytest.approx((bytes_per_s, latency_s))


@pytest.mark.parametrize(
    "text", ["", "25Gbit/s", ",50us", "25GB,50us", "0GB/s,1us", "x,y", "-1GB/s,1us"]
)
def test_anything_else_is_none(text):
    assert parse_link(text) is None


def test_no_known_network_is_faster_than_its_name_says():
    for name, known in BETWEEN.items():
        line = float("".join(c for c in name.split("-")[0] if c.isdigit())) * 1e9 / 8
        assert 0.2 * line < known.link.bytes_per_s < line


def test_the_next_faster_network_has_twice_the_bandwidth():
    name, link = next_faster(BETWEEN["10GbE"].link)
    assert name == "25GbE"
    assert link.bytes_per_s >= 2 * BETWEEN["10GbE"].link.bytes_per_s
    assert next_faster(BETWEEN["slingshot200-tcp"].link)[0] == "slingshot200 or HDR200"
    assert next_faster(NetworkLink(latency_s=0.0, bytes_per_s=1e12)) is None


def test_links_inside_are_faster_than_the_slowest_between():
    assert all(k.link.bytes_per_s > BETWEEN["1GbE"].link.bytes_per_s for k in INSIDE.values())
