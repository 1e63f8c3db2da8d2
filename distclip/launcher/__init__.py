"""Ways for a launcher to give a run its endpoint: the torchrun plug-in."""
