"""A member of an ensemble without TensorFlow: a softmax regression of its own, in float64.

Run by the tests of this folder: python light_member.py HOST:PORT RANK [options]. It can misbehave in one step.
"""

import argparse
import os
import signal
import sys

import numpy as np

import worker
from protocol.errors import WeighmasterError

BATCH, FEATURES, CLASSES, TEST = 8, 5, 3, 20


def data(step, examples=BATCH):
    """Features and labels of a step, the same for all members."""
    random = np.random.default_rng(step)
    features = random.normal(size=(examples, FEATURES))
    return features, np.argmax(features[:, :CLASSES], 1).astype(np.int32)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("rank", type=int)
    parser.add_argument("--batch", type=int, default=BATCH, help="what it offers")
    parser.add_argument("--no-answers", action="store_true")
    parser.add_argument("--shared", action="store_true", help="with a shared bias")
    parser.add_argument("--other-labels", type=int, default=-1, metavar="STEP")
    parser.add_argument("--nan-logits", type=int, default=-1, metavar="STEP")
    parser.add_argument("--leave", type=int, default=-1, metavar="STEP")
    parser.add_argument("--die", type=int, default=-1, metavar="STEP", help="before the push, after the logits")
    options = parser.parse_args()
    try:
        train(options)
    except WeighmasterError as error:
        print(f"light-worker: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def train(options: argparse.Namespace) -> None:
    random = np.random.default_rng(100 + options.rank)
    variables = {"kernel": random.normal(size=(FEATURES, CLASSES))}
    if options.shared:
        variables["shared/bias"] = np.zeros(CLASSES)
    answers = None if options.no_answers else worker.Answers(options.batch, CLASSES, "float64", TEST)
    with worker.connect(
        options.address, variables, rank=options.rank, name=f"member-{options.rank}", answers=answers, on_event=say
    ) as server:
        say(f"joined as rank {server.rank}")
        update = server.pull()
        while True:
            features, labels = data(10**6, TEST)
            server.vote(logits_of(update, features), labels)
            if update.done:
                break
            update = step(options, server, update)
            if not update.applied:
                say(f"not applied: {update.reason}")
        say(f"done at step {update.step}")


def logits_of(update, features):
    return features @ update.values["kernel"] + update.values.get("shared/bias", 0.0)


def step(options, server, update):
    if update.step == options.leave:
        say(f"leaving at step {update.step}")
        server.close()
        sys.exit(0)
    features, labels = data(update.step)
    logits = logits_of(update, features)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    error = powers / powers.sum(1, keepdims=True)
    error[np.arange(BATCH), labels] -= 1.0
    if update.step == options.nan_logits:
        logits = np.full_like(logits, np.nan)
    if update.step == options.other_labels:
        labels = (labels + 1) % CLASSES
    sample = server.weighting == "sample"
    weights = np.ones(BATCH)
    if sample:
        answer = server.weigh(logits, labels)
        if isinstance(answer, worker.Update):
            return answer
        weights = answer
    if update.step == options.die:
        say(f"dying at step {update.step}")
        os.kill(os.getpid(), signal.SIGKILL)
    error *= weights[:, None] / BATCH
    gradients = {"kernel": features.T @ error}
    if options.shared:
        gradients["shared/bias"] = error.sum(0)
    return server.push(
        gradients, loss=1.0, accuracy=0.5, examples=BATCH, logits=None if sample else logits, labels=labels
    )


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
