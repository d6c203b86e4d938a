"""Scheduling policies: pure state machines that decide what comes next."""
