"""A real S3 server (moto) in a process of its own, and children that talk to it."""

import os
import subprocess
import sys

import pytest

from kit.command import SOURCE

# The parent's end of the pipe: when the tests end, however they end, so does the server.
SERVER = """
import os, sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
os.read(0, 1)
os._exit(0)
"""

pytest.importorskip("s3fs")
pytest.importorskip("moto")


@pytest.fixture(scope="session")
def s3_port():
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield int(server.stdout.readline())
    finally:
        server.stdin.close()
        server.wait(10)
        server.stdout.close()


@pytest.fixture(scope="session")
def bucket_names():
    return iter(f"bucket-{number}" for number in range(1, 1000))


@pytest.fixture
def s3_env(s3_port, tmp_path):
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


@pytest.fixture
def bucket(s3_env, monkeypatch, bucket_names):
    """Return the URL of a new, empty bucket of a real server."""
    import s3fs

    for name, value in s3_env.items():
        monkeypatch.setenv(name, value)
    name = next(bucket_names)
    s3fs.S3FileSystem(use_listings_cache=False).mkdir(name)
    return f"s3://{name}"


@pytest.fixture
def python(s3_env, tmp_path):
    """Return how to start our module, or a script, in a child process."""
    env = {"PYTHONPATH": str(SOURCE), "PATH": os.defpath, "HOME": str(tmp_path), **s3_env}

    def start(*words, **options):
        return subprocess.Popen([sys.executable, *words], env=env, text=True, **options)

    return start
