"""A function in a file of the user's, named on the command line as `file.py:function`: find it and call it.

Both sides take such functions: models and data sets of workers, masters of the server. The file is run as a module
of its own, once per process, however many functions are taken from it; its folder comes last on the import path,
so that it may import its neighbours and they can hide nothing of ours.
"""

import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from protocol.errors import ConfigurationError, Interrupted
from protocol.user_paths import Entry, expanded, look

MAX_REASON = 500
"""Characters that are quoted of what a user's code complains about."""

_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Control sequences of ECMA-48; Keras prints its reasons in bold."""


@dataclass(frozen=True)
class UserFunction:
    """A function in a file of the user's.

    Attributes:
        spec: `file.py:function`, as the user wrote it.
        option: the option that named it, such as `--dataset`.
        path: the file, absolute.
        function: what it is called by.
        arguments: how it must be callable, as in `data_dir`, for messages; empty: not said.
    """

    spec: str
    option: str
    path: Path
    function: Callable[..., Any]
    arguments: str = ""

    @property
    def who(self) -> str:
        """How messages name it."""
        return f"{self.option} {self.spec}"

    def __call__(self, *arguments: object) -> Any:
        """Call it; whatever it raises becomes one sentence with the line it came from.

        Raises:
            ConfigurationError: the function raised, or tried to end the process.
        """
        try:
            return self.function(*arguments)
        except Interrupted:
            raise
        except (Exception, SystemExit) as error:
            hint = signature_hint(self.function, self.spec.rpartition(":")[2], arguments, self.arguments)
            raise ConfigurationError(f"{self.who} failed with {_reason(error, self.path)}{hint}") from error


def signature_hint(function: Callable[..., Any], name: str, given: Sequence[object], arguments: str) -> str:
    """Return how a function must be callable, as a clause for the end of a message; nothing if it is.

    Args:
        function: that raised.
        name: it is called by in its file.
        given: what it was called with.
        arguments: their names, as in `features, labels, training`; empty: nothing is said.
    """
    if not arguments:
        return ""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C do not say
        return ""
    try:
        signature.bind(*given)
    except TypeError:
        return f"; it must be `{name}({arguments})`"
    return ""


def locate(spec: str, option: str) -> tuple[Path, str]:
    """Return the file, absolute, and the name of the function that a spec names, without reading the file.

    Raises:
        ConfigurationError: the spec is incomplete, or there is no such file.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise ConfigurationError(f"{option} {spec} does not name a function: write file.py:function")
    written = expanded(file, option)
    try:
        path = written.resolve()
    except (OSError, RuntimeError) as error:  # the latter for links that go round in a circle
        raise ConfigurationError(f"{option} {spec} cannot be used, because {written} cannot be resolved") from error
    if look(path, option) is not Entry.FILE:
        raise ConfigurationError(f"{option} {spec} cannot be used, because there is no file {path}")
    return path, name


def load_user_function(spec: str, option: str, arguments: str = "") -> UserFunction:
    """Import a user's file and return one function of it.

    Args:
        spec: `file.py:function`; a relative path is relative to the current folder.
        option: the option that named it, for messages.
        arguments: how it must be callable, as in `data_dir`, for messages.

    Raises:
        ConfigurationError: the spec is incomplete, there is no such file or function, or the file raised.
    """
    path, name = locate(spec, option)
    function = getattr(_import_file(path, f"{option} {spec}"), name, None)
    if not callable(function):
        has = "has no function" if function is None else "has something else called"
        raise ConfigurationError(f"{option} {spec} cannot be used, because {path} {has} {name!r}")
    return UserFunction(spec, option, path, function, arguments)


def _import_file(path: Path, what: str) -> ModuleType:
    name = f"weighmaster_user_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigurationError(f"{what} cannot be used, because {path} is not a Python file (*.py)")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before it runs, because dataclasses look their module up there
    try:
        module_spec.loader.exec_module(module)
    except Interrupted:
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigurationError(
            f"{what} cannot be used, because importing {path} failed with {_reason(error, path)}"
        ) from error
    return module


def _reason(error: BaseException, path: Path) -> str:
    """Return `KeyError at line 12: 'x'`, with the deepest line of the user's own file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    text = shortened(error.msg if isinstance(error, SyntaxError) else str(error))
    return f"{type(error).__name__}{f' at line {line}' if line else ''}: {text or 'no message'}"


def shortened(text: str) -> str:
    """Return a message as one line of at most `MAX_REASON` characters, without a terminal's colours."""
    return " ".join(_COLOURS.sub("", text).split())[:MAX_REASON]
