"""What a worker's process does once its options are known: data, model, and its part in the run."""

import math
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena import Arena
from protocol.ensemble import Answers, Weighting
from protocol.errors import ConfigurationError, ExitCode, WeighmasterError
from protocol.extras import installing
from protocol.injection import Plan
from protocol.injector import Faults
from protocol.messages import AUTO_RANK, MAX_NAME_CHARACTERS, Role, Side, Welcome
from protocol.tensors import Layout
from protocol.tokens import parse_grants, read_secret
from protocol.user_function import locate, shortened
from worker.batches import Shard, TrustedBatches, gather
from worker.client import Server, Update
from worker.config import DEFAULT_BATCH_SIZE, MODELS, WorkerConfig, default_of
from worker.datasets import load_dataset, num_classes
from worker.definitions import Dataset, Model
from worker.ensemble import MemberRun, member_seed
from worker.faults import parse_fault
from worker.faulty_step import FaultySteps
from worker.log_format import Speaker
from worker.loop import EVALUATION_BATCH, StepGradient, WaitLog, evaluate, on_batches, train
from worker.output import Output
from worker.reconnect import ClientConfig, InitialValues

if TYPE_CHECKING:
    from worker import graph

ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
"""Which kernels TensorFlow computes with; recorded, not set, for TensorFlow talks of it whenever it is set to 1."""

_write = Output()
_say = Speaker(_write)


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
    if config.model not in MODELS:
        locate(config.model, "--model")  # a wrong path is told before seconds go by for the data and TensorFlow
    if config.fault is not None:
        _say(f"MISBEHAVING ON PURPOSE (--fault {config.fault}): this worker {parse_fault(config.fault).does}")
    if config.inject:
        _say(_plan(config).announcement)
    return load_dataset(config.dataset, config.data_dir, _say)


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
        ConfigurationError: it is not installed, or does not load.
    """
    if "tensorflow" not in sys.modules:
        _say("loading TensorFlow, which takes some seconds")
    try:
        from worker import graph, models  # noqa: F401 - they are what needs it
    except Exception as error:  # a build for another CPU, another NumPy or another Python fails in ways of its own
        raise _not_loaded(error) from error


def _not_loaded(error: Exception) -> ConfigurationError:
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name in ("tensorflow", "keras", "tf_keras"):
        return ConfigurationError(
            f"this worker needs TensorFlow, and {name} is not installed: "
            f"{installing('tensorflow')}; [tensorflow-cpu] is the CPU build"
        )
    lines = [line for line in str(error).splitlines() if line.strip()]
    said = shortened(lines[-1]) if lines else "no message"
    return ConfigurationError(f"TensorFlow is installed but cannot be loaded: {type(error).__name__}: {said}")


def prepare(config: WorkerConfig, dataset: Dataset) -> Job:
    """Build the model, and say what is remarkable about it."""
    from worker import graph, models

    # A model of the user's counts its classes itself, and may have none.
    needs_classes = config.model in MODELS or config.fault is not None
    build = models.load_build(config.model, num_classes(dataset) if needs_classes else 0)
    features = dataset.train_features
    inputs = graph.InputSpec(tuple(features.shape[1:]), features.dtype.name)
    description = graph.describe(build, inputs, legacy_keras=config.legacy_keras)
    for remark in description.remarks:
        _say(f"remark: {remark}")
    if not description.replayable:
        _say(f"remark: a step computed again may differ: {description.replayable_reason}")
    job = Job(config, dataset, build, inputs, description)
    if Role(config.role) is Role.WORKER and _answers(job) is None:
        _check_evaluate_every(config)  # with logits it could be a member's, which only the server knows
    return job


def _check_evaluate_every(config: WorkerConfig) -> None:
    if config.evaluate_every != default_of("evaluate_every"):
        raise ConfigurationError("--evaluate-every works only with --role evaluator, or in an ensemble")


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
        _check_evaluate_every(config)
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
    if config.own_data:
        raise ConfigurationError(
            "--own-data works with a server in mode shared only: all members of an ensemble take the same batches"
        )
    batch_size = config.batch_size or DEFAULT_BATCH_SIZE
    shard = Shard.of(len(job.dataset.train_labels), 0, 1, agreed.seed, config.trusted_examples)
    _say(f"member {agreed.rank} of {agreed.workers}; all take the same batches: {shard.describe(batch_size)}")
    layout = Layout.of(server.layout.manifest)
    seed, threads = member_seed(agreed.seed, agreed.rank), agreed.threads
    trainer = graph.Trainer(job.build, job.inputs, layout, seed, threads=threads, weighting=weighting)
    trainers.append(trainer)
    tester = graph.Evaluator(job.build, job.inputs, layout, seed, threads=threads)
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


def shard_of(config: WorkerConfig, n_examples: int, agreed: Welcome) -> Shard:
    """Return what a worker of this rank trains on: its share of a data set that all have, or all of its own."""
    if config.own_data:
        return Shard.own(n_examples, agreed.rank, agreed.seed)
    return Shard.of(n_examples, agreed.rank, agreed.shards, agreed.seed, config.trusted_examples)


def ranks_known(config: WorkerConfig, agreed: Welcome) -> int:
    """Return the number of ranks, from 0, whose batches this worker could draw: those that have a shard."""
    if config.own_data:
        return max(agreed.workers or agreed.shards, agreed.rank + 1)
    return min(agreed.workers or agreed.shards, agreed.shards)


def _steps_of_worker(job: Job, server: Server) -> "Callable[[graph.Trainer], StepGradient]":
    """Find the batches of a rank, before TensorFlow builds anything, and say what they are."""
    config, agreed = job.config, server.welcome
    batch_size = config.batch_size or DEFAULT_BATCH_SIZE
    shard = shard_of(config, len(job.dataset.train_labels), agreed)
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
        workers=ranks_known(config, agreed),
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


def try_out(job: Job) -> str:
    """Compute one batch without a server, as this role would; return what came of it, in words.

    Raises:
        ConfigurationError: it fails, or is not finite; it would have been refused in the first step of the run.
    """
    from worker import graph

    config, layout = job.config, Layout.of(job.description.manifest)
    seed, rank = config.seed or 0, config.rank or 0
    if Role(config.role) is Role.EVALUATOR:
        evaluator = graph.Evaluator(job.build, job.inputs, layout, seed, threads=config.threads)
        some = slice(EVALUATION_BATCH)
        features, labels = job.dataset.test_features[some], job.dataset.test_labels[some]
        evaluator.evaluate(Arena.zeros(layout).buffer, features, labels, EVALUATION_BATCH)
        evaluator.close()
        return f"a batch of {len(labels):,} test examples was evaluated, with every variable 0"
    trainer = graph.Trainer(job.build, job.inputs, layout, seed, threads=config.threads)
    arena = Arena.zeros(layout)
    arena.fill(trainer.initial_values())
    features, labels = gather(job.dataset, _first_batch(job, seed, rank))
    computed = trainer.compute(arena.buffer, features, labels, (seed, rank, 0))
    trainer.close()
    _check_finite(computed, arena)
    return f"a batch of {computed.examples:,} was computed at the initial values: loss {computed.loss:.4f}"


def _check_finite(computed: "graph.Gradients", arena: Arena) -> None:
    """Refuse a first step that the server would refuse; the arena is written over.

    Raises:
        ConfigurationError: naming the loss, and the first variable whose gradient is not finite.
    """
    what = f"the first batch has loss {computed.loss:.4f} at the initial values"
    cure = "look at the initialisers, the features and the loss function"
    if not math.isfinite(computed.loss):
        raise ConfigurationError(f"{what}, which is not finite, so that the server would refuse it: {cure}")
    arena.buffer[:] = np.frombuffer(b"".join(computed.buffers), np.uint8)[: arena.buffer.size]
    for name, pushed in arena.views().items():
        if pushed.dtype.kind == "f" and not np.isfinite(pushed).all():
            raise ConfigurationError(
                f"{what}, but the gradient of variable {name!r} holds NaN or infinity, which the server would "
                f"refuse: {cure}"
            )


def _first_batch(job: Job, seed: int, rank: int) -> NDArray[np.int64]:
    """Return a batch as the role takes it, int64 [B]; how many shards there will be is the server's to say."""
    config, n_examples = job.config, len(job.dataset.train_labels)
    if Role(config.role) is Role.VALIDATOR:
        return TrustedBatches.of(n_examples, config.trusted_examples, config.batch_size, seed).batch_ids(0)
    own = config.own_data
    shard = Shard.own(n_examples, rank, seed) if own else Shard.of(n_examples, 0, 1, seed, config.trusted_examples)
    return shard.batch_ids(0, config.batch_size or DEFAULT_BATCH_SIZE)


def print_plan(job: Job) -> int:
    """Say what a run would need, once a batch was computed (`--dry-run`); return the exit code."""
    tried = try_out(job)
    layout = Layout.of(job.description.manifest)
    _write(
        f"model {job.config.model} on {job.config.dataset}: "
        f"{len(layout.slots)} variables, {job.description.ops} operations"
    )
    for spec in job.description.manifest.variables:
        _write(f"  {spec.name:40} {spec.describe()} at byte {layout.by_name[spec.name].offset}")
    _write(f"every variable can be fed; {layout.payload_bytes:,} bytes go each way per step")
    _write(tried)
    _write(f"memory for values and receiving: {2 * layout.values_bytes:,} bytes, besides TensorFlow's own")
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
