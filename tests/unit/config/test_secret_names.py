from __future__ import annotations

import pytest

from flagscale.config.secrets import HIDDEN, is_secret_name, redact


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
