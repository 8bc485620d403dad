"""The command line, `fullshard COMMAND`: one module per command, all listed in `main.py`."""
