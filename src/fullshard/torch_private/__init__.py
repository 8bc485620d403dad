"""Every private API of torch that Fullshard uses, one file a need.

Each file names the public alternative; `tests/test_private_api.py` says when one goes.
"""
