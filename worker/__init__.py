"""The worker: computes gradients on its own data and pushes them to the parameter server.

Importing this package needs no TensorFlow; only `worker.graph` and `worker.models` do.
"""

from protocol.ensemble import Answers
from worker.client import Server, Update, connect
from worker.definitions import Dataset, Model

__all__ = ["Answers", "Dataset", "Model", "Server", "Update", "connect"]
