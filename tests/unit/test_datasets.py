"""Data sets: found, read strictly, never unpickled, and brought into one checked form."""

import gzip
import io
import struct
import subprocess
import sys
import tarfile
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import worker.dataset_files as dataset_files
import worker.datasets as datasets
from protocol.errors import ConfigurationError
from protocol.log_lines import recognise
from worker.datasets import FASHION_MNIST, IDX_FILES, checked, load_dataset, load_idx_dataset, num_classes
from worker.definitions import Dataset
from worker.log_format import EVENTS

IMAGES, LABELS = IDX_FILES[:2]


@pytest.fixture(autouse=True)
def _nothing_from_this_machine(monkeypatch, tmp_path):
    """No test finds data of the machine, downloads, or leaves a user's folder on the import path."""
    monkeypatch.setattr(datasets, "FASHION_MNIST", replace(FASHION_MNIST, system_folders=()))
    monkeypatch.setitem(sys.modules, "pooch", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def refused(spec, data_dir=None):
    with pytest.raises(ConfigurationError) as caught:
        load_dataset(spec, data_dir)
    text = str(caught.value)
    assert "\n" not in text
    return text


# ---- IDX -----------------------------------------------------------------------------------------------


def idx(array, type_code=0x08):
    array = np.asarray(array)
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, type_code, array.ndim, *array.shape) + array.tobytes()


def images(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 28, 28), np.uint8)


def labels(n):
    return (np.arange(n) % 10).astype(np.uint8)


def write_idx_files(folder, packed=False, train=12, test=4):
    folder.mkdir(parents=True, exist_ok=True)
    arrays = (images(train), labels(train), images(test, 1), labels(test))
    for name, array in zip(IDX_FILES, arrays, strict=True):
        content = idx(array)
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)
    return folder


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("below", [".", "{name}"])
def test_idx_files_are_read(tmp_path, name, packed, below):
    """Plain and gzipped files, in --data-dir or below it, give exactly the values written."""
    write_idx_files(tmp_path / below.format(name=name), packed)
    dataset = load_dataset(name, tmp_path)
    assert np.array_equal(dataset.train_features, images(12))
    assert np.array_equal(dataset.test_features, images(4, 1))
    assert dataset.train_features.dtype == np.uint8
    assert dataset.train_labels.tolist() == labels(12).tolist()
    assert dataset.train_labels.dtype == dataset.test_labels.dtype == np.int32
    assert num_classes(dataset) == 10


def test_where_the_files_of_a_named_data_set_are_is_said(tmp_path):
    """In the words of the event of that name."""
    said = []
    write_idx_files(tmp_path / "mnist")
    load_dataset("mnist", tmp_path, said.append)
    write_tar(tmp_path / "cifar-10-binary.tar.gz", cifar_members())
    load_dataset("cifar10", tmp_path, said.append)
    assert said == [
        f"data set mnist: files in {tmp_path / 'mnist'}",
        f"data set cifar10: {tmp_path / 'cifar-10-binary.tar.gz'}",
    ]
    assert {recognise(text, EVENTS)[0] for text in said} == {"data_set"}


def test_names_with_a_dot_are_found_too(tmp_path):
    """Some copies of MNIST are called train-images.idx3-ubyte."""
    write_idx_files(tmp_path)
    for name in IDX_FILES:
        (tmp_path / name).rename(tmp_path / name.replace("-idx", ".idx"))
    assert len(load_dataset("mnist", tmp_path).train_labels) == 12


def test_two_data_sets_share_a_data_dir(tmp_path):
    """MNIST and Fashion-MNIST have equal file names; the folder of the name comes first."""
    write_idx_files(tmp_path / "mnist", train=11)
    write_idx_files(tmp_path / "fashion_mnist", train=13)
    assert len(load_dataset("mnist", tmp_path).train_labels) == 11
    assert len(load_dataset("fashion_mnist", tmp_path).train_labels) == 13


def test_the_system_folder_comes_after_the_data_dir(tmp_path):
    """Files of the operating system's package are used only when --data-dir has none."""
    system, own = write_idx_files(tmp_path / "system", train=5), write_idx_files(tmp_path / "own", train=6)
    (tmp_path / "empty").mkdir()
    source = replace(FASHION_MNIST, system_folders=(system,))
    for data_dir, expected in ((None, 5), (tmp_path / "empty", 5), (own, 6)):
        assert len(load_idx_dataset(source, data_dir).train_labels) == expected


def test_debian_folder_is_the_one_that_ships():
    """The constant names the folder of Debian's package."""
    assert FASHION_MNIST.system_folders == (Path("/usr/share/datasets/fashion-mnist"),)


@pytest.mark.skipif(
    not FASHION_MNIST.system_folders[0].is_dir(), reason="Debian's package dataset-fashion-mnist is not installed"
)
def test_the_real_fashion_mnist():
    """Debian's files are 60,000 and 10,000 images in ten equal classes."""
    dataset = checked(load_idx_dataset(FASHION_MNIST, None), "fashion_mnist")
    assert dataset.train_features.shape == (60_000, 28, 28)
    assert dataset.test_features.shape == (10_000, 28, 28)
    assert np.bincount(dataset.train_labels).tolist() == [6_000] * 10
    assert np.bincount(dataset.test_labels).tolist() == [1_000] * 10
    assert dataset.train_labels[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]


GOOD = idx(images(12))
BAD_IDX = {
    "empty": (b"", "is not an IDX file (it starts with nothing)"),
    "a web page": (b"<!DOCTYPE html>", "is not an IDX file (it starts with 3c 21 44 4f)"),
    "little endian": (GOOD[:4][::-1] + GOOD[4:], "is not an IDX file"),
    "float values": (idx(images(12), 0x0D), "type 0x0d instead of unsigned bytes"),
    "labels": (idx(labels(12)), "has 1 dimensions instead of 3"),
    "half a header": (GOOD[:10], "ends within its header"),
    "truncated": (GOOD[:-1], "ends after 9,407 of the 9,408 values"),
    "too long": (GOOD + b"\0", "goes on after the 9,408 values"),
    "huge": (struct.pack(">BBBB3I", 0, 0, 8, 3, *[2**32 - 1] * 3), "more than the 1,073,741,824 allowed"),
    "gzip truncated": (gzip.compress(GOOD)[:-9], "is damaged or was not copied completely"),
    "gzip half": (gzip.compress(GOOD)[:4000], "is damaged or was not copied completely"),
    "gzip without its checksum": (gzip.compress(GOOD)[:-8], "is damaged or was not copied completely"),
    "gzip of too much": (gzip.compress(GOOD + b"\0"), "goes on after the 9,408 values"),
    "other sizes": (idx(np.zeros((12, 32, 30), np.uint8)), "has images of 32x30 instead of 28x28"),
}


@pytest.mark.parametrize("case", BAD_IDX)
def test_a_bad_idx_file_is_refused_by_name(tmp_path, case):
    """Whatever is wrong with an image file, one sentence names the file and the fault."""
    write_idx_files(tmp_path)
    content, expected = BAD_IDX[case]
    (tmp_path / IMAGES).write_bytes(content)
    text = refused("mnist", tmp_path)
    assert str(tmp_path / IMAGES) in text
    assert expected in text


@pytest.mark.parametrize("position", [40, 4000, -6])
def test_a_flipped_bit_in_a_gzip_file_is_noticed(tmp_path, position):
    """Damage within the data or in the checksum never gives wrong pixels."""
    write_idx_files(tmp_path, packed=True)
    path = tmp_path / f"{IMAGES}.gz"
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(bytes(content))
    assert f"data file {path} is damaged or was not copied completely" in refused("mnist", tmp_path)


def test_the_limit_of_values_is_where_it_says(tmp_path, monkeypatch):
    """A file of exactly the limit is read; one value less of limit refuses it before anything is allocated."""
    path = tmp_path / "x"
    path.write_bytes(idx(labels(10)))
    monkeypatch.setattr(dataset_files, "MAX_IDX_BYTES", 10)
    assert dataset_files.read_idx(path, 1).tolist() == labels(10).tolist()
    monkeypatch.setattr(dataset_files, "MAX_IDX_BYTES", 9)
    with pytest.raises(ConfigurationError, match="claims 10 values, more than the 9 allowed"):
        dataset_files.read_idx(path, 1)


def test_a_label_that_is_no_digit_is_refused(tmp_path):
    """The first example with a label above 9 is named."""
    write_idx_files(tmp_path)
    (tmp_path / LABELS).write_bytes(idx(np.array([0, 9, 10, 11], np.uint8)))
    assert "has label 10 at example 2" in refused("mnist", tmp_path)


def test_more_images_than_labels_are_refused(tmp_path):
    """Files of two downloads that do not belong together are noticed."""
    write_idx_files(tmp_path)
    (tmp_path / LABELS).write_bytes(idx(labels(11)))
    assert "train_features has 12 examples, train_labels 11" in refused("mnist", tmp_path)


def test_files_without_examples_are_refused(tmp_path):
    """An IDX file may claim no example at all."""
    write_idx_files(tmp_path, test=0)
    assert "test_features has no examples" in refused("mnist", tmp_path)


def test_an_incomplete_folder_names_what_is_missing_and_where_it_is(tmp_path):
    """Three files of four are a mistake, not a reason to take other data."""
    write_idx_files(tmp_path)
    (tmp_path / LABELS).unlink()
    text = refused("mnist", tmp_path)
    assert f"data file {tmp_path / LABELS}.gz is missing beside {IMAGES}" in text
    assert f"get {LABELS}.gz from https://storage.googleapis.com/cvdf-datasets/mnist/" in text


def test_a_data_dir_that_does_not_exist_is_refused(tmp_path):
    """A mistyped --data-dir is not silently replaced by a download."""
    for name in ("mnist", "fashion_mnist", "cifar10"):
        assert f"--data-dir {tmp_path / 'nowhere'} is not a folder" in refused(name, tmp_path / "nowhere")


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    """An error of the operating system keeps its reason."""
    write_idx_files(tmp_path)
    real_open = Path.open

    def deny(path, *arguments, **options):
        if path.name == IMAGES:
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", deny)
    assert f"data file {tmp_path / IMAGES} cannot be read: Permission denied" in refused("mnist", tmp_path)


LONG = "n" * 300


def test_a_path_that_cannot_be_looked_at_is_one_sentence(tmp_path, monkeypatch):
    """A name that is too long, a home that nobody has, a folder that may not be entered, a circle of links."""
    monkeypatch.chdir(tmp_path)
    assert f"data file {LONG} cannot be used: File name too long" in refused(f"npz:{LONG}")
    assert f"--data-dir {LONG} cannot be used: File name too long" in refused("mnist", Path(LONG))
    assert "~nobody-of-this-name/x.npz cannot be used: its ~" in refused("npz:~nobody-of-this-name/x.npz")
    assert "--dataset ~nobody-of-this-name/x.py cannot be used" in refused("~nobody-of-this-name/x.py:load")
    assert "cannot be used" in refused(f"{LONG}.py:load")
    (tmp_path / "circle.py").symlink_to("circle.py")
    assert "--dataset circle.py:load cannot be used" in refused("circle.py:load")
    real_stat = Path.stat

    def deny(path, **options):
        if path.parent.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return real_stat(path, **options)

    monkeypatch.setattr(Path, "stat", deny)
    closed = tmp_path / "closed"
    closed.mkdir()
    for spec in ("mnist", "fashion_mnist", "cifar10"):
        assert f"data file {closed}" in refused(spec, closed)
    assert "closed/x.npz cannot be used: Permission denied" in refused("npz:closed/x.npz")
    assert "closed/x.py cannot be used: Permission denied" in refused("closed/x.py:load")


# ---- download ------------------------------------------------------------------------------------------


def fake_pooch(monkeypatch, cache, retrieve):
    module = types.ModuleType("pooch")
    module.os_cache = lambda name: cache / name
    module.retrieve = retrieve
    monkeypatch.setitem(sys.modules, "pooch", module)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_without_pooch_the_sentence_says_what_to_do(tmp_path, name):
    """Neither files nor pooch: how to install it, and which files to get where."""
    text = refused(name, tmp_path)
    assert f"data set {name} is not in {tmp_path}, and pooch, which downloads it, is not installed" in text
    assert "pip install 'weighmaster[datasets]'" in text
    assert ("cifar-10-binary.tar.gz" if name == "cifar10" else "t10k-labels-idx1-ubyte.gz") in text
    assert "https://" in text and "--data-dir" in text


def test_downloads_are_checked_and_read(tmp_path, monkeypatch):
    """Each file is asked for with its SHA-256 and kept in the user's cache, where it is read from."""
    files = write_idx_files(tmp_path / "server", packed=True)
    asked = {}

    def retrieve(url, known_hash, fname, path):
        asked[url] = known_hash
        path.mkdir(parents=True, exist_ok=True)
        (path / fname).write_bytes((files / fname).read_bytes())
        return str(path / fname)

    fake_pooch(monkeypatch, tmp_path / "cache", retrieve)
    assert len(load_dataset("mnist", None).train_labels) == 12
    base = "https://storage.googleapis.com/cvdf-datasets/mnist/"
    assert list(asked) == [f"{base}{name}.gz" for name in IDX_FILES]
    assert all(len(checksum) == len("sha256:") + 64 for checksum in asked.values())
    assert len(set(asked.values())) == 4
    assert (tmp_path / "cache/weighmaster/mnist" / f"{IMAGES}.gz").is_file()


def test_no_internet_is_one_sentence(tmp_path, monkeypatch):
    """A failed download says which file, why, and where else to get it."""

    def retrieve(url, known_hash, fname, path):
        raise ConnectionError("HTTPSConnectionPool(...)\nMax retries exceeded")

    fake_pooch(monkeypatch, tmp_path, retrieve)
    text = refused("cifar10")
    assert "data file cifar-10-binary.tar.gz of cifar10 is not on this machine and could not be downloaded" in text
    assert "(ConnectionError): check the internet connection, or get cifar-10-binary.tar.gz from https://" in text


def test_a_wrong_checksum_is_one_sentence(tmp_path, monkeypatch):
    """A download that is not the known file is not used."""

    def retrieve(url, known_hash, fname, path):
        raise ValueError("SHA256 hash of downloaded file does not match")

    fake_pooch(monkeypatch, tmp_path, retrieve)
    assert f"{IMAGES}.gz of fashion_mnist is not on this machine, and the download has another checksum" in refused(
        "fashion_mnist"
    )


# ---- CIFAR-10 ------------------------------------------------------------------------------------------


def cifar_records(n, seed):
    records = np.random.default_rng(seed).integers(0, 256, (n, 3073), np.uint8)
    records[:, 0] = np.arange(n) % 10
    return records


def cifar_files(records=(3, 1, 2, 2, 1, 4)):
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    return {
        name: cifar_records(n, seed).tobytes() for seed, (name, n) in enumerate(zip(names, records, strict=True))
    }


def write_tar(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def cifar_members(files=None):
    return [(f"cifar-10-batches-bin/{name}", content) for name, content in (files or cifar_files()).items()]


def check_cifar(dataset):
    """Channel c of pixel (y, x) of record i is byte 1 + c*1024 + y*32 + x, in the order of the files."""
    train = np.concatenate([cifar_records(n, seed) for seed, n in enumerate((3, 1, 2, 2, 1))])
    assert dataset.train_features.shape == (9, 32, 32, 3)
    assert dataset.test_features.shape == (4, 32, 32, 3)
    assert dataset.train_features.dtype == np.uint8 and dataset.train_features.flags.c_contiguous
    for i, y, x, c in ((0, 0, 0, 0), (3, 5, 7, 2), (8, 31, 0, 1), (5, 31, 31, 2)):
        assert dataset.train_features[i, y, x, c] == train[i, 1 + c * 1024 + y * 32 + x]
    assert dataset.train_labels.tolist() == train[:, 0].tolist()
    assert dataset.test_labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("below", [".", "cifar10"])
def test_cifar_archive_is_read_without_unpacking(tmp_path, below):
    """The archive gives the right pixels, and no file appears beside it."""
    folder = tmp_path / below
    folder.mkdir(exist_ok=True)
    path = write_tar(folder / "cifar-10-binary.tar.gz", cifar_members())
    check_cifar(load_dataset("cifar10", tmp_path))
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("below", [".", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10"])
def test_cifar_folder_is_read(tmp_path, below):
    """The unpacked files are found where tar puts them, or directly in --data-dir."""
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    for name, content in cifar_files().items():
        (tmp_path / below / name).write_bytes(content)
    check_cifar(load_dataset("cifar10", tmp_path))


def test_hostile_members_of_an_archive_are_never_followed(tmp_path):
    """Members outside the folder, links, and look-alike names are skipped; nothing is written anywhere."""
    link = tarfile.TarInfo("cifar-10-batches-bin/readme.html")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    hostile = [
        ("../../escaped.bin", b"x"),
        (str(tmp_path / "absolute.bin"), b"x"),
        ("evil/../cifar-10-batches-bin/data_batch_1.bin", cifar_records(5, 9).tobytes()),
        ("./cifar-10-batches-bin/test_batch.bin", cifar_records(5, 9).tobytes()),
        ("", link),
    ]
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    path = write_tar(folder / "cifar-10-binary.tar.gz", [*hostile, *cifar_members()])
    check_cifar(load_dataset("cifar10", folder))
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "a", folder, path]


def test_a_wanted_member_that_is_a_link_is_refused(tmp_path):
    """A link in the place of a data file would read another file of the machine."""
    link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    path = write_tar(tmp_path / "cifar-10-binary.tar.gz", [("", link), *cifar_members()[1:]])
    text = refused("cifar10", tmp_path)
    assert f"data file {path} holds 'cifar-10-batches-bin/data_batch_1.bin' twice, or not as an ordinary" in text


def test_a_member_that_comes_twice_is_refused(tmp_path):
    """Which of the two is meant cannot be known."""
    write_tar(tmp_path / "cifar-10-binary.tar.gz", [*cifar_members(), *cifar_members()[:1]])
    assert "holds 'cifar-10-batches-bin/data_batch_1.bin' twice" in refused("cifar10", tmp_path)


def test_a_missing_member_is_named(tmp_path):
    """An archive without the test images cannot be used."""
    write_tar(tmp_path / "cifar-10-binary.tar.gz", cifar_members()[:-1])
    assert "has no member 'cifar-10-batches-bin/test_batch.bin'" in refused("cifar10", tmp_path)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_archive_is_refused(tmp_path, keep):
    """Wherever a copy stopped, the archive is named and nothing is used of it."""
    path = write_tar(tmp_path / "cifar-10-binary.tar.gz", cifar_members())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    assert f"data file {path} is damaged or was not copied completely" in refused("cifar10", tmp_path)


def test_an_archive_with_a_wrong_checksum_is_refused(tmp_path):
    """The gzip checksum at the very end is compared, although all members were read before."""
    path = write_tar(tmp_path / "cifar-10-binary.tar.gz", cifar_members())
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(bytes(content))
    assert f"data file {path} is damaged" in refused("cifar10", tmp_path)


def test_an_archive_that_never_ends_is_refused(tmp_path, monkeypatch):
    """What follows the last member is read up to a limit only."""
    path = write_tar(tmp_path / "cifar-10-binary.tar.gz", cifar_members())
    packed = gzip.compress(gzip.decompress(path.read_bytes()) + bytes(100_000))
    path.write_bytes(packed)
    check_cifar(load_dataset("cifar10", tmp_path))
    monkeypatch.setattr(dataset_files, "MAX_TAR_TAIL_BYTES", 50_000)
    assert f"data file {path} goes on long after its last member" in refused("cifar10", tmp_path)


@pytest.mark.parametrize(("size", "shown"), [(0, "0"), (3072, "3,072"), (3074 * 2, "6,148")])
def test_cifar_files_that_are_no_records_are_refused(tmp_path, size, shown):
    """Empty files, cut files and CIFAR-100's records of 3,074 bytes are told from CIFAR-10's."""
    files = cifar_files()
    files["data_batch_2.bin"] = bytes(size)
    archive = write_tar(tmp_path / "cifar-10-binary.tar.gz", cifar_members(files))
    text = refused("cifar10", tmp_path)
    assert str(archive) in text and f"has {shown} bytes, which are not records of 3,073" in text
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    text = refused("cifar10", tmp_path)
    assert f"data file {tmp_path / 'data_batch_2.bin'} has {shown} bytes" in text


def test_the_size_of_a_cifar_file_is_limited_before_it_is_read(tmp_path, monkeypatch):
    """The limit itself passes, one byte less of limit refuses."""
    write_tar(tmp_path / "cifar-10-binary.tar.gz", cifar_members())
    monkeypatch.setattr(dataset_files, "MAX_CIFAR_FILE_BYTES", 4 * 3073)
    check_cifar(load_dataset("cifar10", tmp_path))
    monkeypatch.setattr(dataset_files, "MAX_CIFAR_FILE_BYTES", 4 * 3073 - 1)
    assert "has 12,292 bytes, more than the 12,291 allowed" in refused("cifar10", tmp_path)


def test_a_missing_unpacked_file_is_named(tmp_path):
    """Five of six files are a mistake."""
    for name, content in list(cifar_files().items())[1:]:
        (tmp_path / name).write_bytes(content)
    assert f"data file {tmp_path / 'data_batch_1.bin'} is missing" in refused("cifar10", tmp_path)


def test_a_label_that_is_no_class_of_cifar_is_refused(tmp_path):
    """Random bytes of the right length are noticed by their labels."""
    files = cifar_files()
    files["test_batch.bin"] = bytes([200]) * 3073
    write_tar(tmp_path / "cifar-10-binary.tar.gz", cifar_members(files))
    assert "has label 200 at example 0" in refused("cifar10", tmp_path)


def test_the_pickled_version_is_refused_unread(tmp_path):
    """The better known archive of CIFAR-10 is a pickle; the sentence says which one to get."""
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"never read")
    text = refused("cifar10", tmp_path)
    assert "is the pickled version of CIFAR-10, which is never loaded" in text
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in text


# ---- digits --------------------------------------------------------------------------------------------


def test_digits_split_is_fixed_and_stratified():
    """About a fifth of each class is for testing, and the images are scikit-learn's, scaled to 0..1."""
    from sklearn.datasets import load_digits

    dataset = load_dataset("digits", None)
    assert dataset.train_features.shape == (1438, 8, 8)
    assert dataset.test_features.shape == (359, 8, 8)
    assert dataset.train_features.dtype == np.float32
    assert dataset.train_labels.dtype == np.int32
    assert dataset.train_features.min() == 0 and dataset.train_features.max() == 1
    train, test = np.bincount(dataset.train_labels), np.bincount(dataset.test_labels)
    assert np.all(np.abs(test / (train + test) - 0.2) < 0.005)
    together = np.concatenate([dataset.train_features, dataset.test_features]) * 16
    original = load_digits().images
    assert sorted(map(bytes, together.astype(np.uint8))) == sorted(map(bytes, original.astype(np.uint8)))
    assert np.array_equal(dataset.train_features[0] * 16, original[0])
    assert np.array_equal(dataset.test_features, load_dataset("digits", Path("nowhere")).test_features)
    assert num_classes(dataset) == 10


def test_digits_without_scikit_learn(monkeypatch):
    """The sentence says what to install."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "scikit-learn, which is not installed: run pip install 'weighmaster[datasets]'" in refused("digits")


# ---- npz -----------------------------------------------------------------------------------------------


def small_arrays(**changes):
    arrays = {
        "train_features": np.arange(12, dtype=np.float32).reshape(6, 2),
        "train_labels": np.array([0, 1, 2, 0, 1, 2]),
        "test_features": np.ones((2, 2), np.float32),
        "test_labels": np.array([2, 3], np.uint8),
    }
    return {key: array for key, array in (arrays | changes).items() if array is not None}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_read(tmp_path, save):
    """Both kinds of npz, Fortran order and big-endian numbers included, come out as one form."""
    features = np.asfortranarray(small_arrays()["train_features"].astype(">f4"))
    save(tmp_path / "data.npz", **small_arrays(train_features=features, unused=np.array([object()])))
    for spec, data_dir in (("npz:data.npz", None), (f"npz:{tmp_path}/data.npz", Path("/nowhere"))):
        dataset = load_dataset(spec, data_dir)
        assert np.array_equal(dataset.train_features, small_arrays()["train_features"])
        assert dataset.train_features.dtype == np.dtype("=f4") and dataset.train_features.dtype.isnative
        assert dataset.train_features.flags.c_contiguous
        assert dataset.test_labels.dtype == np.int32 and num_classes(dataset) == 4


def test_npz_is_also_found_in_the_data_dir(tmp_path):
    """A relative file that is not here is looked for in --data-dir."""
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "x.npz", **small_arrays())
    assert len(load_dataset("npz:x.npz", tmp_path / "data").train_labels) == 6


class Bomb:
    """Unpickling this is noticed."""

    def __reduce__(self):
        return (pytest.fail, ("an object was unpickled",))


def test_npz_with_objects_is_refused_unopened(tmp_path):
    """An object array could run code; it is refused by its header."""
    np.savez(tmp_path / "x.npz", **small_arrays(train_labels=np.array([Bomb()] * 6, object)))
    text = refused("npz:x.npz")
    assert "array 'train_labels' of data file x.npz holds Python objects, which are never loaded" in text


def test_npz_that_is_a_pickle_is_refused(tmp_path):
    """numpy.load would try to unpickle a file of another kind."""
    import pickle

    (tmp_path / "x.npz").write_bytes(pickle.dumps(Bomb()))
    assert "data file x.npz is damaged" in refused("npz:x.npz")


def test_npz_without_a_key_names_it(tmp_path):
    """The missing array and those that are there are listed."""
    np.savez(tmp_path / "x.npz", **small_arrays(test_labels=None))
    text = refused("npz:x.npz")
    assert (
        "data file x.npz has no array 'test_labels', only 'test_features', 'train_features', 'train_labels'" in text
    )


def test_npz_missing_or_damaged(tmp_path):
    """No file, a cut file, and a flipped byte are each one sentence."""
    assert "data file x.npz is missing" in refused("npz:x.npz")
    np.savez(tmp_path / "x.npz", **small_arrays())
    content = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(content[:-100])
    assert "data file x.npz is damaged" in refused("npz:x.npz")
    flipped = bytearray(content)
    flipped[content.index(np.float32(11).tobytes())] ^= 1
    (tmp_path / "x.npz").write_bytes(bytes(flipped))
    assert "data file x.npz is damaged" in refused("npz:x.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_whatever_byte_of_an_npz_is_damaged_it_is_one_sentence(tmp_path, save):
    """Each byte in turn, in several ways: the file is read, or refused by name; nothing else is raised."""
    path = tmp_path / "x.npz"
    save(path, a=np.arange(3))
    content = path.read_bytes()
    refusals = 0
    for position, byte in enumerate(content):
        for changed in (byte ^ 0xFF, byte ^ 1, 14):
            path.write_bytes(content[:position] + bytes([changed]) + content[position + 1 :])
            try:
                dataset_files.read_npz(path, ["a"])
            except ConfigurationError as error:
                refusals += 1
                assert str(path) in str(error) and str(error).isprintable()
    assert refusals > len(content)


def npy(header, data=b""):
    header = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    "member",
    [
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 1000), }"),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1), }", bytes(8)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }", bytes(15)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': __import__('os'), }"),
        npy("not a header"),
        b"\x93NUMPY\x09\x00" + bytes(100),
        b"nothing",
        b"",
    ],
)
def test_npz_with_a_lying_header_is_refused(tmp_path, monkeypatch, member):
    """A header that claims more or less than is there is refused before memory is taken for it."""
    monkeypatch.setattr(np.lib.format, "read_array", lambda *_, **__: pytest.fail("the array was read"))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for key in datasets.NPZ_KEYS:
            archive.writestr(f"{key}.npy", member)
    text = refused("npz:x.npz")
    assert "data file x.npz" in text and "train_features" in text


# ---- the user's own ------------------------------------------------------------------------------------

LOAD = """
import numpy
import worker
from neighbour import LABELS

def load(data_dir):
    return worker.Dataset(numpy.full((2, 3), len(str(data_dir))), LABELS, numpy.zeros((2, 3), int), LABELS)
"""


def test_a_users_function_is_called_with_the_data_dir(tmp_path, monkeypatch):
    """The function gets --data-dir, and its file may import its neighbours."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "data.py").write_text(LOAD)
    (folder / "neighbour.py").write_text("import numpy\nLABELS = numpy.array([0, 1])\n")
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    dataset = load_dataset("mine/data.py:load", Path("abc"))
    assert dataset.train_features.tolist() == [[3] * 3] * 2
    assert dataset.train_labels.dtype == np.int32
    del sys.modules["neighbour"]


BAD_FILES = {
    "no file": (None, "load", "because there is no file"),
    "no function": ("x = 1", "load", "has no function 'load'"),
    "not a function": ("load = 1", "load", "has something else called 'load'"),
    "no name": ("x = 1", "", "does not name a function: write file.py:function"),
    "not a name": ("x = 1", "a b", "does not name a function"),
    "raises": (
        "def load(data_dir):\n    raise KeyError('column')",
        "load",
        "failed with KeyError at line 2: 'column'",
    ),
    "raises far away": (
        "import json\ndef load(data_dir):\n    json.loads('{')",
        "load",
        "failed with JSONDecodeError at line 3: Expecting",
    ),
    "raises deeper": (
        "def inner():\n    raise KeyError(1)\ndef load(data_dir):\n    inner()",
        "load",
        "failed with KeyError at line 2: 1",
    ),
    "raises nothing in words": ("def load(d):\n    raise ValueError", "load", "ValueError at line 2: no message"),
    "raises many lines": ("def load(d):\n    raise ValueError('a\\nb')", "load", "ValueError at line 2: a b"),
    "exits": ("def load(data_dir):\n    raise SystemExit(0)", "load", "failed with SystemExit at line 2: 0"),
    "exits at import": ("import sys\nsys.exit(1)", "load", "failed with SystemExit at line 2: 1"),
    "syntax": ("def load(:", "load", "failed with SyntaxError at line 1: invalid syntax"),
    "import": (
        "\nimport not_a_module_at_all",
        "load",
        "failed with ModuleNotFoundError at line 2: No module named",
    ),
    "takes nothing": (
        "def load(): pass",
        "load",
        "failed with TypeError: load() takes 0 positional arguments but 1 was given; it must be `load(data_dir)`",
    ),
    "returns nothing": ("def load(data_dir): pass", "load", "returned None instead of worker.Dataset("),
    "returns a tuple": ("def load(data_dir): return 1, 2", "load", "returned a tuple instead of worker.Dataset("),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_users_mistake_is_one_sentence(tmp_path, case):
    """Whatever a user's file does wrong, the sentence names the option, the reason and the line."""
    code, function, expected = BAD_FILES[case]
    if code is not None:
        (tmp_path / "mine.py").write_text(code)
    text = refused(f"{tmp_path}/mine.py:{function}")
    assert text.startswith(f"--dataset {tmp_path}/mine.py")
    assert expected in text


def test_a_users_file_runs_once(tmp_path):
    """Two functions of one file share its module, as in a script."""
    (tmp_path / "mine.py").write_text("def load(data_dir):\n    calls.append(1)\n    return calls\ncalls = []\n")
    for _ in range(2):
        refused(f"{tmp_path}/mine.py:load")
    from protocol.user_function import load_user_function

    assert load_user_function(f"{tmp_path}/mine.py:load", "--model")(None) == [1, 1, 1]


def test_a_file_that_failed_is_not_remembered(tmp_path):
    """After a failed import the same file, corrected, can be loaded by the same process."""
    (tmp_path / "mine.py").write_text("nonsense")
    assert "NameError at line 1" in refused(f"{tmp_path}/mine.py:load")
    (tmp_path / "mine.py").write_text("def load(data_dir):\n    return None")
    assert "returned None" in refused(f"{tmp_path}/mine.py:load")


# ---- the check -----------------------------------------------------------------------------------------


def small(**changes):
    return Dataset(**small_arrays(**changes))


BAD_ARRAYS = {
    "list": ({"train_features": [[1.0]]}, "train_features is a list"),
    "scalar": ({"train_features": np.float32(1) * np.ones(())}, "train_features is a float64"),
    "0-d": ({"train_features": np.array(1.0)}, "train_features has no examples"),
    "no examples": ({"test_features": np.ones((0, 2), np.float32)}, "test_features has no examples"),
    "no values": ({"train_features": np.ones((6, 0), np.float32)}, "so an example holds no values"),
    "text": ({"train_features": np.full((6, 2), "a")}, "train_features has dtype <U1"),
    "objects": ({"train_features": np.full((6, 2), None)}, "train_features has dtype object"),
    "complex": ({"train_features": np.ones((6, 2), complex)}, "train_features has dtype complex128"),
    "fewer labels": ({"train_labels": np.arange(5)}, "train_features has 6 examples, train_labels 5"),
    "one-hot": ({"train_labels": np.eye(6, dtype=int)}, "instead of one number per example; one-hot"),
    "one column": ({"train_labels": np.arange(6)[:, None]}, "one number per example; .reshape(-1) makes them that"),
    "column of columns": ({"train_labels": np.zeros((6, 1, 1), int)}, "; .reshape(-1) makes them that"),
    "two columns": (
        {"train_labels": np.eye(6, 2, dtype=int)},
        "one-hot labels become numbers with .argmax(axis=1)",
    ),
    "float labels": ({"test_labels": np.ones(2)}, "test_labels has dtype float64"),
    "bool labels": ({"test_labels": np.ones(2, bool)}, "test_labels has dtype bool"),
    "negative": ({"train_labels": np.array([0, 1, 2, 3, -4, 5])}, "train_labels contains -4"),
    "above int32": ({"test_labels": np.array([0, 2**31])}, "test_labels contains 2147483648"),
    "above int64": ({"test_labels": np.array([0, 2**63], np.uint64)}, "contains 9223372036854775808"),
    "other shape": (
        {"test_features": np.ones((2, 3), np.float32)},
        "float32 [2] an example, test_features float32 [3]",
    ),
    "other dtype": ({"test_features": np.ones((2, 2))}, "float32 [2] an example, test_features float64 [2]"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_arrays_that_are_no_data_set_are_refused(case):
    """The array at fault is named, with what it is."""
    changes, expected = BAD_ARRAYS[case]
    with pytest.raises(ConfigurationError) as caught:
        checked(small(**changes), "mine")
    assert str(caught.value).startswith("data set mine cannot be used: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("shape", [(6, 2, 2), (6, 0)])
def test_labels_that_no_advice_mends_get_none(shape):
    """An advice that would give the data other labels, or fail, is worse than none."""
    with pytest.raises(ConfigurationError, match=r"instead of one number per example$"):
        checked(small(train_labels=np.zeros(shape, int)), "mine")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("example", [0, 2, 5])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_value_that_is_not_finite_is_found(monkeypatch, value, example, dtype):
    """NaN and infinity are found in whichever block they lie, and their example is named."""
    monkeypatch.setattr(datasets, "FINITE_CHECK_VALUES", 3)
    features = np.zeros((6, 4), dtype)
    test_features = np.ones((2, 4), dtype)
    assert checked(small(train_features=features, test_features=test_features), "mine")
    features[example, 1] = value
    with pytest.raises(ConfigurationError, match=f"train_features has NaN or infinity in example {example};"):
        checked(small(train_features=features, test_features=test_features), "mine")


def test_the_largest_labels_that_pass():
    """2**31 - 1 is a label, but no class; 999,999 is a class and 1,000,000 is not."""
    assert checked(small(test_labels=np.array([0, 2**31 - 1])), "mine").test_labels[1] == 2**31 - 1
    assert num_classes(checked(small(test_labels=np.array([0, 999_999])), "mine")) == 1_000_000
    with pytest.raises(ConfigurationError, match="label 1,000,000 is too large to be a class"):
        num_classes(checked(small(test_labels=np.array([0, 1_000_000])), "mine"))


def test_an_unknown_name_lists_the_known():
    """A slip of the finger is answered with the nearest name and all the others."""
    text = refused("mnits")
    assert "there is no data set 'mnits' (did you mean mnist?)" in text
    assert "use digits, mnist, fashion_mnist, cifar10, npz:FILE or file.py:function" in text


def test_no_tensorflow_is_imported():
    """Data sets are loaded and checked where TensorFlow is not installed."""
    code = (
        "import sys, worker.datasets, worker.batches; worker.datasets.load_dataset('digits', None); "
        "print('tensorflow' in sys.modules, 'pooch' in sys.modules)"
    )
    root = Path(datasets.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root, timeout=100
    )
    assert done.stdout.split() == ["False", "False"]
