"""Messages that programs print, and what they mean: a text file for each program.

The facts come from the sources of several releases. Of explain, only the values of events are
imported.
"""
