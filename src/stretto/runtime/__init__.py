"""How the parts are put together: one process, or a cluster."""
