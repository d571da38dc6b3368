"""What a run leaves on disk: the journal, checkpoints and weights."""
