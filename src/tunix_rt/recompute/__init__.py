"""A recorded run computed again, in a process of its own: `process` starts it and reads what it found, `child` is its main
program, `session` makes the run ready, `steps` takes its steps, `answers` asks its questions.

Whoever verifies may let the package of the recorded commit do it, so the request and the lines of the answer keep their names.
"""

SCHEMA = "tunix-rt/recompute/1"
"""Of the request; a child that does not know it says so."""
