"""`loop`: the command line. It is a client of the API; only `up`, `down`, `doctor` and `db` touch the machine themselves.

This package loads little, so that `loop --help` is quick: what a command needs is imported inside it.
"""
