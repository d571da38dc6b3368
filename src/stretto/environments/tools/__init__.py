"""Tools for environments that chat: a calculator, Python in a sandbox, and search over a folder of text files."""
