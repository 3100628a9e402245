import pytest

from torchmuster.core.node.spawner.mainmodule import blas_threads


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 4),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "9"}, 4),
        ({"OMP_NUM_THREADS": "2,1"}, 2),
        ({"OMP_NUM_THREADS": "0"}, 4),
        ({"OMP_NUM_THREADS": "many"}, 4),
        ({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3", "GOTO_NUM_THREADS": "2"}, 2),
    ],
)
def test_openblas_gets_the_threads_that_it_would_have_started_when_loaded(environment, expected):
    assert blas_threads(environment, num_cpus=4) == expected
