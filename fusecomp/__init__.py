"""fusecomp."""
