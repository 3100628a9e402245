"""What a user does before the first run: a first muster.toml, a check of the cluster, the doctor."""

import json


def test_a_first_section_is_written_from_what_the_cluster_has(bench):
    path = bench.user.folder / "muster.toml"
    path.unlink()
    bench.must("init")
    text = path.read_text()
    assert 'kind = "kubernetes"' in text
    assert 'context = "lab"' in text


def test_the_check_of_a_cluster_finds_all_that_a_run_needs(bench):
    said = bench.must("engines", "check", "kubernetes")
    lines = said.splitlines()
    assert any(line.startswith("rights ") and "all that a run needs" in line for line in lines)
    assert any(line.startswith("volume shared ") and "ReadWriteMany" in line for line in lines)
    assert sum(" to check-" in line and " ok " in line for line in lines) == 2
    assert sum(f"{bench.shared} in check-" in line and " ok " in line for line in lines) == 2
    bench.wait_nothing_left()


def test_the_check_of_a_cluster_names_the_line_that_the_role_lacks(bench):
    with bench.without_rule("pods/log"):
        code, said = bench.user.run("engines", "check", "kubernetes", "--no-job")
    assert code != 0
    assert '{apiGroups: [""], resources: ["pods/log"], verbs: [get]}' in said


def test_the_doctor_looks_at_pods(bench):
    code, said = bench.user.run("doctor", "--on", "kubernetes", "--nodes", "2", "--json")
    assert code in (0, 1), said  # a machine of two cores may warn
    found = json.loads(said[said.index("\n{") :])
    nodes = {row["node"] for row in found["nodes"]}
    assert {node.rpartition(" ")[2] for node in nodes} == {"(n1)", "(n2)"}
    assert found["job"]["right"]
    assert len(found["job"]["ranks_per_host"]) == 2
    bench.wait_nothing_left()
