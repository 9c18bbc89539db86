"""Break processes and connections at random for as long as told, and see whether all that was promised holds.

    python -m benchmarks.soak --minutes 20 --mean-time-between-faults 5 [--consistency sync] [--json FILE]

Exit code 0 if everything held, 1 if not.
"""

import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.processes import BenchmarkError
from benchmarks.soak_course import Findings, Soak, soaking
from benchmarks.soak_faults import WEIGHTS
from benchmarks.soak_invariants import Growth, growth
from benchmarks.soak_processes import Setting
from benchmarks.tally import Counting

REPORT_S = 10.0
SETTLED_S = 120.0


def counting_of(consistency: str, quorum: int | None, worker_loss: str) -> Counting:
    """Return which sums must come out under a mode."""
    if consistency != "sync":
        return Counting.PUSHES
    return Counting.ALL if quorum is None and worker_loss == "wait" else Counting.ROUNDS


def mode_options(consistency: str, quorum: int | None, worker_loss: str) -> tuple[str, ...]:
    """Return the options of the server for a mode."""
    options = ["--consistency", consistency]
    if quorum is not None:
        options += ["--quorum", str(quorum)]
    if consistency == "sync":
        options += ["--on-worker-loss", worker_loss]
    return tuple(options)


def kinds_of(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    kinds = tuple(part.strip() for part in text.split(","))
    unknown = [kind for kind in kinds if kind not in WEIGHTS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(WEIGHTS)}")
    return kinds


def progress(soak: Soak) -> str:
    """Return a line on where a soak stands."""
    findings, last = soak.findings, soak.findings.samples[-1:]
    server = ", ".join(
        f"server {s.life}: {s.resident_bytes / 1e6:.1f} MB, {s.threads} threads, {s.descriptors} descriptors"
        for s in last
    )
    return (
        f"{soak.now_s:5.0f} s: step {findings.furthest}, {findings.faults.total()} faults, "
        f"{findings.restarts.total()} restarts; {server}"
    )


def run(setting: Setting) -> Findings:
    """Soak to the end, or to the first thing that does not hold."""
    with soaking(setting) as soak:
        reported = time.monotonic()
        for _ in soak.break_things():
            if time.monotonic() - reported >= REPORT_S:
                reported = time.monotonic()
                soak.check_history()
                print(progress(soak), flush=True)
        soak.finish()
        print(progress(soak), flush=True)
        return soak.findings


def verdict(findings: Findings, grown: Growth | None, settled_s: float) -> str:
    """Return the last lines: what has happened, what was measured, what does not hold."""
    lines = ["", "| what | how often |", "| --- | ---: |"]
    lines += [f"| {kind} | {count} |" for kind, count in sorted(findings.faults.items())]
    lines += [f"| {who} started again | {count} |" for who, count in sorted(findings.restarts.items())]
    lines += [f"| answers that workers told of | {findings.answers} |", ""]
    if grown is not None:
        lives: dict[int, list[int]] = {}
        for sample in findings.samples:
            lives.setdefault(sample.life, []).append(sample.resident_bytes)
        lines.append(
            f"server: {grown.base_bytes / 1e6:.1f} MB at most in the first {settled_s:.0f} s, "
            f"{grown.peak_bytes / 1e6:.1f} MB at most after ({grown.resident:.3f} x); largest of its {len(lives)} "
            f"lives, median {statistics.median(max(life) for life in lives.values()) / 1e6:.1f} MB; "
            f"threads {grown.threads:+d}, descriptors {grown.descriptors:+d}"
        )
    lines += [f"BROKEN: {problem}" for problem in findings.problems]
    lines.append("verdict: " + ("BROKEN" if findings.problems else f"all held, to step {findings.furthest}"))
    return "\n".join(lines)


def report_of(setting: Setting, findings: Findings, grown: Growth | None) -> dict[str, Any]:
    return {
        "setting": asdict(setting),
        "problems": findings.problems,
        "faults": findings.faults,
        "restarts": findings.restarts,
        "furthest": findings.furthest,
        "growth": None if grown is None else asdict(grown),
        "samples": [asdict(sample) for sample in findings.samples],
    }


@click.command()
@click.option("--minutes", default=20.0, type=click.FloatRange(min=0, min_open=True), show_default=True)
@click.option("--mean-time-between-faults", "mean_s", default=5.0, show_default=True, help="Seconds.")
@click.option(
    "--faults",
    default=",".join(WEIGHTS),
    callback=kinds_of,
    show_default=True,
    help="Kinds, with commas between. Without 'kill the server' one server lives from beginning to end.",
)
@click.option("--workers", default=4, type=click.IntRange(2), show_default=True)
@click.option("--parameters", default=100_000, type=click.IntRange(1), show_default=True, help="float64.")
@click.option("--consistency", default="sync", type=click.Choice(["sync", "async", "ssp"]), show_default=True)
@click.option("--quorum", type=int)
@click.option(
    "--on-worker-loss",
    "worker_loss",
    default="wait",
    type=click.Choice(["wait", "shrink"]),
    show_default=True,
    help="With sync.",
)
@click.option("--seed", default=0, show_default=True, help="Of the faults.")
@click.option("--pause", "pause_s", default=0.02, show_default=True, help="Seconds that a gradient takes.")
@click.option("--checkpoint-every", default=50, type=click.IntRange(2), show_default=True)
@click.option("--heartbeat-timeout", "heartbeat_timeout_s", default=4.0, show_default=True)
@click.option("--patience", "patience_s", default=60.0, show_default=True, help="Seconds without progress.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures here too.")
def main(
    minutes: float,
    mean_s: float,
    faults: tuple[str, ...],
    workers: int,
    parameters: int,
    consistency: str,
    quorum: int | None,
    worker_loss: str,
    seed: int,
    pause_s: float,
    checkpoint_every: int,
    heartbeat_timeout_s: float,
    patience_s: float,
    json_file: Path | None,
) -> None:
    """Soak, and exit with 1 if anything that must hold did not."""
    setting = Setting(
        seconds=60 * minutes,
        mean_s=mean_s,
        kinds=faults,
        workers=workers,
        parameters=parameters,
        counting=counting_of(consistency, quorum, worker_loss),
        mode=mode_options(consistency, quorum, worker_loss),
        seed=seed,
        pause_s=pause_s,
        checkpoint_every=checkpoint_every,
        heartbeat_timeout_s=heartbeat_timeout_s,
        patience_s=patience_s,
    )
    try:
        findings = run(setting)
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    settled_s = min(SETTLED_S, setting.seconds / 2)
    grown = growth(findings.samples, settled_s)
    findings.problems += [] if grown is None else grown.problems(workers)
    print(verdict(findings, grown, settled_s))
    if json_file:
        json_file.write_text(json.dumps(report_of(setting, findings, grown), indent=1) + "\n")
    sys.exit(1 if findings.problems else 0)


if __name__ == "__main__":
    main()
