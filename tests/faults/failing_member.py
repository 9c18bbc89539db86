"""The light member of an ensemble, with faults: python -m tests.faults.failing_member FAULTS HOST:PORT RANK."""

import functools
import sys

import worker
from tests.integration import light_member

if __name__ == "__main__":
    worker.connect = functools.partial(worker.connect, inject=sys.argv.pop(1))
    sys.exit(light_member.main())
