"""Command line of `benchmarks/kills`: figures of a series into benchmarks/results, or with `--json` on the screen alone."""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks import kills
from benchmarks.kills.series import kill_tunix
from benchmarks.kills.subject import DEFECTS


def main() -> int:
    parser = argparse.ArgumentParser(description=kills.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--folder", type=Path, help="must not exist; the runs with a problem stay in it")
    parser.add_argument("--defect", choices=sorted(DEFECTS), default="", help="plant one, to see that it is found")
    parser.add_argument("--unproven", action="store_false", dest="proven", help="forks do not reload their final model")
    parser.add_argument("--json", action="store_true", help="print everything and record nothing")
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    name = "kills.json" if options["device"] == "cpu" else f"kills_{options['device']}.json"
    scratch = Path(tempfile.mkdtemp(prefix="kills-"))
    folder = options.pop("folder") or scratch / "series"
    result = kill_tunix(folder.absolute(), **options)
    if as_json:
        print(json.dumps(result, indent=2))
        return 1 if result["problems"] else 0
    if result["problems"]:
        print(json.dumps(result["problems"], indent=2), file=sys.stderr)
        print(f"not recorded; the runs are in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(scratch)
    kills.write_results(kills.RESULTS / name, result)
    print(kills.table({"tunix-rt": result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
