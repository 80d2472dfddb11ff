"""The heap core: priority order, leases, retries and deduplication, without I/O."""

from penstock.heap.machine import DeadLetter, Description, Heap, ReturnPlan
from penstock.heap.spine import Spine
from penstock.heap.state import Applied
from penstock.heap.states import State

__all__ = ["Applied", "DeadLetter", "Description", "Heap", "ReturnPlan", "Spine", "State"]
