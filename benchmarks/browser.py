"""Open a real browser, without a window, for the tests and the benchmark that look at the status page."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks.processes import BenchmarkError
from protocol.extras import installing

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

SWITCHES = (
    *("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "hide-scrollbars"),
    *("no-first-run", "disable-background-networking", "disable-component-update", "disable-sync"),
)
PATIENCE_S = 30.0
POLL_S = 0.05


class NoBrowserError(BenchmarkError):
    """There is no browser here, or nothing that drives it; the text says what to install."""


def programs() -> tuple[str, str]:
    """Return where chromium and its driver are.

    Raises:
        NoBrowserError: one of them, or selenium, is missing.
    """
    if find_spec("selenium") is None:
        raise NoBrowserError(f"selenium is not installed: {installing('browser')}")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        raise NoBrowserError("no browser here: install chromium and chromium-driver")
    return chromium, chromedriver


@contextmanager
def browser(width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1) -> Iterator["Chrome"]:
    """Open a browser with a profile of its own; both are gone at the end, however that comes.

    Args:
        width: of the page, CSS pixels.
        height: likewise.
        dark: whether the user prefers dark colours.
        scale: device pixels of a CSS pixel.

    Raises:
        NoBrowserError: chromium, its driver or selenium is missing.
        BenchmarkError: the browser does not start, or does not do what it is told.
    """
    chromium, chromedriver = programs()
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException

    with contextlib.ExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for switch in (*SWITCHES, f"user-data-dir={profile}"):
            options.add_argument(f"--{switch}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        try:
            driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
            stack.callback(driver.quit)
            size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        except WebDriverException as error:
            raise BenchmarkError(f"the browser failed: {error.msg or type(error).__name__}") from error


def look(driver: "Chrome", url: str) -> None:
    """Open the status page, and wait until it shows what a server has said."""
    driver.get(url)
    wait_for(driver, "document.body.dataset.connection === 'live'")


def wait_for(driver: "Chrome", condition: str) -> None:
    """Wait until an expression is true in the page."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, PATIENCE_S, POLL_S).until(
        lambda page: page.execute_script(f"return {condition}"),
        f"{condition} was not true within {PATIENCE_S:.0f} s",
    )
