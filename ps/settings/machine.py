"""What this process may use of the machine: CPUs and memory."""

import os
from pathlib import Path


def available_cpus() -> int:
    """Count the CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process may use: the smaller of the machine's and the cgroups', in bytes.

    Args:
        root: where `proc` and `sys` are, for tests.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    cgroups = root / "sys/fs/cgroup"
    candidates = [cgroups / "memory/memory.limit_in_bytes"]
    own = _read(root / "proc/self/cgroup")
    for line in own.splitlines():
        if line.startswith("0::"):
            group = cgroups / line.removeprefix("0::").strip().lstrip("/")
            candidates.extend(
                parent / "memory.max" for parent in (group, *group.parents) if parent.is_relative_to(cgroups)
            )
    limits.extend(int(text) for text in map(_read, candidates) if text.strip().isdigit())
    return min(limits)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
