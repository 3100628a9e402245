from torchmuster.launcher.spec.scalars import FileProblems, show_path


def test_a_path_is_shown_as_a_person_would_write_it():
    path = ("workflow", "groups", 0, "tasks", 1, "image")

    assert show_path(path) == "workflow.groups[0].tasks[1].image"


def test_errors_and_warnings_are_kept_apart():
    findings = FileProblems()
    findings.add(("workflow",), "wrong", "mend it")
    findings.warn(("workflow", "pool"), "no effect")

    assert [found.what for found in findings.errors] == ["wrong"]
    assert [found.what for found in findings.warnings] == ["no effect"]
    assert findings.warnings[0].at_key
