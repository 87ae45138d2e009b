"""What the Triton kernels of several operations share. An operation's own are in its `triton.py`."""
