from hypothesis import given
from hypothesis import strategies as st

from kit.values import run_result, worker_end
from torchmuster.core.model.failure import EndKind, PythonError
from torchmuster.core.model.narration import ShownOutput, shortened
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report

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


def test_the_first_traceback_passes_as_it_is_written():
    shown = ShownOutput()

    assert [shown.filter(0, 2, text) for text in ("half", " line\n", BOOM, "x\n")] == [
        "half",
        " line\n",
        BOOM,
        "x\n",
    ]


def test_of_the_same_traceback_of_another_rank_the_last_line_is_shown():
    shown = ShownOutput()
    shown.filter(0, 2, BOOM)

    assert shown.filter(1, 2, f"a\n{FRAMES}ValueError: no 1\nb\n") == (
        "a\nValueError: no 1 (the same traceback as before)\nb\n"
    )


def test_torch_s_prefix_of_each_line_makes_no_other_traceback():
    shown = ShownOutput()
    shown.filter(0, 2, "".join(f"[rank0]: {line}\n" for line in BOOM.splitlines()))

    again = shown.filter(1, 2, "".join(f"[rank1]: {line}\n" for line in BOOM.splitlines()))
    assert again == "ValueError: no 0 (the same traceback as before)\n"


def test_a_rank_that_logs_what_it_survives_is_left_as_it_is():
    shown = ShownOutput()

    assert [shown.filter(0, 2, BOOM), shown.filter(0, 2, BOOM)] == [BOOM, BOOM]


def test_in_a_new_attempt_it_is_a_repetition():
    shown = ShownOutput()
    shown.filter(0, 2, BOOM)
    shown.begin_attempt()

    assert shown.filter(0, 2, BOOM) == "ValueError: no 0 (the same traceback as before)\n"


def test_another_traceback_is_shown_whole():
    shown = ShownOutput()
    shown.filter(0, 2, BOOM)
    other = BOOM.replace("line 5", "line 6")
    third = BOOM.replace("ValueError:", "KeyError:")

    assert shown.filter(1, 2, other) + shown.filter(1, 2, third) == other + third


def test_a_chain_is_repeated_in_its_last_lines():
    shown = ShownOutput()
    shown.filter(0, 2, CHAIN)

    assert shown.filter(1, 2, CHAIN + "end\n") == (
        "ValueError: no 0 (the same traceback as before)\n"
        "OSError: disk (the same traceback as before)\nend\n"
    )


def test_a_syntax_error_has_no_first_line_and_is_shown_once_too():
    shown = ShownOutput()

    assert shown.filter(0, 2, SYNTAX) == SYNTAX
    assert shown.filter(1, 2, SYNTAX) == (
        "SyntaxError: invalid syntax (the same traceback as before)\n"
    )


def test_what_was_held_back_and_never_ended_is_given_at_the_end():
    shown = ShownOutput()
    shown.filter(0, 2, BOOM)

    assert shown.filter(1, 2, FRAMES + "Valu") == ""
    assert shown.rest() == [(1, 2, FRAMES + "Valu")]
    assert shown.rest() == []


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


def test_a_traceback_that_a_message_has_printed_counts_as_shown():
    shown = ShownOutput()
    shown.note(CHAIN)

    assert shown.has(CHAIN)
    assert not shown.has(BOOM)
