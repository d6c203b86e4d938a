"""What arrives: length distributions, traces, prompts, and requests drawn from them. Pure, without torch."""
