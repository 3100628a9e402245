"""A headless Chromium of the system, driven by Playwright: what a person with a browser would meet."""

import contextlib
import shutil

import pytest

_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

_FAINT_TEXTS = """
() => {
  const light = (colour) => {
    const part = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255);
    const [r, g, b] = part.map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (!/rgba\\(.*, 0\\)$/.test(colour)) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  return [...document.querySelectorAll('svg text')].filter((text) => {
    const fill = getComputedStyle(text).fill;
    if (!fill.startsWith('rgb') || !text.textContent.trim()) return false;
    const [a, b] = [light(fill), light(behind(text))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05) < 4.5;
  }).map((text) => `faint: ${text.outerHTML.slice(0, 200)}`);
}
"""


def needs_chromium():
    """Return the mark of tests that are left out where there is no Chromium."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    return pytest.mark.skipif(found is None, reason="there is no Chromium: scripts/system-packages")


@contextlib.contextmanager
def chromium():
    """Give a browser with a new, empty profile."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Look:
    """A page in the browser, with what it said and asked for.

    Attributes:
        said: Its console and its errors.
        asked: What it requested, the file itself left out.
    """

    def __init__(self, browser, path, *, width=1280, theme="light", javascript=True):
        self.context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,
            java_script_enabled=javascript,
            reduced_motion="reduce",
        )
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        address = f"file://{path}"
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.goto(address)
        self.asked = [url for url in self.asked if url != address and not url.startswith("data:")]

    def __enter__(self):
        return self

    def __exit__(self, *ended):
        self.context.close()

    def value(self, script):
        """Return what an expression of JavaScript is in the page."""
        return self.page.evaluate(script)

    def violations(self):
        """Return what axe-core finds wrong, and contrasts that it can't judge, as `rule: element` lines.

        It judges no text of a picture (SVG): its colour is compared here with that of the page behind it.
        """
        from axe_playwright_python.sync_playwright import Axe

        told = Axe().run(self.page).response
        unsure = [one for one in told["incomplete"] if one["id"].startswith("color-contrast")]
        found = [
            f"{one['id']}: {node['html'][:200]}"
            for one in (*told["violations"], *unsure)
            for node in one["nodes"]
            if not (one in unsure and _is_judged_elsewhere(node))
        ]
        return [*found, *self.page.evaluate(_FAINT_TEXTS)]


def _is_judged_elsewhere(node):
    """Say whether axe's doubt of a contrast is another check's: of text in SVG, or cut by the edge of what scrolls on a narrow screen."""
    keys = {check["data"].get("messageKey") for check in node["any"] if check.get("data")}
    return node["html"].startswith(("<text", "<tspan")) or keys == {"elmPartiallyObscured"}
