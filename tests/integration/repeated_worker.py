"""A process that is one worker after another: each line of standard input is the arguments of the next, as JSON.

Starting TensorFlow takes longer than a short run.
"""

import json
import sys

from worker.__main__ import main

if __name__ == "__main__":
    for line in sys.stdin:
        print(f"ended with {int(main(json.loads(line)))}", flush=True)
