"""The GPU kit: `python -m torchmuster.gpucheck` proves on this machine's GPUs what torchmuster promises of them.

Read in this order:

    table         every check: its name, order, limit and needs
    kit           what a check is given: runs of muster and torchrun, and the facts that their scripts report
    device        the GPUs of this machine, real or pretended, and who holds them
    conduct       runs each check in a process of its own, ends one that hangs, and sees that the device is empty again
    results, page the file that several calls add to, and the page made of it
    forks, devices, collectives, training, faults, tools, bench      the checks
    scripts       what the checks run in workers; `scripts/gpu.py` is shared by all of them

It stays on the machine that it is started on: nothing here is copied to nodes (`launcher/files/travel.py`).
"""
