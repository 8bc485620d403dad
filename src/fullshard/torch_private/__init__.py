"""Every private API of torch that Fullshard uses, one file per need.

Each file names the public alternative; `tests/test_private_api.py` fails when an API is gone.
"""
