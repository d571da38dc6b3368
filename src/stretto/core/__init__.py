"""The pure core: no torch, no asyncio, no clock, no I/O. Events in, commands out; the three laws hold after each."""
