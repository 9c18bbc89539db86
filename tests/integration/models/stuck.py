"""Data of a user's that never come, for tests. Needs no TensorFlow."""

import contextlib
import time


def asleep(data_dir):
    """Wait for ever, and let an exception end the wait."""
    print("loading", flush=True)
    while True:
        time.sleep(60)


def deaf(data_dir):
    """Wait for ever, whatever is raised here: as a long call outside Python does."""
    print("loading", flush=True)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)
