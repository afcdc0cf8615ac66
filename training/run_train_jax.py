"""`python training/run_train_jax.py --config ... --dataset ... --device ... --output ...`: see `tunix_rt/cli/legacy.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from tunix_rt.cli.legacy import main

if __name__ == "__main__":
    sys.exit(main("jax"))
