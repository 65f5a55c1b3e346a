"""`make docs-check`: opens every page of the built site in Chromium, as a file. Fails on what axe calls serious or what is cut.

Each page is opened at the width of a phone and of a desk, on light and on dark pages; its length in screens is printed.
"""

import argparse
import shutil
import sys
from pathlib import Path

import axe_playwright_python
from playwright.sync_api import Browser, Page, sync_playwright

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
VIEWS = [(390, 844, "light"), (390, 844, "dark"), (1280, 800, "light"), (1280, 800, "dark")]
SERIOUS = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
    .filter(each => ["serious", "critical"].includes(each.impact))
    .map(each => `axe: ${each.id}: ${each.nodes[0].html.slice(0, 120)}`)"""
CUT = """() => [
    ...(document.documentElement.scrollWidth > innerWidth ? ["wider than the screen"] : []),
    ...[...document.querySelectorAll("article img")].filter(each => each.offsetWidth &&
        (each.offsetWidth < Math.min(300, each.naturalWidth) || each.parentElement.getBoundingClientRect().right > innerWidth))
        .map(each => `cut or too small: ${each.getAttribute("src")}`)]"""
SEARCHES = {"lora": "trainers.html"}  # words, and the page that has to come first


def problems(browser: Browser, pages: list[str], shots: Path | None) -> list[str]:
    """What is wrong with the pages, each with where; their lengths go to the standard output."""
    found = []
    lengths: dict[str, list[float]] = {}
    for width, height, scheme in VIEWS:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        page = context.new_page()
        foreign: list[str] = []
        page.on(
            "request", lambda request, foreign=foreign: request.url.startswith("http") and foreign.append(request.url)
        )
        for name in pages:
            page.goto((SITE / name).as_uri())
            page.wait_for_load_state()
            page.evaluate(AXE)
            found += [f"{name} at {width}, {scheme}: {each}" for each in [*page.evaluate(SERIOUS), *page.evaluate(CUT)]]
            lengths.setdefault(name, []).append(
                page.evaluate("document.querySelector('article').scrollHeight") / height
            )
            if shots:
                page.screenshot(path=shots / f"{name.replace('/', '_')}-{width}-{scheme}.png")
        found += [f"asks another host: {url}" for url in foreign]
        context.close()
    for name, screens in lengths.items():
        print(f"{screens[2]:5.1f} screens at a desk, {screens[0]:5.1f} on a phone: {name}")
    return found


def searched(page: Page) -> list[str]:
    """What the search does not find first, in a folder."""
    found = []
    for words, wanted in SEARCHES.items():
        page.goto((SITE / "index.html").as_uri())
        page.locator("input.md-search__input").press_sequentially(words)  # the page listens to keys
        results = page.locator(".md-search-result__item a").first
        results.wait_for(state="attached")
        first = results.get_attribute("href") or ""
        if wanted not in first:
            found.append(f"search for {words!r} finds {first}, not {wanted}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help="of the built site, such as guides/flower.html; all, if none is named")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--screenshots", type=Path, help="a folder for a picture of each page's first screen")
    asked = parser.parse_args()
    every = sorted(str(page.relative_to(SITE)) for page in SITE.rglob("*.html") if page.name != "404.html")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=asked.browser, chromium_sandbox=False)
        found = problems(browser, asked.pages or every, asked.screenshots)
        found += searched(browser.new_page())
        browser.close()
    print(*found, sep="\n", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
