"""The worker: computes gradients on its own data and pushes them to the parameter server.

Importing this package needs no TensorFlow; only `worker.graph` and `worker.models` do. Its names are loaded when
they are first asked for, so that `python -m worker` can deal with signals before anything takes time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protocol.ensemble import Answers
    from worker.client import Server, Update
    from worker.definitions import Dataset, Model
    from worker.joining import connect

__all__ = ["Answers", "Dataset", "Model", "Server", "Update", "connect"]

_HOMES = {
    "Answers": "protocol.ensemble",
    "Dataset": "worker.definitions",
    "Model": "worker.definitions",
    "Server": "worker.client",
    "Update": "worker.client",
    "connect": "worker.joining",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
