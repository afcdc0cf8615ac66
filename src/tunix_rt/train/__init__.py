"""The training stage: preflight, loop, checkpoints, preemption, memory report."""
