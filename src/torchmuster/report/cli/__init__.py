"""muster report and muster top."""
