"""Numbers that nobody seeded differ between ranks and between attempts."""


def test_no_generator_gives_two_ranks_or_two_attempts_the_same(numbers):
    assert len(numbers) == 8
    drawn = {name: {str(one[name]) for one in numbers} for name in numbers[0]}
    for shared in ("Python's hashes", "an address", "OMP_NUM_THREADS"):  # test_differences.py
        del drawn[shared]
    assert {name: len(values) for name, values in drawn.items()} == dict.fromkeys(drawn, 8)
