"""Data sets by name: where their files are, how they are fetched, and the one check that all must pass."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigurationError
from protocol.extras import installing
from protocol.user_function import load_user_function
from protocol.user_paths import Entry, expanded, look
from worker.dataset_files import (
    CIFAR_FOLDER,
    CIFAR_TEST_FILE,
    CIFAR_TRAIN_FILES,
    check_label_bytes,
    is_data_file,
    read_cifar_archive,
    read_cifar_folder,
    read_idx,
    read_npz,
)
from worker.definitions import Dataset

Say = Callable[[str], None]


def _nobody(text: str) -> None:
    """Say nothing."""


MAX_CLASSES = 1_000_000
"""A larger label is a mistake (an id, a hash) that would cost gigabytes in the model's last layer."""

FINITE_CHECK_VALUES = 1 << 20
"""Values that are checked at a time, so that the check needs no second array of the data's size."""

NPZ_KEYS = ("train_features", "train_labels", "test_features", "test_labels")

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def load_dataset(spec: str, data_dir: Path | None, say: Say = _nobody) -> Dataset:
    """Load and check a data set.

    Args:
        spec: `digits`, `mnist`, `fashion_mnist`, `cifar10`, `npz:FILE` or `file.py:function`.
        data_dir: folder with the files of a named data set; handed to a function of the user's as it is, and
            the second place where a relative `npz:FILE` is looked for.
        say: told where the files of a named data set are.

    Returns:
        Arrays that passed `checked`. `digits`: features float32 [N, 8, 8] in 0..1. `mnist` and
        `fashion_mnist`: uint8 [N, 28, 28]. `cifar10`: uint8 [N, 32, 32, 3].

    Raises:
        ConfigurationError: the name is unknown, a file is missing or damaged, the user's function failed, or
            the arrays are not a data set; the text says which, and what to do.
    """
    if spec in NAMED:
        dataset = NAMED[spec](data_dir, say)
    elif spec.startswith("npz:"):
        dataset = Dataset(*read_npz(_npz_path(spec.removeprefix("npz:"), data_dir), NPZ_KEYS))
    elif ".py:" in spec or spec.endswith(".py"):
        dataset = _call_user(spec, data_dir)
    else:
        similar = difflib.get_close_matches(spec, NAMED, n=1)
        raise ConfigurationError(
            f"there is no data set {spec!r}{f' (did you mean {similar[0]}?)' if similar else ''}: "
            f"use {', '.join(NAMED)}, npz:FILE or file.py:function"
        )
    return checked(dataset, spec)


def _npz_path(file: str, data_dir: Path | None) -> Path:
    path = expanded(file, "data file")
    if data_dir and not is_data_file(path) and is_data_file(data_dir / path):
        return data_dir / path
    return path


def _call_user(spec: str, data_dir: Path | None) -> Dataset:
    dataset = load_user_function(spec, "--dataset", "data_dir")(data_dir)
    if not isinstance(dataset, Dataset):
        raise ConfigurationError(
            f"--dataset {spec} returned {'None' if dataset is None else f'a {type(dataset).__name__}'} instead of "
            f"worker.Dataset(train_features, train_labels, test_features, test_labels)"
        )
    return dataset


def num_classes(dataset: Dataset) -> int:
    """Return the number of classes: the largest label of both parts, plus one.

    Raises:
        ConfigurationError: a label is too large to be a class.
    """
    largest = int(max(dataset.train_labels.max(), dataset.test_labels.max()))
    if largest >= MAX_CLASSES:
        raise ConfigurationError(
            f"label {largest:,} is too large to be a class: number the classes from 0, below {MAX_CLASSES:,}"
        )
    return largest + 1


# ---- the check -----------------------------------------------------------------------------------------


def checked(dataset: Dataset, name: str) -> Dataset:
    """Check a data set and bring it into one form.

    Args:
        dataset: arrays as loaded.
        name: what to call the data set in messages.

    Returns:
        The same values: features C-contiguous in native byte order, labels int32 [N] and C-contiguous.

    Raises:
        ConfigurationError: naming the array and what is wrong with it.
    """
    parts = []
    for part in ("train", "test"):
        features = _checked_features(getattr(dataset, f"{part}_features"), f"{part}_features", name)
        labels = _checked_labels(getattr(dataset, f"{part}_labels"), f"{part}_labels", name)
        if len(features) != len(labels):
            raise _wrong(name, f"{part}_features has {len(features):,} examples, {part}_labels {len(labels):,}")
        parts += [features, labels]
    if parts[0].shape[1:] != parts[2].shape[1:] or parts[0].dtype != parts[2].dtype:
        raise _wrong(
            name,
            f"train_features are {parts[0].dtype} {list(parts[0].shape[1:])} an example, "
            f"test_features {parts[2].dtype} {list(parts[2].shape[1:])}",
        )
    return Dataset(*parts)


def _wrong(name: str, what: str) -> ConfigurationError:
    return ConfigurationError(f"data set {name} cannot be used: {what}")


def _checked_array(array: object, key: str, name: str) -> NDArray[Any]:
    if not isinstance(array, np.ndarray):
        raise _wrong(name, f"{key} is a {type(array).__name__}; make it a NumPy array with numpy.asarray")
    if array.ndim == 0 or len(array) == 0:
        raise _wrong(name, f"{key} has no examples; at least one is needed")
    return array


def _checked_features(candidate: object, key: str, name: str) -> NDArray[Any]:
    array = _checked_array(candidate, key, name)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise _wrong(name, f"{key} has dtype {array.dtype}; make it numeric, for example numpy.float32")
    if array.size == 0:
        raise _wrong(name, f"{key} has shape {list(array.shape)}, so an example holds no values")
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    if array.dtype.kind == "f":
        flat = array.reshape(-1)
        for start in range(0, len(flat), FINITE_CHECK_VALUES):
            finite = np.isfinite(flat[start : start + FINITE_CHECK_VALUES])
            if not finite.all():
                example = (start + int(np.argmin(finite))) // (array.size // len(array))
                raise _wrong(name, f"{key} has NaN or infinity in example {example:,}; remove or replace it")
    return array


def _cure(labels: NDArray[Any]) -> str:
    """Say how labels get one axis: of a single column the largest is always the first, whatever the label is."""
    if labels.size == len(labels):
        return "; .reshape(-1) makes them that"
    return "; one-hot labels become numbers with .argmax(axis=1)" if labels.ndim == 2 and labels.size else ""


def _checked_labels(candidate: object, key: str, name: str) -> NDArray[np.int32]:
    array = _checked_array(candidate, key, name)
    if array.ndim != 1:
        raise _wrong(name, f"{key} has shape {list(array.shape)} instead of one number per example{_cure(array)}")
    if array.dtype.kind not in "iu":
        raise _wrong(name, f"{key} has dtype {array.dtype}; convert whole numbers with .astype(numpy.int32)")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        outlier = array.min() if array.min() < 0 else array.max()
        raise _wrong(name, f"{key} contains {outlier}; labels are whole numbers from 0 to 2**31 - 1")
    return np.ascontiguousarray(array, dtype=np.int32)


# ---- digits --------------------------------------------------------------------------------------------


def _load_digits(data_dir: Path | None, say: Say) -> Dataset:
    """Return scikit-learn's digits; of each class, every fifth image in the original order is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError(
            f"data set digits is part of scikit-learn, which is not installed: run {installing('datasets')}"
        ) from error
    bunch = load_digits()
    features = (bunch.images / 16).astype(np.float32)
    labels = bunch.target.astype(np.int32)
    test = np.zeros(len(labels), np.bool_)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[2::5]] = True
    return Dataset(features[~test], labels[~test], features[test], labels[test])


# ---- MNIST and Fashion-MNIST ---------------------------------------------------------------------------


@dataclass(frozen=True)
class IdxSource:
    """Where a data set of four IDX files comes from.

    Attributes:
        name: as in `--dataset`.
        url: the folder to download from, with a slash at the end.
        sha256: of each gzipped file there, in the order of `IDX_FILES`.
        folders: where the files may lie below `--data-dir`, in order of preference.
        system_folders: where packages of the operating system put them.
    """

    name: str
    url: str
    sha256: tuple[str, str, str, str]
    folders: tuple[str, ...]
    system_folders: tuple[Path, ...] = ()


MNIST = IdxSource(
    "mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    ("mnist", "MNIST/raw", "."),
)

FASHION_MNIST = IdxSource(
    "fashion_mnist",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    ("fashion_mnist", "fashion-mnist", "FashionMNIST/raw", "."),
    (Path("/usr/share/datasets/fashion-mnist"),),
)


def load_idx_dataset(source: IdxSource, data_dir: Path | None, say: Say = _nobody) -> Dataset:
    """Load MNIST or a data set of the same form, with any number of examples.

    Raises:
        ConfigurationError: a file is missing and cannot be fetched, or is not what it should be.
    """
    paths = _find_idx(source, data_dir, say)
    arrays: list[NDArray[Any]] = []
    for images_path, labels_path in (paths[:2], paths[2:]):
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        if images.shape[1:] != (28, 28):
            height, width = images.shape[1:]
            raise ConfigurationError(
                f"data file {images_path} has images of {height}x{width} instead of 28x28: "
                f"is it a file of {source.name}?"
            )
        check_label_bytes(labels_path, labels)
        arrays += [images, labels.astype(np.int32)]
    return Dataset(*arrays)


def _find_idx(source: IdxSource, data_dir: Path | None, say: Say) -> list[Path]:
    folders = [_existing(data_dir) / folder for folder in source.folders] if data_dir else []
    for folder in (*folders, *source.system_folders):
        found = [_idx_path(folder, name) for name in IDX_FILES]
        paths = [path for path in found if path]
        if len(paths) == len(IDX_FILES):
            say(f"data set {source.name}: files in {folder}")
            return paths
        if paths:
            missing = [f"{name}.gz" for name, path in zip(IDX_FILES, found, strict=True) if path is None]
            raise ConfigurationError(
                f"data file {folder / missing[0]} is missing beside {paths[0].name}: "
                f"get {', '.join(missing)} from {source.url}"
            )
    packed = (f"{name}.gz" for name in IDX_FILES)
    return _download(source.name, data_dir, source.url, dict(zip(packed, source.sha256, strict=True)), say)


def _idx_path(folder: Path, name: str) -> Path | None:
    dotted = name.replace("-idx", ".idx")
    candidates = (folder / file for file in (name, f"{name}.gz", dotted, f"{dotted}.gz"))
    return next((path for path in candidates if is_data_file(path)), None)


# ---- files from elsewhere ------------------------------------------------------------------------------


def _existing(data_dir: Path) -> Path:
    if look(data_dir, "--data-dir") is not Entry.FOLDER:
        raise ConfigurationError(f"--data-dir {data_dir} is not a folder: correct it, or leave it out")
    return data_dir


def _download(
    dataset: str, data_dir: Path | None, base_url: str, sha256: Mapping[str, str], say: Say
) -> list[Path]:
    """Return the files from the user's cache, in order; those that are not there or differ are downloaded."""
    where = f"in {data_dir}" if data_dir else "on this machine"
    elsewhere = f"or get {', '.join(sha256)} from {base_url} and give the folder with --data-dir"
    try:
        import pooch
    except ImportError as error:
        raise ConfigurationError(
            f"data set {dataset} is not {where}, and pooch, which downloads it, is not installed: "
            f"run {installing('datasets')}, {elsewhere}"
        ) from error
    folder = Path(pooch.os_cache("weighmaster")) / dataset
    paths: list[Path] = []
    for file, digest in sha256.items():
        missing = f"data file {file} of {dataset} is not {where}"
        try:
            paths.append(
                Path(pooch.retrieve(base_url + file, known_hash=f"sha256:{digest}", fname=file, path=folder))
            )
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigurationError(
                f"{missing} and could not be downloaded into {folder} ({reason}): "
                f"check the internet connection, {elsewhere}"
            ) from error
        except ValueError as error:
            raise ConfigurationError(
                f"{missing}, and the download has another checksum than it should have: try again, {elsewhere}"
            ) from error
    say(f"data set {dataset}: files in {folder}")
    return paths


# ---- CIFAR-10 ------------------------------------------------------------------------------------------

CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"
CIFAR_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"


def _load_cifar10(data_dir: Path | None, say: Say) -> Dataset:
    """Return CIFAR-10 from the binary archive or its unpacked folder; the pickled version is never read."""
    for base in [_existing(data_dir) / folder for folder in (".", "cifar10")] if data_dir else []:
        for folder in (base / CIFAR_FOLDER, base):
            if any(is_data_file(folder / name) for name in (*CIFAR_TRAIN_FILES, CIFAR_TEST_FILE)):
                say(f"data set cifar10: files in {folder}")
                return _cifar_dataset(read_cifar_folder(folder))
        if is_data_file(base / CIFAR_ARCHIVE):
            say(f"data set cifar10: {base / CIFAR_ARCHIVE}")
            return _cifar_dataset(read_cifar_archive(base / CIFAR_ARCHIVE))
    pickled = [data_dir / name for name in ("cifar-10-python.tar.gz", "cifar-10-batches-py")] if data_dir else []
    for path in pickled:
        if look(path, "data file") is not Entry.NOTHING:
            raise ConfigurationError(
                f"{path} is the pickled version of CIFAR-10, which is never loaded because that could run code: "
                f"get {CIFAR_URL}{CIFAR_ARCHIVE}"
            )
    (path,) = _download("cifar10", data_dir, CIFAR_URL, {CIFAR_ARCHIVE: CIFAR_SHA256}, say)
    return _cifar_dataset(read_cifar_archive(path))


def _cifar_dataset(parts: tuple[tuple[NDArray[np.uint8], NDArray[np.uint8]], ...]) -> Dataset:
    (train_features, train_labels), (test_features, test_labels) = parts
    return Dataset(train_features, train_labels.astype(np.int32), test_features, test_labels.astype(np.int32))


NAMED: Mapping[str, Callable[[Path | None, Say], Dataset]] = {
    "digits": _load_digits,
    "mnist": lambda data_dir, say: load_idx_dataset(MNIST, data_dir, say),
    "fashion_mnist": lambda data_dir, say: load_idx_dataset(FASHION_MNIST, data_dir, say),
    "cifar10": _load_cifar10,
}
