"""One batch of messages over several partitions: all of it is written, or nothing.

The driver prepares every part and has one partition decide; participants hold what is prepared
until they know. `batches` are those of one topic, with what asks again after a crash.
"""
