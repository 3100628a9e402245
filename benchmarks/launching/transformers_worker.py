"""What `worker.py` does, as a script that begins with Transformers."""

from transformers import AutoModelForCausalLM, Trainer  # noqa: F401 - its import is measured
from worker import main  # type: ignore[import-not-found]  # its folder is the first of `sys.path`

if __name__ == "__main__":
    main()
