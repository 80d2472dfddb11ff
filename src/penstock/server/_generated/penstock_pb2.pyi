from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TopicKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUEUE: _ClassVar[TopicKind]
    DELTA: _ClassVar[TopicKind]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MIN: _ClassVar[Mode]
    MAX: _ClassVar[Mode]

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[Compression]
    ZSTD: _ClassVar[Compression]
    LZ4: _ClassVar[Compression]
QUEUE: TopicKind
DELTA: TopicKind
MIN: Mode
MAX: Mode
NONE: Compression
ZSTD: Compression
LZ4: Compression

class Heap(_message.Message):
    __slots__ = ("topic", "id", "mode", "partitions", "replication_factor", "k", "retention_ms", "visibility_ms", "visibility_ms_max", "max_retries", "backoff_ms_base", "backoff_ms_cap", "payload_bytes_max", "compression", "inflight_max", "consumer_leases_max", "key_streams_max", "dedup_ms", "ageing_per_s", "dlq", "replay_per_s", "paused", "kind", "dimensions", "dlq_retention_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    RETENTION_MS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    MAX_RETRIES_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MS_BASE_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MS_CAP_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_MAX_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_LEASES_MAX_FIELD_NUMBER: _ClassVar[int]
    KEY_STREAMS_MAX_FIELD_NUMBER: _ClassVar[int]
    DEDUP_MS_FIELD_NUMBER: _ClassVar[int]
    AGEING_PER_S_FIELD_NUMBER: _ClassVar[int]
    DLQ_FIELD_NUMBER: _ClassVar[int]
    REPLAY_PER_S_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    DLQ_RETENTION_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    id: int
    mode: Mode
    partitions: int
    replication_factor: int
    k: int
    retention_ms: int
    visibility_ms: int
    visibility_ms_max: int
    max_retries: int
    backoff_ms_base: int
    backoff_ms_cap: int
    payload_bytes_max: int
    compression: Compression
    inflight_max: int
    consumer_leases_max: int
    key_streams_max: int
    dedup_ms: int
    ageing_per_s: int
    dlq: bool
    replay_per_s: int
    paused: bool
    kind: TopicKind
    dimensions: int
    dlq_retention_ms: int
    def __init__(self, topic: _Optional[str] = ..., id: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., partitions: _Optional[int] = ..., replication_factor: _Optional[int] = ..., k: _Optional[int] = ..., retention_ms: _Optional[int] = ..., visibility_ms: _Optional[int] = ..., visibility_ms_max: _Optional[int] = ..., max_retries: _Optional[int] = ..., backoff_ms_base: _Optional[int] = ..., backoff_ms_cap: _Optional[int] = ..., payload_bytes_max: _Optional[int] = ..., compression: _Optional[_Union[Compression, str]] = ..., inflight_max: _Optional[int] = ..., consumer_leases_max: _Optional[int] = ..., key_streams_max: _Optional[int] = ..., dedup_ms: _Optional[int] = ..., ageing_per_s: _Optional[int] = ..., dlq: _Optional[bool] = ..., replay_per_s: _Optional[int] = ..., paused: _Optional[bool] = ..., kind: _Optional[_Union[TopicKind, str]] = ..., dimensions: _Optional[int] = ..., dlq_retention_ms: _Optional[int] = ...) -> None: ...

class MakeHeapRequest(_message.Message):
    __slots__ = ("topic", "mode", "partitions", "replication_factor", "k", "retention_ms", "visibility_ms", "visibility_ms_max", "max_retries", "backoff_ms_base", "backoff_ms_cap", "payload_bytes_max", "compression", "inflight_max", "consumer_leases_max", "key_streams_max", "dedup_ms", "ageing_per_s", "dlq", "replay_per_s", "paused", "kind", "dimensions", "dlq_retention_ms", "exists_ok")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    RETENTION_MS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    MAX_RETRIES_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MS_BASE_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MS_CAP_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_MAX_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_LEASES_MAX_FIELD_NUMBER: _ClassVar[int]
    KEY_STREAMS_MAX_FIELD_NUMBER: _ClassVar[int]
    DEDUP_MS_FIELD_NUMBER: _ClassVar[int]
    AGEING_PER_S_FIELD_NUMBER: _ClassVar[int]
    DLQ_FIELD_NUMBER: _ClassVar[int]
    REPLAY_PER_S_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    DLQ_RETENTION_MS_FIELD_NUMBER: _ClassVar[int]
    EXISTS_OK_FIELD_NUMBER: _ClassVar[int]
    topic: str
    mode: Mode
    partitions: int
    replication_factor: int
    k: int
    retention_ms: int
    visibility_ms: int
    visibility_ms_max: int
    max_retries: int
    backoff_ms_base: int
    backoff_ms_cap: int
    payload_bytes_max: int
    compression: Compression
    inflight_max: int
    consumer_leases_max: int
    key_streams_max: int
    dedup_ms: int
    ageing_per_s: int
    dlq: bool
    replay_per_s: int
    paused: bool
    kind: TopicKind
    dimensions: int
    dlq_retention_ms: int
    exists_ok: bool
    def __init__(self, topic: _Optional[str] = ..., mode: _Optional[_Union[Mode, str]] = ..., partitions: _Optional[int] = ..., replication_factor: _Optional[int] = ..., k: _Optional[int] = ..., retention_ms: _Optional[int] = ..., visibility_ms: _Optional[int] = ..., visibility_ms_max: _Optional[int] = ..., max_retries: _Optional[int] = ..., backoff_ms_base: _Optional[int] = ..., backoff_ms_cap: _Optional[int] = ..., payload_bytes_max: _Optional[int] = ..., compression: _Optional[_Union[Compression, str]] = ..., inflight_max: _Optional[int] = ..., consumer_leases_max: _Optional[int] = ..., key_streams_max: _Optional[int] = ..., dedup_ms: _Optional[int] = ..., ageing_per_s: _Optional[int] = ..., dlq: _Optional[bool] = ..., replay_per_s: _Optional[int] = ..., paused: _Optional[bool] = ..., kind: _Optional[_Union[TopicKind, str]] = ..., dimensions: _Optional[int] = ..., dlq_retention_ms: _Optional[int] = ..., exists_ok: _Optional[bool] = ...) -> None: ...

class GetHeapRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class ListHeapsRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: str
    def __init__(self, after: _Optional[str] = ...) -> None: ...

class ListHeapsResponse(_message.Message):
    __slots__ = ("heaps", "next")
    HEAPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    heaps: _containers.RepeatedCompositeFieldContainer[Heap]
    next: str
    def __init__(self, heaps: _Optional[_Iterable[_Union[Heap, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class UpdateHeapConfigRequest(_message.Message):
    __slots__ = ("topic", "k", "retention_ms", "visibility_ms", "visibility_ms_max", "max_retries", "backoff_ms_base", "backoff_ms_cap", "payload_bytes_max", "compression", "inflight_max", "consumer_leases_max", "key_streams_max", "dedup_ms", "ageing_per_s", "dlq", "replay_per_s", "paused", "dlq_retention_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    RETENTION_MS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    MAX_RETRIES_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MS_BASE_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MS_CAP_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_MAX_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_LEASES_MAX_FIELD_NUMBER: _ClassVar[int]
    KEY_STREAMS_MAX_FIELD_NUMBER: _ClassVar[int]
    DEDUP_MS_FIELD_NUMBER: _ClassVar[int]
    AGEING_PER_S_FIELD_NUMBER: _ClassVar[int]
    DLQ_FIELD_NUMBER: _ClassVar[int]
    REPLAY_PER_S_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    DLQ_RETENTION_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    k: int
    retention_ms: int
    visibility_ms: int
    visibility_ms_max: int
    max_retries: int
    backoff_ms_base: int
    backoff_ms_cap: int
    payload_bytes_max: int
    compression: Compression
    inflight_max: int
    consumer_leases_max: int
    key_streams_max: int
    dedup_ms: int
    ageing_per_s: int
    dlq: bool
    replay_per_s: int
    paused: bool
    dlq_retention_ms: int
    def __init__(self, topic: _Optional[str] = ..., k: _Optional[int] = ..., retention_ms: _Optional[int] = ..., visibility_ms: _Optional[int] = ..., visibility_ms_max: _Optional[int] = ..., max_retries: _Optional[int] = ..., backoff_ms_base: _Optional[int] = ..., backoff_ms_cap: _Optional[int] = ..., payload_bytes_max: _Optional[int] = ..., compression: _Optional[_Union[Compression, str]] = ..., inflight_max: _Optional[int] = ..., consumer_leases_max: _Optional[int] = ..., key_streams_max: _Optional[int] = ..., dedup_ms: _Optional[int] = ..., ageing_per_s: _Optional[int] = ..., dlq: _Optional[bool] = ..., replay_per_s: _Optional[int] = ..., paused: _Optional[bool] = ..., dlq_retention_ms: _Optional[int] = ...) -> None: ...

class DeleteHeapRequest(_message.Message):
    __slots__ = ("topic", "force", "confirm")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    topic: str
    force: bool
    confirm: str
    def __init__(self, topic: _Optional[str] = ..., force: _Optional[bool] = ..., confirm: _Optional[str] = ...) -> None: ...

class DeleteHeapResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("topic", "after")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    topic: str
    after: str
    def __init__(self, topic: _Optional[str] = ..., after: _Optional[str] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("topics", "next")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[HeapStats]
    next: str
    def __init__(self, topics: _Optional[_Iterable[_Union[HeapStats, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class HeapStats(_message.Message):
    __slots__ = ("topic", "ready", "delayed", "leased", "dead", "backlog", "oldest_age_ms", "enqueued_total", "acked_total", "retried_total", "dead_total", "expired_total", "rank_error_max", "partitions")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    OLDEST_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    ENQUEUED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ACKED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RETRIED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DEAD_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RANK_ERROR_MAX_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    ready: int
    delayed: int
    leased: int
    dead: int
    backlog: int
    oldest_age_ms: int
    enqueued_total: int
    acked_total: int
    retried_total: int
    dead_total: int
    expired_total: int
    rank_error_max: int
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionStats]
    def __init__(self, topic: _Optional[str] = ..., ready: _Optional[int] = ..., delayed: _Optional[int] = ..., leased: _Optional[int] = ..., dead: _Optional[int] = ..., backlog: _Optional[int] = ..., oldest_age_ms: _Optional[int] = ..., enqueued_total: _Optional[int] = ..., acked_total: _Optional[int] = ..., retried_total: _Optional[int] = ..., dead_total: _Optional[int] = ..., expired_total: _Optional[int] = ..., rank_error_max: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[PartitionStats, _Mapping]]] = ...) -> None: ...

class PartitionStats(_message.Message):
    __slots__ = ("partition", "epoch", "sequence_first", "sequence_last", "sequence_committed", "ready", "delayed", "leased", "dead", "bytes", "segments", "snapshot_sequence", "snapshot_bytes", "snapshot_age_ms", "coordinator")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIRST_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_LAST_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    partition: int
    epoch: int
    sequence_first: int
    sequence_last: int
    sequence_committed: int
    ready: int
    delayed: int
    leased: int
    dead: int
    bytes: int
    segments: int
    snapshot_sequence: int
    snapshot_bytes: int
    snapshot_age_ms: int
    coordinator: str
    def __init__(self, partition: _Optional[int] = ..., epoch: _Optional[int] = ..., sequence_first: _Optional[int] = ..., sequence_last: _Optional[int] = ..., sequence_committed: _Optional[int] = ..., ready: _Optional[int] = ..., delayed: _Optional[int] = ..., leased: _Optional[int] = ..., dead: _Optional[int] = ..., bytes: _Optional[int] = ..., segments: _Optional[int] = ..., snapshot_sequence: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ..., snapshot_age_ms: _Optional[int] = ..., coordinator: _Optional[str] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("topic", "force", "confirm")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    topic: str
    force: bool
    confirm: str
    def __init__(self, topic: _Optional[str] = ..., force: _Optional[bool] = ..., confirm: _Optional[str] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("purged",)
    PURGED_FIELD_NUMBER: _ClassVar[int]
    purged: int
    def __init__(self, purged: _Optional[int] = ...) -> None: ...

class EnqueueRequest(_message.Message):
    __slots__ = ("topic", "payload", "priority", "key", "headers", "delay_ms", "max_retries", "producer_id", "epoch", "seq")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_RETRIES_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    topic: str
    payload: bytes
    priority: int
    key: bytes
    headers: _containers.ScalarMap[str, str]
    delay_ms: int
    max_retries: int
    producer_id: str
    epoch: int
    seq: int
    def __init__(self, topic: _Optional[str] = ..., payload: _Optional[bytes] = ..., priority: _Optional[int] = ..., key: _Optional[bytes] = ..., headers: _Optional[_Mapping[str, str]] = ..., delay_ms: _Optional[int] = ..., max_retries: _Optional[int] = ..., producer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class EnqueueResponse(_message.Message):
    __slots__ = ("message_id", "duplicate")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    duplicate: bool
    def __init__(self, message_id: _Optional[str] = ..., duplicate: _Optional[bool] = ...) -> None: ...

class NewMessage(_message.Message):
    __slots__ = ("payload", "priority", "key", "headers", "delay_ms", "max_retries")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_RETRIES_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    priority: int
    key: bytes
    headers: _containers.ScalarMap[str, str]
    delay_ms: int
    max_retries: int
    def __init__(self, payload: _Optional[bytes] = ..., priority: _Optional[int] = ..., key: _Optional[bytes] = ..., headers: _Optional[_Mapping[str, str]] = ..., delay_ms: _Optional[int] = ..., max_retries: _Optional[int] = ...) -> None: ...

class EnqueueBatchRequest(_message.Message):
    __slots__ = ("topic", "messages", "atomic", "producer_id", "epoch", "seq", "expected_sequence")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ATOMIC_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    messages: _containers.RepeatedCompositeFieldContainer[NewMessage]
    atomic: bool
    producer_id: str
    epoch: int
    seq: int
    expected_sequence: int
    def __init__(self, topic: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[NewMessage, _Mapping]]] = ..., atomic: _Optional[bool] = ..., producer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., expected_sequence: _Optional[int] = ...) -> None: ...

class EnqueueBatchResponse(_message.Message):
    __slots__ = ("message_ids", "duplicates", "sequence_last")
    MESSAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_LAST_FIELD_NUMBER: _ClassVar[int]
    message_ids: _containers.RepeatedScalarFieldContainer[str]
    duplicates: _containers.RepeatedScalarFieldContainer[int]
    sequence_last: int
    def __init__(self, message_ids: _Optional[_Iterable[str]] = ..., duplicates: _Optional[_Iterable[int]] = ..., sequence_last: _Optional[int] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("message_id", "partition", "sequence", "priority", "attempts", "time_ms", "key", "headers", "payload")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    partition: int
    sequence: int
    priority: int
    attempts: int
    time_ms: int
    key: bytes
    headers: _containers.ScalarMap[str, str]
    payload: bytes
    def __init__(self, message_id: _Optional[str] = ..., partition: _Optional[int] = ..., sequence: _Optional[int] = ..., priority: _Optional[int] = ..., attempts: _Optional[int] = ..., time_ms: _Optional[int] = ..., key: _Optional[bytes] = ..., headers: _Optional[_Mapping[str, str]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PopItem(_message.Message):
    __slots__ = ("message_id", "partition", "sequence", "priority", "attempts", "time_ms", "key", "headers", "payload", "lease_token", "deadline_ms", "visibility_ms")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    partition: int
    sequence: int
    priority: int
    attempts: int
    time_ms: int
    key: bytes
    headers: _containers.ScalarMap[str, str]
    payload: bytes
    lease_token: str
    deadline_ms: int
    visibility_ms: int
    def __init__(self, message_id: _Optional[str] = ..., partition: _Optional[int] = ..., sequence: _Optional[int] = ..., priority: _Optional[int] = ..., attempts: _Optional[int] = ..., time_ms: _Optional[int] = ..., key: _Optional[bytes] = ..., headers: _Optional[_Mapping[str, str]] = ..., payload: _Optional[bytes] = ..., lease_token: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., visibility_ms: _Optional[int] = ...) -> None: ...

class DeadMessage(_message.Message):
    __slots__ = ("message_id", "partition", "sequence", "priority", "attempts", "time_ms", "key", "headers", "payload", "reason", "detail", "dead_ms")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    DEAD_MS_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    partition: int
    sequence: int
    priority: int
    attempts: int
    time_ms: int
    key: bytes
    headers: _containers.ScalarMap[str, str]
    payload: bytes
    reason: str
    detail: str
    dead_ms: int
    def __init__(self, message_id: _Optional[str] = ..., partition: _Optional[int] = ..., sequence: _Optional[int] = ..., priority: _Optional[int] = ..., attempts: _Optional[int] = ..., time_ms: _Optional[int] = ..., key: _Optional[bytes] = ..., headers: _Optional[_Mapping[str, str]] = ..., payload: _Optional[bytes] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., dead_ms: _Optional[int] = ...) -> None: ...

class PopRequest(_message.Message):
    __slots__ = ("topic", "limit", "wait_ms", "visibility_ms", "consumer")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    topic: str
    limit: int
    wait_ms: int
    visibility_ms: int
    consumer: str
    def __init__(self, topic: _Optional[str] = ..., limit: _Optional[int] = ..., wait_ms: _Optional[int] = ..., visibility_ms: _Optional[int] = ..., consumer: _Optional[str] = ...) -> None: ...

class PopResponse(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[PopItem]
    def __init__(self, messages: _Optional[_Iterable[_Union[PopItem, _Mapping]]] = ...) -> None: ...

class PopStreamRequest(_message.Message):
    __slots__ = ("open", "flow", "ack", "nack")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FLOW_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    open: PopOpen
    flow: FlowControl
    ack: AckBatchRequest
    nack: NackBatchRequest
    def __init__(self, open: _Optional[_Union[PopOpen, _Mapping]] = ..., flow: _Optional[_Union[FlowControl, _Mapping]] = ..., ack: _Optional[_Union[AckBatchRequest, _Mapping]] = ..., nack: _Optional[_Union[NackBatchRequest, _Mapping]] = ...) -> None: ...

class PopOpen(_message.Message):
    __slots__ = ("topic", "credits", "consumer", "visibility_ms", "batch_max")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_MS_FIELD_NUMBER: _ClassVar[int]
    BATCH_MAX_FIELD_NUMBER: _ClassVar[int]
    topic: str
    credits: int
    consumer: str
    visibility_ms: int
    batch_max: int
    def __init__(self, topic: _Optional[str] = ..., credits: _Optional[int] = ..., consumer: _Optional[str] = ..., visibility_ms: _Optional[int] = ..., batch_max: _Optional[int] = ...) -> None: ...

class FlowControl(_message.Message):
    __slots__ = ("credits",)
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    credits: int
    def __init__(self, credits: _Optional[int] = ...) -> None: ...

class PopStreamResponse(_message.Message):
    __slots__ = ("items", "lost")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[PopItem]
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, items: _Optional[_Iterable[_Union[PopItem, _Mapping]]] = ..., lost: _Optional[_Iterable[str]] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("topic", "namespace", "vector_id", "op", "routes", "from_sequence", "from_time_ms", "positions", "cursor", "coalesce_ms", "batch_ms", "credits")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    VECTOR_ID_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FROM_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    COALESCE_MS_FIELD_NUMBER: _ClassVar[int]
    BATCH_MS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    namespace: str
    vector_id: str
    op: str
    routes: _containers.RepeatedScalarFieldContainer[str]
    from_sequence: int
    from_time_ms: int
    positions: str
    cursor: str
    coalesce_ms: int
    batch_ms: int
    credits: int
    def __init__(self, topic: _Optional[str] = ..., namespace: _Optional[str] = ..., vector_id: _Optional[str] = ..., op: _Optional[str] = ..., routes: _Optional[_Iterable[str]] = ..., from_sequence: _Optional[int] = ..., from_time_ms: _Optional[int] = ..., positions: _Optional[str] = ..., cursor: _Optional[str] = ..., coalesce_ms: _Optional[int] = ..., batch_ms: _Optional[int] = ..., credits: _Optional[int] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("changes", "positions")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    positions: str
    def __init__(self, changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., positions: _Optional[str] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("partition", "sequence", "position", "ordinal", "time_ms", "headers", "delta_id", "parent", "namespace", "vector_id", "op", "origin", "time", "priority", "source", "indices", "values", "metadata", "clock")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ClockEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    DELTA_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    VECTOR_ID_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    partition: int
    sequence: int
    position: int
    ordinal: int
    time_ms: int
    headers: _containers.ScalarMap[str, str]
    delta_id: bytes
    parent: bytes
    namespace: str
    vector_id: str
    op: str
    origin: str
    time: int
    priority: str
    source: str
    indices: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    metadata: bytes
    clock: _containers.ScalarMap[str, int]
    def __init__(self, partition: _Optional[int] = ..., sequence: _Optional[int] = ..., position: _Optional[int] = ..., ordinal: _Optional[int] = ..., time_ms: _Optional[int] = ..., headers: _Optional[_Mapping[str, str]] = ..., delta_id: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., namespace: _Optional[str] = ..., vector_id: _Optional[str] = ..., op: _Optional[str] = ..., origin: _Optional[str] = ..., time: _Optional[int] = ..., priority: _Optional[str] = ..., source: _Optional[str] = ..., indices: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ..., metadata: _Optional[bytes] = ..., clock: _Optional[_Mapping[str, int]] = ...) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("topic", "message_id", "lease_token")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    topic: str
    message_id: str
    lease_token: str
    def __init__(self, topic: _Optional[str] = ..., message_id: _Optional[str] = ..., lease_token: _Optional[str] = ...) -> None: ...

class AckResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AckBatchRequest(_message.Message):
    __slots__ = ("topic", "lease_tokens")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    lease_tokens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topic: _Optional[str] = ..., lease_tokens: _Optional[_Iterable[str]] = ...) -> None: ...

class AckBatchResponse(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lost: _Optional[_Iterable[str]] = ...) -> None: ...

class NackRequest(_message.Message):
    __slots__ = ("topic", "message_id", "lease_token", "delay_ms", "reject", "reason")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    topic: str
    message_id: str
    lease_token: str
    delay_ms: int
    reject: bool
    reason: str
    def __init__(self, topic: _Optional[str] = ..., message_id: _Optional[str] = ..., lease_token: _Optional[str] = ..., delay_ms: _Optional[int] = ..., reject: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class NackResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NackBatchRequest(_message.Message):
    __slots__ = ("topic", "lease_tokens", "delay_ms", "reject", "reason")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    topic: str
    lease_tokens: _containers.RepeatedScalarFieldContainer[str]
    delay_ms: int
    reject: bool
    reason: str
    def __init__(self, topic: _Optional[str] = ..., lease_tokens: _Optional[_Iterable[str]] = ..., delay_ms: _Optional[int] = ..., reject: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class NackBatchResponse(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lost: _Optional[_Iterable[str]] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("topic", "lease_token", "extend_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXTEND_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    lease_token: str
    extend_ms: int
    def __init__(self, topic: _Optional[str] = ..., lease_token: _Optional[str] = ..., extend_ms: _Optional[int] = ...) -> None: ...

class ExtendResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PeekRequest(_message.Message):
    __slots__ = ("topic", "limit")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    limit: int
    def __init__(self, topic: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class PeekResponse(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class MoveToDLQRequest(_message.Message):
    __slots__ = ("topic", "message_id", "reason")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    topic: str
    message_id: str
    reason: str
    def __init__(self, topic: _Optional[str] = ..., message_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class MoveToDLQResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DlqListRequest(_message.Message):
    __slots__ = ("topic", "after", "limit")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    after: str
    limit: int
    def __init__(self, topic: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class DlqListResponse(_message.Message):
    __slots__ = ("messages", "next")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[DeadMessage]
    next: str
    def __init__(self, messages: _Optional[_Iterable[_Union[DeadMessage, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class DlqReplayRequest(_message.Message):
    __slots__ = ("topic", "message_ids", "limit")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    message_ids: _containers.RepeatedScalarFieldContainer[str]
    limit: int
    def __init__(self, topic: _Optional[str] = ..., message_ids: _Optional[_Iterable[str]] = ..., limit: _Optional[int] = ...) -> None: ...

class DlqReplayResponse(_message.Message):
    __slots__ = ("replayed",)
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    replayed: int
    def __init__(self, replayed: _Optional[int] = ...) -> None: ...

class DlqDeleteRequest(_message.Message):
    __slots__ = ("topic", "message_ids", "force", "confirm")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    topic: str
    message_ids: _containers.RepeatedScalarFieldContainer[str]
    force: bool
    confirm: str
    def __init__(self, topic: _Optional[str] = ..., message_ids: _Optional[_Iterable[str]] = ..., force: _Optional[bool] = ..., confirm: _Optional[str] = ...) -> None: ...

class DlqDeleteResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...

class ConfirmRequest(_message.Message):
    __slots__ = ("method", "topic", "key_id")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    method: str
    topic: str
    key_id: str
    def __init__(self, method: _Optional[str] = ..., topic: _Optional[str] = ..., key_id: _Optional[str] = ...) -> None: ...

class ConfirmResponse(_message.Message):
    __slots__ = ("confirm", "expires_ms")
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    confirm: str
    expires_ms: int
    def __init__(self, confirm: _Optional[str] = ..., expires_ms: _Optional[int] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class CreateKeyResponse(_message.Message):
    __slots__ = ("id", "key", "name", "created_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    key: str
    name: str
    created_ms: int
    def __init__(self, id: _Optional[str] = ..., key: _Optional[str] = ..., name: _Optional[str] = ..., created_ms: _Optional[int] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: str
    def __init__(self, after: _Optional[str] = ...) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("keys", "next")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[Key]
    next: str
    def __init__(self, keys: _Optional[_Iterable[_Union[Key, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class Key(_message.Message):
    __slots__ = ("id", "name", "created_ms", "last_used_ms", "revoked_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_MS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    created_ms: int
    last_used_ms: int
    revoked_ms: int
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., created_ms: _Optional[int] = ..., last_used_ms: _Optional[int] = ..., revoked_ms: _Optional[int] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("id", "force", "confirm")
    ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    id: str
    force: bool
    confirm: str
    def __init__(self, id: _Optional[str] = ..., force: _Optional[bool] = ..., confirm: _Optional[str] = ...) -> None: ...

class RevokeKeyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("version", "node", "uptime_ms", "format")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    version: str
    node: str
    uptime_ms: int
    format: int
    def __init__(self, version: _Optional[str] = ..., node: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., format: _Optional[int] = ...) -> None: ...
