"""From job files to finished clips: plan, journal, run."""
