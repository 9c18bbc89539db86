"""What is agreed with clients: the variables, which the first worker defines, and the store that holds them."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from numpy.typing import NDArray

from protocol.errors import ConfigurationError, ManifestMismatch, Refused
from protocol.messages import Offer, RefusalCode, Role
from protocol.tensors import Layout, Manifest
from ps.build import make_store
from ps.coordination.members import Identity
from ps.ensemble_mode import EnsembleMode, Terms
from ps.settings.config import ServerConfig
from ps.storage.receiver import COMPUTED, Receiver
from ps.storage.store import Store


def check_seed(seed: int, offer: Offer) -> None:
    """Check the seed that a client was started with, if any.

    Raises:
        Refused: it is another.
    """
    if offer.seed is not None and offer.seed != seed:
        raise Refused(
            RefusalCode.SEED,
            f"the worker was started with --seed {offer.seed}, the server with {seed}: leave it out on the worker",
        )


class Agreement:
    """The store, once somebody has said what is in it.

    Args:
        config: limits, and what kind of store.
        ensemble: if the mode is that: its members make the store together.
        initial_values: to begin with, or None.
        lock: of the server's state.
        cannot_hold: told why the run must end, when the server cannot hold what the workers have.

    Attributes:
        store: None before the variables are known.
        receivers: of the gradients of workers by rank, then of validators.
    """

    def __init__(
        self,
        config: ServerConfig,
        ensemble: EnsembleMode | None,
        initial_values: dict[str, NDArray[Any]] | None,
        lock: threading.RLock,
        cannot_hold: Callable[[str], None],
    ) -> None:
        self.store: Store | None = None
        self.receivers: tuple[Receiver, ...] = ()
        self._config = config
        self._ensemble = ensemble
        self._initial_values = initial_values
        self._lock = lock
        self._cannot_hold = cannot_hold
        self._origin = ""

    @property
    def is_settled(self) -> bool:
        """Whether the variables are known, or are no evaluator's business."""
        return self.store is not None or self._ensemble is not None

    def new_dtypes(self, offer: Offer) -> frozenset[str]:
        """Return the dtypes that the store of an offer would compute in; none if there is a store already.

        Raises:
            RemoteProtocolError: the bytes are not a manifest.
        """
        if self.store is not None:
            return frozenset()
        return frozenset(spec.dtype for spec in Manifest.from_wire(offer.manifest).variables) & set(COMPUTED)

    def check(self, who: Identity, offer: Offer) -> None:
        """Agree on the variables in mode shared; in an ensemble that has to wait for the rank.

        Raises:
            Refused: other variables, a dtype that cannot be served, too many bytes, or a role that has no place.
        """
        if self._ensemble is None:
            self._agree(Manifest.from_wire(offer.manifest), who)
        elif who.role is not Role.WORKER:
            raise Refused(
                RefusalCode.MANIFEST,
                f"this server trains an ensemble, which takes no {who.role}: its members measure themselves",
            )

    def terms(self, offer: Offer, rank: int) -> Terms:
        """Return what is agreed with one client; in an ensemble the last member's offer makes the store.

        Raises:
            Refused: it cannot be a member of the ensemble.
        """
        if self._ensemble is None:
            assert self.store is not None
            return Terms(self.store.layout, {})
        with self._failing():
            terms = self._ensemble.agree(offer, rank)
        if self.store is None and self._ensemble.store is not None:
            self._hold(self._ensemble.store)
        return terms

    def restore(self, manifest: Manifest) -> Store:
        """Make the store of a checkpoint's variables before anybody joins: whoever comes must have the same.

        Raises:
            ConfigurationError: the memory does not suffice.
        """
        store = make_store(self._config, Layout.of(manifest), None)
        self._hold(store)
        return store

    def restore_ensemble(self) -> None:
        """Take over the store of an ensemble that was restored."""
        assert self._ensemble is not None and self._ensemble.store is not None
        self._hold(self._ensemble.store)

    def _hold(self, store: Store) -> None:
        self.store = store
        slots = self._config.ranks + self._config.validator_slots
        self.receivers = tuple(store.receiver(slot) for slot in range(slots))

    def _agree(self, manifest: Manifest, who: Identity) -> None:
        """Agree on the variables: the first worker's offer defines them, every other must be the same."""
        with self._lock:
            if self.store is None:
                self._hold(self._make_store(manifest))
                self._origin = (
                    f"; the server has those of {who.name or 'a worker'} on {who.host}, who came first: "
                    "if these are the wrong ones, start the server again"
                )
                return
        try:
            self.store.layout.manifest.check_same_variables(manifest, "the server", "the worker")
        except ManifestMismatch as error:
            raise Refused(RefusalCode.MANIFEST, f"{error}{self._origin}") from error

    def _make_store(self, manifest: Manifest) -> Store:
        if not manifest.variables:
            raise Refused(RefusalCode.MANIFEST, "the worker has no variables, so there is nothing to train")
        layout = Layout.of(manifest)
        if layout.payload_bytes > self._config.max_model_bytes:
            raise Refused(
                RefusalCode.TOO_LARGE,
                f"the variables take {layout.payload_bytes} bytes, above --max-model-bytes "
                f"{self._config.max_model_bytes} of the server",
            )
        with self._failing():
            return make_store(self._config, layout, self._initial_values)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """End the run when the server cannot hold what the workers have, and refuse who brought it."""
        try:
            yield
        except ManifestMismatch as error:
            self._cannot_hold(str(error))
            raise Refused(RefusalCode.MANIFEST, str(error)) from error
        except ConfigurationError as error:
            self._cannot_hold(str(error))
            raise Refused(RefusalCode.TOO_LARGE, str(error)) from error
