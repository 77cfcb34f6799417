from __future__ import annotations

import pytest

from flagscale.config.secrets import HIDDEN, is_secret, is_secret_name, redact, without_passwords


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "DB_PASSWORD",
        "MY_SECRET_THING",
        "GITHUB_TOKEN",
        "TOKEN",
        "SSH_PRIVATE_KEY",
        "hf_token",
        "apiKey",
        "SERVICE_CREDENTIALS",
        "wandb-api-key",
        "X_KEY",
        "KEY_PASSPHRASE",
        "DB_PASS",
        "SMTP_PWD",
        "GIT_PAT",
        "GITHUB_PAT_READ",
        "smtpPass",
    ],
)
def test_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_path",
        "tokenizer_type",
        "tokens_per_second",
        "eod_token",
        "pad_token",
        "calculate_per_token_loss",
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "KEYBOARD",
        "apply_query_key_layer_scaling",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_DEBUG",
        "json_keys",
        "SSH_AUTH_SOCK",
        "MONKEY",
        "PUBLIC_KEY",
        "PATH",
        "PWD",
        "OLDPWD",
        "BYPASS",
        "PATTERN",
        "forward_pass",
        "num_passes",
        "",
        "_",
    ],
)
def test_not_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_redact() -> None:
    data = {
        "envs": {"HF_TOKEN": "abc", "A": "1", "EMPTY_TOKEN": "", "NONE_KEY": None},
        "list": [{"password": "x"}],
        "secrets": {"a": "b", "c": ["d"]},
    }
    assert redact(data) == {
        "envs": {"HF_TOKEN": HIDDEN, "A": "1", "EMPTY_TOKEN": "", "NONE_KEY": None},
        "list": [{"password": HIDDEN}],
        "secrets": {"a": HIDDEN, "c": [HIDDEN]},
    }
    assert data["envs"]["HF_TOKEN"] == "abc"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param("http://me:pw@proxy:3128", "http://me:<hidden>@proxy:3128", id="proxy"),
        pytest.param("redis://:pw@h/0", "redis://:<hidden>@h/0", id="no-user"),
        pytest.param("postgres+x://u:p@ss@h", "postgres+x://u:<hidden>@h", id="at-sign"),
        pytest.param("a http://u:p@h b s://v:q@i", "a http://u:<hidden>@h b s://v:<hidden>@i"),
        pytest.param("http://proxy:3128", None, id="port"),
        pytest.param("http://me@proxy:3128", None, id="user"),
        pytest.param("http://h:80/a@b", None, id="path"),
        pytest.param("http://h:80?to=a@b", None, id="query"),
        pytest.param("me:pw@host", None, id="no-scheme"),
        pytest.param("", None, id="empty"),
    ],
)
def test_passwords_of_addresses(value: str, expected: str | None) -> None:
    assert is_secret("HTTPS_PROXY", value) is (expected is not None)
    assert is_secret("data_path", ["x", value]) is (expected is not None)
    assert without_passwords(value) == (value if expected is None else expected)
    assert redact({"a": [value]}) == {"a": [value if expected is None else expected]}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("DB_PASS", "x", True), ("DB_PASS", "", False), ("DB_PASS", None, False), ("A", "x", False)],
)
def test_a_secret_needs_a_value(name: str, value: str | None, expected: bool) -> None:
    assert is_secret(name, value) is expected
