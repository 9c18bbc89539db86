"""What the sub-commands tell of checkpoints: what is inside, and the values in a file of their own."""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import CheckpointError, ConfigurationError
from ps.build import size_text
from ps.checkpoints.directory import checkpoints_in
from ps.checkpoints.format import MANIFEST, Listing, Snapshot, load, read_listing
from ps.outcome import export_values, write_whole

FORMATS = ("npz", "safetensors")
"""What values can be exported to."""

_AVERAGE = "average/"


@dataclass(frozen=True)
class Report:
    """What is told of a checkpoint, or of a directory of them.

    Attributes:
        text: lines for people.
        damage: why the checkpoint, or the newest of the directory, cannot be used, in a sentence; or empty.
    """

    text: str
    damage: str


def describe(path: Path) -> Report:
    """Tell what is in a checkpoint, or in all of a directory.

    Of a directory of checkpoints each has a line, and the newest good one is told in full.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    if _is_checkpoint(path):
        return _in_full(path)
    lines: list[str] = []
    full: list[str] = []
    damage = ""
    for each in _checkpoints_of(path):
        try:
            listing, snapshot = read_listing(each), load(each)
        except CheckpointError as error:
            damage = damage or ("" if lines else f"the newest {error}")
            lines.append(f"{each.name}: DAMAGED: {error}")
            continue
        lines.append(f"{each.name}: step {listing.step}, {listing.written}, {_size(listing)}, verifies")
        full = full or ["", *_lines(each, listing, snapshot)]
        del snapshot
    return Report("\n".join([*lines, *full]), damage)


def export(path: Path, to: str, out: Path) -> None:
    """Write the values of a checkpoint by name; of a variable with a moving average, that.

    NumPy's own format has no bfloat16: there it becomes float32, which loses nothing.

    Args:
        path: a checkpoint, or a directory of them: then the newest that verifies.
        to: one of `FORMATS`.
        out: the file, replaced if it is there.

    Raises:
        ConfigurationError: an unknown format.
        CheckpointError: no checkpoint can be used, or the file cannot be written.
    """
    if to not in FORMATS:
        raise ConfigurationError(f"values cannot be exported to {to!r}; use {' or '.join(FORMATS)}")
    snapshot = load(path) if _is_checkpoint(path) else _newest_of(path)
    values = dict(snapshot.tensors.get("values", {}))
    for name, average in snapshot.tensors.get("optimizer", {}).items():
        if name.startswith(_AVERAGE) and name.removeprefix(_AVERAGE) in values:
            values[name.removeprefix(_AVERAGE)] = average
    if to == "safetensors":
        export_values(out, values)
        return
    try:
        write_whole(out, _npz(values))
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror}") from error


def _is_checkpoint(path: Path) -> bool:
    try:
        return (path / MANIFEST).exists() or not path.is_dir()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _checkpoints_of(path: Path) -> list[Path]:
    paths = checkpoints_in(path)
    if not paths:
        raise CheckpointError(f"there is no checkpoint in {path}; name a --checkpoint-dir, or one checkpoint in it")
    return paths


def _newest_of(path: Path) -> Snapshot:
    problem = ""
    for each in _checkpoints_of(path):
        try:
            return load(each)
        except CheckpointError as error:
            problem = problem or str(error)
    raise CheckpointError(f"no checkpoint in {path} can be used: {problem}")


def _in_full(path: Path) -> Report:
    listing = read_listing(path)
    try:
        return Report("\n".join(_lines(path, listing, load(path))), "")
    except CheckpointError as error:
        return Report("\n".join([*_heading(path, listing), f"  DAMAGED: {error}"]), str(error))


def _heading(path: Path, listing: Listing) -> list[str]:
    return [
        f"checkpoint {path}",
        f"  step {listing.step}, epoch {listing.epoch:016x}, written {listing.written}, {_size(listing)}",
    ]


def _lines(path: Path, listing: Listing, snapshot: Snapshot) -> list[str]:
    settings = snapshot.state.get("settings")
    known = settings if isinstance(settings, Mapping) else {}
    lines = [
        *_heading(path, listing),
        "  verifies: every file has the length and the checksum that it was written with",
        f"  optimizer {known.get('optimizer', 'not told')}, rule {known.get('aggregation', 'not told')}",
        *(f"  {name}: {size_text(content.size_bytes)}" for name, content in listing.files.items()),
    ]
    values = snapshot.tensors.get("values", {})
    width = max((len(name) for name in values), default=0)
    lines.append(f"  {len(values)} variables, {size_text(sum(v.nbytes for v in values.values()))}:")
    for name, value in values.items():
        lines.append(f"    {name:<{width}}  {value.dtype.name} {list(value.shape)}  {size_text(value.nbytes)}")
    return lines


def _size(listing: Listing) -> str:
    return size_text(sum(content.size_bytes for content in listing.files.values()))


def _npz(values: Mapping[str, NDArray[Any]]) -> bytes:
    # `numpy.savez` takes names as arguments, so that a variable cannot be called "file".
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive:
        for name, value in values.items():
            array = value.astype(np.float32) if value.dtype.name == "bfloat16" else value
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return whole.getvalue()
