"""Whether a pod that is asked to end is taken away for its own use: of its disk, or of its node's memory."""

import pytest

from torchmuster.kubernetes.node.serve import is_overused

MIB = 1 << 20


def write_memory(root, *, free_mib, used_mib, cached_mib=0):
    """Write what the kernel shows of a node with 16 GiB, and of the pod on it."""
    (root / "proc").mkdir()
    lines = f"MemTotal: {16 << 20} kB\nMemAvailable: {free_mib << 10} kB\n"
    (root / "proc" / "meminfo").write_text(lines)
    group = root / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {cached_mib * MIB}\n")
    (group / "memory.current").write_text(f"{used_mib * MIB}\n")


@pytest.mark.parametrize(("size", "is_over"), [(MIB, False), (3 * MIB, True)])
def test_a_disk_is_overused_that_has_more_than_its_limit(tmp_path, size, is_over):
    disk = tmp_path / "disk"
    (disk / "deep").mkdir(parents=True)
    (disk / "deep" / "file").write_bytes(b"x" * size)
    environment = {"MUSTER_POD_DISK": str(disk), "MUSTER_POD_DISK_BYTES": str(2 * MIB)}
    assert is_overused(environment, str(tmp_path)) == is_over
    assert not is_overused({"MUSTER_POD_DISK": str(disk)}, str(tmp_path))  # it has no limit


@pytest.mark.parametrize(
    ("free_mib", "used_mib", "cached_mib", "is_over"),
    [
        (100, 900, 0, True),
        (9000, 900, 0, False),  # the node is not short of it: it is drained
        (100, 400, 0, False),  # others use more than they ask for
        (100, 900, 600, False),  # files that nobody reads are given back
    ],
)
def test_memory_is_overused_where_the_node_is_short_of_it(
    tmp_path, free_mib, used_mib, cached_mib, is_over
):
    write_memory(tmp_path, free_mib=free_mib, used_mib=used_mib, cached_mib=cached_mib)
    environment = {"MUSTER_POD_MEMORY_BYTES": str(512 * MIB)}
    assert is_overused(environment, str(tmp_path)) == is_over


def test_what_can_not_be_read_is_no_evidence(tmp_path):
    assert not is_overused({"MUSTER_POD_MEMORY_BYTES": "1"}, str(tmp_path))
    assert not is_overused({}, str(tmp_path))
