"""torchft's own `DiLoCo` over a bucket: a manager object that needs no lighthouse, no manager server and no open port.

Each replica puts its pseudo-gradients into the bucket; one create-once record decides, for all, whose make the round.
Every replica goes through every round in order, also one whose own came too late, so that none goes its own way.
"""

import hashlib
import importlib.util
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from composer_prime.config.table import RUN_NAME
from composer_prime.errors import INSTALL, ConfigError, CorruptObject, KeyMissing, ProtocolError, SiteError, StoreError
from composer_prime.integrations import torchft_keys
from composer_prime.integrations.torchft_rounds import (
    Contribution,
    Decision,
    RunTerms,
    common_base,
    hash_state,
    pack,
    unpack,
    who_takes_part,
)
from composer_prime.store import Store, keys, open_store, probe_store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.reading import read_record

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEPT_ROUNDS = 8
"""Rounds whose payloads stay in the bucket: a replica may be that far behind and still follow."""

MAX_VOID_ROUNDS = 3
"""Rounds in a row that may find fewer than `min_replicas` before a replica gives up."""

START_PATIENCE = 10
"""How many times `timeout_s` the first round waits: replicas rarely start together."""

BUSY_POLL_S, IDLE_POLL_S, RETRY_S = 0.02, 0.5, 1.0

FRAGMENT_STATE = "StreamingDiLoCoFragment_"
"""How torchft's DiLoCo starts the names under which its fragments register their state."""


@dataclass
class _Round:
    """One round as this replica goes through it, from `start_quorum` to `should_commit`."""

    number: int
    step: int
    tensors: list[Tensor] = field(default_factory=list)
    """What DiLoCo gave to `allreduce`, to be overwritten with the means."""
    copies: list[Tensor] = field(default_factory=list)
    """The same on the CPU, as they were given."""
    outcome: "Future[tuple[Decision, list[Tensor]]] | None" = None
    """Set once all tensors are known and the exchange is under way."""
    decision: Decision | None = None
    followed: bool = False
    """Decided before this replica came to it."""

    def base(self, states: Mapping[str, Callable[[], Any]]) -> str:
        """What this round's contribution stands on: step and shapes; in the first round the weights as well."""
        layout = [[str(copy.dtype), list(copy.shape)] for copy in self.copies]
        digest = hashlib.sha256(json.dumps([self.step, layout]).encode())
        if self.number == 0:
            for name in sorted(states):
                if name.startswith(FRAGMENT_STATE):
                    hash_state(digest, states[name]())
        return digest.hexdigest()


@dataclass(frozen=True)
class _Work:
    """What `allreduce` gives back: after `wait` the tensor holds the mean, or what it held when the round is void."""

    manager: "BucketManager"
    round: _Round

    def wait(self, timeout: object = None) -> bool:
        self.manager._settle(self.round)
        return True

    def get_future(self) -> Any:
        raise ConfigError("DiLoCo(use_bucketization=True) isn't possible here, and not needed: leave it False")


class BucketManager:
    """What torchft's `DiLoCo` asks of a manager, over a bucket. One process a replica; used by its training thread.

    store_uri      as `open_store` takes it: s3://bucket/prefix, a folder; the same for all replicas
    run            the run's name: replicas of one run average with each other
    replica        this replica's name, different for each: lower-case letters, digits, hyphens
    num_replicas   how many there are; the first round waits for so many
    min_replicas   with fewer no round commits; then every replica is told so, and DiLoCo takes the inner steps back
    timeout_s      seconds, from its own contribution on, that a replica waits for the others. One that stays away is
                   left out, and not waited for again until it gives a sign of life. The first round waits ten
                   times as long

    All replicas must start from the same weights and the same outer optimizers, which the first round checks.
    Raises ConfigError (also without torchft), StoreUnusable. docs/torchft.md has an example and the limits.
    """

    _use_async_quorum = False  # the name is torchft's: DiLoCo refuses a manager that has it set

    def __init__(
        self,
        store_uri: str,
        *,
        run: str,
        replica: str,
        num_replicas: int,
        min_replicas: int,
        timeout_s: float = 60.0,
    ) -> None:
        if importlib.util.find_spec("torchft") is None:
            raise ConfigError(f"torchft is not installed: {INSTALL.format('torchft')}")
        if not 1 <= min_replicas <= num_replicas:
            raise ConfigError(
                f"min_replicas ({min_replicas}) must be from 1 to num_replicas ({num_replicas}): choose one of these"
            )
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s ({timeout_s}) must be more than 0 seconds: set what a slow replica may need")
        if not re.fullmatch(RUN_NAME, run):
            raise ConfigError(f"run ({run!r}) must match {RUN_NAME}: pick a name such as 'my-run'")
        self._replica = keys.check_site_name(replica)
        self._terms = RunTerms(num_replicas=num_replicas, min_replicas=min_replicas)
        self._timeout_s = timeout_s
        self._store = _open_run(f"{store_uri.rstrip('/')}/{run}", self._terms)
        self._states: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self._round: _Round | None = None
        self._next_round = 0
        self._step = 0
        self._batches_committed = 0
        self._void_rounds = 0
        self._last_taken: tuple[str, ...] = ()
        self._stopped = threading.Event()
        self._exchange = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torchft-exchange")

    # --- what DiLoCo calls ------------------------------------------------------------------------------------------

    def register_state_dict_fn(self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable) -> None:
        """Take a fragment's state into `state_dict` and `load_state_dict`."""
        if key in self._states:
            raise ConfigError(f"state {key} is registered twice: give each DiLoCo a manager of its own")
        self._states[key] = (load_state_dict, state_dict)

    def disallow_state_dict_read(self) -> None:
        """An inner step begins: the round's tensors are all there, so their exchange starts, beside the training."""
        if self._round is not None and self._round.tensors:
            self._seal(self._round)

    def allow_state_dict_read(self) -> None:
        """An inner step has ended; nobody reads the weights from outside, so there is nothing to do."""

    def start_quorum(self, *_: object, **__: object) -> None:
        """Open the next round. Does not wait: who takes part is decided when the contributions are there."""
        if self._round is not None:
            raise SiteError(f"round {self._round.number} is open: a replica goes through one round at a time")
        self._round = _Round(self._next_round, self._step)

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> _Work:
        """Give one tensor to the open round; after the handle's `wait` it holds the mean, equal bits everywhere.

        The mean is a sum in fp32 (fp64 for fp64) in the order of the replicas' names, divided by their number.
        """
        if should_quantize:
            raise ConfigError("DiLoCo(should_quantize=True) isn't possible over a bucket: leave it False")
        if not tensor.is_floating_point():
            raise ConfigError(f"allreduce of {tensor.dtype}: only floating point tensors can be averaged")
        current = self._current()
        if current.outcome is not None:
            raise SiteError(f"round {current.number} is under way: give all of its tensors before the next inner step")
        current.tensors.append(tensor)
        current.copies.append(tensor.detach().to("cpu", copy=True))
        return _Work(self, current)

    def should_commit(self) -> bool:
        """Close this replica's round: True when the bucket holds enough contributions for it, the same everywhere.

        SiteError when MAX_VOID_ROUNDS rounds in a row had too few.
        """
        current = self._current()
        decision = self._settle(current)
        self._round = None
        self._next_round += 1
        if not decision.taken:
            self._bear_void_round(current)
            return False
        self._void_rounds = 0
        self._step += 1
        self._batches_committed += len(decision.taken)
        self._last_taken = tuple(part.replica for part in decision.taken)
        if not self.is_participating():
            logger.warning("left_out round=%d replica=%s taken=%s", current.number, self._replica, self._last_taken)
        return True

    def current_step(self) -> int:
        """Rounds committed so far; DiLoCo derives the fragment from it."""
        return self._step

    # --- what a person may ask --------------------------------------------------------------------------------------

    def num_participants(self) -> int:
        """Replicas whose contributions made the last round that committed; 0 before."""
        return len(self._last_taken)

    def is_participating(self) -> bool:
        """Whether this replica's contribution was one of them."""
        return self._replica in self._last_taken

    def batches_committed(self) -> int:
        """Contributions committed so far, over all replicas."""
        return self._batches_committed

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside model and inner optimizer: counts, fragments, outer optimizers.

        SiteError while a round is open: save right after the inner step in which one ended.
        """
        if self._round is not None:
            raise SiteError(f"round {self._round.number} is open: save after the inner step in which it ends")
        return {
            "round": self._next_round,
            "step": self._step,
            "batches_committed": self._batches_committed,
            "states": {key: save() for key, (_, save) in self._states.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; call after DiLoCo was made, before its first inner step."""
        if state["states"].keys() != self._states.keys():
            raise ConfigError(
                f"the checkpoint has {sorted(state['states'])}, DiLoCo registered {sorted(self._states)}: "
                "make DiLoCo first, with the fragments of the run that was saved"
            )
        for key, (load, _) in self._states.items():
            load(state["states"][key])
        self._next_round, self._step = state["round"], state["step"]
        self._batches_committed = state["batches_committed"]

    def shutdown(self, wait: bool = True) -> None:
        """Stop waiting, and close the store. What is in the bucket stays."""
        self._stopped.set()
        self._exchange.shutdown(wait=wait)
        self._store.close()

    def _bear_void_round(self, current: _Round) -> None:
        """Go on without a commit, unless that was so too often; what others decided long ago doesn't count."""
        self._void_rounds += not current.followed
        if self._void_rounds >= MAX_VOID_ROUNDS:
            raise SiteError(
                f"{self._void_rounds} rounds in a row had fewer than min_replicas ({self._terms.min_replicas}) after "
                f"timeout_s ({self._timeout_s}): see why the others are gone, or ask for fewer"
            )

    # --- one round --------------------------------------------------------------------------------------------------

    def _current(self) -> _Round:
        if self._round is None:
            raise SiteError("no round is open: call start_quorum first")
        return self._round

    def _seal(self, current: _Round) -> "Future[tuple[Decision, list[Tensor]]]":
        """Start the exchange, if that wasn't done."""
        if current.outcome is None:
            current.outcome = self._exchange.submit(self._meet, current)
        return current.outcome

    def _settle(self, current: _Round) -> Decision:
        """Wait for the round's end and write the means into its tensors, once."""
        if current.decision is None:
            decision, means = self._seal(current).result()
            for tensor, mean in zip(current.tensors, means, strict=False):  # a void round has no means
                tensor.copy_(mean)
            current.decision = decision
        return current.decision

    def _meet(self, current: _Round) -> tuple[Decision, list[Tensor]]:
        """Contribute to the round, or follow it when it was decided before, and compute its means."""
        base = current.base({key: save for key, (_, save) in self._states.items()})
        decision = self._patiently(self._read_decision, current.number)
        if decision is None:
            self._contribute(current, base)
            decision = self._await_decision(current.number)
        else:
            current.followed = True
            self._sign(current.number, Contribution(replica=self._replica, base=base))
        if decision.base != base:
            raise ProtocolError(
                f"round {current.number}: replica {self._replica} stands on {base[:16]}, the round on "
                f"{decision.base[:16]}: it has other weights, outer optimizers, fragments or another step than the "
                "others; start it from the same weights, or from a checkpoint of one of them"
            )
        means = self._means(decision, current) if decision.taken else []
        self._patiently(self._collect_garbage, current.number - KEPT_ROUNDS)
        return decision, means

    def _contribute(self, current: _Round, base: str) -> None:
        """Payload before record, so that a record's payload is always there."""
        data = pack(current.copies)
        sha = sha256_hex(data)
        payload = torchft_keys.payload(current.number, self._replica, sha)
        self._patiently(self._store.put, payload, data)
        self._sign(current.number, Contribution(replica=self._replica, base=base, payload=payload, sha256=sha))

    def _sign(self, number: int, contribution: Contribution) -> None:
        key = torchft_keys.contribution(number, self._replica)
        if not self._patiently(self._store.create, key, contribution.to_bytes()):
            logger.warning("contributed_before round=%d replica=%s: the first one stands", number, self._replica)

    def _await_decision(self, number: int) -> Decision:
        """Watch the contributions come in; decide when it is time, unless another replica was quicker."""
        started, pause_s = time.monotonic(), BUSY_POLL_S
        known: dict[str, Contribution] = {}
        while (decision := self._patiently(self._read_decision, number)) is None:
            self._patiently(self._read_contributions, number, known)
            awaited = self._patiently(self._signs_of_life, number - 1) if number > 0 else None
            base = common_base({replica: part.base for replica, part in known.items()})
            ready = [replica for replica, part in known.items() if part.payload and part.base == base]
            time_is_up = time.monotonic() - started >= self._timeout_s * (1 if number > 0 else START_PATIENCE)
            names = who_takes_part(ready, known, awaited, time_is_up, self._terms)
            if names is not None:
                record = Decision(base=base, taken=tuple(known[name] for name in names), closer=self._replica)
                self._patiently(self._store.create, torchft_keys.decision(number), record.to_bytes())
                continue
            if self._stopped.wait(pause_s):
                raise SiteError(f"replica {self._replica} was shut down while round {number} was open")
            pause_s = min(pause_s * 1.5, IDLE_POLL_S)
        return decision

    def _read_decision(self, number: int) -> Decision | None:
        key = torchft_keys.decision(number)
        try:
            return read_record(self._store, Decision, key)
        except KeyMissing:
            return None

    def _read_contributions(self, number: int, known: dict[str, Contribution]) -> None:
        """Add the contributions of a round that aren't known yet; they never change."""
        for key in self._store.list(torchft_keys.contributions_prefix(number)):
            replica = torchft_keys.replica(key)
            if replica not in known:
                known[replica] = read_record(self._store, Contribution, key)

    def _signs_of_life(self, number: int) -> frozenset[str]:
        """Replicas that contributed to a round, in time or too late."""
        listed = self._store.list(torchft_keys.contributions_prefix(number))
        return frozenset(torchft_keys.replica(key) for key in listed)

    def _means(self, decision: Decision, current: _Round) -> list[Tensor]:
        """The mean of each tensor over the replicas that take part, added in the order of their names."""
        totals: list[Tensor] = []
        for part in decision.taken:
            values = [value.to(_wide(value.dtype)) for value in self._fetch(part, current)]
            totals = [total.add_(value) for total, value in zip(totals, values, strict=True)] if totals else values
        return [total.div_(len(decision.taken)) for total in totals]

    def _fetch(self, part: Contribution, current: _Round) -> list[Tensor]:
        assert part.payload is not None and part.sha256 is not None
        try:
            most = sum(copy.nbytes for copy in current.copies)
            data = self._patiently(self._store.get_range, part.payload, 0, most + 1)
        except KeyMissing as error:
            raise SiteError(
                f"round {current.number} is decided and its payloads are gone, {KEPT_ROUNDS} rounds are kept: replica "
                f"{self._replica} is too far behind; start it from a newer checkpoint, of any replica"
            ) from error
        if sha256_hex(data) != part.sha256:
            raise CorruptObject(f"{part.payload} does not have the sha256 that {part.replica}'s record names")
        return unpack(data, current.copies)

    def _collect_garbage(self, number: int) -> None:
        """Remove this replica's payloads of an old round."""
        if number >= 0:
            for key in self._store.list(torchft_keys.payload_prefix(number, self._replica)):
                self._store.delete(key)

    def _patiently(self, call: Callable[..., T], *arguments: Any) -> T:
        """Ask the store, and again while it fails, for `timeout_s` at most. A missing key is an answer."""
        give_up_at = time.monotonic() + self._timeout_s
        while True:
            try:
                return call(*arguments)
            except KeyMissing:
                raise
            except StoreError as error:
                if time.monotonic() >= give_up_at or self._stopped.is_set():
                    raise
                logger.warning("store_failed replica=%s error=%s", self._replica, error)
                self._stopped.wait(RETRY_S)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which dtype to add up: fp64 for fp64, fp32 for anything smaller."""
    return torch.promote_types(dtype, torch.float32)


def _open_run(uri: str, terms: RunTerms) -> Store:
    """The store of a run, probed, with what the replicas agree on. ConfigError when this replica doesn't."""
    store = open_store(uri)
    probe_store(store)
    store.create(torchft_keys.run(), terms.to_bytes())
    agreed = read_record(store, RunTerms, torchft_keys.run())
    if agreed != terms:
        store.close()
        raise ConfigError(
            f"the run at {uri} was started with num_replicas = {agreed.num_replicas} and min_replicas = "
            f"{agreed.min_replicas}, not {terms.num_replicas} and {terms.min_replicas}: use the same for every replica"
        )
    return store
