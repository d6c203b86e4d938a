"""Names of the files that workers leave in a job's directory."""

MEASURED_FILE = "measured.json"
REQUESTS_FILE = "requests.jsonl"
ERROR_FILE = "error-rank{rank}.txt"
