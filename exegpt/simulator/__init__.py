"""From a profile to predictions: closed forms, event-driven replay, memory, placement."""
