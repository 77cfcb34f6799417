from __future__ import annotations

import pytest

from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.config.secrets import (
    HIDDEN,
    hide_passwords,
    is_secret,
    is_secret_name,
    redact,
    redact_overrides,
)


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
        "SLACK_HOOK",
        "teams_hook_url",
        "smtpPass",
        "SSHPASS",
        "PGPASSWORD",
        "DBPWD",
        "JWT",
        "MY_JWT",
        "BEARER",
        "AUTH",
        "MYAUTH",
        "NPM_AUTH",
        "HTTP_AUTHORIZATION",
        "PRIVKEY",
        "SSHKEY",
        "MYSECRET",
        "HFTOKEN",
        "SESSION_COOKIE",
        "sessionCookies",
    ],
)
def test_secret_name_is_detected(name: str) -> None:
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
        "SSH_ASKPASS",
        "COMPASS",
        "AUTHOR",
        "GIT_AUTHOR_NAME",
        "AUTH_TYPE",
        "AUTH_URL",
        "XAUTHORITY",
        "USE_AUTH",
        "JWT_ALGORITHM",
        "ENABLE_JWT",
        "HOTKEY",
        "PUBKEY",
        "eodtoken",
        "SUBTOKEN",
        "PATTERN",
        "forward_pass",
        "num_passes",
        "COOKIE_JAR",
        "DISABLE_COOKIES",
        "",
        "_",
    ],
)
def test_ordinary_name_is_not_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_no_training_argument_is_secret() -> None:
    assert [name for name in vars(parse_arguments([])) if is_secret_name(name)] == []


def test_redaction_is_idempotent() -> None:
    redacted = hide_passwords("http://u:p@h?token=x;y=1&sig=z")
    assert redacted == f"http://u:{HIDDEN}@h?token={HIDDEN};y=1&sig={HIDDEN}"
    assert hide_passwords(redacted) == redacted


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["x" * 1_000_000, "a.b-" * 250_000], ids=["word", "words"])
def test_long_value_is_searched_in_linear_time(text: str) -> None:
    assert hide_passwords(text) == text


def test_redact_replaces_secret_values() -> None:
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
        pytest.param("az://a/b?sig=a%2Bb=", "az://a/b?sig=<hidden>", id="signature"),
        pytest.param("http://h?a=1&token=x&b=2#c", "http://h?a=1&token=<hidden>&b=2#c", id="token"),
        pytest.param(
            "s3://b/o?X-Amz-Date=1&X-Amz-Credential=k/1&X-Amz-Signature=ab",
            "s3://b/o?X-Amz-Date=1&X-Amz-Credential=<hidden>&X-Amz-Signature=<hidden>",
            id="signed",
        ),
        pytest.param("http://h?a=1;key=x;y", "http://h?a=1;key=<hidden>", id="semicolons"),
        pytest.param("http://h/#access_token=x", "http://h/#access_token=<hidden>", id="fragment"),
        pytest.param(
            "http://u:p@h?sig=x http://i?password=y z",
            "http://u:<hidden>@h?sig=<hidden> http://i?password=<hidden> z",
            id="both",
        ),
        pytest.param(
            "curl -H 'Authorization: Bearer a.b-c' -H 'authorization:x'",
            "curl -H 'Authorization: Bearer <hidden>' -H 'authorization:<hidden>'",
            id="headers",
        ),
        pytest.param("http://h?page=2&author=me&design=x", None, id="plain-query"),
        pytest.param("http://h?token=&next_token=5", None, id="no-token"),
        pytest.param("http://h/sig=a/token=b", None, id="no-query"),
        pytest.param("what?token=x", None, id="query-of-no-address"),
        pytest.param("", None, id="empty"),
        pytest.param(
            "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=a+b/c==;EndpointSuffix=x",
            "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=<hidden>;EndpointSuffix=x",
            id="azure-storage",
        ),
        pytest.param(
            "Endpoint=sb://h/;SharedAccessKeyType=x;SharedAccessKey=k=",
            "Endpoint=sb://h/;SharedAccessKeyType=<hidden>;SharedAccessKey=<hidden>",
            id="azure-bus",
        ),
        pytest.param(
            "BlobEndpoint=h;SharedAccessSignature=sv=1&sig=x",
            "BlobEndpoint=h;SharedAccessSignature=<hidden>",
            id="azure-signature",
        ),
        pytest.param(
            "Server=h;User Id=me;Password=my own word;Pwd = 'a;b';Encrypt=yes",
            "Server=h;User Id=me;Password=<hidden>;Pwd = <hidden>;Encrypt=yes",
            id="sql-server",
        ),
        pytest.param(
            "host=h user=me password=x dbname=d",
            "host=h user=me password=<hidden> dbname=d",
            id="pg",
        ),
        pytest.param("--api-key=x --verbose=1", "--api-key=<hidden> --verbose=1", id="options"),
        pytest.param(
            "export A=1\nexport HF_TOKEN=x\nexport B=2",
            "export A=1\nexport HF_TOKEN=<hidden>\nexport B=2",
            id="lines",
        ),
        pytest.param("Server=h;Password=;Encrypt=yes", None, id="no-password"),
        pytest.param("eos_token=</s> max_tokens=5;a=b", None, id="plain-pairs"),
        pytest.param("/data/key=5/token=7", None, id="path-of-pairs"),
        pytest.param("expandable_segments:True,max_split_size_mb=1", None, id="settings"),
    ],
)
def test_password_in_url_is_redacted(value: str, expected: str | None) -> None:
    assert is_secret("HTTPS_PROXY", value) is (expected is not None)
    assert is_secret("data_path", ["x", value]) is (expected is not None)
    assert hide_passwords(value) == (value if expected is None else expected)
    assert redact({"a": [value]}) == {"a": [value if expected is None else expected]}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        pytest.param("a.b=1", None, id="plain"),
        pytest.param("~a.HF_TOKEN", None, id="no-value"),
        pytest.param(
            "experiment.envs.HF_TOKEN=x y", "experiment.envs.HF_TOKEN=<hidden>", id="name"
        ),
        pytest.param("+my.secrets.a=x", "+my.secrets.a=<hidden>", id="section"),
        pytest.param("a=http://u:p@h", "a=http://u:<hidden>@h", id="address"),
        pytest.param("e={SSHPASS: x, A: 'b c'}", 'e={"SSHPASS": "<hidden>", "A": "b c"}', id="map"),
        pytest.param("e={a:{PGPASSWORD:'x'}}", 'e={"a": {"PGPASSWORD": "<hidden>"}}', id="deep"),
        pytest.param("++e=[{token:x},1]", '++e=[{"token": "<hidden>"}, 1]', id="list"),
        pytest.param("e={A: 1, B: [x,  y]}", None, id="harmless-map"),
        pytest.param("e={SSHPASS: x", "e=<hidden>", id="unreadable"),
    ],
)
def test_secret_override_is_redacted(override: str, expected: str | None) -> None:
    assert redact_overrides([override]) == [override if expected is None else expected]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("DB_PASS", "x", True), ("DB_PASS", "", False), ("DB_PASS", None, False), ("A", "x", False)],
)
def test_empty_value_is_not_secret(name: str, value: str | None, expected: bool) -> None:
    assert is_secret(name, value) is expected
