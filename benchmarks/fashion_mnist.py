"""Train `mlp` on Fashion-MNIST with real processes, as a user would, and measure accuracy and seconds.

    python -m benchmarks.fashion_mnist [--workers 3] [--passes 3] [--batch-size 100] [--data-dir DIR]

One server, the workers and an evaluator, each started by its command line. A pass is 60,000 images by all workers
together.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.processes import BenchmarkError, processes

TRAINING_IMAGES = 60_000


@dataclass(frozen=True)
class Training:
    """What is trained: `mlp`, by so many workers, for so many passes over all images."""

    workers: int
    passes: int
    batch_size: int
    data_dir: Path | None

    @property
    def steps(self) -> int:
        """Rounds after which all workers together have seen every image `passes` times."""
        return math.ceil(self.passes * TRAINING_IMAGES / (self.workers * self.batch_size))


def train(training: Training, seed: int) -> dict[str, float]:
    """Run once; returns `test_accuracy`, `train_s` (the server's) and `wall_s` (processes and all)."""
    start = time.monotonic()
    with processes("fashion_mnist") as started:
        port_file, summary = started.directory / "port", started.directory / "summary.json"
        server = f"-m ps --port 0 --workers {training.workers} --steps {training.steps} --seed {seed}".split()
        paths = ["--port-file", port_file, "--summary", summary, "--run-dir", started.directory / "run"]
        started.start("server", [sys.executable, *server, *map(str, paths)])
        address = f"127.0.0.1:{started.await_port(port_file)}"
        common = [sys.executable, "-m", "worker", "--ps", address, "--model", "mlp", "--dataset", "fashion_mnist"]
        if training.data_dir:
            common += ["--data-dir", str(training.data_dir)]
        for rank in range(training.workers):
            own = ["--rank", str(rank), "--batch-size", str(training.batch_size)]
            started.start(f"worker{rank}", [*common, *own])
        started.start("evaluator", [*common, "--role", "evaluator", "--evaluate-every", "200"])
        started.wait()
        outcome = json.loads(summary.read_text())
    if outcome["status"] != "done" or outcome["test_accuracy_step"] != training.steps:
        raise BenchmarkError(f"the run did not end with a measurement of its final values: {outcome}")
    return {
        "test_accuracy": outcome["test_accuracy"],
        "train_s": outcome["seconds"],
        "wall_s": time.monotonic() - start,
    }


@click.command()
@click.option("--workers", default=3, type=click.IntRange(1), show_default=True)
@click.option("--passes", default=3, type=click.IntRange(1), show_default=True)
@click.option("--batch-size", default=100, type=click.IntRange(1), show_default=True)
@click.option("--seed", default=0, type=int, show_default=True)
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where the IDX files are, if not where expected.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here too.")
def main(
    workers: int, passes: int, batch_size: int, seed: int, data_dir: Path | None, json_file: Path | None
) -> None:
    """Train `mlp` on Fashion-MNIST and print test accuracy and seconds."""
    training = Training(workers, passes, batch_size, data_dir)
    try:
        figures = train(training, seed)
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    print(
        f"mlp on Fashion-MNIST, {workers} workers, batch {batch_size}, {training.steps} steps "
        f"({passes} passes by all together), seed {seed}: test accuracy {figures['test_accuracy']:.4f}, "
        f"{figures['train_s']:.1f} s of training, {figures['wall_s']:.1f} s with the start of all processes"
    )
    if json_file:
        json_file.write_text(json.dumps({"steps": training.steps, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
