"""Prints docs/configuration.md from the comments in conf/.

python docs/make_configuration.py > docs/configuration.md
"""

from __future__ import annotations

import re
from pathlib import Path

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("model", "cluster", "workload", "bound", "solver", "profile", "runner", "experiment")
LINE = re.compile(r"^( *)([a-z_]+):(?: +(.*?))?(?: +# (.*))?$")


def rows(path: Path, prefix: str) -> list[tuple[str, str, str]]:
    """(key, value, meaning) of every line of an option that sets a key or opens a block."""
    found, parents = [], []
    for line in path.read_text().splitlines():
        match = LINE.match(line)
        if match is None or match[2] in ("defaults", "hydra"):
            if match is not None:
                break
            continue
        depth = len(match[1]) // 2
        parents = [*parents[:depth], match[2]]
        found.append((prefix + ".".join(parents), match[3] or "", match[4] or ""))
    return found


def main() -> None:
    """Write the reference to stdout."""
    print("# Configuration\n")
    print("Made from the comments in `conf/` by `docs/make_configuration.py`; a test holds it.\n")
    print("## Top level\n\n| key | default | meaning |\n|---|---|---|")
    top = (CONF / "config.yaml").read_text().split("command:", 1)[1]
    for line in ("command:" + top).splitlines():
        match = LINE.match(line)
        if match is not None and match[2] == "hydra":
            break
        if match is not None and match[3]:
            key = "gather.dir" if match[1] else match[2]
            print(f"| `{key}` | `{match[3]}` | {match[4] or ''} |")
    for group in GROUPS:
        print(f"\n## {group}")
        for path in sorted((CONF / group).rglob("*.yaml")):
            about = " ".join(
                line[2:]
                for line in path.read_text().splitlines()
                if line.startswith("# ") and "@package" not in line
            )
            print(f"\n### `{group}={path.relative_to(CONF / group).with_suffix('').as_posix()}`\n\n{about}\n")
            if group == "experiment":
                continue
            print("| key | value | meaning |\n|---|---|---|")
            for key, value, meaning in rows(path, f"{group}."):
                print(
                    f"| `{key}` | {f'`{value}`' if value else ''} | {meaning.replace('|', chr(92) + '|')} |"
                )


if __name__ == "__main__":
    main()
