"""Run directories as a whole: sweeps over options, and what a tree of runs holds."""
