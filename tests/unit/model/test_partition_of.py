import numpy as np
import xxhash

from penstock.model.ids import partition_of, partitions_of, partitions_of_digests


def test_a_hashed_key_goes_where_the_key_goes() -> None:
    keys = [b"%d" % i for i in range(1000)]
    digests = np.array([xxhash.xxh3_64_intdigest(key) for key in keys], np.uint64)
    for partitions in (1, 2, 7, 64):
        there = partitions_of_digests(digests, partitions)
        assert (there == partitions_of(keys, partitions)).all()
        assert there[0] == partition_of(keys[0], partitions)


def test_growing_a_topic_moves_few_keys() -> None:
    digests = np.random.default_rng(1).integers(0, 1 << 63, 10_000).astype(np.uint64)
    few, more = partitions_of_digests(digests, 7), partitions_of_digests(digests, 8)
    assert (more[few != more] == 7).all()
    assert 1000 < np.count_nonzero(few != more) < 1500
