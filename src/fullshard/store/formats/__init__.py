"""Formats of other libraries, each a `Source`, a `Sink`, or both."""
