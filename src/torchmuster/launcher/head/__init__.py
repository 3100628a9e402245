"""The launcher's parts of a head: start checks, hang watch, exec relay, metrics."""
