"""What `penstock demo` plays: the real system, things that go wrong, and checked claims.

`story` is the whole of it. Its first act is in `queue`, the second, a film archive and a pipeline,
in `archive`, and the page that shows how it went in `picture`. `corpus` makes the changes that
the archive's writers write. `chapters` holds what both acts claim, and the screen.
"""
