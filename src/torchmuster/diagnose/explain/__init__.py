"""Finds root causes in logs: turns lines into events, weighs them, and gives one verdict.

    sources -> scan (patterns, tracebacks) -> case -> rows and rules -> judge

It uses the standard library only, is pure from `case` on, and works for jobs of any launcher.
"""
