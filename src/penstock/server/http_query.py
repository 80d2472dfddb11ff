"""The query of a URL, in bounds."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl

from penstock.errors import InvalidArgument

QUERY_FIELDS_MAX: Final = 32


def query_pairs(query: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(query),
            max_num_fields=QUERY_FIELDS_MAX,
            errors="strict",
        )
    except ValueError as error:
        raise InvalidArgument(f"malformed query: {error}", field="query") from error
