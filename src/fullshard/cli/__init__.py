"""The command line, `fullshard COMMAND`: one module for each command; the table of them is in `main.py`.

What they share is in `terminal.py`.
"""
