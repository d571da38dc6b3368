"""The run loop and its parts. Imports no torch; `protocols.py` says what it needs of the other packages."""
