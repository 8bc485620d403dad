"""Formats of other libraries: a `Source` of each that is read, and a function that writes, for some."""
