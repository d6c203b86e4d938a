"""The profile's file: a round trip, and each way to spoil it."""

import json
from dataclasses import replace

import pytest
import synthetic

from exegpt.errors import ProfileError
from exegpt.profiler.table import check_key, read_profile, shape_digest, write_profile

TABLE = synthetic.tiny_profile(synthetic.tiny_model())


def test_round_trip(tmp_path):
    path = tmp_path / "profiles" / "tiny.json"
    write_profile(TABLE, path)
    found = read_profile(path)
    assert found.key == TABLE.key
    assert found.layers.keys() == TABLE.layers.keys()
    assert found.num_points() == TABLE.num_points()
    for name, grid in TABLE.grids().items():
        assert found.grids()[name].values_s == pytest.approx(grid.values_s)
    assert [p.name for p in path.parent.iterdir()] == ["tiny.json"]


def test_optional_tables_survive_a_round_trip(tmp_path):
    linear, attention = TABLE.layers[1].linear, TABLE.layers[1].decode_attention
    layers = {
        t: replace(costs, encode_linear=linear, cross_attention=attention)
        for t, costs in TABLE.layers.items()
    }
    write_profile(replace(TABLE, layers=layers, host_copy=TABLE.send), tmp_path / "p.json")
    found = read_profile(tmp_path / "p.json")
    assert found.host_copy is not None
    assert found.host_copy.at(1e6) == TABLE.send.at(1e6)
    assert found.layers[2].encode_linear.at(100) == linear.at(100)
    assert found.layers[1].cross_attention.at(2, 300) == attention.at(2, 300)
    assert {"host_copy", "tp1.encode_linear", "tp2.cross_attention"} <= found.grids().keys()
    write_profile(TABLE, tmp_path / "old.json")
    old = read_profile(tmp_path / "old.json")
    assert old.host_copy is old.layers[1].encode_linear is old.layers[1].cross_attention is None


def test_fields_that_came_later_leave_the_shape_of_other_models_alone():
    # Digest of this model before ModelSpec had experts: profiles in caches are found by it.
    assert shape_digest(synthetic.tiny_model()) == "63af94fc90cd666f"
    experts = synthetic.tiny_model(num_experts=4, num_experts_per_token=2, moe_intermediate_size=32)
    more = replace(experts, num_experts=8)
    assert len({shape_digest(m) for m in (synthetic.tiny_model(), experts, more)}) == 3


def spoil(data, how):
    match how:
        case "version":
            data["version"] = 7
        case "no grids":
            del data["grids"]
        case "nan":
            data["grids"]["tp1.linear"]["values_s"][0] = float("nan")
        case "negative":
            data["grids"]["tp1.linear"]["values_s"][0] = -1.0
        case "missing":
            del data["grids"]["tp2.all_reduce"]
        case "dtype":
            data["key"]["dtype"] = "int4"
        case "key":
            data["key"]["color"] = "red"
        case "unknown":
            data["grids"]["tp1.magic"] = data["grids"]["tp1.linear"]
        case "send":
            del data["grids"]["send"]
    return data


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("version", "version is not 1"),
        ("no grids", "KeyError 'grids'"),
        ("nan", "tp1.linear: times must be finite"),
        ("negative", "tp1.linear: times must be finite and not negative"),
        ("missing", "tp_size=2 lacks the table all_reduce"),
        ("dtype", "key.dtype='int4'; allowed"),
        ("key", "not a profile"),
        ("unknown", "tp_size=1 has an unknown table magic"),
        ("send", "no layer costs or no send costs"),
    ],
)
def test_spoiled_files_are_refused_by_name(tmp_path, how, said):
    path = tmp_path / "p.json"
    write_profile(TABLE, path)
    path.write_text(json.dumps(spoil(json.loads(path.read_text()), how)))
    with pytest.raises(ProfileError, match=said) as caught:
        read_profile(path)
    assert f"profile.path={path}" in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00\x01", '"text"'])
def test_what_is_no_profile_is_refused(tmp_path, content):
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(ProfileError, match=r"profile\.path=.*p\.json"):
        read_profile(path)
    with pytest.raises(ProfileError, match="no such file"):
        read_profile(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "A40"}, "measured on test, but this cluster has A40"),
        ({"shape": "other", "model": "big"}, "measured for the model tiny, not for big"),
        ({"dtype": "bfloat16"}, "measured in float32, but runner.dtype=bfloat16"),
        ({"num_ranks": 8}, "measured with 2 ranks at once, but the cluster has 8"),
    ],
)
def test_a_foreign_profile_is_refused(change, said):
    check_key(TABLE.key, TABLE.key, source="p")
    with pytest.raises(ProfileError, match=said):
        check_key(TABLE.key, replace(TABLE.key, **change), source="p")
