"""A function of the user's, named on the command line as `file.py:function`.

The file is run as a module of its own, once per process, however many functions are taken from it; its folder
comes last on the import path, so that it may import its neighbours and they can hide nothing of ours.
"""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from protocol.errors import ConfigurationError, Interrupted


def load_user_function(spec: str, option: str) -> Callable[..., Any]:
    """Import a user's file and return one function of it.

    Args:
        spec: `file.py:function`; a relative path is relative to the current folder.
        option: the option that named it, such as `--dataset`, for messages.

    Raises:
        ConfigurationError: the spec is incomplete, there is no such file or function, or the file raised.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise ConfigurationError(f"{option} {spec} does not name a function: write file.py:function")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ConfigurationError(f"{option} {spec} cannot be used, because there is no file {path}")
    module = _import_file(path, f"{option} {spec}")
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(
            f"{option} {spec} cannot be used, because {path} "
            f"{'has no function' if function is None else 'has something else called'} {name!r}"
        )
    return function  # type: ignore[no-any-return]


def call_user_function(function: Callable[..., Any], spec: str, option: str, *arguments: object) -> Any:
    """Call a user's function, so that whatever it raises becomes one sentence with the line it came from.

    Args:
        function: from `load_user_function`.
        spec: `file.py:function`, for the message.
        option: the option that named it, for the message.
        arguments: what to call it with.

    Raises:
        ConfigurationError: the function raised, or tried to end the process.
    """
    try:
        return function(*arguments)
    except Interrupted:
        raise
    except (Exception, SystemExit) as error:
        path = Path(spec.rpartition(":")[0]).expanduser().resolve()
        raise ConfigurationError(f"{option} {spec} failed with {_reason(error, path)}") from error


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
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return f"{type(error).__name__}{f' at line {line}' if line else ''}: {text[:500] or 'no message'}"
