import pytest

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.qnn.options import OPTIONS, check_options

GOOD = {"backend_path": "/opt/libQnnHtp.so", "soc_model": "60"}


def test_options_that_qnn_knows_pass_as_they_are():
    options = GOOD | {"htp_performance_mode": "burst", "vtcm_mb": "8", "soc_model": "60,69"}
    assert check_options(options) == options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"htp_perfomance_mode": "burst"}, ["'htp_perfomance_mode'", "htp_performance_mode"]),
        ({"nonsense": "1"}, ["'nonsense'", "leave it out"]),
        ({"htp_performance_mode": "turbo"}, ["'turbo'", "burst", "balanced"]),
        ({"enable_htp_fp16_precision": "true"}, ["'true'", "0, 1"]),
        ({"soc_model": "x-elite"}, ["soc_model", "'x-elite'", "a number"]),
        ({"soc_model": "0"}, ["soc_model", "'0'"]),
        ({"soc_model": "60,"}, ["soc_model"]),
        ({"vtcm_mb": "-1"}, ["vtcm_mb", "'-1'"]),
        ({"htp_arch": "66"}, ["htp_arch", "'66'", "68"]),
        ({"profiling_file_path": ""}, ["profiling_file_path", "some text"]),
    ],
)
def test_an_option_that_qnn_would_ignore_is_an_error_in_one_line(options, words):
    with pytest.raises(ConfigError) as caught:
        check_options(GOOD | options)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_the_chip_must_always_be_named():
    with pytest.raises(ConfigError, match="soc_model is missing"):
        check_options({"backend_path": "x"})


def test_backends_are_named_by_their_path_only():
    """`backend_path` and `backend_type` exclude each other, and we always give the path."""
    assert "backend_type" not in OPTIONS
