"""Kernels where numba's cache on disk cannot be written: they are compiled, and the run goes on."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
{call}
print("ready")
"""


@pytest.mark.parametrize(
    "call",
    [
        "from ps.storage import kernels; kernels.warm_up('sgd')",
        "from ps.rules.master import Master; Master(True, 0)",
    ],
    ids=["the store", "the master"],
)
def test_a_cache_that_is_full_costs_time_and_no_more(call, tmp_path):
    """A limit on the size of files stands for a disk without room."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    script = SCRIPT.format(call=call)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr[-2000:]
    assert not [file for file in tmp_path.rglob("*.nbc") if file.stat().st_size]
