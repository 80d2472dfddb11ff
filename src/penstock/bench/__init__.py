"""What `penstock bench` measures, with every server in a process of its own, and how it is told.

`subjects` lists what can be measured, one folder each: `queue`, `pipeline`, `cluster`, `live`. A
subject is a set of stages; `runner` runs them and takes medians, `targets` says what they should
come to, `document` keeps all that they came from, and `report` shows it as a table.
"""
