"""Pages that show runs: a server on the loopback interface, one file to send, and a trace. Reads run folders only."""
