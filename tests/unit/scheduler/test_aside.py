"""Computing beside: the same answer, the same errors, and a fault that shows itself here."""

import os

import pytest

from exegpt.errors import ConfigError
from exegpt.scheduler import aside
from exegpt.scheduler.aside import Aside


def test_the_result_comes_from_another_process():
    assert Aside(os.getpid).result() != os.getpid()


def test_one_core_computes_it_here(monkeypatch):
    monkeypatch.setattr(aside, "_num_cores", lambda: 1)
    assert Aside(os.getpid).result() == os.getpid()


def test_an_error_of_ours_is_handed_on():
    def refuse():
        raise ConfigError("key: wrong")

    with pytest.raises(ConfigError, match="key: wrong"):
        Aside(refuse).result()


def test_a_process_that_dies_is_replaced():
    parent = os.getpid()

    def die():
        if os.getpid() != parent:
            os._exit(9)
        return "here"

    assert Aside(die).result() == "here"
