"""A real browser, and a real status server for it to look at; left out where there is no browser."""

import contextlib
import shutil
import tempfile

import pytest

from ps.status_server import StatusServer

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")


@pytest.fixture
def open_browser():
    """Return a function that opens a browser; each is closed when the test has ended."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: the extra `browser`")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no browser here: install chromium and chromium-driver")
    with contextlib.ExitStack() as stack:

        def launch(width=1280, height=900, dark=False, scale=1):
            profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            options = webdriver.ChromeOptions()
            options.binary_location = CHROMIUM
            for argument in (
                *("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "hide-scrollbars"),
                *("no-first-run", "disable-background-networking", "disable-component-update", "disable-sync"),
                f"user-data-dir={profile}",
            ):
                options.add_argument(f"--{argument}")
            options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
            driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
            stack.callback(driver.quit)
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False},
            )
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            return driver

        yield launch


@pytest.fixture
def serve():
    """Return a function that serves the feed of a made-up run, and returns where."""
    with contextlib.ExitStack() as stack:

        def start(feed):
            server = StatusServer("127.0.0.1", 0, lambda: feed.latest)
            stack.callback(server.close)
            server.start()
            return f"http://127.0.0.1:{server.port}/", server

        yield start
