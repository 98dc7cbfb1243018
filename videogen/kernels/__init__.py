"""H3's elementwise work, each part once as torch says it and once as one Triton kernel; attaches nothing."""
