"""The sub-commands that measure, as the entry points of group `videogen.commands` name them."""

from eval.bench_command import add_bench
from eval.compare_command import add_compare

__all__ = ["add_bench", "add_compare"]
