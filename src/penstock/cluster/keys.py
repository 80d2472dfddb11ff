"""API keys: `pk_<id>_<secret>`.

The id is public and names the key in lists, logs and the audit trail. The secret is 256 random
bits; only its SHA-256 is stored. (A slow hash protects guessable passwords; nobody guesses these,
and a check that takes 300 ms would be a way to stop the node.)

`verify` runs on every connection and answers from a mirror in memory, without the store. `run`
keeps the mirror and the store in step: other nodes' keys come in, times of last use go out.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from penstock.cluster.store import MetadataStore, follow, repeat, until_won
from penstock.errors import InvalidArgument, NotFound, Unauthenticated

KEYS: Final = "keys/"
NAME_LENGTH_MAX: Final = 255
KEYS_MAX: Final = 100_000
FLUSH_SECONDS: Final = 30.0
RETRY_S: Final = 1.0
_TROUBLE: Final = "API keys are not in step with the metadata store"
_NO_DIGEST: Final = bytes(32)  # compared for an unknown id, so that it takes as long


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is stored and listed; times in ms, None: never."""

    id: str
    name: str
    digest: bytes
    created_ms: int
    last_used_ms: int | None = None
    revoked_ms: int | None = None

    def public(self) -> dict[str, Any]:
        fields = msgspec.to_builtins(self)
        del fields["digest"]
        return dict(fields)


class ApiKey(msgspec.Struct, frozen=True):
    """A key just made. This is the only time its text is known; it is not in the repr."""

    record: KeyRecord
    text: str

    def __repr__(self) -> str:
        return f"ApiKey(id={self.record.id!r})"


_decoder: Final = msgspec.json.Decoder(KeyRecord)


class KeyRing:
    """All keys of the cluster. Call `load` once before `verify`."""

    def __init__(
        self,
        store: MetadataStore,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        on_revoked: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_revoked` hears of the id of each key whose revocation becomes known here, on
        whichever node it was revoked: what was let in by the key has to go."""
        self._store, self._now_ms, self._on_revoked = store, now_ms, on_revoked
        self._records: dict[str, KeyRecord] = {}
        self._revisions: dict[str, int] = {}  # the revision of each record; older news is not taken
        self._used_ms: dict[str, int] = {}  # last uses that the store does not know yet

    async def load(self) -> None:
        for entry in await self._store.range(KEYS):
            self._keep(_decoder.decode(entry.value), entry.revision)

    async def create(self, name: str) -> ApiKey:
        if not name or len(name) > NAME_LENGTH_MAX:
            raise InvalidArgument(
                f"a key's name has 1 to {NAME_LENGTH_MAX} characters",
                field="name",
                limit=NAME_LENGTH_MAX,
            )
        if len(self._records) >= KEYS_MAX:
            raise InvalidArgument(f"there are {KEYS_MAX} keys already", field="id", limit=KEYS_MAX)
        # Neither base32 nor hex has an underscore, so the text can be parted in one way only.
        id = base64.b32encode(secrets.token_bytes(10)).decode().lower()
        secret = secrets.token_hex(32)
        record = KeyRecord(id=id, name=name, digest=_digest(secret), created_ms=self._now_ms())
        value = msgspec.json.encode(record)
        self._keep(record, await self._store.put(KEYS + id, value, expected_revision=0))
        return ApiKey(record, f"pk_{id}_{secret}")

    def verify(self, text: str | None) -> str:
        """The id of the key that `text` is. Raises `Unauthenticated` without saying what is wrong
        with it, except to a caller that holds the secret."""
        if not text:
            raise Unauthenticated("an API key is required")
        prefix, _, rest = text.partition("_")
        id, _, secret = rest.partition("_")
        record = self._records.get(id)
        digest = record.digest if record else _NO_DIGEST
        if not hmac.compare_digest(_digest(secret), digest) or record is None or prefix != "pk":
            raise Unauthenticated("the API key is not valid")
        if record.revoked_ms is not None:
            raise Unauthenticated("the API key is revoked", key_id=id)
        self._used_ms[id] = self._now_ms()
        return id

    def known(self, id: str) -> bool:
        return id in self._records

    def live(self, id: str) -> bool:
        record = self._records.get(id)
        return record is not None and record.revoked_ms is None

    def list(self) -> builtins.list[KeyRecord]:
        """All keys, revoked ones too, oldest first."""
        used_ms = self._used_ms
        records = [
            msgspec.structs.replace(record, last_used_ms=used_ms.get(id, record.last_used_ms))
            for id, record in self._records.items()
        ]
        return sorted(records, key=lambda record: (record.created_ms, record.id))

    async def revoke(self, id: str) -> KeyRecord:
        """From the return on no node verifies it. Revoking twice keeps the first time."""
        used_ms = self._used_ms.pop(id, None)
        return await self._change(id, revoked_ms=self._now_ms(), last_used_ms=used_ms)

    async def flush(self) -> None:
        """Write times of last use to the store. What fails stays to be written."""
        for id, last_used_ms in list(self._used_ms.items()):
            try:
                await self._change(id, last_used_ms=last_used_ms)
            except NotFound:  # the store has lost it; the others are written all the same
                pass
            if self._used_ms.get(id) == last_used_ms:  # not used again meanwhile
                del self._used_ms[id]

    async def run(self, flush_seconds: float = FLUSH_SECONDS) -> None:
        """Keep in step with the store until cancelled. A store that is full, away or refuses us
        is asked again; known keys go on working meanwhile."""

        async def flush_later() -> None:
            await asyncio.sleep(flush_seconds)
            await self.flush()

        async with asyncio.TaskGroup() as tasks:
            for name, work in (("follow", self._follow), ("flush", flush_later)):
                repeating = repeat(work, trouble=_TROUBLE, pause_s=RETRY_S)
                tasks.create_task(repeating, name=f"keys-{name}")

    async def _follow(self) -> None:
        async with follow(self._store, KEYS) as changes:
            async for change in changes:
                if change.value is not None:  # keys are revoked, never deleted
                    self._keep(_decoder.decode(change.value), change.revision)

    def _keep(self, record: KeyRecord, revision: int) -> None:
        """Take a record into the mirror. News of a watch may come after what was written since:
        a key must not come back to life by it."""
        if revision > self._revisions.get(record.id, 0):
            was_live = self.live(record.id)
            self._records[record.id] = record
            self._revisions[record.id] = revision
            if was_live and record.revoked_ms is not None:
                self._on_revoked(record.id)

    async def _change(
        self, id: str, *, revoked_ms: int | None = None, last_used_ms: int | None = None
    ) -> KeyRecord:
        async def swap() -> KeyRecord:
            entry = await self._store.get(KEYS + id)
            if entry is None:
                raise NotFound(f"no key {id}", key_id=id)
            held = _decoder.decode(entry.value)
            record = msgspec.structs.replace(
                held,
                revoked_ms=held.revoked_ms or revoked_ms,
                last_used_ms=max(held.last_used_ms or 0, last_used_ms or 0) or None,
            )
            value = msgspec.json.encode(record)
            revision = await self._store.put(entry.key, value, expected_revision=entry.revision)
            self._keep(record, revision)
            return record

        return await until_won(swap)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()
