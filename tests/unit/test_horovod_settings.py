"""Horovod's variables, which scripts and job files set."""

import pytest

from ringcomm.config import horovod_log_level, horovod_settings
from ringcomm.errors import ConfigError


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        ({"HOROVOD_FUSION_THRESHOLD": "33554432"}, {"fusion_mib": 32.0}),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, {"fusion_mib": 0.0}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "7"}, {"stall_warning_s": 7.0}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, {"stall_warning_s": 0.0}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"}, {"timeout_s": 90.0}),
        ({"HOROVOD_TIMELINE": "/tmp/t.json"}, {"timeline": "/tmp/t"}),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, {"timeline": ""}),
        ({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_CACHE_CAPACITY": "0"}, {}),
        ({"HOROVOD_FUSION_THRESHOLD": "0", "RINGCOMM_FUSION_MIB": "3"}, {"fusion_mib": 3.0}),
        ({"HOROVOD_TIMELINE": "a", "RINGCOMM_TIMELINE": "b"}, {"timeline": "b"}),
    ],
)
def test_variables_that_mean_a_setting_set_it_unless_ours_does(environment, expected):
    found, default = horovod_settings(environment), horovod_settings({})
    changed = {k: v for k, v in vars(found).items() if v != vars(default)[k]}
    assert changed == {k: v for k, v in expected.items() if v != vars(default)[k]}


@pytest.mark.parametrize("value", ["-1", "many", "nan"])
def test_a_number_that_is_none_is_refused_by_its_name(value):
    with pytest.raises(ConfigError, match=f"HOROVOD_FUSION_THRESHOLD is '{value}'"):
        horovod_settings({"HOROVOD_FUSION_THRESHOLD": value})


@pytest.mark.parametrize(
    ("text", "level"),
    [("", None), ("trace", "DEBUG"), ("info", "INFO"), ("FATAL", "CRITICAL"), ("Error", "ERROR")],
)
def test_the_log_level_is_translated(text, level):
    assert horovod_log_level({"HOROVOD_LOG_LEVEL": text}) == level


def test_a_log_level_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="HOROVOD_LOG_LEVEL is 'LOUD'"):
        horovod_log_level({"HOROVOD_LOG_LEVEL": "loud"})
