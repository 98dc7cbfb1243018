"""Turbo adapters: loading, contracts, distillation; nothing is built here yet."""
