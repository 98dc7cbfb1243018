"""Measuring: what clips show and what they cost. `videogen` never imports this package."""
