"""Pictures of the pages, for the documentation and for people who review them.

python -m tests.browser.screenshots FOLDER    every page, whole: light, dark, 320 pixels wide, and without scripts
python -m tests.browser.screenshots --docs    docs/dashboard.png and docs/guides/dashboard-*.png: the tops of four pages
"""

import shutil
import sys
import urllib.parse
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tests.browser.conftest import RUNS, dashboard
from tests.program import ROOT
from tunix_rt.runs.index import run_id

DEMO, ONE, OTHER, SHOWN = map(run_id, ("demo_v1", "m39_v1", "m40_v1", "gemma3_270m_gsm8k_v1"))
PAGES = {
    "runs": "/", "run": f"/runs/{DEMO}", "answers": f"/runs/{SHOWN}/answers?show=lost", "evidence": f"/runs/{DEMO}/evidence",
    "compare": f"/compare?run={ONE}&run={OTHER}", "plan": "/plan?model=gemma-2b&on=rtx4090",
    "data": "/data?data=dev-reasoning-v2&model=tiny-gemma3&row=0", "doctor": "/doctor",
}  # fmt: skip
DOCS = {
    "dashboard": f"/runs/{SHOWN}", "guides/dashboard-answers": f"/runs/{SHOWN}/answers?show=gained",
    "guides/dashboard-plan": PAGES["plan"], "guides/dashboard-data": PAGES["data"],
}  # fmt: skip
"""Picture below docs/ -> address."""
WIDE = {"width": 1200, "height": 860}
WAYS: dict[str, dict[str, Any]] = {
    "light": {"viewport": WIDE}, "dark": {"viewport": WIDE, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 320, "height": 860}}, "plain": {"viewport": WIDE, "java_script_enabled": False},
}  # fmt: skip


def main(words: list[str]) -> None:
    program = shutil.which("chromium")
    if program is None or len(words) != 1:
        raise SystemExit(__doc__)
    folder, whole = Path(words[0]), words != ["--docs"]
    pictures = [(path, way, folder / f"{name}-{way}.png") for name, path in PAGES.items() for way in WAYS]
    if not whole:
        pictures = [(path, "light", ROOT / "docs" / f"{name}.png") for name, path in DOCS.items()]
    with dashboard(RUNS) as (address, _), sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program)
        for path, way, to in pictures:
            page = browser.new_context(**WAYS[way]).new_page()
            page.goto(address)
            page.goto(urllib.parse.urljoin(address, path))
            page.wait_for_timeout(1500)
            page.screenshot(path=to, full_page=whole)
            page.context.close()


if __name__ == "__main__":
    main(sys.argv[1:])
