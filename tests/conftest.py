"""Shared fixtures. Tests never sleep, never use a fixed port, and leave no thread, socket or process."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

OUR_PACKAGES = frozenset({"protocol", "ps", "worker", "tests"})

GRACE_S = 2.0
"""What a test started may take this long to end; nothing is waited for when it has ended already."""

# `default` is the same on every run; `long` looks further, at random: `scripts/test.sh --long`.
settings.register_profile("default", max_examples=100, deadline=None, derandomize=True, database=None)
settings.register_profile("long", max_examples=25_000, deadline=None, print_blob=True)
settings.load_profile("default")


def _is_ours(thread: threading.Thread) -> bool:
    """Tell whether a daemon thread runs our code; those of libraries live as long as the process."""
    target = getattr(thread, "_target", None)
    modules = (type(thread).__module__, getattr(target, "__module__", None) or "")
    return any(module.split(".")[0] in OUR_PACKAGES for module in modules)


def _sockets() -> set[str]:
    """Return the kernel's names of all sockets that this process holds (none where there is no /proc)."""
    links = set()
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            links.add(str(descriptor.readlink()))
    return {link for link in links if link.startswith("socket:")}


def _descendants() -> set[int]:
    """Return the ids of all processes below this one, also of those that have ended and were not waited for."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():  # a kernel without these lists, or no Linux
        return {process.pid for process in psutil.Process().children(recursive=True)}
    found: set[int] = set()
    parents = [os.getpid()]
    while parents:
        for listing in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread, or the process, has ended meanwhile
                children = [int(number) for number in listing.read_text().split()]
                found.update(children)
                parents += children
    return found


def _processes(numbers: set[int]) -> list[psutil.Process]:
    processes = []
    for number in numbers:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(number))
    return processes


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or an open socket."""
    threads, processes, sockets = set(threading.enumerate()), _descendants(), _sockets()
    yield
    leaks = []
    for thread in set(threading.enumerate()) - threads:
        if not thread.daemon or _is_ours(thread):
            thread.join(GRACE_S)
            if thread.is_alive():
                leaks.append(f"thread {thread.name}")
    left = _processes(_descendants() - processes)
    if left:
        _, alive = psutil.wait_procs(left, timeout=GRACE_S)
        for process in alive:
            leaks.append(f"process {process.pid}")
            process.kill()
    if _sockets() - sockets:
        gc.collect()
        leaks += sorted(_sockets() - sockets)
    if leaks:
        pytest.fail(f"the test left behind: {', '.join(leaks)}")
