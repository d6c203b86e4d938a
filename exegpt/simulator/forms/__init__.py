"""Closed forms of the steady state, one file a policy, vectorised over candidates."""
