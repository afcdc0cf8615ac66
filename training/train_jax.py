# TPU execution blocked due to Gemma 256K vocab + 16GB HBM limit. See M38 audit.
# Later finding: of the 28.59 G that were refused, the logits are 0.2 %. The rest has the size of a whole state held twice on
# one chip, as AdamW without donation does. Sharded over eight chips the compiler accepts it: docs/decisions/m38-audit.md.
# No TPU run has been made by this project: the TPU compiler's verdicts and eight virtual devices stand in.
"""The older name of `run_train_jax.py`: the same flags, the same run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from tunix_rt.cli.train import run_script

if __name__ == "__main__":
    sys.exit(run_script("jax"))
