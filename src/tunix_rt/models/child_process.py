"""Run a module as a child that does not outlive its parent: `python -P -m tunix_rt.models.child_process MODULE [ARGUMENT ...]`.

Standard input is a pipe that the parent keeps open and never writes to. When the parent ends, the system closes it.
"""

import os
import runpy
import sys
import threading

ORPHANED = 1


def _end_with_the_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED)  # from a thread, and in the middle of whatever the module does


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, name="tunix-rt-parent", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
