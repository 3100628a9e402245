import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.records import end_of_rank
from kit.values import run_result, worker_end
from torchmuster.core.model.events import event_of
from torchmuster.core.model.failure import EndKind, PythonError
from torchmuster.core.model.narration import ShownOutput, narrate, shortened
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report

MISSING = [{"node": f"n{i}", "why": "no agent has connected"} for i in range(1, 11)]
SENTENCES = [
    (
        "waiting",
        {"missing": MISSING[1:2], "num_missing": 1, "wanted": 2, "left_s": 595.4},
        "waiting for 1 of 2 nodes: n2 (no agent has connected); 9 min 55 s left",
    ),
    (
        "attempt_started",
        {"attempt": 1, "world_size": 1, "num_nodes": 1, "why": "after SIGKILL"},
        "attempt 1: 1 worker on 1 node (after SIGKILL)",
    ),
    (
        "attempt_started",
        {"attempt": 2, "world_size": 4, "num_nodes": 2, "why": "n2 has come"},
        "attempt 2: 4 workers on 2 nodes (n2 has come)",
    ),
    (
        "attempt_failed",
        {
            "attempt": 0,
            "what": "SIGKILL in rank 3 on n2",
            "restarts_left": 1,
            "cause": end_of_rank(3, tail=["step 7"]),
        },
        "attempt 0 ended: SIGKILL in rank 3 on n2; 1 restart left\n  [rank 3] step 7",
    ),
    (
        "attempt_failed",
        {"attempt": 0, "what": "exit code 3 in rank 0 on n1", "restarts_left": None},
        "attempt 0 ended: exit code 3 in rank 0 on n1",
    ),
    (
        "agent_refused",
        {"host": "n9", "why": "it has another secret"},
        "refused an agent from n9: it has another secret; the run continues",
    ),
    (
        "early_end",
        {"ranks": "0", "num_running": 1},
        "rank 0 ended with exit code 0 while 1 other runs",
    ),
    (
        "early_end",
        {"ranks": "0-1", "num_running": 2},
        "ranks 0-1 ended with exit code 0 while 2 others run",
    ),
    ("node_lost", {"node": "n2", "why": "its agent has gone"}, "n2 was lost: its agent has gone"),
    ("newcomer", {"node": "n3"}, "n3 has joined; it takes part from the next attempt on"),
    ("shrunk", {"num_nodes": 1, "wanted": 2}, "the world shrinks to 1 of 2 nodes"),
    ("notice", {"text": "logs are being lost"}, "logs are being lost"),
    ("stopping", {"text": "the user asked to stop"}, "the user asked to stop"),
]


@pytest.mark.parametrize(("name", "fields", "sentence"), SENTENCES)
def test_an_event_becomes_a_sentence(name, fields, sentence):
    assert narrate(event_of(name, fields)) == sentence


def test_of_many_missing_nodes_eight_are_named():
    fields = {"missing": MISSING, "num_missing": 10, "wanted": 10, "left_s": 1.0}
    sentence = narrate(event_of("waiting", fields))

    assert sentence.count("no agent has connected") == 8
    assert sentence.endswith("n8 (no agent has connected) and 2 more; 1 s left")


def test_the_first_attempt_of_a_run_is_not_worth_a_sentence():
    fields = {"attempt": 0, "world_size": 4, "num_nodes": 2, "why": "start"}
    assert narrate(event_of("attempt_started", fields)) is None


@pytest.mark.parametrize(
    ("name", "fields"), [("worker_ended", {"attempt": 0, "rank": 1}), ("notice", {"text": ""})]
)
def test_what_only_the_record_needs_has_no_sentence(name, fields):
    assert narrate(event_of(name, fields)) is None


# A traceback is shown once.


FRAMES = """Traceback (most recent call last):
  File "/w/train.py", line 9, in <module>
    main()
  File "/w/train.py", line 5, in main
    raise ValueError(f"no {rank}")
"""
BOOM = FRAMES + "ValueError: no 0\n"
CHAIN = f"""{BOOM}
During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/w/train.py", line 12, in <module>
    clean_up()
OSError: disk
"""
SYNTAX = '  File "/w/train.py", line 1\n    a = = 1\n        ^\nSyntaxError: invalid syntax\n'


@pytest.fixture
def shown():
    return ShownOutput()


@pytest.fixture
def after_boom(shown):
    """What has shown a first traceback of rank 0."""
    shown.filter(0, 2, BOOM)
    return shown


def test_the_first_traceback_passes_as_it_is_written(shown):
    assert [shown.filter(0, 2, text) for text in ("half", " line\n", BOOM, "x\n")] == [
        "half",
        " line\n",
        BOOM,
        "x\n",
    ]


def test_of_the_same_traceback_of_another_rank_the_last_line_is_shown(after_boom):
    assert after_boom.filter(1, 2, f"a\n{FRAMES}ValueError: no 1\nb\n") == (
        "a\nValueError: no 1 (the same traceback as before)\nb\n"
    )


def test_torch_s_prefix_of_each_line_makes_no_other_traceback(shown):
    shown.filter(0, 2, "".join(f"[rank0]: {line}\n" for line in BOOM.splitlines()))

    again = shown.filter(1, 2, "".join(f"[rank1]: {line}\n" for line in BOOM.splitlines()))
    assert again == "ValueError: no 0 (the same traceback as before)\n"


def test_a_rank_that_logs_what_it_survives_is_left_as_it_is(shown):
    assert [shown.filter(0, 2, BOOM), shown.filter(0, 2, BOOM)] == [BOOM, BOOM]


def test_in_a_new_attempt_it_is_a_repetition(after_boom):
    after_boom.begin_attempt()

    assert after_boom.filter(0, 2, BOOM) == "ValueError: no 0 (the same traceback as before)\n"


def test_another_traceback_is_shown_whole(after_boom):
    other = BOOM.replace("line 5", "line 6")
    third = BOOM.replace("ValueError:", "KeyError:")

    assert after_boom.filter(1, 2, other) + after_boom.filter(1, 2, third) == other + third


def test_a_chain_is_repeated_in_its_last_lines(shown):
    shown.filter(0, 2, CHAIN)

    assert shown.filter(1, 2, CHAIN + "end\n") == (
        "ValueError: no 0 (the same traceback as before)\n"
        "OSError: disk (the same traceback as before)\nend\n"
    )


def test_a_syntax_error_has_no_first_line_and_is_shown_once_too(shown):
    assert shown.filter(0, 2, SYNTAX) == SYNTAX
    assert shown.filter(1, 2, SYNTAX) == (
        "SyntaxError: invalid syntax (the same traceback as before)\n"
    )


def test_what_was_held_back_and_never_ended_is_given_at_the_end(after_boom):
    assert after_boom.filter(1, 2, FRAMES + "Valu") == ""
    assert after_boom.rest() == [(1, 2, FRAMES + "Valu")]
    assert after_boom.rest() == []


@given(st.lists(st.sampled_from([BOOM, CHAIN, SYNTAX, "x\n", "\n", "10%\r20%\n"])), st.data())
def test_for_any_chunking_the_only_rank_of_the_only_attempt_loses_nothing(texts, data):
    text, shown, seen = "".join(texts), ShownOutput(), ""
    while text:
        size = data.draw(st.integers(1, 200))
        seen += shown.filter(0, 2, text[:size])
        text = text[size:]
    seen += "".join(text for _, _, text in shown.rest())

    assert seen.rstrip("\n") == "".join(texts).rstrip("\n")


def end(traceback):
    error = PythonError(type_name="ValueError", message="no 0", where="t", traceback=traceback)
    return worker_end(EndKind.EXCEPTION, error=error)


def result_of(traceback):
    report = Report(error="rank 0 raised it", because=("a", *traceback.splitlines(), "then rank 1"))
    return run_result(RunState.FAILED, 1, report=report, cause=end(traceback))


def test_a_verdict_has_the_whole_traceback_unless_it_is_on_the_terminal():
    result, shown = result_of(CHAIN), ShownOutput()
    assert shortened(result.report, result, shown) == result.report
    shown.filter(0, 2, CHAIN)

    assert shortened(result.report, result, shown).because == (
        "a",
        "the traceback above, which ends:",
        '  File "/w/train.py", line 12, in <module>',
        "    clean_up()",
        "OSError: disk",
        "then rank 1",
    )


def test_a_traceback_that_a_message_has_printed_counts_as_shown(shown):
    shown.note(CHAIN)

    assert shown.has(CHAIN)
    assert not shown.has(BOOM)
