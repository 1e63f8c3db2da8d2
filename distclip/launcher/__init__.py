"""Ways for a launcher to give a run its endpoint: the torchrun plug-in, and the sidecar for all others."""
