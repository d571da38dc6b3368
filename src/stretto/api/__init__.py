"""The Python interface: what `import stretto` offers, and what the command line is written on (`docs/python.md`)."""
