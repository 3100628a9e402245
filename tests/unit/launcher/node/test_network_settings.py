"""What a node says of its networks, and which variables workers get."""

from torchmuster.core.node.workers import network_variables
from torchmuster.launcher.node.inquiries import network_facts


def test_each_library_is_told_the_name_in_its_own_grammar(tmp_path):
    assert network_variables("hsn0", {"HOME": str(tmp_path)}) == {
        "GLOO_SOCKET_IFNAME": "hsn0",
        "NCCL_SOCKET_IFNAME": "=hsn0",
        "TP_SOCKET_IFNAME": "hsn0",
    }


def test_what_the_user_has_set_is_kept(tmp_path):
    environment = {"HOME": str(tmp_path), "NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": ""}

    assert network_variables("hsn0", environment) == {"TP_SOCKET_IFNAME": "hsn0"}


def test_what_a_file_of_nccl_sets_is_kept(tmp_path):
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=ib0\n")

    assert "NCCL_SOCKET_IFNAME" not in network_variables("hsn0", {"HOME": str(tmp_path)})


def test_the_variables_that_the_user_has_set_are_told_with_a_bounded_length():
    environment = {"GLOO_SOCKET_IFNAME": "x" * 1000, "TP_SOCKET_IFNAME": "", "OTHER": "1"}

    facts = network_facts(3, (1, 2), environment, None)

    assert facts.variables == {"GLOO_SOCKET_IFNAME": "x" * 200}
    assert (facts.survey, facts.ports) == (3, (1, 2))
