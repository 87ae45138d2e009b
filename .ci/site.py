"""Check the built site as a reader without a network opens it: from disk, with a search that finds.

`make site` runs it. Without a browser only the pages are read: none may ask another host for anything.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

SITE = Path(__file__).parents[1] / "site"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOREIGN = re.compile(r"<(?:script|link|img|iframe|source)[^>]*(?:src|srcset|href)=\"?(https?:[^\s\">]+)")
QUERY, FOUND = "folded scales", "explanation/folded-scales.html"


def asked(site: Path) -> list[str]:
    """Return what pages would load from other hosts."""
    pages = {page: FOREIGN.findall(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    return [f"{page.relative_to(site)}: {url}" for page, urls in pages.items() for url in urls]


def search(site: Path, browser: str) -> list[str]:
    """Search from disk in a browser without a network, and return the links that are found."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_context(offline=True).new_page()
        page.goto((site / "index.html").as_uri())
        page.locator("[data-md-component=search-query]").fill(QUERY, timeout=20_000)
        results = page.locator(".md-search-result__link")
        results.first.wait_for(state="attached", timeout=20_000)
        found = [str(link.get_attribute("href")) for link in results.all()]
        chromium.close()
    return found


def main() -> None:
    """Check `site/`, and end with what is wrong."""
    if foreign := asked(SITE):
        sys.exit("the site is not complete without a network:\n" + "\n".join(foreign[:10]))
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("site: asks no other host; no browser here, its search was not tried")
        return
    found = search(SITE, browser)
    if not any(FOUND in link for link in found):
        sys.exit(f"the search for '{QUERY}' found {found}")
    print(f"site: asks no other host; its search from disk found {len(found)} pages for '{QUERY}'")


if __name__ == "__main__":
    main()
