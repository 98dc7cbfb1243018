"""Step and prefix caches that decide reuse or refresh; nothing is built here yet."""
