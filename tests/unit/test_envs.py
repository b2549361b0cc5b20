# SPDX-License-Identifier: Apache-2.0
"""A typing error in a deployment's environment must not pass in silence."""

import pytest

from moe_backend import envs


def test_defaults_refuse_to_fall_back():
    settings = envs.load({})
    assert settings.fallback == "refuse" and settings.balance is False


def test_values_are_read():
    settings = envs.load(
        {"MOE_BACKEND_FALLBACK": "allow", "MOE_BACKEND_EP_TIMEOUT_S": "5", "X": "1"}
    )
    assert settings.fallback == "allow" and settings.ep_timeout_s == 5.0


def test_unknown_variable_is_refused_with_the_list():
    with pytest.raises(
        envs.SettingsError, match="MOE_BACKEND_FALBACK.*Known.*MOE_BACKEND_FALLBACK"
    ):
        envs.load({"MOE_BACKEND_FALBACK": "allow"})


@pytest.mark.parametrize(
    "name, value", [("FALLBACK", "maybe"), ("EP", "mpi"), ("EP_TIMEOUT_S", "-1"), ("BALANCE", "x")]
)
def test_illegal_value_names_variable_and_value(name, value):
    with pytest.raises(envs.SettingsError, match=f"MOE_BACKEND_{name}='{value}'"):
        envs.load({f"MOE_BACKEND_{name}": value})
