"""The plug point entries of reports and `muster top`."""

PLUGS = {
    "commands": {
        "top": ("Watch", "Show a run, or all runs, live.", "report.cli.top:top"),
        "report": (
            "Diagnose",
            "Write one page of all that is known of a run.",
            "report.cli.report:report",
        ),
    },
    "ends": {"report": "report.at_end:report_at_end"},
}
