"""Say what a directory of checkpoints lies on: a figure that includes a disk means nothing without it."""

from pathlib import Path


def file_system_of(path: Path) -> str:
    """Return the kind of file system that a path is on, and where it is mounted."""
    return mounted_at(path.resolve(), Path("/proc/mounts").read_text())


def mounted_at(path: Path, mounts: str) -> str:
    """Return the kind of the innermost mount that holds a path, and its place.

    Args:
        path: absolute, without links.
        mounts: as in /proc/mounts: device, place, kind, and more, one mount in a line.
    """
    best, kind = Path("/"), "unknown"
    for line in mounts.splitlines():
        _, place, of_kind = line.split(" ")[:3]
        mount = Path(place.replace("\\040", " "))
        if path.is_relative_to(mount) and len(mount.parts) >= len(
            best.parts
        ):  # of equal ones the later hides the other
            best, kind = mount, of_kind
    return f"{kind} at {best}"
