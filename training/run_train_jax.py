"""`python training/run_train_jax.py --config ... --dataset ... --device ... --output ...`: see `tunix_rt/cli/train.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from tunix_rt.cli.train import run_script

if __name__ == "__main__":
    sys.exit(run_script("jax"))
