"""Reports missing packages before another import fails."""

import importlib.util

MISSING = [name for name in ("torch", "numpy", "fsspec") if importlib.util.find_spec(name) is None]
if MISSING:
    raise ImportError(
        f"torchmuster.train needs {', '.join(MISSING)}, which this interpreter doesn't have:"
        " pip install 'torchmuster[train]'"
    )
