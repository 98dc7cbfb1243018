"""What really runs on this machine, against what was asked for, with what it costs; changes nothing."""
