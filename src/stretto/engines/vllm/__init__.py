"""The vLLM engine: each instance is a child process with vLLM in it, behind the protocol of `engines/protocol.py`."""
