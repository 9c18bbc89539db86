"""A real browser, and a real status server for it to look at; left out where there is no browser."""

import contextlib

import pytest

from benchmarks.browser import NoBrowserError, browser, programs
from ps.monitoring.status_server import StatusServer


@pytest.fixture
def open_browser():
    """Return a function that opens a browser; each is closed when the test has ended."""
    try:
        programs()
    except NoBrowserError as error:
        pytest.skip(str(error))
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(browser(**options))


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
