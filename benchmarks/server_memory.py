"""Measure the server's memory: its peak against the bound that it promises, and whether it stays flat.

    python -m benchmarks.server_memory [--parameters 25000000] [--workers 4] [--steps 500]

Peak is VmHWM of /proc/PID/status, over the whole life of the server, start and end included as far as it is alive
to be asked. Flat compares VmRSS at the return of an early step and of the last ones.
"""

import bisect
import json
import time
from pathlib import Path

import click

from benchmarks.contenders import Weighmaster
from benchmarks.processes import BenchmarkError
from benchmarks.runs import launched, result_of
from benchmarks.workload import Workload

SAMPLE_S = 0.05
EARLY_STEP = 50
"""By then every buffer has been used once."""

ALLOWANCE_BYTES = 200e6
"""For the interpreter, NumPy and the compiled kernels."""

FLAT_BYTES = 10e6
"""Growth below this is noise: less than a tenth of one gradient of 25e6 parameters."""


def bound_bytes(work: Workload) -> float:
    """Return the promised bound: W gradients, three versions, two moments, and the allowance."""
    return (work.workers + 5) * work.payload_bytes + ALLOWANCE_BYTES


def memory_bytes(pid: int) -> tuple[int, int] | None:
    """Return VmRSS and VmHWM of a process; None once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return (int(found["VmRSS"]) * 1024, int(found["VmHWM"]) * 1024) if len(found) == 2 else None


def measure(work: Workload) -> dict[str, float | bool]:
    """Run once and return the figures, in bytes."""
    times_ns: list[int] = []
    resident: list[int] = []
    peak = 0
    with launched(Weighmaster(), work) as running:
        while running.alive():
            sample = memory_bytes(running.started["server"].pid)
            if sample is not None:
                times_ns.append(time.monotonic_ns())
                resident.append(sample[0])
                peak = max(peak, sample[1])
            time.sleep(SAMPLE_S)
        returned_ns = result_of(running, work).returned_ns
    early, last = (
        resident[min(bisect.bisect(times_ns, returned_ns[step - 1]), len(resident) - 1)]
        for step in (min(EARLY_STEP, work.steps // 2), work.steps - 1)
    )
    return {
        "peak": peak,
        "bound": bound_bytes(work),
        "resident_early": early,
        "resident_last": last,
        "samples": len(resident),
        "within": peak <= bound_bytes(work),
        "flat": last - early <= FLAT_BYTES,
    }


@click.command()
@click.option("--parameters", default=25_000_000, type=int, show_default=True)
@click.option("--workers", default=4, type=int, show_default=True)
@click.option("--steps", default=500, type=click.IntRange(4), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here too.")
def main(parameters: int, workers: int, steps: int, json_file: Path | None) -> None:
    """Measure the server's memory; exit code 1 if it is above its bound or grows."""
    work = Workload(parameters, workers, steps, warmup=1)
    try:
        figures = measure(work)
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    early = min(EARLY_STEP, steps // 2)
    print(f"P={parameters:g}, W={workers}, {steps} steps, in MB (1e6 bytes):\n")
    print("| what | MB |\n| --- | --- |")
    print(f"| peak (VmHWM) | {figures['peak'] / 1e6:.0f} |")
    print(f"| bound: (W + 5) x model + 200 | {figures['bound'] / 1e6:.0f} |")
    print(f"| resident after step {early} | {figures['resident_early'] / 1e6:.0f} |")
    print(f"| resident after step {steps - 1} | {figures['resident_last'] / 1e6:.0f} |")
    print(f"\n{'within' if figures['within'] else 'ABOVE'} the bound, {'flat' if figures['flat'] else 'GROWING'}")
    if json_file:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    raise SystemExit(0 if figures["within"] and figures["flat"] else 1)


if __name__ == "__main__":
    main()
