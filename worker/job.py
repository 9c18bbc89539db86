"""What a worker's process does once its options are known: data, model, and its part in the run."""

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protocol.ensemble import Answers, Weighting
from protocol.errors import ConfigurationError, ExitCode, WeighmasterError
from protocol.extras import installing
from protocol.injection import Plan
from protocol.injector import Faults
from protocol.messages import AUTO_RANK, MAX_NAME_CHARACTERS, Role, Side
from protocol.tensors import Layout
from protocol.tokens import parse_grants, read_secret
from worker.batches import Shard, TrustedBatches
from worker.client import Server, Update
from worker.config import DEFAULT_BATCH_SIZE, WorkerConfig, default_of
from worker.datasets import load_dataset, num_classes
from worker.definitions import Dataset, Model
from worker.ensemble import MemberRun, member_seed
from worker.faults import parse_fault
from worker.faulty_step import FaultySteps
from worker.log_format import Speaker
from worker.loop import StepGradient, WaitLog, evaluate, on_batches, train
from worker.reconnect import ClientConfig, InitialValues

if TYPE_CHECKING:
    from worker import graph

ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
"""Which kernels TensorFlow computes with; recorded, not set, for TensorFlow talks of it whenever it is set to 1."""

_say = Speaker(lambda line: print(line, flush=True))


@dataclass(frozen=True)
class Job:
    """What a worker has before it knows the server: options, data, and the model as its graph shows it."""

    config: WorkerConfig
    dataset: Dataset
    build: Callable[..., Model]
    inputs: "graph.InputSpec"
    description: "graph.Description"


def load_data(config: WorkerConfig) -> Dataset:
    """Set how this process speaks and what TensorFlow reads from the environment, and load the data."""
    _say.log_format = config.log_format
    # Before the data, since a file of the user's may import TensorFlow as well.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if config.legacy_keras:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
    if config.fault is not None:
        _say(f"MISBEHAVING ON PURPOSE (--fault {config.fault}): this worker {parse_fault(config.fault).does}")
    if config.inject:
        _say(_plan(config).announcement)
    return load_dataset(config.dataset, config.data_dir)


def software() -> str:
    """Name all on which the last bits of a gradient depend beside the number of threads."""
    from importlib.metadata import version

    from worker import graph

    onednn = "off" if os.environ.get(ONEDNN) in ("0", "false", "False") else "on"
    text = f"TensorFlow {graph.TENSORFLOW} (oneDNN {onednn}), NumPy {version('numpy')}, {cpu_kind()}"
    return text[:MAX_NAME_CHARACTERS]


def cpu_kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model as the system names it, or the kind of machine: kernels are chosen by it."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((model for model in models if model.isprintable()), platform.machine())


def _plan(config: WorkerConfig) -> Plan:
    return Plan.parse(config.inject, Side.WORKER)


def load_tensorflow() -> None:
    """Import TensorFlow; here and not before.

    Raises:
        ConfigurationError: it is not installed.
    """
    if "tensorflow" not in sys.modules:
        _say("loading TensorFlow, which takes some seconds")
    try:
        from worker import graph, models  # noqa: F401 - they are what needs it
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "keras", "tf_keras"):
            raise
        raise ConfigurationError(
            f"this worker needs TensorFlow, and {error.name} is not installed: "
            f"{installing('tensorflow')}; [tensorflow-cpu] is the CPU build"
        ) from error


def prepare(config: WorkerConfig, dataset: Dataset) -> Job:
    """Build the model, and say what is remarkable about it."""
    from worker import graph, models

    build = models.load_build(config.model, num_classes(dataset))
    features = dataset.train_features
    inputs = graph.InputSpec(tuple(features.shape[1:]), features.dtype.name)
    description = graph.describe(build, inputs, legacy_keras=config.legacy_keras)
    for remark in description.remarks:
        _say(f"remark: {remark}")
    if not description.replayable:
        _say(f"remark: a step computed again may differ: {description.replayable_reason}")
    return Job(config, dataset, build, inputs, description)


def take_part(job: Job, token: str | None) -> int:
    """Join the run and stay until it is done; return the exit code."""
    return _evaluate(job, token) if Role(job.config.role) is Role.EVALUATOR else _train(job, token)


def _train(job: Job, token: str | None) -> int:
    from worker import graph

    config, trainers = job.config, list[graph.Trainer]()
    with Server(_client(job, token, lambda: trainers[0].initial_values())) as server:
        agreed = server.welcome
        _say.rank, _say.name = agreed.rank if agreed.rank >= 0 else None, agreed.name
        _tell_threads(agreed.threads, config.threads)
        if server.weighting is not None:
            last = _train_member(job, server, server.weighting, trainers)
            _say(f"done at step {last.step}")
            return ExitCode.DONE
        if config.evaluate_every != default_of("evaluate_every"):
            raise ConfigurationError("--evaluate-every works only with --role evaluator, or in an ensemble")
        steps_of = _steps_of_validator if Role(config.role) is Role.VALIDATOR else _steps_of_worker
        gradient_of = steps_of(job, server)
        trainers.append(graph.Trainer(job.build, job.inputs, server.layout, agreed.seed, threads=agreed.threads))
        last = train(server, gradient_of(trainers[0]), _say)
        _say(f"done at step {last.step}{_on_purpose(config)}")
    return ExitCode.DONE


def _train_member(job: Job, server: Server, weighting: Weighting, trainers: "list[graph.Trainer]") -> Update:
    """Train as a member of an ensemble: all take the same batches, from all of the training data."""
    from worker import graph

    config, agreed = job.config, server.welcome
    if config.fault is not None:
        raise ConfigurationError("--fault works with a server in mode shared only, and this one trains an ensemble")
    batch_size = config.batch_size or DEFAULT_BATCH_SIZE
    shard = Shard.of(len(job.dataset.train_labels), 0, 1, agreed.seed, config.trusted_examples)
    _say(f"member {agreed.rank} of {agreed.workers}; all take the same batches: {shard.describe(batch_size)}")
    layout = Layout.of(server.layout.manifest)
    seed, threads = member_seed(agreed.seed, agreed.rank), agreed.threads
    trainer = graph.Trainer(job.build, job.inputs, layout, seed, threads=threads, weighting=weighting)
    trainers.append(trainer)
    has_test = len(job.dataset.test_labels) > 0
    tester = graph.Evaluator(job.build, job.inputs, layout, seed, threads=threads) if has_test else None
    return MemberRun(
        server=server,
        trainer=trainer,
        tester=tester,
        dataset=job.dataset,
        shard=shard,
        batch_size=batch_size,
        seed=agreed.seed,
        rank=agreed.rank,
        weighting=weighting,
        vote_every=config.evaluate_every,
        say=_say,
    ).train()


def _answers(job: Job) -> Answers | None:
    """Return what a worker with this model and data can answer as a member of an ensemble, if it can."""
    sizes = job.description.logits
    if Role(job.config.role) is not Role.WORKER or sizes is None or sizes[0] < 2:
        return None
    batch_size = job.config.batch_size or DEFAULT_BATCH_SIZE
    return Answers(batch_size, sizes[0], sizes[1], len(job.dataset.test_labels))


def _steps_of_worker(job: Job, server: Server) -> "Callable[[graph.Trainer], StepGradient]":
    """Find the batches of a rank, before TensorFlow builds anything, and say what they are."""
    config, agreed = job.config, server.welcome
    n_examples, batch_size = len(job.dataset.train_labels), config.batch_size or DEFAULT_BATCH_SIZE
    shard = Shard.of(n_examples, agreed.rank, agreed.shards, agreed.seed, config.trusted_examples)
    _say(shard.describe(batch_size))
    if config.fault is None:

        def batch_ids(step: int) -> NDArray[np.int64]:
            return shard.batch_ids(step, batch_size)

        return lambda trainer: on_batches(trainer, job.dataset, batch_ids, agreed.seed, agreed.rank)
    fault = parse_fault(config.fault)
    return lambda trainer: FaultySteps(
        fault=fault,
        trainer=trainer,
        layout=server.layout,
        dataset=job.dataset,
        shard=shard,
        batch_size=batch_size,
        workers=min(agreed.workers or agreed.shards, agreed.shards),
        steps=agreed.steps,
        classes=num_classes(job.dataset),
    )


def _steps_of_validator(job: Job, server: Server) -> "Callable[[graph.Trainer], StepGradient]":
    """Find the trusted examples, and say which they are."""
    config, agreed = job.config, server.welcome
    trusted = TrustedBatches.of(
        len(job.dataset.train_labels), config.trusted_examples, config.batch_size, agreed.seed
    )
    _say(trusted.describe())
    return lambda trainer: on_batches(trainer, job.dataset, trusted.batch_ids, agreed.seed, AUTO_RANK)


def _on_purpose(config: WorkerConfig) -> str:
    return "" if config.fault is None else f", after misbehaving on purpose (--fault {config.fault})"


def _evaluate(job: Job, token: str | None) -> int:
    from worker import graph

    def cannot_initialise() -> dict[str, NDArray[Any]]:
        raise ConfigurationError("an evaluator has no initial values to give")

    with Server(_client(job, token, cannot_initialise)) as server:
        agreed = server.welcome
        _say.name = agreed.name
        evaluator = graph.Evaluator(job.build, job.inputs, server.layout, agreed.seed, threads=agreed.threads)
        evaluate(server, evaluator, job.dataset, job.config.evaluate_every, _say)
    return ExitCode.DONE


def _client(job: Job, token: str | None, initial_values: InitialValues) -> ClientConfig:
    config = job.config
    return ClientConfig(
        address=config.ps,
        manifest=job.description.manifest,
        initial_values=initial_values,
        rank=AUTO_RANK if config.rank is None else config.rank,
        name=config.name or "",
        role=Role(config.role),
        token=token,
        threads=config.threads,
        seed=config.seed,
        answers=_answers(job),
        software=software(),
        connect_timeout_s=config.connect_timeout,
        reconnect_timeout_s=config.reconnect_timeout,
        congestion_control=config.congestion_control,
        tls=config.tls,
        faults=Faults(_plan(config)),
        on_event=_say,
        on_waiting=WaitLog(_say),
    )


def _tell_threads(agreed: int, offered: int) -> None:
    if agreed != offered:
        _say(f"using {agreed} threads, as recorded for this rank, instead of {offered}")


def print_plan(job: Job) -> int:
    """Say what a run would need (`--dry-run`); return the exit code."""
    layout = Layout.of(job.description.manifest)
    print(
        f"model {job.config.model} on {job.config.dataset}: "
        f"{len(layout.slots)} variables, {job.description.ops} operations"
    )
    for spec in job.description.manifest.variables:
        print(f"  {spec.name:40} {spec.describe()} at byte {layout.by_name[spec.name].offset}")
    print(f"every variable can be fed; {layout.payload_bytes:,} bytes go each way per step")
    print(f"memory for values and receiving: {2 * layout.values_bytes:,} bytes, besides TensorFlow's own")
    return ExitCode.DONE


def end_badly(error: WeighmasterError) -> int:
    """Say in JSON why this worker ends, with its rank and name if they are known; return the exit code."""
    _say.ended(str(error), error.exit_code)
    return error.exit_code


def token_of(config: WorkerConfig) -> str | None:
    """Read this worker's token, or None if it has none.

    Raises:
        ConfigurationError: the file cannot be used, or holds the lines of others too.
    """
    if config.token_file is None:
        return None
    grants = parse_grants(read_secret(config.token_file).splitlines(), str(config.token_file))
    if len(grants) != 1:
        raise ConfigurationError(
            f"{config.token_file} holds {len(grants)} lines; a worker's token file holds its own line only"
        )
    return grants[0].token.decode("ascii")
