"""Seeded inputs that nobody should send, and what must hold for each of them: `python -m tests.fuzz --number 20000 --out DIR`."""
