"""The search for the schedule with the highest throughput within the bounds."""
