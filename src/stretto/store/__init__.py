"""The files of a run: the journal, checkpoints and the weights of versions."""
