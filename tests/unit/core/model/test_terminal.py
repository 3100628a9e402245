from torchmuster.core.model.lines import Terminal


def test_a_terminal_survives_a_command_line():
    terminal = Terminal(streams=frozenset({1, 2}), columns=120, rows=40)

    assert Terminal.from_word(terminal.to_word()) == terminal


def test_a_prefix_takes_its_width_but_never_all_of_it():
    terminal = Terminal(streams=frozenset({1}), columns=30, rows=40)

    assert terminal.behind("[rank 0] ").columns == 21
    assert terminal.behind("[a-task-with-a-long-name] ").columns == 20
