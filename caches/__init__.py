"""Caches that decide reuse or refresh: the policy, its calibration, and the hook that acts on a block stack."""
