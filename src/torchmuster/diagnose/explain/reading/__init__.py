"""From lines to events: prefixes, tracebacks, what single lines mean. Imports only events and the catalogue."""
