"""From bytes to events: packed files and folders, prefixes of lines, tracebacks, what single lines mean. Imports only events and the catalogue."""
