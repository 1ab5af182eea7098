"""Many jobs of one recipe: sweeps and scaling campaigns."""
