"""docs/deltas.md: its bytes are the bytes, its example runs, its tables are complete."""

import re
from pathlib import Path

import numpy as np

from penstock.model.delta import Delta, Op, encode, hybrid_time
from penstock.propagation.fold import ledger as pending
from penstock.propagation.options import PropagationOptions

TEXT = (Path(__file__).parents[3] / "docs" / "deltas.md").read_text()
DELTA = Delta(
    delta_id=bytes(range(1, 17)),
    parent=bytes(range(17, 33)),
    namespace="products",
    vector_id="sku-7",
    op=Op.SPARSE,
    origin="web",
    time=hybrid_time(1_800_000_000_000, 7),
    clock={"web": 2, "batch": 1},
    indices=np.array([1, 5], np.uint16),
    values=np.array([0.5, -2], np.float32),
)


def test_the_test_vector_is_what_is_encoded() -> None:
    (block,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    words = "".join(line.split()[0] for line in block.splitlines())
    assert words == encode(DELTA, dimensions=8).hex()


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "docs/deltas.md", "exec"), {})


def test_operations_reasons_and_options_are_listed() -> None:
    assert all(f"| {op.name} {op.value} |" in TEXT for op in Op)
    reasons = (
        pending.REUSED, pending.PARENT_MISSING, pending.PARENT_ELSEWHERE, pending.CAUSE_MISSING,
        pending.LATE, pending.INVALID,
    )  # fmt: skip
    assert all(f"| `{reason}` |" in TEXT for reason in reasons)
    rows = re.findall(r"^\| `(\w+_\w+)` \| ([\d ]+) \|", TEXT, re.MULTILINE)
    listed = {name: int(value.replace(" ", "")) for name, value in rows}
    defaults = PropagationOptions()
    assert listed == {name: getattr(defaults, name) for name in defaults.__struct_fields__}
