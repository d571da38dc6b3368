"""The same run on a Ray cluster: instances, trainer ranks and rewards are actors."""
