import asyncio

from penstock.client.network.exchange import HIGH_WATER, MemoryTransport, memory_pair


class End(asyncio.Protocol):
    def __init__(self) -> None:
        self.received = b""
        self.events: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, MemoryTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")


async def turn(turns: int = 4) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_bytes_arrive_in_order_and_never_inside_write() -> None:
    near, far = End(), End()
    memory_pair(near, far)
    near.transport.write(b"ab")
    near.transport.writelines([b"c", memoryview(b"d"), bytearray(b"e")])
    assert far.received == b""
    await turn()
    assert far.received == b"abcde"


async def test_a_fast_writer_is_paused_until_the_reader_catches_up() -> None:
    near, far = End(), End()
    memory_pair(near, far)
    far.transport.pause_reading()
    near.transport.write(bytes(HIGH_WATER + 1))
    await turn()
    assert near.events == ["pause"] and far.received == b""
    assert near.transport.get_write_buffer_size() == HIGH_WATER + 1
    far.transport.resume_reading()
    await turn()
    assert near.events == ["pause", "resume"] and len(far.received) == HIGH_WATER + 1


async def test_close_delivers_first_and_ends_both_sides() -> None:
    near, far = End(), End()
    memory_pair(near, far)
    near.transport.write(b"last words")
    near.transport.close()
    near.transport.write(b"too late")
    await turn()
    assert far.received == b"last words"
    assert near.events == far.events == ["lost"]


async def test_abort_drops_what_was_not_read() -> None:
    near, far = End(), End()
    memory_pair(near, far)
    near.transport.write(b"gone")
    near.transport.abort()
    await turn()
    assert far.received == b"" and near.events == far.events == ["lost"]
