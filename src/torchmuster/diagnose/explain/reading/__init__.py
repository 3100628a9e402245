"""Turns lines into events: prefixes, tracebacks, meanings.

Imports only events and the catalogue.
"""
