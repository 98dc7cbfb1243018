"""The sub-commands that measure, as the entry points of group `videogen.commands` name them."""

from eval.audit_command import add_audit
from eval.bench_command import add_bench
from eval.calibrate_command import add_calibrate
from eval.compare_command import add_compare
from eval.eval_command import add_eval

__all__ = ["add_audit", "add_bench", "add_calibrate", "add_compare", "add_eval"]
