"""Variables whose readers ignore them in silence."""

import pytest

from torchmuster.diagnose.doctor.rules_environment import GRAMMAR, meant, problem_of


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "=eth0"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo"),
        ("NCCL_SOCKET_IFNAME", "eth,ib"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0"),
        ("NCCL_DEBUG", "info"),
        ("NCCL_IB_TIMEOUT", "22"),
        ("NCCL_IB_GID_INDEX", "-1"),
        ("NCCL_P2P_LEVEL", "NVL"),
        ("FI_PROVIDER", "cxi"),
        ("FI_PROVIDER", "^tcp,udp"),
        ("FI_PROVIDER", "verbs;ofi_rxm"),
        ("OMP_NUM_THREADS", "4,2"),
        ("CUDA_VISIBLE_DEVICES", "0, 1"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        (
            "PYTORCH_CUDA_ALLOC_CONF",
            "expandable_segments:True,roundup_power2_divisions:[256:1,>:4]",
        ),
        ("UNHEARD_OF", "anything"),
    ],
)
def test_a_good_value_has_no_problem(name, value):
    assert problem_of(name, value) is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NCCL_SOCKET_IFNAME", "^docker0", "`lo` is allowed now"),
        ("NCCL_SOCKET_IFNAME", "eth0,^lo", "written once"),
        ("NCCL_SOCKET_IFNAME", "eth0,", "separated by commas"),
        ("GLOO_SOCKET_IFNAME", "^lo", "NCCL's grammar"),
        ("NCCL_DEBUG", "VERBOSE", "INFO"),
        ("NCCL_IB_TIMEOUT", "60", "from 0 to 31"),
        ("NCCL_IB_DISABLE", "true", "from 0 to 1"),
        ("NCCL_BUFFSIZE", "4M", "whole number"),
        ("FI_PROVIDER", "verb", "did you mean verbs?"),
        ("OMP_NUM_THREADS", "0", "from 1 on"),
        ("CUDA_VISIBLE_DEVICES", "0,gpu1", "are hidden"),
        ("CUDA_VISIBLE_DEVICES", "0,0", "listed twice"),
        ("TORCH_DISTRIBUTED_DEBUG", "1", "DETAIL"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments=True", "name:value"),
        ("NCCL_DEBUG", "", "it is empty"),
    ],
)
def test_a_bad_value_is_explained(name, value, words):
    assert words in problem_of(name, value)


@pytest.mark.parametrize("name", GRAMMAR)
def test_no_value_breaks_a_check(name):
    for value in ("^", "=", ",", ";", "-", "é", "1" * 200, " ", "\n"):
        problem = problem_of(name, value)
        assert problem is None or problem


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("NCCL_IB_HCA", None),
        ("NCCL_SOMETHING_NEW", None),
        ("PATH", None),
    ],
)
def test_a_misspelt_name_gets_the_one_that_was_meant(name, likely):
    assert meant(name) == likely
