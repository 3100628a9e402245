"""The GPU kit, `python -m torchmuster.gpucheck`: verifies torchmuster's promises on these GPUs.

Read in this order:

    table         every check, with its name, order, limit and needs
    kit           what a check uses: the GPUs of this machine, real or pretended, which processes hold
                  them, runs of muster and torchrun, and the facts their scripts report
    conduct       runs each check in its own process, ends hung ones, and verifies an empty device
    results       the file that several calls add to, and the page made from it
    scripts       what the checks run in workers; all of them share `scripts/gpu.py`

It stays on the machine that it is started on: nothing here is copied to nodes
(`launcher/files/code_copy.py`).
"""
