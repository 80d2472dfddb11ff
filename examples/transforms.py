"""Three steps between the fold and the sinks of a pipeline: a filter, a join, an embedding.

    [transform]
    function = "transforms:visible"

    [[sink]]
    kind = "index"
    path = "index"
    transform = "transforms:embedded"

The module must be where the driver finds it; what runs in executors (`mapInPandas`) travels there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql.functions import broadcast, coalesce, col, get_json_object, lit

DIMENSIONS = 64
MEMO_S = 30 * 24 * 3600


def visible(vectors: DataFrame) -> DataFrame:
    """What is hidden is removed from the sinks: a row that is merely left out would stay there."""
    hidden = get_json_object("metadata", "$.hidden") == "true"
    return vectors.withColumn("deleted", col("deleted") | coalesce(hidden, lit(False)))


def priced(vectors: DataFrame) -> DataFrame:
    """Only what the price list knows. A static table is small, so each executor gets all of it."""
    prices = vectors.sparkSession.read.parquet(os.environ["PRICES"]).select("vector_id")
    return vectors.join(broadcast(prices), "vector_id", "left_semi")


def embedded(vectors: DataFrame) -> DataFrame:
    """The text in the metadata as a vector. A text that was embedded before is looked up by its
    hash in Redis, so that a change of anything else costs no call of the model."""
    return vectors.withColumn("text", get_json_object("metadata", "$.text")).mapInPandas(
        _embed, vectors.schema
    )


def _embed(parts: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    import redis

    with redis.Redis.from_url(os.environ["EMBEDDINGS_URL"]) as memo:
        for part in parts:
            texts = part.pop("text").fillna("")
            vectors = dict(zip(texts, _vectors(memo, texts.unique()), strict=False))
            part["vector"] = [
                np.zeros(DIMENSIONS, np.float32) if gone else vectors[text]
                for text, gone in zip(texts, part["deleted"], strict=True)
            ]
            yield part


def _vectors(memo: Any, texts: Any) -> list[np.ndarray]:
    keys = [f"embedding:{hashlib.sha256(text.encode()).hexdigest()}" for text in texts]
    known = memo.mget(keys) if keys else []
    found = []
    for key, text, held in zip(keys, texts, known, strict=True):
        vector = np.frombuffer(held, np.float32) if held else model(text)
        if not held:
            memo.set(key, vector.tobytes(), ex=MEMO_S)
            memo.incr("embedding-calls")
        found.append(vector)
    return found


def model(text: str) -> np.ndarray:
    """Stands where your model stands: words hashed to signs, the same for the same text always."""
    words = text.lower().split() or [""]
    seeds = [int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") for word in words]
    parts = [np.random.default_rng(seed).standard_normal(DIMENSIONS) for seed in seeds]
    return np.mean(parts, axis=0).astype(np.float32)
