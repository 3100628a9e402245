"""A headless Chromium of the system, driven by Playwright: what a person with a browser would meet."""

import contextlib
import shutil

import pytest

_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


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
        """Return what axe-core finds wrong, as `rule: element` lines."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [f"{one['id']}: {node['html'][:200]}" for one in found for node in one["nodes"]]
