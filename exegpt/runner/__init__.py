"""Executes a schedule on real ranks: weights, models, K/V cache, transport and the worker's loop."""
