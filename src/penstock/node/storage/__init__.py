"""Writes that have to reach the disk, and the threads that wait for it.

The flusher of a log gathers what one sync may cover; the syncer has the kernel do small ones, the
pool's threads do the rest. `room` says how much of the disk and of open files is left.
"""
