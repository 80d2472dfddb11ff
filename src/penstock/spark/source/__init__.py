"""Topics as Spark sees them: reading, writing, and the way to a node.

`reader` and `writer` plan on the driver and work in tasks; what Spark loads is in
`penstock.spark.frames`, above. All of them reach a node by `NodeAccess`, which blocks. What is read
is final: a range read again gives the same rows.
"""
