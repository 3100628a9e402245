"""Diagnosis of nodes, jobs, job scripts and failures.

`explain` reads logs by a catalogue and rules, `logs` finds and cuts them; `doctor` checks nodes; `lint` job scripts;
`plan` says whether more nodes help; `preflight` compares the nodes of a run; `finding` what they find; `cli` the
commands.
"""
