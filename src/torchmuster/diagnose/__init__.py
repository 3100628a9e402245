"""Diagnosis of nodes, jobs, job scripts and failures: doctor, explain, lint and plan."""
