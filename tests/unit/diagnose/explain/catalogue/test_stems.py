"""A stem is in every line that its expression fits, and all stems of a line are found."""

import random
import re
import string

import pytest

from torchmuster.diagnose.explain.catalogue.index import StemFinder, shorten_stems, stems_of


@pytest.mark.parametrize(
    ("wording", "line"),
    [
        (r"ibv_modify_qp failed with (?:110|error \w+)", "x ibv_modify_qp failed with 110"),
        (r"(?:no space|disk quota) (?:left|exceeded)", "disk quota exceeded"),
        (r"[Oo]ut of (?P<what>memory|tokens)+", "Out of memorymemory"),
        (r"a?b*(?:never)?always", "always"),
    ],
)
def test_a_line_that_fits_has_a_stem(wording, line):
    assert re.search(wording, line)
    assert any(stem in line.lower() for stem in stems_of(wording))


@pytest.mark.parametrize("wording", [r"x+", r"(?:word)?", r"(?:whole|x)", r"ab \d+ cd"])
def test_an_expression_without_a_sure_word_is_refused(wording):
    with pytest.raises(ValueError, match="4 letters"):
        stems_of(wording)


def test_all_stems_of_a_text_are_found_also_where_they_overlap():
    finder = StemFinder(["modi", "modify", "ownership", "shipping", "port"])
    assert finder.find("modify") == {"modi", "modify"}
    assert finder.find("ownershipping") == {"ownership", "shipping"}
    assert finder.find("nothing") == set()


def test_ends_of_stems_begin_with_few_letters_and_each_is_within_its_stem():
    stems = {f"{a}{b}{c}tion" for a in "abcdefgh" for b in "lmnopqrs" for c in "aeiou"} | {"nan"}
    ends = shorten_stems(stems)
    assert all(any(stem.endswith(end) for end in ends) for stem in stems)
    assert all(len(end) >= 4 or end in stems for end in ends)
    assert len({end[0] for end in ends}) == 2


def test_search_for_a_thousand_stems_is_not_slower_than_for_a_hundred():
    dice = random.Random(1)

    def words(num_words):
        return ["".join(dice.choices(string.ascii_lowercase, k=8)) for _ in range(num_words)]

    line = " ".join(words(14))

    def steps(num_stems):  # how many places of a line a search has to look at closely
        beginnings = {end[0] for end in shorten_stems(words(num_stems))}
        return sum(letter in beginnings for letter in line)

    assert steps(1000) <= 2 * steps(100)
    assert steps(1000) < 0.6 * len(line)
