"""The propagation core: from deltas as they arrive to the state of vectors, without I/O."""
