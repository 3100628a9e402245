"""What `worker.py` does, as a script that begins with Transformers."""

from transformers import AutoModelForCausalLM, Trainer  # noqa: F401 - its import is measured
from worker import main

if __name__ == "__main__":
    main()
