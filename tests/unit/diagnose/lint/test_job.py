import pytest

from torchmuster.diagnose.lint.job import Scheduler, parse


def job(*lines):
    return parse("\n".join(["#!/bin/bash", *lines, ""]), "job.sh")


def test_several_options_of_one_line_keep_their_line():
    options = job("#SBATCH -N2 --ntasks 4 --gres=gpu:a100:2 # a comment", "#SBATCH -c 8").options

    assert [(o.name, o.value, o.line) for o in options] == [
        ("nodes", "2", 2),
        ("ntasks", "4", 2),
        ("gres", "gpu:a100:2", 2),
        ("cpus-per-task", "8", 3),
    ]


@pytest.mark.parametrize(
    ("directive", "nodes", "per_node", "gpus"),
    [
        ("#SBATCH --nodes=2 --ntasks-per-node=4 --gres=gpu:4", 2, 4, 4),
        ("#SBATCH -N 2-4 -n 8 --gpus-per-node=h100:8", 2, 4, 8),
        ("#SBATCH -N 2 -G 8", 2, None, 4),
        ("#SBATCH --ntasks=8 --ntasks-per-node=4 --gpus-per-task=1", 2, 4, 4),
        ("#SBATCH --ntasks=8", None, None, None),
        ("#SBATCH --nodes=$N --gres=shard:2", None, None, None),
        ("##SBATCH --nodes=2", None, None, None),
        ("#PBS -l select=2:ncpus=8:mpiprocs=4:ngpus=4:site=x,walltime=1:00:00", 2, 4, 4),
        ("#PBS -q gpu -l select=1:ngpus=4+3:ngpus=4 -l place=scatter", 4, 1, 4),
        ("#PBS -l select=1:ngpus=4+1:ngpus=2:mpiprocs=2", 2, None, None),
        ("#PBS -lselect=ncpus=4:ngpus=1", 1, 1, 1),
        ("#PBS -l nodes=2:ppn=4:gpus=4", 2, 4, 4),
        ("#PBS -l select=99999999999:ngpus=1", None, None, 1),
        ("#PBS -N ddp", None, None, None),
    ],
)
def test_the_directives_say_what_each_node_gets(directive, nodes, per_node, gpus):
    found = job(directive).allocation

    assert found.nodes == nodes
    assert found.gpus_per_node == gpus
    if per_node is not None:
        assert found.tasks_per_node == per_node


def test_a_directive_below_a_command_does_not_count():
    found = job("#SBATCH --nodes=2", "", "# a comment", "cd /tmp", "#SBATCH --nodes=4")

    assert found.allocation.nodes == 2
    assert [o.late for o in found.options] == [False, True]


def test_without_directives_there_is_no_scheduler():
    assert job("torchrun t.py").scheduler is Scheduler.NONE


def test_a_job_of_unlike_parts_is_left_alone():
    assert job("#SBATCH --nodes=2", "#SBATCH hetjob", "#SBATCH --nodes=4").allocation.nodes in (
        4,
        None,
    )


def test_commands_have_their_first_line_and_no_continuation():
    found = job("srun torchrun \\", "  --nnodes=2 \\", "  t.py", "wait").shell

    assert [(c.line, c.texts) for c in found.commands] == [
        (2, ["srun", "torchrun", "--nnodes=2", "t.py"]),
        (5, ["wait"]),
    ]
    assert found.slips.glued == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a 'b c' \"d e\" f\\ g", ["a", "b c", "d e", "f g"]),
        ("a # b", ["a"]),
        ("a b#c", ["a", "b#c"]),
        ('a "$(b "c d" | e)" f', ["a", '$(b "c d" | e)', "f"]),
        ("a `b c`", ["a", "$(b c)"]),
        ("a > b 2>&1 < c d", ["a", "d"]),
        ("a &> b", ["a"]),
        ("A=1 B='2 3' a", ["a"]),
        ("a /home/<your-name>/b", ["a", "/home/<your-name>/b"]),
        ("if true; then a; fi", ["true"]),
    ],
)
def test_words_are_cut_as_bash_cuts_them(line, words):
    assert job(line).shell.commands[0].texts == words


def test_a_here_document_is_no_command():
    found = job("cat <<-'END' > x", "torchrun t.py", "\tEND", "a <<< b").shell

    assert [c.texts for c in found.commands] == [["cat"], ["a"]]
    assert found.commands[1].line == 5


def test_assignments_say_whether_they_are_exported():
    shell = job("A=1", "export B=2 C", "D=4 cmd", "declare -x E=5", "F=(a 'b c'", "  d)").shell
    found = {a.name: (a.value, a.exported, a.line) for a in shell.assignments}

    assert found == {
        "A": ("1", False, 2),
        "B": ("2", True, 3),
        "D": ("4", True, 4),
        "E": ("5", True, 5),
        "F": ("a b c d", False, 6),
    }
    assert {"B", "C"} <= shell.exports


def test_a_command_knows_what_it_stands_in():
    lines = ("if a; then", "b", "fi", "for x in 1; do c & done", "f() {", "d", "}", "e")
    found = {c.name: c for c in job(*lines).shell.commands}

    assert found["b"].conditional
    assert found["c"].looped
    assert found["c"].background
    assert found["d"].conditional
    assert not found["e"].conditional
    assert not found["e"].looped


def test_a_variable_is_the_one_above_the_line():
    shell = job("A=1", "B=${A}0", "use", "A=2").shell

    assert shell.expand("$B-${C:-3}", 4) == "10-3"
    assert shell.expand("$A", 5) == "2"
    assert shell.expand("$UNKNOWN", 5) == "$UNKNOWN"


@pytest.mark.parametrize("text", ["a\\\n--b", "--a=$X\\\nb.py", "torchrun --x=1\\\n--y=2"])
def test_an_option_that_is_glued_to_the_next_line_is_noted(text):
    assert parse(text, "j").shell.slips.glued == [1]


@pytest.mark.parametrize(
    "text", ["a,\\\nb", "a=/x\\\n/y", "a \\\n--b", "a\\\n  --b", "--a=1,\\\n2", "'a\\\n--b'"]
)
def test_a_word_that_goes_on_by_intention_is_not(text):
    assert parse(text, "j").shell.slips.glued == []
