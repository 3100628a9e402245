"""What `worker.py` does, as a script that uses `torchmuster.train`: the library makes the process group, and ends it."""

import worker  # type: ignore[import-not-found]  # its folder is the first of `sys.path`

import torchmuster.train as tm

if __name__ == "__main__":
    tm.init(timeout_s=worker.GROUP_TIMEOUT_S)
    worker.be_measured()
