"""docs/configuration.md is what conf/ says, and names every key that the schema knows."""

import re
import subprocess
import sys

from exegpt.config_help import all_keys


def test_reference_is_made_from_conf(repository):
    script = repository / "docs" / "make_configuration.py"
    made = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True).stdout
    assert made == (repository / "docs" / "configuration.md").read_text()


def test_reference_names_every_key(repository):
    named = set(
        re.findall(r"^\| `([a-z_.]+)` \|", (repository / "docs" / "configuration.md").read_text(), re.M)
    )
    leaves = set(all_keys()) - {key.rpartition(".")[0] for key in all_keys()}
    assert leaves - named == set()
