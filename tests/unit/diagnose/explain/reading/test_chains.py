"""Two exceptions in a chain: which one tells the cause. Each case was really made to fail once."""

import pytest

from unit.diagnose.explain.logs import explain

DIRECT = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"


def one(error, function, code):
    return (
        "Traceback (most recent call last):\n"
        f'  File "/home/u/fit.py", line 7, in {function}\n'
        f"    {code}\n{error}\n"
    )


def chain(first, between, second, *, caught_in="main", raised_in="main", code="raise"):
    frames = '  File "/home/u/fit.py", line 40, in main\n    go()\n' if raised_in != "main" else ""
    later = one(second, raised_in, code).replace("last):\n", f"last):\n{frames}", 1)
    return f"{one(first, caught_in, 'go()')}\n{between}\n\n{later}"


@pytest.mark.parametrize(
    ("log", "told"),
    [
        # An envelope, raised from the cause.
        (chain("ValueError: rate is -3", DIRECT, "RuntimeError: worker failed"), "rate is -3"),
        (chain("KeyError: 'warmup'", DIRECT, "RuntimeError: no set-up"), "'warmup'"),
        # It names something itself, and beneath it is only a look-up.
        (
            chain("KeyError: 3", DIRECT, "DecodeError: sample 3 of b.tar has no decoder for .webp"),
            "no decoder",
        ),
        # A look-up failed, and what the program did instead fails.
        (
            chain(
                "KeyError: 'en'",
                DURING,
                "ValueError: table en holds 3 rows",
                raised_in="load",
                code="check(t)",
            ),
            "3 rows",
        ),
        (
            chain(
                "ModuleNotFoundError: No module named 'fast_attn'",
                DURING,
                "ValueError: unknown attention 'fast'",
                raised_in="slow",
                code="raise",
            ),
            "unknown attention",
        ),
        (
            chain(
                "AttributeError: 'int' object has no attribute 'shape'",
                DURING,
                "TypeError: object of type 'int' has no len()",
                code="return len(x)",
            ),
            "has no len",
        ),
        # The handler of a real failure breaks down itself.
        (
            chain(
                "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x512 and 768x10)",
                DURING,
                "AttributeError: 'Trainer' object has no attribute 'modle'",
                raised_in="save",
                code="torch.save(self.modle)",
            ),
            "4x512",
        ),
        # Cleaning up fails after it.
        (
            chain(
                "IndexError: index 11 is out of bounds",
                DURING,
                "ValueError: I/O operation on closed file.",
                raised_in="close",
            ),
            "index 11",
        ),
    ],
)
def test_the_link_that_tells_the_cause_is_chosen(tmp_path, log, told):
    assert told in explain(tmp_path, job=log).first.error


def test_a_traceback_within_a_message_tells_what_it_is(tmp_path):
    inner = one("IndexError: list index out of range", "produce", "rows[7]")
    outer = one("RuntimeError: prefetch thread died:", "main", "raise")
    first = explain(tmp_path, job=outer + inner).first
    assert "list index out of range" in first.error


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("ValueError:\n\nThe layout is wrong:\n * hidden size 100 is not divisible", "hidden size"),
        ("ValidationError: 2 validation errors for Config\nrate\n  not a number", "not a number"),
        ("RuntimeError: micro batch 3 failed:\n  stage 1\n  no room on stage 1", "no room"),
    ],
)
def test_a_heading_is_shown_with_what_stands_below_it(tmp_path, message, told):
    assert told in explain(tmp_path, job=one(message, "<module>", "raise")).first.error


def test_an_ending_that_another_rank_has_broken_is_put_together(tmp_path):
    start = "Traceback (most recent call last):\n"
    frame = '  File "/home/u/fit.py", line 7, in <module>\n'
    log = f"{start}{start}{frame}{frame}    KeyErrorreturn layers['mlp']\n: 'mlp'\n"
    first = explain(tmp_path, job=log).first
    assert "KeyError: 'mlp'" in first.error
