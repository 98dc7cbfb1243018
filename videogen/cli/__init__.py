"""One thin file per sub-command; the only place that prints."""
