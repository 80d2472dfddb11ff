from __future__ import annotations

from penstock.log.cache import BatchCache


def test_the_least_recently_used_goes_first(pen):
    batches = [pen.put(b"x" * 1000) for _ in range(4)]
    cache = BatchCache(3 * (len(batches[0].body) + 512))
    for batch in batches[:3]:
        cache.put(batch)
    cache.get(1)
    cache.put(batches[3])
    assert [cache.get(first) is not None for first in (1, 2, 3, 4)] == [True, False, True, True]


def test_bytes_are_counted_out_again(pen):
    cache = BatchCache(1 << 20)
    batch = pen.put(b"x" * 1000)
    cache.put(batch)
    cache.put(batch)
    assert cache.bytes == len(batch.body) + 512
    cache.forget(1, 1)
    assert cache.bytes == 0 and cache.get(1) is None


def test_a_batch_over_the_bound_is_not_kept(pen):
    cache = BatchCache(100)
    cache.put(pen.put(b"x" * 1000))
    assert cache.bytes == 0
