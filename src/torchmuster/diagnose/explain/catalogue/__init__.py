"""What the programs print that people paste: message templates with their meaning, one module for each program.

Facts drawn from the programs' sources, of several releases. Imports nothing of explain but the values of events.
"""
