"""One file per model family, behind the protocol in `base`."""
