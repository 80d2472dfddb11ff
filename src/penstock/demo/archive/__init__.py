"""The second act: who writes, what runs, what is seen of it, and the chapters that tell it."""
