"""Pictures of the pages, for the documentation and for people who review them.

python -m tests.browser.screenshots FOLDER    every page, light, dark and 320 pixels wide, whole
python -m tests.browser.screenshots --docs    docs/dashboard.png and docs/guides/dashboard-*.png: the tops of four pages
"""

import shutil
import sys
import urllib.parse
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.browser.conftest import RUNS, dashboard
from tests.program import ROOT
from tunix_rt.runs.index import run_id

DEMO, ONE, OTHER, SHOWN = map(run_id, ("demo_v1", "m39_v1", "m40_v1", "gemma3_270m_gsm8k_v1"))
PAGES = {
    "runs": "/",
    "run": f"/runs/{DEMO}",
    "answers": f"/runs/{SHOWN}/answers?show=lost",
    "evidence": f"/runs/{DEMO}/evidence",
    "compare": f"/compare?run={ONE}&run={OTHER}",
    "plan": "/plan?model=gemma-2b&on=rtx4090",
    "data": "/data?data=dev-reasoning-v2&model=tiny-gemma3&row=0",
    "doctor": "/doctor",
}
DOCS = {
    "dashboard": f"/runs/{SHOWN}",
    "guides/dashboard-answers": f"/runs/{SHOWN}/answers?show=gained",
    "guides/dashboard-plan": PAGES["plan"],
    "guides/dashboard-data": PAGES["data"],
}
"""Picture below docs/ -> address."""


def take(
    browser: Browser, address: str, path: str, to: Path, *, scheme: str = "light", whole: bool = True, width: int = 1200
) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 860})  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(address)
    page.goto(urllib.parse.urljoin(address, path))
    page.wait_for_timeout(1500)
    page.screenshot(path=to, full_page=whole)
    context.close()


def main(words: list[str]) -> None:
    program = shutil.which("chromium")
    if program is None or len(words) != 1:
        raise SystemExit(__doc__)
    with dashboard(RUNS) as (address, _), sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program)
        if words == ["--docs"]:
            for name, path in DOCS.items():
                take(browser, address, path, ROOT / "docs" / f"{name}.png", whole=False)
            return
        folder = Path(words[0])
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in PAGES.items():
            for scheme in ("light", "dark"):
                take(browser, address, path, folder / f"{name}-{scheme}.png", scheme=scheme)
            take(browser, address, path, folder / f"{name}-narrow.png", width=320)


if __name__ == "__main__":
    main(sys.argv[1:])
