"""rc.Params: from where values come, and which are refused."""

import gc
import sys

import pytest

import ringcomm as rc
from ringcomm.config import read_settings
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM


@pytest.fixture
def given(monkeypatch, tmp_path):
    """Set the command line, the variables and the file of a program."""

    def give(arguments=(), variables=None, toml=None):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        for name, text in (variables or {}).items():
            monkeypatch.setenv(f"RINGCOMM_PARAM_{name}", text)
        if toml is not None:
            (tmp_path / "p.toml").write_text(toml)
            monkeypatch.setenv("RINGCOMM_PARAMS", str(tmp_path / "p.toml"))

    give()
    return give


def test_the_command_line_comes_before_variables_and_these_before_the_file(given):
    given(
        ["--lr=0.4", "data.csv", "--n-layers", "7", "--lrx", "1"],
        {"LR": "0.3", "NAME": "b"},
        'lr = 0.2\nname = "a"\nbatch = 32\nn_layers = 2\n',
    )
    p = rc.Params(lr=rc.live(0.1), name="x", batch=64, n_layers=1, deep=False)
    assert dict(p) == {"lr": 0.4, "name": "b", "batch": 32, "n_layers": 7, "deep": False}
    assert (p.lr, p["batch"], p.rest) == (0.4, 32, ["data.csv", "--lrx", "1"])
    assert repr(p) == "Params(lr=0.4, name='b', batch=32, n_layers=7, deep=False)"
    with pytest.raises(AttributeError, match="no parameter 'momentum'"):
        _ = p.momentum
    assert read_settings()  # the variables of parameters are no mistaken settings


@pytest.mark.parametrize(
    ("arguments", "variables", "toml", "text"),
    [
        (["--lr", "fast"], {}, None, "lr must be a float, such as 0.1, not 'fast'"),
        (["--lr", "nan"], {}, None, "lr must be finite"),
        (["--batch", "1.5"], {}, None, "batch must be a int, such as 64, not '1.5'"),
        ([], {"DEEP": "maybe"}, None, "deep must be a bool"),
        ([], {"BATCHES": "3"}, None, "BATCHES: no such parameter"),
        ([], {}, "lr = true", "p.toml: lr is True; it must be a float"),
        ([], {}, "rate = 1.0", "p.toml: rate: no such parameter; there are lr, batch, deep"),
        ([], {}, "lr = = 1", "p.toml: "),
    ],
)
def test_what_is_wrong_is_said(given, arguments, variables, toml, text):
    given(arguments, variables, toml)
    with pytest.raises(rc.ConfigError, match=text):
        rc.Params(lr=0.1, batch=64, deep=True)


def test_negative_numbers_may_have_an_exponent(given):
    given(["--lr", "-1e-3", "--min-x", "-2E+1", "--other", "-1e-3", "--", "--lr", "-1e-4"])
    p = rc.Params(lr=0.1, min_x=1.0)
    assert dict(p) == {"lr": -1e-3, "min_x": -20.0}
    assert p.rest[:2] == ["--other", "-1e-3"]
    assert p.rest[-2:] == ["--lr", "-1e-4"]


def test_an_option_without_its_value_is_named_once(given, capsys):
    given(["--lr"])
    with pytest.raises(SystemExit, match="2"):
        rc.Params(lr=0.1)
    assert "argument --lr: expected one argument" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(given, monkeypatch):
    monkeypatch.setenv("RINGCOMM_PARAMS", "/nowhere/p.toml")
    with pytest.raises(FileNotFoundError, match=r"/nowhere/p.toml, which RINGCOMM_PARAMS names"):
        rc.Params(lr=0.1)


def test_a_file_that_is_no_text_is_named(given, monkeypatch, tmp_path):
    (tmp_path / "p.toml").write_bytes(b"lr = 0.1 # \xff\n")
    monkeypatch.setenv("RINGCOMM_PARAMS", str(tmp_path / "p.toml"))
    with pytest.raises(rc.ConfigError, match=r"p\.toml: 'utf-8' codec can't decode"):
        rc.Params(lr=0.1)


def test_a_default_has_one_of_four_types(given):
    for wrong in (None, [1], rc):
        with pytest.raises(TypeError, match="a default is an int, float, bool or str"):
            rc.Params(x=wrong)


def test_commands_change_live_parameters_and_no_others(given):
    gc.collect()
    p = rc.Params(speed=rc.live(1), width=rc.live("a"), size=2)
    PROGRAM.checked("speed", "3")()
    PROGRAM.checked("width", "b")()
    assert dict(p) == {"speed": 3, "width": "b", "size": 2}
    for name, text in (("size", "3"), ("speed", "fast"), ("__class__", "x"), ("read", "x")):
        with pytest.raises(ValueError, match=f"{name} "):
            PROGRAM.checked(name, text)
    assert p.size == 2


def test_a_refusal_names_what_can_be_set_also_the_rate_of_an_optimizer(monkeypatch):
    monkeypatch.setattr(PROGRAM, "parameters", [])
    monkeypatch.setattr(PROGRAM, "rates", [])
    with pytest.raises(ValueError, match=r"there is none, see rc\.Params"):
        PROGRAM.checked("foo", "3")
    PROGRAM.add_rate(lambda: lambda rate: None)
    PROGRAM.checked("lr", "0.1")()
    with pytest.raises(ValueError, match=r"those are lr \(of the optimizers\)$"):
        PROGRAM.checked("foo", "3")
