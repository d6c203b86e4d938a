"""What each `command=` does, from a checked job to the files of its directory."""
