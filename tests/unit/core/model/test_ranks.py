from hypothesis import example, given
from hypothesis import strategies as st

from torchmuster.core.model import ranks as numbering

WORLDS = st.dictionaries(st.integers(0, 50), st.integers(1, 16), min_size=1, max_size=12)


def ranks_by_place(workers_by_place):
    return {
        place: range(r.first_rank, r.first_rank + r.num_workers)
        for place, r in numbering.assign_ranks(workers_by_place).items()
    }


@given(WORLDS)
def test_ranks_are_numbered_without_gap_in_the_order_of_the_places(world):
    ranks = ranks_by_place(world)

    in_order = [rank for place in sorted(world) for rank in ranks[place]]
    assert in_order == list(range(sum(world.values())))
    assert {place: len(r) for place, r in ranks.items()} == world


# The two cases of PyTorch's own test of rank assignment by role, and what torch.distributed.elastic says of any other.
@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from("abc")), min_size=1, max_size=9))
@example([(1, "a"), (2, "a"), (3, "a")])
@example([(1, "a"), (2, "b"), (3, "a"), (4, "b"), (5, "c")])
def test_the_ranks_of_a_role_are_numbered_among_themselves(agents):
    ranks = numbering.assign_ranks(
        {place: num for place, (num, _) in enumerate(agents)},
        {place: role for place, (_, role) in enumerate(agents)},
    )

    for role in "abc":
        places = [place for place, agent in enumerate(agents) if agent[1] == role]
        size = sum(agents[place][0] for place in places)
        numbers = [
            ranks[place].first_role_rank + local
            for place in places
            for local in range(agents[place][0])
        ]
        assert numbers == list(range(size))
        assert all(ranks[place].role_world_size == size for place in places)


@given(WORLDS)
def test_node_ranks_are_the_index_among_the_places_that_are_present(world):
    ranks = numbering.assign_ranks(world)

    assert [ranks[place].node_rank for place in sorted(world)] == list(range(len(world)))


@given(WORLDS, st.randoms(use_true_random=False))
def test_a_replacement_gets_the_ranks_of_the_node_that_it_replaces(world, random):
    lost = random.choice(sorted(world))
    replaced = {place: n for place, n in world.items() if place != lost}
    replaced[lost] = world[lost]  # the newcomer comes last

    assert numbering.assign_ranks(replaced) == numbering.assign_ranks(world)


@given(WORLDS, st.randoms(use_true_random=False))
def test_a_loss_moves_only_the_ranks_behind_it(world, random):
    lost = random.choice(sorted(world))
    before = numbering.assign_ranks(world)

    after = numbering.assign_ranks({place: n for place, n in world.items() if place != lost})

    assert lost not in after
    for place, ranks in after.items():
        if place < lost:
            assert ranks.first_rank == before[place].first_rank
            assert ranks.node_rank == before[place].node_rank
        else:
            assert ranks.first_rank == before[place].first_rank - world[lost]
            assert ranks.node_rank == before[place].node_rank - 1


def test_numbers_in_names_are_sorted_as_numbers():
    in_order = ["7", "gpu-2-9", "gpu-2-10", "login", "n1", "n2", "n02x", "n10"]

    assert sorted(sorted(in_order), key=numbering.natural_key) == in_order


@given(st.lists(st.text(st.characters(categories=["L", "N", "P"]), max_size=8)))
def test_any_names_can_be_sorted_and_stay_all_there(names):
    assert sorted(sorted(names, key=numbering.natural_key)) == sorted(names)


def test_a_name_of_superscripts_can_be_sorted_too():
    assert sorted(["²", "n1"], key=numbering.natural_key) == ["n1", "²"]


@given(st.sets(st.integers(0, 9)), st.integers(1, 10))
def test_free_places_are_what_nobody_holds(taken, max_nodes):
    free = numbering.free_places(taken, max_nodes)

    assert free == sorted(set(range(max_nodes)) - taken)


def test_neighbouring_ranks_are_written_as_a_span():
    assert numbering.compress_ranks([5, 0, 2, 1, 7, 8, 2]) == "0-2,5,7-8"
    assert numbering.compress_ranks([3]) == "3"
    assert numbering.compress_ranks([]) == ""


@given(st.sets(st.integers(0, 300)))
def test_compressed_ranks_can_be_read_back(ranks):
    read = set()
    for part in filter(None, numbering.compress_ranks(ranks).split(",")):
        low, _, high = part.partition("-")
        read |= set(range(int(low), int(high or low) + 1))

    assert read == ranks
