"""Writes that have to reach the disk, reads that may need it, and the threads that wait for it.

The flusher of a log gathers what one sync may cover; the syncer has the kernel do small ones, the
pool's threads do the rest. A slice reader reads on the loop what is at hand, and has a thread read
what is not. `room` says how much of the disk and of open files is left.
"""
