"""The house rules that a reader relies on: who imports whom, and what is nowhere."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "ps", "worker")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


FORBIDDEN_PACKAGES = {"protocol": {"ps", "worker"}, "ps": {"worker"}, "worker": {"ps"}}
OUTSIDE_OF_PROTOCOL = {"numpy", "msgpack"}

TENSORFLOW = {"tensorflow", "keras", "tf_keras"}
MAY_IMPORT_TENSORFLOW = {f"worker/{name}.py" for name in ("graph", "binding", "feeding", "proof", "models")} | {
    "ps/rules/user_network.py"  # imported only for a master of the user's own
}

SOCKETS = {"socket", "ssl", "socketserver", "select", "selectors", "asyncio"}
MAY_IMPORT_SOCKETS = {
    "protocol/transport.py",
    *("protocol/tls.py", "protocol/certificates.py"),  # what it wraps sockets in; they open none
    "ps/monitoring/status_server.py",  # the status page has an HTTP server of its own
    "protocol/proxy.py",  # no part of a run: it breaks connections as transport must never do
}
SHELLS_OF_PROTOCOL = {
    *("protocol/transport.py", "protocol/deadlines.py", "protocol/link.py"),
    *("protocol/tokens.py", "protocol/own_files.py"),
    *("protocol/tls.py", "protocol/certificates.py"),
    *("protocol/proxy.py", "protocol/fault_proxy.py", "protocol/injector.py"),
}
IMPURE = SOCKETS | {"threading", "time", "os", "signal", "subprocess"}

FLOORS = {
    "settings": set(),
    "rules": set(),
    "coordination": set(),
    "storage": {"settings"},
    "checkpoints": {"settings"},
    "connections": {"coordination"},
    "monitoring": {"coordination"},
}
"""The packages within ps/, and on which others each rests; what stands in ps/ itself puts them together."""
HOUSES = {*PACKAGES, *(f"ps.{floor}" for floor in FLOORS)}

COORDINATION = {_name(path) for path in MODULES if path.parent.name == "coordination"}
PURE = COORDINATION | {
    "ps/connections/doorstep.py",
    *(f"ps/monitoring/{name}.py" for name in ("history", "metrics", "pace", "trust")),
    *(f"ps/monitoring/{name}.py" for name in ("status", "status_answers", "status_feed")),
    *(f"ps/rules/{name}.py" for name in ("aggregation", "ensemble", "geometry", "network", "rule")),
    "ps/storage/schedules.py",
}
"""Modules of ps/ that neither wait, nor read a clock, nor draw lots: time is an argument, and may jump a day."""
UNFORESEEABLE = IMPURE | {"datetime", "random", "secrets", "uuid", "tempfile", "shutil", "logging", "numba"}

UNSAFE_LOADERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}


def _imported_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        yield node.module or ""
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "__import__",
        "import_module",
        "importlib.import_module",
    ):
        argument = node.args[0] if node.args else None
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def imports_of(source: str) -> Iterator[str]:
    """Yield the full names of all modules that a source imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        yield from _imported_by(node)


def _at_run_time(source: str) -> Iterator[str]:
    """Yield the full names of the modules that a source imports, but not for the sake of types only."""
    tree = ast.parse(source)
    types = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    tree.body = [node for node in tree.body if node not in types]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in HOUSES:  # from ps.coordination import attendance
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from _imported_by(node)


def _roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path.read_text())}


def test_imports_are_found_wherever_they_stand() -> None:
    source = "def f():\n    import a.b\n    from c import d\n    importlib.import_module('e.f')\n"
    assert set(imports_of(source)) == {"a.b", "c", "e.f"}


def test_imports_for_the_sake_of_types_are_told_apart() -> None:
    source = (
        "from ps.rules import a, e\nif TYPE_CHECKING:\n    from ps import b\n    import c\nimport d, ps.storage\n"
    )
    assert set(_at_run_time(source)) == {"ps.rules.a", "ps.rules.e", "d", "ps.storage"}


def test_there_is_something_to_check() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for path in MODULES}
    assert folders == {*PACKAGES, *(f"ps/{floor}" for floor in FLOORS)}


def test_what_is_installed_is_all_that_there_is() -> None:
    """The packages are named one by one: one that is forgotten is missing where nobody works in a checkout."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in MODULES}
    assert set(setuptools["packages"]) == {_name(folder).replace("/", ".") for folder in folders}
    data = setuptools["package-data"].items()
    taken = {
        path for name, patterns in data for each in patterns for path in (ROOT / name.replace(".", "/")).glob(each)
    }
    there = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    assert {
        _name(path) for path in there - taken if path.suffix != ".py" and "__pycache__" not in path.parts
    } == set()


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_module_imports_only_what_its_place_allows(path: Path) -> None:
    name, package, roots = _name(path), path.relative_to(ROOT).parts[0], _roots(path)
    assert not roots & FORBIDDEN_PACKAGES[package]
    assert not roots & UNSAFE_LOADERS, "nothing here may load what can run code"
    if name not in MAY_IMPORT_TENSORFLOW:
        assert not roots & TENSORFLOW
    if name not in MAY_IMPORT_SOCKETS:
        assert not roots & SOCKETS
    if package == "protocol":
        assert roots <= sys.stdlib_module_names | OUTSIDE_OF_PROTOCOL | {"protocol"}
        if name not in SHELLS_OF_PROTOCOL:
            assert not roots & IMPURE, "the core is pure: no socket, thread, clock or environment"


@pytest.mark.parametrize("floor", FLOORS)
def test_a_package_within_ps_rests_only_on_those_below_it(floor: str) -> None:
    within = [path for path in MODULES if path.parent == ROOT / "ps" / floor]
    imported = {name for path in within for name in _at_run_time(path.read_text()) if name.startswith("ps.")}
    assert {name.split(".")[1] for name in imported} - {floor} == FLOORS[floor]


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_pure_module_rests_on_pure_ones(name: str) -> None:
    imported = set(_at_run_time((ROOT / name).read_text()))
    files = {f"{each.replace('.', '/')}.py" for each in imported}
    assert {file for file in files if file.startswith("ps/")} <= PURE
    assert not files & SHELLS_OF_PROTOCOL
    assert not {each.split(".")[0] for each in imported} & UNFORESEEABLE
    assert name not in COORDINATION or "numpy" not in imported, "it decides, and touches no tensor"


def test_every_module_that_says_that_it_is_pure_is_held_to_it() -> None:
    said = {
        _name(path)
        for path in MODULES
        if path.parts[len(ROOT.parts)] == "ps"
        and re.search(r"\bPure\b", ast.get_docstring(ast.parse(path.read_text())) or "")
    }
    assert said and said <= PURE


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_no_array_is_ever_unpickled(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_no_module_is_named_like_one_of_the_standard_library(path: Path) -> None:
    assert path.stem.startswith("__") or path.stem not in sys.stdlib_module_names


def test_no_test_folder_takes_a_packages_place() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert not {folder.name for folder in folders} & set(PACKAGES)
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_core_imports_where_there_is_no_tensorflow() -> None:
    """With TensorFlow made unimportable, all of protocol and ps, and the face of worker, import."""
    modules = [
        _name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in MODULES
        if path.parts[-2] != "worker" and path.stem != "__main__"
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {sorted(TENSORFLOW)!r}: sys.modules[name] = None\n"
        f"for name in {[*modules, 'worker']!r}: importlib.import_module(name)\n"
        "import worker\n"
        "for name in worker.__all__: getattr(worker, name)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=100)


def test_importing_the_packages_does_not_load_tensorflow() -> None:
    program = f"import ps, protocol, worker, sys; sys.exit(bool({TENSORFLOW!r} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=100)


def test_a_run_does_not_import_the_proxy() -> None:
    """It may break the rules about sockets because nothing that trains depends on it."""
    users = {_name(path) for path in MODULES if "protocol.proxy" in set(imports_of(path.read_text()))}
    assert users == {"protocol/fault_proxy.py"}


def test_every_module_stands_in_the_table_of_the_architecture() -> None:
    """A newcomer finds each, once, and nothing that is not there."""
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    told: list[str] = []
    for cell in cells:
        first, *others = re.findall(r"`(\S+)`", cell)
        folder, _, name = first.rpartition("/")
        told += [f"{folder}/{each}.py" for each in (name, *others)]
    assert len(set(told)) == len(told)
    assert set(told) == {_name(path) for path in MODULES if path.stem != "__init__"}


def test_the_architecture_says_who_opens_sockets() -> None:
    text = " ".join((ROOT / "docs/ARCHITECTURE.md").read_text().split())
    openers = MAY_IMPORT_SOCKETS - {"protocol/tls.py", "protocol/certificates.py"}
    (told,) = re.findall(r"too, that only (.*?) open sockets", text)
    assert set(re.findall(r"`(\S+)`", told)) == openers
