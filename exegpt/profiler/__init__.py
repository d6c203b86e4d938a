"""Cost tables of one layer and of synchronisation: measured, interpolated, never extrapolated."""
